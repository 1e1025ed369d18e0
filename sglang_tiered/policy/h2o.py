"""H2O: heavy hitters and recent tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sglang_tiered.policy.base import Candidates, Statistic
from sglang_tiered.policy.evicting import EvictingPolicy


@dataclass(frozen=True, kw_only=True)
class H2O(EvictingPolicy):
    """Half of the pages that stay are the youngest, the others those with the highest
    cumulative attention score (Zhang et al. 2023, arXiv 2306.14048).

    Of an odd number, the heavy hitters have one page more.
    """

    name: ClassVar[str] = "h2o"
    ranks_by: ClassVar[frozenset[Statistic]] = frozenset({Statistic.SCORE})
    by_score: ClassVar[bool] = True

    def value(self, candidates: Candidates) -> np.ndarray:
        value = candidates.known(Statistic.SCORE).copy()
        recent = (len(candidates) - self.may_drop(candidates)) // 2
        value[len(value) - recent :] = np.inf
        return value
