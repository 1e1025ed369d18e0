"""Builds CUDA memory over the emulated driver and tells what it saw, as JSON.

`python -m tests.cuda.memory_job LIBRARY CASE ...`, with the emulated driver first on
LD_LIBRARY_PATH: it must be the one that `cuda.bindings` finds. Tensors are made over
the emulated addresses on the CPU; everything else is the real thing.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from typing import Any

import numpy as np
import torch

from sglang_tiered.memory import pinned, vmm
from sglang_tiered.memory.host_pool import HostPool
from sglang_tiered.memory.layout import PoolLayout, RowBuffer
from sglang_tiered.memory.vmm import VmmBacking
from tests.cuda.emulated import NOTHING_ALIVE, PIECE_BYTES

DEVICE = torch.device("cuda", 0)

KV = (RowBuffer("k", (4, 64), torch.bfloat16), RowBuffer("v", (4, 64), torch.bfloat16))
LATENT = (RowBuffer("latent", (576,), torch.bfloat16),)

driver = ctypes.CDLL(sys.argv[1])


def alive() -> dict[str, int]:
    gc.collect()
    counts = (ctypes.c_size_t * len(NOTHING_ALIVE))()
    driver.emulated_alive(counts)
    return dict(zip(NOTHING_ALIVE, counts, strict=True))


def cpu_tensor(region: Any, device: torch.device) -> torch.Tensor:
    """Keeps the region alive, as a CUDA tensor made from it does."""
    array = np.asarray(_OnCpu(region))
    return torch.from_numpy(array)


class _OnCpu:
    def __init__(self, region: Any) -> None:
        self.region = region
        self.__array_interface__ = region.__cuda_array_interface__


def layout(buffers: tuple[RowBuffer, ...], layers: int, page_size: int) -> PoolLayout:
    return PoolLayout(
        page_size, 5000 // page_size, 3000 // page_size, 9, (buffers,) * layers
    )


def aliases(backing: VmmBacking, name: str) -> list[list[int]]:
    """Per layer: which layers see what is written to the last row of its window."""
    count = backing.layout.num_layers
    seen = []
    for layer in range(count):
        for other in range(count):
            backing.buffer(other, name)[-1] = 0
        backing.buffer(layer, name)[-1] = layer + 1
        seen.append(
            [
                other
                for other in range(count)
                if bool((backing.buffer(other, name)[-1] == layer + 1).all())
            ]
        )
    return seen


def build(
    buffers: tuple[RowBuffer, ...], layers: int, page_size: int
) -> dict[str, Any]:
    shape = layout(buffers, layers, page_size)
    backing = VmmBacking(shape, DEVICE)
    name = buffers[-1].name
    t0 = [
        backing.buffer(layer, name)[: backing.window_base * page_size]
        for layer in range(layers)
    ]
    zero = not any(bool(rows.any()) for rows in t0)
    for layer, rows in enumerate(t0):
        rows.fill_(layer + 1)
    told: dict[str, Any] = {
        "zero": zero,
        "buffers": len(buffers),
        "aliases": aliases(backing, name),
        "own_t0": [float(rows.float().mean()) for rows in t0],
        "contiguous": all(
            backing.buffer(layer, name).is_contiguous() for layer in range(layers)
        ),
        "window_offset": backing.window_base * shape.page_bytes(0, name),
        "needed": sum(
            shape.page_bytes(layer, buffer.name)
            * (backing.window_base + (shape.window_pages if layer < 2 else 0))
            for layer in range(layers)
            for buffer in buffers
        ),
        "mapped": backing.mapped_bytes(),
        "built": alive(),
    }
    kept = backing.buffer(0, name)
    del t0, rows
    backing.close()
    told["closed"] = alive()
    told["kept"] = float(kept[1].float().mean())
    del kept
    told["released"] = alive()
    return told


def fails() -> dict[str, Any]:
    try:
        VmmBacking(layout(KV, 4, 1), DEVICE)
    except (MemoryError, OSError) as error:
        told = {"error": type(error).__name__, "message": str(error)}
    return told | {"alive": alive()}


def host() -> dict[str, Any]:
    """A host pool of 9 pages; each of its buffers is locked in pieces."""
    shape = PoolLayout(1, 1, 1, 9000, (KV,) * 2)
    pool = HostPool(shape, device=DEVICE)
    rows = pool.pages(1, "v")
    told: dict[str, Any] = {
        "zero": not bool(rows.any()),
        "shape": list(rows.shape),
        "needed": pool.nbytes,
        "buffers": 4,
        "built": alive(),
    }
    rows[-1] = 3
    del pool
    told["kept"] = alive()
    told["value"] = float(rows[-1].float().mean())
    del rows
    told["released"] = alive()
    return told


def host_fails() -> dict[str, Any]:
    try:
        HostPool(PoolLayout(1, 1, 1, 9000, (KV,) * 2), device=DEVICE)
    except MemoryError as error:
        told = {"message": str(error)}
    return told | {"alive": alive()}


def main() -> None:
    vmm._tensor = cpu_tensor
    pinned.PIECE_BYTES = PIECE_BYTES
    cases = {
        "kv": lambda: build(KV, 5, 1),
        "pages": lambda: build(KV, 4, 16),
        "latent": lambda: build(LATENT, 4, 1),
        "fails": fails,
        "host": host,
        "host_fails": host_fails,
    }
    print(json.dumps({name: cases[name]() for name in sys.argv[2:]}))


if __name__ == "__main__":
    main()
