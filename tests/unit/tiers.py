"""A real tier manager over real memory, with rows whose content names them."""

import numpy as np
import torch
from recording import Recorder

from sglang_tiered.memory.backing import MemfdBacking
from sglang_tiered.memory.host_pool import HostPool
from sglang_tiered.memory.int8_pool import Int8Pool
from sglang_tiered.memory.layout import PoolLayout, RowBuffer
from sglang_tiered.memory.ledger import Ledger
from sglang_tiered.memory.manager import BatchRows, TierManager, TierRules
from sglang_tiered.memory.page_table import PageTable
from sglang_tiered.memory.score_book import ScoreBook
from sglang_tiered.policy.base import Policy
from sglang_tiered.policy.recency import Recency
from sglang_tiered.transfer.engine import TransferEngine
from sglang_tiered.transfer.statistics import RowStatistics
from sglang_tiered.transfer.streams import InlineStream, ThreadStream

LAYERS = 4
LAYER = (RowBuffer("k", (2,), torch.float32), RowBuffer("v", (1,), torch.float32))

Array = np.ndarray
NO_PAGES = np.empty(0, dtype=np.int64)


def pages(*numbers: int) -> Array:
    return np.array(numbers, dtype=np.int64)


def content(layer: int, name: str, values: Array) -> Array:
    """The row of ``name`` in ``layer`` of the tokens that hold ``values``."""
    if name == "k":
        return np.stack([values, np.full_like(values, layer)], axis=-1)
    return -values[..., None] - layer


def same(rows: Array, right: Array, lossy: Array) -> bool:
    """Whether rows [..., width] are the right ones, bit for bit; where ``lossy``,
    within what int8 rounding leaves of them."""
    rounding = np.abs(right).max(axis=-1, keepdims=True, initial=0) / 60
    off = np.abs(rows - right) > rounding * lossy[..., None]
    return not (off | np.isnan(rows)).any()


class Tiers:
    """Manager, ledger, page table, engine, backing and host pool of one small pool.

    A row that nobody may read is NaN, unless the copies are only recorded.
    """

    def __init__(
        self,
        *,
        page_size: int = 1,
        t0: int = 16,
        window: int = 8,
        host: int = 32,
        int8: int = 0,
        rows: int = 8,
        rules: TierRules | None = None,
        policy: Policy | None = None,
        recorder: Recorder | None = None,
        layers: tuple[tuple[RowBuffer, ...], ...] = (LAYER,) * LAYERS,
    ) -> None:
        self.layout = PoolLayout(page_size, t0, window, host, layers)
        self.backing = MemfdBacking(self.layout)
        self.host = HostPool(self.layout)
        self.int8 = Int8Pool(self.layout, int8) if int8 else None
        self.engine = TransferEngine(
            self.backing,
            self.host,
            int8=self.int8,
            schedule=InlineStream() if recorder is None else recorder.schedule,
            fill=ThreadStream("fill") if recorder is None else recorder.fill,
            forward=None if recorder is None else recorder.forward,
        )
        self.ledger = Ledger(
            t0_pages=t0,
            host_pages=host,
            window_pages=window,
            int8_pages=int8,
            max_rows=rows,
            page_size=page_size,
        )
        self.manager = TierManager(
            ledger=self.ledger,
            table=PageTable(self.ledger.virtual.count, page_size),
            mover=self.engine,
            rules=rules or TierRules(sink_tokens=0, recent_window=1),
            policy=policy or Recency(),
            window_base=self.backing.window_base,
            scores=ScoreBook(self.ledger.virtual.count + 1, page_size),
            statistics=RowStatistics(self.backing, self.host, self.int8),
            poison=self.poison if recorder is None else None,
        )
        self.page_size = page_size
        self.recorder = recorder
        if recorder is None:
            self.poison(np.arange(1, self.backing.window_base + window))

    def close(self) -> None:
        """Unmap the memory now, not when the garbage collector comes to the cycles
        around it: other tests count what is mapped."""
        self.engine.close()
        self.backing.close()
        if self.recorder is not None:
            self.recorder.submitted.clear()
        vars(self.manager).update(mover=None, poison=None, statistics=None)
        del self.engine, self.backing, self.host, self.int8

    def poison(self, physical: Array) -> None:
        for layer, buffers in enumerate(self.layout.layers):
            for buffer in buffers:
                self._rows(layer, buffer.name)[physical] = np.nan

    def physical(self, virtual: Array) -> Array:
        """Where attention finds the bytes of the virtual pages."""
        return self.manager.table.v2p.numpy()[virtual]

    def write(self, layer: int, ids: Array, values: Array) -> None:
        """The forward writes the rows of tokens ``ids``."""
        for buffer in LAYER:
            rows = self._rows(layer, buffer.name)
            where = self.physical(ids // self.page_size), ids % self.page_size
            rows[where] = content(layer, buffer.name, values)

    def reads(self, layer: int, ids: Array, values: Array) -> bool:
        """Whether attention of ``layer`` sees ``values`` at tokens ``ids``."""
        where = self.physical(ids // self.page_size), ids % self.page_size
        lossy = self.ledger.is_lossy(ids // self.page_size)
        return all(
            same(
                self._rows(layer, buffer.name)[where],
                content(layer, buffer.name, values),
                lossy,
            )
            for buffer in LAYER
        )

    def holds(self, virtual: Array, values: Array) -> bool:
        """Whether every tier that has a copy of the pages ([n]) holds ``values``
        ([n, page_size]; NaN where no token is)."""
        written = ~np.isnan(values)
        in_t0 = self.ledger.t0_page[virtual] >= 0
        on_host = self.ledger.host_page[virtual] >= 0
        as_int8 = self.ledger.int8_page[virtual] >= 0
        lossy = np.broadcast_to(as_int8[:, None], written.shape)
        copies = (
            (self._rows, self.ledger.t0_page, in_t0),
            (self._host_rows, self.ledger.host_page, on_host),
            (self._int8_rows, self.ledger.int8_page, as_int8),
        )
        return all(
            same(
                rows(layer, buffer.name)[page[virtual[there]]][written[there]],
                content(layer, buffer.name, values)[there][written[there]],
                lossy[there][written[there]],
            )
            for layer in range(LAYERS)
            for buffer in LAYER
            for rows, page, there in copies
        )

    def _rows(self, layer: int, name: str) -> Array:
        return self._paged(self.backing.pages(layer, name), name)

    def _host_rows(self, layer: int, name: str) -> Array:
        return self._paged(self.host.pages(layer, name), name)

    def _int8_rows(self, layer: int, name: str) -> Array:
        if self.int8 is None:
            return np.empty((0, self.layout.page_size, 1), dtype=np.float32)
        everything = torch.arange(self.int8.count)
        return self._paged(self.int8.read(layer, name, everything), name)

    def _paged(self, rows: torch.Tensor, name: str) -> Array:
        width = self.layout.row_buffer(0, name).row_width
        return rows.numpy().reshape(len(rows), self.layout.page_size, width)

    def check_integrity(self) -> None:
        self.manager.check_integrity()
        self.engine.check_integrity()


def batch_of(
    *entries: tuple[int, int, int, int], ids: Array = NO_PAGES, decode: bool = True
) -> BatchRows:
    """A batch of (row, length, new tokens, prompt) that writes token ``ids``."""
    row, length, new, prompt = (
        np.array(column, dtype=np.int64)
        for column in (zip(*entries, strict=True) if entries else [()] * 4)
    )
    return BatchRows(
        row=row,
        length=length,
        new_tokens=new,
        prompt=prompt,
        new_ids=ids,
        decode=np.full(len(row), decode),
    )
