"""Reading scattered int8 pages into device pages, for many buffers with one plan."""

from __future__ import annotations

import torch

from sglang_tiered.memory.int8_pool import Int8Pool
from sglang_tiered.transfer.row_copy import Pages


class Int8Copy:
    """The plan of `target[target_pages[i]] = dequantised int8_pages[i]`.

    Both int64 [n]; raises ValueError if they are not equally many. Like `RowCopy`, but
    rows change their type on the way, so it is an index per buffer.
    """

    def __init__(self, int8_pages: Pages, target_pages: Pages) -> None:
        if int8_pages.shape != target_pages.shape or int8_pages.ndim != 1:
            raise ValueError(
                f"int8 pages {int8_pages.shape}, target pages {target_pages.shape}"
            )
        self.count = len(target_pages)
        self._source = torch.from_numpy(int8_pages)
        self._target = torch.from_numpy(target_pages)

    def run(self, pool: Int8Pool, layer: int, name: str, target: torch.Tensor) -> None:
        """Into `target`, [device pages, page_size * row_width] of one buffer."""
        if self.count:
            target.index_copy_(0, self._target, pool.read(layer, name, self._source))
