"""Calls of the CUDA driver: what they return, and what their errors mean."""

from __future__ import annotations

from typing import Any

import torch
from cuda.bindings import driver


def device_index(device: torch.device) -> int:
    """The number of a CUDA device; of the current one if it names none."""
    return torch.cuda.current_device() if device.index is None else device.index


def device_attribute(flag: driver.CUdevice_attribute, index: int) -> int:
    """What device ``index`` says of itself. Raises like `checked`."""
    return int(checked(driver.cuDeviceGetAttribute(flag, index)))


def checked(result: tuple[Any, ...]) -> Any:
    """What a driver call returned. Raises OSError where the driver is missing or does
    not know the call, and RuntimeError for any other error."""
    code, *values = result
    errors = driver.CUresult
    if code in (errors.CUDA_ERROR_NOT_SUPPORTED, errors.CUDA_ERROR_NOT_INITIALIZED):
        raise OSError(f"the CUDA driver says {code.name}")
    if code != errors.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver says {code.name}")
    return values[0] if values else None
