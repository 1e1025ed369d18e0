"""Jobs over the emulated CUDA driver (`driver.c`), in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

HERE = Path(__file__).parent
# Host memory is locked in pieces of this size there.
PIECE_BYTES = 1 << 20
NOTHING_ALIVE = {
    "ranges": 0,
    "maps": 0,
    "memories": 0,
    "locks": 0,
    "bytes": 0,
    "locked bytes": 0,
}


@cache
def library() -> Path:
    """libcuda.so.1, compiled once."""
    built = Path(mkdtemp(prefix="emulated-cuda-")) / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
    command += ["-Wl,-soname,libcuda.so.1", "-o", str(built), str(HERE / "driver.c")]
    subprocess.run([*command, "-ldl"], check=True)
    return built


def run_job(*cases: str, **environment: str) -> dict[str, Any]:
    """What `memory_job.py` saw in each of the `cases`."""
    path = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.cuda.memory_job", str(library()), *cases],
        env={
            **os.environ,
            "LD_LIBRARY_PATH": os.pathsep.join([str(library().parent), *path]),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    told: dict[str, Any] = json.loads(ended.stdout)
    return told
