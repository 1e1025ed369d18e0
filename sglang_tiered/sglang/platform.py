"""The out-of-tree platform that lets SGLang run on a machine without an accelerator.

SGLang's own CPU platform needs Intel AMX kernels. This one runs plain PyTorch: it
describes the CPU as an out-of-tree device, so that every kernel choice falls back to
the native implementation. It offers itself only where nothing better exists.

SGLang imports this module very early, so it imports little.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_tiered.config import RADIX_CACHE_BACKEND

STOCK_ATTENTION_BACKEND = "torch_native"
TIERED_ATTENTION_BACKEND = "tiered_cpu"

_ACCELERATORS = ("cuda", "xpu", "npu", "mps", "hpu", "musa")


def accelerator_present() -> bool:
    """Whether PyTorch sees any accelerator in this process."""
    for name in _ACCELERATORS:
        module = getattr(torch, name, None)
        if (
            module is not None
            and hasattr(module, "is_available")
            and module.is_available()
        ):
            return True
    return False


def activate() -> str | None:
    """Entry point of the group ``sglang.srt.platforms``.

    Returns the platform's qualified class name, or None to step aside: where an
    accelerator is present, or where SGLANG_USE_CPU_ENGINE=1 asks for SGLang's own CPU
    platform.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or accelerator_present():
        return None
    return f"{TieredCpuPlatform.__module__}.{TieredCpuPlatform.__qualname__}"


class TieredCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU through native PyTorch kernels: no pinned memory, no graphs, no Triton."""

    _enum = PlatformEnum.OOT

    def get_device(self, device_id: int | None = None) -> str:
        # SGLang takes the default of ``--device`` from here and wants a string.
        return "cpu"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return STOCK_ATTENTION_BACKEND

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Switch graphs off, and name an attention backend unless the user did.

        Called during argument resolution with SGLang's recording view of the server
        arguments. By then SGLang has already written its AMX default over an absent
        ``--attention-backend``, so the user's own value is read from the raw input.
        """
        # Not at the top: SGLang loads this module while its own are half loaded.
        from sglang.srt.model_executor.cuda_graph_config import (
            Backend,
            Phase,
            with_phase,
        )

        graphs = server_args.cuda_graph_config
        for phase in Phase.ALL:
            graphs = with_phase(graphs, phase, backend=Backend.DISABLED)
        server_args.cuda_graph_config = graphs

        if server_args._raw_input["attention_backend"] is None:
            tiered = server_args.radix_cache_backend == RADIX_CACHE_BACKEND
            server_args.attention_backend = (
                TIERED_ATTENTION_BACKEND if tiered else STOCK_ATTENTION_BACKEND
            )
