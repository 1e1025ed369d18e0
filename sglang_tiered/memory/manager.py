"""The tier manager: makes room in T0, places what is read, keeps the tables right.

It runs in the scheduler process, holds no tensor and never waits on the device.
It decides from the ledger, and every decision is carried out in three steps that
stay together: a ledger transition, the copies it needs (``Mover``), and the page
table. Protocol of one scheduler iteration:

  1. ``make_room`` / ``allocate`` while the batch is built;
  2. ``begin_forward`` right before the forward: every page that the batch reads
     is in T0 or in the window from here on;
  3. ``end_forward`` once it is over: its pages may be copied out, its quarantined
     slots reused; then the requests whose turn it is are re-tiered, and rows return
     to T0 where it has room.

Capacity: ``virtual ids = T0 pages + host pages + int8 pages``, of which exact pages
take at most ``T0 pages + host pages`` (``ledger.available``). As long as that leaves
one and clean copies can be given up, there is a host page for every exact page that
must leave T0 (a lossy one has its int8 page), so only two things can run short:
virtual ids (evict cold tree leaves) and, for pages that running requests read, the
window.

Pressure demotes, and never costs a bit. T2 and T3 do: only a request's own policy
asks for them, at its own decode steps, so that what a request answers does not
depend on the load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sglang_tiered.memory.ledger import Ledger
from sglang_tiered.memory.page_table import DROPPED, PageTable
from sglang_tiered.memory.places import Places
from sglang_tiered.memory.score_book import ScoreBook
from sglang_tiered.policy.base import Candidates, Policy, Statistic, Tier
from sglang_tiered.policy.protection import (
    PageView,
    Protection,
    classify,
    unprotected_range,
)
from sglang_tiered.policy.ranking import demotion_order, promotion_order
from sglang_tiered.policy.recency import Recency

# Demote this share of T0 more than was asked for, so that a full pool is scanned
# once in many steps and not once per step.
DEMOTE_SLACK = 1 / 32
# Promote only into what is free beyond this share of T0; well above the slack, or
# a promotion would cause the next demotion.
HIGH_WATERMARK = 1 / 8
# Forwards during which a promoted page is demoted only after all others.
SETTLE_FORWARDS = 32


class Mover(Protocol):
    """Carries copies out; ordering is its business (``transfer.engine``)."""

    @property
    def submitted_epoch(self) -> int: ...
    @property
    def done_epoch(self) -> int: ...
    def demote(
        self, t0_pages: np.ndarray, host_pages: np.ndarray, written_epoch: int
    ) -> None: ...
    def promote(self, places: Places, t0_pages: np.ndarray) -> None: ...
    def compress(
        self, places: Places, int8_pages: np.ndarray, written_epoch: int
    ) -> None: ...
    def begin_forward(self, sources: Places, window_pages: np.ndarray) -> int: ...
    def end_forward(self) -> None: ...


class Statistics(Protocol):
    """Looks at the rows themselves, wherever they are (``transfer.statistics``)."""

    def value_norms(self, places: Places) -> np.ndarray: ...
    def redundancy(self, places: Places) -> np.ndarray: ...


@dataclass(frozen=True)
class TierRules:
    """What holds for every request. Tokens, except ``retier_interval`` (decode steps of
    a request) and ``score_interval`` (its decode steps from one that feeds the scores
    to the next)."""

    sink_tokens: int = 4
    recent_window: int = 128
    retier_interval: int = 64
    score_interval: int = 1


@dataclass
class Counters:
    """Totals since the start, in pages; peaks in pages."""

    demoted: int = 0
    demoted_clean: int = 0
    promoted: int = 0
    streamed: int = 0
    compressed: int = 0
    dropped: int = 0
    t0_peak: int = 0
    t1_peak: int = 0
    window_peak: int = 0


@dataclass(frozen=True)
class BatchRows:
    """The rows of a forward: one entry per request, int64 [b] each, except
    ``new_ids``: the virtual token ids it writes, request by request."""

    row: np.ndarray
    length: np.ndarray  # tokens after this forward
    new_tokens: np.ndarray  # tokens that this forward writes
    prompt: np.ndarray  # prompt tokens
    new_ids: np.ndarray
    decode: np.ndarray  # bool: this is a decode step of the request


@dataclass
class TierManager:
    """See the module docstring.

    ``policy`` is the one of requests that do not ask for their own, and says how rows
    are ranked when T0 is short, by score or by age. ``reclaim`` is asked for ``n``
    virtual pages when they run short; it evicts cold tree leaves (which come back
    through ``release``). ``poison``, if set, overwrites physical pages that nobody may
    read (tests).
    """

    ledger: Ledger
    table: PageTable
    mover: Mover
    rules: TierRules
    window_base: int
    scores: ScoreBook
    statistics: Statistics
    policy: Policy = field(default_factory=Recency)
    reclaim: Callable[[int], None] = lambda n: None
    poison: Callable[[np.ndarray], None] | None = None
    counters: Counters = field(default_factory=Counters)
    _capacity: tuple[tuple[int, int], tuple[int, int]] | None = None
    _fills: tuple[int, np.ndarray] | None = None
    _own_policy: dict[int, Policy] = field(default_factory=dict)
    _seeds: dict[int, int] = field(default_factory=dict)

    @property
    def page_size(self) -> int:
        return self.ledger.page_size

    @property
    def epoch(self) -> int:
        """The last forward that may be running."""
        return self.mover.submitted_epoch

    # -- capacity --------------------------------------------------------------

    def attainable(self, starts_reading_t0: int = 0, starts_reading_t1: int = 0) -> int:
        """Pages of T0 that a new allocation can get: the one answer behind every
        gate. Virtual ids are a separate count.

        ``starts_reading_*``: pages in T0 and in T1, unread now, that a candidate
        request would begin to read.
        """
        ledger = self.ledger
        unread, read = self._movable()
        taken = min(starts_reading_t0, unread)
        unread, read = unread - taken, read + taken
        window = ledger.window.available - ledger.unplaced - starts_reading_t1
        return ledger.t0.available + unread + min(read, max(window, 0)) + min(window, 0)

    def room_for_reading(self) -> int:
        """Pages that running requests could read beside those they read now."""
        ledger = self.ledger
        window = min(ledger.window.count, ledger.host.count)
        return ledger.t0.count + window - ledger.read_pages

    def largest_request(self) -> int:
        """Tokens that one request alone can have: T0 and the window, less a page
        for the row that is being written."""
        ledger = self.ledger
        window = min(ledger.window.count, ledger.host.count)
        return (ledger.t0.count + window - 1) * self.page_size

    def _movable(self) -> tuple[int, int]:
        """(unread, read) pages in T0 that could be demoted now."""
        state = (self.ledger.version, self.mover.done_epoch)
        if self._capacity is None or self._capacity[0] != state:
            pages = self._movable_pages()
            read = int((self.ledger.readers[pages] > 0).sum())
            self._capacity = (state, (len(pages) - read, read))
        return self._capacity[1]

    def _movable_pages(self) -> np.ndarray:
        pages = self.ledger.in_t0()
        written = self.ledger.born[pages] <= self.mover.done_epoch
        return pages[written & ~self.ledger.is_open(pages)]

    def make_room(self, n: int) -> bool:
        """Make ``allocate(n)`` possible: evict for virtual ids, demote for T0."""
        # Read pages for which the window has no room return to T0. They give up no
        # host page, so each of them also takes a virtual id out of use.
        n += max(0, self.ledger.unplaced - self.ledger.window.available)
        return self._free_ids(n) and self._free_t0(n)

    def _free_ids(self, n: int) -> bool:
        """Free ``n`` virtual pages: what leaves T0 for ``n`` pages then fits the
        host pool."""
        short = n - self.ledger.available
        if short > 0:
            self.reclaim(short)
        return n <= self.ledger.available

    def _free_t0(self, n: int) -> bool:
        need = n - self.ledger.t0.available
        if need <= 0 or self._demote_for(need):
            return True
        unread, read = self._movable()
        movable = unread + min(read, self._free_window())
        if not self.ledger.int8.used or movable < need:
            return False
        # Pages could move, but for exact ones there is no host page: lossy pages in T0
        # crowd them out.
        self.reclaim(need)
        need = n - self.ledger.t0.available
        return need <= 0 or self._demote_for(need)

    # -- allocation ------------------------------------------------------------

    def allocate(self, n: int) -> np.ndarray:
        """``n`` new pages for the next forward, in T0: virtual pages, int64 [n].
        Raises RuntimeError if ``make_room(n)`` does not hold."""
        pages = self.ledger.allocate(n, self.epoch + 1)
        self.table.place(pages, self.ledger.t0_page[pages])
        return pages

    def release(self, pages: np.ndarray) -> None:
        """The owner of ``pages`` is done with them. Raises on a double free."""
        self._poison_window(pages)
        slots = self.ledger.release(pages, self.epoch)
        self.table.clear(pages)
        if self.poison is not None:
            self.poison(slots)

    def reopen(self, pages: np.ndarray) -> bool:
        """``pages`` will be written again (a session rewound into a page): they
        must be in T0, and a host copy would go stale. False if T0 has no room."""
        ledger = self.ledger
        away = pages[ledger.t0_page[pages] < 0]
        if len(away):
            if not self.make_room(len(away)):
                return False
            self._promote(away)
        ledger.drop_copies(pages, self.epoch)
        ledger.born[pages] = self.epoch + 1
        return True

    # -- requests --------------------------------------------------------------

    def start_request(self, row: int, policy: Policy | None, seed: int) -> None:
        """A request has begun to use ``row``; None: the server's policy."""
        self._seeds[row] = seed
        self._own_policy.pop(row, None)
        if policy is not None:
            self._own_policy[row] = policy

    def end_request(self, row: int) -> None:
        """``row`` will belong to another request."""
        self._seeds.pop(row, None)
        self._own_policy.pop(row, None)
        self.ledger.rows.renew(row)

    def policy_of(self, row: int) -> Policy:
        return self._own_policy.get(row, self.policy)

    def _of_policies(
        self, rows: np.ndarray, fact: Callable[[Policy], bool]
    ) -> np.ndarray:
        """bool [n]: whether ``fact`` holds for the policy of each request row; -1 is
        nobody's and goes by the server's."""
        usual = fact(self.policy)
        held = np.full(len(rows), usual)
        others = [
            row for row, policy in self._own_policy.items() if fact(policy) != usual
        ]
        if others:
            held ^= np.isin(rows, others)
        return held

    # -- readers ---------------------------------------------------------------

    def read(self, pages: np.ndarray) -> None:
        """A running request begins to read ``pages``; they get their place at the
        next ``begin_forward``."""
        self.ledger.read(pages)

    def unread(self, pages: np.ndarray) -> None:
        """A running request has stopped reading ``pages``."""
        leaving = pages[
            (self.ledger.readers[pages] == 1) & (self.ledger.t0_page[pages] < 0)
        ]
        self._poison_window(leaving)
        self.ledger.unread(pages, self.epoch)
        self.table.clear(leaving)

    # -- the forward -----------------------------------------------------------

    def begin_forward(self, batch: BatchRows, read_by_extend: np.ndarray | None) -> int:
        """Right before a forward: name the owners of its new pages, place every
        page that running requests read, start the fills. Returns its epoch.

        ``read_by_extend``: None for a batch with every running request in it
        (decode, mixed); else the virtual pages that this batch reads.
        Raises RuntimeError if a read page cannot be placed (admission is wrong).
        """
        self._tag(batch)
        self._place_unplaced()
        window = self._plan_fills(read_by_extend)
        self._mark_streamed(batch, len(window))
        self.counters.streamed += len(window)
        self.counters.t0_peak = max(self.counters.t0_peak, self.ledger.t0.used)
        self.counters.t1_peak = max(self.counters.t1_peak, self.ledger.t1)
        self.counters.window_peak = max(
            self.counters.window_peak, self.ledger.window.used
        )
        self._choose_scored(batch)
        sources = self.ledger.places(self.ledger.at_window[window])
        return self.mover.begin_forward(sources, window + self.window_base)

    def end_forward(self, batch: BatchRows) -> None:
        """The forward is over (or, with a device, its events are recorded)."""
        self.mover.end_forward()
        ledger = self.ledger
        for pool in (ledger.t0, ledger.host, ledger.window, ledger.int8):
            pool.retire(self.mover.done_epoch)
        if batch.decode.any():
            self.ledger.rows.steps[batch.row[batch.decode]] += 1
            self._retier(batch)
            self._promote_into_free_t0()

    def _tag(self, batch: BatchRows) -> None:
        rows, ps = self.ledger.rows, self.page_size
        rows.length[batch.row] = batch.length
        rows.prompt[batch.row] = batch.prompt
        if not len(batch.new_ids):
            return
        row = np.repeat(batch.row, batch.new_tokens)
        ends = np.cumsum(batch.new_tokens)
        within = np.arange(len(row)) - np.repeat(
            ends - batch.new_tokens, batch.new_tokens
        )
        first = np.repeat(batch.length - batch.new_tokens, batch.new_tokens)
        pages, at = np.unique(batch.new_ids // ps, return_index=True)
        self.scores.reset(batch.new_ids)
        self.ledger.assign(pages, row[at], ((first + within) // ps)[at])
        # An open page is older than this forward, and not written before it is over.
        self.ledger.born[pages] = self.epoch + 1

    def _choose_scored(self, batch: BatchRows) -> None:
        """Which queries of the forward feed the scores: decode steps of requests whose
        policies read scores, of each every ``score_interval``-th, whatever its
        neighbours do."""
        step = self.ledger.rows.steps[batch.row] + 1
        lanes = batch.decode & (step % self.rules.score_interval == 0)
        if lanes.any():
            lanes &= self._of_policies(batch.row, lambda policy: policy.reads_scores)
        self.scores.lanes = lanes

    def _place_unplaced(self) -> None:
        ledger = self.ledger
        if not ledger.unplaced:
            return
        pages = ledger.unplaced_pages()
        pages = pages[promotion_order(*self._rank(pages))]
        # Rows that return to free T0 cost one copy; in the window they cost one
        # copy per step.
        spare = ledger.t0.available - self._slack()
        home = min(len(pages), max(spare, len(pages) - ledger.window.available, 0))
        if home > ledger.t0.available and not (
            self._free_ids(home) and self._free_t0(home)
        ):
            raise RuntimeError(
                f"{len(pages)} pages that a batch reads cannot be placed: "
                f"{ledger.t0.available} T0 pages and {ledger.window.available} "
                "window pages are free"
            )
        self._promote(pages[:home])
        rest = pages[home:]
        ledger.enter_window(rest)
        self._point_at_window(rest)

    def _plan_fills(self, read_by_extend: np.ndarray | None) -> np.ndarray:
        """Window pages to fill in this forward."""
        ledger = self.ledger
        if read_by_extend is None:
            # The plan changes only when pages move: most steps reuse it.
            if self._fills is None or self._fills[0] != ledger.window_version:
                window = np.flatnonzero(ledger.at_window > 0)
                self._fills = (ledger.window_version, window)
            return self._fills[1]
        pages = read_by_extend[ledger.window_page[read_by_extend] >= 0]
        return np.unique(ledger.window_page[pages])

    def _mark_streamed(self, batch: BatchRows, filled: int) -> None:
        if not filled:
            return
        ledger = self.ledger
        pages = ledger.in_window()
        owners = ledger.owner[pages]
        owners = owners[owners >= 0]
        ledger.rows.streamed[np.intersect1d(owners, batch.row)] = True

    # -- moves -----------------------------------------------------------------

    def _slack(self) -> int:
        return int(self.ledger.t0.count * DEMOTE_SLACK)

    def _free_window(self) -> int:
        """Window pages that no page waits for."""
        return max(0, self.ledger.window.available - self.ledger.unplaced)

    def _watermark(self) -> int:
        return max(1, int(self.ledger.t0.count * HIGH_WATERMARK))

    def _view(self, pages: np.ndarray) -> PageView:
        ledger = self.ledger
        row = ledger.owner[pages]
        read = ledger.readers[pages] > 0
        private = ledger.private[pages]
        return PageView(
            read=read,
            waiting=~read & (private | (ledger.parks[pages] > 0)),
            private=private,
            generated=ledger.generated[pages],
            row=row,
            index=ledger.index[pages],
            length=ledger.rows.length[row],
            prompt=ledger.rows.prompt[row],
            readers=ledger.readers[pages],
            worth=self._worth(pages),
            last_read=ledger.last_read[pages],
            promoted=ledger.promoted[pages],
        )

    def _worth(self, pages: np.ndarray) -> np.ndarray:
        """What demotes first among pages of one class, lowest first: by score per
        step or by age, as the policies of their requests say."""
        born = self.ledger.born[pages]
        by_score = self._of_policies(
            self.ledger.owner[pages], lambda policy: policy.by_score
        )
        if not by_score.any():
            return born
        # What no step has scored yet is new, not worthless.
        _, steps = self.scores.page_means(pages)
        score = np.where(steps > 0, self.scores.per_step(pages), np.inf)
        if by_score.all():
            return score
        # Scores and ages meet as ranks among their own.
        return np.where(
            by_score, _rank_among(score, by_score), _rank_among(born, ~by_score)
        )

    def _rank(self, pages: np.ndarray) -> tuple[PageView, np.ndarray]:
        view = self._view(pages)
        protection = classify(
            view,
            page_size=self.page_size,
            sink_tokens=self.rules.sink_tokens,
            recent_window=self.rules.recent_window,
            settled_before=self.epoch - SETTLE_FORWARDS,
        )
        return view, protection

    def _demote_for(self, need: int, slack: bool = True) -> bool:
        """Free ``need`` T0 pages, and some slack if that costs no protected row.
        False, and nothing moved, if fewer can be freed."""
        ledger = self.ledger
        pages = self._movable_pages()
        view, protection = self._rank(pages)
        order = demotion_order(view, protection)
        # A lossy page has its int8 page. An exact one needs a host page: its own copy,
        # a free one, or that of a copy which is given up. Unread pages come first, so
        # what they take here they also have below.
        exact = ~ledger.is_lossy(pages[order])
        copies = int((ledger.host_page[ledger.in_t0()] >= 0).sum())
        order = order[~exact | (np.cumsum(exact) <= ledger.host.available + copies)]
        # Unread pages need no window page; the others share what is free.
        fits = ~view.read[order]
        fits |= np.cumsum(view.read[order]) <= self._free_window()
        order = order[fits]
        if len(order) < need:
            return False
        cheap = int((protection[order] <= Protection.UNPROTECTED).sum())
        extra = self._slack() if slack else 0
        chosen = pages[order[: max(need, min(cheap, need + extra))]]
        chosen = self._with_host_pages(chosen, need)
        if chosen is None:
            return False
        self._demote(chosen)
        return True

    def _with_host_pages(self, chosen: np.ndarray, need: int) -> np.ndarray | None:
        """As much of ``chosen`` as the host pool can take, at least ``need``;
        gives up clean copies of pages that stay. None if that is not enough."""
        ledger = self.ledger
        dirty = ~ledger.has_copy(chosen)
        short = int(dirty.sum()) - ledger.host.available
        if short > 0:
            stays = np.ones(len(ledger.live), dtype=bool)
            stays[chosen] = False
            pages = ledger.in_t0()
            copies = pages[(ledger.host_page[pages] >= 0) & stays[pages]]
            ledger.drop_copies(copies[:short], self.epoch)
            fits = ~dirty | (np.cumsum(dirty) <= ledger.host.available)
            chosen = chosen[fits]
        return chosen if len(chosen) >= need else None

    def _demote(self, pages: np.ndarray) -> None:
        ledger = self.ledger
        slots = ledger.t0_page[pages]
        copies = ledger.demote(pages)
        if len(copies):
            self.mover.demote(
                copies.t0_pages, copies.host_pages, int(ledger.born[pages].max())
            )
        if self.poison is not None:
            self.poison(slots)
        read = ledger.readers[pages] > 0
        self.table.clear(pages[~read])
        self._point_at_window(pages[read])
        self.counters.demoted += len(pages)
        self.counters.demoted_clean += len(pages) - len(copies)

    def _promote(self, pages: np.ndarray) -> None:
        if not len(pages):
            return
        self._poison_window(pages)
        slots = self.ledger.promote(pages, self.epoch)
        self.mover.promote(self.ledger.places(pages), slots)
        self.table.place(pages, slots)
        self.counters.promoted += len(pages)

    def _point_at_window(self, pages: np.ndarray) -> None:
        self.table.place(pages, self.ledger.window_page[pages] + self.window_base)

    def _poison_window(self, pages: np.ndarray) -> None:
        if self.poison is not None:
            window = self.ledger.window_page[pages]
            self.poison(window[window >= 0] + self.window_base)

    def _promote_into_free_t0(self) -> None:
        """Rows return when T0 has room beyond the high watermark. Pages that nobody
        reads count as room: a row that is read costs a copy in every step."""
        ledger = self.ledger
        if not ledger.window.used:
            return
        unread, _ = self._movable()
        spare = ledger.t0.available + unread - self._watermark()
        if spare < max(1, self._slack()):
            return  # not worth a scan
        pages = ledger.in_window()
        view, protection = self._rank(pages)
        order = promotion_order(view, protection)
        # Unprotected pages are where their request's ratio wants them.
        wanted = (protection >= Protection.PREFIX) | ~self._by_ratio(pages)
        order = order[wanted[order]]
        pages = pages[order][:spare]
        short = len(pages) - ledger.t0.available
        if short > 0 and not self._demote_for(short, slack=False):
            pages = pages[: ledger.t0.available]
        self._promote(pages)

    def _by_ratio(self, pages: np.ndarray) -> np.ndarray:
        """bool [n]: the page's request keeps a fixed share of its pages in T0."""
        owner = self.ledger.owner[pages]
        fixed = self._of_policies(owner, lambda policy: policy.hbm_ratio is not None)
        return fixed & (owner >= 0)

    def _retier(self, batch: BatchRows) -> None:
        """Requests that are due move their unprotected generated pages to where their
        policies want them."""
        steps = self.ledger.rows.steps[batch.row]
        due = batch.decode & (steps % self.rules.retier_interval == 0)
        for row in batch.row[due].tolist():
            policy = self.policy_of(row)
            if policy.moves and (policy.is_lossy or policy.hbm_ratio is not None):
                self.retier_request(row, policy)

    def retier_request(self, row: int, policy: Policy) -> None:
        """Move the unprotected generated pages of the request in ``row`` to where
        ``policy`` wants them, as far as there is room. Between forwards only."""
        ledger = self.ledger
        pages = self._candidates(row)
        if not len(pages):
            return
        seen = self._describe(row, pages, policy)
        plan = policy.plan(seen)

        def ascending(chosen: np.ndarray, room: int) -> np.ndarray:
            """The pages that are ``chosen`` (bool [n]), and if there is no ``room``
            for all of them, from the lowest value up."""
            if int(chosen.sum()) <= room:
                return pages[chosen]
            order = policy.ascending(seen)
            return pages[order[chosen[order]]]

        self._drop(pages[plan == Tier.T3])
        compress = (plan == Tier.T2) & ~ledger.is_lossy(pages)
        room = min(ledger.int8.available, self._free_window())
        self._compress(ascending(compress, room))
        if policy.hbm_ratio is None:
            return
        in_t0 = ledger.t0_page[pages] >= 0  # not those just compressed or dropped
        leave = ((plan == Tier.T1) | (plan == Tier.T2)) & in_t0
        window = self._free_window()
        fits = self._with_host_pages(ascending(leave, window)[:window], 0)
        if fits is not None and len(fits):
            self._demote(fits)
        spare = max(0, ledger.t0.available - self._slack())
        back = ascending((plan == Tier.T0) & ~in_t0, spare)
        self._promote(back[max(0, len(back) - spare) :])

    def _candidates(self, row: int) -> np.ndarray:
        """Unprotected generated pages of the request in ``row`` that have bytes, by
        position: virtual pages, int64 [n]."""
        ledger = self.ledger
        first, end = unprotected_range(
            int(ledger.rows.prompt[row]),
            int(ledger.rows.length[row]),
            page_size=self.page_size,
            sink_tokens=self.rules.sink_tokens,
            recent_window=self.rules.recent_window,
        )
        pages = np.flatnonzero((ledger.owner == row) & ~ledger.dropped)
        index = ledger.index[pages]
        free = (index >= first) & (index < end)
        free &= ledger.born[pages] <= self.mover.done_epoch
        # Positions are all different: no sort is needed to order by them.
        at = np.zeros(max(0, end - first), dtype=np.int64)
        at[index[free] - first] = pages[free]
        return at[at > 0]

    def _describe(self, row: int, pages: np.ndarray, policy: Policy) -> Candidates:
        ledger, needs = self.ledger, policy.needs
        lossy, in_t0 = ledger.is_lossy(pages), ledger.t0_page[pages] >= 0
        score = steps = None
        if Statistic.SCORE in needs:
            score, steps = self.scores.page_means(pages)
        return Candidates(
            index=ledger.index[pages],
            tier=np.select([in_t0, lossy], [Tier.T0, Tier.T2], Tier.T1),
            lossy=lossy,
            dropped=int(ledger.rows.dropped[row]),
            compressed=int(ledger.rows.compressed[row]),
            seed=self._seeds.get(row, 0),
            score=score,
            steps=steps,
            value_norm=(
                self._value_norms(pages) if Statistic.VALUE_NORM in needs else None
            ),
            redundancy=(
                self.statistics.redundancy(ledger.places(pages))
                if Statistic.REDUNDANCY in needs
                else None
            ),
        )

    def _value_norms(self, pages: np.ndarray) -> np.ndarray:
        """Rows never change, so each page is looked at once."""
        norms = self.scores.value_norm
        new = pages[np.isnan(norms[pages])]
        if len(new):
            norms[new] = self.statistics.value_norms(self.ledger.places(new))
        return norms[pages]

    def _drop(self, pages: np.ndarray) -> None:
        if not len(pages):
            return
        ledger = self.ledger
        # The weight that a row has had per step is the one that it would have had.
        error = self.scores.per_step(pages) * self._value_norms(pages)
        np.add.at(
            ledger.rows.dropped_error, ledger.owner[pages], error * self.page_size
        )
        self._poison_window(pages)
        slots = ledger.drop(pages, self.epoch)
        self.table.drop(pages)
        if self.poison is not None:
            self.poison(slots)
        self.counters.dropped += len(pages)

    def _compress(self, pages: np.ndarray) -> None:
        """As many of ``pages``, none of which was ever compressed, as the int8 pool
        and the window can take, the first ones first."""
        ledger = self.ledger
        pages = pages[: ledger.int8.available]
        entering = ledger.window_page[pages] < 0
        pages = pages[~entering | (np.cumsum(entering) <= self._free_window())]
        if not len(pages):
            return
        sources, slots = ledger.places(pages), ledger.t0_page[pages]
        int8_pages = ledger.compress(pages, self.epoch)
        self.mover.compress(sources, int8_pages, int(ledger.born[pages].max()))
        if self.poison is not None:
            self.poison(slots[slots >= 0])
        self._point_at_window(pages)
        self.counters.compressed += len(pages)

    # -- the whole -------------------------------------------------------------

    def reset(self) -> None:
        """``flush_cache``: nothing is live."""
        self.ledger.reset()
        self.table.reset()
        self.scores.clear()
        self._own_policy.clear()
        self._seeds.clear()
        self._capacity = self._fills = None

    def check_integrity(self) -> None:
        """The ledger is sound and the page table says the same."""
        ledger = self.ledger
        ledger.check_integrity()
        expected = np.zeros_like(ledger.t0_page)
        in_t0 = ledger.t0_page >= 0
        expected[in_t0] = ledger.t0_page[in_t0]
        in_window = ledger.window_page >= 0
        expected[in_window] = ledger.window_page[in_window] + self.window_base
        expected[ledger.dropped] = DROPPED
        actual = self.table.v2p.cpu().numpy()
        wrong = np.flatnonzero(expected != actual)
        assert not len(wrong), f"page table is wrong at {wrong[:8].tolist()}"


def _rank_among(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Of each ``chosen`` (bool [n]) value the share of the chosen ones below it, ties
    by position: float64 [n] from 0 to 1; 0 for the others."""
    rank = np.zeros(len(values))
    at = np.flatnonzero(chosen)
    rank[at[np.argsort(values[at], kind="stable")]] = np.arange(len(at)) / len(at)
    return rank
