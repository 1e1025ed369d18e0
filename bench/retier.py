"""One re-tier: how long a policy's plan for a long request takes.

Every policy plans 16,384 candidates (pages, which are tokens with the page size 1)
whose statistics are given, with settings that make it do all that it can.

Passes if the median of each policy is at most 2 ms.

Prints a table; exit code 0 if all pass, 1 if not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from statistics import median
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.table import Table

from sglang_tiered.policy.base import Candidates, Policy
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


def plan_ms(policy: Policy, pages: Candidates) -> float:
    """The median time of a plan, in milliseconds."""
    times = []
    for _ in range(WARM_UP + REPEATS):
        start = perf_counter()
        policy.plan(pages)
        times.append(1000 * (perf_counter() - start))
    return median(times[WARM_UP:])


def run(console: Console) -> int:
    """Measure, print, return the exit code."""
    pages = candidates()
    table = Table("policy", title=f"One plan of {CANDIDATES:,} candidates")
    table.add_column("ms, median", justify="right")
    table.add_column(f"at most {LIMIT_MS:g} ms")
    passed = True
    for name in POLICIES:
        ms = plan_ms(make_policy(name, SETTINGS[name]), pages)
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
