"""Reports from other projects, replayed in SGLang's own scheduling.

Each test carries the report's id; what the report says is in its docstring.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from serving import Server, scheduler_process
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.runtime_context import get_memory

from sglang_tiered.memory.manager import TierRules
from sglang_tiered.policy.base import Policy
from sglang_tiered.policy.protection import Protection
from sglang_tiered.policy.streaming import Streaming
from sglang_tiered.sglang import pool as tiered_pool
from sglang_tiered.sglang.refusals import Refusal

PROMPT = [9, 9, 9, 9, 1, 2, 3, 4, 1, 2]


@pytest.fixture(scope="module", autouse=True)
def _process() -> Iterator[None]:
    with scheduler_process():
        yield


@pytest.fixture
def make_server() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def make(**settings: Any) -> Server:
        made.append(Server(**settings))
        return made[-1]

    yield make
    for server in made:
        server.check_integrity()
        server.close()


@pytest.fixture
def server(make_server: Callable[..., Server]) -> Server:
    """T0 32, window 16, host 64, pages of one token."""
    return make_server()


def started(
    server: Server, rid: str, prompt: list[int], new: int, *, steps: int = 4
) -> Req:
    """A request that has run for some steps."""
    req = server.request(prompt, new, rid)
    for _ in range(steps):
        server.step()
    return req


def pages_of(server: Server, req: Req) -> np.ndarray:
    row = server.row_pool.req_to_token[req.kv.req_pool_idx]
    ids = row[: req.kv.kv_allocated_len : server.page_size]
    return ids.numpy().astype(np.int64) // server.page_size


def used(server: Server) -> list[int]:
    ledger = server.ledger
    return [p.used for p in (ledger.virtual, ledger.t0, ledger.host, ledger.window)]


def empty(server: Server) -> list[int]:
    """What is in use once the tree has been emptied."""
    server.cache.evict(EvictParams(num_tokens=10**6))
    return used(server)


# -- every way out, from every tier


def finishes(server: Server, req: Req) -> None:
    server.run()


def disconnects(server: Server, req: Req) -> None:
    server.abort(req)
    server.run()


def is_retracted_and_resumes(server: Server, req: Req) -> None:
    server.retract(req)
    server.run()
    assert 0 < server.most_recomputed <= server.page_size


def is_retracted_and_disconnects(server: Server, req: Req) -> None:
    server.retract(req)
    server.abort(req)
    server.run()


def is_retracted_twice(server: Server, req: Req) -> None:
    for _ in range(2):
        server.retract(req)
        server.step()
        server.step()
    server.run()
    assert 0 < server.most_recomputed <= server.page_size


def fails(server: Server, req: Req) -> None:
    """An output that cannot be used: the request ends without the tree."""
    req.to_finish = FINISH_ABORT("broken")
    req.update_finish_state(0)
    release_kv_cache(req, server.cache, checkpoint=False)
    server.run()


def is_the_last_and_does_not_fit(server: Server, req: Req) -> None:
    """SGLang gives up the last running request."""
    server.allocator.check_decode_capacity = lambda **_: False  # type: ignore[method-assign]
    server.step()
    del server.allocator.check_decode_capacity
    assert server.aborted == [req]
    server.run()


WAYS = [
    finishes,
    disconnects,
    is_retracted_and_resumes,
    is_retracted_and_disconnects,
    is_retracted_twice,
    fails,
    is_the_last_and_does_not_fit,
]


def in_t0(server: Server) -> None:
    assert server.ledger.t1 == 0


def in_the_window(server: Server) -> None:
    assert server.manager.make_room(server.ledger.t0.available + 2)
    assert server.ledger.window.used > 0


def clean_in_t0(server: Server) -> None:
    in_the_window(server)
    server.step()
    assert server.ledger.clean > 0


TIERS = [in_t0, in_the_window, clean_in_t0]


def name(thing: Any) -> str:
    return str(thing.__name__)


@pytest.fixture(params=[1, 4], ids=lambda size: f"page{size}")
def paged(request: pytest.FixtureRequest, make_server: Callable[..., Server]) -> Server:
    size = request.param
    return make_server(
        page_size=size, t0=32 // size, window=16 // size, host=64 // size
    )


@pytest.mark.parametrize("tier", TIERS, ids=name)
@pytest.mark.parametrize("way", WAYS, ids=name)
def test_sglang_18701_every_way_out_empties_every_tier(
    way: Callable[[Server, Req], None], tier: Callable[[Server], None], paged: Server
) -> None:
    """sglang#18701: host copies of retracted requests leaked when the client left."""
    req = started(paged, "r", PROMPT, 12)
    tier(paged)
    way(paged, req)
    assert paged.cache.parked_requests() == 0
    assert paged.cache.running_requests() == 0
    assert empty(paged) == [0, 0, 0, 0]


