"""Ratio mode: rows leave T0 although there is room for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import Moves, assert_empties, run_identical
from tests.e2e.conftest import TINY
from tests.e2e.reference import Reference
from tests.e2e.servers import ServerUnderTest, Tiers
from tests.e2e.workloads import demand, first_turn

pytestmark = pytest.mark.server

TIERS = Tiers(t0=4000, window=2000)
FLAGS = (
    *("--tiered-mode", "ratio"),
    *("--tiered-hbm-ratio", "0.3"),
    *("--tiered-retier-interval", "16"),
)


@pytest.fixture(scope="module")
def server(tiny_model: Path, log_folder: Path) -> Iterator[ServerUnderTest]:
    log = log_folder / "ratio_mode.log"
    flags = TIERS.flags((*TINY, *FLAGS))
    with ServerUnderTest(tiny_model, flags, log, TIERS.environment) as server:
        yield server


def test_rows_leave_t0_that_has_room(
    server: ServerUnderTest, reference: Reference
) -> None:
    asks = first_turn(30, 8, 200)
    assert demand(asks) < 0.8 * TIERS.t0
    before = Moves(server)
    run_identical(server, reference, asks)
    moves = before.since()
    assert moves["requests streamed=yes"] == len(asks)
    assert moves["demoted_tokens"] > 0
    assert server.tier("t0_peak_tokens") < TIERS.t0
    assert_empties(server)
