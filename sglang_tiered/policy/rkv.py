"""R-KV: important pages stay, unless they repeat others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sglang_tiered.policy.base import Candidates, Statistic
from sglang_tiered.policy.evicting import EvictingPolicy

# The paper's lambda.
_IMPORTANCE_WEIGHT = 0.1


@dataclass(frozen=True, kw_only=True)
class RKV(EvictingPolicy):
    """Value: ``0.1 * importance - 0.9 * redundancy`` (Cai et al. 2025, arXiv
    2505.24133).

    importance: the paper's is the attention of the last few queries, a share per token
        that adds up to 1. Here it is the score per scored step, as shares of its sum
        over the candidates.
    redundancy: per layer and key head, the mean cosine similarity of a key to the
        other keys, where the youngest of those that are much alike does not count,
        as a softmax over the tokens; then the mean over layers, heads and the
        page's tokens. Likewise taken as shares of the sum.
    """

    name: ClassVar[str] = "rkv"
    ranks_by: ClassVar[frozenset[Statistic]] = frozenset(
        {Statistic.SCORE, Statistic.REDUNDANCY}
    )
    by_score: ClassVar[bool] = True

    def value(self, candidates: Candidates) -> np.ndarray:
        importance = _shares(candidates.score_per_step())
        redundancy = _shares(candidates.known(Statistic.REDUNDANCY))
        return _IMPORTANCE_WEIGHT * importance - (1 - _IMPORTANCE_WEIGHT) * redundancy


def _shares(array: np.ndarray) -> np.ndarray:
    """``array`` (none negative) divided by its sum; all zeros stay zeros."""
    total = np.nansum(array, dtype=np.float64)
    return array / total if total > 0 else array.astype(np.float64)
