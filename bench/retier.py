"""One re-tier: how long a policy's plan for a long request takes.

Every policy plans 16,384 candidates (pages, which are tokens with the page size 1)
whose statistics are given, with settings that make it do all that it can. The last
row is a whole re-tier of such a request as the tier manager does it, once its pages are
where the policy wants them: find the candidates, describe them, plan, and move what
the next look moves (the copies themselves are not in it).

Passes if the median of each row is at most 2 ms.

Prints a table; exit code 0 if all pass, 1 if not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.table import Table

from sglang_tiered.memory.ledger import Ledger
from sglang_tiered.memory.manager import TierManager, TierRules
from sglang_tiered.memory.page_table import PageTable
from sglang_tiered.memory.places import Places
from sglang_tiered.memory.score_book import ScoreBook
from sglang_tiered.policy.base import Candidates
from sglang_tiered.policy.registry import POLICIES, make_policy

CANDIDATES = 16_384
LIMIT_MS = 2.0
WARM_UP = 5
REPEATS = 50

SETTINGS: Mapping[str, Mapping[str, object]] = {
    "full": {},
    "h2o": {"budget": 0.5},
    "hierarchy": {"hbm_ratio": 0.3, "compress_ratio": 0.2, "evict_ratio": 0.1},
    "random": {"budget": 0.5},
    "recency": {"hbm_ratio": 0.3},
    "rkv": {"budget": 0.5},
    "streaming": {"budget": 0.5},
}


def candidates() -> Candidates:
    """Half in T0, half in T1, with statistics as spread as real ones."""
    rng = np.random.default_rng(0)

    def positive() -> np.ndarray:
        return rng.lognormal(size=CANDIDATES).astype(np.float32)

    return Candidates(
        index=np.arange(100, 100 + CANDIDATES),
        tier=rng.integers(0, 2, CANDIDATES),
        lossy=np.zeros(CANDIDATES, dtype=bool),
        dropped=0,
        compressed=0,
        seed=0,
        score=positive(),
        steps=np.arange(CANDIDATES, 0, -1, dtype=np.float32),
        value_norm=positive(),
        redundancy=positive(),
    )


def median_ms(work: Callable[[], object]) -> float:
    """The median time of ``work``, in milliseconds."""
    times = []
    for _ in range(WARM_UP + REPEATS):
        start = perf_counter()
        work()
        times.append(1000 * (perf_counter() - start))
    return median(times[WARM_UP:])


class NoCopies:
    """A mover and row statistics without rows."""

    submitted_epoch = done_epoch = 1

    def demote(self, *pages: object) -> None: ...
    def promote(self, *pages: object) -> None: ...
    def compress(self, *pages: object) -> None: ...
    def begin_forward(self, *pages: object) -> int:
        return 1

    def end_forward(self) -> None: ...
    def value_norms(self, places: Places) -> np.ndarray:
        return np.ones(len(places), dtype=np.float32)

    def redundancy(self, places: Places) -> np.ndarray:
        return np.ones(len(places), dtype=np.float32)


def retier_ms() -> float:
    """The median time of a re-tier of one request among 100,000 virtual pages."""
    row, prompt = 1, 100
    rules = TierRules()
    tokens = prompt + rules.sink_tokens + CANDIDATES + rules.recent_window
    ledger = Ledger(
        t0_pages=tokens,
        host_pages=100_000 - tokens,
        window_pages=tokens,
        int8_pages=tokens,
        max_rows=2,
        page_size=1,
    )
    scores = ScoreBook(ledger.virtual.count + 1, 1)
    manager = TierManager(
        ledger=ledger,
        table=PageTable(ledger.virtual.count, 1),
        mover=NoCopies(),
        rules=rules,
        window_base=tokens + 1,
        scores=scores,
        statistics=NoCopies(),
    )
    pages = ledger.allocate(tokens, epoch=1)
    ledger.rows.length[row], ledger.rows.prompt[row] = tokens, prompt
    ledger.assign(pages, np.full(tokens, row), np.arange(tokens))
    scores.score[pages] = np.random.default_rng(0).lognormal(size=tokens)
    scores.steps[pages] = 1
    policy = make_policy("hierarchy", SETTINGS["hierarchy"])
    return median_ms(partial(manager.retier_request, row, policy))


def run(console: Console) -> int:
    """Measure, print, return the exit code."""
    pages = candidates()
    table = Table("policy", title=f"One plan of {CANDIDATES:,} candidates")
    table.add_column("ms, median", justify="right")
    table.add_column(f"at most {LIMIT_MS:g} ms")
    passed = True
    results = {
        name: median_ms(partial(make_policy(name, SETTINGS[name]).plan, pages))
        for name in POLICIES
    }
    results["hierarchy, all of a re-tier"] = retier_ms()
    for name, ms in results.items():
        table.add_row(name, f"{ms:.2f}", "PASS" if ms <= LIMIT_MS else "FAIL")
        passed = passed and ms <= LIMIT_MS
    console.print(table)
    return 0 if passed else 1


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m bench.retier",
        description="How long a policy's plan for a long request takes.",
    ).parse_args()
    return run(Console())


if __name__ == "__main__":
    sys.exit(main())
