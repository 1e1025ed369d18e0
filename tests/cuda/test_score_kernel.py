"""The score pass against a float64 softmax, interpreted and guarded.

The guard lets it read the key rows of scored requests and nothing else of the key
buffers, and what the workspaces hold at first is NaN: whoever reads it shows.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from sglang_tiered.attention.score_kernel import PackedTable, ScorePass
from sglang_tiered.attention.scores import decode_weights
from tests.cuda.interpreter import Guard, KernelFault, shuffled_programs

pytestmark = pytest.mark.interpreted

KV_HEADS, SPARE = 2, 20
# Of a weight, for any type of the keys: products of two-byte numbers are exact in
# float32, in which everything is computed.
BOUND = 1e-5
LENGTHS = (1, 63, 64, 65, 300)
# Of Linux; Python has it only since 3.13.
MAP_NORESERVE = 0x4000

every_group = pytest.mark.parametrize("group", [1, 3, 7, 8, 16])
every_dim = pytest.mark.parametrize("dim", [64, 128, 256])
every_dtype = pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16],
    ids=["fp32", "bf16", "fp16"],
)
both_endings = pytest.mark.parametrize(
    "deterministic", [False, True], ids=["atomic", "ordered"]
)


@dataclass(frozen=True)
class Layer:
    """Query of each request, and keys by token id."""

    query: torch.Tensor
    keys: torch.Tensor


class Batch:
    """Requests with rows of given numbers, the first ``shared`` of them the same."""

    def __init__(
        self,
        *lengths: int,
        group: int = 4,
        dim: int = 64,
        dtype: torch.dtype = torch.float32,
        layers: int = 1,
        shared: int = 0,
        sharpness: float = 1.0,
    ) -> None:
        self.heads, self.scale = KV_HEADS * group, dim**-0.5
        self.tokens = sum(lengths) + SPARE
        self.lanes = torch.ones(len(lengths), dtype=torch.bool)
        order = np.random.default_rng(0).permutation(self.tokens)
        self.ids = np.split(order, np.cumsum(lengths))[:-1]
        for ids in self.ids[1:]:
            ids[:shared] = self.ids[0][:shared]
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.layers = [
            Layer(
                random(len(lengths), self.heads, dim).to(dtype),
                (random(self.tokens, KV_HEADS, dim) * sharpness).to(dtype),
            )
            for _ in range(layers)
        ]

    def table(self, row_of: np.ndarray) -> PackedTable:
        """With token i in the physical row ``row_of[i]``."""
        packed = np.concatenate(self.ids)
        bounds = np.cumsum([0, *map(len, self.ids)])
        return PackedTable(
            torch.from_numpy(bounds).int(),
            torch.from_numpy(row_of[packed]).int(),
            torch.from_numpy(packed),
            self.lanes,
        )

    def placed(self, layer: Layer, row_of: np.ndarray) -> torch.Tensor:
        """The layer's key buffer."""
        keys = torch.full((int(row_of.max()) + 1, *layer.keys.shape[1:]), torch.nan)
        keys = keys.to(layer.keys.dtype)
        keys[row_of] = layer.keys
        return keys

    def logits(self, layer: Layer, request: int) -> torch.Tensor:
        """float64 [heads, rows], of base e."""
        query = layer.query[request].double().view(KV_HEADS, -1, layer.query.shape[-1])
        keys = layer.keys[self.ids[request]].double()
        logits = torch.einsum("hgd,lhd->hgl", query, keys) * self.scale
        return logits.reshape(self.heads, -1)

    def log_sum_exp(self) -> torch.Tensor:
        """Of the first layer, float64 [b, heads], of base 2."""
        requests = range(len(self.ids))
        logits = [self.logits(self.layers[0], request) for request in requests]
        return torch.stack([each.logsumexp(-1) for each in logits]) / math.log(2)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Score and steps after one step, float64 [tokens]."""
        score, steps = np.zeros(self.tokens), np.zeros(self.tokens)
        for request in np.flatnonzero(self.lanes.numpy()):
            logits = [self.logits(layer, request) for layer in self.layers]
            weights = torch.stack([each.softmax(-1).mean(0) for each in logits])
            score[self.ids[request]] += weights.mean(0).numpy()
            steps[self.ids[request]] += 1
        return score, steps


class Scores:
    """A pass over a batch, watched, and the book that it enters into."""

    def __init__(
        self,
        batch: Batch,
        *,
        row_of: np.ndarray | None = None,
        programs: int = 24,
        deterministic: bool = False,
    ) -> None:
        self.batch = batch
        if row_of is None:
            row_of = np.random.default_rng(1).permutation(batch.tokens)
        self.table = batch.table(row_of)
        self.keys = [batch.placed(layer, row_of) for layer in batch.layers]
        lanes = batch.lanes.tolist()
        scored = [
            row_of[ids] for ids, lane in zip(batch.ids, lanes, strict=True) if lane
        ]
        self.scored_rows = np.unique(np.concatenate([*scored, []]).astype(int))
        self.scores = ScorePass(
            batch=len(batch.ids),
            heads=batch.heads,
            kv_heads=KV_HEADS,
            capacity=len(self.table.rows),
            device="cpu",
            programs=programs,
            deterministic=deterministic,
        )
        for workspace in self.scores.workspaces:
            workspace.fill_(torch.nan)
        self.score = torch.zeros(batch.tokens)
        self.steps = torch.zeros(batch.tokens)

    def guard(self, *others: torch.Tensor, rewrites: bool = False) -> Guard:
        table, layers = self.table, self.batch.layers
        tables = [table.indptr, table.rows, table.ids, table.lanes]
        queries = [layer.query for layer in layers]
        rows = [keys[row] for keys in self.keys for row in self.scored_rows]
        return Guard(
            [*tables, *queries, *rows, *others],
            [*self.scores.workspaces, self.score, self.steps],
            rewrites=rewrites,
        )

    def log_sum_exp(self) -> torch.Tensor:
        with self.guard():
            return self.scores.log_sum_exp(
                self.batch.layers[0].query, self.keys[0], self.table, self.batch.scale
            )

    def add(self, *lses: torch.Tensor) -> None:
        """All layers, with these log-sum-exps if there are any."""
        each = lses or [None] * len(self.keys)
        with self.guard(*lses):
            for layer, keys, lse in zip(
                self.batch.layers, self.keys, each, strict=True
            ):
                self.scores.add_layer(
                    layer.query, keys, self.table, self.batch.scale, lse
                )

    def enter(self) -> None:
        with self.guard(rewrites=self.scores.deterministic):
            self.scores.enter(self.score, self.steps, self.table)

    def step(self, *lses: torch.Tensor) -> None:
        self.add(*lses)
        self.enter()

    def check(self) -> None:
        score, steps = self.batch.expected()
        np.testing.assert_allclose(self.score.numpy(), score, rtol=BOUND, atol=0)
        np.testing.assert_array_equal(self.steps.numpy(), steps)


@every_dim
@every_group
def test_scores_are_those_of_a_softmax(group: int, dim: int) -> None:
    """flashinfer#4547: also the log-sum-exp is of the right base."""
    scores = Scores(Batch(*LENGTHS, group=group, dim=dim))
    scores.step()
    scores.check()