@pytest.mark.parametrize("way", WAYS, ids=name)
def test_sglang_25836_locks_and_unlocks_sum_to_zero(
    way: Callable[[Server, Req], None], server: Server
) -> None:
    """sglang#25836: one release path locked the tree and did not unlock it."""
    held: list[int] = []
    cache = server.cache

    def counted(call: Callable[..., Any], by: int) -> Callable[..., Any]:
        def call_and_count(*args: Any, **kwargs: Any) -> Any:
            held.append(by)
            return call(*args, **kwargs)

        return call_and_count

    cache.inc_lock_ref = counted(cache.inc_lock_ref, 1)
    cache.dec_lock_ref = counted(cache.dec_lock_ref, -1)
    way(server, started(server, "r", PROMPT, 12))
    assert held
    assert sum(held) == 0
    assert cache.protected_size() == 0
    assert not cache._lock_pages
    assert not server.ledger.readers.any()
    assert not server.ledger.parks.any()


def test_sglang_18701_a_request_that_never_ran_leaves_nothing(server: Server) -> None:
    """sglang#18701."""
    server.abort(server.request(PROMPT, 5, "r"))
    assert used(server) == [0, 0, 0, 0]


def test_sglang_18701_half_a_prompt_leaves_nothing(
    make_server: Callable[..., Server],
) -> None:
    """sglang#18701: the client leaves between two chunks."""
    server = make_server(chunk=8)
    req = server.request(PROMPT * 2, 5, "r")
    server.step()
    assert server.chunked is req
    server.abort(req)
    server.run()
    assert server.cache.running_requests() == 0
    assert empty(server) == [0, 0, 0, 0]


@pytest.mark.parametrize("how", ["closed", "aborted"])
def test_sglang_18701_a_session_leaves_nothing(how: str, server: Server) -> None:
    """sglang#18701: a streaming session whose rows were demoted while it was idle."""
    session = server.session()
    server.request(PROMPT, 6, "turn1", session)
    server.run()
    assert server.manager.make_room(32)
    assert server.ledger.t1 > 0
    if how == "aborted":
        req = server.request([5, 5], 6, "turn2", session)
        server.step()
        server.abort(req)
        server.run()
    server.close_session(session)
    assert server.cache.running_requests() == 0
    assert empty(server) == [0, 0, 0, 0]


# -- two release paths


def test_sglang_28702_rows_are_released_once(server: Server) -> None:
    """sglang#28702: "already freed" under concurrency, of two release paths. The second
    one is refused by us, and breaks nothing."""
    req = started(server, "r", PROMPT, 12)
    other = started(server, "s", PROMPT[::-1], 12)
    row = server.row_pool.req_to_token[req.kv.req_pool_idx].clone()
    private = row[req.kv.cache_protected_len : req.kv.kv_allocated_len]
    req.to_finish = FINISH_ABORT("broken")
    req.update_finish_state(0)
    release_kv_cache(req, server.cache, checkpoint=False)
    before = used(server)
    for ids in (private, private[:1]):
        with pytest.raises(RuntimeError, match="double free of virtual pages"):
            server.allocator.free(ids)
    server.check_integrity()
    assert used(server) == before
    server.run()
    assert list(other.output_ids) == server.expected(PROMPT[::-1], 12)


