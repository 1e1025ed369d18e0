"""The CPU backend over real tensors: stock's bits, and the scores it feeds.

Rows lie scattered over T0 and the window of NaN-filled buffers, so that reading any
other row shows.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from test_scores import reference as reference_weights

from sglang_tiered.attention.cpu import TieredCpuAttnBackend
from sglang_tiered.attention.scores import ScoreFeed
from sglang_tiered.memory.page_table import PageTable
from sglang_tiered.memory.score_book import ScoreBook

LAYERS = 3
DIM = 16
KV_HEADS = 2
DROPPED = -1

Array = np.ndarray


class Pool:
    """Requests of some lengths over a paged pool, and the backends that read it.

    Each request's row of ``req_to_token`` goes on, past its length, with ids of pages
    that hold NaN or are dropped.
    """

    def __init__(
        self,
        lengths: list[int],
        *,
        page_size: int = 1,
        group: int = 3,
        layers: int = LAYERS,
        score_layers: int = 1,
        dtype: torch.dtype = torch.float32,
        shared: int = 0,
    ) -> None:
        random = np.random.default_rng(sum(lengths) + page_size)
        self.lengths = torch.tensor(lengths)
        self.page_size, self.group, self.layers = page_size, group, layers
        counts = [-(-length // page_size) for length in lengths]
        live = sum(counts)
        virtual = live + 2
        window_base = 1 + live + 1 + 3
        total = window_base + live
        # Half the pages of each request are in T0 and half in the window, as it comes.
        physical = np.concatenate(
            [np.arange(1, live + 2), np.arange(window_base, total)]
        )
        physical = random.permutation(physical)[:virtual]
        self.table = PageTable(virtual, page_size)
        names = random.permutation(np.arange(1, virtual + 1))
        self.table.place(names, physical)
        self.garbage, gone = names[-2:]
        self.table.place(np.array([gone]), np.array([DROPPED]))

        self.pages = np.split(names[:live], np.cumsum(counts)[:-1])
        for pages in self.pages[1:]:
            pages[:shared] = self.pages[0][:shared]
        past = np.array([self.garbage, gone] * 8)
        longest = (max(counts) + len(past)) * page_size
        self.rows = torch.zeros(len(lengths) + 3, longest, dtype=torch.int32)
        self.requests = torch.from_numpy(random.permutation(len(self.rows)))
        self.requests = self.requests[: len(lengths)]
        for request, pages in zip(self.requests, self.pages, strict=True):
            ids = self._tokens(np.concatenate([pages, past]))
            self.rows[request, : len(ids)] = torch.from_numpy(ids)

        shape = (total * page_size, KV_HEADS, DIM)
        self.k = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(layers)]
        self.v = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(layers)]
        self.dtype = dtype
        generator = torch.Generator().manual_seed(len(lengths))
        for request in range(len(lengths)):
            where = self.table.translate(torch.from_numpy(self.ids(request)))
            for buffer in (*self.k, *self.v):
                rows = torch.randn(len(where), KV_HEADS, DIM, generator=generator)
                buffer[where] = rows.to(dtype)
        self.generator = generator

        self.attention = [
            RadixAttention(KV_HEADS * group, DIM, DIM**-0.5, KV_HEADS, layer)
            for layer in range(layers)
        ]
        self.backend = TieredCpuAttnBackend(self._runner(self.rows, self.k, self.v))
        self.backend.kv_index_translator = SimpleNamespace(
            full_v2p_table=self.table.v2p, page_size=page_size
        )
        self.book = ScoreBook(virtual + 1, page_size)
        self.backend.scores = ScoreFeed(self.book, score_layers, layers)

    @staticmethod
    def _runner(
        rows: torch.Tensor, k: list[torch.Tensor], v: list[torch.Tensor]
    ) -> SimpleNamespace:
        return SimpleNamespace(
            device="cpu",
            req_to_token_pool=SimpleNamespace(req_to_token=rows),
            token_to_kv_pool=SimpleNamespace(
                get_key_buffer=k.__getitem__, get_value_buffer=v.__getitem__
            ),
        )

    def _tokens(self, pages: Array) -> Array:
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).ravel()

    def ids(self, request: int) -> Array:
        """The virtual ids of a request's tokens."""
        return self._tokens(self.pages[request])[: int(self.lengths[request])]

    def kept_ids(self, request: int) -> Array:
        """Those of them that have a row."""
        ids = self.ids(request)
        return ids[self.table.v2p.numpy()[ids // self.page_size] != DROPPED]

    def drop(self, request: int, *index: int) -> None:
        """Drop pages of a request and let nobody read their rows."""
        pages = self.pages[request][list(index)]
        physical = self.table.v2p[torch.from_numpy(pages)]
        for buffer in (*self.k, *self.v):
            buffer.unflatten(0, (-1, self.page_size))[physical] = torch.nan
        self.table.place(pages, np.full(len(pages), DROPPED))

    def query(self, tokens: int | None = None) -> torch.Tensor:
        """float [layers, tokens, query heads * DIM], by default one per request."""
        heads = KV_HEADS * self.group
        shape = (self.layers, tokens or len(self.lengths), heads * DIM)
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def forward(
        self, query: torch.Tensor, *, lanes: list[int], new: list[int] | None = None
    ) -> torch.Tensor:
        """One forward of our backend: the output of every layer."""
        self.book.lanes = np.isin(np.arange(len(self.lengths)), lanes)
        return self._run(self.backend, query, self.requests, self.lengths, new)

    def stock(self, query: torch.Tensor, new: list[int] | None = None) -> torch.Tensor:
        """The same of SGLang's backend, over buffers that hold just the kept rows,
        untranslated and in the order of the sequences."""
        kept = [self.kept_ids(request) for request in range(len(self.lengths))]
        lengths = torch.tensor([len(ids) for ids in kept])
        where = self.table.translate(torch.from_numpy(np.concatenate(kept)))
        rows = torch.zeros(len(kept), int(lengths.max()), dtype=torch.int32)
        ends = lengths.cumsum(0).tolist()
        for row, start, end in zip(rows, [0, *ends], ends, strict=False):
            row[: end - start] = torch.arange(start, end)
        backend = TorchNativeAttnBackend(
            self._runner(rows, [k[where] for k in self.k], [v[where] for v in self.v])
        )
        requests = torch.arange(len(kept))
        return self._run(backend, query, requests, lengths, new)

    def _run(
        self,
        backend: TorchNativeAttnBackend,
        query: torch.Tensor,
        requests: torch.Tensor,
        lengths: torch.Tensor,
        new: list[int] | None,
    ) -> torch.Tensor:
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE if new is None else ForwardMode.MIXED,
            req_pool_indices=requests,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            out_cache_loc=None,
            encoder_lens=None,
        )
        if new is not None:
            batch.extend_seq_lens = torch.tensor(new, dtype=torch.int32)
            # As the scheduler counts: dropped rows included. Stock here has none.
            batch.extend_prefix_lens = (lengths - batch.extend_seq_lens).int()
        backend.init_forward_metadata(batch)
        return torch.stack(
            [
                backend.forward(q, None, None, layer, batch, save_kv_cache=False)
                for q, layer in zip(query, self.attention, strict=True)
            ]
        )

    def kept(self, buffers: list[torch.Tensor], layer: int, request: int) -> Array:
        """float64 [l, kv heads, DIM]: a request's kept rows in order."""
        where = self.table.translate(torch.from_numpy(self.kept_ids(request)))
        return buffers[layer][where].double().numpy()

    def weights(self, query: torch.Tensor, request: int, layer: int) -> Array:
        """float64 [l]: what the last row of ``query`` spends on the kept rows."""
        heads = query[layer].float().view(-1, KV_HEADS * self.group, DIM)
        keys = self.kept(self.k, layer, request)
        return reference_weights(heads[request].numpy(), keys, DIM**-0.5)

    def expected(
        self, *queries: torch.Tensor, lanes: list[int], every: int = 1
    ) -> Array:
        """The book's scores after decode forwards of ``queries``."""
        score = np.zeros(len(self.book.score))
        scored = range(0, self.layers, every)
        for query in queries:
            for request in lanes:
                weights = [self.weights(query, request, layer) for layer in scored]
                score[self.kept_ids(request)] += np.mean(weights, axis=0)
        return score


def check_scores(pool: Pool, expected: Array) -> None:
    np.testing.assert_allclose(pool.book.score, expected, rtol=1e-5)


def reference_output(query: Array, keys: Array, values: Array) -> Array:
    """float64 [heads, d]: attention of one query ([heads, d]) over rows."""
    group = len(query) // keys.shape[1]
    out = []
    for head, q in enumerate(query):
        logits = keys[:, head // group] @ q * DIM**-0.5
        weight = np.exp(logits - logits.max())
        out.append(weight / weight.sum() @ values[:, head // group])
    return np.stack(out)


def check_output(pool: Pool, query: torch.Tensor, output: torch.Tensor) -> None:
    """Decode output against attention over exactly the kept rows."""
    for layer in range(pool.layers):
        for request in range(len(pool.lengths)):
            expected = reference_output(
                query[layer, request].double().view(-1, DIM).numpy(),
                pool.kept(pool.k, layer, request),
                pool.kept(pool.v, layer, request),
            )
            error = output[layer, request].view(-1, DIM).numpy() - expected
            assert np.linalg.norm(error) <= 1e-5 * np.linalg.norm(expected)


PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 16])


@PAGE_SIZES
@pytest.mark.parametrize("batch", [1, 5, 17])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 4097])
@pytest.mark.parametrize("group", [1, 3, 7, 8])
def test_scores_equal_the_reference(
    group: int, length: int, batch: int, page_size: int
) -> None:
    lengths = [max(1, length - 37 * lane) for lane in range(batch)]
    pool = Pool(lengths, page_size=page_size, group=group, layers=2)
    query, lanes = pool.query(), list(range(batch))
    pool.forward(query, lanes=lanes)
    check_scores(pool, pool.expected(query, lanes=lanes))
    seen = np.concatenate([pool.ids(request) for request in lanes])
    assert np.flatnonzero(pool.book.steps).tolist() == sorted(seen)
    assert set(pool.book.steps[seen]) == {1}


