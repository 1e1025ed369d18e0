"""The hierarchy of "Not All Thoughts Need HBM": by cumulative attention score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sglang_tiered.policy.base import (
    Candidates,
    Policy,
    Statistic,
    check_choice,
    check_share,
    check_switch,
)
from sglang_tiered.policy.shares import at_most

CUMULATIVE, PER_INTERVAL = "cumulative", "per_interval"


@dataclass(frozen=True, kw_only=True)
class Hierarchy(Policy):
    """The pages that received the most attention stay highest (arXiv 2605.09490).

    hbm_ratio: the share to keep in T0; None: pressure decides.
    compress_ratio, evict_ratio: the shares of a request's candidates that may ever go
        to T2 and to T3.
    evict_schedule: "cumulative"; or "per_interval", the rule of the paper's scripts:
        ``evict_ratio`` of what is left is dropped at every re-tier, which compounds.
    value_guard: see ``Policy``.
    """

    name: ClassVar[str] = "hierarchy"
    ranks_by: ClassVar[frozenset[Statistic]] = frozenset({Statistic.SCORE})
    by_score: ClassVar[bool] = True

    hbm_ratio: float | None = None
    compress_ratio: float = 0.0
    evict_ratio: float = 0.0
    evict_schedule: str = CUMULATIVE
    value_guard: bool = True

    def __post_init__(self) -> None:
        if self.hbm_ratio is not None:
            check_share("hbm_ratio", self.hbm_ratio)
        check_share("compress_ratio", self.compress_ratio)
        check_share("evict_ratio", self.evict_ratio)
        check_choice("evict_schedule", self.evict_schedule, (CUMULATIVE, PER_INTERVAL))
        check_switch("value_guard", self.value_guard)

    @property
    def evict_share(self) -> float:
        """What compounds may drop everything in the end."""
        if self.evict_schedule == PER_INTERVAL and self.evict_ratio > 0:
            return 1.0
        return self.evict_ratio

    @property
    def compress_share(self) -> float:
        return self.compress_ratio

    def may_drop(self, candidates: Candidates) -> int:
        if self.evict_schedule == PER_INTERVAL:
            return at_most(self.evict_ratio, len(candidates))
        return super().may_drop(candidates)

    def value(self, candidates: Candidates) -> np.ndarray:
        return candidates.known(Statistic.SCORE)
