"""The allocator: SGLang's calls in tokens and tensors, the manager's in pages.

SGLang counts virtual ids (``size`` is V); whether a row can be *placed* is a
second question, and every gate that SGLang has asks the manager the same one.
``alloc*`` makes its own room, so no caller can allocate past a check that it
forgot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

from sglang_tiered.memory.ledger import Ledger
from sglang_tiered.memory.manager import TierManager, TierRules
from sglang_tiered.memory.page_table import PageTable
from sglang_tiered.memory.score_book import ScoreBook
from sglang_tiered.sglang import deployment
from sglang_tiered.sglang.budget import TieredPrefillBudget
from sglang_tiered.transfer.statistics import RowStatistics

# The audit reads every table: a lone request must not wait for it each time.
AUDIT_SECONDS = 10.0


def host_ids(ids: torch.Tensor) -> np.ndarray:
    """Token ids that SGLang holds as a tensor, on the host: int64 [n]."""
    return ids.detach().to("cpu", torch.int64).numpy()


class TieredAllocator(BaseTokenToKVPoolAllocator):
    """Hands out virtual token ids whose rows live in T0.

    Raises RuntimeError on a double free. ``alloc*`` return None only if
    ``check_decode_capacity`` or the prefill budget would have said no.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: Any,
        manager: TierManager,
        audit: bool = False,
    ) -> None:
        self.manager = manager
        self._audit = audit
        self.tree: Any = None  # the radix tree, once it exists
        self._new_ids: list[np.ndarray] = []
        self._seen_idle = self._audited = -1
        self._next_audit = 0.0
        super().__init__(size, page_size, dtype, device, kvcache, need_sort=False)
        self.free_group: list[torch.Tensor] | None = None

    # -- counts in virtual ids -------------------------------------------------

    @property
    def free_pages(self) -> torch.Tensor:
        """Free virtual pages; SGLang's page invariants read it."""
        return torch.from_numpy(self.manager.ledger.virtual.free_slots())

    @free_pages.setter
    def free_pages(self, value: Any) -> None:
        """The base constructor sets None; the ledger owns the free list."""

    def get_all_free_pages(self) -> torch.Tensor:
        return self.free_pages.to(self.device)

    def available_size(self) -> int:
        return self.manager.ledger.virtual.available * self.page_size

    # -- gates -----------------------------------------------------------------

    def create_prefill_budget(
        self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0
    ) -> TieredPrefillBudget:
        return TieredPrefillBudget(
            self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens
        )

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> None:
        """Nothing to do: ``alloc*`` make exactly the room that they need, where
        this call knows only an upper bound (a page per request)."""

    def check_decode_capacity(
        self,
        *,
        num_tokens: int,
        tree_cache: Any,
        requests: Any = None,
        spec_algorithm: Any = None,
    ) -> bool:
        return self.manager.make_room(self._pages(num_tokens))

    def max_new_tokens_for_memory(
        self,
        input_tokens: int,
        max_new_tokens: int,
        *,
        token_capacity: int,
        sliding_window_size: int | None,
        chunk_size: int | None,
    ) -> int | None:
        """Clip to what one request alone can hold: T0 and the window. None if
        not even the prompt and one new token fit."""
        room = self.longest_request(chunk_size) - input_tokens
        return min(max_new_tokens, room) if room > 0 else None

    def longest_request(self, chunk_size: int | None) -> int:
        """Tokens, prompt and output, that one request alone can have. Without
        chunked prefill the whole prompt is written at once, into T0."""
        longest = self.manager.largest_request()
        if chunk_size is None:
            ledger = self.manager.ledger
            longest = min(longest, (ledger.t0.count - 1) * self.page_size)
        return longest

    def verify_byte_accounting(self) -> list[str]:
        """SGLang's idle audit, called all the time while it is idle: the full physical
        check, once per change and at most every ``AUDIT_SECONDS``."""
        version = self.manager.ledger.version
        if self._seen_idle != version:
            self._seen_idle = version
            self.tree.publish_metrics()
        now = time.monotonic()
        if self._audited == version or now < self._next_audit:
            return []
        self._audited, self._next_audit = version, now + AUDIT_SECONDS
        try:
            self.check_integrity()
            self.tree.check_integrity()
        except AssertionError as violation:
            return [f"tiered pool: {violation}"]
        return []

    def check_integrity(self) -> None:
        """Raises AssertionError on a leak or a surplus in any tier."""
        self.manager.check_integrity()

    # -- allocation ------------------------------------------------------------

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Whole pages: token ids int64 [need_size]."""
        pages = self._allocate_pages(need_size // self.page_size)
        if pages is None:
            return None
        ids = pages[:, None] * self.page_size + np.arange(self.page_size)
        return self._hand_out(ids.reshape(-1))

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Ids of tokens ``prefix .. seq`` of every request: int64 [extend]."""
        return self._append(prefix_lens_cpu.numpy(), seq_lens_cpu.numpy(), last_loc)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Id of the last token of every request: int64 [batch]."""
        end = seq_lens_cpu.numpy()
        return self._append(end - 1, end, last_loc)

    def _append(
        self, start: np.ndarray, end: np.ndarray, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Rows for tokens ``start .. end`` of every request: the rest of its
        open page first, then new pages. O(tokens), no loop over them."""
        ps = self.page_size
        page_start = -(-start // ps)  # first new page of each sequence
        new_pages = np.maximum(-(-end // ps) - page_start, 0)
        mid_page = start % ps != 0
        if mid_page.any():
            last = host_ids(last_loc)
            # A session may rewind into a page that has left T0 since.
            if not self._reopen(np.unique(last[mid_page] // ps)):
                return None
        else:
            last = np.zeros(len(start), dtype=np.int64)
        pages = self._allocate_pages(int(new_pages.sum()))
        if pages is None:
            return None
        counts = end - start
        request = np.repeat(np.arange(len(start)), counts)
        position = np.arange(int(counts.sum())) + np.repeat(
            start - (np.cumsum(counts) - counts), counts
        )
        first_page = np.cumsum(new_pages) - new_pages
        in_open_page = position < (page_start * ps)[request]
        nth = first_page[request] + position // ps - page_start[request]
        page = np.where(
            in_open_page,
            last[request] // ps,
            pages[np.where(in_open_page, 0, nth)] if len(pages) else 0,
        )
        return self._hand_out(page * ps + position % ps)

    def _reopen(self, pages: np.ndarray) -> bool:
        ledger = self.manager.ledger
        stale = pages[(ledger.t0_page[pages] < 0) | (ledger.host_page[pages] >= 0)]
        return len(stale) == 0 or self.manager.reopen(stale)

    def _allocate_pages(self, n: int) -> np.ndarray | None:
        if n == 0:
            return np.empty(0, dtype=np.int64)
        if not self.manager.make_room(n):
            return None
        return self.manager.allocate(n)

    def _hand_out(self, ids: np.ndarray) -> torch.Tensor:
        self._new_ids.append(ids)
        if self._audit:
            self.check_integrity()
        return torch.from_numpy(ids).to(self.device, non_blocking=True)

    def take_new_ids(self) -> np.ndarray:
        """Ids handed out since the last call, in order: int64 [n]. A batch's own
        ids on the host, without asking the device for them."""
        ids, self._new_ids = self._new_ids, []
        return np.concatenate(ids) if ids else np.empty(0, dtype=np.int64)

    # -- frees -----------------------------------------------------------------

    def free(self, free_index: torch.Tensor) -> None:
        """Give back every page that holds one of the token ids. A page may be
        named by many of its tokens in one call, but only in one call."""
        if free_index.numel() == 0:
            return
        if self.free_group is not None:
            self.free_group.append(self._copy_for_free_group(free_index))
            return
        self.manager.release(np.unique(host_ids(free_index) // self.page_size))
        if self._audit:
            self.check_integrity()

    def clear(self) -> None:
        """``flush_cache``: every id is free again; the page table stays in place."""
        self.free_group = None
        self._new_ids = []
        self.manager.reset()

    def resize(self, config: Any) -> None:
        raise RuntimeError("the tiered pool cannot be resized after start-up")

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


def build_allocator_hook(
    original: Callable[..., Any], configurator: Any, **kwargs: Any
) -> Any:
    """AROUND ``KVCacheConfigurator._build_token_to_kv_pool_allocator``."""
    if not deployment.is_enabled():
        return original(configurator, **kwargs)
    parts = deployment.current()
    config, layout = parts.config, parts.layout
    assert parts.backing is not None
    assert parts.engine is not None
    assert parts.host is not None
    ledger = Ledger(
        t0_pages=layout.t0_pages,
        host_pages=layout.host_pages,
        window_pages=layout.window_pages,
        int8_pages=parts.int8_pages,
        max_rows=kwargs["req_to_token_pool"].req_to_token.shape[0],
        page_size=layout.page_size,
    )
    parts.manager = TierManager(
        ledger=ledger,
        table=PageTable(ledger.virtual.count, layout.page_size, configurator.device),
        mover=parts.engine,
        rules=TierRules(
            sink_tokens=config.sink_tokens,
            recent_window=config.recent_window,
            retier_interval=config.retier_interval,
            score_interval=config.score_interval,
        ),
        window_base=parts.backing.window_base,
        scores=ScoreBook(ledger.virtual.count + 1, layout.page_size),
        statistics=RowStatistics(parts.backing, parts.host, parts.int8),
        policy=config.make_policy(),
        poison=poison_pages(parts) if "poison" in config.test_switches else None,
    )
    return TieredAllocator(
        size=ledger.virtual.count * layout.page_size,
        page_size=layout.page_size,
        dtype=configurator.kv_cache_dtype,
        device=configurator.device,
        kvcache=kwargs["token_to_kv_pool"],
        manager=parts.manager,
        audit="audit" in config.test_switches,
    )


def poison_pages(parts: deployment.Deployment) -> Callable[[np.ndarray], None]:
    """Test switch: physical pages that nobody may read any more become NaN, so
    that a stale read cannot go unnoticed."""
    backing = parts.backing
    assert backing is not None

    def poison(pages: np.ndarray) -> None:
        index = torch.from_numpy(pages)
        for layer, buffers in enumerate(parts.layout.layers):
            for buffer in buffers:
                backing.pages(layer, buffer.name)[index] = float("nan")

    return poison
