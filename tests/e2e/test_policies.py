"""Policies side by side on one server: exact ones change nothing, lossy ones do what
they say, and no row of theirs ever reaches another request."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sglang_tiered.policy.base import Candidates
from sglang_tiered.policy.random import Random
from tests.e2e.checks import (
    Moves,
    ask_one,
    asking,
    assert_empties,
    assert_sound,
    rows_streamed,
    run_identical,
)
from tests.e2e.client import Ask, close_session, open_session, send
from tests.e2e.conftest import TINY
from tests.e2e.lossy_model import LossyModel
from tests.e2e.reference import Reference
from tests.e2e.servers import ServerUnderTest, Tiers
from tests.e2e.workloads import demand, first_turn, tokens, with_aborts

pytestmark = pytest.mark.server

INTERVAL, RECENT, SINKS = 16, 32, 4
# T1 and T2 hold little more than the loads: the audit of every allocation reads their
# tables.
TIERS = Tiers(t0=640, window=1600, host_gb=0.03, recent_window=RECENT)
FLAGS = (
    "--enable-streaming-session",
    *("--tiered-retier-interval", str(INTERVAL)),
    *("--tiered-sink-tokens", str(SINKS)),
    *("--tiered-int8-gb", "0.005"),
    *("--tiered-request-compress", "0.5"),
    *("--tiered-request-evict", "0.9"),
)
SEED = 12
RATIOS = (0.1, 0.3, 0.5, 0.7)
BASELINES = ("h2o", "random", "rkv", "streaming")

OTHER_PACKAGE = '''
from dataclasses import dataclass
from typing import ClassVar

from sglang_tiered.policy.base import Policy


@dataclass(frozen=True, kw_only=True)
class Oldest(Policy):
    """The oldest rows stay in T0."""

    name: ClassVar[str] = "oldest"
    hbm_ratio: float = 0.3

    def value(self, candidates):
        return -candidates.index
'''


@pytest.fixture(scope="module")
def other_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a package is installed that has a policy."""
    folder = tmp_path_factory.mktemp("site_packages")
    info = folder / "other_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: other-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[sglang_tiered.policies]\noldest = other_policies:Oldest\n"
    )
    (folder / "other_policies.py").write_text(OTHER_PACKAGE)
    return folder


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, log_folder: Path, other_package: Path
) -> Iterator[ServerUnderTest]:
    flags = TIERS.flags((*TINY, *FLAGS))
    log = log_folder / "policies.log"
    paths = [str(other_package), os.environ.get("PYTHONPATH", "")]
    environment = {
        **TIERS.environment,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    with ServerUnderTest(tiny_model, flags, log, environment) as server:
        yield server


# -- exact


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("policy", ["hierarchy", "recency"])
def test_an_exact_policy_changes_nothing(
    server: ServerUnderTest, reference: Reference, policy: str, ratio: float
) -> None:
    asks = asking(first_turn(40, 8, 200), policy=policy, hbm_ratio=ratio)
    before = Moves(server)
    run_identical(server, reference, asks)
    assert before.since()["requests streamed=yes"] == len(asks)


@pytest.mark.parametrize("ratio", RATIOS)
def test_nor_does_full_when_t0_holds_a_part(
    server: ServerUnderTest, reference: Reference, ratio: float
) -> None:
    """It moves nothing by itself, so T0 is made short by the number of requests."""
    asks = first_turn(41, 28, 240, 240)
    while demand(asks[:-1]) > TIERS.t0 / ratio:
        asks = asks[:-1]
    before = Moves(server)
    run_identical(server, reference, asking(asks, policy="full"))
    assert before.since()["requests streamed=yes"] > 0


def test_a_ratio_sends_rows_away_from_t0_that_has_room(
    server: ServerUnderTest, reference: Reference
) -> None:
    asks = asking(first_turn(44, 2, 200), policy="hierarchy", hbm_ratio=0.3)
    assert demand(asks) < TIERS.t0
    server.flush_cache()
    before = Moves(server)
    run_identical(server, reference, asks)
    moves = before.since()
    assert moves["requests streamed=yes"] == len(asks)
    assert moves["demoted_tokens"] > 0


def test_a_policy_of_another_package_changes_nothing(
    server: ServerUnderTest, reference: Reference
) -> None:
    asks = asking(first_turn(45, 1, 120), policy="oldest")
    with rows_streamed(server):
        [outcome] = run_identical(server, reference, asks)
    assert outcome.report is not None
    assert outcome.report["policy"] == "oldest"


@pytest.mark.parametrize("stream", [False, True])
def test_the_report_of_an_exact_request_is_clean(
    server: ServerUnderTest, stream: bool
) -> None:
    wish = {"policy": "hierarchy"}
    ask = Ask(tokens(random.Random(1), 30), 100, tiered=wish, stream=stream)
    report = ask_one(server, ask).report
    assert report is not None
    assert (report["policy"], report["inexact"]) == ("hierarchy", False)
    assert (report["dropped_rows"], report["compressed_rows"]) == (0, 0)


# -- dropped rows


def by_age(rows: np.ndarray) -> np.ndarray:
    return rows


def by_chance(rows: np.ndarray) -> np.ndarray:
    n = len(rows)
    candidates = Candidates(
        index=rows,
        tier=np.zeros(n, dtype=np.int64),
        lossy=np.zeros(n, dtype=bool),
        dropped=0,
        compressed=0,
        seed=SEED,
    )
    return Random(budget=1.0).value(candidates)


VALUES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "streaming": by_age,
    "random": by_chance,
}


