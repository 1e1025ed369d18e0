"""Numbered slots of one memory, each free or handed out exactly once.

``SlotPool`` is a free list over page numbers: virtual pages, T0 pages, host
pages or window pages. It holds no tensor. Freeing a slot that is not handed out
raises: an owner that frees twice has lost track, and going on would give one
slot to two owners.

Quarantine: a slot freed while forward ``epoch`` may still touch it is not handed
out again before ``retire(done_epoch)`` says that this forward is over.
"""

from __future__ import annotations

from collections import deque

import numpy as np


class SlotPool:
    """Free list of the slots ``first .. first + count - 1``.

    Args:
        name: what the slots are, for messages ("T0 page", "host page", ...).
        count: number of slots.
        first: number of the first slot.
        lowest_first: hand out the lowest free numbers, so that what is in use
            stays dense and copies run long. Costs a sort after frees; leave it
            off where slots are taken one step at a time.
    """

    def __init__(
        self, name: str, count: int, *, first: int = 0, lowest_first: bool = False
    ) -> None:
        self.name = name
        self.count = count
        self.first = first
        self.lowest_first = lowest_first
        self.reset()

    def reset(self) -> None:
        """Every slot is free again, whatever it was."""
        # Taken from the end, so the lowest number comes first.
        self._stack = np.arange(
            self.first + self.count - 1, self.first - 1, -1, dtype=np.int64
        )
        self._top = self.count
        self._sorted = True
        self._handed_out = np.zeros(self.first + self.count, dtype=bool)
        self._quarantine: deque[tuple[int, np.ndarray]] = deque()
        self._quarantined = 0
        self._done_epoch = 0

    @property
    def available(self) -> int:
        """Slots that ``alloc`` can hand out now."""
        return self._top

    @property
    def quarantined(self) -> int:
        """Freed slots that a forward may still touch."""
        return self._quarantined

    @property
    def used(self) -> int:
        """Slots that have an owner."""
        return self.count - self._top - self._quarantined

    def alloc(self, n: int) -> np.ndarray:
        """Hand out ``n`` slots: int64 [n]. Raises RuntimeError if fewer are free."""
        if n > self._top:
            raise RuntimeError(f"{n} {self.name}s asked for, {self._top} free")
        if self.lowest_first and not self._sorted:
            # A merge sort: all but what was freed since the last one is one run.
            self._stack[: self._top][::-1].sort(kind="stable")
            self._sorted = True
        slots = self._stack[self._top - n : self._top][::-1].copy()
        self._top -= n
        self._handed_out[slots] = True
        return slots

    def free(self, slots: np.ndarray, epoch: int = 0) -> None:
        """Take ``slots`` (unique) back; reusable once forward ``epoch`` is done.

        Raises RuntimeError if one of them has no owner (a double free).
        """
        if len(slots) == 0:
            return
        owned = self._handed_out[slots]
        if not owned.all():
            raise RuntimeError(
                f"double free of {self.name}s {np.asarray(slots)[~owned][:8].tolist()}"
            )
        self._handed_out[slots] = False
        if epoch > self._done_epoch:
            self._quarantine.append((epoch, np.array(slots, dtype=np.int64)))
            self._quarantined += len(slots)
        else:
            self._push(slots)

    def retire(self, done_epoch: int) -> None:
        """Every forward up to ``done_epoch`` is over: end their quarantine."""
        self._done_epoch = max(self._done_epoch, done_epoch)
        while self._quarantine and self._quarantine[0][0] <= self._done_epoch:
            _, slots = self._quarantine.popleft()
            self._quarantined -= len(slots)
            self._push(slots)

    def free_slots(self) -> np.ndarray:
        """All slots without an owner, quarantined ones included: int64 [k]."""
        waiting = [slots for _, slots in self._quarantine]
        return np.concatenate([self._stack[: self._top], *waiting])

    def _push(self, slots: np.ndarray) -> None:
        self._stack[self._top : self._top + len(slots)] = slots
        self._top += len(slots)
        self._sorted = False

    def check_integrity(self) -> None:
        """Every slot is free, quarantined or handed out, once; else AssertionError."""
        free = self.free_slots()
        assert len(np.unique(free)) == len(free), f"{self.name}: free twice"
        assert not self._handed_out[free].any(), f"{self.name}: free and owned"
        owned = int(self._handed_out.sum())
        assert owned + len(free) == self.count, (
            f"{self.name}: {owned} owned + {len(free)} free != {self.count}"
        )
