"""The tiered allocator behind SGLang's interface, beside SGLang's own."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Server, scheduler_process
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from tiers import Tiers, batch_of

from sglang_tiered.memory.ledger import Ledger
from sglang_tiered.sglang.allocator import TieredAllocator

PAGE_SIZES = [1, 2, 16, 64]
T0, WINDOW, HOST = 12, 6, 20  # pages


class Pool:
    """An allocator, and the sequences that a scheduler would keep."""

    def __init__(self, page_size: int, *, t0: int = T0, host: int = HOST) -> None:
        self.page_size = page_size
        self.tiers = Tiers(page_size=page_size, t0=t0, window=WINDOW, host=host)
        self.allocator = TieredAllocator(
            size=(t0 + host) * page_size,
            page_size=page_size,
            dtype=torch.float32,
            device="cpu",
            kvcache=None,
            manager=self.tiers.manager,
            audit=True,
        )

    def extend(self, *sequences: tuple[list[int], int]) -> torch.Tensor | None:
        return extend(self.allocator, *sequences)

    def written(self) -> None:
        """The forward that writes all that was handed out is over."""
        self.allocator.take_new_ids()
        self.tiers.manager.begin_forward(batch_of(), np.empty(0, dtype=np.int64))
        self.tiers.manager.end_forward(batch_of())

    def used(self) -> int:
        return self.tiers.ledger.virtual.used * self.page_size


Allocator = Any  # ours or stock


def extend(
    allocator: Allocator, *sequences: tuple[list[int], int]
) -> torch.Tensor | None:
    """``alloc_extend`` for (ids so far, new tokens) of every request."""
    before = torch.tensor([len(ids) for ids, _ in sequences])
    after = before + torch.tensor([count for _, count in sequences])
    last = torch.tensor([ids[-1] if ids else -1 for ids, _ in sequences])
    total = int((after - before).sum())
    out: torch.Tensor | None = allocator.alloc_extend(
        before, before, after, after, last, total
    )
    return out


def decode(allocator: Allocator, sequences: list[list[int]]) -> torch.Tensor | None:
    after = torch.tensor([len(ids) + 1 for ids in sequences])
    last = torch.tensor([ids[-1] for ids in sequences])
    out: torch.Tensor | None = allocator.alloc_decode(after, after, last)
    return out


@pytest.fixture
def make_pool() -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(page_size: int, **sizes: int) -> Pool:
        made.append(Pool(page_size, **sizes))
        return made[-1]

    yield make
    for pool in made:
        pool.allocator.check_integrity()
        pool.tiers.close()


@pytest.fixture(params=PAGE_SIZES, ids=lambda size: f"page{size}")
def pool(request: pytest.FixtureRequest, make_pool: Callable[..., Pool]) -> Pool:
    return make_pool(request.param)


@pytest.fixture
def page4(make_pool: Callable[..., Pool]) -> Pool:
    return make_pool(4)


def tensor(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


# -- the shape of an answer


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_answers_have_the_shape_of_stock_answers(
    pool: Pool, data: st.DataObject
) -> None:
    """Any growth of any sequences: the same places in pages, continuing where stock
    continues, and the same number of pages left."""
    ps = pool.page_size
    pool.allocator.clear()
    stock = PagedTokenToKVPoolAllocator(
        T0 * ps, ps, torch.float32, "cpu", None, need_sort=False
    )
    ours: list[list[int]] = [[] for _ in range(3)]
    theirs: list[list[int]] = [[] for _ in range(3)]
    for _ in range(data.draw(st.integers(1, 5))):
        grow = [data.draw(st.integers(0, 2 * ps)) for _ in range(3)]
        need = sum(
            -(-(len(ids) + n) // ps) + -len(ids) // ps
            for ids, n in zip(ours, grow, strict=True)
        )
        if need > stock.available_size() // ps or not sum(grow):
            continue
        # Stock never has pages of one token: its count for a decode step is wrong.
        if ps > 1 and all(n == 1 and ids for n, ids in zip(grow, ours, strict=True)):
            one, other = decode(pool.allocator, ours), decode(stock, theirs)
        else:
            one = pool.extend(*zip(ours, grow, strict=True))
            other = extend(stock, *zip(theirs, grow, strict=True))
        assert one is not None
        assert other is not None
        assert one.dtype == other.dtype
        assert (one % ps).tolist() == (other % ps).tolist()
        parts, stock_parts = torch.split(one, grow), torch.split(other, grow)
        for mine, stocks, new, stock_new in zip(
            ours, theirs, parts, stock_parts, strict=True
        ):
            mine += new.tolist()
            stocks += stock_new.tolist()
        free = pool.tiers.ledger.t0.available * ps
        assert free == stock.available_size()
    pages = []
    for ids in ours:
        for start in range(0, len(ids), ps):
            page = ids[start : start + ps]
            assert page == list(range(page[0], page[0] + len(page)))
            pages.append(page[0])
    assert len(pages) == len(set(pages))


def test_whole_pages_are_handed_out_in_order(pool: Pool) -> None:
    ids = pool.allocator.alloc(3 * pool.page_size)
    assert ids is not None
    assert ids.dtype == torch.int64
    pages = ids.view(3, pool.page_size)
    assert (pages % pool.page_size == torch.arange(pool.page_size)).all()


def test_the_sink_page_is_never_handed_out(pool: Pool) -> None:
    ids = pool.allocator.alloc(T0 * pool.page_size)
    assert ids is not None
    assert int(ids.min()) == pool.page_size


def test_an_open_page_is_filled_first(page4: Pool) -> None:
    first = page4.extend(([], 6))
    assert first is not None
    more = page4.extend((first.tolist(), 3))
    assert more is not None
    assert more[:2].tolist() == [first[-1] + 1, first[-1] + 2]
    assert int(more[2]) % 4 == 0


def test_a_full_page_is_not_continued(page4: Pool) -> None:
    first = page4.extend(([], 8))
    assert first is not None
    more = decode(page4.allocator, [first.tolist()])
    assert more is not None
    assert int(more[0]) // 4 not in (first // 4).tolist()


def test_nothing_may_be_extended(page4: Pool) -> None:
    first = page4.extend(([], 6))
    assert first is not None
    more = page4.extend((first.tolist(), 0))
    assert more is not None
    assert more.tolist() == []


def test_new_ids_are_kept_for_the_forward(page4: Pool) -> None:
    first = page4.extend(([], 6))
    assert first is not None
    second = decode(page4.allocator, [first.tolist()])
    assert second is not None
    new = page4.allocator.take_new_ids()
    assert new.tolist() == [*first.tolist(), *second.tolist()]
    assert page4.allocator.take_new_ids().tolist() == []


def test_a_page_that_left_t0_returns_to_be_written(page4: Pool) -> None:
    first = page4.extend(([], 6))
    assert first is not None
    page4.written()
    page = np.unique(first.numpy() // 4)[-1:]
    page4.tiers.manager.unread(page)
    page4.tiers.manager._demote(page)
    more = page4.extend((first.tolist(), 1))
    assert more is not None
    assert int(more[0]) == int(first[-1]) + 1
    assert page4.tiers.ledger.t0_page[page] > 0


def test_a_clean_page_is_dirty_once_it_is_written(page4: Pool) -> None:
    first = page4.extend(([], 6))
    assert first is not None
    page4.written()
    page = np.unique(first.numpy() // 4)[-1:]
    page4.tiers.manager._demote(page)
    page4.tiers.manager._promote(page)
    assert page4.tiers.ledger.clean == 1
    page4.extend((first.tolist(), 1))
    assert page4.tiers.ledger.clean == 0


# -- room


def test_an_allocation_makes_its_own_room(pool: Pool) -> None:
    ps = pool.page_size
    cold = pool.allocator.alloc(T0 * ps)
    assert cold is not None
    pool.written()
    pool.tiers.ledger.give_to_tree(np.unique(cold.numpy() // ps))
    assert pool.allocator.alloc(2 * ps) is not None
    assert pool.tiers.manager.counters.demoted == 2


@pytest.mark.parametrize("call", ["alloc", "extend", "decode"])
def test_without_room_the_answer_is_none(call: str, page4: Pool) -> None:
    first = page4.extend(([], 8))
    assert first is not None
    page4.allocator.alloc((T0 - 2) * 4)
    answers = {
        "alloc": lambda: page4.allocator.alloc(4),
        "extend": lambda: page4.extend(([], 1)),
        "decode": lambda: decode(page4.allocator, [first.tolist()]),
    }
    assert answers[call]() is None


def test_an_open_page_needs_no_room(page4: Pool) -> None:
    first = page4.extend(([], 6))
    assert first is not None
    page4.allocator.alloc((T0 - 2) * 4)
    assert decode(page4.allocator, [first.tolist()]) is not None


@pytest.mark.parametrize("tokens", [1, T0 * 4, T0 * 4 + 1])
def test_decode_capacity_is_what_an_allocation_gets(tokens: int, page4: Pool) -> None:
    fits = page4.allocator.check_decode_capacity(num_tokens=tokens, tree_cache=None)
    assert fits == (tokens <= T0 * 4)


def test_decode_capacity_counts_in_whole_pages(page4: Pool) -> None:
    page4.allocator.alloc((T0 - 1) * 4)
    check = page4.allocator.check_decode_capacity
    assert check(num_tokens=3, tree_cache=None)
    assert not check(num_tokens=5, tree_cache=None)


def test_a_decode_check_that_passes_can_be_relied_on(pool: Pool) -> None:
    """sglang#19881: the check and the allocation are one question."""
    ps = pool.page_size
    mine = pool.extend(([], T0 * ps))
    assert mine is not None
    pool.written()
    ids = mine.tolist()
    while pool.allocator.check_decode_capacity(num_tokens=ps, tree_cache=None):
        new = decode(pool.allocator, [ids])
        assert new is not None
        ids += new.tolist()
        for _ in range(ps - 1):
            ids += decode(pool.allocator, [ids]).tolist()  # type: ignore[union-attr]
        pool.written()
    assert len(ids) == (T0 + WINDOW) * ps


