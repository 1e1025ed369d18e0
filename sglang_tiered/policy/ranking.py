"""Which pages of all requests to move first, when T0 is short or has room."""

from __future__ import annotations

import numpy as np

from sglang_tiered.policy.protection import PageView, Protection


def demotion_order(view: PageView, protection: np.ndarray) -> np.ndarray:
    """Positions of ``view`` in the order in which to demote them, int64 [n].

    By class; inside a class: cold pages by when they were last read (and the
    tail of a sequence before its head, which more requests can share), pages of
    running requests by their worth (score per step, or age), least first, and prefixes
    by how few requests read them. Ties are broken by position.
    """
    cold = protection <= Protection.WAITING
    prefix = protection == Protection.PREFIX
    key = np.where(cold, view.last_read, np.where(prefix, view.readers, view.worth))
    # A prefix or a cold path loses its tail first, a chain of thought its head.
    tie = np.where(cold | prefix, -view.index, view.index)
    return np.lexsort((np.arange(len(key)), tie, key, protection))


def promotion_order(view: PageView, protection: np.ndarray) -> np.ndarray:
    """Positions of ``view`` in the order in which to promote them: the reverse of
    the demotion order, so shared prefixes and recent rows return first."""
    return demotion_order(view, protection)[::-1]
