"""Reads through the page table: SGLang's ``KVIndexTranslator`` over our ``v2p``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.kv_loc_plan import IdSpace, IdSpaceKind

from sglang_tiered.memory.page_table import PageTable
from sglang_tiered.sglang.allocator import TieredAllocator


class TieredKVIndexTranslator(KVIndexTranslator):
    """Virtual ids in ``req_to_token``, physical rows for every kernel.

    The stock constructor recognises only SGLang's own virtual-id allocators, so
    the same fields are set here for ours.
    """

    def __init__(self, *, page_table: PageTable, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.is_translating = True
        self._capture_page_size = page_table.page_size
        self._full_v2p_table = page_table.v2p
        self._translate_full = page_table.translate
        self._spaces[IdSpaceKind.FULL] = IdSpace(
            key=(IdSpaceKind.FULL, id(page_table)),
            write=page_table.translate,
            read_v2p=page_table.v2p,
        )
        self._rows = torch.arange(
            self.req_to_token.shape[0], dtype=torch.int64, device=self.device
        )


def init_kv_index_translator_hook(original: Callable[..., Any], runner: Any) -> None:
    """AROUND ``ModelRunner.init_kv_index_translator``."""
    allocator = runner.token_to_kv_pool_allocator
    if not isinstance(allocator, TieredAllocator):
        original(runner)
        return
    runner.kv_index_translator = TieredKVIndexTranslator(
        page_table=allocator.manager.table,
        req_to_token=runner.req_to_token_pool.req_to_token,
        token_to_kv_pool_allocator=allocator,
        token_to_kv_pool=runner.token_to_kv_pool,
        page_size=runner.page_size or 1,
        device=runner.device,
        is_draft_worker=runner.is_draft_worker,
    )