@every_dim
@every_group
def test_bfloat16_keys_lose_nothing(group: int, dim: int) -> None:
    scores = Scores(Batch(*LENGTHS, group=group, dim=dim, dtype=torch.bfloat16))
    scores.step()
    scores.check()


@every_dtype
@pytest.mark.parametrize("length", LENGTHS)
def test_a_batch_of_one_is_scored(length: int, dtype: torch.dtype) -> None:
    scores = Scores(Batch(length, dtype=dtype))
    scores.step()
    scores.check()


@every_dtype
def test_sharp_attention_is_scored_as_well(dtype: torch.dtype) -> None:
    """Logits to 50: they are off by as much of themselves, so weights by more."""
    batch = Batch(65, 300, dtype=dtype, sharpness=12.0)
    scores = Scores(batch)
    scores.step()
    np.testing.assert_allclose(scores.score, batch.expected()[0], rtol=1e-4, atol=1e-7)


def test_the_weights_of_a_request_sum_to_one() -> None:
    scores = Scores(Batch(300, layers=3))
    scores.step()
    assert scores.score.double().sum().item() == pytest.approx(1, abs=BOUND)


def test_the_scores_are_those_of_the_cpu() -> None:
    batch = Batch(300)
    scores = Scores(batch)
    scores.step()
    (layer,), (ids,) = batch.layers, batch.ids
    weights = decode_weights(
        layer.query, layer.keys[ids][None], torch.tensor([300]), batch.scale
    )
    np.testing.assert_allclose(scores.score[ids], weights[0], rtol=BOUND, atol=0)


