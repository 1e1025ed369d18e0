"""T1: full-precision rows in host memory, and how much host memory there is.

The pool is layer-first: one [host_pages, page elements] tensor per (layer, buffer), of
exactly the size asked for. Its memory is touched at construction, so too large a pool
is one clear error at start-up and never a late one.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import psutil
import torch

from sglang_tiered.memory.layout import PoolLayout

# Left to the rest of the process and to the kernel: a pool that takes the last free
# byte passes the check and then gets the server killed by the first activation.
RESERVE_BYTES = 256 << 20


class HostPool:
    """Host rows of every layer and buffer.

    `ranks` processes of this machine each build a pool of this size; for a CUDA
    `device` it is page-locked. Raises MemoryError, naming --tiered-host-gb and the
    bytes asked and free, when they do not fit together.
    """

    def __init__(
        self, layout: PoolLayout, ranks: int = 1, device: str | torch.device = "cpu"
    ) -> None:
        self.layout = layout
        self.nbytes = layout.host_pages * layout.page_size * layout.bytes_per_token
        check_host_budget(self.nbytes, ranks, free_host_bytes())
        self._pages: dict[tuple[int, str], torch.Tensor] = {}
        for layer, buffers in enumerate(layout.layers):
            for buffer in buffers:
                size = layout.host_pages * layout.page_bytes(layer, buffer.name)
                rows = host_memory(size, torch.device(device)).view(buffer.dtype)
                self._pages[layer, buffer.name] = rows.view(layout.host_pages, -1)

    def pages(self, layer: int, name: str) -> torch.Tensor:
        """[host_pages, page_size * row_width], contiguous; always the same object."""
        return self._pages[layer, name]


def host_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] of host memory for copies from and to `device`: touched, zero, and
    page-locked for CUDA. Raises MemoryError when it cannot be had."""
    if device.type == "cuda":
        # Here: a machine without CUDA need not have its bindings.
        from sglang_tiered.memory.pinned import pinned

        return pinned(nbytes, device)
    # numpy asks the kernel for huge pages where it may; gathering rows at random from a
    # large pool is bound by address translation without them.
    raw = np.zeros(nbytes, np.uint8)
    raw[:: os.sysconf("SC_PAGESIZE")] = 0
    return torch.from_numpy(raw)


def check_host_budget(nbytes: int, ranks: int, free_bytes: int) -> None:
    """Raise MemoryError unless `ranks` pools fit in `free_bytes` less a reserve."""
    asked = nbytes * ranks
    if asked + RESERVE_BYTES > free_bytes:
        raise MemoryError(
            f"--tiered-host-gb: {ranks} rank(s) x {_gib(nbytes)} = {_gib(asked)} of "
            f"host memory asked, {_gib(free_bytes)} free ({_gib(RESERVE_BYTES)} of it "
            "kept back): lower --tiered-host-gb"
        )


def free_host_bytes() -> int:
    """Bytes this process can still allocate, on this machine and in its cgroup."""
    available = int(psutil.virtual_memory().available)
    limited = cgroup_free_bytes(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return available if limited is None else min(available, limited)


def cgroup_free_bytes(membership: Path, root: Path) -> int | None:
    """Bytes left under the tightest limit of a cgroup (v1 or v2) and its parents.

    `membership` is the process's cgroup file and `root` the mounted hierarchy. None
    without a limit.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    left: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, used = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, used = (
                root / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            free = _group_free(folder, limit, used)
            if free is not None:
                left.append(free)
            if folder == top:
                break
    return min(left, default=None)


def _group_free(folder: Path, limit: str, used: str) -> int | None:
    """Limit minus use of one cgroup, idle page cache counted as free, if it has one."""
    try:
        most = (folder / limit).read_text().strip()
        now = int((folder / used).read_text())
        stat = (folder / "memory.stat").read_text()
    except OSError:
        return None
    if most == "max":
        return None
    cache = next(
        (
            int(row.split()[1])
            for row in stat.splitlines()
            if row.startswith("inactive_file ")
        ),
        0,
    )
    return max(0, int(most) - now + cache)


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.3f} GiB"
