"""Page size 1, small chunks, overlap scheduling: one server, loads of 1, 2, 4 and 8
times its T0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import (
    Moves,
    assert_empties,
    assert_tiers_were_used,
    run_two_turns,
)
from tests.e2e.conftest import TINY
from tests.e2e.reference import Reference
from tests.e2e.servers import ServerUnderTest, Tiers
from tests.e2e.workloads import demand, first_turn

pytestmark = pytest.mark.server

TIERS = Tiers(t0=1000, window=8000)
FLAGS = ("--page-size", "1", "--chunked-prefill-size", "64")
# Requests whose demand is the divisor times T0.
LOADS = {1: 3, 2: 6, 4: 12, 8: 24}


@pytest.fixture(scope="module")
def server(tiny_model: Path, log_folder: Path) -> Iterator[ServerUnderTest]:
    log = log_folder / "page1.log"
    flags = TIERS.flags((*TINY, *FLAGS))
    with ServerUnderTest(tiny_model, flags, log, TIERS.environment) as server:
        yield server


@pytest.mark.parametrize("divisor", LOADS)
def test_two_turns_with_aborts_are_identical(
    server: ServerUnderTest, reference: Reference, divisor: int
) -> None:
    asks = first_turn(divisor, LOADS[divisor], 280)
    assert demand(asks) == pytest.approx(divisor * TIERS.t0, rel=0.1)
    before = Moves(server)
    run_two_turns(server, reference, asks, 80)
    assert_empties(server)
    moves = before.since()
    if divisor >= 4:
        assert_tiers_were_used(moves)
