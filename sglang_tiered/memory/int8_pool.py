"""T2: int8 rows in host memory, codes and scales of a row in one record.

The pool is laid out like the host pool: one [int8_pages, page bytes] tensor per (layer,
buffer), of exactly the size asked for and touched at construction. A page holds whole
records, so its codes and its scales move and are freed together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from sglang_tiered.memory.host_pool import (
    RESERVE_BYTES,
    free_host_bytes,
    host_memory,
)
from sglang_tiered.memory.int8_rows import Int8Rows, codec_for
from sglang_tiered.memory.layout import PoolLayout, RowBuffer


class Int8Pool:
    """Int8 rows of every layer and buffer; `count` pages that hold `nbytes` together.

    Raises ValueError below one page and MemoryError, naming --tiered-int8-gb and the
    bytes asked and free, when they do not fit.
    """

    def __init__(
        self, layout: PoolLayout, int8_pages: int, device: str | torch.device = "cpu"
    ) -> None:
        if int8_pages < 1:
            raise ValueError(f"int8_pages must be at least 1, got {int8_pages}")
        self.count = int8_pages
        self.nbytes = (
            int8_pages * layout.page_size * int8_bytes_per_token(layout.layers)
        )
        check_int8_budget(self.nbytes, free_host_bytes())
        self._page_size = layout.page_size
        self._codecs: dict[tuple[int, str], Int8Rows] = {}
        self._records: dict[tuple[int, str], torch.Tensor] = {}
        for layer, buffers in enumerate(layout.layers):
            for buffer in buffers:
                codec = codec_for(buffer)
                page_bytes = layout.page_size * codec.record_bytes
                raw = host_memory(int8_pages * page_bytes, torch.device(device))
                self._codecs[layer, buffer.name] = codec
                self._records[layer, buffer.name] = raw.view(int8_pages, page_bytes)

    def records(self, layer: int, name: str) -> torch.Tensor:
        """uint8 [int8_pages, page_size * record_bytes]; always the same object."""
        return self._records[layer, name]

    def codec(self, layer: int, name: str) -> Int8Rows:
        """How the rows of this buffer are rounded."""
        return self._codecs[layer, name]

    def write(
        self, layer: int, name: str, pages: torch.Tensor, rows: torch.Tensor
    ) -> None:
        """Round `rows`, [n, page_size * row_width], into `pages`, distinct int64 [n].

        Raises IndexError for a page that the pool does not have.
        """
        codec = self._codecs[layer, name]
        n = len(pages)
        tokens = rows.reshape(n * self._page_size, codec.heads, codec.dim)
        records = codec.quantise(tokens).view(n, self._page_size * codec.record_bytes)
        self._records[layer, name][pages] = records

    def read(self, layer: int, name: str, pages: torch.Tensor) -> torch.Tensor:
        """The rows of `pages`, int64 [n]: [n, page_size * row_width], buffer's dtype.

        Raises IndexError for a page that the pool does not have.
        """
        codec = self._codecs[layer, name]
        n = len(pages)
        records = self._records[layer, name].index_select(0, pages)
        rows = codec.dequantise(records.view(n * self._page_size, codec.record_bytes))
        return rows.view(n, self._page_size * codec.heads * codec.dim)


def int8_bytes_per_token(layers: Iterable[Sequence[RowBuffer]]) -> int:
    """Bytes of one token's records over all layers and buffers."""
    return sum(
        codec_for(buffer).record_bytes for buffers in layers for buffer in buffers
    )


def check_int8_budget(nbytes: int, free_bytes: int) -> None:
    """Raise MemoryError unless a pool fits in `free_bytes` less a reserve."""
    if nbytes + RESERVE_BYTES > free_bytes:
        raise MemoryError(
            f"--tiered-int8-gb: {_gib(nbytes)} of host memory asked, "
            f"{_gib(free_bytes)} free ({_gib(RESERVE_BYTES)} of it kept back): lower "
            "--tiered-int8-gb"
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.3f} GiB"
