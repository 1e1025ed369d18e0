"""The attention backends of the tiered pool, as SGLang's registry makes them."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    register_attention_backend,
)
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_tiered.attention.cpu import BACKEND_NAME, TieredCpuAttnBackend
from sglang_tiered.attention.scores import ScoreFeed
from sglang_tiered.sglang import deployment, refusals
from sglang_tiered.transfer.streams import ThreadStream


def register() -> None:
    """Make the backend's name known to SGLang's flags and registry."""
    if BACKEND_NAME in ATTENTION_BACKENDS:
        return
    register_attention_backend(BACKEND_NAME)(make_cpu_backend)
    add_attention_backend_choices([BACKEND_NAME])


def make_cpu_backend(runner: Any) -> TieredCpuAttnBackend:
    """Over the pool of this process, which SGLang has built before."""
    backend = TieredCpuAttnBackend(runner)
    parts = deployment.current()
    if parts.config.most_evict > 0 and _has_sliding_window(runner.model):
        # The stock mask counts the rows that are left, not their positions.
        raise refusals.Refusal(
            f"--tiered-policy {parts.config.policy}: rows of a model with "
            "sliding-window layers cannot be dropped; fix: use an exact policy, and no "
            "--tiered-evict-ratio or --tiered-request-evict"
        )
    if parts.config.feeds_scores:
        assert parts.manager is not None
        backend.scores = ScoreFeed(
            parts.manager.scores,
            parts.config.score_layers,
            parts.layout.num_layers,
            ThreadStream("sglang-tiered-scores"),
        )
    return backend


def _has_sliding_window(model: Any) -> bool:
    return any(
        module.sliding_window_size not in (None, -1)
        for module in model.modules()
        if isinstance(module, RadixAttention)
    )
