"""Every policy through one matrix: shares, order, guard, settings, registry."""

import dataclasses
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiers import LAYERS, NO_PAGES, Array, Tiers, batch_of

from sglang_tiered.memory.manager import TierRules
from sglang_tiered.policy import registry
from sglang_tiered.policy.base import Candidates, Policy, Statistic, Tier
from sglang_tiered.policy.random import _mix
from sglang_tiered.policy.registry import POLICIES, make_policy, policy_names
from sglang_tiered.policy.shares import ascending, at_least, at_most, outliers

T0, T1, T2, T3 = Tier

FEW = settings(max_examples=60, deadline=None)

MATRIX: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("recency", {}),
    ("recency", {"hbm_ratio": 0.0}),
    ("recency", {"hbm_ratio": 0.3}),
    ("hierarchy", {}),
    ("hierarchy", {"hbm_ratio": 0.3}),
    ("hierarchy", {"evict_ratio": 0.05}),
    ("hierarchy", {"compress_ratio": 0.2}),
    ("hierarchy", {"hbm_ratio": 0.3, "compress_ratio": 0.2, "evict_ratio": 0.1}),
    ("hierarchy", {"evict_ratio": 0.03, "evict_schedule": "per_interval"}),
    ("hierarchy", {"evict_ratio": 1.0, "value_guard": False}),
    *(
        (name, {"budget": budget})
        for name in ("random", "h2o", "streaming", "rkv")
        for budget in (0.1, 0.5, 0.9, 1.0)
    ),
    ("random", {"budget": 0.3, "value_guard": False}),
]


@pytest.fixture(
    params=MATRIX,
    ids=[
        " ".join([name, *(f"{key}={value}" for key, value in given.items())])
        for name, given in MATRIX
    ],
)
def policy(request: pytest.FixtureRequest) -> Policy:
    return make_policy(*request.param)


def pages(n: int, **facts: Any) -> Candidates:
    """``n`` pages in T0 that are all alike, but for the facts that are given."""
    plain: dict[str, Any] = {
        "index": np.arange(10, 10 + n),
        "tier": np.zeros(n, dtype=np.int64),
        "lossy": np.zeros(n, dtype=bool),
        "dropped": 0,
        "compressed": 0,
        "seed": 1,
        "score": np.ones(n, dtype=np.float32),
        "steps": np.ones(n, dtype=np.float32),
        "value_norm": np.ones(n, dtype=np.float32),
        "redundancy": np.full(n, 1 / n if n else 0, dtype=np.float32),
    }
    assert facts.keys() <= plain.keys()
    given = {
        name: fact if isinstance(fact, int) else np.array(fact, plain[name].dtype)
        for name, fact in facts.items()
    }
    return Candidates(**(plain | given))


def chance_pages(n: int, seed: int = 0, **facts: Any) -> Candidates:
    rng = np.random.default_rng(seed)
    chance: dict[str, Any] = {
        name: rng.lognormal(size=n).astype(np.float32)
        for name in ("score", "steps", "value_norm", "redundancy")
    }
    chance["tier"] = rng.integers(0, 2, n)
    return pages(n, **(chance | facts))


class Chain:
    """A growing request that does what the plans say."""

    def __init__(self, seed: int = 0) -> None:
        self.now = chance_pages(0)
        self.rng = np.random.default_rng(seed)
        self.gone: set[int] = set()
        self.ever_lossy: set[int] = set()
        self.next_index = 10

    def grow(self, n: int) -> None:
        more = chance_pages(n, seed=int(self.rng.integers(1 << 30)))
        arrays: dict[str, Any] = {
            field.name: np.concatenate(
                [getattr(self.now, field.name), getattr(more, field.name)]
            )
            for field in dataclasses.fields(Candidates)
            if isinstance(getattr(more, field.name), np.ndarray)
        }
        arrays["index"][-n:] = np.arange(self.next_index, self.next_index + n)
        arrays["tier"][-n:] = T0
        # Every page goes on gathering attention.
        arrays["score"] += self.rng.random(len(arrays["score"]), dtype=np.float32)
        self.next_index += n
        self.now = dataclasses.replace(self.now, **arrays)

    def retier(self, policy: Policy) -> np.ndarray:
        target = policy.plan(self.now)
        stays = target != T3
        into_t2 = (target == T2) & ~self.now.lossy
        self.gone |= set(self.now.index[~stays].tolist())
        self.ever_lossy |= set(self.now.index[into_t2].tolist())
        arrays: dict[str, Any] = {
            field.name: getattr(self.now, field.name)[stays]
            for field in dataclasses.fields(Candidates)
            if isinstance(getattr(self.now, field.name), np.ndarray)
        }
        arrays["tier"] = target[stays]
        arrays["lossy"] = (self.now.lossy | into_t2)[stays]
        self.now = dataclasses.replace(
            self.now,
            **arrays,
            dropped=self.now.dropped + int((~stays).sum()),
            compressed=self.now.compressed + int(into_t2.sum()),
        )
        return target


