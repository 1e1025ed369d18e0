"""The value guard: is it worth anything?

A policy that drops rows leaves those alone whose value norm is an outlier, as long as
there are others (`value_guard`, on by default). This measures what that does to the
output of attention.

Two real models read 1,024 tokens of real text. The first 128 are the prompt; each of
the others is a decode step. As in the server, every 64 steps the policy looks at the
rows behind the prompt and 4 sinks and before the last 128 tokens, and drops its share
of all that were ever there: by cumulative attention score (`hierarchy`) or by chance
(`random`, which knows nothing of attention: the guard is its only help). Queries, keys
and values are the models' own. Every step attends over the kept rows with the softmax
taken over them alone, in float64, and is compared with attention over all rows. Then
the same with the values of a hundredth of the generated rows ten times as large: what
the guard is for, in case the real ones have no outliers.

Table 1, over all steps after the first drop, layers and heads: the error of a head's
output as a share of that output's norm. Spared are rows that would have been dropped
without the guard and are kept to the end.

Table 2, over the same: what the server reports as `dropped_error` (accounted: a
dropped row's score per step times its value norm, both means over layers and heads),
what the same sum is with each head's own later weights and norms (true), and the norm
of the error. The paper's bound is twice the sum; the last columns say how often an
error is larger than twice the accounted and the true sum. One line for both, "on" and
"off", where the guard changed nothing.

Prints the tables and writes `out/guard/result.json`. It is a measurement, there is
nothing to pass: exit code 0, or 2 if there is no model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import orjson
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from bench.command import run_command
from bench.int8 import TOKENS, Layer, capture
from bench.model import demo_model
from bench.second_model import second_model
from sglang_tiered.memory.manager import TierRules
from sglang_tiered.memory.score_book import ScoreBook
from sglang_tiered.policy.base import Candidates, Tier
from sglang_tiered.policy.evicting import EvictingPolicy
from sglang_tiered.policy.hierarchy import Hierarchy
from sglang_tiered.policy.protection import unprotected_range
from sglang_tiered.policy.random import Random
from sglang_tiered.policy.shares import outliers

OUT = Path("out/guard")

PROMPT = 128
SHARES = (0.03, 0.1, 0.2, 0.5)
LOUD_SHARE, LOUD = 0.01, 10.0
RULES = TierRules()
STEPS = RULES.retier_interval


@dataclass(frozen=True)
class Outcome:
    """One policy and share, with or without the guard; see the module docstring."""

    case: str
    policy: str
    share: float
    guard: bool
    dropped: int
    spared: int
    total: float  # norm of all errors by norm of all outputs
    mean: float
    worst: float
    accounted: float
    true_sum: float
    error: float
    over_accounted: float
    over_true: float


class Request:
    """One request whose rows ``policy`` drops, as the tier manager does it."""

    def __init__(
        self, policy: Hierarchy | EvictingPolicy, value_norm: np.ndarray
    ) -> None:
        self.policy = policy
        self.value_norm = value_norm  # float32 [TOKENS], mean over layers and heads
        self.kept = np.ones(TOKENS, dtype=bool)
        self.spared = np.zeros(TOKENS, dtype=bool)
        self.accounted = 0.0
        self._scores = ScoreBook(TOKENS, page_size=1)
        self._measured: list[torch.Tensor] = []

    @property
    def dropped(self) -> int:
        return int((~self.kept).sum())

    def attend(
        self, exact: torch.Tensor, values: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        """Attention of one layer over the kept rows, measured against all rows.

        Args:
            exact: float64 [heads, steps, tokens], weights over all rows.
            values: float64 [heads, tokens, channels].
            output: float64 [heads, steps, channels], of attention over all rows.

        Returns:
            The weights over the kept rows, mean over heads: float64 [steps, tokens].
        """
        kept = torch.from_numpy(self.kept[: exact.shape[-1]])
        weights = exact * kept
        weights /= weights.sum(-1, keepdim=True)
        if not kept.all():
            gone = (exact * ~kept) @ values.norm(dim=-1)[..., None]
            error = (weights @ values - output).norm(dim=-1)
            accounted = torch.full_like(error, self.accounted)
            facts = (error, output.norm(dim=-1), gone[..., 0], accounted)
            self._measured.append(torch.stack(facts).flatten(1))
        return weights.mean(0)

    def score(self, weights: torch.Tensor) -> None:
        """The weights [steps, tokens] of the last steps, mean over layers and heads."""
        steps, tokens = weights.shape
        self._scores.score[:tokens] += weights.sum(0).numpy()
        read = torch.arange(tokens) <= torch.arange(tokens - steps, tokens)[:, None]
        self._scores.steps[:tokens] += read.sum(0).numpy() * self.kept[:tokens]

    def look(self, length: int) -> None:
        """The policy's look at a request of ``length`` tokens."""
        first, end = unprotected_range(
            PROMPT,
            length,
            page_size=1,
            sink_tokens=RULES.sink_tokens,
            recent_window=RULES.recent_window,
        )
        rows = np.arange(first, end)
        rows = rows[self.kept[rows]]
        score, steps = self._scores.page_means(rows)
        candidates = Candidates(
            index=rows,
            tier=np.full(len(rows), Tier.T0),
            lossy=np.zeros(len(rows), dtype=bool),
            dropped=self.dropped,
            compressed=0,
            seed=0,
            score=score,
            steps=steps,
            value_norm=self.value_norm[rows],
        )
        gone = rows[self.policy.plan(candidates) == Tier.T3]
        unguarded = replace(self.policy, value_guard=False)
        would_go = rows[unguarded.plan(candidates) == Tier.T3]
        self.spared[np.setdiff1d(would_go, gone)] = True
        self.accounted += float(self._scores.per_step(gone) @ self.value_norm[gone])
        self.kept[gone] = False

    def outcome(self, case: str, share: float) -> Outcome:
        error, output, true_sum, accounted = torch.cat(self._measured, dim=1)
        relative = error / output
        return Outcome(
            case=case,
            policy=self.policy.name,
            share=share,
            guard=self.policy.value_guard,
            dropped=self.dropped,
            spared=int((self.spared & self.kept).sum()),
            total=float(error.norm() / output.norm()),
            mean=float(relative.mean()),
            worst=float(relative.max()),
            accounted=float(accounted.mean()),
            true_sum=float(true_sum.mean()),
            error=float(error.mean()),
            over_accounted=float((error > 2 * accounted).double().mean()),
            over_true=float((error > 2 * true_sum).double().mean()),
        )


