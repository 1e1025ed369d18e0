"""Attention on a CPU through the page table.

SGLang's ``torch_native`` backend gathers ``req_to_token`` rows itself and knows no
translator. This one hands it, once per forward, the same rows translated: the same
values in the same order reach the same operator, so the output is bit-identical.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    register_attention_backend,
)
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

BACKEND_NAME = "tiered_cpu"


class TieredCpuAttnBackend(TorchNativeAttnBackend):
    """``torch_native`` over physical rows."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        batch = forward_batch.req_pool_indices
        longest = int(forward_batch.seq_lens_cpu.max())
        table = self.kv_index_translator.full_v2p_table
        ids = self.req_to_token_pool.req_to_token[batch, :longest]
        page = self.kv_index_translator.page_size
        # Entries past a request's length are never read; the sink is in range.
        self._physical = table[ids // page] * page + ids % page
        self._lanes = torch.arange(len(batch))

    def _run_sdpa_forward_extend(
        self,
        query: Any,
        output: Any,
        k: Any,
        v: Any,
        req_to_token: Any,
        req_pool_indices: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return super()._run_sdpa_forward_extend(
            query, output, k, v, self._physical, self._lanes, *args, **kwargs
        )

    def _run_sdpa_forward_decode(
        self,
        query: Any,
        output: Any,
        k: Any,
        v: Any,
        req_to_token: Any,
        req_pool_indices: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return super()._run_sdpa_forward_decode(
            query, output, k, v, self._physical, self._lanes, *args, **kwargs
        )


def register() -> None:
    """Make the backend's name known to SGLang's flags and registry."""
    if BACKEND_NAME in ATTENTION_BACKENDS:
        return
    register_attention_backend(BACKEND_NAME)(TieredCpuAttnBackend)
    add_attention_backend_choices([BACKEND_NAME])
