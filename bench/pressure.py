"""Memory pressure: what the tiers are worth when T0 holds a quarter of the demand.

Twelve questions are asked at once. Every request may take 300 tokens and ends by
itself, with a length of its own that the scheduler cannot know (`ignore_eos` would tell
it). Three servers take turns:

* `stock unlimited`: T0 larger than the demand;
* `stock`: T0 = 25 % of the demand (prompt and answer tokens of all requests);
* `tiered`: the same T0.

Passes if the tiered server, in medians over the runs,
* keeps at least 0.8x as many requests running as stock unlimited,
* has at least min(1.5x stock, 0.9x stock unlimited) of the throughput,
* recomputes at most one page per resume. A run in which no request had to be resumed
  does not show this, and says so; tests/e2e/test_identity_page16.py does.

Prints a table and writes `out/pressure/result.json`; exit code 0 if all pass, 1 if not,
2 if a server failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from bench.command import run_command
from bench.model import demo_model
from bench.rounds import Check, conclude, measure, median_of
from bench.server import Counters, Flags, Server, tiered
from bench.workload import QUESTIONS, Chat, Request, Wave, run_wave, warm_up

OUT = Path("out/pressure")

MAX_NEW_TOKENS = 300
T0_SHARE = 0.25
# So that the recent windows of all requests fit T0 together.
RECENT_WINDOW = 32
PAGE_SIZE = 1
REPEATS = 5
QUICK_REPEATS = 1
QUICK_REQUESTS = 8

UNLIMITED, STOCK, TIERED = "stock unlimited", "stock", "tiered"


@dataclass(frozen=True)
class Run:
    """One wave on one server, and what the server counted meanwhile."""

    wave: Wave
    counters: Counters

    def first_token_s(self, percent: float) -> float:
        times = [answer.first_token_s for answer in self.wave.answers]
        return float(np.percentile(times, percent))


ROWS: dict[str, Callable[[Run], float]] = {
    "throughput, tok/s": lambda run: run.wave.throughput,
    "mean running requests": lambda run: run.counters.mean_running,
    "time to first token p50, s": lambda run: run.first_token_s(50),
    "time to first token p99, s": lambda run: run.first_token_s(99),
    "retractions": lambda run: run.counters.retractions,
    "recomputed per resume, tokens": lambda run: run.counters.recomputed_per_resume,
    "demoted, MB": lambda run: run.counters.demoted_bytes / 1e6,
    "promoted, MB": lambda run: run.counters.promoted_bytes / 1e6,
    "streamed, MB": lambda run: run.counters.streamed_bytes / 1e6,
}


def run_once(server: Server, requests: list[Request]) -> Run:
    warm_up(server.url, requests)
    server.flush_cache()
    before = server.counters()
    wave = run_wave(server.url, requests)
    return Run(wave, server.counters() - before)


def demand(requests: list[Request], wave: Wave) -> int:
    """Tokens that all requests hold together at their ends."""
    return sum(len(request.prompt) for request in requests) + wave.new_tokens


def resumes(results: dict[str, list[Run]]) -> int:
    """How often the tiered server stopped a request and resumed it, over all runs."""
    return round(sum(run.counters.retractions for run in results[TIERED]))


def judge(results: dict[str, list[Run]]) -> list[Check]:
    def of(column: str, number: Callable[[Run], float]) -> float:
        return median_of(results[column], number)

    def throughput(run: Run) -> float:
        return run.wave.throughput

    def running(run: Run) -> float:
        return run.counters.mean_running

    floor = min(1.5 * of(STOCK, throughput), 0.9 * of(UNLIMITED, throughput))
    checks = [
        Check(
            "mean running, of stock unlimited",
            of(TIERED, running) / of(UNLIMITED, running),
            0.8,
        ),
        Check(
            "throughput, of min(1.5x stock, 0.9x stock unlimited)",
            of(TIERED, throughput) / floor,
            1.0,
        ),
    ]
    # Without a resume there is nothing that could have been recomputed.
    if resumed := resumes(results):
        checks.append(
            Check(
                f"recomputed tokens per resume, of {resumed} resumes",
                max(run.counters.recomputed_per_resume for run in results[TIERED]),
                PAGE_SIZE,
                at_most=True,
            )
        )
    reference = results[UNLIMITED][0].wave.tokens
    same = [run.wave.tokens == reference for run in results[TIERED]]
    checks.append(Check("runs with identical answers", sum(same), len(same)))
    return checks


def run(model: Path, quick: bool, console: Console) -> int:
    chat = Chat(model)
    questions = QUESTIONS[:QUICK_REQUESTS] if quick else QUESTIONS
    requests = [Request(chat.prompt(q), MAX_NEW_TOKENS) for q in questions]
    largest = sum(len(request.prompt) + MAX_NEW_TOKENS for request in requests)

    def flags(column: str, results: dict[str, list[Run]]) -> Flags:
        if column == UNLIMITED:
            return Flags(largest)
        needed = demand(requests, results[UNLIMITED][0].wave)
        t0 = round(T0_SHARE * needed)
        return Flags(t0) if column == STOCK else tiered(t0, RECENT_WINDOW)

    results = measure(
        model,
        (UNLIMITED, STOCK, TIERED),
        QUICK_REPEATS if quick else REPEATS,
        flags,
        lambda _, server: run_once(server, requests),
        OUT,
        console,
    )
    about = {
        "model": str(model),
        "requests": len(requests),
        "answer_tokens": [len(a) for a in results[UNLIMITED][0].wave.tokens],
        "t0_tokens": flags(STOCK, results).t0_tokens,
        "resumes": resumes(results),
    }
    code = conclude(results, ROWS, judge(results), about, OUT, console)
    if not resumes(results):
        console.print(
            "Not shown by this run: at most one page recomputed per resume, as no "
            "request had to be resumed. Shown by: "
            "pytest tests/e2e/test_identity_page16.py",
            soft_wrap=True,
        )
    return code


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pressure",
        description="Tiered against stock SGLang with T0 = 25 % of the demand.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one run each, with fewer requests"
    )
    quick = parser.parse_args().quick
    return run_command(lambda console: run(demo_model(), quick, console))


if __name__ == "__main__":
    sys.exit(main())
