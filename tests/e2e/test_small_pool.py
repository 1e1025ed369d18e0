"""T0 of 271 tokens and a window of 1,536, started with `sglang serve`: requests near,
at and above what the server can hold, and one kind that it refuses."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import (
    assert_empties,
    assert_hooks_were_called,
    assert_identical,
    assert_sound,
    run_identical,
)
from tests.e2e.client import Ask, send
from tests.e2e.conftest import TINY
from tests.e2e.reference import Reference
from tests.e2e.servers import ServerUnderTest, Tiers
from tests.e2e.workloads import first_turn, tokens

pytestmark = pytest.mark.server

TIERS = Tiers(t0=271, window=1536)
LONGEST = TIERS.t0 + TIERS.window - 1
PROMPT = tokens(random.Random(271), 1600)
SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")


@pytest.fixture(scope="module")
def server(tiny_model: Path, log_folder: Path) -> Iterator[ServerUnderTest]:
    flags = TIERS.flags((*TINY, "--page-size", "1"))
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
