"""What must hold after every load on a tiered server."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from bench.server import Counters, Metrics
from tests.e2e.client import Ask, Outcome, close_session, open_session, send
from tests.e2e.reference import Reference
from tests.e2e.servers import ServerUnderTest
from tests.e2e.workloads import next_turn, tokens, with_aborts

# Of requests only: an idle server has none.
OWNED = (
    "private_tokens",
    "window_used_tokens",
    "t2_used_tokens",
    "parked_requests",
)
USED = ("t0_used_tokens", "t1_used_tokens", "clean_tokens", *OWNED)
MOVED = ("demoted_tokens", "clean_demoted_tokens", "promoted_tokens", "streamed_tokens")

# pytest's `record_property`.
Record = Callable[[str, object], None]


def asking(asks: Sequence[Ask], **tiered: Any) -> list[Ask]:
    """The requests, each with its own policy."""
    return [dataclasses.replace(ask, tiered=tiered) for ask in asks]


def ask_one(server: ServerUnderTest, ask: Ask) -> Outcome:
    (outcome,) = send(server.url, [ask])
    assert outcome.error is None, outcome.error
    return outcome


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


@contextmanager
def on_their_way(
    server: ServerUnderTest,
    asks: Sequence[Ask],
    told: Callable[[Metrics], bool],
    what: str,
) -> Iterator[Future[list[Outcome]]]:
    """The block begins when the server that works on the requests says `told`, else
    fails with `what`; after it, the outcomes are there."""
    with ThreadPoolExecutor(1) as thread:
        outcomes = thread.submit(send, server.url, asks)
        server.settle(told, what)
        yield outcomes


@contextmanager
def under_way(
    server: ServerUnderTest, reference: Reference, asks: Sequence[Ask]
) -> Iterator[None]:
    """The block runs while the server decodes the requests; after it, asserts that all
    of them are identical."""
    # Some steps, or the first of them could be running alone.
    enough = server.counters().decode_tokens + 10 * len(asks)
    with on_their_way(
        server,
        asks,
        lambda metrics: Counters.read(metrics).decode_tokens > enough,
        "the server does not decode",
    ) as outcomes:
        yield
    assert_identical(reference, asks, outcomes.result())


@contextmanager
def rows_streamed(server: ServerUnderTest) -> Iterator[None]:
    """Asserts that rows pass through the window while the block runs."""
    server.rest()
    before = Moves(server)
    yield
    server.rest()
    assert before.since()["streamed_tokens"] > 0


def assert_hooks_were_called(server: ServerUnderTest, names: Sequence[str]) -> None:
    """Each of these functions of SGLang ran through our hook in the scheduler."""
    metrics = server.metrics()
    calls = {
        name: metrics.total("sglang_tiered:hook_calls", hook=name) for name in names
    }
    assert all(calls.values()), calls


def assert_empties(server: ServerUnderTest) -> None:
    """An idle server keeps no row but the tree's; after /flush_cache no tier holds any,
    and no check has complained."""
    # Before the flush, which would clear what has leaked too.
    server.settle(lambda metrics: _none(metrics, OWNED), "requests left rows behind")
    server.flush_cache()
    server.settle(
        lambda metrics: _none(metrics, USED), "rows are left after flush_cache"
    )
    assert_sound(server)


def _none(metrics: Metrics, names: Sequence[str]) -> bool:
    return not any(metrics.total(f"sglang_tiered:{name}") for name in names)


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


def record(record_property: Record, counters: Mapping[str, float]) -> None:
    """Have the counters of a passed test shown at the end of the run."""
    for name, value in counters.items():
        record_property(name, f"{value:.10g}")


def assert_tiers_were_used(moves: Mapping[str, float]) -> None:
    """Rows went through every path, and nearly every request read streamed rows."""
    assert all(moves[name] > 0 for name in MOVED), moves
    yes, no = moves["requests streamed=yes"], moves["requests streamed=no"]
    assert yes >= 0.9 * (yes + no), moves
