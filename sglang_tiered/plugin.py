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

    from sglang_tiered.attention import cpu
    from sglang_tiered.sglang import deployment, hooks
    from sglang_tiered.sglang.factory import create_tiered_cache

    cpu.register()
    if deployment.BACKEND_NAME not in registered_radix_cache_backends():
        register_radix_cache_backend(deployment.BACKEND_NAME, create_tiered_cache)
    hooks.register()
