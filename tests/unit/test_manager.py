"""What the tier manager decides: room, placement, promotion, ratio mode."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from recording import Recorder
from tiers import LAYERS, NO_PAGES, Array, Tiers, batch_of, pages

from sglang_tiered.memory.manager import (
    DEMOTE_SLACK,
    HIGH_WATERMARK,
    SETTLE_FORWARDS,
    TierRules,
)
from sglang_tiered.policy.recency import Recency


class Pool(Tiers):
    """Tiers whose pages are written by whole forwards."""

    def request(self, row: int, tokens: int, prompt: int = 0) -> Array:
        """A request's first forward; its private pages."""
        count = -(-tokens // self.page_size)
        assert self.manager.make_room(count)
        new = self.manager.allocate(count)
        ids = (new[:, None] * self.page_size + np.arange(self.page_size)).ravel()
        self.forward((row, tokens, tokens, prompt), ids=ids[:tokens], decode=False)
        return new

    def cold(self, count: int) -> Array:
        """Tree pages that nobody reads, in T0."""
        new = self.request(0, count * self.page_size, count * self.page_size)
        self.ledger.give_to_tree(new)
        return new

    def in_t1(self, count: int) -> Array:
        """Tree pages that nobody reads, in T1."""
        new = self.cold(count)
        self.demote(new)
        return new

    def demote(self, virtual: Array) -> None:
        self.manager._demote(virtual)

    def forward(
        self,
        *entries: tuple[int, int, int, int],
        ids: Array = NO_PAGES,
        decode: bool = True,
        reads: Array | None = None,
    ) -> None:
        batch = batch_of(*entries, ids=ids, decode=decode)
        self.manager.begin_forward(batch, reads)
        for layer in range(LAYERS):
            self.write(layer, ids, ids.astype(np.float32))
            self.engine.wait_until(layer)
        self.manager.end_forward(batch)

    def decode(self, *rows: int) -> Array:
        """One decode step of each row (pages of one token); the new pages."""
        assert self.manager.make_room(len(rows))
        new = self.manager.allocate(len(rows))
        length = self.ledger.rows.length
        prompt = self.ledger.rows.prompt
        self.forward(
            *((row, int(length[row]) + 1, 1, int(prompt[row])) for row in rows), ids=new
        )
        return new

    def in_t0(self, virtual: Array) -> list[bool]:
        return (self.ledger.t0_page[virtual] >= 0).tolist()

    def in_window(self, virtual: Array) -> list[bool]:
        return (self.ledger.window_page[virtual] >= 0).tolist()


@pytest.fixture
def make_pool() -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(**settings: Any) -> Pool:
        made.append(Pool(**settings))
        return made[-1]

    yield make
    for pool in made:
        pool.check_integrity()
        pool.close()


@pytest.fixture
def pool(make_pool: Callable[..., Pool]) -> Pool:
    """T0 16, window 8, host 32, pages of one token."""
    return make_pool()


# -- what can be had


def test_an_empty_t0_can_be_had(pool: Pool) -> None:
    assert pool.manager.attainable() == 16


def test_cold_pages_can_be_had(pool: Pool) -> None:
    pool.cold(10)
    assert pool.manager.attainable() == 16


def test_cold_pages_in_t1_are_no_room(pool: Pool) -> None:
    pool.in_t1(10)
    pool.request(1, 12)
    assert pool.manager.attainable() == 4 + 8


def test_pages_that_are_read_can_be_had_as_far_as_the_window_goes(pool: Pool) -> None:
    pool.request(1, 14)
    assert pool.manager.attainable() == 2 + 8


def test_pages_that_wait_for_the_window_take_its_room(pool: Pool) -> None:
    waiting = pool.in_t1(3)
    pool.request(1, 14)
    pool.manager.read(waiting)
    assert pool.manager.attainable() == 2 + 5


def test_pages_beyond_the_window_need_t0(pool: Pool) -> None:
    waiting = pool.in_t1(10)
    pool.manager.read(waiting)
    assert pool.manager.attainable() == 16 - 2


def test_a_page_that_no_forward_has_written_cannot_be_had(pool: Pool) -> None:
    pool.manager.allocate(3)
    assert pool.manager.attainable() == 13


def test_an_open_page_cannot_be_had(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(page_size=4)
    pool.request(1, 10)
    assert pool.manager.attainable() == 13 + 2


def test_what_a_candidate_reads_is_counted_as_read(pool: Pool) -> None:
    pool.cold(12)
    assert pool.manager.attainable(12, 0) == 4 + 8
    assert pool.manager.attainable(4, 10) == 4 + 8 - 2


def test_the_answer_follows_the_tables(pool: Pool) -> None:
    cold = pool.cold(12)
    assert pool.manager.attainable() == 16
    pool.manager.read(cold)
    assert pool.manager.attainable() == 12


def test_one_request_can_fill_t0_and_the_window_but_a_page(pool: Pool) -> None:
    assert pool.manager.largest_request() == 16 + 8 - 1


def test_a_small_host_bounds_a_request(make_pool: Callable[..., Pool]) -> None:
    assert make_pool(host=5).manager.largest_request() == 16 + 5 - 1


def test_room_for_reading_is_what_t0_and_window_do_not_hold(pool: Pool) -> None:
    pool.request(1, 10)
    pool.cold(3)
    assert pool.manager.room_for_reading() == 16 + 8 - 10


def test_the_largest_request_runs_to_its_last_token(pool: Pool) -> None:
    """sglang#19881: the last running request fills the pool."""
    pool.request(1, 4)
    for _ in range(pool.manager.largest_request() - 4):
        pool.decode(1)
    assert pool.ledger.rows.length[1] == 23


# -- making room


def test_room_that_is_there_moves_nothing(pool: Pool) -> None:
    pool.cold(10)
    assert pool.manager.make_room(6)
    assert pool.manager.counters.demoted == 0


@pytest.mark.parametrize("n", [1, 5, 12])
def test_room_is_made_by_demotion(n: int, pool: Pool) -> None:
    pool.cold(16)
    assert pool.manager.make_room(n)
    assert pool.ledger.t0.available >= n


def test_sglang_4987_no_more_is_demoted_than_asked_and_the_slack(
    make_pool: Callable[..., Pool],
) -> None:
    """sglang#4987: asked for n, frees at least n and little more."""
    pool = make_pool(t0=64, host=128)
    pool.cold(64)
    assert pool.manager.make_room(5)
    assert pool.manager.counters.demoted == 5 + 64 * DEMOTE_SLACK


def test_slack_takes_no_protected_page(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(t0=64, host=128, rules=TierRules(sink_tokens=0, recent_window=64))
    pool.request(1, 64)
    assert pool.manager.make_room(3)
    assert pool.manager.counters.demoted == 3


def test_cold_pages_go_before_pages_that_are_read(pool: Pool) -> None:
    mine = pool.request(1, 8)
    cold = pool.cold(8)
    assert pool.manager.make_room(8)
    assert pool.in_t0(cold) == [False] * 8
    assert pool.in_t0(mine) == [True] * 8


def test_demoted_pages_that_are_read_pass_through_the_window(pool: Pool) -> None:
    mine = pool.request(1, 16)
    assert pool.manager.make_room(3)
    assert sum(pool.in_window(mine)) == 3


def test_the_page_table_follows_a_demotion(pool: Pool) -> None:
    mine, cold = pool.request(1, 13), pool.cold(3)
    assert pool.manager.make_room(4)
    assert pool.physical(cold).tolist() == [0, 0, 0]
    away = mine[np.array(pool.in_window(mine))]
    assert (pool.physical(away) >= pool.backing.window_base).all()


def test_more_than_the_window_takes_is_refused(pool: Pool) -> None:
    pool.request(1, 16)
    assert not pool.manager.make_room(9)


def test_a_refusal_moves_nothing(pool: Pool) -> None:
    pool.request(1, 16)
    pool.manager.make_room(9)
    assert pool.manager.counters.demoted == 0
    assert pool.manager.make_room(8)


def test_vllm_39702_room_is_made_again_at_allocation(pool: Pool) -> None:
    """vllm#39702: what was free when the plan was made is taken when it is used."""
    pool.cold(16)
    assert pool.manager.attainable() == 16
    assert pool.manager.make_room(4)
    pool.request(1, 4)
    assert pool.manager.make_room(4)
    assert len(pool.manager.allocate(4)) == 4


def test_ids_that_are_short_are_reclaimed(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(t0=4, host=4)
    old, young = pool.in_t1(4), pool.cold(4)
    asked: list[int] = []

    def reclaim(n: int) -> None:
        asked.append(n)
        pool.manager.release(old[:n])

    pool.manager.reclaim = reclaim
    assert pool.manager.make_room(2)
    assert asked == [2]
    assert sum(pool.in_t0(young)) == 2


def test_ids_that_cannot_be_reclaimed_are_refused(
    make_pool: Callable[..., Pool],
) -> None:
    """sglang#23704: T1 is full; the answer is no, not an exception."""
    pool = make_pool(t0=4, host=4)
    pool.in_t1(4)
    pool.cold(4)
    assert not pool.manager.make_room(1)


def test_a_full_host_gives_up_copies_of_pages_that_stay(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool(t0=4, host=4)
    clean = pool.in_t1(2)
    pool.manager.read(clean)
    pool.forward()  # promotes: T0 is empty
    pool.in_t1(2)
    dirty = pool.cold(2)
    assert pool.ledger.host.available == 0
    assert pool.manager.make_room(1)
    assert sum(pool.in_t0(dirty)) == 1
    assert pool.ledger.clean == 1


def test_clean_pages_are_demoted_without_a_copy(pool: Pool) -> None:
    clean = pool.in_t1(4)
    pool.manager.read(clean)
    pool.forward()
    pool.manager.unread(clean)
    before = pool.engine.bytes_demoted
    assert pool.manager.make_room(16)
    assert pool.manager.counters.demoted_clean == 4
    assert pool.engine.bytes_demoted == before


def test_pages_that_return_to_t0_need_ids_for_what_leaves_it(
    make_pool: Callable[..., Pool],
) -> None:
    """T0 is cold, the host is full, and two of its pages are read through a window
    of one: the other one has to change places with a cold page, and for a moment
    both need a host page."""
    pool = make_pool(t0=4, window=1, host=4)
    away, cold = pool.in_t1(4), pool.cold(4)
    pool.manager.reclaim = lambda n: pool.manager.release(cold[:n])
    pool.manager.read(away[:2])
    assert pool.manager.make_room(1)
    assert pool.ledger.t0.available == 2
    new = pool.manager.allocate(1)
    pool.forward((1, 1, 1, 0), ids=new, decode=False, reads=away[:2])
    assert sorted(pool.in_t0(away[:2])) == [False, True]


def test_placing_pages_reclaims_ids(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(t0=4, window=1, host=4)
    away, cold = pool.in_t1(4), pool.cold(4)
    pool.manager.reclaim = lambda n: pool.manager.release(cold[:n])
    pool.manager.read(away[:2])
    pool.forward(reads=away[:2], decode=False)
    assert sorted(pool.in_t0(away[:2])) == [False, True]


# -- allocation and release


def test_new_pages_are_in_the_page_table(pool: Pool) -> None:
    new = pool.manager.allocate(3)
    assert pool.physical(new).tolist() == pool.ledger.t0_page[new].tolist()


def test_an_allocation_without_room_is_refused(pool: Pool) -> None:
    pool.cold(16)
    with pytest.raises(RuntimeError, match="1 pages asked for; 0 T0 pages"):
        pool.manager.allocate(1)


def test_released_pages_have_no_place(pool: Pool) -> None:
    mine = pool.request(1, 16)
    pool.manager.make_room(4)
    pool.manager.release(mine)
    assert pool.physical(mine).tolist() == [0] * 16


def test_released_rows_are_poisoned(pool: Pool) -> None:
    mine = pool.request(1, 16)
    pool.manager.make_room(4)
    places = pool.physical(mine)
    pool.manager.release(mine)
    for layer in range(LAYERS):
        assert np.isnan(pool._rows(layer, "k")[places]).all()


def test_sglang_27666_demotion_never_changes_an_owner(pool: Pool) -> None:
    """sglang#27666: an offload freed slots that the tree owned."""
    mine, tree = pool.request(1, 4), pool.cold(12)
    assert pool.manager.make_room(14)
    assert pool.ledger.live[np.concatenate([mine, tree])].all()
    assert pool.ledger.private[mine].all()
    assert not pool.ledger.private[tree].any()


# -- a step in flight


class Flight:
    """A pool on recorded streams: a forward is over when ``land`` says so."""

    def __init__(self, make_pool: Callable[..., Pool], **settings: Any) -> None:
        self.recorder = Recorder()
        self.pool = make_pool(recorder=self.recorder, **settings)

    def forward(
        self,
        *entries: tuple[int, int, int, int],
        ids: Array = NO_PAGES,
        decode: bool = True,
    ) -> None:
        batch = batch_of(*entries, ids=ids, decode=decode)
        self.pool.manager.begin_forward(batch, None)
        self.pool.manager.end_forward(batch)

    def land(self) -> None:
        """Everything runs, as early as its waits allow: fills before copies."""
        self.recorder.run("fill", "forward", "schedule")


@pytest.fixture
def make_flight(make_pool: Callable[..., Pool]) -> Iterator[Callable[..., Flight]]:
    made: list[Flight] = []

    def make(**settings: Any) -> Flight:
        made.append(Flight(make_pool, **settings))
        return made[-1]

    yield make
    for flight in made:
        flight.land()


def test_sglang_38463_rows_that_a_step_writes_stay(
    make_flight: Callable[..., Flight],
) -> None:
    """sglang#38463, vllm#45704: chunks enter the tree before their forward ends."""
    flight = make_flight()
    new = flight.pool.manager.allocate(16)
    flight.forward((1, 16, 16, 16), ids=new, decode=False)
    flight.pool.ledger.give_to_tree(new)
    assert flight.pool.manager.attainable() == 0
    assert not flight.pool.manager.make_room(1)
    flight.land()
    assert flight.pool.manager.make_room(1)


def test_sglang_38463_a_page_stays_until_its_last_row_is_written(
    make_flight: Callable[..., Flight],
) -> None:
    """sglang#38463: the step in flight fills a page that is older than the step."""
    flight = make_flight(page_size=4, t0=2)
    page = flight.pool.manager.allocate(1)
    flight.forward((1, 3, 3, 0), ids=page * 4 + np.arange(3), decode=False)
    flight.land()
    flight.forward((1, 4, 1, 0), ids=page * 4 + 3)
    assert flight.pool.manager.attainable() == 1
    flight.land()
    assert flight.pool.manager.attainable() == 2


def test_sglang_14972_a_step_in_flight_is_counted_once(
    make_flight: Callable[..., Flight],
) -> None:
    """sglang#14972: demote and retract in one tick, with a step in flight."""
    flight = make_flight()
    pool = flight.pool
    old, other = pool.manager.allocate(6), pool.manager.allocate(6)
    flight.forward(
        (1, 6, 6, 0), (2, 6, 6, 0), ids=np.concatenate([old, other]), decode=False
    )
    flight.land()
    new = pool.manager.allocate(2)
    flight.forward((1, 7, 1, 0), (2, 7, 1, 0), ids=new)
    before = pool.manager.attainable()
    assert pool.manager.make_room(6)
    assert pool.manager.attainable() == before
    pool.manager.release(np.concatenate([old, new[:1]]))
    pool.check_integrity()
    # Six rows of the other request may leave T0; its row in flight may not.
    assert pool.manager.attainable() == 15
    assert pool.manager.make_room(15)


def test_vllm_29870_a_retracted_request_comes_back_while_its_rows_are_copied(
    make_flight: Callable[..., Flight],
) -> None:
    """vllm#29870, vllm#46014: the demotion of its rows is still pending."""
    flight = make_flight()
    pool = flight.pool
    rows = pool.manager.allocate(6)
    flight.forward((1, 6, 6, 6), ids=rows, decode=False)
    flight.land()
    for layer in range(LAYERS):
        pool.write(layer, rows, rows.astype(np.float32))
    pool.ledger.give_to_tree(rows)
    pool.demote(rows)
    pool.manager.read(rows)
    new = pool.manager.allocate(14)
    flight.forward((1, 20, 14, 6), ids=new, decode=False)
    flight.land()
    assert pool.holds(rows, rows[:, None].astype(np.float32))
    assert sum(pool.in_window(rows)) == 4
    # The forward has been as far as the fills of its first two layers.
    assert pool.reads(0, rows, rows.astype(np.float32))
    assert pool.reads(1, rows, rows.astype(np.float32))


# -- reopening a page


def test_a_reopened_page_is_in_t0_and_has_no_copy(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool(page_size=4)
    page = pool.request(1, 3)
    pool.manager.unread(page)
    pool.ledger.rows.renew(1)
    pool.demote(page)
    assert pool.manager.reopen(page)
    assert pool.in_t0(page) == [True]
    assert pool.ledger.host_page[page].tolist() == [-1]


def test_a_reopened_page_keeps_its_rows(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(page_size=4)
    page = pool.request(1, 3)
    pool.manager.unread(page)
    pool.demote(page)
    pool.manager.reopen(page)
    ids = page * 4 + np.arange(3)
    assert all(pool.reads(n, ids, ids.astype(np.float32)) for n in range(LAYERS))


def test_a_reopened_page_stays_until_it_is_written(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool(page_size=4)
    page = pool.request(1, 3)
    pool.manager.unread(page)
    pool.demote(page)
    pool.manager.reopen(page)
    assert pool.manager.attainable() == 15


def test_a_page_cannot_be_reopened_without_room(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool(page_size=4, t0=4, window=1)
    page = pool.request(1, 3)
    pool.manager.unread(page)
    pool.demote(page)
    pool.request(2, 16)
    assert pool.manager.make_room(1)
    pool.manager.allocate(1)
    assert not pool.manager.reopen(page)


# -- placing what a batch reads


def test_pages_return_to_a_t0_with_room(pool: Pool) -> None:
    away = pool.in_t1(5)
    pool.manager.read(away)
    pool.forward(reads=away, decode=False)
    assert pool.in_t0(away) == [True] * 5


def test_pages_pass_through_the_window_of_a_full_t0(pool: Pool) -> None:
    away = pool.in_t1(5)
    pool.request(1, 16)
    pool.manager.read(away)
    pool.forward(reads=away, decode=False)
    assert pool.in_window(away) == [True] * 5


def test_pages_beyond_the_window_push_cold_ones_out(pool: Pool) -> None:
    away, cold = pool.in_t1(10), pool.cold(16)
    pool.manager.read(away)
    pool.forward(reads=away, decode=False)
    assert (sum(pool.in_t0(away)), sum(pool.in_window(away))) == (2, 8)
    assert sum(pool.in_t0(cold)) == 14


def test_pages_that_cannot_be_placed_are_an_error(pool: Pool) -> None:
    away = pool.in_t1(10)
    pool.request(1, 16)
    pool.manager.read(away)
    with pytest.raises(RuntimeError, match="10 pages that a batch reads cannot be"):
        pool.manager.begin_forward(batch_of(), away)


def test_a_shared_prefix_returns_before_a_tail(pool: Pool) -> None:
    away = pool.in_t1(4)
    pool.request(1, 14)
    pool.manager.read(away)
    pool.manager.read(away[:2])
    pool.forward(reads=away, decode=False)
    assert pool.in_t0(away) == [True, True, False, False]


def test_a_new_page_is_named_by_its_request(pool: Pool) -> None:
    new = pool.request(3, 5, prompt=4)
    ledger = pool.ledger
    assert ledger.owner[new].tolist() == [3] * 5
    assert ledger.index[new].tolist() == [0, 1, 2, 3, 4]
    assert ledger.generated[new].tolist() == [False] * 4 + [True]


def test_pages_of_many_requests_are_named_in_one_batch(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool(page_size=4)
    first, second = pool.manager.allocate(2), pool.manager.allocate(2)
    ids = np.r_[
        first[0] * 4 + np.arange(4), first[1] * 4, second[0] * 4 + 3, second[1] * 4
    ]
    pool.forward((1, 5, 5, 0), (2, 9, 2, 0), ids=ids, decode=False)
    assert pool.ledger.owner[np.r_[first, second]].tolist() == [1, 1, 2, 2]
    assert pool.ledger.index[np.r_[first, second]].tolist() == [0, 1, 1, 2]


def test_a_decode_step_fills_all_that_pass_through_the_window(pool: Pool) -> None:
    pool.request(1, 10)
    pool.request(2, 6)
    pool.manager.make_room(4)
    before = pool.manager.counters.streamed
    pool.decode(1, 2)
    assert pool.manager.counters.streamed - before == len(pool.ledger.in_window())


def test_a_prefill_fills_only_what_it_reads(pool: Pool) -> None:
    mine = pool.request(1, 16)
    pool.manager.make_room(6)
    streams = mine[np.array(pool.in_window(mine))]
    pool.forward(reads=streams[:2], decode=False)
    assert pool.manager.counters.streamed == 2


def test_a_prefill_that_reads_a_page_twice_fills_it_once(pool: Pool) -> None:
    mine = pool.request(1, 16)
    pool.manager.make_room(6)
    streams = mine[np.array(pool.in_window(mine))]
    pool.forward(reads=np.r_[streams[:2], streams[:1]], decode=False)
    assert pool.manager.counters.streamed == 2


def test_a_request_that_streams_is_marked(pool: Pool) -> None:
    pool.request(1, 8)
    pool.request(2, 8)
    pool.manager.make_room(2)
    pool.decode(1)
    streamed = pool.ledger.rows.streamed
    assert (bool(streamed[1]), bool(streamed[2])) == (True, False)


def test_peaks_are_kept(pool: Pool) -> None:
    mine = pool.request(1, 16)
    pool.manager.make_room(4)
    pool.forward()
    pool.manager.release(mine)
    pool.forward()
    counters = pool.manager.counters
    assert (counters.t0_peak, counters.t1_peak, counters.window_peak) == (16, 4, 4)


# -- promotion


def streaming(pool: Pool, count: int) -> Array:
    """Pages of row 1 that pass through the window while T0 is full."""
    mine = pool.request(1, 16)
    pool.manager.make_room(count)
    pool.request(2, count)
    return mine[np.array(pool.in_window(mine))]


def leave(pool: Pool, row: int) -> None:
    """The request in ``row`` goes away."""
    pool.manager.release(np.flatnonzero(pool.ledger.owner == row))
    pool.ledger.rows.renew(row)


def test_pages_return_when_t0_has_room(pool: Pool) -> None:
    streams = streaming(pool, 6)
    leave(pool, 2)
    pool.forward((1, 16, 0, 0))
    assert sum(pool.in_t0(streams)) == 6 - 16 * HIGH_WATERMARK


def test_a_little_room_promotes_nothing(pool: Pool) -> None:
    streams = streaming(pool, 2)
    leave(pool, 2)
    pool.forward((1, 16, 0, 0))
    assert pool.in_t0(streams) == [False, False]


def test_a_prefill_promotes_nothing(pool: Pool) -> None:
    streams = streaming(pool, 6)
    leave(pool, 2)
    pool.forward(decode=False, reads=NO_PAGES)
    assert not any(pool.in_t0(streams))


def test_cold_pages_give_way_to_pages_that_are_read(pool: Pool) -> None:
    streams = streaming(pool, 6)
    leave(pool, 2)
    cold = pool.cold(6)
    pool.forward((1, 16, 0, 0))
    assert sum(pool.in_t0(streams)) == 4
    assert sum(pool.in_t0(cold)) == 2


def test_the_youngest_rows_return_first(pool: Pool) -> None:
    streams = streaming(pool, 6)
    leave(pool, 2)
    pool.forward((1, 16, 0, 0))
    assert pool.in_t0(streams) == [False, False, True, True, True, True]


def test_a_promoted_page_is_the_last_of_its_kind_to_leave(pool: Pool) -> None:
    streams = streaming(pool, 6)
    leave(pool, 2)
    pool.forward((1, 16, 0, 0))
    back = streams[np.array(pool.in_t0(streams))]
    pool.manager.make_room(3)
    assert pool.in_t0(back) == [True] * 4


def test_a_promoted_page_settles(pool: Pool) -> None:
    streams = streaming(pool, 6)
    leave(pool, 2)
    for _ in range(SETTLE_FORWARDS + 2):
        pool.forward((1, 16, 0, 0))
    back = streams[np.array(pool.in_t0(streams))]
    pool.manager.make_room(3)
    assert sum(pool.in_t0(back)) < 4


def test_promotion_and_demotion_do_not_chase_each_other(pool: Pool) -> None:
    streaming(pool, 6)
    leave(pool, 2)
    pool.forward((1, 16, 0, 0))
    before = pool.manager.counters.promoted
    for _ in range(10):
        pool.manager.make_room(1)
        pool.forward((1, 16, 0, 0))
    assert pool.manager.counters.promoted == before


# -- steps and ratio mode


def test_only_decode_steps_are_counted(pool: Pool) -> None:
    pool.request(1, 4)
    pool.decode(1)
    pool.decode(1)
    assert pool.ledger.rows.steps[1] == 2


@pytest.fixture
def make_ratio(make_pool: Callable[..., Pool]) -> Callable[..., Pool]:
    def make(ratio: float) -> Pool:
        rules = TierRules(sink_tokens=2, recent_window=2, retier_interval=4)
        policy = Recency(hbm_ratio=ratio)
        return make_pool(t0=32, window=16, rules=rules, policy=policy)

    return make


def generate(pool: Pool, row: int, prompt: int, steps: int) -> Array:
    """Prefill and decode; all pages of the request."""
    pool.request(row, prompt, prompt)
    for _ in range(steps):
        pool.decode(row)
    mine = np.flatnonzero((pool.ledger.owner == row) & pool.ledger.private)
    return mine[np.argsort(pool.ledger.index[mine])]


def test_a_share_of_each_request_stays(make_ratio: Callable[..., Pool]) -> None:
    """3 prompt tokens, 12 generated: 2 sinks, 2 recent, 8 of which half stays."""
    pool = make_ratio(0.5)
    mine = generate(pool, 1, 3, 12)
    assert pool.in_t0(mine) == [True] * 5 + [False] * 4 + [True] * 6


def test_a_share_of_one_keeps_all(make_ratio: Callable[..., Pool]) -> None:
    pool = make_ratio(1.0)
    assert all(pool.in_t0(generate(pool, 1, 3, 12)))


def test_a_share_of_nothing_keeps_the_protected_rows(
    make_ratio: Callable[..., Pool],
) -> None:
    pool = make_ratio(0.0)
    mine = generate(pool, 1, 3, 12)
    assert pool.in_t0(mine) == [True] * 5 + [False] * 8 + [True] * 2


def test_retiering_waits_for_its_step(make_ratio: Callable[..., Pool]) -> None:
    pool = make_ratio(0.0)
    assert all(pool.in_t0(generate(pool, 1, 3, 7)))
    pool.decode(1)
    assert len(pool.ledger.in_window()) == 4


def test_retiering_is_due_for_each_request_by_itself(
    make_ratio: Callable[..., Pool],
) -> None:
    pool = make_ratio(0.0)
    generate(pool, 1, 1, 6)
    pool.request(2, 1, 1)
    for _ in range(2):
        pool.decode(1, 2)
    moved = pool.ledger.owner[pool.ledger.in_window()]
    assert set(moved.tolist()) == {1}


def test_ratio_mode_stops_at_the_window(make_pool: Callable[..., Pool]) -> None:
    rules = TierRules(sink_tokens=0, recent_window=1, retier_interval=4)
    pool = make_pool(t0=32, window=3, rules=rules, policy=Recency(hbm_ratio=0.0))
    mine = generate(pool, 1, 1, 12)
    assert sum(pool.in_window(mine)) == 3


def test_pages_return_when_the_share_has_grown(
    make_ratio: Callable[..., Pool],
) -> None:
    pool = make_ratio(0.5)
    mine = generate(pool, 1, 3, 12)
    pool.demote(mine[9:12])
    for _ in range(4):
        pool.decode(1)
    assert pool.in_t0(mine[9:12]) == [False, False, True]


# -- the whole


def test_a_flush_leaves_an_empty_pool(pool: Pool) -> None:
    pool.request(1, 16)
    pool.manager.make_room(4)
    pool.manager.reset()
    assert pool.manager.attainable() == 16
    assert not pool.manager.table.v2p.any()


def test_an_audit_compares_the_page_table(pool: Pool) -> None:
    mine = pool.request(1, 4)
    pool.manager.table.place(mine[:1], pages(9))
    with pytest.raises(AssertionError, match="page table is wrong"):
        pool.manager.check_integrity()
    pool.manager.table.place(mine[:1], pool.ledger.t0_page[mine[:1]])
