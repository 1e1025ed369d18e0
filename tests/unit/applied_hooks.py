"""Our hooks on SGLang, applied by its own registry and taken off again."""

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, _propagate_patch

from sglang_tiered.sglang import hooks


def owner_of(target: str) -> tuple[Any, str]:
    """The class or module that holds the target, and the target's name in it."""
    path, _, name = target.rpartition(".")
    return pkgutil.resolve_name(path), name


def put(target: str, function: Any) -> Any:
    """Make ``target`` that function again, everywhere it was imported. The old one."""
    owner, name = owner_of(target)
    old = vars(owner)[name]
    setattr(owner, name, function)
    if not isinstance(owner, type):
        _propagate_patch(old, function, owner)
    return old


@contextmanager
def applied() -> Iterator[None]:
    """Every hook is in force, as in a server whose plugins have loaded."""
    stock = {
        hook.target: vars(owner)[name]
        for hook in hooks.HOOKS
        for owner, name in [owner_of(hook.target)]
    }
    hooks.register()
    HookRegistry.apply_hooks()
    try:
        yield
    finally:
        for target, function in stock.items():
            put(target, function)
            HookRegistry._hooks.pop(target)
            HookRegistry._patched.discard(target)
