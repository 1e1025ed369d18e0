"""The ``--tiered-*`` flags on SGLang's own launchers.

Two hooks. ``add_cli_args_hook`` adds one argument per entry of ``FLAGS`` to
SGLang's parser; ``--config file.yaml`` works through the same parser.
``from_cli_args_hook`` runs when the command line has been parsed: it checks the
settings and writes them to the environment, where every process reads them.

All of it happens in the launching process, before it starts a child. ``report`` is
how a problem found there is told: a command line ends with exit code 2 and one line
on stderr per problem, ``sglang.Engine`` raises.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from sglang_tiered.config import RADIX_CACHE_BACKEND, TieredConfig
from sglang_tiered.flags import FLAGS, ConfigError

BACKEND_FLAG = f"--radix-cache-backend {RADIX_CACHE_BACKEND}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the ``--tiered-*`` group.

    Values stay text here: ``config`` parses them, so that the command line and the
    environment are held to the same rules and answer in the same words.
    """
    group = parser.add_argument_group(
        "sglang-tiered",
        f"KV rows that do not fit on the device wait in host memory. Needs "
        f"{BACKEND_FLAG}. --max-total-tokens and --mem-fraction-static keep setting "
        f"the size of the device tier, T0.",
    )
    for flag in FLAGS:
        group.add_argument(
            flag.cli, dest=flag.dest, metavar=flag.metavar, help=flag.help
        )


def add_cli_args_hook(
    original: Callable[[argparse.ArgumentParser], None],
    parser: argparse.ArgumentParser,
) -> None:
    """AROUND ``ServerArgs.add_cli_args`` (a staticmethod)."""
    original(parser)
    add_arguments(parser)


def from_cli_args_hook(
    original: Callable[[type, argparse.Namespace], Any],
    cls: type,
    args: argparse.Namespace,
) -> Any:
    """AROUND ``ServerArgs.from_cli_args`` (a classmethod; the registry passes cls)."""
    try:
        settings = environment_for(args, os.environ)
    except ConfigError as error:
        fail(error)
    os.environ.update(settings)
    server_args = original(cls, args)
    server_args._tiered_command_line = True
    return server_args


def environment_for(
    args: argparse.Namespace, environ: Mapping[str, str]
) -> dict[str, str]:
    """The environment variables that the flags in ``args`` stand for.

    A flag wins over a variable already in ``environ``. Raises ConfigError when a flag
    is given without the tiered cache, or when a setting (from either) is not usable.
    """
    given = {
        flag.env: value
        for flag in FLAGS
        if (value := getattr(args, flag.dest, None)) is not None
    }
    if getattr(args, "radix_cache_backend", None) == RADIX_CACHE_BACKEND:
        TieredConfig.from_env({**environ, **given})
    elif given:
        flag = next(flag for flag in FLAGS if flag.env in given)
        raise ConfigError(
            f"{flag.cli} {given[flag.env]}: has no effect without the tiered cache; "
            f"fix: add {BACKEND_FLAG}, or drop {flag.cli}"
        )
    return given


def report(server_args: Any, error: Exception) -> NoReturn:
    """``fail`` if ``server_args`` came from a command line, else raise ``error``."""
    if getattr(server_args, "_tiered_command_line", False):
        fail(error)
    raise error


def fail(error: Exception) -> NoReturn:
    """End the launcher with the error's lines on stderr and exit code 2."""
    for line in str(error).splitlines():
        print(f"sglang-tiered: error: {line}", file=sys.stderr)
    raise SystemExit(2) from None