# -- the matrix


@pytest.mark.parametrize("n", [0, 1, 2, 7, 200])
def test_a_plan_has_one_tier_for_each_candidate(policy: Policy, n: int) -> None:
    plan = policy.plan(chance_pages(n))
    assert plan.dtype == np.int64
    assert plan.shape == (n,)
    assert set(plan.tolist()) <= set(Tier)


def test_a_plan_changes_nothing_itself(policy: Policy) -> None:
    now, copy = chance_pages(50), chance_pages(50)
    policy.plan(now)
    for field in dataclasses.fields(Candidates):
        assert np.array_equal(getattr(now, field.name), getattr(copy, field.name))


def test_the_lossy_shares_are_caps_over_a_whole_chain(policy: Policy) -> None:
    """Met to within one page at every re-tier, and never exceeded."""
    chain = Chain()
    for step in range(40):
        chain.grow(1 + step % 7)
        chain.retier(policy)
        ever = chain.now.ever
        assert ever == chain.next_index - 10
        assert chain.now.dropped == len(chain.gone)
        if getattr(policy, "evict_schedule", "cumulative") == "cumulative":
            assert policy.evict_share * ever - 1 < chain.now.dropped + 1e-6
        assert chain.now.dropped <= policy.evict_share * ever + 1e-6
        assert chain.now.compressed == len(chain.ever_lossy)
        assert chain.now.compressed <= policy.compress_share * ever + 1e-6
        assert policy.compress_share * ever - 1 < chain.now.compressed + 1e-6


def test_the_share_in_t0_is_met_to_within_one_page(policy: Policy) -> None:
    chain = Chain()
    for _ in range(20):
        chain.grow(5)
        before = chain.now.tier
        target = chain.retier(policy)
        kept = target[target != T3]
        if policy.hbm_ratio is None:
            stays = (target != T3) & (target != T2)
            assert np.array_equal(target[stays], before[stays])
        else:
            assert 0 <= (kept == T0).sum() - policy.hbm_ratio * len(kept) < 1


def test_a_dropped_page_never_comes_back(policy: Policy) -> None:
    chain = Chain()
    for _ in range(20):
        chain.grow(5)
        chain.retier(policy)
        assert chain.gone.isdisjoint(chain.now.index.tolist())
    chain.retier(policy)
    assert chain.gone.isdisjoint(chain.now.index.tolist())


def test_a_second_look_at_once_drops_and_compresses_nothing(policy: Policy) -> None:
    """But for the paper's schedule, which drops a share at every look."""
    chain = Chain()
    chain.grow(100)
    chain.retier(policy)
    before = chain.now
    target = chain.retier(policy)
    assert chain.now.compressed == before.compressed
    if getattr(policy, "evict_schedule", "cumulative") == "cumulative":
        assert np.array_equal(target, before.tier)


def test_inexact_pages_never_count_as_exact_again(policy: Policy) -> None:
    """Promoted pages that were in T2 go back there, not to T1, and are not counted
    as compressed a second time."""
    chain = Chain()
    for _ in range(20):
        chain.grow(5)
        promoted = np.where(chain.rng.random(len(chain.now)) < 0.5, T0, chain.now.tier)
        promoted = np.where(chain.now.lossy, promoted, chain.now.tier)
        chain.now = dataclasses.replace(chain.now, tier=promoted)
        lossy, in_t2 = chain.now.lossy, chain.now.tier == T2
        compressed = chain.now.compressed
        target = chain.retier(policy)
        assert T1 not in target[lossy]
        assert set(target[in_t2].tolist()) <= {T2, T3}
        newly = ((target == T2) & ~lossy).sum()
        assert chain.now.compressed == compressed + newly


def test_who_may_not_lose_anything_loses_nothing(policy: Policy) -> None:
    assert policy.is_lossy == bool(policy.compress_share or policy.evict_share)
    allowed = {T0, T1}
    if policy.compress_share:
        allowed.add(T2)
    if policy.evict_share:
        allowed.add(T3)
    chain = Chain()
    for _ in range(10):
        chain.grow(9)
        assert set(chain.retier(policy).tolist()) <= allowed


def test_a_plan_is_the_same_every_time(policy: Policy) -> None:
    again = dataclasses.replace(policy)
    assert np.array_equal(policy.plan(chance_pages(300)), again.plan(chance_pages(300)))