def kept_rows(policy: str, prompt: int, steps: int, budget: float) -> np.ndarray:
    """bool [steps + 1, rows]: which rows the query that yields each token attends to,
    from the rule alone: every `INTERVAL` decode steps the generated rows between the
    sinks and the recent window go, lowest value first, up to `1 - budget` of all that
    ever were there."""
    rows = prompt + steps
    kept = np.zeros((steps + 1, rows), dtype=bool)
    alive = np.ones(rows, dtype=bool)
    dropped = 0
    for step in range(steps + 1):  # step 0 is the prefill
        length = prompt + step
        kept[step, :length] = alive[:length]
        if step and step % INTERVAL == 0:
            free = np.arange(prompt + SINKS, length - RECENT)
            free = free[alive[free]]
            most = int((1 - budget) * (len(free) + dropped) + 1e-9)
            order = np.argsort(VALUES[policy](free), kind="stable")
            alive[free[order[: most - dropped]]] = False
            dropped = max(dropped, most)
    return kept


@pytest.mark.parametrize("budget", [0.2, 0.5])
@pytest.mark.parametrize("policy", VALUES)
def test_logits_are_those_of_attention_over_the_kept_rows(
    server: ServerUnderTest, tiny_model: Path, policy: str, budget: float
) -> None:
    ask = Ask(
        tokens(random.Random(7), 50),
        150,
        top_logprobs=20,
        tiered={"policy": policy, "budget": budget, "value_guard": False},
        sampling={"sampling_seed": SEED},
    )
    outcome = ask_one(server, ask)
    steps = len(outcome.tokens) - 1
    kept = kept_rows(policy, len(ask.prompt), steps, budget)
    assert (~kept[-1]).sum() > 20
    model = LossyModel(tiny_model)
    logits = model.logits(ask.prompt, outcome.tokens, kept)
    scale = np.abs(logits).max()
    right = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    for step, top in enumerate(outcome.top_logprobs):
        got = np.array(list(top.values()))
        assert np.abs(got - right[step, list(top)]).max() < 1e-5 * scale, step


