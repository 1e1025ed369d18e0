"""The demo: the same conversations on stock SGLang and on the tiered pool.

Both servers get the same T0, about a quarter of what the conversations need, one after
the other. Six questions that share a system prompt are answered at once with 384 tokens
each, greedily; then each answer gets a follow-up, which reuses the rows of the first
turn. Every token must be equal: the stock server is the reference, since retraction
costs it time and not exactness.

Both run on the CPU, in float32, where equal means equal: in 16 bits a different batch
rounds differently in stock SGLang too.

Writes `out/demo/result.json`, `out/demo/tiers.png` and the logs of both servers. The
exit code is 0 if every token is equal, 1 if not, 2 if a server failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from bench.command import run_command
from bench.model import demo_model
from bench.server import Counters, Flags, Metrics, Sampler, Server, tiered
from bench.workload import Chat, Request, Wave, run_wave

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OUT = Path("out/demo")

SYSTEM = (
    "You are a careful tutor. Think through the problem one step at a time, number "
    "the steps, say which fact or rule each step uses, and check the result in a "
    "second way before you give it. Write full sentences and do not skip arithmetic."
)
QUESTIONS = (
    "A baker sells 48 loaves in the morning and half as many in the afternoon. A loaf "
    "costs 3 dollars. How much money does the baker take in one day?",
    "A garden is 12 metres long and 7 metres wide. A path one metre wide runs all "
    "around it on the outside. What is the area of the path?",
    "One pipe fills a tank in 6 hours, another one in 4 hours. How long do both take "
    "together?",
    "Is the sum of two odd numbers always even? Give examples and then a proof.",
    "Four friends plan a walking trip of three days with 200 dollars. What do they "
    "pack, what do they eat, and where does the money go?",
    "A pupil has exams in mathematics, history and biology in two weeks. Make a plan "
    "for every day and give the reason for it.",
)
FOLLOW_UP = "Say in one short paragraph what the most important step was, and why."
FIRST_TOKENS = 384
SECOND_TOKENS = 16

# About a quarter: so much that two of the six fit beside each other for most of their
# answers, which keeps stock's part of the demo short.
T0_SHARE = 0.28
# Six recent windows must fit T0 beside the shared prompt.
RECENT_WINDOW = 64


@dataclass(frozen=True)
class Side:
    """What one server did: its two turns, and its counters over both."""

    turns: tuple[Wave, Wave]
    counters: Counters

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens of the second turn that were still in the cache."""
        return sum(answer.cached_tokens for answer in self.turns[1].answers)

    @property
    def throughput(self) -> float:
        """New tokens per second over both turns."""
        return sum(t.new_tokens for t in self.turns) / sum(
            t.seconds for t in self.turns
        )


@dataclass(frozen=True)
class Tiers:
    """Tokens per tier at one moment; t1 are the rows that only the host holds."""

    t0: float
    t1: float
    window: float

    @classmethod
    def read(cls, metrics: Metrics, which: str) -> Tiers:
        return cls(
            *(
                metrics.total(f"sglang_tiered:{tier}_{which}_tokens")
                for tier in ("t0", "t1", "window")
            )
        )


def demand(prompts: Sequence[tuple[int, ...]], follow_up: tuple[int, ...]) -> int:
    """Tokens that all conversations hold at their end, their common start once."""
    common = 0
    for column in zip(*prompts, strict=False):
        if len(set(column)) > 1:
            break
        common += 1
    grown = FIRST_TOKENS + len(follow_up) + SECOND_TOKENS
    return common + sum(len(prompt) - common + grown for prompt in prompts)


def converse(
    server: Server,
    name: str,
    prompts: Sequence[tuple[int, ...]],
    follow_up: tuple[int, ...],
    console: Console,
) -> Side:
    """Run both turns of all conversations on `server`."""

    def turn(number: int, prompts: Sequence[tuple[int, ...]], tokens: int) -> Wave:
        # Not ignore_eos: with that the scheduler reserves the whole length and queues.
        requests = [
            Request(prompt, tokens, min_new_tokens=tokens) for prompt in prompts
        ]
        columns = (
            f"{name}, turn {number}: {len(requests)} requests",
            BarColumn(),
            MofNCompleteColumn(),
            "tokens",
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=tokens * len(requests))
            return run_wave(server.url, requests, lambda n: progress.advance(task, n))

    before = server.counters()
    first = turn(1, prompts, FIRST_TOKENS)
    grown = [
        prompt + tokens + follow_up
        for prompt, tokens in zip(prompts, first.tokens, strict=True)
    ]
    second = turn(2, grown, SECOND_TOKENS)
    return Side((first, second), server.counters() - before)


def identical(stock: Side, tiered: Side) -> list[tuple[bool, bool]]:
    """Per request: whether its answers in turn 1 and in turn 2 are equal."""
    first, second = (
        [a == b for a, b in zip(x.tokens, y.tokens, strict=True)]
        for x, y in zip(stock.turns, tiered.turns, strict=True)
    )
    return list(zip(first, second, strict=True))


