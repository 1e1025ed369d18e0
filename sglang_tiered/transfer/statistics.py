"""What policies ask about the content of rows, computed where the rows are.

Rows are read from T0 if they are there, else from the host pool, else from the
quantised host pool (dequantised), one layer at a time. Every copy of them must have
landed: between forwards that is so on a CPU.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from sglang_tiered.memory.backing import Backing
from sglang_tiered.memory.host_pool import HostPool
from sglang_tiered.memory.places import Places

# R-KV's constants: when two keys count as near-duplicates, and what keeps a zero key
# from being divided by zero.
SIMILAR = 0.5
_EPSILON = 1e-8

# Keys to compare with at a time: bounds the scratch to 9 bytes x this x candidates.
_BLOCK = 256


class QuantisedRows(Protocol):
    """The part of the quantised host pool that is read here."""

    def read(self, layer: int, name: str, pages: torch.Tensor) -> torch.Tensor:
        """Dequantised ``pages`` (int64 [n]): [n, page_size * row_width]."""


# Positions among the places asked for, the tier that has them, their pages there.
_Group = tuple[torch.Tensor | slice, str, torch.Tensor]


class RowStatistics:
    """Statistics of pages over the buffers "k" and "v" of all layers.

    Pages without rows in any tier raise ValueError.
    """

    def __init__(
        self, backing: Backing, host: HostPool, int8: QuantisedRows | None = None
    ) -> None:
        self._layout = backing.layout
        self._backing, self._host, self._int8 = backing, host, int8

    def value_norms(self, places: Places) -> np.ndarray:
        """Mean over layers, kv heads and the page's tokens of the Euclidean norm of
        the value: float32 [n]."""
        layers = range(self._layout.num_layers)
        mean = torch.zeros(len(places))
        for at, tier, pages in self._by_tier(places):
            norms = [
                torch.linalg.vector_norm(self._read(tier, layer, "v", pages), dim=-1)
                for layer in layers
            ]
            # Layers of one parity have rows of one shape: few operations over many
            # layers, as a look at a handful of rows is all overhead.
            of_layers = [
                torch.stack(norms[parity::2]).mean(dim=(2, 3)) for parity in layers[:2]
            ]
            mean[at] = torch.cat(of_layers).mean(dim=0)
        return mean.numpy()

    def redundancy(self, places: Places) -> np.ndarray:
        """R-KV's redundancy (``key_redundancy``) of each page among ``places``, the
        pages of one request in the order of their positions: float32 [n], the mean
        over layers, kv heads and the page's tokens.

        R-KV keeps a set of tokens for each layer and head; here a row lives or dies
        in all of them at once, hence the mean.
        """
        total = torch.zeros(len(places), self._layout.page_size)
        by_tier = self._by_tier(places)
        heads = 0
        for layer in range(self._layout.num_layers):
            keys = self._rows(by_tier, len(places), layer, "k")
            for head in keys.flatten(0, 1).unbind(dim=1):
                heads += 1
                total += key_redundancy(head).view_as(total)
        return (total / heads).mean(dim=1).numpy()

    def _by_tier(self, places: Places) -> list[_Group]:
        """Which of ``places`` to read where."""
        tiers = [("t0", places.t0), ("host", places.host)]
        if self._int8 is not None:
            tiers.append(("int8", places.int8))
        groups: list[_Group] = []
        missing = np.ones(len(places), dtype=bool)
        for tier, numbers in tiers:
            here = missing & (numbers >= 0)
            missing &= ~here
            if here.all():  # as is the rule
                groups.append((slice(None), tier, torch.from_numpy(numbers)))
            elif here.any():
                at = torch.from_numpy(np.flatnonzero(here))
                groups.append((at, tier, torch.from_numpy(numbers[here])))
        if missing.any():
            raise ValueError(
                f"{int(missing.sum())} of {len(places)} pages have rows in no tier"
            )
        return groups

    def _rows(
        self, by_tier: list[_Group], count: int, layer: int, name: str
    ) -> torch.Tensor:
        """float32 [count, page_size, heads, dim], the groups put together."""
        parts = [
            (at, self._read(tier, layer, name, pages)) for at, tier, pages in by_tier
        ]
        rows = torch.empty(count, *parts[0][1].shape[1:])
        for at, part in parts:
            rows[at] = part
        return rows

    def _read(
        self, tier: str, layer: int, name: str, pages: torch.Tensor
    ) -> torch.Tensor:
        """float32 [n, page_size, heads, dim], a row without heads being one head."""
        if tier == "int8":
            assert self._int8 is not None
            rows = self._int8.read(layer, name, pages)
        else:
            source = self._backing if tier == "t0" else self._host
            rows = source.pages(layer, name).index_select(0, pages)
        buffer = self._layout.row_buffer(layer, name)
        dim = buffer.shape[-1]
        shape = (len(pages), self._layout.page_size, buffer.row_width // dim, dim)
        return rows.view(shape).float()


def key_redundancy(keys: torch.Tensor) -> torch.Tensor:
    """How much of what each key says others say too (R-KV, arXiv 2505.24133).

    With S the cosine similarities of all pairs (float32), its diagonal zeroed: every
    token i excuses the most recent one among the tokens j with S[i, j] > 0.5, that is
    S[i, j] = 0 there, so that of a group of near-duplicates the newest looks the least
    redundant. The redundancy of j is the softmax over j of the mean over i of S[i, j].

    Args:
        keys: [n, dim] of one layer and head, in the order of their positions.

    Returns:
        float32 [n], with the sum 1.

    Differs from the authors' code where a token i has no similar one: theirs then
    excuses token 0, a side effect of taking the maximum over indices, ours nobody. S
    is never stored: its column sums are products with the sum of all keys, and the
    pairs are searched from the newest back, only for the tokens that have not found
    theirs. Costs between n and n * n products of keys.
    """
    if not len(keys):
        return torch.zeros(0)
    keys = keys.float()
    unit = keys / (keys.norm(dim=-1, keepdim=True) + _EPSILON)
    total = unit @ unit.sum(dim=0) - unit.square().sum(dim=-1)
    newest, similarity = _newest_similar(unit)
    found = newest >= 0
    total.index_add_(0, newest[found], similarity[found], alpha=-1)
    return torch.softmax(total / len(keys), dim=0)


def _newest_similar(unit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each unit vector of [n, dim] the last other one that is similar to it:
    its index, int64 [n], -1 for none, and the similarity, float32 [n]."""
    newest = torch.full((len(unit),), -1)
    similarity = torch.zeros(len(unit))
    seeking = torch.arange(len(unit))
    for end in range(len(unit), 0, -_BLOCK):
        start = max(0, end - _BLOCK)
        near = unit[seeking] @ unit[start:end].T
        own = (seeking >= start) & (seeking < end)
        near[own, seeking[own] - start] = 0
        order = torch.arange(end - start, dtype=torch.int32)
        last = torch.where(near > SIMILAR, order, -1).amax(dim=1).long()
        found = last >= 0
        newest[seeking[found]] = last[found] + start
        similarity[seeking[found]] = near[found, last[found]]
        seeking = seeking[~found]
        if not len(seeking):
            break
    return newest, similarity
