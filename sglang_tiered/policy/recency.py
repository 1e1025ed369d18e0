"""By age only, and nothing is lost: what scores have to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sglang_tiered.policy.base import Candidates, Policy, check_share


@dataclass(frozen=True, kw_only=True)
class Recency(Policy):
    """The youngest pages stay in T0.

    hbm_ratio: the share to keep in T0; None: pressure decides.
    """

    name: ClassVar[str] = "recency"

    hbm_ratio: float | None = None

    def __post_init__(self) -> None:
        if self.hbm_ratio is not None:
            check_share("hbm_ratio", self.hbm_ratio)

    def value(self, candidates: Candidates) -> np.ndarray:
        return candidates.index
