"""A policy of one's own through the OpenAI endpoints, on a real small model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.model import demo_model
from tests.e2e.servers import ServerUnderTest, Tiers

pytestmark = [pytest.mark.server, pytest.mark.smollm2, pytest.mark.full]

TIERS = Tiers(t0=600, window=1200, host_gb=0.2)
FLAGS = ("--tiered-request-evict", "0.9", "--tiered-retier-interval", "8")
WISH = {"tiered": {"policy": "streaming", "budget": 0.5}}


@pytest.fixture(scope="module")
def server(log_folder: Path) -> Iterator[ServerUnderTest]:
    flags = TIERS.flags(FLAGS)
    log = log_folder / "chat.log"
    with ServerUnderTest(demo_model(), flags, log, TIERS.environment) as server:
        yield server


def post(server: ServerUnderTest, path: str, **body: Any) -> httpx.Response:
    common = {"model": "default", "max_tokens": 80, "temperature": 0, "min_tokens": 80}
    return httpx.post(f"{server.url}{path}", json={**common, **body}, timeout=120)


def chat(server: ServerUnderTest, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Count from one to a hundred."}]
    return post(server, "/v1/chat/completions", messages=messages, **body)


def test_a_chat_completion_takes_a_wish_and_returns_the_report(
    server: ServerUnderTest,
) -> None:
    reply = chat(server, custom_params=WISH, return_meta_info=True)
    (choice,) = reply.raise_for_status().json()["choices"]
    (report,) = choice["meta_info"]["tiered"]
    assert report["policy"] == "streaming"
    assert report["dropped_rows"] > 0


def test_a_bad_wish_in_a_chat_completion_is_answered_with_400(
    server: ServerUnderTest,
) -> None:
    reply = chat(server, custom_params={"tiered": {"policy": "belady"}})
    assert reply.status_code == 400
    assert "no such policy" in reply.text


def test_a_completion_takes_a_wish(server: ServerUnderTest) -> None:
    reply = post(server, "/v1/completions", prompt="One, two,", custom_params=WISH)
    assert reply.raise_for_status().json()["choices"]
    server.settle(
        lambda metrics: metrics.total("sglang_tiered:dropped_tokens_total") > 0,
        "no row was dropped",
    )
