"""Device memory of a pool: [sink | T0 | padding | window] per layer and buffer.

The windows of all layers of one parity are the same memory, mapped into the tail of
each of those layers' buffers, so the device holds T0 x layers + 2 x window row-layers
instead of (T0 + window) x layers. `MemfdBacking` does this on a CPU and `VmmBacking`
(vmm.py) on CUDA; `PlainBacking` gives every layer a window of its own where memory
cannot be aliased.
"""

from __future__ import annotations

import abc
import ctypes
import errno
import logging
import math
import os
import weakref

import numpy as np
import torch

from sglang_tiered.memory.host_pool import RESERVE_BYTES, free_host_bytes
from sglang_tiered.memory.layout import PoolLayout

logger = logging.getLogger(__name__)

# Linux's values; Python's mmap module can map neither at a fixed address nor into a
# reservation.
_PROT_NONE = 0x0
_PROT_READ_WRITE = 0x3
_MAP_SHARED = 0x1
_MAP_PRIVATE = 0x2
_MAP_FIXED = 0x10
_MAP_ANONYMOUS = 0x20
_MAP_NORESERVE = 0x4000
_MAP_POPULATE = 0x8000
_MAP_FAILED = ctypes.c_void_p(-1).value


class Backing(abc.ABC):
    """Device buffers of every layer, addressed by physical page.

    Page 0 is the sink that padding writes to, pages 1 .. t0_pages are T0, and the
    window is `window_base` .. `window_base + window_pages - 1`. Pages between T0 and
    the window belong to nobody. After `close` the accessors raise RuntimeError; tensors
    handed out before stay valid for as long as they are referenced.
    """

    def __init__(self, layout: PoolLayout, window_base: int) -> None:
        self.layout = layout
        self.window_base = window_base
        self.total_pages = window_base + layout.window_pages
        self._buffers: dict[tuple[int, str], torch.Tensor] = {}
        self._pages: dict[tuple[int, str], torch.Tensor] = {}
        self._closed = False

    def buffer(self, layer: int, name: str) -> torch.Tensor:
        """[total_pages * page_size, *row shape], contiguous; always the same object."""
        self._check_open()
        return self._buffers[layer, name]

    def pages(self, layer: int, name: str) -> torch.Tensor:
        """`buffer` as [total_pages, page_size * row_width]; always the same object."""
        self._check_open()
        return self._pages[layer, name]

    @abc.abstractmethod
    def mapped_bytes(self) -> int:
        """Bytes of device memory that are really held, 0 once closed."""

    def close(self) -> None:
        """Give the memory back once nobody references a tensor of it. Idempotent."""
        self._closed = True
        self._buffers.clear()
        self._pages.clear()

    def _add(self, layer: int, name: str, raw: torch.Tensor) -> None:
        """Publish a byte tensor of exactly total_pages pages as a layer's buffer."""
        row = self.layout.row_buffer(layer, name)
        rows = raw.view(row.dtype).view(-1, *row.shape)
        self._buffers[layer, name] = rows
        self._pages[layer, name] = rows.view(self.total_pages, -1)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the pool's device memory is closed")


class MemfdBacking(Backing):
    """CPU memory with one window per parity, mapped into each of its layers.

    All of it is allocated at construction: raises MemoryError, naming the flags that
    size it, when there is too little, and OSError when the system has no memory files.
    """

    def __init__(self, layout: PoolLayout) -> None:
        super().__init__(layout, aligned_window_base(layout, os.sysconf("SC_PAGESIZE")))
        self._files: list[int] = []
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory files")
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        layout = self.layout
        # (layer, buffer name) -> bytes before the window, bytes of the window.
        sizes = {
            (layer, buffer.name): self._sizes(layer, buffer.name)
            for layer, buffers in enumerate(layout.layers)
            for buffer in buffers
        }
        asked = sum(
            head + (tail if layer < 2 else 0)
            for (layer, _), (head, tail) in sizes.items()
        )
        free = free_host_bytes()
        if asked + RESERVE_BYTES > free:
            raise _too_little(asked, free)
        windows = {
            (layer, name): self._file(f"window-{layer}-{name}", tail, asked)
            for (layer, name), (_, tail) in sizes.items()
            if layer < 2
        }
        for (layer, name), (head, tail) in sizes.items():
            region = _Region(head + tail)
            region.map(self._file(f"t0-{layer}-{name}", head, asked), 0, head)
            region.map(windows[layer % 2, name], head, tail)
            used = self.total_pages * layout.page_bytes(layer, name)
            self._add(layer, name, torch.from_numpy(np.asarray(region)[:used]))

    def _sizes(self, layer: int, name: str) -> tuple[int, int]:
        page_bytes = self.layout.page_bytes(layer, name)
        window = self.layout.window_pages * page_bytes
        return self.window_base * page_bytes, round_up(
            window, os.sysconf("SC_PAGESIZE")
        )

    def _file(self, name: str, size: int, asked: int) -> int:
        """A memory file whose pages all exist: touching them can never fail later."""
        file = os.memfd_create(f"sglang-tiered-{name}")
        self._files.append(file)
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise _too_little(asked, free_host_bytes()) from error
            raise
        return file

    def mapped_bytes(self) -> int:
        """The kernel's own count of the memory files' blocks."""
        return sum(os.fstat(file).st_blocks * 512 for file in self._files)

    def close(self) -> None:
        super().close()
        while self._files:
            os.close(self._files.pop())


