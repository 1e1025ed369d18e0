"""Requests to a running server: all at once, some of them abandoned half-way.

Every request is greedy, so its tokens depend on its prompt alone; what a request
asks for beside that (streaming, logprobs, several samples, a session) and how it
goes away must not change them.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

# A request that has not ended by then hangs; the busiest test needs a tenth of it.
ANSWER_SECONDS = 600.0
SESSION_CAPACITY = 100_000


@dataclass(frozen=True)
class Ask:
    """One request.

    `tiered`: the policy it asks for. `top_logprobs`: that many logprobs of every step.
    `leave_after`: close the connection once that many tokens have come.
    `abort_after`: call /abort_request instead. `session`: the id of an open
    streaming session. `priority`: over others, None where the server knows none.
    `sampling`: more sampling parameters.
    """

    prompt: tuple[int, ...]
    new_tokens: int
    n: int = 1
    stream: bool = False
    logprobs: bool = False
    leave_after: int | None = None
    abort_after: int | None = None
    session: str | None = None
    priority: int | None = None
    tiered: Mapping[str, Any] | None = None
    top_logprobs: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def survives(self) -> bool:
        return self.leave_after is None and self.abort_after is None

    @property
    def demand(self) -> int:
        """Rows that the request needs at its end."""
        return len(self.prompt) + self.n * self.new_tokens


@dataclass(frozen=True)
class Outcome:
    """What came back.

    `samples` holds the output tokens of each of the `n` samples, `logprobs` those
    of the first one's tokens; `top_logprobs` {token: logprob} of each of its steps.
    `reports` are what the server says became of the rows of each sample that ended,
    `finish` its word for how the first one ended ("length", "abort"). `error` is None
    for a request that ended by itself, else the server's reason, or "left" where the
    client went away.
    """

    samples: tuple[tuple[int, ...], ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[Mapping[int, float], ...] = ()
    cached_tokens: int = 0
    reports: tuple[Mapping[str, Any], ...] = ()
    finish: str | None = None
    error: str | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.samples[0] if self.samples else ()

    @property
    def report(self) -> Mapping[str, Any] | None:
        return self.reports[0] if self.reports else None


def send(
    url: str,
    asks: Sequence[Ask],
    parallel: int | None = None,
    timeout_s: float = ANSWER_SECONDS,
) -> list[Outcome]:
    """Send all requests at once, or keep `parallel` of them in flight; their outcomes,
    in order.

    Raises `TimeoutError` when one of them has no end in `timeout_s`, and
    `httpx.HTTPError` when the server is gone.
    """

    async def run() -> list[Outcome]:
        limits = httpx.Limits(max_connections=None)
        turnstile = asyncio.Semaphore(parallel or len(asks))
        async with (
            asyncio.timeout(timeout_s),
            httpx.AsyncClient(
                base_url=url,
                timeout=None,
                limits=limits,
                headers={"content-type": "application/json"},
            ) as client,
        ):

            async def pass_through(ask: Ask) -> Outcome:
                async with turnstile:
                    return await _ask(client, ask)

            return await asyncio.gather(*map(pass_through, asks))

    return asyncio.run(run())


def open_session(url: str) -> str:
    """The id of a new streaming session: it keeps its rows between its requests, each
    of which sends only what follows."""
    body = {"capacity_of_str_len": SESSION_CAPACITY, "streaming": True}
    session_id: str = _post(url, "open_session", body).json()
    return session_id


def close_session(url: str, session_id: str) -> None:
    _post(url, "close_session", {"session_id": session_id})


def pause(url: str) -> None:
    """Retract all running requests and admit none until `go_on`."""
    _post(url, "pause_generation", {"mode": "retract"})


def go_on(url: str) -> None:
    _post(url, "continue_generation", {})


def _post(url: str, what: str, body: Mapping[str, Any]) -> httpx.Response:
    reply = httpx.post(f"{url}/{what}", json=body, timeout=ANSWER_SECONDS)
    return reply.raise_for_status()


async def _ask(client: httpx.AsyncClient, ask: Ask) -> Outcome:
    rid = uuid.uuid4().hex
    body: dict[str, Any] = {
        "input_ids": ask.prompt,
        "rid": rid if ask.n == 1 else None,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": ask.new_tokens,
            "n": ask.n,
            **ask.sampling,
        },
        "return_logprob": ask.logprobs or ask.top_logprobs > 0,
        "top_logprobs_num": ask.top_logprobs,
        "priority": ask.priority,
        "stream": ask.stream or not ask.survives,
    }
    if ask.tiered is not None:
        body["sampling_params"]["custom_params"] = {"tiered": ask.tiered}
    if ask.session is not None:
        body["session_params"] = {"id": ask.session}
    content = orjson.dumps(body)
    if body["stream"]:
        return await _stream(client, ask, rid, content)
    reply = await client.post("/generate", content=content)
    if reply.status_code != 200:
        return Outcome((), error=_reason(reply.json()))
    answers = reply.json()
    return _outcome(answers if isinstance(answers, list) else [answers])


async def _stream(
    client: httpx.AsyncClient, ask: Ask, rid: str, content: bytes
) -> Outcome:
    latest: dict[int, dict[str, Any]] = {}
    called_off = False
    async with client.stream("POST", "/generate", content=content) as reply:
        if reply.status_code != 200:
            return Outcome((), error=_reason(orjson.loads(await reply.aread())))
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue  # an empty line between events, or the end mark
            event = orjson.loads(line.removeprefix("data: "))
            if "error" in event:
                return Outcome((), error=_reason(event))
            latest[event.get("index", 0)] = event
            seen = event["meta_info"]["completion_tokens"]
            if ask.leave_after is not None and seen >= ask.leave_after:
                outcome = _outcome([latest[key] for key in sorted(latest)])
                return Outcome(outcome.samples, error="left")
            if (
                ask.abort_after is not None
                and seen >= ask.abort_after
                and not called_off
            ):
                called_off = True
                await client.post("/abort_request", json={"rid": rid})
    return _outcome([latest[key] for key in sorted(latest)])


def _outcome(answers: Sequence[Mapping[str, Any]]) -> Outcome:
    first = answers[0]["meta_info"]
    reason = first["finish_reason"]
    aborted = reason is not None and reason["type"] == "abort"
    return Outcome(
        samples=tuple(tuple(answer["output_ids"]) for answer in answers),
        logprobs=tuple(entry[0] for entry in first.get("output_token_logprobs") or ()),
        top_logprobs=tuple(
            {token: logprob for logprob, token, _ in step}
            for step in first.get("output_top_logprobs") or ()
        ),
        cached_tokens=first["cached_tokens"],
        reports=tuple(
            report
            for answer in answers
            for report in answer["meta_info"].get("tiered") or ()
        ),
        finish=reason["type"] if reason is not None else None,
        error=(reason.get("message") or "aborted") if aborted else None,
    )


def _reason(answer: Mapping[str, Any]) -> str:
    error = answer.get("error", answer)
    return str(error.get("message", error) if isinstance(error, Mapping) else error)
