"""A server whose hooks or parts are not ours does not start."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from applied_hooks import applied, owner_of, put
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_tiered.sglang import deployment, hooks, self_check
from sglang_tiered.sglang.allocator import TieredAllocator
from sglang_tiered.sglang.factory import create_tiered_cache
from sglang_tiered.sglang.pool import TieredKVPool
from sglang_tiered.sglang.translator import TieredKVIndexTranslator

TARGETS = [hook.target for hook in hooks.HOOKS]
AT_START = [hook.target for hook in hooks.HOOKS if hook.startup]


@pytest.fixture(autouse=True)
def _in_force(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every hook applied, and those of the start called."""
    monkeypatch.setattr(deployment, "hook_calls", deployment.hook_calls.copy())
    with applied():
        for target in AT_START:
            deployment.hook_calls[target] += 1
        yield


def bare(part: type) -> Any:
    """An object of that type; its constructor wants a whole server."""
    return object.__new__(part)


@pytest.fixture
def ctx() -> Any:
    """What a ``TreeCacheBuildContext`` holds once our pools exist."""
    return SimpleNamespace(
        params=SimpleNamespace(token_to_kv_pool_allocator=bare(TieredAllocator)),
        tp_worker=SimpleNamespace(
            model_runner=SimpleNamespace(
                token_to_kv_pool=bare(TieredKVPool),
                kv_index_translator=bare(TieredKVIndexTranslator),
            )
        ),
    )


def test_nothing_is_wrong_when_all_is_in_force(ctx: Any) -> None:
    assert self_check.problems(ctx) == []


@pytest.mark.parametrize("target", TARGETS)
def test_sglang_28882_a_hook_that_is_not_applied_is_named(
    target: str, ctx: Any
) -> None:
    """sglang#28882: a feature was merged that nothing called."""
    owner, name = owner_of(target)
    hooked = vars(owner)[name]
    function = getattr(hooked, "__func__", hooked)
    stock = function.__wrapped__
    put(target, type(hooked)(stock) if hooked is not function else stock)
    try:
        assert self_check.problems(ctx) == [f"the hook on {target} is not applied"]
    finally:
        put(target, hooked)


@pytest.mark.parametrize("target", AT_START)
def test_sglang_28882_a_hook_that_was_never_called_is_named(
    target: str, ctx: Any
) -> None:
    """sglang#28882."""
    deployment.hook_calls[target] = 0
    assert self_check.problems(ctx) == [f"the hook on {target} was never called"]


def test_a_hook_of_somebody_else_around_ours_is_no_problem(ctx: Any) -> None:
    target = TARGETS[-1]
    owner, name = owner_of(target)
    ours = vars(owner)[name]

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    theirs.__wrapped__ = ours  # type: ignore[attr-defined]
    put(target, theirs)
    try:
        assert self_check.problems(ctx) == []
    finally:
        put(target, ours)


def test_a_replacement_of_a_hooked_function_is_named(ctx: Any) -> None:
    target = TARGETS[-1]
    owner, name = owner_of(target)
    ours = vars(owner)[name]
    put(target, lambda *args, **kwargs: None)
    try:
        assert self_check.problems(ctx) == [f"the hook on {target} is not applied"]
    finally:
        put(target, ours)


def test_every_hook_counts_its_calls() -> None:
    target = "sglang.srt.managers.schedule_batch.release_req"
    owner, name = owner_of(target)
    before = deployment.hook_calls[target]
    with pytest.raises(TypeError):
        getattr(owner, name)(req=None, tree_cache=None)
    assert deployment.hook_calls[target] == before + 1


@pytest.mark.parametrize(
    ("part", "stock"),
    [
        ("allocator", TokenToKVPoolAllocator),
        ("KV pool", MHATokenToKVPool),
        ("KV index translator", KVIndexTranslator),
    ],
)
def test_a_stock_part_is_named(part: str, stock: type, ctx: Any) -> None:
    runner = ctx.tp_worker.model_runner
    if part == "allocator":
        ctx.params.token_to_kv_pool_allocator = bare(stock)
    elif part == "KV pool":
        runner.token_to_kv_pool = bare(stock)
    else:
        runner.kv_index_translator = bare(stock)
    assert self_check.problems(ctx) == [f"the {part} is a {stock.__name__}"]


def test_a_missing_part_is_named(ctx: Any) -> None:
    ctx.tp_worker.model_runner.kv_index_translator = None
    assert self_check.problems(ctx) == ["the KV index translator is a NoneType"]


def test_a_server_with_a_problem_does_not_start(ctx: Any) -> None:
    deployment.hook_calls[AT_START[0]] = 0
    ctx.tp_worker.model_runner.kv_index_translator = None
    with pytest.raises(RuntimeError, match="tiered cannot serve: ") as error:
        create_tiered_cache(ctx)
    for words in (AT_START[0], "NoneType", "Fix: use sglang==0.5.23"):
        assert words in str(error.value)


def test_every_hooked_function_exists_in_sglang() -> None:
    assert len(set(TARGETS)) == len(TARGETS)
    for target in TARGETS:
        owner, name = owner_of(target)
        assert callable(getattr(owner, name))