def test_equal_pages_go_by_position_oldest_first(policy: Policy) -> None:
    """The lower tiers hold the older pages. (Chance knows no equal pages.)"""
    if policy.name != "random":
        assert (np.diff(policy.plan(pages(40))) <= 0).all()


def test_only_declared_statistics_are_read(policy: Policy) -> None:
    names = [statistic.value for statistic in Statistic]
    given = {statistic.value for statistic in policy.needs}
    less = dataclasses.replace(
        chance_pages(50),
        **{name: None for name in names if name not in given},
        **({} if "score" in given else {"steps": None}),
    )
    assert np.array_equal(policy.plan(less), policy.plan(chance_pages(50)))


def test_who_drops_pages_gets_what_the_accounting_needs(policy: Policy) -> None:
    accounting = {Statistic.SCORE, Statistic.VALUE_NORM}
    assert not policy.evict_share or accounting <= policy.needs
    assert not policy.by_score or Statistic.SCORE in policy.needs
    assert policy.ranks_by <= policy.needs


def test_the_settings_of_a_policy_cannot_change(policy: Policy) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.budget = 0.5  # type: ignore[attr-defined]


# -- in the real tier manager

PROMPT, SINKS, RECENT, STEPS = 6, 3, 5, 50


class Running(Tiers):
    """One request that generates, and whose rows the real manager moves."""

    def __init__(self, policy: Policy, page_size: int, t0: int) -> None:
        super().__init__(
            page_size=page_size,
            t0=t0,
            window=64,
            host=64,
            int8=16,
            rules=TierRules(sink_tokens=SINKS, recent_window=RECENT, retier_interval=4),
            policy=policy,
        )
        self.length = 0
        self.pages = NO_PAGES
        self.protected_left = 0
        self.forward(PROMPT, decode=False)

    def protected(self) -> Array:
        """bool [pages]: has a token of the prompt, a sink or one of the last."""
        first = np.arange(len(self.pages)) * self.page_size
        end = first + self.page_size
        return (first < PROMPT + SINKS) | (end > self.length - RECENT)

    def in_t0(self) -> Array:
        return self.ledger.t0_page[self.pages] >= 0

    def forward(self, new: int, *, decode: bool = True) -> None:
        """Write the rows of ``new`` tokens, each of which names its position."""
        count = -(-(self.length + new) // self.page_size) - len(self.pages)
        self.watch(lambda: self.manager.make_room(count))
        self.pages = np.concatenate([self.pages, self.manager.allocate(count)])
        position = np.arange(self.length, self.length + new)
        self.length += new
        page, offset = np.divmod(position, self.page_size)
        ids = self.pages[page] * self.page_size + offset
        batch = batch_of((1, self.length, new, PROMPT), ids=ids, decode=decode)
        self.manager.begin_forward(batch, None if decode else NO_PAGES)
        for layer in range(LAYERS):
            self.write(layer, ids, position.astype(np.float32))
        if self.manager.scores.lanes.any():
            # Of some fixed weights: the same page is looked at more than another.
            read = np.repeat(self.pages * self.page_size, self.page_size)
            read += np.tile(np.arange(self.page_size), len(self.pages))
            self.manager.scores.score[read] += read * 7919 % 101
            self.manager.scores.steps[read] += 1
        self.watch(lambda: self.manager.end_forward(batch))
        self.check_integrity()

    def watch(self, move: Callable[[], object]) -> None:
        """Let the manager move rows; what protects some of them must be heeded."""
        before = self.in_t0()
        move()
        after, protected = self.in_t0(), self.protected()
        lost = self.ledger.dropped[self.pages] | self.ledger.is_lossy(self.pages)
        assert not lost[protected].any()
        left = before & ~after & protected
        self.protected_left += int(left.sum())
        assert not (left.any() and after[~protected].any())


@pytest.fixture
def run(policy: Policy) -> Iterator[Callable[[int, int], Running]]:
    made: list[Running] = []

    def run_request(page_size: int, t0: int) -> Running:
        made.append(Running(policy, page_size, t0))
        for _ in range(STEPS):
            made[-1].forward(1)
        return made[-1]

    yield run_request
    for running in made:
        running.close()


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_manager_leaves_protected_pages_alone(
    run: Callable[[int, int], Running], page_size: int
) -> None:
    """Prompt, sinks and recent window: not one of their pages is ever dropped or
    compressed (see ``watch``), nor leaves T0 where there is room."""
    running = run(page_size, 64)
    assert running.in_t0()[running.protected()].all()
    assert running.protected_left == 0


def test_the_manager_does_take_the_others(
    policy: Policy, run: Callable[[int, int], Running]
) -> None:
    """Or the test above would say nothing."""
    running = run(1, 64)
    rows = running.ledger.rows
    assert (rows.dropped[1] > 0) == (policy.evict_share > 0)
    assert (rows.compressed[1] > 0) == (policy.compress_share > 0)
    assert policy.hbm_ratio is None or not running.in_t0().all()


@pytest.mark.parametrize(("page_size", "t0"), [(1, 12), (4, 5)])
def test_under_pressure_protected_pages_leave_t0_last(
    run: Callable[[int, int], Running], page_size: int, t0: int
) -> None:
    """T0 is smaller than what is protected: some of it leaves, but never while an
    unprotected page is in T0 (see ``watch``)."""
    assert run(page_size, t0).protected_left > 0


# -- one example of each, by hand


def plan(name: str, settings: Mapping[str, object], now: Candidates) -> list[int]:
    return policy_plan(make_policy(name, settings), now)


def policy_plan(policy: Policy, now: Candidates) -> list[int]:
    return policy.plan(now).tolist()


def test_full_leaves_every_page_where_it_is() -> None:
    assert plan("full", {}, pages(3, tier=[1, 0, 1])) == [T1, T0, T1]
    assert not make_policy("full", {}).moves


def test_recency_keeps_the_youngest() -> None:
    """Half of five pages, rounded up: three."""
    now = pages(5, tier=[0, 1, 0, 1, 0], score=[9, 9, 0, 0, 0])
    assert plan("recency", {"hbm_ratio": 0.5}, now) == [T1, T1, T0, T0, T0]
    assert plan("recency", {}, now) == [T0, T1, T0, T1, T0]


SCORES = [9, 0, 7, 5, 1, 8, 3, 2, 6, 4]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        # The two lowest, 0 and 1, are dropped.
        ({"evict_ratio": 0.2}, [0, 3, 0, 0, 3, 0, 0, 0, 0, 0]),
        # The three lowest go to T2.
        ({"compress_ratio": 0.3}, [0, 2, 0, 0, 2, 0, 0, 2, 0, 0]),
        # The three highest stay: 9, 8 and 7.
        ({"hbm_ratio": 0.3}, [0, 1, 0, 1, 1, 0, 1, 1, 1, 1]),
        # 0 and 1 are dropped, 2, 3 and 4 compressed; half of the eight that are left
        # stay in T0: 9, 8, 7 and 6. For T1 remains 5.
        (
            {"hbm_ratio": 0.5, "compress_ratio": 0.3, "evict_ratio": 0.2},
            [0, 3, 0, 1, 3, 0, 2, 2, 0, 2],
        ),
        # T2 has taken so many that fewer than the share are left for T0.
        (
            {"hbm_ratio": 0.9, "compress_ratio": 0.7},
            [0, 2, 0, 2, 2, 0, 2, 2, 2, 2],
        ),
        ({"evict_ratio": 1.0}, [3] * 10),
        ({"compress_ratio": 1}, [2] * 10),
        ({"hbm_ratio": 1}, [0] * 10),
    ],
    ids=str,
)
def test_hierarchy_goes_by_score(given: dict[str, object], expected: list[int]) -> None:
    assert plan("hierarchy", given, pages(10, score=SCORES)) == expected


