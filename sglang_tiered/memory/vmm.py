"""The device memory of a pool on CUDA: windows aliased through virtual memory.

A layer's buffer is one range of addresses. Its front is backed by memory of its own,
its tail by the window of the layer's parity, one allocation that is mapped into the
tail of every layer of that parity. CUDA allows that (one allocation at several
addresses) under a rule that the transfer engine keeps: what is written through one
address is visible through another only after the writing operation has ended.

Allocations are mapped whole: some devices refuse maps of a part of one.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from cuda.bindings import driver

from sglang_tiered.memory.backing import Backing, aligned_window_base, round_up
from sglang_tiered.memory.cuda_driver import checked, device_attribute, device_index
from sglang_tiered.memory.layout import PoolLayout


class VmmBacking(Backing):
    """Memory of one CUDA device with one window per parity.

    All of it is allocated at construction, and zero. Raises MemoryError, naming the
    flags that size it, when the device has too little, OSError when device or driver
    have no virtual memory management, and RuntimeError with the driver's own word for
    anything else.
    """

    def __init__(self, layout: PoolLayout, device: torch.device) -> None:
        index = device_index(device)
        self._device = torch.device("cuda", index)
        self._property = _allocation_property(index)
        granularity = self._granularity()
        super().__init__(layout, aligned_window_base(layout, granularity))
        self._mapped = 0
        try:
            self._build(granularity)
        except BaseException:
            self.close()
            raise

    def _granularity(self) -> int:
        supported = driver.CUdevice_attribute
        flag = supported.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not device_attribute(flag, self._device.index):
            raise OSError(f"{self._device} has no virtual memory management")
        recommended = driver.CUmemAllocationGranularity_flags
        return int(
            checked(
                driver.cuMemGetAllocationGranularity(
                    self._property,
                    recommended.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
                )
            )
        )

    def _build(self, granularity: int) -> None:
        windows: dict[tuple[int, str], _Memory] = {}
        for layer, buffers in enumerate(self.layout.layers):
            for name in (buffer.name for buffer in buffers):
                page_bytes = self.layout.page_bytes(layer, name)
                head = self.window_base * page_bytes
                tail = round_up(self.layout.window_pages * page_bytes, granularity)
                if layer < 2:
                    windows[layer, name] = self._allocate(tail)
                region = _Region(head + tail)
                region.map(self._allocate(head), 0)
                region.map(windows[layer % 2, name], head)
                region.allow(self._device.index)
                used = self.total_pages * page_bytes
                raw = _tensor(region, self._device)
                raw.zero_()
                self._add(layer, name, raw[:used])

    def _allocate(self, size: int) -> _Memory:
        memory = _Memory(size, self._property)
        self._mapped += size
        return memory

    def mapped_bytes(self) -> int:
        """The sizes of all allocations, as the driver was asked for them."""
        return self._mapped

    def close(self) -> None:
        super().close()
        self._mapped = 0


class _Memory:
    """Device memory without an address. It lives for as long as it is mapped, or
    this object is there."""

    def __init__(self, size: int, property_: Any) -> None:
        self.size = size
        result = driver.cuMemCreate(size, property_, 0)
        if result[0] == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(
                f"the device has no {size} bytes left for T0 and the windows: lower "
                "--max-total-tokens, --mem-fraction-static or --tiered-window-tokens"
            )
        self.handle = checked(result)
        weakref.finalize(self, driver.cuMemRelease, self.handle).atexit = False


class _Region:
    """A reserved range of device addresses that memory is mapped into.

    A tensor made from it holds a reference to it, and the range is unmapped when the
    last of them is gone, whatever order pool, engine and model are torn down in.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = int(checked(driver.cuMemAddressReserve(size, 0, 0, 0)))
        self._mapped: list[tuple[int, int]] = []
        free = weakref.finalize(self, _free, self.address, size, self._mapped)
        # At exit the driver takes everything back by itself, and kernels may still run.
        free.atexit = False
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.address, False),
        }

    def map(self, memory: _Memory, offset: int) -> None:
        """Map all of ``memory`` at ``offset``, a multiple of the granularity."""
        if offset + memory.size > self.size:
            raise ValueError(
                f"{memory.size} bytes at {offset} end outside a region of {self.size}"
            )
        where = self.address + offset
        checked(driver.cuMemMap(where, memory.size, 0, memory.handle, 0))
        self._mapped.append((where, memory.size))

    def allow(self, device: int) -> None:
        """Let kernels and copies of ``device`` read and write everything mapped."""
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        checked(driver.cuMemSetAccess(self.address, self.size, [access], 1))


def _free(address: int, size: int, mapped: list[tuple[int, int]]) -> None:
    # Nobody holds a tensor of it, but a kernel that was launched with one may run.
    driver.cuCtxSynchronize()
    for where, length in mapped:
        driver.cuMemUnmap(where, length)
    driver.cuMemAddressFree(address, size)


def _tensor(region: _Region, device: torch.device) -> torch.Tensor:
    """uint8 [size] over the region, which it keeps mapped."""
    return torch.as_tensor(region, device=device)


def _allocation_property(device: int) -> Any:
    property_ = driver.CUmemAllocationProp()
    property_.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    property_.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    property_.location.id = device
    return property_
