"""Host memory near a GPU: the kernel puts a page where it is first touched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SYSTEM = Path("/sys")


def cpus_near(pci_address: str, system: Path = _SYSTEM) -> frozenset[int]:
    """The CPUs of the NUMA node that the PCI device (``0000:3b:00.0``) hangs on; empty
    if the machine does not say. ``system``: where sysfs is mounted."""
    device = system / "bus/pci/devices" / pci_address.lower()
    try:
        node = int((device / "numa_node").read_text())
        listed = (system / f"devices/system/node/node{node}/cpulist").read_text()
    except (OSError, ValueError):
        return frozenset()
    return frozenset(_listed(listed.strip()))


@contextmanager
def running_on(cpus: frozenset[int]) -> Iterator[None]:
    """This thread runs on those of ``cpus`` that it may use, or wherever it does if
    there are none."""
    before = os.sched_getaffinity(0)
    wanted = before & cpus
    if not wanted:
        yield
        return
    os.sched_setaffinity(0, wanted)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _listed(ranges: str) -> Iterator[int]:
    """The numbers of a list like ``0-3,8``."""
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
