"""What a policy is, what it sees of a request, and the plan rule that all share.

A policy gives every page a value. The plan rule turns values and shares into one tier
per page, so that policies differ in nothing but what they rank by and how much they
may drop. Protected pages are no candidates: no policy can name one.

To add a policy: one file with a frozen dataclass on ``Policy``, whose fields are its
settings, and one line in ``registry.py`` or an entry point of another package.
"""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import ClassVar

import numpy as np

from sglang_tiered.policy.shares import ascending, at_least, at_most, outliers


class Tier(IntEnum):
    """Where a page is: T0 device, T1 host, T2 host as int8, T3 nowhere."""

    T0 = 0
    T1 = 1
    T2 = 2
    T3 = 3


class Statistic(Enum):
    """What a policy can ask to be told of every page; the value is its name."""

    SCORE = "score"  # and ``steps``
    VALUE_NORM = "value_norm"
    REDUNDANCY = "redundancy"


@dataclass(frozen=True)
class Candidates:
    """The ``n`` unprotected generated pages of one request, ascending by position.

    index: int64 [n], page number in the sequence, strictly ascending.
    tier: int64 [n], where the page is now: T0, T1 or T2.
    lossy: bool [n], was ever in T2, and stays inexact wherever it is now.
    dropped: pages of the request that went to T3; they are no candidates any more.
    compressed: pages of the request that were ever in T2, the dropped ones included.
    seed: fixed per request, for choices by chance.
    score: float32 [n], mean over the page's tokens of the cumulative attention score.
    steps: float32 [n], mean over the page's tokens of the steps that were scored.
    value_norm: float32 [n], mean norm of the page's values; NaN: not known.
    redundancy: float32 [n], how much the page repeats others, see ``rkv.py``.

    The last four are None unless the policy declares that it needs them.
    """

    index: np.ndarray
    tier: np.ndarray
    lossy: np.ndarray
    dropped: int
    compressed: int
    seed: int
    score: np.ndarray | None = None
    steps: np.ndarray | None = None
    value_norm: np.ndarray | None = None
    redundancy: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.index)

    @property
    def ever(self) -> int:
        """Pages that are or once were candidates; cumulative shares are of these."""
        return len(self) + self.dropped

    def known(self, statistic: Statistic) -> np.ndarray:
        """The array [n] of a statistic. Raises ValueError if it was not given."""
        array = getattr(self, statistic.value)
        if array is None:
            raise ValueError(
                f"{statistic.value} is not known of these pages; "
                f"fix: declare Statistic.{statistic.name} in the policy's ranks_by"
            )
        return array

    def score_per_step(self) -> np.ndarray:
        """Score per scored step, float32 [n]: does not favour what is old."""
        score = self.known(Statistic.SCORE)
        assert self.steps is not None, "steps come with the score"
        return score / np.maximum(self.steps, 1)


