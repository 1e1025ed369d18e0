"""Page size 16, mixed chunks, no overlap scheduling, one retraction in 20 steps, every
allocation audited."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import (
    Moves,
    assert_empties,
    assert_hooks_were_called,
    run_identical,
    run_sessions,
    run_two_turns,
)
from tests.e2e.conftest import TINY
from tests.e2e.reference import Reference
from tests.e2e.servers import ServerUnderTest, Tiers
from tests.e2e.workloads import first_turn
from tests.tiny_model import HEAD_DIM, NUM_KV_HEADS

pytestmark = pytest.mark.server

PAGE = 16
LAYERS = 8
# K and V of one token in one layer, float32.
ROW_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 4
KERNEL_PAGE = os.sysconf("SC_PAGESIZE")

# The two windows are a quarter of T0's device bytes.
TIERS = Tiers(t0=62 * PAGE, window=62 * PAGE, switches=("poison", "audit"))
FLAGS = (
    *("--page-size", str(PAGE)),
    *("--chunked-prefill-size", "128"),
    "--enable-mixed-chunk",
    "--disable-overlap-schedule",
    "--enable-streaming-session",
)
RETRACTIONS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}


@pytest.fixture(scope="module")
def server(tiny_model: Path, log_folder: Path) -> Iterator[ServerUnderTest]:
    log = log_folder / "page16.log"
    flags = TIERS.flags((*TINY, *FLAGS))
    environment = {**TIERS.environment, **RETRACTIONS}
    with ServerUnderTest(tiny_model, flags, log, environment) as server:
        yield server


def test_two_turns_with_aborts_are_identical(
    server: ServerUnderTest, reference: Reference
) -> None:
    run_two_turns(server, reference, first_turn(16, 12, 200), 60)
    assert_empties(server)


def test_parked_requests_resume_and_recompute_at_most_a_page(
    server: ServerUnderTest, reference: Reference
) -> None:
    moves, before = Moves(server), server.counters()
    run_identical(server, reference, first_turn(17, 8, 160))
    assert_empties(server)
    moved, counters = moves.since(), server.counters() - before
    print(moved, counters)
    assert moved["retracted"] > 0
    assert moved["parked"] == moved["resumed"] == moved["retracted"]
    assert counters.recomputed_per_resume <= PAGE


def test_retracted_sessions_are_identical(
    server: ServerUnderTest, reference: Reference
) -> None:
    """A session keeps its rows through a retraction, and its next turn finds them."""
    before = Moves(server)
    run_sessions(server, reference)
    assert before.since()["retracted"] > 0
    assert_empties(server)


def test_device_bytes_are_t0_and_two_windows(server: ServerUnderTest) -> None:
    """sglang#5372; counted by the kernel, after loads that touched every row."""
    rows = TIERS.t0 * LAYERS + 2 * TIERS.window
    mapped = server.mapped_bytes("sglang-tiered-")
    # The padding page, and each of 2 x (layers + 2) mappings ends in its own page.
    rounding = 2 * (LAYERS + 2) * KERNEL_PAGE + LAYERS * PAGE * ROW_BYTES
    assert rows * ROW_BYTES <= mapped <= rows * ROW_BYTES + rounding


def test_the_retraction_hook_was_called(server: ServerUnderTest) -> None:
    """sglang#28882"""
    assert_hooks_were_called(server, ["sglang.srt.managers.schedule_batch.release_req"])