def attention(layer: Layer, steps: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [heads, steps, tokens] of the queries ``steps`` over all rows up to the
    last of them, and those rows' values [heads, tokens, channels]: float64."""
    shared_by = len(layer.queries) // len(layer.keys)
    keys, values = (
        rows[:, : steps.stop].double().repeat_interleave(shared_by, 0)
        for rows in (layer.keys, layer.values)
    )
    queries = layer.queries[:, steps.start : steps.stop].double()
    reading, read = torch.tensor(steps)[:, None], torch.arange(steps.stop)
    hidden = read > reading
    if layer.window is not None:
        hidden |= read <= reading - layer.window
    logits = queries @ keys.transpose(1, 2) * layer.scale
    return logits.masked_fill(hidden, -torch.inf).softmax(-1), values


def value_norms(layers: Sequence[Layer]) -> np.ndarray:
    """Of each token, mean over layers and heads: float32 [tokens]."""
    norms = [layer.values.norm(dim=-1).mean(0) for layer in layers]
    return torch.stack(norms).mean(0).numpy()


def loud(layers: Sequence[Layer]) -> list[Layer]:
    """``layers`` with the values of a few generated rows many times as large."""
    chance = torch.Generator().manual_seed(0)
    rows = PROMPT + torch.randperm(TOKENS - PROMPT, generator=chance)
    factor = torch.ones(TOKENS, 1)
    factor[rows[: round(LOUD_SHARE * len(rows))]] = LOUD
    return [replace(layer, values=layer.values * factor) for layer in layers]


def requests(share: float, value_norm: np.ndarray) -> list[Request]:
    return [
        Request(policy, value_norm)
        for guard in (False, True)
        for policy in (
            Hierarchy(evict_ratio=share, value_guard=guard),
            Random(budget=1 - share, value_guard=guard),
        )
    ]


def measure(
    case: str, layers: Sequence[Layer], advance: Callable[[], None]
) -> list[Outcome]:
    """``advance`` is called after each layer of each block of steps."""
    value_norm = value_norms(layers)
    running = [(share, r) for share in SHARES for r in requests(share, value_norm)]
    for start in range(PROMPT, TOKENS, STEPS):
        steps = range(start, start + STEPS)
        weights = [torch.zeros(STEPS, steps.stop, dtype=torch.float64) for _ in running]
        for layer in layers:
            exact, values = attention(layer, steps)
            output = exact @ values
            for total, (_, request) in zip(weights, running, strict=True):
                total += request.attend(exact, values, output)
            advance()
        for total, (_, request) in zip(weights, running, strict=True):
            request.score(total / len(layers))
            request.look(steps.stop)
    return [request.outcome(case, share) for share, request in running]


def lines(outcomes: Sequence[Outcome]) -> list[tuple[str, Outcome]]:
    """The outcomes by policy and share, each with how the guard was."""
    found: dict[tuple[str, float], dict[bool, Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda o: (o.policy, o.share)):
        both = found.setdefault((outcome.policy, outcome.share), {})
        both[outcome.guard] = outcome
    shown = []
    for both in found.values():
        if replace(both[False], guard=True) == both[True]:
            shown.append(("both", both[True]))
        else:
            shown += [("off", both[False]), ("on", both[True])]
    return shown


def errors(case: str, outcomes: Sequence[Outcome]) -> Table:
    return _table(
        f"1. {case}: error of attention",
        outcomes,
        {
            "rows dropped": lambda o: f"{o.dropped}",
            "spared": lambda o: f"{o.spared}",
            "total": lambda o: f"{o.total:.4f}",
            "mean": lambda o: f"{o.mean:.4f}",
            "worst": lambda o: f"{o.worst:.2f}",
        },
    )


def bounds(case: str, outcomes: Sequence[Outcome]) -> Table:
    return _table(
        f"2. {case}: error bound",
        outcomes,
        {
            "accounted": lambda o: f"{o.accounted:.3f}",
            "true": lambda o: f"{o.true_sum:.3f}",
            "error": lambda o: f"{o.error:.3f}",
            "over accounted": lambda o: f"{o.over_accounted:.1%}",
            "over true": lambda o: f"{o.over_true:.1%}",
        },
    )


def _table(
    title: str,
    outcomes: Sequence[Outcome],
    columns: Mapping[str, Callable[[Outcome], str]],
) -> Table:
    table = Table("policy", title=title)
    for name in ("drop", "guard", *columns):
        table.add_column(name, justify="right")
    for guard, outcome in lines(outcomes):
        cells = (cell(outcome) for cell in columns.values())
        table.add_row(outcome.policy, f"{outcome.share:.0%}", guard, *cells)
    return table


def run(console: Console) -> int:
    found: list[Outcome] = []
    for model in (demo_model(), second_model()):
        with console.status(f"{model.name}: reading the text"):
            layers = capture(model)
        for case, rows in (
            (model.name, layers),
            (f"{model.name}, {LOUD_SHARE:.0%} of the values x{LOUD:g}", loud(layers)),
        ):
            norm = value_norms(rows)[PROMPT:]
            console.print(
                f"{case}: {outliers(norm).sum()} of {len(norm)} generated rows have an "
                "outlying value norm. The largest norm is "
                f"{norm.max() / np.median(norm):.2f} times the median.",
                soft_wrap=True,
            )
            columns = ("steps", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, console=console) as progress:
                blocks = len(range(PROMPT, TOKENS, STEPS))
                task = progress.add_task("", total=blocks * len(rows))
                outcomes = measure(case, rows, partial(progress.advance, task))
            console.print(errors(case, outcomes), bounds(case, outcomes))
            found += outcomes
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "result.json").write_bytes(
        orjson.dumps([asdict(o) for o in found], option=orjson.OPT_INDENT_2)
    )
    console.print(f"Wrote {OUT}/result.json.")
    return 0


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m bench.guard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