class Policy(ABC):
    """Base of all policies. Subclasses are frozen dataclasses; fields are settings.

    name: what users call it.
    ranks_by: the statistics that ``value`` reads.
    by_score: under pressure the pages of running requests go by score per step, else
        by age.
    moves: False if it never moves a page by itself.
    """

    name: ClassVar[str]
    ranks_by: ClassVar[frozenset[Statistic]] = frozenset()
    by_score: ClassVar[bool] = False
    moves: ClassVar[bool] = True

    @property
    def hbm_ratio(self) -> float | None:
        """Ratio mode: the share of the candidates to keep in T0. None: pressure
        decides where exact pages are."""
        return None

    @property
    def evict_share(self) -> float:
        """The share of a request's candidates that may be dropped, all in all."""
        return 0.0

    @property
    def compress_share(self) -> float:
        """The share of a request's candidates that may be in T2, all in all."""
        return 0.0

    @property
    def is_lossy(self) -> bool:
        """It may change what a request answers."""
        return self.evict_share > 0 or self.compress_share > 0

    @property
    def reads_scores(self) -> bool:
        """Attention scores must be kept for its requests."""
        return self.by_score or Statistic.SCORE in self.needs

    @property
    def value_guard(self) -> bool:
        """Drop a page whose value norm is an outlier only when no other is left."""
        return True

    @property
    def needs(self) -> frozenset[Statistic]:
        """The statistics to give with candidates. Who drops pages needs scores and
        value norms too: for the guard, and because the error is accounted."""
        if self.evict_share > 0:
            return self.ranks_by | {Statistic.SCORE, Statistic.VALUE_NORM}
        return self.ranks_by

    @abstractmethod
    def value(self, candidates: Candidates) -> np.ndarray:
        """Numbers [n]: the higher, the higher the tier in which the page stays."""

    def may_drop(self, candidates: Candidates) -> int:
        """Pages that may go to T3 now: the share is a cap over the whole request."""
        most = at_most(self.evict_share, candidates.ever) - candidates.dropped
        return min(max(most, 0), len(candidates))

    def may_compress(self, candidates: Candidates) -> int:
        """Pages that may go to T2 now, likewise."""
        most = at_most(self.compress_share, candidates.ever) - candidates.compressed
        return max(most, 0)

    def plan(self, candidates: Candidates) -> np.ndarray:
        """The tier in which each page belongs, int64 [n].

        From the lowest value up, ties by position, oldest first: ``may_drop`` pages
        go to T3, then ``may_compress`` pages that were never in T2 go there. What is
        in T2 stays. Without an ``hbm_ratio`` all others stay where they are; with one,
        the highest ``ceil(hbm_ratio * pages not dropped)`` of them belong in T0 and
        the rest in T1, or in T2 if they once were there.

        Raises ValueError if a statistic is missing or ``value`` has a wrong shape.
        """
        c = candidates
        drop, compress = self.may_drop(c), self.may_compress(c)
        target = c.tier.astype(np.int64)
        if not drop and not compress and self.hbm_ratio is None:
            return target
        kept = self.ascending(c)
        if drop:
            target[self._drop_order(c, kept)[:drop]] = Tier.T3
            kept = kept[target[kept] != Tier.T3]
        inexact = c.lossy | (c.tier == Tier.T2)
        exact = kept[~inexact[kept]]
        target[exact[:compress]] = Tier.T2
        if self.hbm_ratio is not None:
            free = kept[target[kept] != Tier.T2]
            below = max(0, len(free) - at_least(self.hbm_ratio, len(kept)))
            target[free[below:]] = Tier.T0
            fallen = free[:below]
            target[fallen] = np.where(inexact[fallen], Tier.T2, Tier.T1)
        return target

    def ascending(self, candidates: Candidates) -> np.ndarray:
        """Positions of the candidates from the lowest value up, ties by position,
        oldest first: int64 [n]. Raises ValueError like ``plan``."""
        value = np.asarray(self.value(candidates))
        if value.shape != candidates.index.shape:
            raise ValueError(
                f"policy {self.name}: value has the shape {value.shape}; "
                f"fix: return one number for each of the {len(candidates)} candidates"
            )
        return ascending(value)

    def _drop_order(self, candidates: Candidates, order: np.ndarray) -> np.ndarray:
        """``order``, with the pages that the guard protects moved to the end."""
        if not self.value_guard:
            return order
        guarded = outliers(candidates.known(Statistic.VALUE_NORM))[order]
        return np.concatenate([order[~guarded], order[guarded]])


def check_share(name: str, value: object, *, above_zero: bool = False) -> None:
    """Raises ValueError unless ``value`` is a number from 0 to 1."""
    # NaN fails every comparison.
    if not (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 <= value <= 1
        and not (above_zero and value == 0)
    ):
        low = "greater than 0, at most 1" if above_zero else "between 0 and 1"
        raise ValueError(
            f"{name} {reprlib.repr(value)}: must be {low}; fix: for example {name} 0.5"
        )


def check_switch(name: str, value: object) -> None:
    """Raises ValueError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(
            f"{name} {reprlib.repr(value)}: must be true or false; fix: {name} true"
        )


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(
            f"{name} {reprlib.repr(value)}: must be one of {', '.join(choices)}; "
            f"fix: for example {name} {choices[0]}"
        )