def test_sglang_28702_a_lock_is_given_back_once(server: Server) -> None:
    """sglang#28702: the tree would take it for the lock of another reader."""
    req = started(server, "r", PROMPT, 12)
    lock = server.cache.lock(req.last_node)
    server.cache.unlock(lock)
    with pytest.raises(RuntimeError, match="given back twice"):
        server.cache.unlock(lock)
    assert server.cache.protected_size() == len(PROMPT)
    server.check_integrity()


def test_sglang_28702_a_parked_request_is_unparked_once(server: Server) -> None:
    """sglang#28702: its client leaves twice."""
    req = started(server, "r", PROMPT, 12)
    server.retract(req)
    for _ in range(2):
        server.cache.release_aborted_request(req.cache_request_handle)
    server.waiting.remove(req)
    assert server.cache.protected_size() == 0
    assert empty(server) == [0, 0, 0, 0]


def test_sglang_28702_a_request_is_parked_once(server: Server) -> None:
    """sglang#28702: two paths see the same retraction."""
    req = started(server, "r", PROMPT, 12)
    server.cache.park(req)
    server.cache.park(req)
    assert server.cache.parked_requests() == 1
    server.retract(req)
    server.abort(req)
    server.run()
    assert server.cache.protected_size() == 0


# -- whose rows they are


def test_sglang_27666_demoted_rows_stay_the_trees(server: Server) -> None:
    """sglang#27666: an offload freed slots below ``cache_protected_len``, and the
    server died after a request that had succeeded."""
    first = started(server, "r", PROMPT, 12)
    protected = first.kv.cache_protected_len
    tree = pages_of(server, first)[:protected]
    assert protected == len(PROMPT)
    assert server.manager.make_room(32 - 4)
    assert (server.ledger.t0_page[tree] < 0).any()
    assert server.ledger.live[tree].all()
    assert not server.ledger.private[tree].any()
    server.run()
    second = server.request([*PROMPT, 7], 5, "s")
    server.run()
    assert second.cached_tokens == len(PROMPT)
    assert list(second.output_ids) == server.expected([*PROMPT, 7], 5)


