"""The real launchers end with one line when a setting cannot be used.

Each test is a process of its own: SGLang loads our plugin through its entry point.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
LAUNCH_SERVER = [sys.executable, "-m", "sglang.launch_server"]
SGLANG_SERVE = [str(BIN / "sglang"), "serve", "--model-type", "llm"]
SGLANG_TIERED = [str(BIN / "sglang-tiered"), "serve"]


def launch(*argv):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    return subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=300, env=environ
    )


@pytest.mark.parametrize(
    "launcher",
    [
        [*LAUNCH_SERVER, "--radix-cache-backend", "tiered", "--model-path"],
        [*SGLANG_SERVE, "--radix-cache-backend", "tiered", "--model-path"],
        SGLANG_TIERED,
    ],
    ids=["launch_server", "sglang-serve", "sglang-tiered-serve"],
)
def test_a_bad_value_ends_the_launcher_with_one_line(launcher, tmp_path):
    ended = launch(*launcher, str(tmp_path), "--tiered-host-gb", "-1")
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(
        "sglang-tiered: error: --tiered-host-gb -1: must be a finite number"
    )


def test_the_stock_launcher_lists_our_flags():
    assert "--tiered-host-gb GIB" in launch(*LAUNCH_SERVER, "--help").stdout
