"""The page table: where the bytes of each virtual page are now.

``v2p[virtual page] = physical page`` of the per-layer buffers: a T0 page, or the
window page through which a host page passes. Attention kernels gather through
it, so the tensor is made once and only ever written in place: captured graphs
and backends keep its address. Virtual page 0 is the padding sink and maps to
itself; so does every page that has no place at the moment and that nobody reads.

A *dropped* page maps to ``DROPPED``. Its request still reads the pages around it, so
an attention backend must leave the entry out of the table that it hands to a kernel
(stock kernels clamp a negative row to 0 and would attend to padding).
"""

from __future__ import annotations

import numpy as np
import torch

SINK = 0
DROPPED = -1


class PageTable:
    """Virtual to physical pages.

    Args:
        virtual_pages: number of virtual pages, the sink not counted.
        page_size: tokens per page.
        device: where attention kernels read ``v2p``.
    """

    def __init__(
        self, virtual_pages: int, page_size: int, device: str | torch.device = "cpu"
    ) -> None:
        self.page_size = page_size
        self.v2p = torch.zeros(virtual_pages + 1, dtype=torch.int64, device=device)
        self._on_host = self.v2p.numpy() if self.v2p.device.type == "cpu" else None

    def place(self, pages: np.ndarray, physical: np.ndarray) -> None:
        """Virtual ``pages`` (int64 [n]) are now at ``physical`` (int64 [n])."""
        if self._on_host is not None:
            self._on_host[pages] = physical
        else:
            index = torch.from_numpy(pages).to(self.v2p.device, non_blocking=True)
            value = torch.from_numpy(physical).to(self.v2p.device, non_blocking=True)
            self.v2p.index_copy_(0, index, value)

    def clear(self, pages: np.ndarray) -> None:
        """Virtual ``pages`` (int64 [n]) have no place: nobody may read them."""
        self.place(pages, np.zeros(len(pages), dtype=np.int64))

    def drop(self, pages: np.ndarray) -> None:
        """Virtual ``pages`` (int64 [n]) have lost their rows (T3)."""
        self.place(pages, np.full(len(pages), DROPPED, dtype=np.int64))

    def reset(self) -> None:
        """No page has a place, in the same tensor."""
        self.v2p.zero_()

    def translate(self, ids: torch.Tensor) -> torch.Tensor:
        """Virtual token ids (any shape, on ``v2p``'s device) to physical row
        numbers, int64 of the same shape."""
        if self.page_size == 1:
            return self.v2p[ids.long()]
        ids = ids.long()
        pages = self.v2p[ids // self.page_size]
        return pages * self.page_size + ids % self.page_size
