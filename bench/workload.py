"""What the servers are asked, and how: prompts as token ids, sent all at once.

The prompts are real questions in the model's own chat template. Requests are streamed,
so that the time to the first token is the one a user sees.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import orjson
from transformers import AutoTokenizer

# The demo model ends each answer by itself, after 98 to 291 tokens (200 on average).
QUESTIONS = (
    "What is the difference between weather and climate?",
    "How does the heart pump blood around the body?",
    "A farmer has chickens and cows, 30 heads and 84 legs in all. How many of each "
    "are there?",
    "Explain how the moon causes the tides.",
    "A recipe for 4 people needs 300 grams of rice and 2 onions. How much is needed "
    "for 10 people?",
    "Explain how a rainbow forms.",
    "How does a thermostat control the temperature of a room?",
    "A shirt costs 40 dollars. It is reduced by 25 percent and then by 10 percent "
    "more. What is the final price, and is that the same as 35 percent off?",
    "What is photosynthesis and why does life on land depend on it?",
    "Explain the difference between a virus and a bacterium, and why antibiotics help "
    "against only one of them.",
    "Why does ice float on water, and why does that matter for a lake in winter?",
    "Explain why bread rises when it is baked.",
)


class RequestError(RuntimeError):
    """The server did not answer a request; the message has what it said."""


@dataclass(frozen=True)
class Request:
    """A greedy request; it cannot end by itself before `min_new_tokens`. `tiered` is
    what it asks of a tiered server, such as {"policy": "recency"}."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    min_new_tokens: int = 0
    tiered: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """What came back: token ids, and seconds from sending to the first token."""

    tokens: tuple[int, ...]
    first_token_s: float
    cached_tokens: int


@dataclass(frozen=True)
class Wave:
    """The answers to requests sent at once, in their order, and the seconds it took."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [answer.tokens for answer in self.answers]

    @property
    def new_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def throughput(self) -> float:
        """New tokens per second."""
        return self.new_tokens / self.seconds


class Chat:
    """Turns conversations into prompts with the chat template of `model`."""

    def __init__(self, model: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        if self._tokenizer.chat_template is None:
            raise ValueError(f"{model}: its tokenizer has no chat template")

    def prompt(self, question: str, system: str | None = None) -> tuple[int, ...]:
        messages = [{"role": "user", "content": question}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return self._ids(messages)

    def follow_up(self, question: str) -> tuple[int, ...]:
        """The tokens that, after an answer without its end mark, ask `question`."""
        # A template may begin a conversation with text of its own, so the tokens are
        # those by which a conversation grows, from the end of a known answer on.
        known = "\N{WHITE SQUARE}"
        first = [{"role": "user", "content": "?"}]
        answer = {"role": "assistant", "content": known}
        text = self._text([*first, answer, {"role": "user", "content": question}])
        grown = text.rpartition(known)[2]
        return tuple(self._tokenizer.encode(grown, add_special_tokens=False))

    def _text(self, messages: list[dict[str, str]]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    def _ids(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        # The template writes the special tokens itself.
        ids = self._tokenizer.encode(self._text(messages), add_special_tokens=False)
        return tuple(ids)


def run_wave(
    url: str,
    requests: Sequence[Request],
    on_tokens: Callable[[int], object] = lambda new: None,
) -> Wave:
    """Send all requests at once and wait for all answers.

    `on_tokens` is called with the number of tokens each time some came. Raises
    `RequestError` when the server refuses, aborts or drops a request.
    """
    return asyncio.run(_run_wave(url, requests, on_tokens))


def warm_up(url: str, requests: Sequence[Request]) -> None:
    """Let the server meet these requests once, for two tokens each."""
    run_wave(url, [replace(r, max_new_tokens=2, min_new_tokens=2) for r in requests])


async def _run_wave(
    url: str, requests: Sequence[Request], on_tokens: Callable[[int], object]
) -> Wave:
    # No limit of connections or time: the server decides who waits, and how long.
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        start = time.perf_counter()
        try:
            answers = await asyncio.gather(
                *(_generate(client, request, on_tokens) for request in requests)
            )
        except httpx.HTTPError as error:
            raise RequestError(f"the server dropped a request: {error!r}") from error
        return Wave(tuple(answers), time.perf_counter() - start)


async def _generate(
    client: httpx.AsyncClient, request: Request, on_tokens: Callable[[int], object]
) -> Answer:
    sampling: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": request.max_new_tokens,
        "min_new_tokens": request.min_new_tokens,
    }
    if request.tiered is not None:
        sampling["custom_params"] = {"tiered": request.tiered}
    body = {"input_ids": request.prompt, "sampling_params": sampling, "stream": True}
    start = time.perf_counter()
    first_token_s: float | None = None
    event: dict[str, Any] = {}
    seen = 0
    async with client.stream("POST", "/generate", json=body) as response:
        if response.status_code != 200:
            reason = (await response.aread()).decode(errors="replace")
            raise RequestError(f"the server refused a request: {reason}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue  # an empty line between events, or the end mark
            event = orjson.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RequestError(f"the server failed a request: {event['error']}")
            new = event["meta_info"]["completion_tokens"] - seen
            if new and first_token_s is None:
                first_token_s = time.perf_counter() - start
            seen += new
            on_tokens(new)
    finish = event["meta_info"]["finish_reason"] if event else None
    if finish is None or finish["type"] == "abort" or first_token_s is None:
        raise RequestError(f"the server did not finish a request: {finish}")
    return Answer(
        tokens=tuple(event["output_ids"]),
        first_token_s=first_token_s,
        cached_tokens=event["meta_info"]["cached_tokens"],
    )
