"""What policies ask for at re-tier time: pages rounded, dropped and accounted."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from test_manager import Pool, generate

from sglang_tiered.memory.manager import TierRules
from sglang_tiered.memory.page_table import DROPPED
from sglang_tiered.policy.full import Full
from sglang_tiered.policy.hierarchy import Hierarchy
from sglang_tiered.policy.recency import Recency
from sglang_tiered.policy.streaming import Streaming

# A prompt of 3, then 12 steps: 2 sinks, 2 recent rows and 8 that are free.
PROMPT, STEPS, FREE = 3, 12, slice(5, 13)
RULES = TierRules(sink_tokens=2, recent_window=2, retier_interval=4)


@pytest.fixture
def make_pool() -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(**settings: Any) -> Pool:
        made.append(Pool(t0=32, window=16, int8=8, rules=RULES, **settings))
        return made[-1]

    yield make
    for pool in made:
        pool.check_integrity()
        pool.close()


def lose_half(make_pool: Callable[..., Pool], policy: Any) -> tuple[Pool, np.ndarray]:
    pool = make_pool(policy=policy)
    return pool, generate(pool, 1, PROMPT, STEPS)


def test_the_oldest_free_rows_are_dropped(make_pool: Callable[..., Pool]) -> None:
    pool, mine = lose_half(make_pool, Streaming(budget=0.5))
    assert pool.ledger.dropped[mine].tolist() == [False] * 5 + [True] * 4 + [False] * 6


def test_their_t0_pages_are_free_at_once(make_pool: Callable[..., Pool]) -> None:
    pool, mine = lose_half(make_pool, Streaming(budget=0.5))
    assert pool.ledger.t0.used == len(mine) - 4


def test_the_page_table_leaves_them_out(make_pool: Callable[..., Pool]) -> None:
    pool, mine = lose_half(make_pool, Streaming(budget=0.5))
    gone = pool.manager.table.v2p.numpy()[mine] == DROPPED
    assert gone.tolist() == pool.ledger.dropped[mine].tolist()


def test_a_released_page_is_no_longer_dropped_to_the_page_table(
    make_pool: Callable[..., Pool],
) -> None:
    pool, mine = lose_half(make_pool, Streaming(budget=0.5))
    pool.manager.release(mine)
    assert not (pool.manager.table.v2p.numpy() == DROPPED).any()


def test_half_of_the_free_rows_are_rounded(make_pool: Callable[..., Pool]) -> None:
    pool, mine = lose_half(make_pool, Hierarchy(compress_ratio=0.5))
    lossy = pool.ledger.is_lossy(mine)
    assert lossy.sum() == 4
    assert not lossy[: FREE.start].any()
    assert not lossy[FREE.stop :].any()


def test_rounding_stops_where_the_int8_pool_ends(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool(policy=Hierarchy(compress_ratio=1.0))
    generate(pool, 1, PROMPT, 24)
    assert pool.ledger.int8.available == 0


def test_int8_pages_come_back(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(policy=Hierarchy(compress_ratio=1.0))
    mine = generate(pool, 1, PROMPT, 24)
    assert pool.ledger.int8.available == 0
    pool.manager.release(mine)
    pool.request(2, 1, 1)
    assert pool.ledger.int8.available == pool.ledger.int8.count


def test_a_short_int8_pool_takes_the_lowest_scores(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool(policy=Recency())
    mine = generate(pool, 1, PROMPT, 20)
    scores = pool.manager.scores
    scores.score[mine] = np.arange(len(mine))[::-1]
    pool.manager.retier_request(1, Hierarchy(compress_ratio=0.75))
    lossy = np.flatnonzero(pool.ledger.is_lossy(mine))
    assert len(lossy) == pool.ledger.int8.count
    assert lossy.tolist() == list(range(len(mine) - 2 - 8, len(mine) - 2))


def test_nobody_who_waits_loses_rows_because_the_window_is_full(
    make_pool: Callable[..., Pool],
) -> None:
    """Evicting would not help: the pages have host pages to go to, and no way back."""
    pool = make_pool(policy=Hierarchy(compress_ratio=0.2))
    reclaimed: list[int] = []
    pool.manager.reclaim = reclaimed.append
    generate(pool, 1, PROMPT, 12)
    while pool.ledger.window.available:
        assert pool.manager._demote_for(1, slack=False)
        assert pool.manager.make_room(1)
        pool.decode(1)
    while pool.ledger.t0.available:
        pool.decode(1)
    assert pool.ledger.int8.used
    assert not pool.manager.make_room(1)
    assert not reclaimed


def test_rounding_stops_where_the_window_ends() -> None:
    pool = Pool(
        t0=32,
        window=2,
        int8=8,
        rules=RULES,
        policy=Hierarchy(hbm_ratio=0.0, compress_ratio=1.0),
    )
    generate(pool, 1, PROMPT, STEPS)
    assert len(pool.ledger.in_window()) == 2
    pool.check_integrity()
    pool.close()


def test_lower_scores_go_first(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(policy=Hierarchy(evict_ratio=0.5))
    pool.request(1, PROMPT, PROMPT)
    for step in range(STEPS):
        (new,) = pool.decode(1)
        # Odd steps write rows that are looked at.
        pool.manager.scores.score[new] = step % 2
        pool.manager.scores.steps[new] = 1
    dropped = np.flatnonzero(pool.ledger.dropped)
    assert len(dropped)
    assert not pool.manager.scores.score[dropped].any()


def test_a_dropped_row_is_accounted_with_its_weight_and_value(
    make_pool: Callable[..., Pool],
) -> None:
    """The only free row after the first look that may drop one: value norms are
    ``id + layer`` (see ``tiers.content``), each row's weight is a fifth."""
    pool = make_pool(policy=Streaming(budget=0.5))
    pool.request(1, PROMPT, PROMPT)
    scores = pool.manager.scores
    for _ in range(8):
        (new,) = pool.decode(1)
        scores.score[new], scores.steps[new] = 0.4, 2
    dropped = np.flatnonzero(pool.ledger.dropped)
    norms = [np.mean([page + layer for layer in range(4)]) for page in dropped]
    assert len(dropped) == 2
    assert pool.ledger.rows.dropped_error[1] == pytest.approx(0.2 * np.sum(norms))