def test_hierarchy_promotes_what_has_become_important() -> None:
    now = pages(4, tier=[0, 0, 1, 1], score=[1, 4, 3, 2])
    assert plan("hierarchy", {"hbm_ratio": 0.5}, now) == [T1, T0, T0, T1]


@pytest.mark.parametrize(
    ("dropped", "expected"),
    [
        # A tenth of 10 + 0, of 10 + 10 pages; the cap may have been passed long ago.
        (0, [3, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        (1, [0] * 10),
        (10, [0] * 10),
    ],
)
def test_what_is_dropped_already_counts(dropped: int, expected: list[int]) -> None:
    now = pages(10, dropped=dropped)
    assert plan("hierarchy", {"evict_ratio": 0.1}, now) == expected


def test_what_is_compressed_already_counts() -> None:
    """Half of eight pages may ever be in T2; three were, one of them came back."""
    now = pages(
        8,
        tier=[2, 2, 0, 0, 0, 0, 0, 0],
        lossy=[1, 1, 1, 0, 0, 0, 0, 0],
        compressed=3,
    )
    given = {"compress_ratio": 0.5}
    assert plan("hierarchy", given, now) == [T2, T2, T0, T2, T0, T0, T0, T0]


def test_a_lossy_page_that_must_leave_t0_goes_back_to_t2() -> None:
    now = pages(
        4, tier=[2, 0, 0, 0], lossy=[1, 1, 0, 0], compressed=2, score=[9, 1, 2, 3]
    )
    given = {"compress_ratio": 0.5, "hbm_ratio": 0.25}
    assert plan("hierarchy", given, now) == [T2, T2, T1, T0]


def test_a_lossy_page_may_stay_in_t0() -> None:
    now = pages(2, tier=[0, 0], lossy=[1, 0], compressed=1, score=[2, 1])
    assert plan("hierarchy", {"hbm_ratio": 0.5}, now) == [T0, T1]


def test_random_keeps_its_budget() -> None:
    assert plan("random", {"budget": 0.3}, pages(10)).count(T3) == 7


def test_random_draws_again_for_another_seed() -> None:
    plans = {
        tuple(plan("random", {"budget": 0.5}, pages(20, seed=s))) for s in range(9)
    }
    assert len(plans) == 9


def test_random_does_not_draw_again_for_the_same_page() -> None:
    """What a budget of a half drops, a budget of a quarter drops too."""
    half, quarter = (
        set(np.flatnonzero(make_policy("random", {"budget": b}).plan(pages(40))))
        for b in (0.5, 0.25)
    )
    assert (len(half), len(quarter)) == (20, 30)
    assert half < quarter


def test_random_prefers_no_position() -> None:
    """400 seeds: of every page, 200 give or take four standard deviations stay."""
    stays = np.zeros(20, dtype=np.int64)
    for seed in range(-200, 200):
        stays += np.array(plan("random", {"budget": 0.5}, pages(20, seed=seed))) == T0
    assert stays.sum() == 400 * 10
    assert np.abs(stays - 200).max() <= 40


def test_the_hash_of_random_is_splitmix64() -> None:
    """Its authors' first number from the seed 1234567."""
    assert _mix(np.array([1234567], dtype=np.uint64))[0] == 6457827717110365317


def test_h2o_keeps_the_youngest_and_the_heaviest() -> None:
    """Four of eight stay: the two youngest, and 9 and 5 of the others."""
    now = pages(8, score=[5, 1, 9, 2, 3, 4, 0, 0])
    assert plan("h2o", {"budget": 0.5}, now) == [0, 3, 0, 3, 3, 3, 0, 0]


def test_h2o_gives_an_odd_page_to_the_heaviest() -> None:
    """Three of five stay: the youngest, and 9 and 5."""
    now = pages(5, score=[5, 1, 9, 2, 0])
    assert plan("h2o", {"budget": 0.6}, now) == [0, 3, 0, 3, 0]


def test_streaming_keeps_the_youngest() -> None:
    now = pages(5, score=[9, 9, 9, 0, 0])
    assert plan("streaming", {"budget": 0.4}, now) == [3, 3, 3, 0, 0]


def test_rkv_weighs_importance_against_redundancy() -> None:
    """Scores per step 4, 4, 2, 2 are the shares 1/3, 1/3, 1/6, 1/6."""
    now = pages(
        4,
        score=[8, 4, 2, 2],
        steps=[2, 1, 1, 0],
        redundancy=[0.4, 0.2, 0.2, 0.2],
    )
    policy = make_policy("rkv", {"budget": 0.5})
    expected = [0.1 / 3 - 0.36, 0.1 / 3 - 0.18, 0.1 / 6 - 0.18, 0.1 / 6 - 0.18]
    assert policy.value(now) == pytest.approx(expected)
    assert policy_plan(policy, now) == [T3, T0, T3, T0]


def test_rkv_can_rank_what_was_never_scored() -> None:
    now = pages(3, score=[0, 0, 0], steps=[0, 0, 0], redundancy=[0.2, 0.5, 0.3])
    assert plan("rkv", {"budget": 0.7}, now) == [T0, T0, T0]
    assert plan("rkv", {"budget": 0.6}, now) == [T0, T3, T0]


# -- the paper's schedule


def test_per_interval_drops_a_share_of_what_is_left() -> None:
    """A tenth of 100, of 90, of 81, ...; the cumulative share drops 10 and no more."""
    paper, ours = Chain(), Chain()
    given = {"evict_ratio": 0.1}
    compounding = make_policy("hierarchy", given | {"evict_schedule": "per_interval"})
    cumulative = make_policy("hierarchy", given)
    paper.grow(100)
    ours.grow(100)
    left = []
    for _ in range(5):
        paper.retier(compounding)
        ours.retier(cumulative)
        left.append(len(paper.now))
    assert left == [90, 81, 73, 66, 60]
    assert ours.now.dropped == 10


@pytest.mark.parametrize(
    ("tokens", "share"), [(1400, 0.23), (4096, 0.54), (16384, 0.87)]
)
def test_per_interval_compounds_as_in_the_paper(tokens: int, share: float) -> None:
    """3 % every 64 steps, 4 sinks and the last 128 tokens protected: what the paper's
    scripts dropped of chains of these lengths, to within two points."""
    policy = make_policy(
        "hierarchy", {"evict_ratio": 0.03, "evict_schedule": "per_interval"}
    )
    chain = Chain()
    for _ in range(64 + 4 + 128, tokens + 1, 64):
        chain.grow(64)
        chain.retier(policy)
    assert chain.now.dropped / tokens == pytest.approx(share, abs=0.02)


# -- the value guard


@pytest.mark.parametrize(
    ("guard", "expected"), [(True, [0, 3, 0, 0]), (False, [3, 0, 0, 0])]
)
def test_an_outlier_is_not_dropped_while_another_page_is_left(
    guard: bool, expected: list[int]
) -> None:
    now = pages(4, score=[0, 1, 2, 3], value_norm=[10, 1, 1, 1])
    given = {"evict_ratio": 0.25, "value_guard": guard}
    assert plan("hierarchy", given, now) == expected


@pytest.mark.parametrize("name", ["random", "h2o", "streaming", "rkv"])
def test_the_guard_is_the_same_for_every_policy(name: str) -> None:
    norm = np.ones(20, dtype=np.float32)
    norm[[0, 7]] = 5
    kept = np.array(plan(name, {"budget": 0.1}, pages(20, value_norm=norm))) == T0
    assert np.flatnonzero(kept).tolist() == [0, 7]


def test_an_outlier_is_dropped_when_no_other_page_is_left() -> None:
    now = pages(4, dropped=4, value_norm=[1, 10, 1, 1])
    assert plan("hierarchy", {"evict_ratio": 0.9}, now) == [T3, T0, T3, T3]
    assert plan("hierarchy", {"evict_ratio": 1.0}, now) == [T3, T3, T3, T3]


NAN = math.nan


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([], []),
        ([1, 1, 1, 1], []),
        # Median 3, deviations 2, 1, 0, 1, x: MAD 1, so above 3 + 3.5 * 1.4826 = 8.19.
        ([1, 2, 3, 4, 8], []),
        ([1, 2, 3, 4, 9], [4]),
        # The others do not differ: above 1 + 3.5 * 0.1.
        ([1, 1, 1, 1, 1.3], []),
        ([1, 1, 1, 1, 1.4], [4]),
        ([0.01, 1, 1, 1, 1], []),
        ([9, NAN, 1, 1, 1], [0]),
        ([NAN, NAN], []),
        ([1, math.inf, 1], [1]),
    ],
)
def test_outliers_lie_far_above_the_median(
    norms: list[float], expected: list[int]
) -> None:
    found = outliers(np.array(norms, dtype=np.float32))
    assert np.flatnonzero(found).tolist() == expected


