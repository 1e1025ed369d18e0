"""``sglang-tiered``: the stock SGLang server with the tiered cache switched on."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version as distribution_version

from sglang_tiered import __version__
from sglang_tiered.sglang.server_args import BACKEND_FLAG, add_arguments

# A replayed decode graph does not fill the window in this version.
ADDED_FLAGS = (*BACKEND_FLAG.split(), "--cuda-graph-backend-decode", "disabled")

_SERVE_HELP = f"""\
Start a stock SGLang server whose KV cache continues in host memory.

  sglang-tiered serve --model-path MODEL --max-total-tokens 8000 --tiered-host-gb 8

keeps 8000 tokens of KV rows on the device (T0) and up to 8 GiB more in host memory
(T1). Requests that no longer fit on the device keep their rows instead of being
computed again, and the output is the same, token for token.

It is short for

  sglang serve MODEL {" ".join(ADDED_FLAGS)} ...

and takes every flag of SGLang; `python -m sglang.launch_server --help` lists them.
"""


def main(argv: list[str] | None = None) -> None:
    """Console script. ``argv`` defaults to the process's own arguments."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "serve":
        serve(argv[1:])
        return
    parser = argparse.ArgumentParser(
        prog="sglang-tiered",
        description=__doc__,
        epilog="`sglang-tiered serve --help` explains with an example.",
    )
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("serve", help="start a server", add_help=False)
    parser.parse_args(argv)


def serve(argv: list[str]) -> None:
    """Run SGLang's own ``serve`` in this process, with ADDED_FLAGS.

    argv: the arguments of ``sglang serve``, a leading model path included. The added
    flags go in front of them, so a flag of the user's own wins.
    """
    if not argv or "-h" in argv or "--help" in argv:
        _print_serve_help()
        return
    from sglang.cli.serve import serve as stock_serve

    model = [] if argv[0].startswith("-") else argv[:1]
    rest = argv[len(model) :]
    # Without a model type SGLang asks the model hub whether this is a diffusion model.
    stock_serve(
        argparse.Namespace(), ["--model-type", "llm", *model, *ADDED_FLAGS, *rest]
    )


def _print_serve_help() -> None:
    parser = argparse.ArgumentParser(
        prog="sglang-tiered serve",
        usage="%(prog)s MODEL [--tiered-host-gb GIB] [any flag of sglang serve]",
        description=_SERVE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    add_arguments(parser)
    parser.print_help()


def _versions() -> str:
    return f"sglang-tiered {__version__} (SGLang {distribution_version('sglang')})"


if __name__ == "__main__":
    main()