@PAGE_SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_the_output_is_that_of_stock_bit_for_bit(
    group: int, dtype: torch.dtype, page_size: int
) -> None:
    pool = Pool([1, 63, 300, 64, 129], page_size=page_size, group=group, dtype=dtype)
    query = pool.query()
    stock = pool.stock(query)
    assert torch.isfinite(stock).all()
    assert torch.equal(pool.forward(query, lanes=[]), stock)
    assert torch.equal(pool.forward(query, lanes=[0, 1, 2, 3, 4]), stock)
    assert torch.equal(pool.forward(query, lanes=[1, 3]), stock)
    pool.backend.scores = None
    assert torch.equal(pool.forward(query, lanes=[]), stock)


def test_half_precision_rows_are_scored() -> None:
    pool = Pool([40, 90], dtype=torch.bfloat16)
    query = pool.query()
    pool.forward(query, lanes=[0, 1])
    check_scores(pool, pool.expected(query, lanes=[0, 1]))


def test_only_the_lanes_that_are_asked_for_are_scored() -> None:
    pool = Pool([40, 90, 7])
    query = pool.query()
    pool.forward(query, lanes=[0, 2])
    check_scores(pool, pool.expected(query, lanes=[0, 2]))
    assert not pool.book.steps[pool.ids(1)].any()


