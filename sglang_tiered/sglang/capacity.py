"""How many rows there are: T0 from SGLang's own sizing, V from T0 and the host.

``--max-total-tokens`` and ``--mem-fraction-static`` keep their meaning: they set
T0. What SGLang calls ``max_total_num_tokens`` becomes V, the number of virtual
ids, because that is what its scheduler, tree and request rows count.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import attention_backends, get_parallel, get_schedule

from sglang_tiered.config import TieredConfig
from sglang_tiered.memory.host_pool import free_host_bytes
from sglang_tiered.memory.int8_pool import int8_bytes_per_token
from sglang_tiered.memory.layout import PoolLayout, RowBuffer
from sglang_tiered.sglang import deployment, refusals
from sglang_tiered.sizes import resolve_sizes, rounding_notes

logger = logging.getLogger(__name__)


def config_from_budget_hook(
    original: Callable[..., Any], configurator: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND ``KVCacheConfigurator.config_from_budget``."""
    config = original(configurator, *args, **kwargs)
    if not deployment.is_enabled():
        return config
    refusals.check_model(configurator.model_config, attention_backends())
    t0_tokens = config.max_total_num_tokens
    page_size = get_schedule().page_size
    layers = row_layers(configurator)
    bytes_per_token = sum(buffer.row_bytes for layer in layers for buffer in layer)
    tiered = TieredConfig.from_env(os.environ)
    free_bytes = free_host_bytes()
    if configurator.device == "cpu":  # T0 will take its share of the same memory
        free_bytes = max(0, free_bytes - t0_tokens * bytes_per_token)
    sizes = resolve_sizes(
        tiered,
        t0_tokens=t0_tokens,
        page_size=page_size,
        num_layers=len(layers),
        bytes_per_token=bytes_per_token,
        int8_bytes_per_token=int8_bytes_per_token(layers),
        free_host_bytes=free_bytes,
    )
    layout = PoolLayout(
        page_size=page_size,
        t0_pages=sizes.t0_pages,
        window_pages=sizes.window_pages,
        host_pages=sizes.host_pages,
        layers=layers,
    )
    deployment.start(layout, sizes.int8_pages)
    config.max_total_num_tokens = sizes.virtual_pages * page_size
    mib = bytes_per_token * page_size / 2**20
    window_mib = sum(
        layer_row.row_bytes for layer in layers[:2] for layer_row in layer
    ) * (sizes.window_pages * page_size / 2**20)
    logger.info(
        "Tiered KV cache: T0 %d tokens (%.1f MiB) + T1 %d tokens (%.1f MiB host) + "
        "T2 %d tokens (%.1f MiB host) = %d virtual ids; window %d tokens (%.1f MiB, "
        "shared by layer parity); mode %s, policy %s; longest request %d tokens.",
        sizes.t0_pages * page_size,
        sizes.t0_pages * mib,
        sizes.host_pages * page_size,
        sizes.host_pages * mib,
        sizes.int8_pages * page_size,
        sizes.int8_pages * page_size * int8_bytes_per_token(layers) / 2**20,
        config.max_total_num_tokens,
        sizes.window_pages * page_size,
        window_mib,
        tiered.mode,
        tiered.make_policy(),
        (sizes.t0_pages + sizes.window_pages - 1) * page_size,
    )
    for note in rounding_notes(tiered, t0_tokens, page_size):
        logger.info("Tiered KV cache: %s", note)
    return config


def row_layers(configurator: Any) -> tuple[tuple[RowBuffer, ...], ...]:
    """The row buffers of every layer of an MHA or GQA model on this rank."""
    model = configurator.model_config
    parallel = get_parallel()
    heads = model.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size)
    dtype = configurator.kv_cache_dtype
    layer = (
        RowBuffer("k", (heads, model.head_dim), dtype),
        RowBuffer("v", (heads, model.v_head_dim), dtype),
    )
    return (layer,) * configurator.layer_info.num_effective_layers
