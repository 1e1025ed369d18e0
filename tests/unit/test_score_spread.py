"""Scores of rows that are spread over T0, T1 and T2, against a float64 reference.

Backing, host pool, int8 pool, engine, manager, page table, score book and attention
backend are the real ones: the keys that are scored have been through all the copies
that a server makes. The reference reads no device memory: an exact row is what was
written, a rounded one what the int8 pool makes of it.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from test_scores import reference
from tiers import NO_PAGES, Array, Tiers, batch_of

from sglang_tiered.attention.cpu import TieredCpuAttnBackend
from sglang_tiered.attention.scores import ScoreFeed
from sglang_tiered.memory.layout import RowBuffer
from sglang_tiered.policy.hierarchy import Hierarchy

LAYERS, KV_HEADS, DIM = 2, 2, 8
SCALE = DIM**-0.5
LAYER = tuple(RowBuffer(name, (KV_HEADS, DIM), torch.float32) for name in "kv")


class Spread(Tiers):
    """Requests with random keys and values, and attention that reads them.

    Request i is in row i + 1 of ``req_to_token``.
    """

    def __init__(self, lengths: list[int], *, page_size: int, group: int) -> None:
        pages = sum(-(-(length + 1) // page_size) for length in lengths)
        super().__init__(
            page_size=page_size,
            t0=pages,
            window=pages,
            host=pages,
            int8=pages,
            rows=len(lengths) + 1,
            # A fixed share stays in T0: no row returns there by itself.
            policy=Hierarchy(hbm_ratio=0.5),
            layers=(LAYER,) * LAYERS,
        )
        self.group = group
        self.random = np.random.default_rng(sum(lengths) + group)
        self.row = np.arange(1, len(lengths) + 1)
        self.lengths = np.zeros(len(lengths), dtype=np.int64)
        room = max(lengths) + page_size + 1
        self.rows = torch.zeros(len(lengths) + 1, room, dtype=torch.int32)
        tokens = len(self.manager.scores.score)
        self.keys = np.full((LAYERS, tokens, KV_HEADS, DIM), np.nan, np.float32)
        self.expected = np.zeros(tokens)
        self.attention = [
            RadixAttention(KV_HEADS * group, DIM, SCALE, KV_HEADS, layer)
            for layer in range(LAYERS)
        ]
        self.backend = TieredCpuAttnBackend(
            SimpleNamespace(
                device="cpu",
                req_to_token_pool=SimpleNamespace(req_to_token=self.rows),
                token_to_kv_pool=SimpleNamespace(
                    get_key_buffer=lambda layer: self.buffer(layer, "k"),
                    get_value_buffer=lambda layer: self.buffer(layer, "v"),
                ),
            )
        )
        self.backend.kv_index_translator = SimpleNamespace(
            full_v2p_table=self.manager.table.v2p, page_size=page_size
        )
        self.backend.scores = ScoreFeed(self.manager.scores, 1, LAYERS)
        self.forward(np.array(lengths), decode=False)

    def buffer(self, layer: int, name: str) -> torch.Tensor:
        """As the pool hands it to attention: once its window is filled."""
        self.engine.wait_until(layer)
        return self.backing.buffer(layer, name)

    def ids(self, request: int, start: int = 0) -> Array:
        """The virtual ids of a request's tokens from ``start`` on."""
        row = self.rows[request + 1, start : self.lengths[request]]
        return row.numpy().astype(np.int64)

    # -- moves -------------------------------------------------------------------

    def full_pages(self) -> Array:
        """Virtual pages that no later step writes, request by request."""
        ps = self.page_size
        return np.concatenate(
            [
                self.rows[row, : length // ps * ps : ps].numpy().astype(np.int64) // ps
                for row, length in zip(self.row, self.lengths, strict=True)
            ]
        )

    def spread(self, first: int = 0) -> tuple[Array, Array, Array]:
        """A third of the pages of every request in each of T0, T1 and T2; the first
        page of all is in tier ``first``."""
        pages = self.full_pages()
        tier = (np.arange(len(pages)) + first) % 3
        in_t0, in_t1, in_t2 = (pages[tier == number] for number in range(3))
        self.demote(in_t1)
        self.compress(in_t2)
        assert (self.ledger.t1, self.ledger.t2) == (len(in_t1), len(in_t2))
        return in_t0, in_t1, in_t2

    def demote(self, pages: Array) -> None:
        self.manager._demote(pages)

    def compress(self, pages: Array) -> None:
        self.manager._compress(pages)

    def promote(self, pages: Array) -> None:
        # The newest rows return by themselves after a decode step.
        self.manager._promote(pages[self.ledger.t0_page[pages] < 0])

    # -- forwards ----------------------------------------------------------------

    def forward(self, new: Array, *, decode: bool = True) -> None:
        """A forward that writes ``new[i]`` rows of request i. A decode step then
        attends to all rows."""
        before, self.lengths = self.lengths, self.lengths + new
        for request, (start, end) in enumerate(zip(before, self.lengths, strict=True)):
            self.allocate(request + 1, start, end)
        new_ids = np.concatenate(
            [self.ids(request, start) for request, start in enumerate(before)]
        )
        entries = zip(self.row, self.lengths, new, 0 * new, strict=True)
        batch = batch_of(*entries, ids=new_ids, decode=decode)
        self.manager.begin_forward(batch, None if decode else NO_PAGES)
        self.write_random(new_ids)
        if decode:
            self.attend()
        self.manager.end_forward(batch)
        self.check_integrity()

    def allocate(self, row: int, start: int, end: int) -> None:
        ps = self.page_size
        have, need = -(-start // ps), -(-end // ps)
        assert self.manager.make_room(need - have)
        pages = self.manager.allocate(need - have)
        ids = (pages[:, None] * ps + np.arange(ps)).ravel()
        self.rows[row, have * ps : need * ps] = torch.from_numpy(ids)

    def write_random(self, ids: Array) -> None:
        where = self.manager.table.translate(torch.from_numpy(ids))
        shape = (len(ids), KV_HEADS, DIM)
        for layer in range(LAYERS):
            self.keys[layer, ids] = self.random.standard_normal(shape)
            for name in "kv":
                rows = torch.from_numpy(self.keys[layer, ids])
                self.backing.buffer(layer, name)[where] = rows
        self.expected[ids] = 0

    def attend(self) -> None:
        """Attention of every layer; what it should add to the scores."""
        lengths = torch.from_numpy(self.lengths)
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            req_pool_indices=torch.from_numpy(self.row),
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            out_cache_loc=None,
            encoder_lens=None,
        )
        self.backend.init_forward_metadata(batch)
        heads = KV_HEADS * self.group
        shape = (LAYERS, len(lengths), heads, DIM)
        query = self.random.standard_normal(shape).astype(np.float32)
        for layer, attention in enumerate(self.attention):
            out = self.backend.forward(
                torch.from_numpy(query[layer]).flatten(1),
                None,
                None,
                attention,
                batch,
                save_kv_cache=False,
            )
            assert torch.isfinite(out).all()
            rounded = self._int8_rows(layer, "k")
            for request in range(len(lengths)):
                ids = self.ids(request)
                keys = self.keys_read(layer, ids, rounded)
                weights = reference(query[layer, request], keys, SCALE)
                self.expected[ids] += weights / LAYERS

    def keys_read(self, layer: int, ids: Array, rounded: Array) -> Array:
        """The keys of tokens ``ids``: [n, kv heads, d]. ``rounded``: what the int8
        pool makes of its pages, [int8 pages, page size, row width]."""
        keys = self.keys[layer, ids]
        lossy = self.ledger.is_lossy(ids // self.page_size)
        page = self.ledger.int8_page[ids[lossy] // self.page_size]
        rows = rounded[page, ids[lossy] % self.page_size]
        keys[lossy] = rows.reshape(-1, KV_HEADS, DIM)
        return keys

    def check_scores(self) -> None:
        score = self.manager.scores.score
        np.testing.assert_allclose(score, self.expected, rtol=1e-5)


Make = Callable[..., Spread]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Spread] = []

    def make_spread(
        length: int, batch: int = 1, *, page_size: int = 1, group: int = 3
    ) -> Spread:
        lengths = [max(1, length - lane % 5) for lane in range(batch)]
        made.append(Spread(lengths, page_size=page_size, group=group))
        return made[-1]

    yield make_spread
    for spread in made:
        spread.close()


def matrix(test: Callable[..., None]) -> Callable[..., None]:
    for name, values in (
        ("page_size", [1, 16]),
        ("batch", [1, 5, 17]),
        ("length", [1, 63, 64, 65, 4097]),
        ("group", [1, 3, 7, 8]),
    ):
        test = pytest.mark.parametrize(name, values)(test)
    return test


@matrix
def test_rows_in_every_tier_are_scored_like_the_reference(
    make: Make, group: int, length: int, batch: int, page_size: int
) -> None:
    spread = make(length, batch, page_size=page_size, group=group)
    # Another tier for each group: the one row of the shortest request was in all.
    spread.spread(group)
    spread.forward(0 * spread.lengths)
    spread.check_scores()


@matrix
def test_rows_that_move_keep_their_scores_and_gather_more(
    make: Make, group: int, length: int, batch: int, page_size: int
) -> None:
    """Demoted, promoted, compressed, and promoted after that; then a step that writes
    a row."""
    spread = make(length, batch, page_size=page_size, group=group)
    in_t0, in_t1, in_t2 = spread.spread(group)
    spread.forward(0 * spread.lengths)
    before = spread.manager.scores.score.copy()
    spread.promote(in_t1)
    spread.promote(in_t2)
    spread.demote(in_t0)
    spread.compress(in_t0[::2])
    rounded = len(in_t0[::2])
    assert (spread.ledger.t1, spread.ledger.t2) == (len(in_t0) - rounded, rounded)
    assert np.array_equal(spread.manager.scores.score, before)
    spread.forward(1 + 0 * spread.lengths)
    spread.check_scores()


def test_the_reference_would_notice_that_rows_were_rounded(make: Make) -> None:
    """Or the matrix would say nothing about T2."""
    spread = make(64)
    spread.spread()
    spread.keys_read = lambda layer, ids, rounded: spread.keys[layer, ids]  # type: ignore[method-assign]
    spread.forward(0 * spread.lengths)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        spread.check_scores()


def test_the_reference_would_notice_a_fill_that_is_left_out(make: Make) -> None:
    spread = make(64)
    spread.spread()
    spread.engine.skip_fill = True
    with pytest.raises(AssertionError, match="isfinite"):
        spread.forward(0 * spread.lengths)