def test_without_a_lane_the_book_is_left_alone() -> None:
    pool = Pool([40, 90])
    pool.forward(pool.query(), lanes=[])
    assert not pool.book.score.any()
    assert not pool.book.steps.any()


def test_forwards_add_up() -> None:
    pool = Pool([40, 90], page_size=16)
    queries = [pool.query() for _ in range(3)]
    for query in queries:
        pool.forward(query, lanes=[0, 1])
    check_scores(pool, pool.expected(*queries, lanes=[0, 1]))
    assert set(pool.book.steps[pool.ids(1)]) == {3}


@PAGE_SIZES
def test_a_shared_row_is_scored_by_each_reader(page_size: int) -> None:
    pool = Pool([50, 70], page_size=page_size, shared=2)
    query = pool.query()
    pool.forward(query, lanes=[0, 1])
    check_scores(pool, pool.expected(query, lanes=[0, 1]))
    shared = 2 * page_size
    assert set(pool.book.steps[pool.ids(0)[:shared]]) == {2}
    assert set(pool.book.steps[pool.ids(0)[shared:]]) == {1}


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_score_is_the_mean_over_the_scored_layers(every: int) -> None:
    pool = Pool([40, 90], layers=7, score_layers=every)
    query = pool.query()
    pool.forward(query, lanes=[0, 1])
    check_scores(pool, pool.expected(query, lanes=[0, 1], every=every))
    assert float(pool.book.score.sum()) == pytest.approx(2)


def test_layers_that_do_not_look_at_every_row_are_no_part_of_the_mean() -> None:
    """A sliding window in every other layer: the others say what is looked at."""
    pool = Pool([40, 90], layers=4)
    for layer in (1, 3):
        pool.attention[layer].sliding_window_size = 16
    query = pool.query()
    pool.forward(query, lanes=[0, 1])
    check_scores(pool, pool.expected(query, lanes=[0, 1], every=2))
    assert float(pool.book.score.sum()) == pytest.approx(2)


