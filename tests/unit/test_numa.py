"""memory/numa.py: which CPUs are near a device, and running on them."""

import os
from pathlib import Path

import pytest

from sglang_tiered.memory.numa import cpus_near, running_on

DEVICE = "0000:3b:00.0"


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A machine of two nodes with a device on the second."""
    device = tmp_path / "bus/pci/devices" / DEVICE
    node = tmp_path / "devices/system/node/node1"
    device.mkdir(parents=True)
    node.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    (node / "cpulist").write_text("4-6,12\n")
    return tmp_path


def test_the_cpus_of_the_device_s_node(system: Path) -> None:
    assert cpus_near(DEVICE, system) == {4, 5, 6, 12}


def test_cuda_writes_addresses_in_capitals(system: Path) -> None:
    assert cpus_near(DEVICE.upper(), system) == {4, 5, 6, 12}


def test_a_machine_that_does_not_say_has_none(system: Path) -> None:
    (system / "bus/pci/devices" / DEVICE / "numa_node").write_text("-1\n")
    assert cpus_near(DEVICE, system) == frozenset()
    assert cpus_near("0000:00:00.0", system) == frozenset()


def test_the_thread_runs_there_and_then_where_it_did() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    with running_on(frozenset({one})):
        assert os.sched_getaffinity(0) == {one}
    assert os.sched_getaffinity(0) == before


def test_cpus_that_it_may_not_use_change_nothing() -> None:
    before = os.sched_getaffinity(0)
    with running_on(frozenset({10_000})):
        assert os.sched_getaffinity(0) == before
