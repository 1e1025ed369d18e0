"""The last look at the arguments before SGLang starts a child process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view

from sglang_tiered.config import RADIX_CACHE_BACKEND, TieredConfig
from sglang_tiered.sglang import refusals
from sglang_tiered.sglang.server_args import fail


def resolve_once_hook(original: Callable[[Any], None], server_args: Any) -> None:
    """AROUND ``ServerArgs.resolve_once``: end the launcher with one line per problem
    if the resolved arguments do not work with the tiered pool."""
    original(server_args)
    cfg = resolving_view(server_args)
    if cfg.radix_cache_backend != RADIX_CACHE_BACKEND:
        return
    try:
        TieredConfig.from_env(os.environ)
        refusals.check_server_args(cfg, os.environ)
    except ValueError as error:
        fail(error)
