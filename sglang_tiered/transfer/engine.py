"""The order of copies and forwards.

Three streams: `forward` carries the model's reads and writes of the device buffers,
`schedule` carries demotions (T0 to host), compressions (T0 or host to int8) and
promotions (host or int8 to T0), `fill` carries the copies of host and int8 rows into
the windows. On a CPU forwards run in the scheduler's
thread and `forward` and `schedule` are one stream. Across streams nothing is ordered
but by events, and these are the rules:

* forward_begin(n) waits for forward_done(n-1) and for every demotion, compression and
  promotion;
* a demotion or compression waits for the forward that last wrote its rows;
* a promotion waits for every forward begun: one may still read or write its target;
* a demotion, compression or promotion waits for pending copies that touch one of its
  pages;
* fill(n, l) waits for the copies that filled its sources and for the last read of
  its window: read_done(n, m) of the layer m of its parity before it, or
  forward_done(n-1);
* read(n, l), from where on attention of layer l may read, waits for fill(n, l);
* forward_done(n) waits for the fills of its forward, read or not.

Windows hold nothing across layers: what a forward reads there, its own plan fills.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from sglang_tiered.memory.backing import Backing
from sglang_tiered.memory.host_pool import HostPool
from sglang_tiered.memory.int8_pool import Int8Pool
from sglang_tiered.memory.places import Places
from sglang_tiered.transfer.int8_copy import Int8Copy
from sglang_tiered.transfer.row_copy import Pages, Records, RowCopy, page_records
from sglang_tiered.transfer.streams import Event, Stream

_NO_PAGES = np.empty(0, np.int64)


@dataclass(frozen=True)
class _Copy:
    """A copy between forwards that may still run, and the pages it touches."""

    ended: Event
    t0_pages: Pages
    host_pages: Pages
    int8_pages: Pages


@dataclass
class _Forward:
    """A forward that is not known to be done."""

    epoch: int
    host_pages: Pages
    int8_pages: Pages
    exact: RowCopy
    lossy: Int8Copy
    ended: Event | None = None
    # Per parity: the layer whose fill was submitted last, that fill, and the event
    # after which the window may be overwritten.
    filled_layer: list[int] = field(default_factory=lambda: [-1, -1])
    fills: list[Event | None] = field(default_factory=lambda: [None, None])
    window_free: list[list[Event]] = field(default_factory=lambda: [[], []])
    # The demotions that filled the sources.
    sources_filled: list[Event] = field(default_factory=list)
    reading: int = -1

    @property
    def count(self) -> int:
        """Window pages that it fills."""
        return self.exact.count + self.lossy.count


class TransferEngine:
    """Moves pages between T0, host pool and window, never before or after it may.

    Single-threaded: every method is called by the scheduler's thread. Demotions and
    promotions happen between forwards. All page arrays are int64, one-dimensional and
    equally long in pairs; pages out of range, a target named twice or a call at the
    wrong time raise ValueError or RuntimeError before anything is copied.
    """

    def __init__(
        self,
        backing: Backing,
        host: HostPool,
        *,
        schedule: Stream,
        fill: Stream,
        forward: Stream | None = None,
        int8: Int8Pool | None = None,
    ) -> None:
        self.submitted_epoch = 0
        self.skip_fill = False
        self.bytes_demoted = 0
        self.bytes_promoted = 0
        self.bytes_streamed = 0
        self.bytes_compressed = 0
        self.fill_waits = 0
        self.fill_wait_seconds = 0.0
        self._layout = layout = backing.layout
        self._backing, self._host, self._int8 = backing, host, int8
        self._window_base = backing.window_base
        self._schedule = schedule
        self._fill = fill
        self._stream = schedule if forward is None else forward
        self._done_epoch = 0
        self._current: _Forward | None = None
        self._unfinished: deque[_Forward] = deque()
        self._copies: list[_Copy] = []
        self._closed = False
        # Per layer, for every buffer: host records, device records. Made once: a step
        # copies every buffer of every layer.
        self._records: list[list[tuple[Records, Records]]] = [
            [
                (
                    page_records(host.pages(layer, buffer.name)),
                    page_records(backing.pages(layer, buffer.name)),
                )
                for buffer in buffers
            ]
            for layer, buffers in enumerate(layout.layers)
        ]
        self._page_bytes = layout.page_size * layout.bytes_per_token
        self._layer_page_bytes = [
            sum(layout.page_bytes(layer, buffer.name) for buffer in buffers)
            for layer, buffers in enumerate(layout.layers)
        ]
        # What crosses the link for a page of T2.
        self._layer_int8_bytes = [
            0
            if int8 is None
            else sum(int8.records(layer, buffer.name).shape[1] for buffer in buffers)
            for layer, buffers in enumerate(layout.layers)
        ]

    @property
    def done_epoch(self) -> int:
        """Every forward up to this number has completed, its fills included."""
        while self._unfinished:
            ended = self._unfinished[0].ended
            if ended is None or not ended.done():
                break
            self._done_epoch = self._unfinished.popleft().epoch
        return self._done_epoch

    def demote(self, t0_pages: Pages, host_pages: Pages, written_epoch: int) -> None:
        """Copy T0 pages of all layers to host pages.

        `written_epoch` is the last forward that wrote any of the rows, 0 for none.
        Raises RuntimeError when a target is still read by a forward
        (`pinned_host_pages`).
        """
        self._check_between_forwards("demote")
        t0_pages, host_pages = _owned(t0_pages), _owned(host_pages)
        self._check_t0(t0_pages)
        self._check_host(host_pages)
        if not 0 <= written_epoch <= self.submitted_epoch:
            raise ValueError(
                f"rows written by forward {written_epoch} of {self.submitted_epoch}"
            )
        plan = RowCopy(t0_pages, host_pages)
        if plan.count == 0:
            return
        self._refuse_targets_being_read(host_pages, _NO_PAGES)

        def copy() -> None:
            for layer in self._records:
                for host, device in layer:
                    plan.run(device, host)

        after = self._forward_done(written_epoch)
        after += self._copies_touching(t0_pages, host_pages, _NO_PAGES)
        ended = self._schedule.submit(f"demote({plan.count} pages)", copy, after)
        self._remember(ended, t0_pages, host_pages, _NO_PAGES)
        self.bytes_demoted += plan.count * self._page_bytes

    def compress(self, places: Places, int8_pages: Pages, written_epoch: int) -> None:
        """Round the rows of all layers at `places` (T0 pages, else host pages) to int8
        pages. `written_epoch` as in `demote`; raises RuntimeError like it."""
        self._check_between_forwards("compress")
        int8_pages = _owned(int8_pages)
        self._check_int8(int8_pages)
        if len(np.unique(int8_pages)) != len(int8_pages):
            raise ValueError("an int8 page occurs twice in one copy")
        if len(places.t0) != len(int8_pages):
            raise ValueError(f"{len(places.t0)} pages to {len(int8_pages)} int8 pages")
        in_t0 = places.t0 >= 0
        t0_pages, host_pages = _owned(places.t0[in_t0]), _owned(places.host[~in_t0])
        self._check_t0(t0_pages)
        self._check_host(host_pages)
        int8 = self._int8
        if not len(int8_pages):
            return
        assert int8 is not None
        self._refuse_targets_being_read(_NO_PAGES, int8_pages)

        def copy() -> None:
            for layer, buffers in enumerate(self._layout.layers):
                for buffer in buffers:
                    device = self._backing.pages(layer, buffer.name)
                    host = self._host.pages(layer, buffer.name)
                    for source, pages, targets in (
                        (device, t0_pages, int8_pages[in_t0]),
                        (host, host_pages, int8_pages[~in_t0]),
                    ):
                        if len(pages):
                            rows = source[torch.from_numpy(pages)]
                            index = torch.from_numpy(targets)
                            int8.write(layer, buffer.name, index, rows)

        after = self._forward_done(written_epoch)
        after += self._copies_touching(t0_pages, host_pages, int8_pages)
        ended = self._schedule.submit(f"compress({len(int8_pages)} pages)", copy, after)
        self._remember(ended, t0_pages, host_pages, int8_pages)
        self.bytes_compressed += len(int8_pages) * sum(self._layer_int8_bytes)

    def promote(self, places: Places, t0_pages: Pages) -> None:
        """Copy the host or int8 pages of all layers at `places` to T0 pages."""
        self._check_between_forwards("promote")
        t0_pages = _owned(t0_pages)
        self._check_t0(t0_pages)
        exact, lossy, host_pages, int8_pages = self._plans(places, t0_pages)
        if exact.count + lossy.count == 0:
            return

        def copy() -> None:
            for layer in range(self._layout.num_layers):
                self._copy_in(layer, exact, lossy)

        after = self._forward_done(self.submitted_epoch)
        after += self._copies_touching(t0_pages, host_pages, int8_pages)
        ended = self._schedule.submit(f"promote({len(t0_pages)} pages)", copy, after)
        self._remember(ended, t0_pages, host_pages, int8_pages)
        self.bytes_promoted += exact.count * self._page_bytes
        self.bytes_promoted += lossy.count * sum(self._layer_int8_bytes)

    def begin_forward(self, sources: Places, window_pages: Pages) -> int:
        """Begin a forward that reads the host or int8 page at `sources[i]` at device
        page `window_pages[i]`.

        Returns its epoch. Window pages that are not named hold nothing meaningful
        during it.
        """
        self._check_between_forwards("begin_forward")
        window_pages = _owned(window_pages)
        base, count = self._window_base, self._layout.window_pages
        _check_range("window", window_pages, base, base + count)
        exact, lossy, host_pages, int8_pages = self._plans(
            sources, window_pages, overwrite_gaps=True
        )
        epoch = self.submitted_epoch + 1
        before = self._forward_done(self.submitted_epoch)
        self._stream.submit(
            f"forward_begin({epoch})",
            _nothing,
            before + [copy.ended for copy in self._pending_copies()],
        )
        forward = _Forward(epoch, host_pages, int8_pages, exact, lossy)
        self.submitted_epoch = epoch
        self._current = forward
        self._unfinished.append(forward)
        if forward.count:
            forward.window_free = [before, before]
            forward.sources_filled = self._copies_touching(
                _NO_PAGES, host_pages, int8_pages
            )
            self._start_fill(forward, 0)
            self._start_fill(forward, 1)
        return epoch

    def wait_until(self, layer: int) -> None:
        """Return once attention of `layer` may read its window; start the next fill.

        Called for the key and again for the value: the second call does nothing. Layers
        may be skipped, repeated or asked for in any order, as long as a layer's rows
        are read before another layer is asked for. Outside a forward there is nothing
        to wait for. Raises what the fill raised.
        """
        forward = self._current
        if forward is None or forward.count == 0 or layer == forward.reading:
            return
        if not 0 <= layer < self._layout.num_layers:
            raise ValueError(f"layer {layer} of {self._layout.num_layers}")
        last = forward.reading
        if last >= 0:
            # Asking for this layer, the model has issued its reads of the last one.
            read = self._stream.submit(f"read_done({forward.epoch}, {last})", _nothing)
            forward.window_free[last % 2] = [read]
        self._start_fill(forward, layer)
        fill = forward.fills[layer % 2]
        assert fill is not None
        waits = not fill.done()
        started = time.perf_counter()
        # Not "reading" until the fill has succeeded: after a failure the second call
        # must fail too instead of reading a half-filled window.
        self._stream.submit(f"read({forward.epoch}, {layer})", _nothing, [fill])
        forward.reading = layer
        if waits:
            self.fill_waits += 1
            self.fill_wait_seconds += time.perf_counter() - started
        self._start_fill(forward, layer + 1)

    def set_consumer(self, index: int) -> None:
        """Part of SGLang's layer counter interface; there is one consumer here."""

    def end_forward(self) -> None:
        """End the current forward: its copies are issued and so is its compute.

        Fills of layers that were never asked for are not made up for. Raises what an
        unread fill raised, after ending the forward all the same.
        """
        forward = self._current
        if forward is None:
            raise RuntimeError("end_forward outside a forward")
        self._current = None
        name = f"forward_done({forward.epoch})"
        fills = [fill for fill in forward.fills if fill is not None]
        try:
            forward.ended = self._stream.submit(name, _nothing, fills)
        except BaseException:
            # An inline stream has waited for all the fills before it raises.
            forward.ended = self._stream.submit(name, _nothing)
            raise

    def pinned_host_pages(self) -> Pages:
        """Host pages, ascending, that a forward or a copy may still read or write."""
        done = self.done_epoch
        pins = [
            forward.host_pages for forward in self._unfinished if forward.epoch > done
        ]
        pins += [copy.host_pages for copy in self._pending_copies()]
        return np.unique(np.concatenate(pins)) if pins else _NO_PAGES

    def check_integrity(self) -> None:
        """Raise AssertionError if the engine's own books disagree."""
        done = self.done_epoch
        unfinished = [forward.epoch for forward in self._unfinished]
        if unfinished != list(range(done + 1, self.submitted_epoch + 1)):
            raise AssertionError(
                f"forwards {unfinished} unfinished, {done} of "
                f"{self.submitted_epoch} done"
            )
        running = [forward for forward in self._unfinished if forward.ended is None]
        if running != ([] if self._current is None else [self._current]):
            raise AssertionError("a forward other than the current one never ended")

    def close(self) -> None:
        """Let the copies that were issued run out and close the streams. Idempotent."""
        self._current = None
        self._closed = True
        for stream in (self._fill, self._schedule, self._stream):
            stream.close()

    def _start_fill(self, forward: _Forward, layer: int) -> None:
        """Issue the fill of `layer` unless its window was last filled for it."""
        parity = layer % 2
        if layer >= self._layout.num_layers or forward.filled_layer[parity] == layer:
            return

        def copy() -> None:
            self._copy_in(layer, forward.exact, forward.lossy)

        forward.fills[parity] = self._fill.submit(
            f"fill({forward.epoch}, {layer})",
            _nothing if self.skip_fill else copy,
            forward.window_free[parity] + forward.sources_filled,
        )
        forward.filled_layer[parity] = layer
        if not self.skip_fill:
            self.bytes_streamed += (
                forward.exact.count * self._layer_page_bytes[layer]
                + forward.lossy.count * self._layer_int8_bytes[layer]
            )

    def _copy_in(self, layer: int, exact: RowCopy, lossy: Int8Copy) -> None:
        """Host and int8 rows of one layer into its device buffers."""
        for host, device in self._records[layer]:
            exact.run(host, device)
        if lossy.count:
            assert self._int8 is not None
            for buffer in self._layout.layers[layer]:
                pages = self._backing.pages(layer, buffer.name)
                lossy.run(self._int8, layer, buffer.name, pages)

    def _plans(
        self, sources: Places, targets: Pages, *, overwrite_gaps: bool = False
    ) -> tuple[RowCopy, Int8Copy, Pages, Pages]:
        """Copies of host pages and of int8 pages to the device pages `targets`, and
        those host and int8 pages."""
        if len(sources.host) != len(targets):
            raise ValueError(f"{len(sources.host)} pages to {len(targets)} pages")
        lossy = sources.int8 >= 0
        host_pages, int8_pages = (
            _owned(sources.host[~lossy]),
            _owned(sources.int8[lossy]),
        )
        self._check_host(host_pages)
        self._check_int8(int8_pages)
        # Gaps between exact targets may belong to lossy ones.
        gaps = overwrite_gaps and not len(int8_pages)
        exact = RowCopy(host_pages, targets[~lossy], overwrite_gaps=gaps)
        return exact, Int8Copy(int8_pages, targets[lossy]), host_pages, int8_pages

    def _refuse_targets_being_read(self, host_pages: Pages, int8_pages: Pages) -> None:
        if self.done_epoch == self.submitted_epoch:
            return
        for forward in self._unfinished:
            if (
                np.isin(host_pages, forward.host_pages).any()
                or np.isin(int8_pages, forward.int8_pages).any()
            ):
                raise RuntimeError(
                    f"copy into host pages that forward {forward.epoch} reads"
                )

    def _forward_done(self, epoch: int) -> list[Event]:
        """The event to wait for so that every forward up to `epoch` has completed."""
        if epoch <= self.done_epoch:
            return []
        ended = self._unfinished[epoch - self._done_epoch - 1].ended
        assert ended is not None
        return [ended]

    def _pending_copies(self) -> list[_Copy]:
        self._copies = [copy for copy in self._copies if not copy.ended.done()]
        return self._copies

    def _copies_touching(
        self, t0_pages: Pages, host_pages: Pages, int8_pages: Pages
    ) -> list[Event]:
        """Ends of pending copies that read or write one of these pages."""
        return [
            copy.ended
            for copy in self._pending_copies()
            if np.isin(copy.host_pages, host_pages).any()
            or np.isin(copy.t0_pages, t0_pages).any()
            or np.isin(copy.int8_pages, int8_pages).any()
        ]

    def _remember(
        self, ended: Event, t0_pages: Pages, host_pages: Pages, int8_pages: Pages
    ) -> None:
        if not ended.done():
            self._copies.append(_Copy(ended, t0_pages, host_pages, int8_pages))

    def _check_between_forwards(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(f"{what}: the transfer engine is closed")
        if self._current is not None:
            raise RuntimeError(f"{what} inside forward {self._current.epoch}")

    def _check_t0(self, pages: Pages) -> None:
        _check_range("T0", pages, 1, 1 + self._layout.t0_pages)

    def _check_host(self, pages: Pages) -> None:
        _check_range("host", pages, 0, self._layout.host_pages)

    def _check_int8(self, pages: Pages) -> None:
        count = 0 if self._int8 is None else self._int8.count
        _check_range("int8", pages, 0, count)


def _check_range(what: str, pages: Pages, low: int, high: int) -> None:
    if len(pages) and (pages.min() < low or pages.max() >= high):
        raise ValueError(
            f"{what} pages {pages.min()} .. {pages.max()} outside {low} .. {high - 1}"
        )


def _owned(pages: Pages) -> Pages:
    """The numbers as they are now: planned copies run when tables have moved on."""
    return np.array(pages, dtype=np.int64)


def _nothing() -> None:
    """The work of an event that only marks a point on a stream."""
