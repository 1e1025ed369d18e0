"""Fair repeats: the columns of a comparison take turns, and medians are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import orjson
from rich.console import Console
from rich.table import Table

from bench.server import Flags, Server

T = TypeVar("T")


@dataclass(frozen=True)
class Check:
    """One point of an acceptance: a measured number against its limit."""

    name: str
    value: float
    limit: float
    at_most: bool = False

    @property
    def passed(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def order(columns: Sequence[str], repeats: int) -> list[str]:
    """The column of each run: there and back in turns, so that drift cancels out."""
    return [
        column
        for turn in range(repeats)
        for column in (columns if turn % 2 == 0 else reversed(columns))
    ]


def measure(
    model: Path,
    columns: Sequence[str],
    repeats: int,
    flags: Callable[[str, dict[str, list[T]]], Flags],
    run: Callable[[str, Server], T],
    logs: Path,
    console: Console,
) -> dict[str, list[T]]:
    """Run every column `repeats` times and return the results by column.

    There is one server at a time; a column that comes twice in a row keeps its server.
    `flags` gets the column and all results so far, when its server is about to start;
    `run` the column and the server.
    """
    results: dict[str, list[T]] = {column: [] for column in columns}
    for column, runs in groupby(order(columns, repeats)):
        log = logs / f"{column.replace(' ', '-')}.log"
        with (
            console.status(f"{column}: the server is starting") as status,
            Server(model, flags(column, results), log) as server,
        ):
            for _ in runs:
                number = len(results[column]) + 1
                status.update(f"{column}: run {number} of {repeats}")
                results[column].append(run(column, server))
                console.print(f"{column}: run {number} of {repeats} done")
    return results


def median_of(runs: Sequence[T], number: Callable[[T], float]) -> float:
    return median(number(run) for run in runs)


def conclude(
    results: dict[str, list[T]],
    rows: Mapping[str, Callable[[T], float]],
    checks: Sequence[Check],
    about: Mapping[str, Any],
    out: Path,
    console: Console,
) -> int:
    """Print medians and verdicts, write `result.json` to `out`; return the exit code.

    `rows` says for each row of the table what to read from a run.
    """
    table = Table("", title="Medians")
    for column in results:
        table.add_column(column, justify="right")
    for name, number in rows.items():
        medians = (median_of(runs, number) for runs in results.values())
        table.add_row(name, *(f"{value:,.2f}" for value in medians))
    console.print(table)
    for check in checks:
        verdict = "[green]PASS[/]" if check.passed else "[red]FAIL[/]"
        relation = "at most" if check.at_most else "at least"
        console.print(
            f"{verdict}  {check.name}: {check.value:.3f} ({relation} {check.limit:.3f})"
        )
    result = {
        **about,
        "runs": {
            column: [
                {name: number(run) for name, number in rows.items()} for run in runs
            ]
            for column, runs in results.items()
        },
        "checks": [asdict(check) | {"passed": check.passed} for check in checks],
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    console.print(f"Wrote {out}/result.json.")
    return 0 if all(check.passed for check in checks) else 1
