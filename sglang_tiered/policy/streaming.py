"""StreamingLLM: attention sinks and a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sglang_tiered.policy.base import Candidates
from sglang_tiered.policy.evicting import EvictingPolicy


@dataclass(frozen=True, kw_only=True)
class Streaming(EvictingPolicy):
    """The youngest pages stay (Xiao et al. 2023, arXiv 2309.17453).

    The sinks are protected, as they are for every policy here, and so is a recent
    window, which the budget lengthens.
    """

    name: ClassVar[str] = "streaming"

    def value(self, candidates: Candidates) -> np.ndarray:
        return candidates.index