def test_the_log_sum_exp_is_of_base_2() -> None:
    """flashinfer#4547."""
    batch = Batch(*LENGTHS)
    np.testing.assert_allclose(
        Scores(batch).log_sum_exp(), batch.log_sum_exp(), rtol=1e-6, atol=1e-6
    )


def test_the_log_sum_exp_of_a_backend_is_used() -> None:
    batch = Batch(*LENGTHS)
    scores = Scores(batch)
    scores.step(batch.log_sum_exp().float())
    scores.check()


def test_a_log_sum_exp_of_base_e_would_show() -> None:
    """flashinfer#4547: the check that these tests make sees it."""
    batch = Batch(*LENGTHS)
    scores = Scores(batch)
    scores.step(batch.log_sum_exp().float() * math.log(2))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        scores.check()


@pytest.mark.parametrize("programs", [1, 7, 1024])
def test_how_the_work_is_cut_changes_no_bit(programs: int) -> None:
    batch = Batch(*LENGTHS)
    lse = batch.log_sum_exp().float()
    one, other = Scores(batch), Scores(batch, programs=programs)
    one.step(lse)
    other.step(lse)
    assert torch.equal(one.score, other.score)


@both_endings
def test_where_rows_lie_changes_no_bit(deterministic: bool) -> None:
    """flashinfer#3219: a permuted page table."""
    batch = Batch(*LENGTHS, shared=1)
    orders = np.arange(batch.tokens), np.random.default_rng(5).permutation(batch.tokens)
    one, other = (
        Scores(batch, row_of=order, deterministic=deterministic) for order in orders
    )
    one.step()
    other.step()
    assert torch.equal(one.score, other.score)


@pytest.mark.parametrize("demoted", [0, 1])
def test_a_request_in_the_window_beside_one_in_t0(demoted: int) -> None:
    """flashinfer#4051, vllm#39148: all rows of one are demoted, none of the other."""
    batch = Batch(65, 65)
    row_of = np.random.default_rng(1).permutation(batch.tokens)
    row_of[batch.ids[demoted]] += 1000
    scores = Scores(batch, row_of=row_of)
    scores.step()
    scores.check()


def test_a_request_without_rows_has_an_empty_sum() -> None:
    """flashinfer#4051, vllm#39148: merging empty parts is not NaN."""
    assert (Scores(Batch(65, 0, 3)).log_sum_exp()[1] == -torch.inf).all()


@both_endings
def test_a_request_without_rows_does_not_disturb_the_others(
    deterministic: bool,
) -> None:
    """flashinfer#4051, vllm#39148."""
    scores = Scores(Batch(65, 0, 3), deterministic=deterministic)
    scores.step()
    scores.check()


def test_splits_without_rows_add_nothing() -> None:
    """flashinfer#4051, vllm#39148: one row, 63 empty parts beside its own."""
    batch = Batch(1)
    lse = Scores(batch, programs=1024).log_sum_exp()
    np.testing.assert_allclose(lse, batch.log_sum_exp(), rtol=1e-6, atol=1e-6)


@both_endings
def test_only_lanes_are_scored(deterministic: bool) -> None:
    batch = Batch(*LENGTHS)
    batch.lanes[[1, 4]] = False
    scores = Scores(batch, deterministic=deterministic)
    scores.step()
    scores.check()


def test_no_lane_scores_nothing() -> None:
    batch = Batch(65, 300)
    batch.lanes[:] = False
    scores = Scores(batch)
    scores.step()
    scores.check()


