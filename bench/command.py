"""What the commands here share: errors in one message, and no server left behind."""

from __future__ import annotations

import signal
from collections.abc import Callable

from rich.console import Console

from bench.model import ModelError
from bench.server import ServerError
from bench.workload import RequestError

FAILED = 2


def run_command(command: Callable[[Console], int]) -> int:
    """Run `command` and return its exit code, or `FAILED` with the error printed."""
    # A kill then leaves every `with` block in order, as ^C does, and ends the servers.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    try:
        return command(console)
    except (ModelError, RequestError, ServerError) as error:
        console.print(f"error: {error}", style="red", markup=False)
        return FAILED