def test_without_a_layer_that_looks_at_every_row_nothing_is_scored() -> None:
    pool = Pool([40, 90], layers=4, score_layers=2)
    for layer in (0, 2):
        pool.attention[layer].sliding_window_size = 16
    pool.forward(pool.query(), lanes=[0, 1])
    assert not pool.book.steps.any()


def test_a_row_that_is_written_anew_starts_at_zero() -> None:
    pool = Pool([40])
    first, second = pool.query(), pool.query()
    pool.forward(first, lanes=[0])
    anew = pool.ids(0)[10:20]
    pool.book.reset(anew)
    expected = pool.expected(first, lanes=[0])
    expected[anew] = 0
    pool.forward(second, lanes=[0])
    check_scores(pool, expected + pool.expected(second, lanes=[0]))
    assert set(pool.book.steps[anew]) == {1}


@PAGE_SIZES
def test_a_row_keeps_its_score_where_it_moves(page_size: int) -> None:
    pool = Pool([100, 60], page_size=page_size)
    first, second = pool.query(), pool.query()
    pool.forward(first, lanes=[0, 1])
    expected = pool.expected(first, second, lanes=[0, 1])
    # Two pages change places, each with its rows.
    pages = pool.pages[0][[1, 4]]
    old = pool.table.v2p[torch.from_numpy(pages)]
    for buffer in (*pool.k, *pool.v):
        rows = buffer.unflatten(0, (-1, page_size))
        rows[old.flip(0)] = rows[old]
    pool.table.place(pages, old.flip(0).numpy())
    pool.forward(second, lanes=[0, 1])
    check_scores(pool, expected)


@PAGE_SIZES
def test_dropped_rows_are_left_out(page_size: int) -> None:
    pool = Pool([100, 60, 33], page_size=page_size)
    pool.drop(0, 0, 2, 3)
    pool.drop(2, 1)
    query = pool.query()
    output = pool.forward(query, lanes=[])
    assert torch.equal(output, pool.stock(query))
    check_output(pool, query, output)


@PAGE_SIZES
def test_only_kept_rows_are_scored(page_size: int) -> None:
    pool = Pool([100, 60, 33], page_size=page_size)
    pool.drop(0, 0, 2, 3)
    pool.drop(2, 1)
    query = pool.query()
    output = pool.forward(query, lanes=[0, 1, 2])
    assert torch.equal(output, pool.stock(query))
    check_scores(pool, pool.expected(query, lanes=[0, 1, 2]))
    gone = np.setdiff1d(pool.ids(0), pool.kept_ids(0))
    assert len(gone) == 3 * page_size
    assert not pool.book.steps[gone].any()


def test_ids_past_the_length_may_be_dropped_pages() -> None:
    """Every row of ``req_to_token`` here goes on with such ids."""
    pool = Pool([20, 3], page_size=1)
    query = pool.query()
    output = pool.forward(query, lanes=[0, 1])
    assert pool.backend._kept_lengths is None
    check_output(pool, query, output)


@PAGE_SIZES
def test_a_mixed_batch_scores_its_decode_lanes(page_size: int) -> None:
    pool = Pool([40, 64, 90, 30], page_size=page_size)
    new = [40, 17, 1, 1]
    query = pool.query(sum(new))
    output = pool.forward(query, lanes=[2, 3], new=new)
    assert torch.equal(output, pool.stock(query, new))
    last = query[:, np.cumsum(new) - 1]
    check_scores(pool, pool.expected(last, lanes=[2, 3]))


@PAGE_SIZES
def test_a_mixed_batch_leaves_dropped_rows_out(page_size: int) -> None:
    """Of prefixes and of decode lanes; new rows are always there."""
    pool = Pool([40, 100, 90, 35], page_size=page_size)
    pool.drop(1, 0, 2)
    pool.drop(2, 1, 2, 4)
    new = [40, 17, 1, 1]
    query = pool.query(sum(new))
    output = pool.forward(query, lanes=[2, 3], new=new)
    assert torch.equal(output, pool.stock(query, new))
    last = query[:, np.cumsum(new) - 1]
    check_output(pool, last[:, :], output[:, np.cumsum(new) - 1])
    check_scores(pool, pool.expected(last, lanes=[2, 3]))


def test_lanes_of_another_batch_are_refused() -> None:
    pool = Pool([40, 90])
    pool.forward(pool.query(), lanes=[0])
    pool.lengths, pool.requests = pool.lengths[:1], pool.requests[:1]
    book_lanes = np.ones(2, dtype=bool)
    pool.book.lanes = book_lanes
    with pytest.raises(RuntimeError, match="2 lanes for a batch of 1"):
        pool._run(pool.backend, pool.query(), pool.requests, pool.lengths, None)
