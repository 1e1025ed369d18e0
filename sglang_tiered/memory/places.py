"""In which tiers the rows of some pages lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Places:
    """Where ``n`` pages are: the page number in each tier, int64 [n] each, -1 where
    the tier has no copy.

    ``t0``: physical page of the device buffers; ``host``: page of the full-precision
    host pool; ``int8``: page of the quantised host pool.
    """

    t0: np.ndarray
    host: np.ndarray
    int8: np.ndarray

    def __len__(self) -> int:
        return len(self.t0)
