"""The last look at the arguments before SGLang starts a child process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    model_config_of,
    resolving_view,
)

from sglang_tiered.config import RADIX_CACHE_BACKEND, TieredConfig
from sglang_tiered.flags import ConfigError
from sglang_tiered.memory.host_pool import check_host_budget, free_host_bytes
from sglang_tiered.memory.int8_pool import check_int8_budget
from sglang_tiered.sglang import refusals
from sglang_tiered.sglang.server_args import report


def resolve_once_hook(original: Callable[[Any], None], server_args: Any) -> None:
    """AROUND ``ServerArgs.resolve_once``: check settings, arguments and model.

    Ends a command-line launcher with one line per problem; raises ConfigError or
    Refusal for arguments that a program built (``sglang.Engine``).
    """
    try:
        original(server_args)
    except Exception:
        # SGLang may trip over the very thing that we refuse, in less clear words.
        if _is_tiered(server_args):
            _check(server_args, resolved=False)
        raise
    if _is_tiered(server_args):
        _check(server_args, resolved=True)


def _is_tiered(server_args: Any) -> bool:
    return resolving_view(server_args).radix_cache_backend == RADIX_CACHE_BACKEND


def _check(server_args: Any, *, resolved: bool) -> None:
    cfg = resolving_view(server_args)
    try:
        config = TieredConfig.from_env(os.environ)
        # The pools check again when they are built; here it is one line, not the
        # traceback of a child process.
        free, host = free_host_bytes(), int((config.host_gb or 0) * 2**30)
        if host:
            check_host_budget(host, 1, free)
        if config.int8_gb:
            check_int8_budget(int(config.int8_gb * 2**30), free - host)
        refusals.check_server_args(cfg, os.environ, resolved=resolved)
        if cfg.device == "cuda":
            raise refusals.Refusal(
                "--device cuda: the window in CUDA memory is not in this version; "
                "fix: use --device cpu, or wait for the next"
            )
        # SGLang keeps the model's configuration on the record once it has read it.
        if resolved or getattr(server_args, "_model_config", None) is not None:
            refusals.check_model(
                model_config_of(server_args), attention_backends_of(cfg)
            )
    except (ConfigError, MemoryError, refusals.Refusal) as error:
        report(server_args, error)
