"""No other request ever reads a row that was rounded, or computed without one."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from serving import Server, scheduler_process
from sglang.srt.managers.schedule_batch import Req

from sglang_tiered.memory.manager import TierRules
from sglang_tiered.policy.hierarchy import Hierarchy
from sglang_tiered.policy.random import Random
from sglang_tiered.policy.streaming import Streaming

SINKS, RECENT, INTERVAL = 2, 4, 4
PROMPT = [1, 2, 3, 4, 5, 6]


@pytest.fixture(scope="module", autouse=True)
def process() -> Iterator[None]:
    with scheduler_process():
        yield


@pytest.fixture
def make_server() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(policy: Any, page_size: int = 1) -> Server:
        rules = TierRules(
            sink_tokens=SINKS, recent_window=RECENT, retier_interval=INTERVAL
        )
        sizes = {"t0": 64, "window": 32, "host": 128, "int8": 32}
        sizes = {name: tokens // page_size for name, tokens in sizes.items()}
        made.append(Server(page_size=page_size, rules=rules, policy=policy, **sizes))
        return made[-1]

    yield make
    for server in made:
        server.check_integrity()
        server.close()


def run(server: Server, prompt: list[int], new: int, rid: str) -> Req:
    req = server.request(prompt, new, rid)
    server.run()
    assert list(req.output_ids) == server.expected(prompt, new)
    return req


def lowest_inexact(server: Server, req: Req) -> int:
    """The first token of a running request whose row is not what it was."""
    ledger = server.ledger
    mine = np.flatnonzero(ledger.owner == req.kv.req_pool_idx)
    inexact = mine[ledger.dropped[mine] | ledger.is_lossy(mine)]
    return int(ledger.index[inexact].min()) * server.page_size


LOSSY = [
    Streaming(budget=0.5),
    Random(budget=0.5),
    Hierarchy(compress_ratio=0.5),
    Hierarchy(evict_ratio=0.3),
]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("policy", LOSSY, ids=repr)
def test_the_tree_gets_the_exact_prefix_and_no_more(
    make_server: Callable[..., Server], policy: Any, page_size: int
) -> None:
    server = make_server(policy, page_size)
    req = server.request(PROMPT, 30, "lossy")
    while len(req.output_ids) < 28:
        server.step()
    exact = lowest_inexact(server, req)
    assert exact >= len(PROMPT)
    server.run()
    again = server.request([*PROMPT, *req.output_ids, 7, 7], 1, "again")
    server.run()
    assert again.cached_tokens == exact


@pytest.mark.parametrize("policy", LOSSY, ids=repr)
def test_a_retracted_request_keeps_its_exact_prefix_and_recomputes_the_rest(
    make_server: Callable[..., Server], policy: Any
) -> None:
    server = make_server(policy)
    req = server.request(PROMPT, 40, "lossy")
    other = server.request([9, 9], 40, "other")
    while len(req.output_ids) < 28:
        server.step()
    exact = lowest_inexact(server, req)
    length = len(PROMPT) + len(req.output_ids)
    server.retract(req)
    server.step()
    assert server.recomputed == length - exact
    server.run()
    assert list(req.output_ids) == server.expected(PROMPT, 40)
    assert list(other.output_ids) == server.expected([9, 9], 40)


def test_recomputed_rows_are_exact(make_server: Callable[..., Server]) -> None:
    server = make_server(Streaming(budget=0.5))
    req = server.request(PROMPT, 40, "lossy")
    server.request([9, 9], 40, "other")
    while len(req.output_ids) < 28:
        server.step()
    server.retract(req)
    server.step()
    assert not server.ledger.rows.is_lossy(req.kv.req_pool_idx)
    server.run()


def test_a_lossy_request_reports_what_it_lost(
    make_server: Callable[..., Server],
) -> None:
    """30 new tokens: 29 decode steps, the last look after 28 of them; 28 rows less
    2 sinks and 4 recent ones, of which half may go."""
    server = make_server(Streaming(budget=0.5))
    req = run(server, PROMPT, 30, "lossy")
    report = req._sglang_tiered_report
    assert report["inexact"]
    assert report["dropped_rows"] == 11
    assert report["dropped_share"] == pytest.approx(11 / report["unprotected_rows"])
    assert report["exact_rows"] == len(PROMPT) + SINKS


def test_the_turns_of_a_session_stay_exact(
    make_server: Callable[..., Server],
) -> None:
    server = make_server(Streaming(budget=0.5))
    session = server.session()
    for turn in ("t1", "t2"):
        server.request([6, 6, 6], 24, turn, session)
        server.run()
        assert not server.ledger.t3
    server.close_session(session)


def test_a_request_can_be_lossy_on_an_exact_server(
    make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_tiered.config import TieredConfig
    from sglang_tiered.sglang import request_control

    config = TieredConfig(request_evict=0.9)
    monkeypatch.setattr(request_control, "_config", lambda: config)
    server = make_server(Hierarchy())
    wish = {"policy": "streaming", "budget": 0.5}
    lossy = server.request(PROMPT, 30, "lossy", tiered=wish)
    exact = server.request([9, 9], 30, "exact")
    server.run()
    assert lossy._sglang_tiered_report["dropped_rows"] > 0
    assert exact._sglang_tiered_report["dropped_rows"] == 0


def test_a_share_is_compared_as_it_was_typed() -> None:
    from sglang_tiered.config import TieredConfig
    from sglang_tiered.sglang.request_control import policy_asked_for

    config = TieredConfig(request_evict=0.3)
    wish = {"tiered": {"policy": "h2o", "budget": 0.7}}
    assert policy_asked_for(wish, config) is not None


@pytest.mark.parametrize("custom_params", ["x", [1], 3])
def test_custom_params_that_are_no_object_are_refused(custom_params: Any) -> None:
    from sglang_tiered.config import TieredConfig
    from sglang_tiered.sglang.request_control import policy_asked_for

    with pytest.raises(ValueError, match="must be an object"):
        policy_asked_for(custom_params, TieredConfig())


def test_a_retracted_request_still_reports_what_it_lost(
    make_server: Callable[..., Server],
) -> None:
    server = make_server(Streaming(budget=0.5))
    req = server.request(PROMPT, 30, "lossy")
    server.request([9, 9], 40, "other")
    while len(req.output_ids) < 28:
        server.step()
    server.retract(req)
    server.run()
    report = req._sglang_tiered_report
    assert report["inexact"]
    assert report["dropped_rows"] > 0


def test_a_wish_that_nobody_checked_is_not_granted(
    make_server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(Hierarchy())
    req = server.request(PROMPT, 30, "sly", tiered={"policy": "h2o", "budget": 0.1})
    server.run()
    assert req._sglang_tiered_report["policy"] == "recency"
    assert "its rows stay exact" in caplog.text
