"""The proof that the other tests can fail: with the window fill skipped, attention
reads what is left in the window, and every request that streams must differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import Moves
from tests.e2e.client import send
from tests.e2e.conftest import TINY
from tests.e2e.reference import Reference
from tests.e2e.servers import ServerUnderTest, Tiers
from tests.e2e.workloads import first_turn

pytestmark = pytest.mark.server

# No poison: its NaN would fail the request and not only change it.
TIERS = Tiers(t0=500, window=4000, switches=("skip-fill",))


@pytest.fixture(scope="module")
def server(tiny_model: Path, log_folder: Path) -> Iterator[ServerUnderTest]:
    log = log_folder / "negative_control.log"
    flags = TIERS.flags(TINY)
    with ServerUnderTest(tiny_model, flags, log, TIERS.environment) as server:
        yield server


def test_without_fills_every_request_that_streams_differs(
    server: ServerUnderTest, reference: Reference
) -> None:
    asks = first_turn(5, 8, 240)
    before = Moves(server)
    outcomes = send(server.url, asks)
    assert [len(o.tokens) for o in outcomes] == [ask.new_tokens for ask in asks]
    assert before.since()["requests streamed=yes"] == len(asks)
    assert len(reference.differences(asks, outcomes)) == len(asks)