def test_a_row_in_use_moves_with_its_score(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(policy=Recency())
    mine = pool.request(1, 8, 1)
    scores = pool.manager.scores
    scores.score[mine] = np.arange(8)
    pool.demote(mine[:4])
    pool.manager._promote(mine[:2])
    assert scores.score[mine].tolist() == list(range(8))


def test_a_row_written_anew_starts_without_a_score(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool(policy=Recency())
    mine = pool.request(1, 8, 1)
    scores = pool.manager.scores
    scores.score[mine] = scores.steps[mine] = 1
    pool.manager.release(mine)
    again = pool.request(2, 8, 1)
    assert not scores.score[again].any()
    assert not scores.steps[again].any()


def test_decode_steps_are_scored_and_prompts_are_not(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool(policy=Hierarchy())
    pool.request(1, 4, 4)
    assert not pool.manager.scores.lanes.any()
    pool.decode(1)
    assert pool.manager.scores.lanes.tolist() == [True]


def test_requests_whose_policy_reads_no_scores_are_not_scored(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool(policy=Recency())
    pool.manager.start_request(2, Hierarchy(), seed=0)
    for row in (1, 2):
        pool.request(row, 4, 4)
    pool.decode(1, 2)
    assert pool.manager.scores.lanes.tolist() == [False, True]


def test_every_nth_step_of_a_request_is_scored_whatever_runs_beside_it() -> None:
    rules = TierRules(sink_tokens=2, recent_window=2, score_interval=2)
    pool = Pool(t0=32, window=16, rules=rules, policy=Hierarchy())
    pool.request(1, 4, 4)
    scored = []
    for row in range(2, 6):
        pool.decode(1)
        scored.append(bool(pool.manager.scores.lanes.any()))
        pool.request(row, 1, 1)
    assert scored == [False, True, False, True]
    pool.close()


def test_full_moves_nothing_by_itself(make_pool: Callable[..., Pool]) -> None:
    pool, mine = lose_half(make_pool, Full())
    assert all(pool.in_t0(mine))


def test_one_request_may_have_a_policy_of_its_own(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool(policy=Recency())
    pool.manager.start_request(1, Streaming(budget=0.5), seed=0)
    lossy = generate(pool, 1, PROMPT, STEPS)
    exact = generate(pool, 2, PROMPT, STEPS)
    assert pool.ledger.dropped[lossy].sum() == 4
    assert not pool.ledger.dropped[exact].any()


def test_the_policy_ends_with_the_request(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool(policy=Recency())
    pool.manager.start_request(1, Streaming(budget=0.5), seed=0)
    pool.manager.end_request(1)
    assert pool.manager.policy_of(1) == Recency()


def test_under_pressure_the_least_looked_at_leave_first(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool(policy=Hierarchy())
    mine = generate(pool, 1, PROMPT, STEPS)
    scores = pool.manager.scores
    scores.steps[mine] = 1
    scores.score[mine] = 1
    scores.score[mine[[7, 11]]] = 0.5
    assert pool.manager._demote_for(2, slack=False)
    away = [page for page, here in zip(mine, pool.in_t0(mine), strict=True) if not here]
    assert away == mine[[7, 11]].tolist()


def test_what_no_step_has_scored_is_not_taken_for_worthless(
    make_pool: Callable[..., Pool],
) -> None:
    pool = make_pool(policy=Hierarchy())
    mine = generate(pool, 1, PROMPT, STEPS)
    scores = pool.manager.scores
    scores.steps[mine], scores.score[mine] = 1, 1
    scores.steps[mine[6]] = scores.score[mine[6]] = 0
    pool.manager._demote_for(1, slack=False)
    assert pool.in_t0(mine[6:7]) == [True]


def test_pages_leave_as_their_own_requests_rank_them(
    make_pool: Callable[..., Pool],
) -> None:
    """One request by score, its neighbour by age: each gives up its own first."""
    pool = make_pool(policy=Recency())
    pool.manager.start_request(1, Hierarchy(), seed=0)
    scored = generate(pool, 1, PROMPT, STEPS)
    aged = generate(pool, 2, PROMPT, STEPS)
    scores = pool.manager.scores
    scores.steps[scored], scores.score[scored] = 1, 1
    scores.score[scored[12]] = 0.5
    assert pool.manager._demote_for(2, slack=False)
    assert np.flatnonzero(~np.array(pool.in_t0(scored))).tolist() == [12]
    assert np.flatnonzero(~np.array(pool.in_t0(aged))).tolist() == [FREE.start]


def test_a_short_window_takes_the_lowest_scores() -> None:
    pool = Pool(t0=32, window=2, rules=RULES, policy=Full())
    mine = generate(pool, 1, PROMPT, STEPS)
    pool.manager.scores.score[mine] = 1
    pool.manager.scores.score[mine[[6, 10]]] = 0.5
    pool.manager.retier_request(1, Hierarchy(hbm_ratio=0.0))
    assert np.flatnonzero(~np.array(pool.in_t0(mine))).tolist() == [6, 10]
    pool.check_integrity()
    pool.close()


def test_a_short_t0_takes_the_highest_scores_back() -> None:
    pool = Pool(t0=32, window=16, rules=RULES, policy=Full())
    mine = generate(pool, 1, PROMPT, STEPS)
    pool.demote(mine[FREE])
    pool.cold(pool.ledger.t0.available - 3)  # one of the three is slack
    pool.manager.scores.score[mine] = 1
    pool.manager.scores.score[mine[[6, 10]]] = 2
    pool.manager.retier_request(1, Hierarchy(hbm_ratio=1.0))
    back = np.array(pool.in_t0(mine))[FREE]
    assert (np.flatnonzero(back) + FREE.start).tolist() == [6, 10]
    pool.check_integrity()
    pool.close()