# -- ranks and whole pages


@FEW
@given(
    st.lists(
        st.one_of(
            st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf]),
            st.floats(width=32, allow_nan=False),
        ),
        max_size=40,
    )
)
def test_ranks_are_those_of_a_stable_sort(values: list[float]) -> None:
    array = np.array(values, dtype=np.float64)
    expected = np.argsort(array, kind="stable").tolist()
    assert ascending(array).tolist() == expected


def test_what_is_not_known_ranks_highest() -> None:
    values = np.array([NAN, 2, -NAN, 1, math.inf])
    assert ascending(values).tolist() == [3, 1, 0, 2, 4]


@FEW
@given(st.integers(0, 100), st.integers(0, 1_000_000))
@example(29, 100)  # in binary a little less than 29
@example(7, 100)  # and a little more than 7
@example(90, 10)  # what is left of 1 is a little less than a tenth
def test_a_share_in_per_cent_is_meant_as_written(percent: int, count: int) -> None:
    assert at_most(percent / 100, count) == percent * count // 100
    assert at_least(percent / 100, count) == -(-percent * count // 100)
    assert count - at_most(1 - percent / 100, count) == at_least(percent / 100, count)


shares = st.integers(0, 20).map(lambda twentieths: twentieths / 20)


@st.composite
def states(draw: st.DrawFn) -> Candidates:
    """Any state that a chain can be in, and some that it cannot."""
    n = draw(st.integers(0, 30))
    lossy = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=bool)
    tier = np.array(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)))
    numbers = st.lists(st.sampled_from([0, 1, 2, 7]), min_size=n, max_size=n)
    dropped = draw(st.integers(0, 20))
    return pages(
        n,
        index=np.cumsum(draw(numbers), dtype=np.int64) + np.arange(n),
        tier=np.where(lossy, 2 * tier, tier).astype(np.int64),
        lossy=lossy,
        dropped=dropped,
        compressed=int(lossy.sum()) + draw(st.integers(0, dropped)),
        seed=draw(st.integers(-(1 << 63), (1 << 64) - 1)),
        score=np.array(draw(numbers), dtype=np.float32),
        steps=np.array(draw(numbers), dtype=np.float32),
        value_norm=np.array(draw(numbers), dtype=np.float32),
        redundancy=np.array(draw(numbers), dtype=np.float32),
    )


