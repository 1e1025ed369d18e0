"""Page size 16, mixed chunks, no overlap scheduling, ratio mode, one retraction in 20
steps, started with `sglang-tiered serve`."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import (
    Moves,
    Record,
    ask_one,
    asking,
    assert_empties,
    assert_hooks_were_called,
    assert_identical,
    on_their_way,
    record,
    rows_streamed,
    run_identical,
    run_sessions,
    run_two_turns,
)
from tests.e2e.client import Ask, go_on, pause
from tests.e2e.conftest import LAYERS, ROW_BYTES, TINY
from tests.e2e.reference import Reference
from tests.e2e.servers import ServerUnderTest, Tiers
from tests.e2e.workloads import first_turn, tokens

pytestmark = pytest.mark.server

PAGE = 16
KERNEL_PAGE = os.sysconf("SC_PAGESIZE")

# The two windows are a quarter of T0's device bytes.
TIERS = Tiers(t0=62 * PAGE, window=62 * PAGE)
FLAGS = (
    *("--page-size", str(PAGE)),
    *("--chunked-prefill-size", "128"),
    "--enable-mixed-chunk",
    "--disable-overlap-schedule",
    "--enable-streaming-session",
    *("--tiered-mode", "ratio"),
    *("--tiered-hbm-ratio", "0.3"),
    *("--tiered-retier-interval", str(PAGE)),
    *("--tiered-int8-gb", "0.02"),
    *("--tiered-request-compress", "0.5"),
    *("--tiered-request-evict", "0.9"),
)
SERVE = (str(Path(sys.executable).with_name("sglang-tiered")), "serve")
RETRACTIONS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}


@pytest.fixture(scope="module")
def server(tiny_model: Path, log_folder: Path) -> Iterator[ServerUnderTest]:
    log = log_folder / "page16.log"
    flags = TIERS.flags((*TINY, *FLAGS))
    environment = {**TIERS.environment, **RETRACTIONS}
    with ServerUnderTest(tiny_model, flags, log, environment, SERVE) as server:
        yield server


def page_floor(rows: int) -> int:
    return rows // PAGE * PAGE


def test_the_log_says_what_was_started(server: ServerUnderTest) -> None:
    [line] = [
        line
        for line in server.log.read_text(errors="replace").splitlines()
        if "Tiered KV cache: T0" in line
    ]
    t1 = page_floor(int(TIERS.host_gb * 2**30) // (LAYERS * ROW_BYTES))
    assert f"T0 {TIERS.t0} tokens" in line
    assert f"T1 {t1} tokens" in line
    assert f"window {TIERS.window} tokens" in line
    assert "mode ratio" in line
    assert "policy Hierarchy(hbm_ratio=0.3" in line


def test_two_turns_with_aborts_are_identical(
    server: ServerUnderTest, reference: Reference
) -> None:
    with rows_streamed(server):
        run_two_turns(server, reference, first_turn(16, 12, 200), 60)
    assert_empties(server)


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.7])
def test_any_ratio_is_identical(
    server: ServerUnderTest, reference: Reference, ratio: float
) -> None:
    asks = asking(first_turn(19, 5, 150), policy="hierarchy", hbm_ratio=ratio)
    with rows_streamed(server):
        run_two_turns(server, reference, asks, 30)
    assert_empties(server)


def test_parked_requests_resume_and_recompute_at_most_a_page(
    server: ServerUnderTest, reference: Reference, record_property: Record
) -> None:
    moves, before = Moves(server), server.counters()
    run_identical(server, reference, first_turn(17, 8, 160))
    assert_empties(server)
    moved, counters = moves.since(), server.counters() - before
    recomputed = {"recomputed per resume": counters.recomputed_per_resume}
    record(record_property, {**moved, **recomputed})
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


def test_no_inexact_row_of_a_retracted_request_is_reused(
    server: ServerUnderTest, reference: Reference
) -> None:
    """Two samples of a lossy request, beside exact ones, are retracted once rows of
    theirs have been dropped. All forced retractions take the request that has the
    fewest tokens, so the other sample goes on long enough to lose rows again."""
    rng = random.Random(18)
    tiered = {"policy": "streaming", "budget": 0.3}
    lossy = Ask(tokens(rng, 50), 300, n=2, tiered=tiered)
    exact = first_turn(18, 4, 240)
    moves, dropped = Moves(server), server.tier("dropped_tokens_total")
    with on_their_way(
        server,
        [lossy, *exact],
        lambda metrics: metrics.total("sglang_tiered:dropped_tokens_total") > dropped,
        "no row is dropped",
    ) as outcomes:
        pause(server.url)
        go_on(server.url)
    outcome, *others = outcomes.result()
    assert_identical(reference, exact, others)
    assert outcome.error is None
    assert moves.since()["parked"] >= lossy.n + len(exact)
    samples = list(zip(outcome.samples, outcome.reports, strict=True))
    # The one that is inexact from the lowest position on.
    output, report = min(samples, key=lambda sample: sample[1]["exact_rows"])
    assert report["inexact"]
    answered = (*lossy.prompt, *output)
    again = Ask((*answered, *tokens(rng, 20)), 60)
    second = ask_one(server, again)
    # Another sample's rows serve as well, as far as it says the same.
    expected = max(
        page_floor(min(common(answered, (*lossy.prompt, *said)), of["exact_rows"]))
        for said, of in samples
    )
    assert second.cached_tokens == expected < page_floor(len(answered))
    assert_identical(reference, [again], [second])
    assert_empties(server)


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The length of the prefix that both have."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one)
    )


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
