"""How much attention each row gets: the weights of decode queries, and their sum over
layers on its way into the score book.

Weights are computed in float32 from the very keys that attention has gathered, one
request after the other, while they are still in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from sglang_tiered.memory.score_book import ScoreBook
from sglang_tiered.transfer.streams import InlineStream, Stream


@dataclass
class ScoreFeed:
    """Where scores go and which layers are scored: every ``score_layers``-th one of
    ``num_layers``, layer 0 included. ``stream`` computes them, beside the layers that
    follow if it is a thread's."""

    book: ScoreBook
    score_layers: int
    num_layers: int
    stream: Stream = field(default_factory=InlineStream)

    def __post_init__(self) -> None:
        if not 1 <= self.score_layers <= self.num_layers:
            raise ValueError(
                f"score_layers {self.score_layers}: must be between 1 and the "
                f"model's {self.num_layers} layers"
            )

    @property
    def last_layer(self) -> int:
        """The last layer that is scored."""
        return (self.num_layers - 1) // self.score_layers * self.score_layers


def decode_weights(
    query: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention weights of one query per request, averaged over its heads.

    Args:
        query: [b, query heads, d].
        keys: [b, l, kv heads, d]; query head h reads kv head
            ``h // (query heads / kv heads)``.
        lengths: int64 [b], each from 1 to l: how many of the keys are the request's.
        scale: of the logits, usually ``d ** -0.5``.

    Returns:
        float32 [b, l]: the mean over query heads of ``softmax(scale * q @ k)``; 0 past
        a request's length, whatever the keys there.
    """
    weights = torch.zeros(keys.shape[:2])
    heads = scaled_heads(query, keys.shape[2], scale)
    for request, length in enumerate(lengths.tolist()):
        add_weights(weights[request, :length], heads[request], keys[request, :length])
    return weights


def scaled_heads(query: torch.Tensor, kv_heads: int, scale: float) -> torch.Tensor:
    """[b, query heads, d] by the kv head that each reads, times ``scale``:
    float32 [b, kv heads, group, d]."""
    return (query.float() * scale).view(len(query), kv_heads, -1, query.shape[-1])


def add_weights(total: torch.Tensor, heads: torch.Tensor, keys: torch.Tensor) -> None:
    """Add one query's weights, averaged over its heads, to ``total``.

    Args:
        total: float32 [l].
        heads: float32 [kv heads, group, d], scaled.
        keys: [l, kv heads, d].
    """
    logits = torch.bmm(heads, keys.float().permute(1, 2, 0))
    weights = torch.softmax(logits, dim=-1).view(-1, len(total))
    # Sum and addition in one: this runs for every request in every scored layer.
    total.addmv_(weights.t(), _ones(len(weights)), alpha=1 / len(weights))


@cache
def _ones(count: int) -> torch.Tensor:
    return torch.ones(count)


class ForwardScores:
    """The weights of one forward's scored requests, summed over its scored layers.

    Args:
        feed: where they go.
        ids: [b, l] virtual token ids that each request attends to.
        kept: bool [b, l], which of them have a row.

    Raises RuntimeError if the book's lanes are those of another batch.
    """

    def __init__(self, feed: ScoreFeed, ids: torch.Tensor, kept: torch.Tensor) -> None:
        lanes = feed.book.lanes
        if len(lanes) != len(ids):
            raise RuntimeError(f"{len(lanes)} lanes for a batch of {len(ids)}")
        self._feed = feed
        scored = np.flatnonzero(lanes)
        self._ids = ids[scored][kept[scored]].long()
        self._sum = torch.zeros(len(self._ids))
        self._scored_layers = 0
        totals = torch.split(self._sum, kept[scored].sum(dim=1).tolist())
        self._seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._totals = dict(zip(scored.tolist(), totals, strict=True))

    def wants(self, layer: int) -> bool:
        """Whether ``layer`` is scored."""
        return layer % self._feed.score_layers == 0

    def begin_layer(self, query: torch.Tensor, kv_heads: int, scale: float) -> None:
        """A scored layer begins. ``query``: [b, query heads, d], one per request."""
        self._heads = scaled_heads(query, kv_heads, scale).unbind()

    def add(self, request: int, keys: torch.Tensor) -> None:
        """``keys``: [l, kv heads, d], all that ``request`` attends to in this layer;
        nobody changes them any more."""
        total = self._totals.get(request)
        if total is not None:
            self._seen.append((total, self._heads[request], keys))

    def end_layer(self, layer: int) -> None:
        """``layer`` is through. After the last scored one, the mean over the scored
        layers is in the book."""
        if not self.wants(layer):
            return
        seen, self._seen = self._seen, []
        # A layer that does not look at every row has shown nothing.
        self._scored_layers += bool(seen)

        def score() -> None:
            for total, heads, keys in seen:
                add_weights(total, heads, keys)

        stream = self._feed.stream
        stream.submit(f"score layer {layer}", score)
        if layer == self._feed.last_layer:
            # Waits for the layers before it too: a stream keeps its order.
            stream.submit("enter scores", self._enter).wait()

    def _enter(self) -> None:
        book = self._feed.book
        if not self._scored_layers:
            return
        mean = self._sum / self._scored_layers
        torch.from_numpy(book.score).index_add_(0, self._ids, mean)
        torch.from_numpy(book.steps).index_add_(0, self._ids, torch.ones_like(mean))
