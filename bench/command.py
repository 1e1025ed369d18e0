"""What the commands here share: errors in one message, and no server left behind."""

from __future__ import annotations

import signal
from collections.abc import Callable

from rich.console import Console

from bench.model import ModelError
from bench.server import ServerError

FAILED = 2
INTERRUPTED = 130


def run_command(command: Callable[[Console], int]) -> int:
    """Run `command` and return its exit code; print the error if there is one."""
    # A kill then leaves every `with` block in order, as ^C does, and ends the servers.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    try:
        return command(console)
    except (ModelError, ServerError) as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return FAILED
    except KeyboardInterrupt:
        console.print("interrupted")
        return INTERRUPTED
