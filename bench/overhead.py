"""No pressure: what the tiers cost when T0 is larger than the demand.

A stock and a tiered server of the same T0 take turns. A run first asks twelve questions
one after the other, each for one token, for the time to the first token; then eight at
once for 128 tokens each, for the throughput.

What attention scores cost is measured inside the tiered server: the same eight requests
for 64 tokens each, in pairs of waves a few seconds apart, once with the default policy,
which reads scores, and once with `recency`, for which none are taken.

Passes if the tiered server has, in medians over the runs, at least 0.98x the throughput
and at most 1.03x the time to the first token of stock, and moved no bytes; and if
scores add at most 5 % to the time of a wave, in the median over all pairs.

Prints a table and writes `out/overhead/result.json`; exit code 0 if all pass, 1 if not,
2 if a server failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from bench.command import run_command
from bench.model import demo_model
from bench.rounds import Check, conclude, measure, median_of
from bench.server import Flags, Server, tiered
from bench.workload import QUESTIONS, Chat, Request, run_wave, warm_up

OUT = Path("out/overhead")

CONCURRENT = 8
NEW_TOKENS = 128
PAIRS = 3
PAIR_TOKENS = 64
REPEATS = 5
QUICK_REPEATS = 2
# Larger than the demand several times, so that neither server is ever short.
T0_TOKENS = 8192
RECENT_WINDOW = 32

STOCK, TIERED = "stock", "tiered"
SCORED, UNSCORED = "hierarchy", "recency"


@dataclass(frozen=True)
class Run:
    """Seconds to the first token of each single request, and the wave's tokens/s;
    `scored` is the time with scores by the time without, of each pair of waves."""

    first_token_s: tuple[float, ...]
    throughput: float
    moved_bytes: float
    scored: tuple[float, ...] = ()


ROWS: dict[str, Callable[[Run], float]] = {
    "throughput, tok/s": lambda run: run.throughput,
    "time to first token, ms": lambda run: 1000 * median(run.first_token_s),
    "moved, MB": lambda run: run.moved_bytes / 1e6,
}


def run_once(
    server: Server,
    single: Sequence[Request],
    together: Sequence[Request],
    pairs: int,
) -> Run:
    warm_up(server.url, single)
    before = server.counters()
    server.flush_cache()
    first_token_s = tuple(
        run_wave(server.url, [request]).answers[0].first_token_s for request in single
    )
    server.flush_cache()
    throughput = run_wave(server.url, together).throughput
    scored = tuple(run_pair(server, together, number) for number in range(pairs))
    moved = (server.counters() - before).moved_bytes
    return Run(first_token_s, throughput, moved, scored)


def run_pair(server: Server, together: Sequence[Request], number: int) -> float:
    """The time of a wave with scores by that of one without, every second time in the
    other order."""
    seconds = {}
    for policy in (SCORED, UNSCORED) if number % 2 == 0 else (UNSCORED, SCORED):
        server.flush_cache()
        wave = [
            Request(r.prompt, PAIR_TOKENS, PAIR_TOKENS, {"policy": policy})
            for r in together
        ]
        seconds[policy] = run_wave(server.url, wave).seconds
    return seconds[SCORED] / seconds[UNSCORED]


def judge(results: dict[str, list[Run]]) -> list[Check]:
    def ratio(row: str) -> float:
        number = ROWS[row]
        return median_of(results[TIERED], number) / median_of(results[STOCK], number)

    moved = max(run.moved_bytes for run in results[TIERED])
    return [
        Check("throughput, of stock", ratio("throughput, tok/s"), 0.98),
        Check(
            "time to first token, of stock",
            ratio("time to first token, ms"),
            1.03,
            at_most=True,
        ),
        Check("bytes moved", moved, 0, at_most=True),
        Check(
            "time with scores, of the time without",
            median(ratio for run in results[TIERED] for ratio in run.scored),
            1.05,
            at_most=True,
        ),
    ]


def run(model: Path, quick: bool, console: Console) -> int:
    chat = Chat(model)
    prompts = [chat.prompt(question) for question in QUESTIONS]
    single = [Request(prompt, 1) for prompt in prompts]
    together = [Request(p, NEW_TOKENS, NEW_TOKENS) for p in prompts[:CONCURRENT]]
    flags = {
        STOCK: Flags(T0_TOKENS),
        TIERED: tiered(T0_TOKENS, RECENT_WINDOW),
    }
    results = measure(
        model,
        tuple(flags),
        QUICK_REPEATS if quick else REPEATS,
        lambda column, results: flags[column],
        lambda column, server: run_once(
            server, single, together, PAIRS if column == TIERED else 0
        ),
        OUT,
        console,
    )
    about = {
        "model": str(model),
        "t0_tokens": T0_TOKENS,
        "scored": [run.scored for run in results[TIERED]],
    }
    return conclude(results, ROWS, judge(results), about, OUT, console)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead",
        description="Tiered against stock SGLang with room for everything in T0.",
    )
    parser.add_argument("--quick", action="store_true", help="two runs each, not five")
    quick = parser.parse_args().quick
    return run_command(lambda console: run(demo_model(), quick, console))


if __name__ == "__main__":
    sys.exit(main())
