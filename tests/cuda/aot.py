"""Compiles kernels for devices that are not there.

A launch under `device(capability)` goes Triton's whole way, with the very arguments,
types and hints of the product, and stops where the driver would start the kernel. The
tensors may lie on the CPU: only their addresses and types matter.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

# The most shared memory of a block, in bytes, as the CUDA programming guide has it.
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


@dataclass(frozen=True)
class Compiled:
    """A kernel for one device."""

    name: str
    ptx: str
    sass: str
    registers: int
    # Bytes per thread that did not fit into registers.
    stack: int
    local: int
    shared: int

    def accesses(self, kind: str) -> list[int]:
        """Bits per thread of every global "ld" or "st" in the PTX, in order."""
        found = re.findall(rf"\b{kind}\.global[.\w:]*?(?:\.v(\d))?\.b(\d+)", self.ptx)
        return [int(vector or 1) * int(bits) for vector, bits in found]


def compiled(launch: Callable[[], object], capability: int) -> list[Compiled]:
    """The kernels that ``launch`` launches on a device of that capability, in order."""
    with device(capability) as launched:
        launch()
    return [_read(kernel) for kernel in launched]


@contextmanager
def device(capability: int) -> Iterator[list[Any]]:
    """Pretend to have a device; yields the list of the kernels launched on it."""
    launched: list[Any] = []
    before, run = driver._active, JITFunction.run

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **kwargs)
        launched.append(kernel)
        return kernel

    driver.set_active(_Absent(capability))
    JITFunction.run = record
    try:
        yield launched
    finally:
        JITFunction.run = run
        driver.set_active(before)


class _Absent:
    """The part of Triton's driver that a launch needs."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self.utils = self

    def get_current_device(self) -> int:
        # Triton keeps what it compiled per device number: one for each capability.
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[device]}

    def load_binary(self, *args: Any) -> tuple[None, None, int, int, int]:
        return None, None, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *args: None


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@functools.cache
def _read(kernel: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output(knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        sass = _output(knobs.nvidia.nvdisasm.path, "-c", file.name)
    # Of the kernel: the line after its name. The first ones are of the whole file.
    own = usage[usage.index(f"Function {kernel.name}") :]
    used = {name: int(size) for name, size in re.findall(r"(\w+):(\d+)", own)}
    return Compiled(
        name=kernel.name,
        ptx=kernel.asm["ptx"],
        sass=sass,
        registers=used["REG"],
        stack=used["STACK"],
        local=used["LOCAL"],
        shared=kernel.metadata.shared,
    )
