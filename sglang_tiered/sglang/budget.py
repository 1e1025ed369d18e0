"""Admission: a request enters when its rows fit the tiers, a chunk when it fits T0.

Three questions:
  * virtual ids, with SGLang's own estimate of what running requests will still write;
  * placement: rows that running requests read need T0 or the window. Here the
    estimate would be too careful: who does not fit later is parked and loses nothing,
    so room for ``GROWTH_TOKENS`` more of every running request is enough;
  * T0: new rows are written there, so a chunk is no longer than T0 can hold, and
    the recent window of every running request should stay there.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

# What ``check_prefill`` returns to say "not in this pass" (a chunk of no tokens)
# and not "the pool is full", which closes admission until a request finishes.
LATER = (True, 0)

# Decode steps that every running request can take before one must be parked: the
# distance between admission and parking, without which the two would alternate.
GROWTH_TOKENS = 64


class TieredPrefillBudget(PrefillBudget):
    """SGLang's budget of one prefill pass, in tokens; see the module docstring.

    The scheduler pins the candidate's matched prefix while it asks, so rows of
    the prefix that sit in T1 are already counted as unplaced.
    """

    def __init__(
        self, allocator: Any, tree_cache: Any, *, num_mixed_decode_tokens: int = 0
    ) -> None:
        super().__init__(
            allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens
        )
        self.manager = allocator.manager
        self.admitted = 0
        # A prompt was cut in this pass, of which SGLang tracks only one; and what is
        # left of it, which nobody has room for yet.
        self.cut = False
        self.rest_tokens = 0
        self._candidate_rest = 0
        tree_cache.begin_admission()

    @property
    def remaining_total(self) -> int:
        # Ids beyond what T0 and T1 hold exist for int8 and dropped rows only.
        ledger = self.manager.ledger
        surplus = ledger.virtual.available - ledger.available
        return int(super().remaining_total) - surplus * self.page_size

    @property
    def remaining_current(self) -> int:
        t0, t1 = self.tree_cache.session_reads()
        attainable = self.manager.attainable(t0, t1)
        return attainable * self.page_size - self.current_offset

    def check_prefill(
        self,
        *,
        extend_input_len: int,
        total_tokens: int,
        max_new_tokens: int,
        input_tokens: int,
        swa_host_hit_length: int,
        chunk_limit: int | None,
        auxiliary_swa_host_hit_length: int = 0,
    ) -> tuple[bool, int | None]:
        rows = self._rows_needed(extend_input_len, chunk_limit)
        fits = (
            total_tokens < self.remaining_total
            and rows <= self._room()
            and self._windows_fit(rows)
        )
        # Alone, a request needs no head room beside itself: its length was clipped
        # to what the tiers hold.
        if not fits and not self._is_alone():
            # Who was let in a moment ago still counts with all that it may write; one
            # pass later only with what SGLang expects of a running request.
            return LATER if self.admitted else (False, None)
        fit = self._fit(extend_input_len, chunk_limit, input_tokens - extend_input_len)
        self._candidate_rest = self._rest(extend_input_len, fit)
        if fit == 0 or (self.cut and self._candidate_rest):
            return LATER
        return True, fit

    def fit_chunk(
        self, *, extend_input_len: int, max_new_tokens: int, chunk_limit: int
    ) -> int | None:
        fit = self._fit(extend_input_len, chunk_limit)
        self._candidate_rest = self._rest(extend_input_len, fit)
        if not fit:  # it waits, and is still the one prompt that is cut
            self._keep_rest()
        return fit or None

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        return chunk_limit

    def can_allocate_prefill(
        self,
        *,
        paged_input: int,
        extend_input_len: int,
        max_new_tokens: int,
        chunk_limit: int | None,
    ) -> bool:
        return paged_input <= min(self.remaining_current, self.remaining_total)

    def reserve(
        self,
        extend_input_len: int,
        max_new_tokens: int,
        *,
        extra_tokens: int = 0,
        chunk_limit: int | None = None,
        is_chunked_continuation: bool = False,
    ) -> None:
        super().reserve(extend_input_len, max_new_tokens, extra_tokens=extra_tokens)
        self.admitted += 1
        self._keep_rest()
        self.tree_cache.admit_candidate()

    def _keep_rest(self) -> None:
        self.cut = self.cut or self._candidate_rest > 0
        self.rest_tokens += self._candidate_rest
        self._candidate_rest = 0

    def _rest(self, extend_input_len: int, fit: int | None) -> int:
        """Tokens of a prompt that a chunk of ``fit`` leaves for later passes. In whole
        pages, as SGLang decides whether it cuts."""
        return (
            0 if fit is None else max(self.ceil_paged_tokens(extend_input_len) - fit, 0)
        )

    def _fit(
        self, extend_input_len: int, chunk_limit: int | None, prefix_len: int = 0
    ) -> int | None:
        """The longest chunk that T0 can take, ``chunk_limit`` if it is shorter;
        0 if none, or if the whole prompt must go in at once and does not fit."""
        page, room = self.page_size, self.remaining_current
        # A session goes on inside a page, which may have to return to T0 first.
        inside = prefix_len % page
        if inside:
            room -= page
        paged = self.ceil_paged_tokens(inside + extend_input_len)
        if paged - (page if inside else 0) <= room:
            return chunk_limit
        if chunk_limit is None:
            return 0
        return min(chunk_limit, max(room, 0) // page * page)

    def _rows_needed(self, extend_input_len: int, chunk_limit: int | None) -> int:
        """Tokens: what this pass and the candidate write, and some growth of
        everybody; a prompt in chunks lets the others grow once per chunk."""
        unwritten = self.ceil_paged_tokens(extend_input_len) + self.rest_tokens
        growth = GROWTH_TOKENS + (-(-unwritten // chunk_limit) if chunk_limit else 0)
        return unwritten + self.current_offset + growth * self._running()

    def _room(self) -> int:
        """Tokens that could be read in T0 and the window beside those read now."""
        pages = self.manager.room_for_reading() - self.tree_cache.session_pages()
        return pages * self.page_size

    def _windows_fit(self, rows: int) -> bool:
        """Every running request's recent window and open page fit T0, at the latest
        when ``rows`` tokens more no longer do."""
        ledger = self.manager.ledger
        if (
            ledger.read_pages * self.page_size + rows
            <= ledger.t0.count * self.page_size
        ):
            return True
        each = -(-self.manager.rules.recent_window // self.page_size) + 1
        return self._running() * each <= ledger.t0.count

    def _running(self) -> int:
        """Requests that run once the candidate is admitted."""
        return self.tree_cache.running_requests() + self.admitted + 1

    def _is_alone(self) -> bool:
        return self.admitted == 0 and self.tree_cache.running_requests() == 0
