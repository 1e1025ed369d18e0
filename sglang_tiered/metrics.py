"""Prometheus metrics of the tiers, on SGLang's own ``/metrics``.

Made in the scheduler process (``prometheus_client`` gathers its processes by
``PROMETHEUS_MULTIPROC_DIR``, which SGLang has set by then). Gauges and totals are
copied from the manager's counters once in a while, not touched per step.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge

from sglang_tiered.memory.manager import TierManager

# Forwards between two updates: a scrape is seconds apart, a forward milliseconds.
UPDATE_FORWARDS = 16

_GAUGES = {
    "t0_capacity_tokens": "Rows that T0 (device memory) holds.",
    "window_capacity_tokens": "Host rows that one forward can stream.",
    "host_capacity_tokens": "Rows that the host pool holds.",
    "int8_capacity_tokens": "Rows that the int8 pool holds.",
    "t0_used_tokens": "Rows in T0.",
    "t1_used_tokens": "Rows whose only copy is in host memory.",
    "t2_used_tokens": "Rows whose only copy is int8, in host memory.",
    "window_used_tokens": "Rows that pass through the window in every step.",
    "t0_peak_tokens": "Most rows in T0 so far.",
    "t1_peak_tokens": "Most rows with only a host copy so far.",
    "window_peak_tokens": "Most rows in the window so far.",
    "clean_tokens": "Rows in T0 that also have a host copy.",
    "private_tokens": "Rows that belong to a request or a session, not to the tree.",
    "t0_usage": "Share of T0 in use, 0 to 1.",
    "parked_requests": "Retracted requests that wait with their rows kept.",
}
_TOTALS = {
    "demoted_tokens": "Rows moved from T0 to T1.",
    "clean_demoted_tokens": "Demoted rows that needed no copy.",
    "promoted_tokens": "Rows moved from T1 to T0.",
    "compressed_tokens": "Rows rounded to int8, for good.",
    "dropped_tokens": "Rows dropped for good.",
    "streamed_tokens": "Rows passed through the window, summed over forwards.",
    "demoted_bytes": "Bytes copied from T0 to the host.",
    "promoted_bytes": "Bytes copied from the host to T0.",
    "compressed_bytes": "Bytes of int8 rows and scales written.",
    "streamed_bytes": "Bytes copied from the host to the window.",
    "fill_waits": "Times that attention waited for a window fill.",
    "fill_wait_seconds": "Time that attention waited for window fills.",
}


class TierMetrics:
    """All series carry the labels of ``labels``.

    Args:
        labels: name to value, the same for every series.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        names = list(labels)
        self._gauges = {
            name: Gauge(
                f"sglang_tiered:{name}", text, names, multiprocess_mode="mostrecent"
            )
            for name, text in _GAUGES.items()
        }
        self._totals = {
            name: Counter(f"sglang_tiered:{name}_total", text, names)
            for name, text in _TOTALS.items()
        }
        self._last = dict.fromkeys(_TOTALS, 0.0)
        self._forwards = 0

        def counter(name: str, text: str) -> Counter:
            return Counter(f"sglang_tiered:{name}_total", text, names).labels(**labels)

        self.parked_total = counter("requests_parked", "Retractions that kept rows.")
        self.resumed_total = counter("requests_resumed", "Parked requests resumed.")
        self.evicted_total = counter("evicted_tokens", "Cold tree rows evicted.")
        requests = Counter(
            "sglang_tiered:requests_total",
            "Requests that gave up their rows, by whether any were streamed.",
            [*names, "streamed"],
        )
        self._requests = {
            streamed: requests.labels(**labels, streamed=text)
            for streamed, text in ((True, "yes"), (False, "no"))
        }
        self._hook_calls = Gauge(
            "sglang_tiered:hook_calls",
            "Calls of each hook on SGLang so far.",
            [*names, "hook"],
            multiprocess_mode="mostrecent",
        )

    def count_request(self, streamed: bool) -> None:
        self._requests[streamed].inc()

    def tick(
        self, manager: TierManager, engine: Any, parked: int, calls: dict[str, int]
    ) -> None:
        """Once per forward; updates on every ``UPDATE_FORWARDS``-th."""
        self._forwards += 1
        if self._forwards % UPDATE_FORWARDS == 0:
            self.update(manager, engine, parked, calls)

    def update(
        self, manager: TierManager, engine: Any, parked: int, calls: dict[str, int]
    ) -> None:
        """Publish the manager's and the engine's counters as they are now."""
        ledger, counters, page = manager.ledger, manager.counters, manager.page_size
        values = {
            "t0_capacity_tokens": ledger.t0.count * page,
            "window_capacity_tokens": ledger.window.count * page,
            "host_capacity_tokens": ledger.host.count * page,
            "int8_capacity_tokens": ledger.int8.count * page,
            "t0_used_tokens": ledger.t0.used * page,
            "t1_used_tokens": ledger.t1 * page,
            "t2_used_tokens": ledger.t2 * page,
            "window_used_tokens": ledger.window.used * page,
            "t0_peak_tokens": counters.t0_peak * page,
            "t1_peak_tokens": counters.t1_peak * page,
            "window_peak_tokens": counters.window_peak * page,
            "clean_tokens": ledger.clean * page,
            "private_tokens": int(ledger.private.sum()) * page,
            "t0_usage": ledger.t0.used / ledger.t0.count,
            "parked_requests": parked,
        }
        for name, value in values.items():
            self._gauges[name].labels(**self._labels).set(value)
        totals = {
            "demoted_tokens": counters.demoted * page,
            "clean_demoted_tokens": counters.demoted_clean * page,
            "promoted_tokens": counters.promoted * page,
            "compressed_tokens": counters.compressed * page,
            "dropped_tokens": counters.dropped * page,
            "streamed_tokens": counters.streamed * page,
            "demoted_bytes": engine.bytes_demoted,
            "promoted_bytes": engine.bytes_promoted,
            "compressed_bytes": engine.bytes_compressed,
            "streamed_bytes": engine.bytes_streamed,
            "fill_waits": engine.fill_waits,
            "fill_wait_seconds": engine.fill_wait_seconds,
        }
        for name, total in totals.items():
            self._totals[name].labels(**self._labels).inc(total - self._last[name])
            self._last[name] = total
        for hook, count in calls.items():
            self._hook_calls.labels(**self._labels, hook=hook).set(count)