@FEW
@given(states(), st.none() | shares, shares, shares, st.booleans())
def test_any_shares_in_any_state(
    now: Candidates,
    hbm: float | None,
    compress: float,
    evict: float,
    guard: bool,
) -> None:
    policy = make_policy(
        "hierarchy",
        {
            "hbm_ratio": hbm,
            "compress_ratio": compress,
            "evict_ratio": evict,
            "value_guard": guard,
        },
    )
    target = policy.plan(now)
    dropped = target == T3
    room = at_most(evict, now.ever) - now.dropped
    assert dropped.sum() == min(max(room, 0), len(now))
    exact = ~dropped & ~now.lossy
    newly = exact & (target == T2)
    room = at_most(compress, now.ever) - now.compressed
    assert newly.sum() == min(max(room, 0), exact.sum())
    rest = ~dropped & ~newly & (now.tier != T2)
    assert now.score is not None
    if hbm is None:
        assert np.array_equal(target[rest], now.tier[rest])
    else:
        share = at_least(hbm, int((~dropped).sum()))
        assert (target == T0).sum() == min(share, rest.sum())
        assert set(target[rest & now.lossy].tolist()) <= {T0, T2}
        assert set(target[rest & ~now.lossy].tolist()) <= {T0, T1}
        high, low = now.score[rest & (target == T0)], now.score[rest & (target != T0)]
        assert not len(high) or not len(low) or high.min() >= low.max()
    high, low = now.score[exact & ~newly], now.score[newly]
    assert not len(high) or not len(low) or high.min() >= low.max()


