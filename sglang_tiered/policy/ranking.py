"""Which pages to move first, and the share that ratio mode keeps in T0."""

from __future__ import annotations

import numpy as np

from sglang_tiered.policy.protection import PageView, Protection


def demotion_order(view: PageView, protection: np.ndarray) -> np.ndarray:
    """Positions of ``view`` in the order in which to demote them, int64 [n].

    By class; inside a class: cold pages by when they were last read (and the
    tail of a sequence before its head, which more requests can share), pages of
    running requests by age, oldest first, and prefixes by how few requests read
    them. Ties are broken by position.
    """
    cold = protection <= Protection.WAITING
    prefix = protection == Protection.PREFIX
    key = np.where(cold, view.last_read, np.where(prefix, view.readers, view.born))
    # A prefix or a cold path loses its tail first, a chain of thought its head.
    tie = np.where(cold | prefix, -view.index, view.index)
    return np.lexsort((np.arange(len(key)), tie, key, protection))


def promotion_order(view: PageView, protection: np.ndarray) -> np.ndarray:
    """Positions of ``view`` in the order in which to promote them: the reverse of
    the demotion order, so shared prefixes and recent rows return first."""
    return demotion_order(view, protection)[::-1]


def beyond_share(view: PageView, hbm_ratio: float) -> np.ndarray:
    """Ratio mode: bool [n], True for the pages of ``view`` (unprotected pages of
    running requests) that lie beyond the share ``hbm_ratio`` of their request.

    Each request keeps its ``ceil(hbm_ratio * pages)`` youngest pages.
    """
    beyond = np.zeros(len(view.row), dtype=bool)
    if not len(beyond):
        return beyond
    order = np.lexsort((-view.index, view.row))
    row = view.row[order]
    first = np.r_[True, row[1:] != row[:-1]]
    start = np.maximum.accumulate(np.where(first, np.arange(len(row)), 0))
    count = np.bincount(row)[row]
    place = np.arange(len(row)) - start
    beyond[order] = place >= np.ceil(hbm_ratio * count)
    return beyond
