"""The factory behind ``--radix-cache-backend tiered``."""

from __future__ import annotations

from sglang.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    create_unified_radix_cache,
)

from sglang_tiered.sglang import self_check
from sglang_tiered.sglang.radix_cache import TieredRadixCache


def create_tiered_cache(ctx: TreeCacheBuildContext) -> TieredRadixCache:
    """The tree, once every hook is known to be in force. Raises, and so stops the
    server, otherwise."""
    self_check.assert_in_force(ctx)
    cache = create_unified_radix_cache(ctx, cache_class=TieredRadixCache)
    assert isinstance(cache, TieredRadixCache)
    return cache
