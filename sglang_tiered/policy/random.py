"""Eviction by chance: with a protected prompt, a baseline that is hard to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sglang_tiered.policy.base import Candidates
from sglang_tiered.policy.evicting import EvictingPolicy

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_UINT64 = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Random(EvictingPolicy):
    """Each page has a chance number from the request's seed and the page's position.

    The number never changes, so a re-tier does not draw again for the pages that stay.
    """

    name: ClassVar[str] = "random"

    def value(self, candidates: Candidates) -> np.ndarray:
        seed = np.array([candidates.seed & _UINT64], dtype=np.uint64)
        number = _mix(_mix(seed) + candidates.index.astype(np.uint64) * _GOLDEN)
        # Values are compared as float32, which has 24 bits.
        return number >> np.uint64(40)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele et al. 2014), which spreads neighbours over all of uint64."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
