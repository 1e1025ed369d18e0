"""Prompts of random tokens, and which of the requests go away half-way."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from tests.e2e.client import Ask
from tests.tiny_model import VOCAB_SIZE

SHARED_TOKENS = 40
OWN_PROMPT = (10, 90)


def tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(count))


def first_turn(
    seed: int, count: int, new_tokens: int, shortest: int | None = None
) -> list[Ask]:
    """`count` requests with one shared prefix and from `new_tokens` down to `shortest`
    new tokens, by default three quarters of it."""
    less = new_tokens - (new_tokens * 3 // 4 if shortest is None else shortest)
    rng = random.Random(seed)
    shared = tokens(rng, SHARED_TOKENS)
    return [
        Ask(
            prompt=shared + tokens(rng, rng.randint(*OWN_PROMPT)),
            new_tokens=new_tokens - less * i // count,
        )
        for i in range(count)
    ]


def next_turn(
    seed: int, asks: Sequence[Ask], answers: Sequence[Sequence[int]], new_tokens: int
) -> list[Ask]:
    """Each conversation goes on: its prompt, the answer, 20 tokens of the user's."""
    rng = random.Random(seed)
    return [
        dataclasses.replace(
            ask,
            prompt=(*ask.prompt, *answer, *tokens(rng, 20)),
            new_tokens=new_tokens,
        )
        for ask, answer in zip(asks, answers, strict=True)
    ]


def with_aborts(seed: int, asks: Sequence[Ask], earliest: int = 1) -> list[Ask]:
    """A fifth of the requests goes away after `earliest` tokens or more, half by a
    closed connection and half through /abort_request."""
    rng = random.Random(seed)
    result = list(asks)
    chosen = rng.sample(range(len(asks)), max(1, round(len(asks) / 5)))
    for nth, i in enumerate(chosen):
        after = rng.randint(earliest, asks[i].new_tokens - 1)
        if nth % 2:
            result[i] = dataclasses.replace(asks[i], leave_after=after)
        else:
            result[i] = dataclasses.replace(asks[i], abort_after=after)
    return result


def demand(asks: Sequence[Ask]) -> int:
    """Rows that all requests need if they run at once."""
    return sum(ask.demand for ask in asks)
