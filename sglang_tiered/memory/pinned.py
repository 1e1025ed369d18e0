"""Page-locked host memory for CUDA: exactly as large as asked for, near the GPU.

PyTorch's own pinned allocator rounds up to a power of two, and a single registration of
many gigabytes fails on some systems; so the memory is mapped here and registered with
the driver in pieces. A copy from memory that is not page-locked is silently
synchronous, so whatever cannot be registered is an error and never used as it is.
"""

from __future__ import annotations

import mmap
import weakref

import numpy as np
import torch
from cuda.bindings import driver

from sglang_tiered.memory.cuda_driver import device_attribute, device_index
from sglang_tiered.memory.numa import cpus_near, running_on

# The most that is registered at once.
PIECE_BYTES = 1 << 30


def pinned(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes], zero, page-locked, on the NUMA node of the CUDA ``device``.

    Kernels read it at its host address. It is unlocked when the last tensor of it is
    gone. Raises MemoryError, naming --tiered-host-gb, when the system does not lock as
    much, and RuntimeError for a device that cannot read it.
    """
    memory = _Pinned(nbytes, device)
    return torch.from_numpy(np.asarray(memory))


class _Pinned:
    """The owner of a mapping and of its registrations."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        index = device_index(device)
        _check_host_pointers_work(index)
        self._map = mmap.mmap(-1, max(nbytes, 1))
        bytes_ = np.frombuffer(self._map, np.uint8)
        address = bytes_.ctypes.data
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }
        with running_on(cpus_near(_pci_address(index))):
            bytes_[:: mmap.PAGESIZE] = 0
        registered: list[int] = []
        unlock = weakref.finalize(self, _unregister, registered)
        # At exit the driver lets go of everything by itself, and copies may still run.
        unlock.atexit = False
        for start in range(0, nbytes, PIECE_BYTES):
            size = min(PIECE_BYTES, nbytes - start)
            (code,) = driver.cuMemHostRegister(address + start, size, 0)
            if code != driver.CUresult.CUDA_SUCCESS:
                unlock()
                raise MemoryError(
                    f"--tiered-host-gb: {start} of {nbytes} bytes of host memory could "
                    f"be page-locked, then the CUDA driver said {code.name}: lower "
                    "--tiered-host-gb, or raise the limit of locked memory (ulimit -l)"
                )
            registered.append(address + start)


def _unregister(addresses: list[int]) -> None:
    while addresses:
        driver.cuMemHostUnregister(addresses.pop())


def _check_host_pointers_work(device: int) -> None:
    attribute = driver.CUdevice_attribute
    flag = attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    if not device_attribute(flag, device):
        raise RuntimeError(
            f"CUDA device {device} cannot read registered host memory at its host "
            "address, which the tiers need"
        )


def _pci_address(device: int) -> str:
    code, name = driver.cuDeviceGetPCIBusId(32, device)
    if code != driver.CUresult.CUDA_SUCCESS:
        return ""
    return bytes(name).split(b"\0")[0].decode()
