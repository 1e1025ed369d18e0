"""Who owns which slot: the tables behind every tier, and their legal moves.

Nothing here holds a tensor or takes a decision; numpy arrays indexed by virtual
page say what is true, and each method is one transition that keeps them true.

A virtual page is *live* from ``allocate`` to ``release``. A live page is
  * in T0: it has a T0 page. It may also have a host page, an up-to-date copy
    (rows never change once written): then it is *clean*, and demoting it copies
    nothing;
  * in T1: it has only its host page. If a running request reads it, it also
    needs a window page, through which its bytes pass every step; until it has
    one it is *unplaced*.

Readers: one for the running request that owns the page privately, one for every
running request that holds a tree lock over it. A page without readers (cold in
the tree, parked, or of an idle session) never has a window page.

All page arguments are int64 arrays of distinct virtual pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_tiered.memory.slots import SlotPool

NONE = -1


@dataclass(frozen=True)
class Copies:
    """Rows to copy, page by page: ``t0_pages[i]`` and ``host_pages[i]``, int64 [n]."""

    t0_pages: np.ndarray
    host_pages: np.ndarray

    def __len__(self) -> int:
        return len(self.t0_pages)


class RowTable:
    """Per request row (a row of SGLang's ``req_to_token``): what its pages mean.

    Rows are recycled, so a page names its owner by row *and* generation: a page
    that outlives its request can never be read as a page of the next one.
    """

    def __init__(self, max_rows: int) -> None:
        self.generation = np.zeros(max_rows, dtype=np.int64)
        self.length = np.zeros(max_rows, dtype=np.int64)  # tokens with a row
        self.prompt = np.zeros(max_rows, dtype=np.int64)  # tokens of the prompt
        self.steps = np.zeros(max_rows, dtype=np.int64)  # decode forwards so far
        self.streamed = np.zeros(max_rows, dtype=bool)  # ever read the window

    def reset(self) -> None:
        for table in (self.length, self.prompt, self.steps, self.streamed):
            table.fill(0)
        self.generation += 1

    def renew(self, row: int) -> None:
        """The row belongs to a new request."""
        self.generation[row] += 1
        self.length[row] = self.prompt[row] = self.steps[row] = 0
        self.streamed[row] = False


class Ledger:
    """Tables of all live pages.

    Args:
        t0_pages: pages of T0, numbered from 1 (0 is the padding sink).
        host_pages: pages of the host pool, numbered from 0.
        window_pages: pages of the window, numbered from 0.
        max_rows: rows of SGLang's ``req_to_token``.
        page_size: tokens per page.
    """

    def __init__(
        self,
        *,
        t0_pages: int,
        host_pages: int,
        window_pages: int,
        max_rows: int,
        page_size: int,
    ) -> None:
        self.page_size = page_size
        virtual_pages = t0_pages + host_pages
        self.virtual = SlotPool("virtual page", virtual_pages, first=1)
        self.t0 = SlotPool("T0 page", t0_pages, first=1)
        self.host = SlotPool("host page", host_pages, lowest_first=True)
        self.window = SlotPool("window page", window_pages, lowest_first=True)
        self.rows = RowTable(max_rows)

        size = virtual_pages + 1
        self.live = np.zeros(size, dtype=bool)
        self.t0_page = np.full(size, NONE, dtype=np.int64)
        self.host_page = np.full(size, NONE, dtype=np.int64)
        self.window_page = np.full(size, NONE, dtype=np.int64)
        self.readers = np.zeros(size, dtype=np.int64)
        self.private = np.zeros(size, dtype=bool)  # a request's own, not the tree's
        self.parks = np.zeros(size, dtype=np.int64)  # retracted requests that wait
        self.owner = np.full(size, NONE, dtype=np.int64)  # row of a private page
        self.owner_generation = np.zeros(size, dtype=np.int64)
        self.index = np.zeros(size, dtype=np.int64)  # page number in its sequence
        self.generated = np.zeros(size, dtype=bool)  # reasoning, not prompt
        self.born = np.zeros(size, dtype=np.int64)  # last forward that writes it
        self.last_read = np.zeros(size, dtype=np.int64)  # forward of the last unread
        self.promoted = np.zeros(size, dtype=np.int64)  # forward of the last promotion

        self.at_t0 = np.zeros(t0_pages + 1, dtype=np.int64)  # virtual page or 0
        self.at_window = np.zeros(window_pages, dtype=np.int64)  # virtual page or 0
        self.version = 0  # changes with every transition
        self.window_version = 0  # changes when a window page changes hands
        self._zero_counts()

    def _zero_counts(self) -> None:
        self.t0_read = self.t0_unread = self.unplaced = self.t1 = self.clean = 0

    @property
    def read_pages(self) -> int:
        """Pages that running requests read, wherever they are."""
        return self.t0_read + self.unplaced + self.window.used

    # -- life and death --------------------------------------------------------

    def allocate(self, n: int, epoch: int) -> np.ndarray:
        """``n`` new private pages in T0, written by forward ``epoch``.

        Raises RuntimeError if T0 or the virtual ids are short: make room first.
        """
        if n > self.t0.available or n > self.virtual.available:
            raise RuntimeError(
                f"{n} pages asked for; {self.t0.available} T0 pages and "
                f"{self.virtual.available} virtual pages are free"
            )
        pages = self.virtual.alloc(n)
        slots = self.t0.alloc(n)
        self.t0_page[pages] = slots
        self.at_t0[slots] = pages
        self.live[pages] = True
        self.private[pages] = True
        self.readers[pages] = 1
        self.owner[pages] = NONE
        self.index[pages] = 0
        self.generated[pages] = False
        self.born[pages] = epoch
        self.promoted[pages] = 0
        self._count(pages, 1)
        return pages

    def release(self, pages: np.ndarray, epoch: int = 0) -> np.ndarray:
        """The pages' rows are gone; every slot they held is free.

        ``epoch``: the last forward that may still read them. Returns the T0
        pages that became free, int64 [k].
        Raises RuntimeError for a page that is not live (a double free), is named
        twice, or that somebody else still reads.
        """
        if len(np.unique(pages)) != len(pages) or not self.live[pages].all():
            raise RuntimeError(
                f"double free of virtual pages {pages[~self.live[pages]][:8].tolist()}"
            )
        # The owner's own read ends with the page.
        if (self.readers[pages] > self.private[pages]).any() or self.parks[pages].any():
            raise RuntimeError("virtual pages freed while a request reads them")
        self._count(pages, -1)
        slots = self._take(self.t0_page, pages)
        self.at_t0[slots] = 0
        self.t0.free(slots)
        self.host.free(self._take(self.host_page, pages), epoch)
        self._leave_window(pages, epoch)
        self.live[pages] = False
        self.private[pages] = False
        self.readers[pages] = 0
        self.owner[pages] = NONE
        self.virtual.free(pages)
        return slots

    def reset(self) -> None:
        """Nothing is live (``flush_cache``); the arrays stay where they are."""
        for pool in (self.virtual, self.t0, self.host, self.window):
            pool.reset()
        for table in (self.t0_page, self.host_page, self.window_page, self.owner):
            table.fill(NONE)
        for table in (self.live, self.private, self.readers, self.parks):
            table.fill(0)
        self.at_t0.fill(0)
        self.at_window.fill(0)
        self.rows.reset()
        self._zero_counts()
        self.version += 1
        self.window_version += 1

    def assign(self, pages: np.ndarray, row: np.ndarray, index: np.ndarray) -> None:
        """Private ``pages`` hold page ``index`` of the request in ``row``
        (int64 [n] each); the prompt length of the row must be known."""
        self.owner[pages] = row
        self.owner_generation[pages] = self.rows.generation[row]
        self.index[pages] = index
        self.generated[pages] = index * self.page_size >= self.rows.prompt[row]
        self.version += 1

    def give_to_tree(self, pages: np.ndarray) -> None:
        """Private pages now belong to the radix tree: bytes stay, the owner's own
        read ends (its tree lock reads them from here on)."""
        if not (self.live[pages] & self.private[pages]).all():
            raise RuntimeError("only private pages can be given to the tree")
        active = pages[self.readers[pages] > 0]
        self.private[pages] = False
        self.owner[pages] = NONE
        self.unread(active, epoch=0)

    # -- readers ---------------------------------------------------------------

    def read(self, pages: np.ndarray) -> None:
        """One more running request reads ``pages``."""
        self._count(pages, -1)
        self.readers[pages] += 1
        self._count(pages, 1)

    def unread(self, pages: np.ndarray, epoch: int) -> np.ndarray:
        """One reader less; pages without any leave the window.

        ``epoch``: the last forward that may still read the window pages.
        Returns the pages that nobody reads any more, int64 [k]. Raises
        RuntimeError if a page had no reader.
        """
        if (self.readers[pages] < 1).any():
            raise RuntimeError("a reader left a page that nobody was reading")
        self._count(pages, -1)
        self.readers[pages] -= 1
        cold = pages[self.readers[pages] == 0]
        self._leave_window(cold, epoch)
        self.last_read[cold] = epoch
        self._count(pages, 1)
        return cold

    def park(self, pages: np.ndarray) -> None:
        """A retracted request waits with its rows on ``pages``."""
        self.parks[pages] += 1
        self.version += 1

    def unpark(self, pages: np.ndarray) -> None:
        if (self.parks[pages] < 1).any():
            raise RuntimeError("unparked pages that were not parked")
        self.parks[pages] -= 1
        self.version += 1

    # -- moves -----------------------------------------------------------------

    def demote(self, pages: np.ndarray) -> Copies:
        """T0 to T1. Returns the copies that dirty pages need; pages that a
        running request reads get a window page. Raises RuntimeError if host or
        window pages are short."""
        if (self.t0_page[pages] < 0).any():
            raise RuntimeError("only T0 pages can be demoted")
        self._count(pages, -1)
        dirty = pages[self.host_page[pages] < 0]
        self.host_page[dirty] = self.host.alloc(len(dirty))
        copies = Copies(self.t0_page[dirty], self.host_page[dirty])
        slots = self._take(self.t0_page, pages)
        self.at_t0[slots] = 0
        self.t0.free(slots)
        self._enter_window(pages[self.readers[pages] > 0])
        self._count(pages, 1)
        return copies

    def promote(self, pages: np.ndarray, epoch: int) -> Copies:
        """T1 to T0; the host copy stays, so the pages are clean. ``epoch``: the
        last forward that may still read their window pages."""
        if (self.t0_page[pages] >= 0).any() or (self.host_page[pages] < 0).any():
            raise RuntimeError("only T1 pages can be promoted")
        self._count(pages, -1)
        slots = self.t0.alloc(len(pages))
        self.t0_page[pages] = slots
        self.at_t0[slots] = pages
        self.promoted[pages] = epoch
        self._leave_window(pages, epoch)
        self._count(pages, 1)
        return Copies(slots, self.host_page[pages])

    def enter_window(self, pages: np.ndarray) -> None:
        """Unplaced pages get a window page each."""
        self._count(pages, -1)
        self._enter_window(pages)
        self._count(pages, 1)

    def drop_copies(self, pages: np.ndarray, epoch: int = 0) -> None:
        """Clean T0 pages give up their host copy (the host slot is wanted, or the
        page is about to be written again)."""
        if (self.t0_page[pages] < 0).any():
            raise RuntimeError("dropping the host copy of a T1 page loses its rows")
        self._count(pages, -1)
        self.host.free(self._take(self.host_page, pages), epoch)
        self._count(pages, 1)

    # -- queries ---------------------------------------------------------------

    def in_t0(self) -> np.ndarray:
        """Live virtual pages in T0, int64 [k]."""
        return self.at_t0[self.at_t0 > 0]

    def in_window(self) -> np.ndarray:
        """Virtual pages that pass through the window, by window page: int64 [k]."""
        return self.at_window[self.at_window > 0]

    def unplaced_pages(self) -> np.ndarray:
        """Read pages that have neither a T0 nor a window page, int64 [k]."""
        return np.flatnonzero(
            self.live & (self.readers > 0) & (self.t0_page < 0) & (self.window_page < 0)
        )

    def is_open(self, pages: np.ndarray) -> np.ndarray:
        """bool [n]: the page is a running request's last one and partly filled, so
        the next step writes into it: it must stay in T0."""
        row = self.owner[pages]
        length = self.rows.length[row]
        return (
            self.private[pages]
            & (self.readers[pages] > 0)
            & (row >= 0)
            & (self.owner_generation[pages] == self.rows.generation[row])
            & (length % self.page_size != 0)
            & (self.index[pages] == length // self.page_size)
        )

    # -- helpers ---------------------------------------------------------------

    @staticmethod
    def _take(table: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """Clear ``table`` at ``pages``; return the entries that were set."""
        slots = table[pages]
        table[pages] = NONE
        return slots[slots >= 0]

    def _enter_window(self, pages: np.ndarray) -> None:
        self.window_version += 1
        slots = self.window.alloc(len(pages))
        self.window_page[pages] = slots
        self.at_window[slots] = pages

    def _leave_window(self, pages: np.ndarray, epoch: int) -> None:
        slots = self._take(self.window_page, pages)
        if len(slots):
            self.window_version += 1
            self.at_window[slots] = 0
            self.window.free(slots, epoch)

    def _count(self, pages: np.ndarray, sign: int) -> None:
        """Add or remove what ``pages`` contribute to the counters."""
        self.version += 1
        in_t0 = self.t0_page[pages] >= 0
        read = self.readers[pages] > 0
        t0_read = int((in_t0 & read).sum())
        t0_all = int(in_t0.sum())
        self.t0_read += sign * t0_read
        self.t0_unread += sign * (t0_all - t0_read)
        self.t1 += sign * (len(pages) - t0_all)
        self.unplaced += sign * int(
            (~in_t0 & read & (self.window_page[pages] < 0)).sum()
        )
        self.clean += sign * int((in_t0 & (self.host_page[pages] >= 0)).sum())

    def check_integrity(self) -> None:
        """Every slot has one owner and every counter is right, in both
        directions: a leak and a surplus both raise AssertionError."""
        for pool in (self.virtual, self.t0, self.host, self.window):
            pool.check_integrity()
        pages = np.flatnonzero(self.live)
        assert not self.live[0], "the sink is live"
        assert len(pages) == self.virtual.used, "live pages != virtual pages in use"
        for name, pool, table in (
            ("T0", self.t0, self.t0_page),
            ("host", self.host, self.host_page),
            ("window", self.window, self.window_page),
        ):
            slots = table[table >= 0]
            assert len(np.unique(slots)) == len(slots), f"{name} page with two owners"
            assert len(slots) == pool.used, (
                f"{name}: {len(slots)} pages owned, {pool.used} handed out"
            )
            assert not (table[~self.live] >= 0).any(), f"a dead page owns a {name} page"
        t0, host = self.t0_page[pages], self.host_page[pages]
        window, readers = self.window_page[pages], self.readers[pages]
        assert ((t0 >= 0) | (host >= 0)).all(), "a live page has no bytes anywhere"
        assert not ((window >= 0) & (t0 >= 0)).any(), "in T0 and in the window"
        assert not ((window >= 0) & (readers == 0)).any(), "window page without reader"
        assert (readers >= 0).all()
        assert (self.parks >= 0).all()
        assert not self.readers[~self.live].any(), "a dead page has readers"
        assert (self.at_t0[t0[t0 >= 0]] == pages[t0 >= 0]).all()
        assert int((self.at_t0 > 0).sum()) == self.t0.used
        assert (self.at_window[window[window >= 0]] == pages[window >= 0]).all()
        assert int((self.at_window > 0).sum()) == self.window.used
        in_t0, read = t0 >= 0, readers > 0
        assert self.t0_read == int((in_t0 & read).sum())
        assert self.t0_unread == int((in_t0 & ~read).sum())
        assert self.t1 == int((~in_t0).sum())
        assert self.unplaced == int((~in_t0 & read & (window < 0)).sum())
        assert self.clean == int((in_t0 & (host >= 0)).sum())
