"""What became of a request's rows: ``meta_info["tiered"]`` of its last output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.scheduler_components.output_streamer import (
    SchedulerOutputStreamer,
)

from sglang_tiered.memory.manager import TierManager
from sglang_tiered.policy.protection import unprotected_range
from sglang_tiered.sglang import deployment

KEY = "tiered"
_ATTRIBUTE = "_sglang_tiered_report"


def take_report(req: Any, manager: TierManager) -> None:
    """Note the state of the request's rows; call right before they are given up."""
    row, ledger, page = req.kv.req_pool_idx, manager.ledger, manager.page_size
    rows = ledger.rows
    before = getattr(req, _ATTRIBUTE, None) or {}
    prompt, length = int(rows.prompt[row]), int(rows.length[row])
    first, end = unprotected_range(
        prompt,
        length,
        page_size=page,
        sink_tokens=manager.rules.sink_tokens,
        recent_window=manager.rules.recent_window,
    )
    unprotected = max(0, end - first) * page
    # A retracted request has its rows computed anew; what it answered before that came
    # from those it had.
    dropped = max(int(rows.dropped[row]) * page, before.get("dropped_rows", 0))
    error = float(rows.dropped_error[row]) + before.get("dropped_error", 0.0)
    exact = min(int(rows.exact_pages[row]) * page, length)
    compressed = int(rows.compressed[row]) * page
    compressed = max(compressed, before.get("compressed_rows", 0))
    setattr(
        req,
        _ATTRIBUTE,
        {
            "policy": manager.policy_of(row).name,
            "streamed": bool(rows.streamed[row]) or before.get("streamed", False),
            # Output after its first lossy step, rows recomputed since or not.
            "inexact": rows.is_lossy(row) or before.get("inexact", False),
            # Its first rows that are what an untiered server would have.
            "exact_rows": exact,
            "generated_rows": max(0, length - prompt),
            # What the caps are shares of.
            "unprotected_rows": unprotected,
            "compressed_rows": compressed,
            "compressed_share": compressed / max(unprotected, 1),
            "dropped_rows": dropped,
            "dropped_share": dropped / max(unprotected, 1),
            # sum(alpha * ||v||) over the dropped rows, estimated: alpha is the weight
            # that the row has had per step, and both are means over layers and heads.
            "dropped_error": error,
        },
    )


def output_streamer_class_hook(
    original: Callable[..., type[SchedulerOutputStreamer]], scheduler: Any
) -> type[SchedulerOutputStreamer]:
    """AROUND ``Scheduler.get_output_streamer_class``."""
    stock = original(scheduler)
    if not deployment.is_enabled():
        return stock

    class TieredOutputStreamer(stock):  # type: ignore[misc, valid-type]
        has_additional_customized_info = True

        def should_build_additional_customized_info(self) -> bool:
            return True

        def build_additional_customized_info(
            self, reqs: list[Any]
        ) -> dict[str, list[Any]]:
            reports = (getattr(req, _ATTRIBUTE, None) for req in reqs)
            return {
                KEY: [
                    [report] if report is not None and req.finished() else []
                    for req, report in zip(reqs, reports, strict=True)
                ]
            }

    return TieredOutputStreamer