def draw(samples: Sequence[tuple[float, Tiers]], t0_tokens: int, path: Path) -> None:
    """Tier occupancy over time: T0 and T1 stacked, and the window as a line."""
    seconds = [when for when, _ in samples]
    figure, axes = plt.subplots(figsize=(9, 4.5))
    axes.stackplot(
        seconds,
        [tiers.t0 for _, tiers in samples],
        [tiers.t1 for _, tiers in samples],
        labels=["T0: device memory", "T1: only on the host"],
        colors=["#4c78a8", "#f2b872"],
    )
    axes.plot(
        seconds,
        [tiers.window for _, tiers in samples],
        color="#333333",
        label="window rows in use",
    )
    axes.axhline(t0_tokens, color="#4c78a8", linestyle="--", label="capacity of T0")
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens")
    axes.set_title("Where the rows of the KV cache are")
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def show(
    console: Console,
    same: list[tuple[bool, bool]],
    stock: Side,
    ours: Side,
    peak: Tiers,
) -> None:
    def mark(equal: bool) -> str:
        return "[green]yes[/]" if equal else "[red]NO[/]"

    answers = Table(title="Tokens identical to stock SGLang")
    for column in ("request", "turn 1", "turn 2"):
        answers.add_column(column, justify="right")
    for number, (first, second) in enumerate(same, start=1):
        answers.add_row(str(number), mark(first), mark(second))
    console.print(answers)

    numbers = Table(title="Both servers")
    for column in ("", "stock", "tiered"):
        numbers.add_column(column, justify="right" if column else "left")
    rows: list[tuple[str, str, str]] = [
        (f"most rows in {name}", "", f"{tokens:,.0f}")
        for name, tokens in (
            ("T0", peak.t0),
            ("T1 only", peak.t1),
            ("the window", peak.window),
        )
    ]
    for name, field in (
        ("demoted, MB", "demoted_bytes"),
        ("promoted, MB", "promoted_bytes"),
        ("streamed, MB", "streamed_bytes"),
    ):
        rows.append((name, "", f"{getattr(ours.counters, field) / 1e6:,.1f}"))
    for name, field in (
        ("retractions", "retractions"),
        ("recomputed tokens", "recomputed_tokens"),
    ):
        a, b = getattr(stock.counters, field), getattr(ours.counters, field)
        rows.append((name, f"{a:,.0f}", f"{b:,.0f}"))
    a, b = stock.reused_tokens, ours.reused_tokens
    rows.append(("reused by turn 2, tokens", f"{a:,}", f"{b:,}"))
    a, b = stock.counters.mean_running, ours.counters.mean_running
    rows.append(("mean running requests", f"{a:.2f}", f"{b:.2f}"))
    rows.append(
        ("tokens per second", f"{stock.throughput:.1f}", f"{ours.throughput:.1f}")
    )
    for row in rows:
        numbers.add_row(*row)
    console.print(numbers)


def report(side: Side) -> dict[str, Any]:
    return {
        "tokens_per_second": side.throughput,
        "seconds": [turn.seconds for turn in side.turns],
        "reused_tokens": side.reused_tokens,
        "tokens": [turn.tokens for turn in side.turns],
        **asdict(side.counters),
        "mean_running": side.counters.mean_running,
    }


def run(model: Path, console: Console) -> int:
    chat = Chat(model)
    prompts = [chat.prompt(question, SYSTEM) for question in QUESTIONS]
    follow_up = chat.follow_up(FOLLOW_UP)
    needed = demand(prompts, follow_up)
    t0 = round(needed * T0_SHARE)
    console.print(
        f"{len(prompts)} conversations need {needed:,} rows of KV cache; "
        f"T0 holds {t0:,} on both servers."
    )
    OUT.mkdir(parents=True, exist_ok=True)

    console.print("Starting stock SGLang ...")
    with Server(model, Flags(t0), OUT / "stock.log") as server:
        stock = converse(server, "stock", prompts, follow_up, console)

    console.print("Starting tiered SGLang ...")
    flags = tiered(t0, RECENT_WINDOW)
    with Server(model, flags, OUT / "tiered.log") as server:
        with Sampler(server, lambda metrics: Tiers.read(metrics, "used")) as sampler:
            ours = converse(server, "tiered", prompts, follow_up, console)
        peak = Tiers.read(server.metrics(), "peak")

    same = identical(stock, ours)
    show(console, same, stock, ours, peak)
    result = {
        "model": str(model),
        "t0_tokens": t0,
        "needed_tokens": needed,
        "identical": same,
        "stock": report(stock),
        "tiered": report(ours),
        "peak_tokens": asdict(peak),
        "timeline": [(seconds, asdict(tiers)) for seconds, tiers in sampler.samples],
    }
    (OUT / "result.json").write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    draw(sampler.samples, t0, OUT / "tiers.png")
    console.print(f"Wrote {OUT}/result.json and {OUT}/tiers.png.")
    if all(first and second for first, second in same):
        console.print("[green]Every token is identical.[/]")
        return 0
    console.print("[red]Some tokens differ.[/]")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo",
        description="Tiered against stock SGLang: same tokens, a quarter of T0.",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="a Hugging Face model folder; default: a small model made by bench.model",
    )
    model: Path | None = parser.parse_args().model
    return run_command(lambda console: run(model or demo_model(), console))


if __name__ == "__main__":
    sys.exit(main())
