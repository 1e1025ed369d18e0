"""No pressure: what the tiers cost when T0 is larger than the demand.

Three comparisons of a stock and a tiered server of the same T0, each between moments as
close together as it allows, since a shared machine's speed drifts:

* time to the first token: both servers are up, the one that is not asked is asleep.
  Twelve questions go to one and then at once to the other, ten times over, every second
  time the other way round; nothing is cached. The ratio of each pair, and their median;
* throughput: the servers take turns; a run asks eight at once for 128 tokens each;
* what attention scores cost, inside the tiered server: the same eight for 64 tokens
  each, in pairs of waves a few seconds apart, once with the default policy, which reads
  scores, and once with `recency`, for which none are taken.

Passes if the tiered server has, in medians, at least 0.98x the throughput and at most
1.03x the time to the first token of stock, and moved no bytes; and if scores add at
most 5 % to the time of a wave.

Prints a table and writes `out/overhead/result.json`; exit code 0 if all pass, 1 if not,
2 if a server failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles

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
PASSES = 10
QUICK_PASSES = 3
REPEATS = 5
QUICK_REPEATS = 2
# Larger than the demand several times, so that neither server is ever short.
T0_TOKENS = 8192
RECENT_WINDOW = 32

STOCK, TIERED = "stock", "tiered"
SCORED, UNSCORED = "hierarchy", "recency"


@dataclass(frozen=True)
class Run:
    """A wave's tokens/s; `scored` is the time with scores by the time without, of each
    pair of waves."""

    throughput: float
    moved_bytes: float
    scored: tuple[float, ...] = ()


ROWS: dict[str, Callable[[Run], float]] = {
    "throughput, tok/s": lambda run: run.throughput,
    "moved, MB": lambda run: run.moved_bytes / 1e6,
}


def first_token_ratios(
    model: Path, flags: dict[str, Flags], single: Sequence[Request], passes: int
) -> list[float]:
    """The tiered server's time to the first token by stock's, of each question in each
    pass."""

    def asleep(column: str) -> Server:
        extra = (*flags[column].extra, "--sleep-on-idle")
        log = OUT / f"{column}-asleep.log"
        return Server(model, replace(flags[column], extra=extra), log)

    ratios = []
    with asleep(STOCK) as stock, asleep(TIERED) as tiers:
        for server in (stock, tiers):
            warm_up(server.url, single)
        for number in range(passes):
            for server in (stock, tiers):
                server.flush_cache()
            for place, request in enumerate(single):
                seconds = {}
                for server in (stock, tiers)[:: 1 if (number + place) % 2 else -1]:
                    wave = run_wave(server.url, [request])
                    seconds[server] = wave.answers[0].first_token_s
                ratios.append(seconds[tiers] / seconds[stock])
    return ratios


def run_once(server: Server, together: Sequence[Request], pairs: int) -> Run:
    warm_up(server.url, together)
    before = server.counters()
    server.flush_cache()
    throughput = run_wave(server.url, together).throughput
    scored = tuple(run_pair(server, together, number) for number in range(pairs))
    return Run(throughput, (server.counters() - before).moved_bytes, scored)


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


def judge(results: dict[str, list[Run]], first_token: Sequence[float]) -> list[Check]:
    def throughput(column: str) -> float:
        return median_of(results[column], ROWS["throughput, tok/s"])

    moved = max(run.moved_bytes for run in results[TIERED])
    return [
        Check("throughput, of stock", throughput(TIERED) / throughput(STOCK), 0.98),
        Check("time to first token, of stock", median(first_token), 1.03, at_most=True),
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
    with console.status("time to the first token, on both servers in turns"):
        passes = QUICK_PASSES if quick else PASSES
        first_token = first_token_ratios(model, flags, single, passes)
    low, high = quantiles(first_token, n=20)[::18]
    console.print(
        f"Time to the first token, of stock: {median(first_token):.3f}, 90 % of "
        f"{len(first_token)} pairs from {low:.3f} to {high:.3f}"
    )
    results = measure(
        model,
        tuple(flags),
        QUICK_REPEATS if quick else REPEATS,
        lambda column, results: flags[column],
        lambda column, server: run_once(
            server, together, PAIRS if column == TIERED else 0
        ),
        OUT,
        console,
    )
    about = {
        "model": str(model),
        "t0_tokens": T0_TOKENS,
        "first_token": first_token,
        "scored": [run.scored for run in results[TIERED]],
    }
    checks = judge(results, first_token)
    return conclude(results, ROWS, checks, about, OUT, console)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead",
        description="Tiered against stock SGLang with room for everything in T0.",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two runs and three passes, not five and ten",
    )
    quick = parser.parse_args().quick
    return run_command(lambda console: run(demo_model(), quick, console))


if __name__ == "__main__":
    sys.exit(main())
