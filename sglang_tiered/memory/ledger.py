"""Who owns which slot: the tables behind every tier, and their legal moves.

Nothing here holds a tensor or takes a decision; numpy arrays indexed by virtual
page say what is true, and each method is one transition that keeps them true.

A virtual page is *live* from ``allocate`` to ``release``. A live page is
  * in T0: it has a T0 page. It may also have a host page, an up-to-date copy
    (rows never change once written): then it is *clean*, and demoting it copies
    nothing;
  * in T1: it has only its host page. If a running request reads it, it also
    needs a window page, through which its bytes pass every step; until it has
    one it is *unplaced*;
  * in T2: the same with an int8 page. Its rows are rounded once, for good: the page
    is *lossy* from then on, keeps its int8 page when it is promoted to T0 (so that
    it is clean and never rounded again), and has no host page;
  * in T3: *dropped*. It has no bytes anywhere and keeps only its virtual page.

Readers: one for the running request that owns the page privately, one for every
running request that holds a tree lock over it. A page without readers (cold in
the tree, parked, or of an idle session) never has a window page. Lossy and dropped
pages are private: the tree never gets them.

An *exact* page is live and neither lossy nor dropped: T0 and the host pool must
hold it between them, so there are at most ``t0 + host`` of them.

All page arguments are int64 arrays of distinct virtual pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_tiered.memory.places import Places
from sglang_tiered.memory.slots import SlotPool

NONE = -1
UNLIMITED = np.iinfo(np.int64).max


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
        self.compressed = np.zeros(max_rows, dtype=np.int64)  # pages ever in T2
        self.dropped = np.zeros(max_rows, dtype=np.int64)  # pages in T3
        # An estimate of the paper's bound on what dropping them costs, before its
        # factor of 2: sum(alpha * ||v||), both means over layers and heads.
        self.dropped_error = np.zeros(max_rows, dtype=np.float64)
        # Page from which on the row is inexact: its lowest page ever in T2 or T3.
        self.exact_pages = np.full(max_rows, UNLIMITED, dtype=np.int64)

    def reset(self) -> None:
        self.renew(slice(None))

    def is_lossy(self, row: int) -> bool:
        return bool(self.exact_pages[row] < UNLIMITED)

    def renew(self, row: int | slice) -> None:
        """The row (or rows) belongs to a new request."""
        self.generation[row] += 1
        for table in (self.length, self.prompt, self.steps, self.streamed):
            table[row] = 0
        for table in (self.compressed, self.dropped, self.dropped_error):
            table[row] = 0
        self.exact_pages[row] = UNLIMITED


class Ledger:
    """Tables of all live pages.

    Args:
        t0_pages: pages of T0, numbered from 1 (0 is the padding sink).
        host_pages: pages of the host pool, numbered from 0.
        window_pages: pages of the window, numbered from 0.
        int8_pages: pages of the int8 pool, numbered from 0.
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
        int8_pages: int = 0,
    ) -> None:
        self.page_size = page_size
        virtual_pages = t0_pages + host_pages + int8_pages
        self.virtual = SlotPool("virtual page", virtual_pages, first=1)
        self.t0 = SlotPool("T0 page", t0_pages, first=1)
        self.host = SlotPool("host page", host_pages, lowest_first=True)
        self.window = SlotPool("window page", window_pages, lowest_first=True)
        self.int8 = SlotPool("int8 page", int8_pages, lowest_first=True)
        self.rows = RowTable(max_rows)

        size = virtual_pages + 1
        self.live = np.zeros(size, dtype=bool)
        self.t0_page = np.full(size, NONE, dtype=np.int64)
        self.host_page = np.full(size, NONE, dtype=np.int64)
        self.window_page = np.full(size, NONE, dtype=np.int64)
        self.int8_page = np.full(size, NONE, dtype=np.int64)
        self.dropped = np.zeros(size, dtype=bool)
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
        self.t0_read = self.t0_unread = self.unplaced = self.clean = 0
        self.t1 = self.t2 = self.t3 = self.exact = 0

    @property
    def read_pages(self) -> int:
        """Pages that running requests read, wherever they are."""
        return self.t0_read + self.unplaced + self.window.used

    @property
    def available(self) -> int:
        """Virtual pages that can be had now: one is free, and T0 and the host pool
        can hold one exact page more between them."""
        exact = self.t0.count + self.host.count - self.exact
        return min(self.virtual.available, exact)

    # -- life and death --------------------------------------------------------

    def allocate(self, n: int, epoch: int) -> np.ndarray:
        """``n`` new private pages in T0, written by forward ``epoch``.

        Raises RuntimeError if T0 or the virtual ids are short: make room first.
        """
        if n > self.t0.available or n > self.available:
            raise RuntimeError(
                f"{n} pages asked for; {self.t0.available} T0 pages and "
                f"{self.available} virtual pages are free"
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
        slots = self._free_places(pages, epoch)
        self.live[pages] = False
        self.private[pages] = False
        self.dropped[pages] = False
        self.readers[pages] = 0
        self.owner[pages] = NONE
        self.virtual.free(pages)
        return slots

    def reset(self) -> None:
        """Nothing is live (``flush_cache``); the arrays stay where they are."""
        for pool in (self.virtual, self.t0, self.host, self.window, self.int8):
            pool.reset()
        for table in (self.t0_page, self.host_page, self.window_page, self.int8_page):
            table.fill(NONE)
        self.owner.fill(NONE)
        for table in (self.live, self.private, self.readers, self.parks, self.dropped):
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
        if (self.dropped[pages] | self.is_lossy(pages)).any():
            raise RuntimeError("the tree takes exact pages only")
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
        """T0 to T1, or to T2 for pages that came from there. Returns the copies that
        dirty pages need; pages that a running request reads get a window page. Raises
        RuntimeError if host or window pages are short."""
        if (self.t0_page[pages] < 0).any():
            raise RuntimeError("only T0 pages can be demoted")
        self._count(pages, -1)
        dirty = pages[~self.has_copy(pages)]
        self.host_page[dirty] = self.host.alloc(len(dirty))
        copies = Copies(self.t0_page[dirty], self.host_page[dirty])
        self._leave_t0(pages)
        self._enter_window(pages[self.readers[pages] > 0])
        self._count(pages, 1)
        return copies

    def promote(self, pages: np.ndarray, epoch: int) -> np.ndarray:
        """T1 or T2 to T0; the copy there stays, so the pages are clean. ``epoch``:
        the last forward that may still read their window pages. Returns the T0 pages,
        int64 [n]."""
        if (self.t0_page[pages] >= 0).any() or not self.has_copy(pages).all():
            raise RuntimeError("only T1 pages and T2 pages can be promoted")
        self._count(pages, -1)
        slots = self.t0.alloc(len(pages))
        self.t0_page[pages] = slots
        self.at_t0[slots] = pages
        self.promoted[pages] = epoch
        self._leave_window(pages, epoch)
        self._count(pages, 1)
        return slots

    def compress(self, pages: np.ndarray, epoch: int) -> np.ndarray:
        """T0 or T1 to T2, for good. Pages that a running request reads get a window
        page if they have none. ``epoch``: the last forward that may still read their
        host pages. Returns the int8 pages, int64 [n].

        Raises RuntimeError for pages that are not exact and private, or if int8 or
        window pages are short."""
        if (~self.private[pages] | self.dropped[pages] | self.is_lossy(pages)).any():
            raise RuntimeError("only exact private pages can be compressed")
        self._count(pages, -1)
        int8_pages = self.int8.alloc(len(pages))
        self.int8_page[pages] = int8_pages
        self._leave_t0(pages)
        self.host.free(self._take(self.host_page, pages), epoch)
        read = self.readers[pages] > 0
        self._enter_window(pages[read & (self.window_page[pages] < 0)])
        self.window_version += 1  # a window page may have got another source
        self._count(pages, 1)
        rows = self.owner[pages]
        np.add.at(self.rows.compressed, rows, 1)
        np.minimum.at(self.rows.exact_pages, rows, self.index[pages])
        return int8_pages

    def drop(self, pages: np.ndarray, epoch: int) -> np.ndarray:
        """To T3: the rows are gone, every slot but the virtual page is free. ``epoch``:
        the last forward that may still read them. Returns the T0 pages that became
        free, int64 [k]. Raises RuntimeError for pages that are not private."""
        if (~self.private[pages] | self.dropped[pages]).any():
            raise RuntimeError("only private pages can be dropped, and only once")
        self._count(pages, -1)
        slots = self._free_places(pages, epoch)
        self.dropped[pages] = True
        self._count(pages, 1)
        rows = self.owner[pages]
        np.add.at(self.rows.dropped, rows, 1)
        np.minimum.at(self.rows.exact_pages, rows, self.index[pages])
        return slots

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

    def has_copy(self, pages: np.ndarray) -> np.ndarray:
        """bool [n]: the host has the page's rows, as they were or as int8."""
        return (self.host_page[pages] >= 0) | (self.int8_page[pages] >= 0)

    def is_lossy(self, pages: np.ndarray) -> np.ndarray:
        """bool [n]: the page's rows were rounded to int8, wherever they are now."""
        return self.int8_page[pages] >= 0

    def places(self, pages: np.ndarray) -> Places:
        """Where the rows of ``pages`` are."""
        return Places(self.t0_page[pages], self.host_page[pages], self.int8_page[pages])

    def in_t0(self) -> np.ndarray:
        """Live virtual pages in T0, int64 [k]."""
        return self.at_t0[self.at_t0 > 0]

    def in_window(self) -> np.ndarray:
        """Virtual pages that pass through the window, by window page: int64 [k]."""
        return self.at_window[self.at_window > 0]

    def unplaced_pages(self) -> np.ndarray:
        """Read pages that have neither a T0 nor a window page, int64 [k]."""
        return np.flatnonzero(
            self.live
            & (self.readers > 0)
            & (self.t0_page < 0)
            & (self.window_page < 0)
            & ~self.dropped
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

    def _free_places(self, pages: np.ndarray, epoch: int) -> np.ndarray:
        """Every tier forgets ``pages``. Returns the T0 pages that became free."""
        slots = self._leave_t0(pages)
        self.host.free(self._take(self.host_page, pages), epoch)
        self.int8.free(self._take(self.int8_page, pages), epoch)
        self._leave_window(pages, epoch)
        return slots

    def _leave_t0(self, pages: np.ndarray) -> np.ndarray:
        slots = self._take(self.t0_page, pages)
        self.at_t0[slots] = 0
        self.t0.free(slots)
        return slots

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
        dropped, lossy = self.dropped[pages], self.is_lossy(pages)
        t3, t2 = int(dropped.sum()), int((~in_t0 & lossy).sum())
        self.t3 += sign * t3
        self.t2 += sign * t2
        self.t1 += sign * (len(pages) - t0_all - t2 - t3)
        self.unplaced += sign * int(
            (~in_t0 & read & ~dropped & (self.window_page[pages] < 0)).sum()
        )
        self.clean += sign * int((in_t0 & self.has_copy(pages)).sum())
        self.exact += sign * (len(pages) - int((dropped | lossy).sum()))

    def check_integrity(self) -> None:
        """Every slot has one owner and every counter is right, in both
        directions: a leak and a surplus both raise AssertionError."""
        for pool in (self.virtual, self.t0, self.host, self.window, self.int8):
            pool.check_integrity()
        pages = np.flatnonzero(self.live)
        assert not self.live[0], "the sink is live"
        assert len(pages) == self.virtual.used, "live pages != virtual pages in use"
        for name, pool, table in (
            ("T0", self.t0, self.t0_page),
            ("host", self.host, self.host_page),
            ("window", self.window, self.window_page),
            ("int8", self.int8, self.int8_page),
        ):
            slots = table[table >= 0]
            assert len(np.unique(slots)) == len(slots), f"{name} page with two owners"
            assert len(slots) == pool.used, (
                f"{name}: {len(slots)} pages owned, {pool.used} handed out"
            )
            assert not (table[~self.live] >= 0).any(), f"a dead page owns a {name} page"
        t0, host = self.t0_page[pages], self.host_page[pages]
        window, readers = self.window_page[pages], self.readers[pages]
        int8, dropped = self.int8_page[pages], self.dropped[pages]
        has_bytes = (t0 >= 0) | (host >= 0) | (int8 >= 0)
        assert (has_bytes != dropped).all(), "bytes nowhere, or of a dropped page"
        assert not ((host >= 0) & (int8 >= 0)).any(), "an exact and a lossy copy"
        inexact = dropped | (int8 >= 0)
        assert self.private[pages[inexact]].all(), "the tree has inexact rows"
        assert not self.dropped[~self.live].any(), "a dead page is dropped"
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
        assert self.t1 == int((~in_t0 & (host >= 0)).sum())
        assert self.t2 == int((~in_t0 & (int8 >= 0)).sum())
        assert self.t3 == int(dropped.sum())
        assert self.exact == int((~inexact).sum())
        assert self.exact <= self.t0.count + self.host.count, "too many exact pages"
        unplaced = ~in_t0 & read & (window < 0) & ~dropped
        assert self.unplaced == int(unplaced.sum())
        assert self.clean == int((in_t0 & ((host >= 0) | (int8 >= 0))).sum())
