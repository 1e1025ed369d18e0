"""Real text on a real small model, through `sglang.Engine` and the environment: the
tiered engine says what the stock engine says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from bench.model import demo_model
from bench.server import Metrics
from bench.workload import QUESTIONS, Chat
from tests.e2e.servers import STRICT_CHECKS

pytestmark = [pytest.mark.server, pytest.mark.smollm2]

SYSTEM = "Answer in full sentences and give a reason for every step."
FOLLOW_UP = "What is the most important point?"
NEW_TOKENS = 100
# Four conversations need about 1,100.
STOCK_TOKENS = 8000
T0_TOKENS = 280
ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "sampling_backend": "pytorch",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "enable_metrics": True,
}
TIERED = {
    "SGLANG_TIERED_HOST_GB": "0.2",
    "SGLANG_TIERED_WINDOW_TOKENS": "1200",
    "SGLANG_TIERED_RECENT_WINDOW": "32",
    "SGLANG_TIERED_TEST": "poison,audit",
}


def converse(
    file: Path, engine: dict[str, Any], environment: dict[str, str]
) -> tuple[list[list[list[int]]], Metrics]:
    """Output ids by turn and conversation, and the engine's metrics."""
    model = demo_model()
    chat = Chat(model)
    job = {
        "engine": {**ENGINE, "model_path": str(model), **engine},
        "prompts": [chat.prompt(question, SYSTEM) for question in QUESTIONS[:4]],
        "follow_up": chat.follow_up(FOLLOW_UP),
        "new_tokens": NEW_TOKENS,
    }
    file.write_bytes(orjson.dumps(job))
    ended = subprocess.run(
        [sys.executable, "-m", "tests.e2e.engine_job", str(file)],
        env={**os.environ, **STRICT_CHECKS, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    result = orjson.loads(file.read_bytes())
    return result["turns"], Metrics(result["metrics"])


def test_an_engine_says_what_the_stock_engine_says(tmp_path: Path) -> None:
    stock, _ = converse(tmp_path / "stock", {"max_total_tokens": STOCK_TOKENS}, {})
    engine = {"max_total_tokens": T0_TOKENS, "radix_cache_backend": "tiered"}
    tiered, metrics = converse(tmp_path / "tiered", engine, TIERED)
    assert metrics.total("sglang_tiered:streamed_tokens_total") > 0
    assert metrics.total("sglang_tiered:demoted_tokens_total") > T0_TOKENS
    assert tiered == stock