@both_endings
def test_a_score_is_the_mean_over_the_layers(deterministic: bool) -> None:
    scores = Scores(Batch(65, 300, layers=3), deterministic=deterministic)
    scores.step()
    scores.check()


@both_endings
def test_scores_add_up_over_steps(deterministic: bool) -> None:
    batch = Batch(65, 300, layers=2)
    scores = Scores(batch, deterministic=deterministic)
    expected = np.zeros(batch.tokens)
    for _ in range(2):
        scores.step()
        expected += batch.expected()[0]
        batch.layers = [replace(layer, query=-layer.query) for layer in batch.layers]
    np.testing.assert_allclose(scores.score, expected, rtol=BOUND, atol=0)
    assert set(scores.steps.tolist()) == {0, 2}


@both_endings
def test_a_shared_row_gets_something_from_each_request(deterministic: bool) -> None:
    scores = Scores(Batch(65, 300, 64, shared=40), deterministic=deterministic)
    scores.step()
    scores.check()


def in_any_order(deterministic: bool) -> list[torch.Tensor]:
    """Scores of rows that three requests share, programs in a new order each time."""
    found = []
    for seed in range(5):
        batch = Batch(100, 120, 90, shared=80)
        scores = Scores(batch, programs=16, deterministic=deterministic)
        scores.score[:] = torch.rand(
            batch.tokens, generator=torch.Generator().manual_seed(0)
        )
        with shuffled_programs(seed):
            scores.step()
        found.append(scores.score)
    return found


def test_the_ordered_ending_is_the_same_to_the_last_bit() -> None:
    first, *others = in_any_order(deterministic=True)
    assert all(torch.equal(first, other) for other in others)


def test_atomics_are_not_the_same_to_the_last_bit() -> None:
    """Or the test above would say nothing."""
    first, *others = in_any_order(deterministic=False)
    assert not all(torch.equal(first, other) for other in others)


def test_rows_that_nobody_shares_are_the_same_with_atomics_too() -> None:
    batch = Batch(100, 120, 90, shared=80)
    own = [ids[80:] for ids in batch.ids]
    first, *others = in_any_order(deterministic=False)
    for ids in own:
        assert all(torch.equal(first[ids], other[ids]) for other in others)


def test_a_token_shared_at_two_places_is_a_race_without_atomics() -> None:
    """What a table promises not to have; the guard sees it."""
    batch = Batch(300, 20)
    batch.ids[1][5] = batch.ids[0][290]
    scores = Scores(batch, deterministic=True)
    scores.add()
    with pytest.raises(KernelFault, match="race"):
        scores.enter()


def test_a_query_can_be_a_part_of_a_wider_tensor() -> None:
    batch = Batch(65, 300)
    query = batch.layers[0].query
    wide = torch.full((2, batch.heads + 4, 64), torch.nan)
    wide[:, : batch.heads] = query
    scores = Scores(batch)
    batch.layers[0] = replace(batch.layers[0], query=wide[:, : batch.heads])
    scores.step()
    scores.check()


def test_row_numbers_times_row_sizes_pass_32_bits() -> None:
    """flashinfer#3136: in elements as in bytes. Only touched rows of it exist."""
    batch = Batch(40, dtype=torch.bfloat16)
    row_elements = KV_HEADS * 64
    rows = (1 << 31) // row_elements + batch.tokens
    raw = mmap.mmap(-1, rows * row_elements * 2, mmap.MAP_PRIVATE | MAP_NORESERVE)
    keys = torch.frombuffer(raw, dtype=torch.bfloat16).view(rows, KV_HEADS, 64)
    keys[-batch.tokens :] = batch.layers[0].keys
    scores = Scores(batch)
    table = batch.table(np.arange(batch.tokens) + rows - batch.tokens)
    with scores.guard(table.rows, table.indptr, table.ids, keys[-batch.tokens :]):
        scores.scores.add_layer(batch.layers[0].query, keys, table, batch.scale)
        scores.scores.enter(scores.score, scores.steps, table)
    scores.check()


