"""The full product: 16 requests of 1,000 tokens on every combination of T0's share of
the demand, page size and overlap scheduling, with chunked and mixed prefill, two turns
and a fifth of the requests going away. `make test-full` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.checks import (
    Moves,
    Record,
    assert_empties,
    assert_tiers_were_used,
    record,
    run_two_turns,
)
from tests.e2e.conftest import TINY
from tests.e2e.reference import Reference
from tests.e2e.servers import ServerUnderTest, Tiers
from tests.e2e.workloads import demand, first_turn

pytestmark = [pytest.mark.full, pytest.mark.server]

SHARES = (1.0, 0.5, 0.25, 0.12)
OVERLAP = ("overlap", "no-overlap")
PAGES = (1, 16)
MODES = ("pressure", "ratio")
# Every second one in ratio mode, so that each value of each axis meets both modes.
CELLS = [
    (share, overlap, page, MODES[(i + j + k) % 2])
    for i, share in enumerate(SHARES)
    for j, overlap in enumerate(OVERLAP)
    for k, page in enumerate(PAGES)
]
# The first to go away has streamed by then at every T0 below the demand.
EARLIEST = 150


@pytest.mark.parametrize(("share", "overlap", "page_size", "mode"), CELLS)
def test_two_turns_with_aborts_are_identical(
    tiny_model: Path,
    log_folder: Path,
    reference: Reference,
    record_property: Record,
    share: float,
    overlap: str,
    page_size: int,
    mode: str,
) -> None:
    asks = first_turn(1000, 16, 1000, shortest=1000)
    tiers = Tiers(t0=int(share * demand(asks)), window=demand(asks))
    flags = [*TINY, "--page-size", str(page_size)]
    flags += ["--chunked-prefill-size", "128", "--enable-mixed-chunk"]
    flags += ["--tiered-mode", mode]
    if mode == "ratio":
        flags += ["--tiered-hbm-ratio", "0.3"]
    if overlap == "no-overlap":
        flags.append("--disable-overlap-schedule")
    log = log_folder / f"full-{share}-{overlap}-{page_size}.log"
    with ServerUnderTest(
        tiny_model, tiers.flags(flags), log, tiers.environment
    ) as server:
        before = Moves(server)
        run_two_turns(server, reference, asks, 200, earliest=EARLIEST)
        assert_empties(server)
        moves = before.since()
        record(record_property, moves)
        if share <= 0.25:
            assert_tiers_were_used(moves)