@pytest.mark.parametrize("budget", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("policy", BASELINES)
def test_a_budget_is_kept(server: ServerUnderTest, policy: str, budget: float) -> None:
    tiered = {"policy": policy, "budget": budget}
    ask = Ask(tokens(random.Random(11), 20), 120, tiered=tiered)
    report = ask_one(server, ask).report
    assert report is not None
    free = report["generated_rows"] - SINKS - RECENT
    # Rows become free between two looks at them.
    most = (1 - budget) * free
    assert most - INTERVAL - 1 <= report["dropped_rows"] <= most + 1
    assert report["dropped_error"] > 0


def test_evicting_policies_share_a_busy_server_with_exact_ones(
    server: ServerUnderTest, reference: Reference
) -> None:
    asks = first_turn(42, 3 * len(BASELINES) + 4, 200, 200)
    wanted: list[Mapping[str, Any] | None] = [
        {"policy": policy, "budget": budget}
        for policy in BASELINES
        for budget in (0.1, 0.5, 0.9)
    ]
    wanted += [None, {"policy": "recency"}, {"policy": "full"}, None]
    asks = [
        dataclasses.replace(ask, tiered=tiered)
        for ask, tiered in zip(asks, wanted, strict=True)
    ]
    outcomes = send(server.url, with_aborts(3, asks, 40))
    exact = len(asks) - 4
    finished = [
        (ask, outcome)
        for ask, outcome in zip(asks, outcomes, strict=True)
        if outcome.error is None
    ]
    assert len(finished) > len(asks) // 2
    for ask, outcome in finished:
        assert len(outcome.tokens) == ask.new_tokens
    assert sum(o.report["dropped_rows"] for _, o in finished if o.report) > 500
    surviving = [i for i in range(exact, len(asks)) if outcomes[i].error is None]
    assert not reference.differences(
        [asks[i] for i in surviving], [outcomes[i] for i in surviving]
    )
    assert_empties(server)


# -- int8 rows


def test_compressed_rows_are_as_many_as_asked_for(server: ServerUnderTest) -> None:
    asks = asking(first_turn(43, 6, 200, 200), compress_ratio=0.5)
    before = server.tier("compressed_tokens_total")
    outcomes = send(server.url, asks)
    total = 0
    for outcome in outcomes:
        assert outcome.error is None
        report = outcome.report
        assert report is not None
        free = report["generated_rows"] - SINKS - RECENT
        assert 0.5 * free - INTERVAL - 1 <= report["compressed_rows"] <= 0.5 * free + 1
        assert report["inexact"]
        total += report["compressed_rows"]
    server.settle(
        lambda metrics: (
            metrics.total("sglang_tiered:compressed_tokens_total") - before == total
        ),
        f"{total} rows were compressed",
    )
    assert_empties(server)


def test_int8_rows_are_close_to_exact_ones(
    server: ServerUnderTest, reference: Reference
) -> None:
    """The first logprobs after the first compression."""
    ask = Ask(tokens(random.Random(8), 40), 60, logprobs=True)
    (right,) = reference.outcomes([ask])
    lossy = dataclasses.replace(ask, tiered={"compress_ratio": 0.5})
    outcome = ask_one(server, lossy)
    report = outcome.report
    assert report is not None
    assert report["compressed_rows"] > 0
    # Rows leave after step 48 (36 are protected), so 48 tokens cannot differ.
    assert outcome.tokens[:48] == right.tokens[:48]


# -- taint


@pytest.mark.parametrize(
    "tiered",
    [
        {"policy": "streaming", "budget": 0.5},
        {"policy": "random", "budget": 0.5},
        {"policy": "hierarchy", "compress_ratio": 0.5},
    ],
    ids=lambda tiered: tiered["policy"],
)
def test_the_next_request_reuses_the_exact_prefix_and_no_more(
    server: ServerUnderTest, reference: Reference, tiered: Mapping[str, Any]
) -> None:
    server.flush_cache()
    rng = random.Random(9)
    first = Ask(tokens(rng, 50), 150, tiered=tiered)
    outcome = ask_one(server, first)
    report = outcome.report
    assert report is not None
    assert report["inexact"]
    again = Ask((*first.prompt, *outcome.tokens, *tokens(rng, 20)), 60)
    second = ask_one(server, again)
    assert second.cached_tokens == report["exact_rows"]
    assert second.cached_tokens >= len(first.prompt) + SINKS
    if tiered["policy"] == "streaming":  # which drops the oldest first
        assert second.cached_tokens == len(first.prompt) + SINKS
    assert not reference.differences([again], [second])


def test_a_session_stays_exact(server: ServerUnderTest, reference: Reference) -> None:
    rng = random.Random(10)
    tiered = {"policy": "streaming", "budget": 0.5}
    session = open_session(server.url)
    first = Ask(tokens(rng, 40), 120, session=session, tiered=tiered)
    outcome = ask_one(server, first)
    turn = Ask(tokens(rng, 20), 60, session=session, tiered=tiered)
    second = ask_one(server, turn)
    whole = Ask((*first.prompt, *outcome.tokens, *turn.prompt), 60)
    assert not reference.differences([first, whole], [outcome, second])
    close_session(server.url, session)


# -- what is refused

BAD_WISH = {"custom_params": {"tiered": {"policy": "belady"}}}


@pytest.mark.parametrize(
    ("tiered", "text"),
    [
        ({"policy": "belady"}, "no such policy; fix: use one of full, h2o"),
        ({"policy": "h2o"}, "budget is missing"),
        ({"policy": "h2o", "budget": 0.05}, "this server allows 0.9"),
        ({"policy": "h2o", "budget": 1.5}, "budget 1.5: must be greater than 0"),
        ({"policy": "h2o", "budget": "x" * 10000}, "must be greater than 0"),
        ({"compress_ratio": 0.6}, "this server allows 0.5"),
        ({"evict_ratio": None}, "must be between 0 and 1"),
        ({"policy": "full", "budget": 0.5}, "no such setting 'budget'"),
        ({"policy": ["h2o"]}, "no such policy"),
        ({"colour": 1}, "no such setting 'colour'"),
        ("h2o", "must be an object"),
    ],
)
def test_a_bad_wish_is_answered_with_400(
    server: ServerUnderTest, tiered: Any, text: str
) -> None:
    sampling = {"max_new_tokens": 1, "custom_params": {"tiered": tiered}}
    body = {"input_ids": [1, 2, 3], "sampling_params": sampling}
    reply = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert reply.status_code == 400
    assert text in reply.text
    assert len(reply.text) < 1000
    assert_sound(server)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1, 2, 3], **BAD_WISH}),
        (
            "/generate",
            {
                "input_ids": [[1, 2, 3], [4, 5, 6]],
                "sampling_params": [{"max_new_tokens": 1}, BAD_WISH],
            },
        ),
        (
            "/generate",
            {"input_ids": [1, 2, 3], "sampling_params": {"n": 2, **BAD_WISH}},
        ),
    ],
    ids=["completion", "one of a batch", "samples"],
)
def test_a_bad_wish_is_answered_with_400_wherever_it_comes(
    server: ServerUnderTest, path: str, body: Mapping[str, Any]
) -> None:
    reply = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert reply.status_code == 400
    assert "no such policy; fix: use one of full, h2o" in reply.text
    assert_sound(server)


def test_a_bad_wish_in_a_stream_is_answered_with_an_error(
    server: ServerUnderTest,
) -> None:
    """SGLang has sent its 200 by then."""
    ask = Ask((1, 2, 3), 1, stream=True, tiered={"policy": "belady"})
    [outcome] = send(server.url, [ask])
    assert "no such policy; fix: use one of full, h2o" in (outcome.error or "")
    assert_sound(server)