class PlainBacking(Backing):
    """Ordinary tensors, every layer with a window of its own."""

    def __init__(self, layout: PoolLayout, device: str | torch.device = "cpu") -> None:
        super().__init__(layout, 1 + layout.t0_pages)
        for layer, buffers in enumerate(layout.layers):
            for buffer in buffers:
                size = self.total_pages * layout.page_bytes(layer, buffer.name)
                raw = torch.zeros(size, dtype=torch.uint8, device=device)
                self._add(layer, buffer.name, raw)

    def mapped_bytes(self) -> int:
        return sum(
            buffer.untyped_storage().nbytes() for buffer in self._buffers.values()
        )


def make_backing(layout: PoolLayout, device: str | torch.device) -> Backing:
    """The best backing for `device`; a plain one is logged with what it costs.

    Raises RuntimeError for a device other than CPU and CUDA and MemoryError when
    memory is short.
    """
    device = torch.device(device)
    try:
        if device.type == "cpu":
            return MemfdBacking(layout)
        if device.type == "cuda":
            # Here: a machine without CUDA need not have its bindings.
            from sglang_tiered.memory.vmm import VmmBacking

            return VmmBacking(layout, device)
    except OSError as error:
        unshared = sum(
            layout.window_pages * layout.page_bytes(layer, buffer.name)
            for layer, buffers in enumerate(layout.layers[2:], start=2)
            for buffer in buffers
        )
        logger.warning(
            "aliased windows are unavailable (%s): every layer gets a window of its "
            "own, %d bytes more",
            error,
            unshared,
        )
        return PlainBacking(layout, device)
    raise RuntimeError(
        f"no tiered pool on device {device.type!r}; start the server with --device cpu"
    )


def aligned_window_base(layout: PoolLayout, granularity: int) -> int:
    """First page after T0 that starts on a `granularity` boundary in every buffer."""
    step = 1
    for layer, buffers in enumerate(layout.layers[:2]):
        for buffer in buffers:
            page_bytes = layout.page_bytes(layer, buffer.name)
            step = math.lcm(step, granularity // math.gcd(granularity, page_bytes))
    return round_up(1 + layout.t0_pages, step)


def round_up(value: int, step: int) -> int:
    """The least multiple of `step` that is not below `value`."""
    return -(-value // step) * step


class _Region:
    """A reserved range of addresses that memory files are mapped into.

    numpy arrays made from it (and torch tensors made from those) hold a reference to
    it, and the range is unmapped when the last of them is gone: a tensor can never
    point at unmapped memory, whatever order pool, engine and model are torn down in.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = _mmap(
            0, size, _PROT_NONE, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1
        )
        unmap = weakref.finalize(self, _munmap, self.address, size)
        # At interpreter exit threads may still read; the kernel takes the memory back
        # by itself.
        unmap.atexit = False
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.address, False),
        }

    def map(self, file: int, offset: int, size: int) -> None:
        """Map a file of `size` bytes at `offset`, a multiple of the granularity."""
        if offset + size > self.size:
            raise ValueError(
                f"{size} bytes at {offset} end outside a region of {self.size}"
            )
        _mmap(
            self.address + offset,
            size,
            _PROT_READ_WRITE,
            _MAP_SHARED | _MAP_FIXED | _MAP_POPULATE,
            file,
        )


def _mmap(address: int, size: int, protection: int, flags: int, file: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    mapped = libc.mmap(address, size, protection, flags, file, 0)
    if mapped is None or mapped == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {size} bytes: {os.strerror(code)}")
    return int(mapped)


def _munmap(address: int, size: int) -> None:
    libc = ctypes.CDLL(None)
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.munmap(address, size)


def _too_little(asked: int, free: int) -> MemoryError:
    return MemoryError(
        f"the pool's T0 and windows need {asked} bytes and {free} are free "
        f"({RESERVE_BYTES} of them kept back): lower --max-total-tokens or "
        "--tiered-window-tokens"
    )
