"""The one tiered pool of a scheduler process, built in the order in which SGLang
builds its own parts: sizes (``capacity``), buffers (``pool``), manager
(``allocator``), tree (``radix_cache``). Each step finds here what the one before
has made."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

from sglang.srt.runtime_context import get_memory

from sglang_tiered.config import RADIX_CACHE_BACKEND, TieredConfig
from sglang_tiered.memory.backing import Backing
from sglang_tiered.memory.host_pool import HostPool
from sglang_tiered.memory.int8_pool import Int8Pool
from sglang_tiered.memory.layout import PoolLayout
from sglang_tiered.memory.manager import TierManager
from sglang_tiered.transfer.engine import TransferEngine


@dataclass
class Deployment:
    """What this process runs; a part is None until SGLang has come to it."""

    config: TieredConfig
    layout: PoolLayout
    int8_pages: int
    backing: Backing | None = None
    host: HostPool | None = None
    int8: Int8Pool | None = None
    engine: TransferEngine | None = None
    manager: TierManager | None = None


# Calls of each hook in this process, by target.
hook_calls: Counter[str] = Counter()

_current: Deployment | None = None


def is_enabled() -> bool:
    """Whether this server was started with ``--radix-cache-backend tiered``."""
    return get_memory().radix_cache_backend == RADIX_CACHE_BACKEND


def start(layout: PoolLayout, int8_pages: int) -> Deployment:
    global _current
    _current = Deployment(TieredConfig.from_env(os.environ), layout, int8_pages)
    return _current


def current() -> Deployment:
    """Raises RuntimeError if the sizing hook has not run."""
    if _current is None:
        raise RuntimeError(
            "the tiered pool was not sized: KVCacheConfigurator.config_from_budget "
            "is not hooked"
        )
    return _current