@FEW
@given(states(), st.sampled_from(["random", "h2o", "streaming", "rkv"]), shares)
def test_any_budget_in_any_state(now: Candidates, name: str, budget: float) -> None:
    target = make_policy(name, {"budget": budget or 1}).plan(now)
    room = at_most(1 - (budget or 1), now.ever) - now.dropped
    assert (target == T3).sum() == min(max(room, 0), len(now))
    stays = target != T3
    assert np.array_equal(target[stays], now.tier[stays])


# -- settings


def test_the_matrix_has_every_policy() -> None:
    assert {name for name, _ in MATRIX} == set(POLICIES) == set(policy_names())


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_registered_under_its_name(name: str) -> None:
    assert POLICIES[name].name == name


def test_nothing_is_lost_unless_asked_for() -> None:
    policy = make_policy("hierarchy", {})
    assert (policy.evict_share, policy.compress_share) == (0, 0)
    assert policy.hbm_ratio is None
    assert policy.value_guard


def test_a_budget_is_what_is_not_dropped() -> None:
    assert make_policy("random", {"budget": 0.75}).evict_share == 0.25


H, R = "hierarchy", "random"


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (H, {"evict_ratio": 1.5}, "evict_ratio 1.5: must be between 0 and 1"),
        (H, {"evict_ratio": -0.1}, "evict_ratio -0.1: must be between 0 and 1"),
        (H, {"evict_ratio": NAN}, "evict_ratio nan: must be"),
        (H, {"evict_ratio": "0.5"}, "evict_ratio '0.5': must be"),
        (H, {"evict_ratio": None}, "evict_ratio None: must be"),
        (H, {"evict_ratio": True}, "evict_ratio True: must be"),
        (H, {"evict_ratio": [0.5]}, "evict_ratio [0.5]: must be"),
        (H, {"evict_ratio": 10**400}, "evict_ratio 1000"),
        (H, {"compress_ratio": 2}, "compress_ratio 2: must be"),
        (H, {"hbm_ratio": 2}, "hbm_ratio 2: must be"),
        (H, {"evict_schedule": "x"}, "evict_schedule 'x': must be one of cumulative"),
        (H, {"evict_schedule": []}, "evict_schedule []: must be one of"),
        (H, {"evict_schedule": "a\nb" * 999}, "evict_schedule 'a"),
        (H, {"value_guard": 1}, "value_guard 1: must be true or false"),
        (H, {"budget": 0.5}, "no such setting 'budget'; fix: use hbm_ratio, compress"),
        ("recency", {"hbm_ratio": -1}, "hbm_ratio -1: must be"),
        ("recency", {"evict_ratio": 0}, "no such setting 'evict_ratio'"),
        ("full", {"hbm_ratio": 1}, "'hbm_ratio'; fix: give it no settings"),
        (R, {}, "policy random: the setting budget is missing"),
        (R, {"budget": 0}, "budget 0: must be greater than 0, at most 1"),
        (R, {"budget": 1.01}, "budget 1.01: must be"),
        (R, {"budget": 0.5, "value_guard": "no"}, "value_guard 'no': must be"),
        ("h2o", {"budget": None}, "budget None: must be"),
        ("streaming", {"budget": -1}, "budget -1: must be"),
        ("rkv", {"budget": 0.5, "lambda": 1}, "no such setting 'lambda'"),
        ("best", {}, "policy 'best': no such policy; fix: use one of full, h2o"),
        ("", {}, "policy '': no such policy"),
        (None, {}, "policy None: no such policy"),
        ([], {}, "policy []: no such policy"),
    ],
)
def test_a_bad_setting_is_one_line_with_a_fix(
    name: str, given: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        make_policy(name, given)
    text = str(error.value)
    assert message in text
    assert "; fix: " in text
    assert "\n" not in text
    assert len(text) < 300


def test_a_missing_statistic_is_named() -> None:
    now = dataclasses.replace(pages(4), value_norm=None)
    with pytest.raises(ValueError, match=r"value_norm is not known .*; fix: "):
        make_policy("streaming", {"budget": 0.5}).plan(now)


# -- policies of other packages

SOURCE = """
from dataclasses import dataclass
from typing import ClassVar
from sglang_tiered.policy.base import Policy

print("loaded")

@dataclass(frozen=True)
class Oldest(Policy):
    name: ClassVar[str] = "oldest"
    hbm_ratio: float | None = None

    def value(self, candidates):
        return -candidates.index

@dataclass(frozen=True)
class OneNumber(Policy):
    name: ClassVar[str] = "one-number"
    hbm_ratio: float | None = 0.5

    def value(self, candidates):
        return 0.0

class Plain(Policy):
    name = "plain"

    def value(self, candidates):
        return candidates.index

@dataclass(frozen=True)
class Abstract(Policy):
    name: ClassVar[str] = "abstract"

number = 5
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Installs a package whose entry points are the lines given."""

    def install_package(*lines: str) -> None:
        info = tmp_path / "other_policies-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: other-policies\nVersion: 1.0\n")
        group = "\n".join(["[sglang_tiered.policies]", *lines])
        (info / "entry_points.txt").write_text(group + "\n")
        (tmp_path / "other_policies.py").write_text(SOURCE)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        registry._all_policies.cache_clear()

    yield install_package
    sys.modules.pop("other_policies", None)
    registry._all_policies.cache_clear()


