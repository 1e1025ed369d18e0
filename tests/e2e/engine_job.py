"""Conversations through `sglang.Engine`, in a process of their own.

`python -m tests.e2e.engine_job FILE`: FILE is a JSON object with `engine` (arguments of
`sglang.Engine`), `prompts` and `follow_up` (token ids) and `new_tokens`. Each prompt is
answered, then each answer gets the follow-up. FILE is overwritten with `turns`, the
output ids of both turns, and `metrics`, the text that a server has on /metrics.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson
import prometheus_client
import sglang
from prometheus_client import multiprocess


def main() -> None:
    file = Path(sys.argv[1])
    job = orjson.loads(file.read_bytes())
    engine = sglang.Engine(**job["engine"])
    try:
        first = _answers(engine, job["prompts"], job["new_tokens"])
        grown = [
            [*prompt, *answer, *job["follow_up"]]
            for prompt, answer in zip(job["prompts"], first, strict=True)
        ]
        second = _answers(engine, grown, job["new_tokens"])
        result = {"turns": [first, second], "metrics": _metrics()}
    finally:
        engine.shutdown()
    file.write_bytes(orjson.dumps(result))


def _answers(engine: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens}
    answers = engine.generate(input_ids=prompts, sampling_params=sampling)
    return [answer["output_ids"] for answer in answers]


def _metrics() -> str:
    registry = prometheus_client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return prometheus_client.generate_latest(registry).decode()


if __name__ == "__main__":
    main()
