"""The real launchers end with one line when a setting cannot be used.

Each test is a process of its own, in which SGLang loads our plugin through its entry
point. ``sglang-tiered serve`` goes through SGLang's own ``serve``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH_SERVER = [
    sys.executable,
    "-m",
    "sglang.launch_server",
    "--radix-cache-backend",
    "tiered",
    "--model-path",
]
SGLANG_TIERED_SERVE = [str(Path(sys.executable).parent / "sglang-tiered"), "serve"]


@pytest.mark.parametrize(
    "launcher", [LAUNCH_SERVER, SGLANG_TIERED_SERVE], ids=["stock", "sglang-tiered"]
)
def test_a_bad_value_ends_the_launcher_with_one_line(launcher, tmp_path):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    ended = subprocess.run(
        [*launcher, str(tmp_path), "--tiered-host-gb", "-1"],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    errors = [line for line in ended.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert errors[0].startswith(
        "sglang-tiered: error: --tiered-host-gb -1: must be a finite number"
    )