def test_another_package_can_add_a_policy(
    install: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    install("oldest = other_policies:Oldest")
    assert set(policy_names()) == {"oldest", *POLICIES}
    policy = make_policy("oldest", {"hbm_ratio": 0.5})
    assert policy_plan(policy, pages(4)) == [T0, T0, T1, T1]
    assert capsys.readouterr().out == "loaded\n"


def test_the_package_itself_is_not_changed(install: Any) -> None:
    install("oldest = other_policies:Oldest")
    policy_names()
    assert "oldest" not in POLICIES


def test_a_value_for_each_candidate_is_asked_for(install: Any) -> None:
    install("one-number = other_policies:OneNumber")
    policy = make_policy("one-number", {})
    with pytest.raises(ValueError, match=r"shape \(\); fix: .* the 4 candidates"):
        policy.plan(pages(4))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("h2o = other_policies:Oldest", "the name is taken; fix: choose another"),
        ("youngest = other_policies:Oldest", "another name; fix: set its name to"),
        ("plain = other_policies:Plain", "is no policy; fix: make it a dataclass"),
        ("abstract = other_policies:Abstract", "is no policy"),
        ("number = other_policies:number", "is no policy"),
        ("nothing = other_policies:Nothing", "cannot be loaded (AttributeError"),
        ("nowhere = no_such_policies:Nothing", "cannot be loaded (ModuleNotFound"),
    ],
)
def test_an_unusable_entry_point_is_named(
    install: Any, line: str, message: str
) -> None:
    install(line)
    name, target = line.split(" = ")
    with pytest.raises(ValueError) as error:
        policy_names()
    text = str(error.value)
    assert text.startswith(f"policy {name} ({target}, entry point of ")
    assert message in text
    assert "\n" not in text