@both_endings
def test_bounds_beyond_the_table_write_nowhere(deterministic: bool) -> None:
    """sglang#24587: what lies behind rows, ids and workspaces is not touched."""
    scores = Scores(Batch(65, 300), deterministic=deterministic)
    scores.table.indptr[-1] += 400
    scores.step()
    scores.check()


def test_a_table_with_room_to_spare_is_fine() -> None:
    """sglang#24587: tables of graphs are as large as they can ever be."""
    batch = Batch(65, 300)
    scores = Scores(batch)
    small = scores.table
    spare = torch.full((50,), -77)
    scores.table = replace(
        small,
        rows=torch.cat([small.rows, spare.int()]),
        ids=torch.cat([small.ids, spare]),
    )
    scores.scores = ScorePass(
        batch=5, heads=batch.heads, kv_heads=KV_HEADS, capacity=500, device="cpu"
    )
    scores.step()
    scores.check()


def score_pass(heads: int = 8, kv_heads: int = 2) -> ScorePass:
    return ScorePass(
        batch=2, heads=heads, kv_heads=kv_heads, capacity=100, device="cpu"
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 2), (34, 2)])
def test_other_groups_are_refused(heads: int, kv_heads: int) -> None:
    with pytest.raises(ValueError, match="1 to 16 whole heads"):
        score_pass(heads, kv_heads)


def test_entering_without_a_layer_is_refused() -> None:
    scores = Scores(Batch(3))
    with pytest.raises(RuntimeError, match="without a layer"):
        scores.enter()


def test_other_head_sizes_are_refused() -> None:
    scores = Scores(Batch(3, dim=96))
    with pytest.raises(ValueError, match="head size 96"):
        scores.add()


def test_more_rows_than_the_pass_has_room_for_are_refused() -> None:
    """sglang#24587."""
    scores = Scores(Batch(101))
    scores.scores = score_pass()
    with pytest.raises(ValueError, match=r"1 requests with 101 rows: .* 2 with 100"):
        scores.add()


def test_more_requests_than_the_pass_has_room_for_are_refused() -> None:
    scores = Scores(Batch(1, 1, 1))
    scores.scores = score_pass()
    with pytest.raises(ValueError, match=r"3 requests with 3 rows: .* 2 with 100"):
        scores.add()


def test_a_log_sum_exp_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="lse"):
        Scores(Batch(3)).add(torch.zeros(1, 3))


def test_keys_of_another_type_are_refused() -> None:
    scores = Scores(Batch(3))
    scores.keys[0] = scores.keys[0].half()
    with pytest.raises(ValueError, match="one type"):
        scores.add()


def test_keys_of_other_heads_are_refused() -> None:
    scores = Scores(Batch(3))
    scores.keys[0] = torch.zeros(30, 3, 64)
    with pytest.raises(ValueError, match="keys"):
        scores.add()


@pytest.mark.parametrize(
    "wrong",
    [
        {"indptr": torch.zeros(2, dtype=torch.int32)},
        {"indptr": torch.zeros(3, dtype=torch.int64)},
        {"rows": torch.zeros(4, dtype=torch.int32)},
        {"rows": torch.zeros(5)},
        {"ids": torch.zeros(5, dtype=torch.int32)},
        {"ids": torch.zeros(10, dtype=torch.int64)[::2]},
        {"lanes": torch.zeros(2)},
    ],
    ids=[
        "bounds of one request",
        "wide bounds",
        "too few rows",
        "broken rows",
        "narrow ids",
        "ids with gaps",
        "lanes of weights",
    ],
)
def test_a_table_of_other_shapes_or_types_is_refused(
    wrong: dict[str, torch.Tensor],
) -> None:
    """flashinfer#320, #362."""
    right = {
        "indptr": torch.zeros(3, dtype=torch.int32),
        "rows": torch.zeros(5, dtype=torch.int32),
        "ids": torch.zeros(5, dtype=torch.int64),
        "lanes": torch.zeros(2, dtype=torch.bool),
    }
    PackedTable(**right)
    with pytest.raises(ValueError):
        PackedTable(**{**right, **wrong})
