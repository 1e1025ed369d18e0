"""The order in which pages give up T0: classes, lowest first.

Protection is a priority, not a wall: with a wall, long prompts fill T0 and force
retractions. Within DESIGN's order, a page is

``COLD``         in the radix tree, read by no running request;
``WAITING``      kept for a retracted request or an idle session;
``UNPROTECTED``  a running request's generated token outside sinks and window;
``SETTLING``     such a page that was promoted a moment ago: demoting it again
                 at once would thrash;
``PREFIX``       a prompt, a shared prefix or an attention sink (the first
                 ``sink_tokens`` generated tokens);
``RECENT``       the last ``recent_window`` tokens of a running request.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import numpy as np

Count = TypeVar("Count", int, np.ndarray)


class Protection(IntEnum):
    COLD = 0
    WAITING = 1
    UNPROTECTED = 2
    SETTLING = 3
    PREFIX = 4
    RECENT = 5


@dataclass(frozen=True)
class PageView:
    """What the policies see of ``n`` pages: one array [n] per fact."""

    read: np.ndarray  # bool: a running request reads it
    waiting: np.ndarray  # bool: parked, or of an idle session
    private: np.ndarray  # bool: a request's own page, not the tree's
    generated: np.ndarray  # bool: reasoning tokens, not prompt
    row: np.ndarray  # int64: request row of a private page, else -1
    index: np.ndarray  # int64: page number in its sequence
    length: np.ndarray  # int64: tokens of the owning request (private pages)
    prompt: np.ndarray  # int64: prompt tokens of the owning request
    readers: np.ndarray  # int64: running requests that read it
    worth: np.ndarray  # int64 or float64: least goes first among running rows
    last_read: np.ndarray  # int64: forward after which nobody read it
    promoted: np.ndarray  # int64: forward of its last promotion, 0 = never


def unprotected_range(
    prompt: Count,
    length: Count,
    *,
    page_size: int,
    sink_tokens: int,
    recent_window: int,
) -> tuple[Count, Count]:
    """The pages of a request that nothing protects: from the first whole page behind
    prompt and sinks to the last one before the recent window, as page numbers
    [first, end); none if ``end <= first``. Numbers or int64 arrays [n]."""
    first = -(-(prompt + sink_tokens) // page_size)
    return first, (length - recent_window) // page_size


def classify(
    view: PageView,
    *,
    page_size: int,
    sink_tokens: int,
    recent_window: int,
    settled_before: int,
) -> np.ndarray:
    """Protection class of every page, int64 [n].

    ``settled_before``: pages promoted at or after this forward are settling.
    """
    first, end = unprotected_range(
        view.prompt,
        view.length,
        page_size=page_size,
        sink_tokens=sink_tokens,
        recent_window=recent_window,
    )
    reasoning = view.read & view.generated
    sink = view.private & (view.index < first)
    recent = view.private & (view.index >= end)
    settling = (view.promoted > 0) & (view.promoted >= settled_before)
    return np.select(
        [
            ~view.read & ~view.waiting,
            ~view.read,
            view.read & recent,
            reasoning & ~sink & settling,
            reasoning & ~sink,
        ],
        [
            Protection.COLD,
            Protection.WAITING,
            Protection.RECENT,
            Protection.SETTLING,
            Protection.UNPROTECTED,
        ],
        default=Protection.PREFIX,
    )
