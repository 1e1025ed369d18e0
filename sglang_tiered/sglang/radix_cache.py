"""The radix tree: who reads which rows, and the rows that wait for somebody.

Stock ``UnifiedRadixCache`` keeps virtual ids, so rows in T1 match, extend and
return like any others. What it adds here is knowledge for the tier manager: a
tree lock of a running request is a reader of every page on the path, a page
without readers is cold. Two kinds of rows are kept without being read:

  * *parked*: a retracted request leaves its exact rows in the tree, under a lock
    of its own that no reader counts, and resumes by prefix match;
  * an *idle* streaming session keeps its private rows and its tree lock.

And it keeps inexact rows out: what enters the tree ends, page-floored, before the
first row of the request that ever was in T2 or T3. Every row that was computed from
such a row lies behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.observability.metrics_collector import radix_cache_metric_labels
from sglang.srt.runtime_context import get_observability, get_parallel, get_serving

from sglang_tiered.metrics import TierMetrics
from sglang_tiered.policy.recency import Recency
from sglang_tiered.sglang import deployment, request_control
from sglang_tiered.sglang.allocator import TieredAllocator, host_ids
from sglang_tiered.sglang.request_report import take_report

logger = logging.getLogger(__name__)

NO_PAGES = np.empty(0, dtype=np.int64)


@dataclass
class _Parked:
    lock: TreeLock
    pages: np.ndarray  # virtual pages on the lock's path, int64
    streamed: bool  # the request had rows in the window before


class TieredRadixCache(UnifiedRadixCache):
    """``--radix-cache-backend tiered``."""

    def __init__(self, params: Any) -> None:
        allocator = params.token_to_kv_pool_allocator
        assert isinstance(allocator, TieredAllocator)
        self.manager = allocator.manager
        # Attributes that ``reset``, called by the base constructor, clears.
        self._lock_pages: dict[int, np.ndarray] = {}
        self._parked: dict[str, _Parked] = {}
        self._active: dict[str, int] = {}
        self._idle: dict[str, np.ndarray] = {}
        self.begin_admission()
        super().__init__(params)
        self.manager.reclaim = self._reclaim
        allocator.tree = self
        self.metrics = self._make_metrics() if params.enable_metrics else None

    def reset(self) -> None:
        self._lock_pages.clear()
        self._parked.clear()
        self._active.clear()
        self._idle.clear()
        self.begin_admission()
        super().reset()

    def _make_metrics(self) -> TierMetrics:
        labels = radix_cache_metric_labels(
            type(self).__name__, get_parallel(), is_dp_attention_enabled()
        )
        labels.update(get_observability().extra_metric_labels or {})
        metrics = TierMetrics({name: str(value) for name, value in labels.items()})
        self._publish(metrics.update)
        return metrics

    def _publish(self, publish: Callable[..., None]) -> None:
        publish(
            self.manager, self.manager.mover, len(self._parked), deployment.hook_calls
        )

    def after_forward(self) -> None:
        if self.metrics is not None:
            self._publish(self.metrics.tick)

    def publish_metrics(self) -> None:
        """Something has changed and no forward may follow soon: the scheduler is idle,
        or paused."""
        if self.metrics is not None:
            self._publish(self.metrics.update)

    # -- readers ---------------------------------------------------------------

    def lock(self, node_id: Any, skip_lock_components: Any = ()) -> TreeLock | None:
        """A running request reads the path to ``node_id``."""
        lock = super().lock(node_id, skip_lock_components)
        if lock is not None:
            pages = self._path_pages(node_id)
            self.manager.read(pages)
            # By identity: a lock object is unlocked exactly once, and its path
            # names the same pages for as long as it is held.
            self._lock_pages[id(lock)] = pages
        return lock

    def unlock(self, lock: TreeLock | None) -> None:
        if lock is None:
            return
        pages = self._lock_pages.pop(id(lock), None)
        if pages is None:
            # The tree would take it for the lock of another reader of the path.
            raise RuntimeError("a tree lock was given back twice")
        super().unlock(lock)
        self.manager.unread(pages)

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Rows that the tree takes over stay where they are; only their owner
        changes. Rows that it already had are freed as duplicates by the tree."""
        before = req.kv.cache_protected_len
        up_to = min(up_to, self._exact_tokens(req))
        own = self._row_pages(req.kv, before, up_to)
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        if req.kv.cache_protected_len <= before:
            return
        taken = req.kv.cache_protected_len - before
        own = own[: taken // self.page_size]
        kept = self._row_pages(req.kv, before, req.kv.cache_protected_len)
        self.manager.ledger.give_to_tree(own[own == kept])

    def _exact_tokens(self, req: Any) -> int:
        """Tokens of ``req`` whose rows are what an untiered server would have."""
        pages = int(self.manager.ledger.rows.exact_pages[req.kv.req_pool_idx])
        return int(min(pages * self.page_size, req.kv.kv_allocated_len))

    def _path_pages(self, node_id: Any) -> np.ndarray:
        ids = host_ids(self.path_device_indices(node_id))
        return ids[:: self.page_size] // self.page_size

    def _row_pages(self, kv: Any, start: int, end: int) -> np.ndarray:
        row = self.req_to_token_pool.req_to_token[kv.req_pool_idx]
        return host_ids(row[start : end : self.page_size]) // self.page_size

    def read_by(self, req: Any) -> np.ndarray:
        """Virtual pages that ``req`` reads in an extend: its locked path and, for
        a streaming session, the rows that the session kept."""
        slot = self.session.borrowed_slot(req)
        lock = req.lock if slot is None else slot.lock
        pages = self._lock_pages.get(id(lock), NO_PAGES)
        private = self._row_pages(req.kv, req.kv.cache_protected_len, req.prefix_len)
        return np.concatenate([pages, private])

    # -- requests --------------------------------------------------------------

    def maybe_hand_to_session(self, req: Any) -> None:
        """Called for every request whose rows were just allocated."""
        row = req.kv.req_pool_idx
        if req.rid not in self._active:
            self._start_request(req, row)
        self._active[req.rid] = row
        super().maybe_hand_to_session(req)
        parked = self._parked.get(req.rid)
        if parked is not None:
            self.manager.ledger.rows.streamed[req.kv.req_pool_idx] |= parked.streamed
            self.unpark(req.rid, resumed=True)

    def _start_request(self, req: Any, row: int) -> None:
        manager = self.manager
        try:
            policy = request_control.policy_of(req, manager.policy)
        except ValueError as error:
            # Checked before it came here; whoever got past that stays exact.
            logger.error("%s: %s; its rows stay exact.", req.rid, error)
            policy = Recency(hbm_ratio=manager.policy.hbm_ratio)
        manager.start_request(row, policy, request_control.seed_of(req))

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self._forget_row(req, req.kv.req_pool_idx)

    def running_requests(self) -> int:
        """Requests that hold rows and are running or between two chunks."""
        return len(self._active)

    def _forget_row(self, req: Any, row: int) -> None:
        self._active.pop(req.rid, None)
        take_report(req, self.manager)
        # A parked request is not over: it counts when it leaves for good.
        if self.metrics is not None and req.rid not in self._parked:
            self.metrics.count_request(bool(self.manager.ledger.rows.streamed[row]))
        self.manager.end_request(row)

    # -- streaming sessions ----------------------------------------------------

    def claim_kv_row(self, req: Any) -> bool:
        """True: the session keeps the row; nobody reads it until the next turn."""
        row = req.kv.req_pool_idx
        slot = self.session.borrowed_slot(req)
        # The base call may detach the request from its session.
        session_id = _session_id(req)
        if slot is not None:
            take_report(req, self.manager)
        if not super().claim_kv_row(req):
            return False
        self._active.pop(req.rid, None)
        if req.finished():  # a retracted turn is not over
            if self.metrics is not None:
                self.metrics.count_request(bool(self.manager.ledger.rows.streamed[row]))
            self.manager.ledger.rows.streamed[row] = False
        assert slot is not None
        self.manager.ledger.rows.length[row] = slot.kv.kv_allocated_len
        pages = self._session_pages(slot)
        self.manager.unread(pages)
        self._idle[session_id] = pages
        return True

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        result = super().match_prefix(params)
        session_id = self._candidate = _session_id(params.req)
        if session_id in self._idle:
            # The match may have freed the tail of the record.
            slot = self.session.slots.get(session_id)
            if slot is not None:
                self._idle[session_id] = self._session_pages(slot)
                row = slot.kv.req_pool_idx
                self.manager.ledger.rows.length[row] = slot.kv.kv_allocated_len
        return result

    def release_session(self, session_id: str) -> None:
        slot = self.session.slots.get(session_id)
        pages = self._idle.pop(session_id, None)
        if slot is not None and pages is not None:
            # Its lock is about to be given back as a reader's.
            self.manager.read(self._session_pages(slot))
            row = slot.kv.req_pool_idx
            super().release_session(session_id)
            self.manager.end_request(row)
            return
        super().release_session(session_id)

    def _session_pages(self, slot: Any) -> np.ndarray:
        locked = self._lock_pages.get(id(slot.lock), NO_PAGES)
        private = self._row_pages(
            slot.kv, slot.kv.cache_protected_len, slot.kv.kv_allocated_len
        )
        return np.concatenate([locked, private])

    # -- admission (read by the prefill budget) ----------------------------------

    def begin_admission(self) -> None:
        self._candidate = ""

    def admit_candidate(self) -> None:
        """The request that was matched last will run. If it is the next turn of an
        idle session, its rows are read from here on: no allocation for this batch
        may send them away."""
        pages = self._idle.pop(self._candidate, None)
        if pages is not None:
            self.manager.read(pages)
        self._candidate = ""

    def session_reads(self) -> tuple[int, int]:
        """(T0 pages, T1 pages) of the idle session that the candidate would wake:
        they are not read yet, but would be."""
        pages = self._idle.get(self._candidate, NO_PAGES)
        in_t0 = int((self.manager.ledger.t0_page[pages] >= 0).sum())
        return in_t0, len(pages) - in_t0

    def session_pages(self) -> int:
        return sum(self.session_reads())

    # -- parking ---------------------------------------------------------------

    def park(self, req: Any) -> None:
        """Before a retraction frees the rows of ``req``: put the exact ones into
        the tree and hold them there until the request resumes or goes away.

        A resume extends at least its last known token, so that token's row is left
        out: under overlap scheduling the forward in flight is still writing it.
        """
        if not self._can_park(req):
            return
        req.refresh_fill_ids()
        exact = min(req.kv.kv_committed_len, len(req.full_untruncated_fill_ids) - 1)
        if exact > req.kv.cache_protected_len:
            self.checkpoint(req, up_to=exact)
        node = req.last_node
        lock = super().lock(node)
        if lock is None:
            return
        pages = self._path_pages(node)
        self.manager.ledger.park(pages)
        streamed = bool(self.manager.ledger.rows.streamed[req.kv.req_pool_idx])
        self._parked[req.rid] = _Parked(lock, pages, streamed)
        if self.metrics is not None:
            self.metrics.parked_total.inc()

    def unpark(self, rid: str, *, resumed: bool = False) -> None:
        """The request of ``rid`` runs again, or will never: drop its lock."""
        parked = self._parked.pop(rid, None)
        if parked is None:
            return
        super().unlock(parked.lock)
        self.manager.ledger.unpark(parked.pages)
        if resumed and self.metrics is not None:
            self.metrics.resumed_total.inc()

    def parked_requests(self) -> int:
        return len(self._parked)

    def release_aborted_request(self, request: Any) -> None:
        self.unpark(request.rid)
        super().release_aborted_request(request)

    def _can_park(self, req: Any) -> bool:
        return (
            not self.disable
            and not req.finished()
            and req.to_finish is None
            and not req.skip_radix_cache_insert
            # A stock setting that keeps reasoning out of the tree.
            and not get_serving().strip_thinking_cache
            and req.input_embeds is None
            # A streaming session keeps its rows by itself.
            and self.session.borrowed_slot(req) is None
            and req.kv.kv_committed_len > 1
            and req.rid not in self._parked
        )

    # -- eviction --------------------------------------------------------------

    def _reclaim(self, pages: int) -> None:
        """Free ``pages`` virtual pages: cold leaves first, then rows that requests
        and sessions wait with, oldest first; they will recompute them. So ids are
        short only if running requests read all the others."""
        target = self.manager.ledger.available + pages
        while True:
            short = target - self.manager.ledger.available
            if short <= 0:
                return
            if self.evictable_size() > 0:
                evicted = self.evict(EvictParams(num_tokens=short * self.page_size))
                if self.metrics is not None:
                    self.metrics.evicted_total.inc(evicted.num_tokens_evicted)
                if evicted.num_tokens_evicted > 0:
                    continue
            if self._parked:
                waiting = next(iter(self._parked))
                self.unpark(waiting)
            elif self._idle:
                waiting = next(iter(self._idle))
                self._give_up_session(waiting)
            else:
                return
            logger.warning("T0 and T1 are full: %s will be recomputed.", waiting)

    def _give_up_session(self, session_id: str) -> None:
        kv = self.session.slots[session_id].kv
        self.release_session(session_id)
        # A turn in the waiting queue may hold this record: it begins anew.
        fresh = type(kv)()
        for field in fields(kv):
            setattr(kv, field.name, getattr(fresh, field.name))

    def check_integrity(self) -> None:
        """Every reader has a lock or a row of its own; raises AssertionError."""
        ledger = self.manager.ledger
        readers = np.zeros_like(ledger.readers)
        idle = set()
        for session_id in self._idle:
            slot = self.session.slots.get(session_id)
            if slot is not None:
                idle.add(id(slot.lock))
        for key, pages in self._lock_pages.items():
            if key not in idle:
                readers[pages] += 1
        tree = ledger.live & ~ledger.private
        wrong = np.flatnonzero(tree & (readers != ledger.readers))
        assert not len(wrong), f"readers are wrong for pages {wrong[:8].tolist()}"


def _session_id(req: Any) -> str:
    if req is None or req.session is None or not req.session.streaming:
        return ""
    return str(req.session.session_id)
