"""Copying scattered pages from one buffer to another, for many buffers with one plan.

`np.take` into a slice is the fastest single-thread gather there is on a CPU, and it
releases the interpreter lock, so a plan turns as much of a copy as it can into that.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Pages = npt.NDArray[np.int64]
# Pages as opaque records, one per page: numpy moves a record of any size with one
# memmove.
Records = npt.NDArray[np.void]

# A gather over gaps costs one copy per page of the span, gather and scatter cost two
# per page.
_MOST_SPAN_PER_PAGE = 2
# Gather and scatter go through a scratch this small so that it stays in the L2 cache.
_SCRATCH_BYTES = 256 << 10


def page_records(pages: torch.Tensor) -> Records:
    """A contiguous CPU tensor [pages, elements] as [pages] opaque records."""
    raw = pages.view(torch.uint8).numpy()
    records: Records = raw.view(np.dtype((np.void, raw.shape[1])))[:, 0]
    return records


class RowCopy:
    """The plan of a copy `target[target_pages[i]] = source[source_pages[i]]`.

    Page numbers are checked to be equally many and the targets to be all different
    (ValueError). With `overwrite_gaps` the pages between the first and the last target
    may be overwritten with copies of other planned pages: right for a window, where
    only planned pages are ever read.
    """

    def __init__(
        self, source_pages: Pages, target_pages: Pages, *, overwrite_gaps: bool = False
    ) -> None:
        if source_pages.shape != target_pages.shape or source_pages.ndim != 1:
            raise ValueError(
                f"source pages {source_pages.shape}, target pages {target_pages.shape}"
            )
        self.count = len(target_pages)
        self._source, self._target = source_pages, target_pages
        self._slice: slice | None = None
        if self.count == 0:
            return
        if not np.all(target_pages[1:] > target_pages[:-1]):
            order = np.argsort(target_pages)
            self._source, self._target = source_pages[order], target_pages[order]
            if not np.all(self._target[1:] > self._target[:-1]):
                raise ValueError("a target page occurs twice in one copy")
        first, last = int(self._target[0]), int(self._target[-1])
        span = last - first + 1
        if span == self.count:
            self._slice = slice(first, last + 1)
        elif overwrite_gaps and span <= _MOST_SPAN_PER_PAGE * self.count:
            # Every gap repeats the source of the target before it: that row is in the
            # cache.
            repeats = np.diff(self._target, append=last + 1)
            self._source = np.repeat(self._source, repeats)
            self._slice = slice(first, last + 1)

    def run(self, source: Records, target: Records) -> None:
        """Copy between two buffers whose pages have the same size."""
        if self.count == 0:
            return
        # mode="clip": the mode "raise" makes numpy gather into a buffer first, to leave
        # the target untouched on a bad index. The pages were checked when the copy was
        # planned.
        if self._slice is not None:
            source.take(self._source, out=target[self._slice], mode="clip")
            return
        step = max(1, _SCRATCH_BYTES // source.dtype.itemsize)
        scratch = np.empty(min(step, self.count), source.dtype)
        for start in range(0, self.count, step):
            part = slice(start, min(start + step, self.count))
            rows = scratch[: part.stop - start]
            source.take(self._source[part], out=rows, mode="clip")
            target[self._target[part]] = rows
