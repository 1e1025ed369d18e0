"""Entry point of the group ``sglang.srt.plugins``; runs in every SGLang process
before arguments are parsed."""

from __future__ import annotations


def register() -> None:
    """Make ``--radix-cache-backend tiered`` known and register the hooks behind it.

    Without that flag every hook hands straight over to SGLang.
    """
    from sglang.srt.mem_cache.registry import (
        register_radix_cache_backend,
        registered_radix_cache_backends,
    )

    from sglang_tiered.config import RADIX_CACHE_BACKEND
    from sglang_tiered.sglang import attention, hooks
    from sglang_tiered.sglang.factory import create_tiered_cache

    attention.register()
    if RADIX_CACHE_BACKEND not in registered_radix_cache_backends():
        register_radix_cache_backend(RADIX_CACHE_BACKEND, create_tiered_cache)
    hooks.register()
