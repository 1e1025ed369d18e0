"""Every runtime hook on SGLang, in one table: target, kind, function.

SGLang has an official extension point for the flag's name, the tree class, the
layer counter and the attention backend; these are the places where it has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_tiered.sglang import (
    allocator,
    capacity,
    deployment,
    pool,
    request_control,
    request_report,
    scheduler,
    server_args,
    start_up,
    translator,
)


@dataclass(frozen=True)
class Hook:
    """An AROUND hook: ``function(original, *args, **kwargs)``.

    ``startup``: must have been called by the time the tree is built.
    """

    target: str
    function: Callable[..., Any]
    startup: bool = False


_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

HOOKS = (
    Hook(f"{_SERVER_ARGS}.add_cli_args", server_args.add_cli_args_hook),
    Hook(f"{_SERVER_ARGS}.from_cli_args", server_args.from_cli_args_hook),
    Hook(f"{_SERVER_ARGS}.resolve_once", start_up.resolve_once_hook),
    Hook(
        f"{_CONFIGURATOR}.config_from_budget",
        capacity.config_from_budget_hook,
        startup=True,
    ),
    Hook(
        f"{_CONFIGURATOR}._build_mha_kv_pool", pool.build_mha_kv_pool_hook, startup=True
    ),
    Hook(
        f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator",
        allocator.build_allocator_hook,
        startup=True,
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.init_kv_index_translator",
        translator.init_kv_index_translator_hook,
        startup=True,
    ),
    Hook(f"{_SCHEDULER}.run_batch", scheduler.run_batch_hook),
    Hook(
        f"{_SCHEDULER}.init_req_max_new_tokens", scheduler.init_req_max_new_tokens_hook
    ),
    Hook("sglang.srt.managers.schedule_batch.release_req", scheduler.release_req_hook),
    Hook(
        f"{_SCHEDULER}.get_output_streamer_class",
        request_report.output_streamer_class_hook,
    ),
    Hook(
        "sglang.srt.sampling.sampling_params.SamplingParams.verify",
        request_control.verify_hook,
    ),
    Hook(
        "sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init",
        scheduler.validate_beam_hook,
    ),
)


def register() -> None:
    """Hand every hook to SGLang's registry, which applies them after all plugins
    have loaded."""
    for hook in HOOKS:
        HookRegistry.register(hook.target, _counted(hook), HookType.AROUND)


def _counted(hook: Hook) -> Callable[..., Any]:
    def counted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        deployment.hook_calls[hook.target] += 1
        return hook.function(original, *args, **kwargs)

    counted.tiered_hook = hook  # type: ignore[attr-defined]
    return counted
