"""Page size 1, small chunks, overlap scheduling: one server, loads of 1, 2, 4 and 8
times its T0, and every kind of request."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.server import Metrics
from sglang_tiered.sglang.hooks import HOOKS
from tests.e2e.checks import (
    Moves,
    Record,
    assert_empties,
    assert_hooks_were_called,
    assert_identical,
    assert_sound,
    assert_tiers_were_used,
    record,
    rows_streamed,
    run_identical,
    run_sessions,
    run_two_turns,
)
from tests.e2e.client import Ask, send
from tests.e2e.conftest import LAYERS, ROW_BYTES, TINY
from tests.e2e.reference import Reference
from tests.e2e.servers import ServerUnderTest, Tiers
from tests.e2e.workloads import demand, first_turn

pytestmark = pytest.mark.server

# A window for all requests of the largest load at once, and a T1 that is hardly larger:
# the audit of every allocation reads its tables.
TIERS = Tiers(t0=1000, window=12_000, host_gb=0.03)
FLAGS = (
    *("--page-size", "1"),
    *("--chunked-prefill-size", "64"),
    "--enable-streaming-session",
)
# Requests whose demand is the divisor times T0.
LOADS = {1: 3, 2: 6, 4: 12, 8: 24}
# Tokens before the first request goes away: at once, or when its rows have left T0.
EARLIEST = {1: 1, 2: 1, 4: 100, 8: 100}
# Called where there are no metrics, or in other files' tests.
CALLED_ELSEWHERE = (
    "ServerArgs.",
    "SamplingParams.",
    ".release_req",
    ".validate_and_init",
)


@pytest.fixture(scope="module")
def server(tiny_model: Path, log_folder: Path) -> Iterator[ServerUnderTest]:
    log = log_folder / "page1.log"
    flags = TIERS.flags((*TINY, *FLAGS))
    with ServerUnderTest(tiny_model, flags, log, TIERS.environment) as server:
        yield server


@pytest.fixture
def pressing() -> list[Ask]:
    """Requests that need twice T0 at once."""
    return first_turn(99, 10, 140)


@pytest.mark.parametrize("divisor", LOADS)
def test_two_turns_with_aborts_are_identical(
    server: ServerUnderTest,
    reference: Reference,
    divisor: int,
    record_property: Record,
) -> None:
    asks = first_turn(divisor, LOADS[divisor], 280)
    assert demand(asks) == pytest.approx(divisor * TIERS.t0, rel=0.1)
    before = Moves(server)
    run_two_turns(server, reference, asks, 160, earliest=EARLIEST[divisor])
    assert_empties(server)
    moves = before.since()
    record(record_property, moves)
    if divisor >= 4:
        assert_tiers_were_used(moves)


def test_logprobs_are_the_reference_s(
    server: ServerUnderTest, reference: Reference, pressing: list[Ask]
) -> None:
    asks = [dataclasses.replace(ask, logprobs=True) for ask in pressing]
    with rows_streamed(server):
        outcomes = run_identical(server, reference, asks)
    for outcome, right in zip(outcomes, reference.outcomes(asks), strict=True):
        expected = right.logprobs[: len(outcome.logprobs)]
        assert len(outcome.logprobs) == len(outcome.tokens)
        assert outcome.logprobs == pytest.approx(expected, abs=1e-5)


def test_streamed_answers_are_identical(
    server: ServerUnderTest, reference: Reference, pressing: list[Ask]
) -> None:
    asks = [dataclasses.replace(ask, stream=True) for ask in pressing]
    with rows_streamed(server):
        run_identical(server, reference, asks)


def test_every_sample_is_identical(
    server: ServerUnderTest, reference: Reference, pressing: list[Ask]
) -> None:
    asks = [dataclasses.replace(ask, n=3) for ask in pressing[:4]]
    with rows_streamed(server):
        outcomes = run_identical(server, reference, asks)
    assert [len(outcome.samples) for outcome in outcomes] == [3] * 4


def test_streaming_sessions_are_identical(
    server: ServerUnderTest, reference: Reference
) -> None:
    with rows_streamed(server):
        run_sessions(server, reference)
    assert_empties(server)


def test_flush_cache_empties_every_tier(
    server: ServerUnderTest, reference: Reference, pressing: list[Ask]
) -> None:
    run_identical(server, reference, pressing)
    server.settle(
        lambda metrics: metrics.total("sglang_tiered:t1_used_tokens") > 0,
        "the load left nothing in T1",
    )
    assert_empties(server)


def test_bytes_and_usage_follow_from_the_rows(
    server: ServerUnderTest, reference: Reference, pressing: list[Ask]
) -> None:
    """Every row of this server is exact, and all its copies are of whole rows."""
    run_identical(server, reference, pressing)
    server.rest()
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    exported = {line.partition("{")[0] for line in text.splitlines()}
    metrics = Metrics(text)

    def read(name: str) -> float:
        assert f"sglang_tiered:{name}" in exported
        return metrics.total(f"sglang_tiered:{name}")

    copied = read("demoted_tokens_total") - read("clean_demoted_tokens_total")
    token = LAYERS * ROW_BYTES
    assert read("demoted_bytes_total") == token * copied > 0
    assert read("promoted_bytes_total") == token * read("promoted_tokens_total")
    assert read("streamed_bytes_total") == token * read("streamed_tokens_total") > 0
    assert read("t0_usage") == read("t0_used_tokens") / TIERS.t0
    assert (read("fill_waits_total") > 0) == (read("fill_wait_seconds_total") > 0)


def test_nothing_leaks_after_64_requests(
    server: ServerUnderTest, reference: Reference
) -> None:
    """sglang#11970, sglang#20010: SGLang's strict check at idle kills the server."""
    with rows_streamed(server):
        run_identical(server, reference, first_turn(64, 64, 40))
    assert_empties(server)


def test_100_requests_32_at_a_time_are_identical(
    server: ServerUnderTest, reference: Reference
) -> None:
    """vllm#29781"""
    asks = first_turn(32, 100, 60)
    with rows_streamed(server):
        outcomes = send(server.url, asks, parallel=32)
    assert_identical(reference, asks, outcomes)


def test_ten_rounds_are_equal_to_the_first(
    server: ServerUnderTest, reference: Reference, pressing: list[Ask]
) -> None:
    """sglang#23020"""
    for _ in range(10):
        run_identical(server, reference, pressing)
    assert_sound(server)


def test_a_small_load_after_pressure_streams_nothing(
    server: ServerUnderTest, reference: Reference, pressing: list[Ask]
) -> None:
    """sglang#26248: the pressure goes, and its cost with it."""
    with rows_streamed(server):
        run_identical(server, reference, pressing)
    released = Moves(server)
    run_identical(server, reference, first_turn(26248, 2, 100))
    server.rest()
    assert released.since()["streamed_tokens"] == 0


def test_every_hook_was_called(server: ServerUnderTest) -> None:
    """sglang#28882"""
    assert_hooks_were_called(
        server,
        [
            hook.target
            for hook in HOOKS
            if not any(name in hook.target for name in CALLED_ELSEWHERE)
        ],
    )
