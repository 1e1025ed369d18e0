"""What the untiered server answers: the truth of every end-to-end test.

The stock server has a pool that is large for everything it is asked, one page size
and no chunking: in float32 with the tiny model the answer depends on the prompt
alone. It sleeps while it has nothing to do, so it may stay beside the server under
test.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.server import Server
from tests.e2e.client import Ask, Outcome, send

# More tokens than any two answers have in common by chance.
SHOWN = 4


class Reference:
    """Answers of the stock server, each asked for once."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._known: dict[tuple[int, ...], Outcome] = {}

    def outcomes(self, asks: Sequence[Ask]) -> list[Outcome]:
        """What each request would be answered alone; as many tokens as it asks for
        or more."""
        need: dict[tuple[int, ...], Ask] = {}
        for ask in asks:
            known = self._known.get(ask.prompt)
            longest = max(
                ask.new_tokens,
                need[ask.prompt].new_tokens if ask.prompt in need else 0,
            )
            if known is None or len(known.tokens) < longest:
                need[ask.prompt] = Ask(ask.prompt, longest, logprobs=True)
        for prompt, outcome in zip(
            need, send(self._server.url, list(need.values())), strict=True
        ):
            assert outcome.error is None, f"the stock server failed: {outcome.error}"
            self._known[prompt] = outcome
        return [self._known[ask.prompt] for ask in asks]

    def answers(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        """The tokens of `outcomes`, as many as each request asks for."""
        return [
            outcome.tokens[: ask.new_tokens]
            for ask, outcome in zip(asks, self.outcomes(asks), strict=True)
        ]

    def differences(
        self, asks: Sequence[Ask], outcomes: Sequence[Outcome]
    ) -> list[str]:
        """One line per request whose tokens are not the stock server's. A request
        that went away must have had the right tokens until then."""
        lines = []
        for i, (ask, outcome, right) in enumerate(
            zip(asks, outcomes, self.answers(asks), strict=True)
        ):
            if ask.survives and outcome.error is not None:
                lines.append(f"request {i}: {outcome.error}")
                continue
            for sample in outcome.samples:
                expected = right if ask.survives else right[: len(sample)]
                if sample != expected:
                    lines.append(f"request {i}: {_first_difference(sample, expected)}")
        return lines


def _first_difference(got: Sequence[int], right: Sequence[int]) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b),
        min(len(got), len(right)),
    )
    return (
        f"{len(got)} tokens of {len(right)}; from token {at} on it says "
        f"{list(got[at : at + SHOWN])}, not {list(right[at : at + SHOWN])}"
    )
