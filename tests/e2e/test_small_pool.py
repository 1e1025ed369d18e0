"""T0 of 271 tokens and a window of 1,536, four requests at a time, started with
`sglang serve`: requests near, at and above what the server can hold, one kind that it
refuses, and running requests that must make way."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.checks import (
    Moves,
    assert_empties,
    assert_hooks_were_called,
    assert_identical,
    assert_sound,
    run_identical,
    under_way,
)
from tests.e2e.client import Ask, go_on, pause, send
from tests.e2e.conftest import TINY
from tests.e2e.reference import Reference
from tests.e2e.servers import ServerUnderTest, Tiers
from tests.e2e.workloads import first_turn, tokens

pytestmark = pytest.mark.server

TIERS = Tiers(t0=271, window=1536)
RUNNING = 4
FLAGS = (
    *("--page-size", "1"),
    *("--max-running-requests", str(RUNNING)),
    "--enable-priority-scheduling",
)
LONGEST = TIERS.t0 + TIERS.window - 1
PROMPT = tokens(random.Random(271), 1600)
SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")


@pytest.fixture(scope="module")
def server(tiny_model: Path, log_folder: Path) -> Iterator[ServerUnderTest]:
    flags = TIERS.flags((*TINY, *FLAGS))
    log = log_folder / "small_pool.log"
    with ServerUnderTest(
        tiny_model, flags, log, TIERS.environment, launcher=SERVE
    ) as server:
        yield server


def test_a_prompt_of_1600_tokens_is_identical(
    server: ServerUnderTest, reference: Reference
) -> None:
    run_identical(server, reference, [Ask(PROMPT, 100)])
    assert_empties(server)


def test_a_request_that_can_never_fit_is_told_the_numbers(
    server: ServerUnderTest, reference: Reference
) -> None:
    """vllm#52530: it ends at once and alone, others go on."""
    too_large = Ask(tokens(random.Random(3), LONGEST + 1), 10)
    others = first_turn(3, 4, 120)
    told, *outcomes = send(server.url, [too_large, *others])
    assert_identical(reference, others, outcomes)
    for number in (len(too_large.prompt), LONGEST, TIERS.t0, TIERS.window):
        assert str(number) in (told.error or "")
    assert_sound(server)


def test_a_request_that_fills_the_pool_ends_with_a_reason(
    server: ServerUnderTest, reference: Reference
) -> None:
    """sglang#19881: alone, with more output than there is room for."""
    [outcome] = send(server.url, [Ask(PROMPT, 1000)])
    room = LONGEST - len(PROMPT)
    assert outcome.finish == "length"
    assert_identical(reference, [Ask(PROMPT, room)], [outcome])
    run_identical(server, reference, first_turn(4, 4, 60))
    assert_empties(server)


def test_who_makes_way_for_a_higher_priority_resumes_identically(
    server: ServerUnderTest, reference: Reference
) -> None:
    """No place is free, so SGLang preempts one request: it is parked and goes on."""
    before = Moves(server)
    urgent = [dataclasses.replace(ask, priority=1) for ask in first_turn(7, 1, 40)]
    with under_way(server, reference, first_turn(6, RUNNING, 200)):
        run_identical(server, reference, urgent)
    moves = before.since()
    assert moves["parked"] == moves["resumed"] == 1
    assert_empties(server)


def park_everybody(
    server: ServerUnderTest, reference: Reference, asks: Sequence[Ask]
) -> None:
    """`/pause_generation` with retraction parks every one of `RUNNING` requests; they
    go on identically."""
    before = Moves(server)
    with under_way(server, reference, asks):
        pause(server.url)
        server.settle(
            lambda metrics: metrics.total("sglang_tiered:parked_requests") == RUNNING,
            "the paused server has not parked every request",
        )
        go_on(server.url)
    moves = before.since()
    assert moves["parked"] == moves["resumed"] == RUNNING


def test_requests_of_a_paused_server_resume_identically(
    server: ServerUnderTest, reference: Reference
) -> None:
    park_everybody(server, reference, first_turn(8, RUNNING, 200))
    assert_empties(server)


def steps_alone(server: ServerUnderTest, reference: Reference, seed: int) -> float:
    """Decode steps of one request that fits T0; asserts that it streams nothing and
    that nobody is retracted."""
    server.rest()
    moves, before = Moves(server), server.counters()
    run_identical(server, reference, [Ask(tokens(random.Random(seed), 60), 100)])
    server.rest()
    moved = moves.since()
    assert moved["streamed_tokens"] == moved["parked"] == moved["retracted"] == 0
    return (server.counters() - before).decode_steps


def test_the_cost_of_a_retraction_goes_with_the_pressure(
    server: ServerUnderTest, reference: Reference
) -> None:
    """sglang#26248: one retraction, and throughput stayed low for good."""
    server.flush_cache()
    before = steps_alone(server, reference, 26248)
    park_everybody(server, reference, first_turn(9, RUNNING, 200))
    assert steps_alone(server, reference, 26249) == before > 0


def test_a_beam_request_is_refused(
    server: ServerUnderTest, reference: Reference
) -> None:
    ask = Ask(PROMPT[:20], 10, sampling={"beam_width": 2})
    [outcome] = send(server.url, [ask])
    assert "Beam search is not supported" in (outcome.error or "")
    run_identical(server, reference, first_turn(5, 2, 40))
    assert_empties(server)
    assert_hooks_were_called(
        server, ["sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init"]
    )
