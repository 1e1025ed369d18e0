"""What must hold after every load on a tiered server."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from bench.server import Metrics
from tests.e2e.client import Ask, Outcome, close_session, open_session, send
from tests.e2e.reference import Reference
from tests.e2e.servers import ServerUnderTest
from tests.e2e.workloads import next_turn, tokens, with_aborts

USED = (
    "t0_used_tokens",
    "t1_used_tokens",
    "t2_used_tokens",
    "window_used_tokens",
    "clean_tokens",
)
MOVED = ("demoted_tokens", "clean_demoted_tokens", "promoted_tokens", "streamed_tokens")


def assert_identical(
    reference: Reference, asks: Sequence[Ask], outcomes: Sequence[Outcome]
) -> None:
    """Every request, and what the abandoned ones got until then, is the stock
    server's token for token."""
    differences = reference.differences(asks, outcomes)
    assert not differences, f"{len(differences)} of {len(asks)}: {differences}"


def run_identical(
    server: ServerUnderTest, reference: Reference, asks: Sequence[Ask]
) -> list[Outcome]:
    """Send the requests and assert that all are identical; their outcomes."""
    outcomes = send(server.url, asks)
    assert_identical(reference, asks, outcomes)
    return outcomes


def run_two_turns(
    server: ServerUnderTest,
    reference: Reference,
    asks: Sequence[Ask],
    second_turn_tokens: int,
    earliest: int = 1,
) -> None:
    """Two turns of the same conversations, a fifth of each turn's requests going away
    after `earliest` tokens or more; asserts that all others are identical."""
    run_identical(server, reference, with_aborts(0, asks, earliest))
    turn = next_turn(1, asks, reference.answers(asks), second_turn_tokens)
    run_identical(server, reference, with_aborts(2, turn, earliest))


def run_sessions(
    server: ServerUnderTest,
    reference: Reference,
    sessions: int = 4,
    turns: int = 4,
    added: int = 40,
    new_tokens: int = 60,
) -> None:
    """Streaming sessions side by side; asserts that every turn's answer is what a
    plain request with the whole history is answered."""
    rng = random.Random(sessions)
    ids = [open_session(server.url) for _ in range(sessions)]
    histories: list[tuple[int, ...]] = [()] * sessions
    for _ in range(turns):
        asks = [Ask(tokens(rng, added), new_tokens, session=i) for i in ids]
        outcomes = send(server.url, asks)
        whole = [
            dataclasses.replace(ask, prompt=(*history, *ask.prompt), session=None)
            for ask, history in zip(asks, histories, strict=True)
        ]
        assert_identical(reference, whole, outcomes)
        histories = [
            (*ask.prompt, *outcome.tokens)
            for ask, outcome in zip(whole, outcomes, strict=True)
        ]
    for session_id in ids:
        close_session(server.url, session_id)


def assert_hooks_were_called(server: ServerUnderTest, names: Sequence[str]) -> None:
    """Each of these functions of SGLang ran through our hook in the scheduler."""
    metrics = server.metrics()
    calls = {
        name: metrics.total("sglang_tiered:hook_calls", hook=name) for name in names
    }
    assert all(calls.values()), calls


def assert_empties(server: ServerUnderTest) -> None:
    """Nobody holds a row of their own any more; after /flush_cache no tier holds any,
    and no check has complained."""
    server.settle(
        lambda metrics: not metrics.total("sglang_tiered:private_tokens"),
        "requests left rows behind",
    )
    server.flush_cache()

    def empty(metrics: Metrics) -> bool:
        return not any(metrics.total(f"sglang_tiered:{name}") for name in USED)

    server.settle(empty, "rows are left after flush_cache")
    assert not server.tier("parked_requests")
    assert_sound(server)


def assert_sound(server: ServerUnderTest) -> None:
    """The server is alive and its log is clean: SGLang's strict checks kill it."""
    assert server.alive, f"the server died; see {server.log}"
    assert not server.faults()


class Moves:
    """What a server has moved between `Moves(server)` and `since()`; tokens."""

    def __init__(self, server: ServerUnderTest) -> None:
        self._server = server
        self._before = self._read()

    def since(self) -> dict[str, float]:
        now = self._read()
        return {name: now[name] - self._before[name] for name in now}

    def _read(self) -> dict[str, float]:
        metrics = self._server.metrics()
        read = {m: metrics.total(f"sglang_tiered:{m}_total") for m in MOVED}
        for streamed in ("yes", "no"):
            read[f"requests streamed={streamed}"] = metrics.total(
                "sglang_tiered:requests_total", streamed=streamed
            )
        read["parked"] = metrics.total("sglang_tiered:requests_parked_total")
        read["resumed"] = metrics.total("sglang_tiered:requests_resumed_total")
        read["retracted"] = metrics.total("sglang:num_retracted_requests_total")
        return read


def assert_tiers_were_used(moves: dict[str, float]) -> None:
    """Rows went through every path, and nearly every request read streamed rows;
    prints the counters."""
    print(moves)
    assert all(moves[name] > 0 for name in MOVED), moves
    yes, no = moves["requests streamed=yes"], moves["requests streamed=no"]
    assert yes >= 0.9 * (yes + no), moves