@pytest.mark.parametrize("policy", [None, Streaming(budget=0.5)], ids=repr)
@pytest.mark.parametrize("page_size", [1, 4])
def test_vllm_39806_what_enters_the_tree_is_exact(
    page_size: int, policy: Policy | None, make_server: Callable[..., Server]
) -> None:
    """vllm#39806: the last token has no row yet, a part of a page is no page, and what
    comes behind a dropped row was computed without it."""
    rules = TierRules(sink_tokens=1, recent_window=2, retier_interval=4)
    server = make_server(page_size=page_size, chunk=16, rules=rules, policy=policy)
    req = started(server, "r", PROMPT, 30, steps=29)
    assert server.ledger.dropped.any() == (policy is not None)
    server.run()
    length = len(PROMPT) + len(req.output_ids) - 1
    exact = length // page_size
    if policy is not None:
        first = len(PROMPT) + 1  # the sink
        exact = -(-first // page_size)
    assert server.cache.evictable_size() == exact * page_size
    tree = server.ledger.live & ~server.ledger.private
    assert int(tree.sum()) == server.ledger.virtual.used == exact


def test_vllm_39806_the_row_in_flight_is_not_parked(
    make_server: Callable[..., Server],
) -> None:
    """vllm#39806: under overlap scheduling the step before still writes the row of
    the last known token."""
    server = make_server(overlap=True)
    reqs = [server.request([*PROMPT, n], 9, f"r{n}") for n in range(2)]
    for _ in range(5):
        server.step()
    server.retract_next = True
    server.step()
    (victim,) = server.waiting
    assert (server.ledger.parks > 0).sum() == victim.seqlen - 1
    server.run()
    for n, req in enumerate(reqs):
        assert list(req.output_ids) == server.expected([*PROMPT, n], 9)


def test_vllm_39806_thinking_enters_the_tree_cold(server: Server) -> None:
    """vllm#39806: thinking tokens filled the prefix cache with dead branches. Ours
    are the first to leave T0, and leave the tree before the prompt they followed."""
    server.request(PROMPT, 10, "r")
    server.run()
    running = started(server, "s", [8, 8, 8], 10)
    manager = server.manager
    pages = server.ledger.in_t0()
    _, classes = manager._rank(pages)
    dead = pages[classes == Protection.COLD]
    assert len(dead) == len(PROMPT) + 9
    alive = pages_of(server, running)
    assert set(dead).isdisjoint(alive)
    assert manager.make_room(server.ledger.t0.available + len(dead))
    assert (server.ledger.t0_page[dead] < 0).all()
    assert (server.ledger.t0_page[alive] >= 0).all()
    server.cache.evict(EvictParams(num_tokens=1))
    assert server.cache.evictable_size() == len(PROMPT)


# -- no room


def scheduler_of(server: Server) -> Any:
    """What ``Scheduler.init_req_max_new_tokens`` reads of a scheduler."""
    return SimpleNamespace(
        max_new_tokens_limit=None,
        max_req_len=10**6,
        max_total_num_tokens=server.allocator.size,
        kv_shard_widening=1,
        page_size=server.page_size,
        sliding_window_size=None,
        chunked_prefill_size=server.chunk,
        token_to_kv_pool_allocator=server.allocator,
    )


def long_request(tokens: int, new: int) -> Any:
    req = SimpleNamespace(
        rid="r",
        origin_input_ids=[1] * tokens,
        sampling_params=SimpleNamespace(max_new_tokens=new, min_new_tokens=0),
        to_finish=None,
    )
    req.set_finish_with_abort = lambda message: setattr(
        req, "to_finish", FINISH_ABORT(message)
    )
    return req


def test_vllm_52530_what_can_never_fit_ends_at_once(
    make_server: Callable[..., Server],
) -> None:
    """vllm#52530: a request that could never fit was retried for ever."""
    server = make_server(chunk=8)
    req = long_request(47, 5)
    Scheduler.init_req_max_new_tokens(scheduler_of(server), req)
    assert "prompt of 47 tokens" in req.to_finish.message
    assert "T0 32 + window 16" in req.to_finish.message
    assert "--max-total-tokens or --tiered-window-tokens" in req.to_finish.message


def test_an_output_that_is_cut_short_is_told_the_numbers(
    make_server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(chunk=8)
    Scheduler.init_req_max_new_tokens(scheduler_of(server), long_request(20, 100))
    [line] = [record.getMessage() for record in caplog.records]
    assert "asks for 100 new tokens behind a prompt of 20" in line
    assert "T0 32 + window 16" in line


def test_an_output_that_fits_is_not_worth_a_line(
    make_server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(chunk=8)
    Scheduler.init_req_max_new_tokens(scheduler_of(server), long_request(20, 10))
    assert not caplog.records


def test_vllm_52530_what_fits_alone_is_clipped_and_runs(
    make_server: Callable[..., Server],
) -> None:
    """vllm#52530: the longest request that is let in ends, in as many steps as it
    has tokens."""
    server = make_server(chunk=8)
    req = long_request(20, 10**6)
    Scheduler.init_req_max_new_tokens(scheduler_of(server), req)
    assert req.to_finish is None
    new = req.sampling_params.max_new_tokens
    real = server.request([1] * 20, new, "r")
    server.run(limit=20 + new)
    assert list(real.output_ids) == server.expected([1] * 20, new)


def test_sglang_19881_the_last_request_fills_the_pool_and_ends(
    make_server: Callable[..., Server],
) -> None:
    """sglang#19881: the last running request filled the pool and the scheduler died.
    Ours is demoted first; when T0 and window are full, it ends and others go on. (A
    request is clipped to what they hold; this one is not.)"""
    server = make_server(chunk=16)
    req = started(server, "r", PROMPT, 37)
    server.run()
    assert server.manager.counters.demoted > 0
    assert not server.aborted
    assert list(req.output_ids) == server.expected(PROMPT, 37)
    lost = started(server, "s", PROMPT[::-1], 10)
    lost.sampling_params.max_new_tokens = 1000
    server.run()
    assert server.aborted == [lost]
    assert "Out of memory even after retracting" in lost.to_finish.message
    assert len(PROMPT) + len(lost.output_ids) == 32 + 16 + 1  # one has no row yet
    assert server.cache.parked_requests() == server.cache.running_requests() == 0
    after = server.request([3, 1, 4], 5, "t")
    server.run()
    assert list(after.output_ids) == server.expected([3, 1, 4], 5)


def test_sglang_23704_a_full_host_in_mid_decode_is_no_exception(
    make_server: Callable[..., Server],
) -> None:
    """sglang#23704: admission counted the prompt only; host memory overflowed late in
    long generations. Here the next decode step is refused and a request waits."""
    server = make_server(t0=20, window=10, host=12, chunk=16)
    prompts = [[n, 1, 2] for n in range(4)]
    reqs = [server.request(p, 12, f"r{n}") for n, p in enumerate(prompts)]
    full = 0
    while not server.idle:
        server.step()
        full += server.ledger.host.available == 0
    assert full > 0
    assert server.retracted > 0
    for req, prompt in zip(reqs, prompts, strict=True):
        assert list(req.output_ids) == server.expected(prompt, 12)


@pytest.mark.parametrize("page_size", [1, 4])
def test_sglang_14972_a_retraction_makes_the_room_it_promised(
    page_size: int, make_server: Callable[..., Server]
) -> None:
    """sglang#14972: an allocation failed though a retraction had just freed room;
    the step before was still in flight, as it is under overlap scheduling. No resume
    computes more than a page again."""
    sizes = {"t0": 24, "window": 24, "host": 96}
    sizes = {name: tokens // page_size for name, tokens in sizes.items()}
    server = make_server(page_size=page_size, overlap=True, chunk=8, **sizes)
    prompts = [[n, 1, 2] for n in range(4)]
    reqs = [server.request(p, 18, f"r{n}") for n, p in enumerate(prompts)]
    for _ in range(400):
        if server.idle:
            break
        server.retract_next = server.forwards % 4 == 0
        server.step()
    assert server.retracted > 3
    assert 0 < server.most_recomputed <= page_size
    assert server.manager.counters.demoted > 0
    for req, prompt in zip(reqs, prompts, strict=True):
        assert list(req.output_ids) == server.expected(prompt, 18)


def test_vllm_39702_room_that_went_away_is_found_again(server: Server) -> None:
    """vllm#39702: room counted at lookup was gone at allocation. Between the two, the
    tree is evicted and the pool filled with cold rows."""
    server.request(PROMPT, 10, "r")
    server.run()
    req = server.request([*PROMPT, 5, 5], 5, "s")
    budget = server.allocator.create_prefill_budget(server.cache)
    assert budget.remaining_current >= 32
    server.cache.evict(EvictParams(num_tokens=8))
    filler = server.allocator.alloc(server.ledger.t0.available)
    assert filler is not None
    server.allocator.take_new_ids()
    server.ledger.born[filler.numpy()] = 0
    server.ledger.give_to_tree(filler.numpy())
    server.cache.check_integrity()
    assert server.allocator.alloc(24) is not None
    server.allocator.take_new_ids()
    assert req in server.waiting
    server.abort(req)
    server.flush()


@pytest.mark.parametrize("page_size", [1, 2])
def test_sglang_4987_eviction_frees_what_it_was_asked_for(
    page_size: int, make_server: Callable[..., Server]
) -> None:
    """sglang#4987: ids that are short are evicted leaf by leaf, and no leaf more than
    needed. Pages are asked for, leaves are counted in tokens."""
    server = make_server(page_size=page_size)
    for n in range(8):
        server.request([n, *range(8 * page_size - 1)], 1, f"r{n}")
    server.run()
    leaf = 8
    before = server.ledger.virtual.available
    for asked in (1, 7, 8, 9):
        server.cache._reclaim(asked)
        freed = server.ledger.virtual.available - before
        assert asked <= freed < asked + leaf
        before += freed


def test_sglang_4987_parked_rows_are_given_up_last(server: Server) -> None:
    """sglang#4987: cold rows go first; but what is asked for is freed, though only
    parked rows are left."""
    server.request([5, 6, 7, 8], 3, "cold")
    server.run()
    req = started(server, "r", PROMPT, 12)
    server.retract(req)
    evictable = server.cache.evictable_size()
    assert evictable == 4 + 2
    before = server.ledger.virtual.available
    server.cache._reclaim(evictable)
    assert server.cache.parked_requests() == 1
    server.cache._reclaim(5)
    assert server.cache.parked_requests() == 0
    assert server.ledger.virtual.available >= before + evictable + 5
    server.run()
    assert list(req.output_ids) == server.expected(PROMPT, 12)


# -- coming back


def test_vllm_29870_a_retracted_request_comes_back_to_its_rows(server: Server) -> None:
    """vllm#46014, vllm#29870: re-admitted, under the same id, while its rows move."""
    req = started(server, "r", PROMPT, 20, steps=10)
    for _ in range(5):
        server.retract(req)
        assert server.manager.make_room(30)
        server.step()
        server.step()
    server.run()
    assert server.recomputed == 5
    assert server.most_recomputed == 1
    assert list(req.output_ids) == server.expected(PROMPT, 20)


def test_vllm_29870_the_same_name_comes_again_after_an_abort(server: Server) -> None:
    """vllm#29870: a cancelled store stayed readable."""
    req = started(server, "r", PROMPT, 20, steps=8)
    server.retract(req)
    server.abort(req)
    assert server.cache.parked_requests() == 0
    again = started(server, "r", [*PROMPT, 5], 10)
    server.run()
    assert list(again.output_ids) == server.expected([*PROMPT, 5], 10)
    assert empty(server) == [0, 0, 0, 0]


def test_sglang_18803_a_row_is_not_read_as_the_last_requests(
    make_server: Callable[..., Server],
) -> None:
    """sglang#18803: request rows are recycled; what is kept per row begins anew."""
    server = make_server(rows=1)
    first = started(server, "r", PROMPT, 20)
    row = first.kv.req_pool_idx
    generation = int(server.ledger.rows.generation[row])
    server.abort(first)
    server.run()
    rows = server.ledger.rows
    assert int(rows.generation[row]) > generation
    facts = (rows.length, rows.prompt, rows.steps)
    assert [int(fact[row]) for fact in facts] == [0, 0, 0]
    second = started(server, "s", [3, 1], 4, steps=1)
    assert second.kv.req_pool_idx == row
    assert int(rows.length[row]) == 2


# -- pools that cannot be tiered


@pytest.mark.parametrize("pool_class", [MHATokenToKVPool, MLATokenToKVPool])
def test_sglang_33385_another_pool_class_is_refused_at_start(pool_class: type) -> None:
    """sglang#33385: the first pressure hit a pool class without a copy method."""
    configurator = SimpleNamespace(
        kv_cache_dtype=torch.float32, post_capture_kv_active=False
    )

    def build(_: Any, **kwargs: Any) -> Any:
        return kwargs["mha_pool_class"]

    with get_memory().override(radix_cache_backend="tiered"):
        if pool_class is MHATokenToKVPool:
            built = tiered_pool.build_mha_kv_pool_hook(
                build, configurator, mha_pool_class=pool_class
            )
            assert built is tiered_pool.TieredKVPool
            return
        with pytest.raises(Refusal, match="MLATokenToKVPool"):
            tiered_pool.build_mha_kv_pool_hook(
                build, configurator, mha_pool_class=pool_class
            )
