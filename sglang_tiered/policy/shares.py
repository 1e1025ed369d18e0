"""Shares as whole pages, ranks of pages, and which value norms are outliers."""

from __future__ import annotations

import math

import numpy as np

# 0.29 * 100 is 28.999999999999996 in binary; a user means 29.
_ROUNDING = 1e-9
_SIGN = np.uint32(1 << 31)
_POSITION = np.uint64((1 << 32) - 1)

# An outlier lies more than this many robust standard deviations above the median, the
# usual cut for such a score (Iglewicz and Hoaglin 1993).
_OUTLIER_DEVIATIONS = 3.5
# Makes the median absolute deviation of a normal distribution its standard deviation.
_MAD_TO_DEVIATION = 1.4826
# What lies as close to the median as this share of it is no outlier, however narrow
# the other norms lie: its error bound is hardly larger than theirs.
_LEAST_DEVIATION = 0.1


def at_most(share: float, pages: int) -> int:
    """The most whole pages within ``share`` of ``pages``: the floor."""
    return math.floor(share * pages + _ROUNDING)


def at_least(share: float, pages: int) -> int:
    """The least whole pages that make up ``share`` of ``pages``: the ceiling."""
    return math.ceil(share * pages - _ROUNDING)


def ascending(value: np.ndarray) -> np.ndarray:
    """Positions of ``value`` [n] from the lowest value to the highest: int64 [n].

    Values are compared as float32; equal ones go by position. A NaN ranks as the
    highest: a page of which nothing is known stays where it is.
    """
    # Packed with its position, a value becomes one integer: sorting those is many times
    # faster than a stable sort of floats. Adding zero turns -0.0 into 0.0.
    single = value.astype(np.float32) + np.float32(0)
    single[np.isnan(single)] = np.inf
    bits = single.view(np.uint32)
    ordered = np.where(bits & _SIGN, ~bits, bits | _SIGN).astype(np.uint64)
    packed = (ordered << np.uint64(32)) | np.arange(len(value), dtype=np.uint64)
    packed.sort()
    return (packed & _POSITION).astype(np.int64)


def outliers(norm: np.ndarray) -> np.ndarray:
    """Which value norms [n] are far above the others of their request: bool [n].

    Those above ``median + 3.5 * max(1.4826 * MAD, 0.1 * median)``, with MAD the median
    absolute deviation from the median. Norms that are not known (NaN) are none.
    """
    known = norm[~np.isnan(norm)]
    if not len(known):
        return np.zeros(len(norm), dtype=bool)
    median = np.median(known)
    deviation = _MAD_TO_DEVIATION * np.median(np.abs(known - median))
    deviation = max(deviation, _LEAST_DEVIATION * median)
    return norm > median + _OUTLIER_DEVIATIONS * deviation
