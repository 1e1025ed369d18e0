"""Attention weights of decode queries against a float64 reference."""

import numpy as np
import pytest
import torch

from sglang_tiered.attention.scores import ForwardScores, ScoreFeed, decode_weights
from sglang_tiered.memory.score_book import ScoreBook

DIM = 16
KV_HEADS = 2


def reference(query: np.ndarray, keys: np.ndarray, scale: float) -> np.ndarray:
    """float64 [l]: the mean over query heads ([hq, d]) of their weights on ``keys``
    ([l, hkv, d])."""
    query, keys = query.astype(np.float64), keys.astype(np.float64)
    group = query.shape[0] // keys.shape[1]
    weights = np.zeros(len(keys))
    for head in range(len(query)):
        logits = scale * keys[:, head // group] @ query[head]
        weight = np.exp(logits - logits.max())
        weights += weight / weight.sum()
    return weights / len(query)


@pytest.mark.parametrize("batch", [1, 5, 17])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 4097])
@pytest.mark.parametrize("group", [1, 3, 7, 8])
def test_weights_equal_the_reference(group: int, length: int, batch: int) -> None:
    generator = torch.Generator().manual_seed(length * batch)
    query = 2 * torch.randn(batch, KV_HEADS * group, DIM, generator=generator)
    keys = torch.randn(batch, length, KV_HEADS, DIM, generator=generator)
    lengths = (length - torch.arange(batch) % 5).clamp(min=1)
    weights = decode_weights(query, keys, lengths, DIM**-0.5)
    assert weights.dtype == torch.float32
    for row, heads, rows, count in zip(weights, query, keys, lengths, strict=True):
        expected = reference(heads.numpy(), rows[:count].numpy(), DIM**-0.5)
        np.testing.assert_allclose(row[:count].numpy(), expected, rtol=1e-5)
        assert not row[count:].any()


def test_keys_past_the_length_do_not_matter() -> None:
    query, keys = torch.randn(2, 4, DIM), torch.randn(2, 9, KV_HEADS, DIM)
    lengths = torch.tensor([4, 9])
    clean = decode_weights(query, keys, lengths, 0.5)
    keys[0, 4:] = torch.nan
    assert torch.equal(decode_weights(query, keys, lengths, 0.5), clean)


def test_a_query_spends_a_weight_of_one() -> None:
    weights = decode_weights(
        torch.randn(3, 6, DIM), torch.randn(3, 50, 2, DIM), torch.full((3,), 50), 0.25
    )
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(3))


def test_very_large_logits_do_not_overflow() -> None:
    query, keys = torch.ones(1, 2, DIM), torch.zeros(1, 3, 2, DIM)
    keys[0, 1] = 1e4
    weights = decode_weights(query, keys, torch.tensor([3]), 1.0)
    assert weights.tolist() == [[0, 1, 0]]


def test_half_precision_keys_are_scored_in_single_precision() -> None:
    query = torch.randn(1, 4, DIM).bfloat16()
    keys = torch.randn(1, 30, KV_HEADS, DIM).bfloat16()
    weights = decode_weights(query, keys, torch.tensor([30]), 0.25)
    expected = reference(query[0].float().numpy(), keys[0].float().numpy(), 0.25)
    np.testing.assert_allclose(weights[0].numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("every", "layers", "last"),
    [(1, 30, 29), (2, 30, 28), (3, 7, 6), (4, 7, 4), (7, 7, 0)],
)
def test_scores_are_entered_after_the_last_scored_layer(
    every: int, layers: int, last: int
) -> None:
    assert ScoreFeed(ScoreBook(2, 1), every, layers).last_layer == last


@pytest.mark.parametrize("every", [0, 8])
def test_an_interval_that_skips_every_layer_is_refused(every: int) -> None:
    with pytest.raises(ValueError, match=f"score_layers {every}: must be between 1"):
        ScoreFeed(ScoreBook(2, 1), every, 7)


def test_lanes_of_another_batch_are_refused() -> None:
    book = ScoreBook(9, 1)
    book.lanes = np.ones(3, dtype=bool)
    ids = torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="3 lanes for a batch of 2"):
        ForwardScores(ScoreFeed(book, 1, 1), ids, ids > 0)
