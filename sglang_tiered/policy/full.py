"""The full cache: what every other policy is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sglang_tiered.policy.base import Candidates, Policy


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """No page is moved by the policy; only T0 being short moves pages."""

    name: ClassVar[str] = "full"
    moves: ClassVar[bool] = False

    def value(self, candidates: Candidates) -> np.ndarray:
        return candidates.index
