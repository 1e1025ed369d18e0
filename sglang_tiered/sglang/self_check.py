"""Proof, before the server starts, that every hook is in force.

SGLang only logs a plugin or a hook that fails, and would go on to serve its own
pool under our flag.
"""

from __future__ import annotations

import pkgutil
from typing import Any

from sglang_tiered.sglang import deployment, hooks
from sglang_tiered.sglang.allocator import TieredAllocator
from sglang_tiered.sglang.pool import TieredKVPool
from sglang_tiered.sglang.translator import TieredKVIndexTranslator


def is_in_force(hook: hooks.Hook) -> bool:
    """Whether calling the hook's target reaches the hook."""
    function: Any = pkgutil.resolve_name(hook.target)
    function = getattr(function, "__func__", function)
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            if getattr(cell.cell_contents, "tiered_hook", None) is hook:
                return True
        function = getattr(function, "__wrapped__", None)
    return False


def problems(ctx: Any) -> list[str]:
    """What keeps the tiered pool from being the one that serves; empty if nothing.

    ``ctx``: SGLang's ``TreeCacheBuildContext``, in a process whose pools exist.
    """
    found = [
        f"the hook on {hook.target} is not applied"
        for hook in hooks.HOOKS
        if not is_in_force(hook)
    ]
    found += [
        f"the hook on {hook.target} was never called"
        for hook in hooks.HOOKS
        if hook.startup and not deployment.hook_calls[hook.target]
    ]
    allocator = ctx.params.token_to_kv_pool_allocator
    runner = ctx.tp_worker.model_runner
    for what, part, wanted in (
        ("allocator", allocator, TieredAllocator),
        ("KV pool", runner.token_to_kv_pool, TieredKVPool),
        ("KV index translator", runner.kv_index_translator, TieredKVIndexTranslator),
    ):
        if not isinstance(part, wanted):
            found.append(f"the {what} is a {type(part).__name__}")
    return found


def assert_in_force(ctx: Any) -> None:
    """Raise RuntimeError, naming each problem, unless everything is in force."""
    found = problems(ctx)
    if found:
        raise RuntimeError(
            "--radix-cache-backend tiered cannot serve: "
            + "; ".join(found)
            + ". Fix: use sglang==0.5.23 and look above for what its plugin loader "
            "logged about sglang_tiered."
        )