# -- every token is counted once, while SGLang schedules

# Pages of T0, window and host, and the tokens of a chunk, by page size. Decode tokens
# that are mixed into a chunk leave it whole pages only: it has two at least.
SIZES = {
    1: (48, 24, 96, 16),
    2: (24, 12, 48, 16),
    16: (8, 4, 16, 32),
    64: (6, 3, 12, 128),
}


@pytest.fixture(scope="module")
def process() -> Iterator[None]:
    with scheduler_process():
        yield


@pytest.fixture
def make_server(process: None) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(page_size: int, **settings: Any) -> Server:
        t0, window, host, chunk = SIZES[page_size]
        sizes = {"t0": t0, "window": window, "host": host, "chunk": chunk}
        made.append(Server(page_size=page_size, **sizes, **settings))
        return made[-1]

    yield make
    for server in made:
        server.check_integrity()
        server.close()


@pytest.mark.parametrize("mixed", [False, True], ids=["plain", "mixed"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_sglang_6888_every_token_is_counted_once(
    page_size: int, mixed: bool, make_server: Callable[..., Server]
) -> None:
    """sglang#6888: the leak check found more free tokens than the pool owns (page 16,
    mixed chunks). The server checks after every step that available + evictable +
    protected + in use == total: chunks, shared prefixes, demotions, retractions, an
    abort, a second turn, evictions and a flush must all keep it."""
    server = make_server(page_size, mixed=mixed)
    unit = server.ledger.t0.count * page_size // 8
    prompts = [[9] * unit + [n] * (unit // 2 + n) for n in range(6)]
    reqs = [server.request(p, 2 * unit, f"r{n}") for n, p in enumerate(prompts)]
    for step in range(60 * unit):
        if server.idle:
            break
        server.retract_next |= step % 8 == 4
        if step == unit:
            server.abort(reqs[1])
        server.step()
    assert server.idle
    for n in (0, 2, 3, 4, 5):
        assert list(reqs[n].output_ids) == server.expected(prompts[n], 2 * unit)
    assert server.retracted > 0
    assert server.manager.counters.demoted > 0
    turn = [*prompts[0], *reqs[0].output_ids, 7]
    server.request(turn, unit // 2, "turn")
    server.run()
    while server.cache.evictable_size():
        server.cache.evict(EvictParams(num_tokens=page_size))
        server.check_integrity()
    assert server.ledger.virtual.used == 0
    server.request(prompts[2], 2, "last")
    server.run()
    server.flush()
    server.check_integrity()
    assert server.allocator.available_size() == server.allocator.size


OWNED: dict[str, Callable[[Ledger], np.ndarray]] = {
    "virtual": lambda ledger: np.flatnonzero(ledger.live),
    "t0": lambda ledger: ledger.t0_page[ledger.t0_page >= 0],
    "host": lambda ledger: ledger.host_page[ledger.host_page >= 0],
}


def in_use(server: Server) -> Server:
    """With rows of the tree in T0 and in T1."""
    server.request([1, 2, 3] * server.page_size, 2, "r")
    server.run()
    assert server.manager.make_room(server.ledger.t0.available + 1)
    assert server.ledger.t0.used
    assert server.ledger.host.used
    server.allocator.check_integrity()
    return server


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("tier", OWNED)
def test_sglang_6888_a_surplus_is_noticed(
    tier: str, page_size: int, make_server: Callable[..., Server]
) -> None:
    """sglang#6888: more is free than the pool owns: a slot that somebody still has."""
    server = in_use(make_server(page_size))
    getattr(server.ledger, tier).free(OWNED[tier](server.ledger)[:1])
    with pytest.raises(AssertionError, match="pages"):
        server.allocator.check_integrity()
    assert server.allocator.verify_byte_accounting()
    server.flush()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("tier", OWNED)
def test_sglang_6888_a_leak_is_noticed(
    tier: str, page_size: int, make_server: Callable[..., Server]
) -> None:
    """sglang#6888, in the other direction: a slot that is not free and nobody has."""
    server = in_use(make_server(page_size))
    getattr(server.ledger, tier).alloc(1)
    with pytest.raises(AssertionError, match="pages"):
        server.allocator.check_integrity()
    assert server.allocator.verify_byte_accounting()
    server.flush()


# -- the longest request


def limit(pool: Pool, prompt: int, new: int, chunk: int | None = 64) -> int | None:
    answer: int | None = pool.allocator.max_new_tokens_for_memory(
        prompt, new, token_capacity=0, sliding_window_size=None, chunk_size=chunk
    )
    return answer


def test_a_request_that_fits_is_not_clipped(pool: Pool) -> None:
    assert limit(pool, pool.page_size, pool.page_size) == pool.page_size


def test_output_is_clipped_to_t0_and_the_window(pool: Pool) -> None:
    ps = pool.page_size
    assert limit(pool, 2 * ps, 10**6) == (T0 + WINDOW - 1 - 2) * ps


def test_vllm_52530_a_prompt_that_can_never_fit_is_refused(pool: Pool) -> None:
    """vllm#52530."""
    longest = (T0 + WINDOW - 1) * pool.page_size
    assert limit(pool, longest - 1, 5) == 1
    assert limit(pool, longest, 5) is None


def test_a_prompt_in_one_piece_must_fit_t0(pool: Pool) -> None:
    longest = (T0 - 1) * pool.page_size
    assert limit(pool, longest - 1, 5, chunk=None) == 1
    assert limit(pool, longest, 5, chunk=None) is None


# -- frees


def test_everything_comes_back(pool: Pool) -> None:
    """available + used == size, in both directions."""
    ps = pool.page_size
    ids = pool.extend(([], 5 * ps))
    assert ids is not None
    size = pool.allocator.size
    assert pool.allocator.available_size() + pool.used() == size
    pool.allocator.free(ids[: 2 * ps])
    assert pool.allocator.available_size() == size - 3 * ps
    pool.allocator.free(ids[2 * ps :])
    assert pool.allocator.available_size() == size


def test_one_token_frees_its_page(page4: Pool) -> None:
    ids = page4.extend(([], 6))
    assert ids is not None
    page4.allocator.free(ids[5:])
    assert page4.used() == 4


def test_nothing_may_be_freed(page4: Pool) -> None:
    page4.allocator.free(tensor())
    assert page4.used() == 0


def test_sglang_7130_the_pieces_of_a_page_are_freed_together(page4: Pool) -> None:
    """sglang#7130: token by token, then the page, in one group."""
    ids = page4.extend(([], 7))
    assert ids is not None
    page4.allocator.free_group_begin()
    for token in ids[4:6]:
        page4.allocator.free(token[None])
    page4.allocator.free(ids[6:])
    page4.allocator.free(ids[:4])
    page4.allocator.free_group_end()
    assert page4.used() == 0


def test_sglang_7130_the_pieces_of_a_page_are_not_freed_one_by_one(
    page4: Pool,
) -> None:
    """sglang#7130: without a group, the second piece is a double free."""
    ids = page4.extend(([], 7))
    assert ids is not None
    page4.allocator.free(ids[4:5])
    with pytest.raises(RuntimeError, match="double free"):
        page4.allocator.free(ids[5:])


def test_sglang_38941_segments_that_meet_inside_a_page_do_not_free_it_twice(
    page4: Pool,
) -> None:
    """sglang#38941: not even where nobody has looked at how the segments lie. What is
    refused changes nothing."""
    ids = page4.extend(([], 12))
    assert ids is not None
    page4.allocator.free(ids[:6])
    with pytest.raises(RuntimeError, match="double free of virtual pages"):
        page4.allocator.free(ids[6:])
    page4.allocator.check_integrity()
    assert page4.used() == 4
    page4.allocator.free(ids[8:])
    assert page4.used() == 0


def test_sglang_38941_a_page_between_two_segments_is_freed_once(page4: Pool) -> None:
    """sglang#38941: in one group, as SGLang frees the tail of a request."""
    ids = page4.extend(([], 12))
    assert ids is not None
    page4.allocator.free_group_begin()
    page4.allocator.free(ids[:6])
    page4.allocator.free(ids[6:])
    page4.allocator.free_group_end()
    assert page4.used() == 0


def test_segments_of_whole_pages_are_freed(pool: Pool) -> None:
    ps = pool.page_size
    ids = pool.extend(([], 4 * ps))
    assert ids is not None
    pool.allocator.free_segments([(ids[:ps], 0), (ids[2 * ps :], 2 * ps)])
    assert pool.used() == ps


def test_a_group_waits_for_its_end(page4: Pool) -> None:
    ids = page4.extend(([], 8))
    assert ids is not None
    page4.allocator.free_group_begin()
    page4.allocator.free(ids)
    assert page4.used() == 8
    page4.allocator.free_group_end()
    assert page4.used() == 0


def test_a_group_keeps_what_it_was_given(page4: Pool) -> None:
    ids = page4.extend(([], 8))
    assert ids is not None
    page4.allocator.free_group_begin()
    page4.allocator.free(ids)
    ids.zero_()
    page4.allocator.free_group_end()
    assert page4.used() == 0


@pytest.mark.parametrize("group", [False, True])
def test_sglang_jax_982_a_double_free_is_refused(group: bool, page4: Pool) -> None:
    """sglang-jax#982."""
    ids = page4.extend(([], 8))
    assert ids is not None
    page4.allocator.free(ids)
    if not group:
        with pytest.raises(RuntimeError, match="double free of virtual pages"):
            page4.allocator.free(ids[:1])
        return
    page4.allocator.free_group_begin()
    page4.allocator.free(ids[:1])
    with pytest.raises(RuntimeError, match="double free of virtual pages"):
        page4.allocator.free_group_end()


def test_an_id_that_was_never_handed_out_is_not_freed(page4: Pool) -> None:
    with pytest.raises(RuntimeError, match="double free"):
        page4.allocator.free(tensor(20))


# -- what SGLang's own checks look at


def test_free_pages_are_distinct_and_complete(pool: Pool) -> None:
    ids = pool.extend(([], 3 * pool.page_size))
    assert ids is not None
    free = pool.allocator.get_all_free_pages().tolist()
    used = np.unique(ids.numpy() // pool.page_size).tolist()
    assert sorted(free + used) == list(range(1, T0 + HOST + 1))


def test_quarantined_pages_are_no_virtual_pages(pool: Pool) -> None:
    ids = pool.extend(([], 3 * pool.page_size))
    assert ids is not None
    pool.allocator.free(ids)
    assert len(pool.allocator.free_pages) == T0 + HOST


def test_clear_frees_everything(pool: Pool) -> None:
    pool.extend(([], 3 * pool.page_size))
    pool.allocator.free_group_begin()
    pool.allocator.clear()
    assert pool.allocator.available_size() == pool.allocator.size
    assert pool.allocator.free_group is None
    assert pool.allocator.take_new_ids().tolist() == []


def test_clear_keeps_the_page_table_where_it_is(pool: Pool) -> None:
    v2p = pool.tiers.manager.table.v2p
    address = v2p.data_ptr()
    pool.extend(([], 3 * pool.page_size))
    pool.allocator.clear()
    assert pool.tiers.manager.table.v2p is v2p
    assert v2p.data_ptr() == address
    assert not v2p.any()


def test_a_resize_is_refused(page4: Pool) -> None:
    with pytest.raises(RuntimeError, match="cannot be resized"):
        page4.allocator.resize(None)


class Tree:
    """A tree whose audit finds nothing, and counts how often it looked."""

    def __init__(self) -> None:
        self.audits = 0
        self.idle = 0

    def publish_metrics(self) -> None:
        self.idle += 1

    def check_integrity(self) -> None:
        self.audits += 1


def test_the_idle_audit_reports_what_is_wrong(page4: Pool) -> None:
    page4.allocator.tree = Tree()
    page4.extend(([], 8))
    page4.tiers.ledger.t0_read += 1
    (line,) = page4.allocator.verify_byte_accounting()
    assert line.startswith("tiered pool: ")
    page4.tiers.ledger.t0_read -= 1


def test_the_idle_audit_does_not_look_all_the_time(page4: Pool) -> None:
    page4.allocator.tree = tree = Tree()
    for _ in range(3):
        page4.extend(([], 8))
        page4.allocator.verify_byte_accounting()
    assert (tree.idle, tree.audits) == (3, 1)


def test_the_idle_audit_looks_once_at_each_change(
    page4: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_tiered.sglang.allocator.AUDIT_SECONDS", 0)
    page4.allocator.tree = tree = Tree()
    page4.extend(([], 8))
    assert page4.allocator.verify_byte_accounting() == []
    assert page4.allocator.verify_byte_accounting() == []
    assert tree.audits == 1
    page4.extend(([], 8))
    page4.allocator.verify_byte_accounting()
    assert tree.audits == 2
