"""Attention on a CPU through the page table.

SGLang's ``torch_native`` backend gathers ``req_to_token`` rows itself and knows no
translator. This one hands it, once per forward, the same rows translated: the same
values in the same order reach the same operator, so the output is bit-identical.

Rows of a dropped page (``v2p`` is -1) are left out, and the request is that much
shorter to the operator; the order of the rest, and the positions that are part of the
keys, do not change.

Scores are taken from the keys as the stock loop gathers them, request by request, so
that nothing is gathered twice and nothing about the output changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_tiered.attention.scores import ForwardScores, ScoreFeed

BACKEND_NAME = "tiered_cpu"


class TieredCpuAttnBackend(TorchNativeAttnBackend):
    """``torch_native`` over physical rows.

    ``scores``: where attention scores go, None for nowhere.
    """

    scores: ScoreFeed | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        batch = forward_batch.req_pool_indices
        longest = int(forward_batch.seq_lens_cpu.max())
        table = self.kv_index_translator.full_v2p_table
        page = self.kv_index_translator.page_size
        kept = torch.arange(longest) < forward_batch.seq_lens[:, None]
        # What lies past a request's length is another's, or nobody's: the sink is in
        # range and never dropped.
        ids = self.req_to_token_pool.req_to_token[batch, :longest]
        ids = ids.masked_fill_(~kept, 0)
        pages = table[ids // page]
        self._physical = pages * page + ids % page
        self._kept_lengths: torch.Tensor | None = None
        if int(pages.min()) < 0:
            kept &= pages >= 0
            self._kept_lengths = kept.sum(dim=1)
            front = torch.arange(longest) < self._kept_lengths[:, None]
            rows = self._physical[kept]
            self._physical = torch.zeros_like(self._physical)
            self._physical.masked_scatter_(front, rows)
        self._requests = torch.arange(len(batch))
        self._scores: ForwardScores | None = None
        if self.scores is not None and self.scores.book.lanes.any():
            self._scores = ForwardScores(self.scores, ids, kept)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._begin_layer(layer)
        return super().forward_extend(q, k, v, layer, *args, **kwargs)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._begin_layer(layer)
        return super().forward_decode(q, k, v, layer, *args, **kwargs)

    def _run_sdpa_forward_extend(
        self,
        query: Any,
        output: Any,
        k: Any,
        v: Any,
        req_to_token: Any,
        req_pool_indices: Any,
        seq_lens: Any,
        extend_prefix_lens: Any,
        extend_seq_lens: Any,
        *args: Any,
        scaling: float,
        **kwargs: Any,
    ) -> Any:
        if self._kept_lengths is not None:
            seq_lens = self._kept_lengths
            # Rows that this forward writes cannot be dropped yet.
            extend_prefix_lens = seq_lens - extend_seq_lens
        super()._run_sdpa_forward_extend(
            query,
            output,
            self._watched(k, query, scaling, extend_seq_lens),
            _Rows(v),
            self._physical,
            self._requests,
            seq_lens,
            extend_prefix_lens,
            extend_seq_lens,
            *args,
            scaling=scaling,
            **kwargs,
        )
        self._end_layer()
        return output

    def _run_sdpa_forward_decode(
        self,
        query: Any,
        output: Any,
        k: Any,
        v: Any,
        req_to_token: Any,
        req_pool_indices: Any,
        seq_lens: Any,
        *args: Any,
        scaling: float,
        **kwargs: Any,
    ) -> Any:
        if self._kept_lengths is not None:
            seq_lens = self._kept_lengths
        super()._run_sdpa_forward_decode(
            query,
            output,
            self._watched(k, query, scaling),
            _Rows(v),
            self._physical,
            self._requests,
            seq_lens,
            *args,
            scaling=scaling,
            **kwargs,
        )
        self._end_layer()
        return output

    def _begin_layer(self, layer: Any) -> None:
        self._layer = layer.layer_id
        # A layer with a sliding window does not look at most rows: it says nothing.
        self._looks_at_all = layer.sliding_window_size in (None, -1)

    def _watched(
        self, k: Any, query: Any, scaling: float, query_lens: Any | None = None
    ) -> _Rows:
        """The key buffer ``k``; if this layer is scored, one that also shows each
        request's keys to the scores. ``query_lens``: the rows of ``query`` that each
        request has, None for one each."""
        if (
            self._scores is None
            or not self._looks_at_all
            or not self._scores.wants(self._layer)
        ):
            return _Rows(k)
        if query_lens is not None:
            query = query[query_lens.cumsum(0) - 1]
        self._scores.begin_layer(query, k.shape[1], scaling)
        return _Rows(k, self._scores.add)

    def _end_layer(self) -> None:
        if self._scores is not None:
            self._scores.end_layer(self._layer)


class _Rows:
    """A key or value buffer from which the stock loop gathers the rows of each
    request, in the order of the batch; ``see(request, rows)`` gets to see them.

    Gathers with ``index_select``: the same tensor as by indexing, in half the time.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        see: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        self._buffer, self._see = buffer, see
        self._next_request = 0

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        rows = self._buffer.index_select(0, index)
        if self._see is not None:
            self._see(self._next_request, rows)
            self._next_request += 1
        return rows
