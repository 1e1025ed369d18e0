"""The tiered radix cache inside SGLang's own scheduling: who reads which rows, what is
kept for whom, and that nothing is lost or kept for ever."""

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from serving import Server, scheduler_process
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    TreeLock,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.session.session_controller import Session

from sglang_tiered.memory.manager import TierRules
from sglang_tiered.policy.base import Policy
from sglang_tiered.policy.hierarchy import Hierarchy
from sglang_tiered.policy.random import Random
from sglang_tiered.policy.recency import Recency
from sglang_tiered.sglang.budget import LATER


@pytest.fixture(scope="module", autouse=True)
def _process() -> Iterator[None]:
    with scheduler_process():
        yield


pick = st.integers(0, 2**16)
tokens = st.lists(st.integers(0, 4), max_size=24)
PREFIXES = [[9] * 12, [8] * 5 + [9] * 5, []]


class ServingMachine(RuleBasedStateMachine):
    """Clients come, go and come back, under any pressure."""

    @initialize(
        page_size=st.sampled_from([1, 4]),
        tight=st.booleans(),
        chunk=st.sampled_from([None, 8, 16]),
        overlap=st.booleans(),
        mixed=st.booleans(),
        policy=st.sampled_from(
            [
                Recency(),
                Recency(hbm_ratio=0.3),
                Hierarchy(compress_ratio=0.5, evict_ratio=0.2),
                Random(budget=0.4),
            ]
        ),
    )
    def start(
        self,
        page_size: int,
        tight: bool,
        chunk: int | None,
        overlap: bool,
        mixed: bool,
        policy: Policy,
    ) -> None:
        tokens = (40, 16, 40) if tight else (64, 32, 120)
        t0, window, host = (n // page_size for n in tokens)
        self.server = Server(
            page_size=page_size,
            t0=t0,
            window=window,
            host=host,
            int8=6,
            rows=4,
            chunk=chunk,
            overlap=overlap,
            mixed=mixed and chunk is not None,
            rules=TierRules(sink_tokens=1, recent_window=3, retier_interval=5),
            policy=policy,
        )
        self.reqs: dict[str, tuple[Req, list[int]]] = {}
        self.sessions: list[Session] = []
        self.count = 0

    def teardown(self) -> None:
        if hasattr(self, "server"):
            self.server.close()

    def add(self, prompt: list[int], new: int, session: Session | None = None) -> None:
        longest = self.server.allocator.longest_request(self.server.chunk)
        history = 0
        if session is not None and session.req_nodes:
            last = next(iter(session.req_nodes.values())).req
            history = len(last.origin_input_ids) + len(last.output_ids)
        room = longest - len(prompt) - history
        if room < 1:
            return
        self.count += 1
        rid = f"r{self.count}"
        req = self.server.request(prompt, min(new, room), rid, session)
        self.reqs[rid] = (req, list(req.origin_input_ids))

    def settle(self) -> None:
        """Look at the requests that have ended. Who is let in can run alone."""
        assert not self.server.aborted
        for rid, (req, prompt) in list(self.reqs.items()):
            if req.finished():
                del self.reqs[rid]
                if req.finished_reason.to_json()["type"] == "length":
                    new = req.sampling_params.max_new_tokens
                    assert list(req.output_ids) == self.server.expected(prompt, new)

    # -- rules

    @rule(
        prefix=st.sampled_from(PREFIXES),
        rests=st.lists(tokens, min_size=1, max_size=4),
        new=st.integers(1, 40),
    )
    def arrive(self, prefix: list[int], rests: list[list[int]], new: int) -> None:
        for rest in rests:
            self.add(prefix + rest + [7], new)

    @rule(n=st.integers(1, 60))
    def steps(self, n: int) -> None:
        for _ in range(n):
            if self.server.idle:
                break
            self.server.step()
            self.settle()

    @precondition(lambda self: self.reqs)
    @rule(which=pick)
    def disconnect(self, which: int) -> None:
        rids = sorted(self.reqs)
        rid = rids[which % len(rids)]
        req, _ = self.reqs[rid]
        was_waiting = req in self.server.waiting or req is self.server.chunked
        self.server.abort(req)
        if was_waiting:
            del self.reqs[rid]

    @rule()
    def retract(self) -> None:
        """The next decode step takes the rows of a running request away."""
        self.server.retract_next = len(self.server.running.reqs) > 1

    @rule(which=pick, turn=tokens, new=st.integers(1, 20))
    def turn(self, which: int, turn: list[int], new: int) -> None:
        """The next turn of a streaming session, if the one before has ended."""
        if len(self.sessions) < 2:
            self.sessions.append(self.server.session())
        session = self.sessions[which % len(self.sessions)]
        if not self.in_turn(session):
            # SGLang dies of a first turn of one token that is retracted at once.
            self.add([6, 6, *turn], new, session)

    def in_turn(self, session: Session) -> bool:
        return any(req.session is session for req, _ in self.reqs.values())

    @precondition(lambda self: self.sessions)
    @rule(which=pick)
    def close(self, which: int) -> None:
        session = self.sessions[which % len(self.sessions)]
        if not self.in_turn(session):
            self.sessions.remove(session)
            self.server.close_session(session)

    @rule(n=st.integers(1, 30))
    def evict(self, n: int) -> None:
        before = self.server.allocator.available_size()
        evictable = self.server.cache.evictable_size()
        self.server.cache.evict(EvictParams(num_tokens=n))
        freed = self.server.allocator.available_size() - before
        assert freed >= min(n, evictable)

    @rule()
    def drain(self) -> None:
        """Every request ends; what is left is the tree's and the sessions'."""
        self.server.run()
        self.settle()
        assert not self.reqs
        assert not self.server.cache.parked_requests()
        if not self.sessions:
            assert self.server.ledger.read_pages == 0
            assert self.server.cache.protected_size() == 0

    @precondition(lambda self: self.server.idle and not self.sessions)
    @rule(flush=st.booleans())
    def empty(self, flush: bool) -> None:
        """sglang#18701: once the tree is empty, every tier is."""
        if flush:
            self.server.flush()
        else:
            self.server.cache.evict(EvictParams(num_tokens=10**6))
        ledger = self.server.ledger
        pools = (ledger.virtual, ledger.t0, ledger.host, ledger.window, ledger.int8)
        assert [pool.used for pool in pools] == [0, 0, 0, 0, 0]

    @invariant()
    def the_books_agree(self) -> None:
        self.server.check_integrity()


TestServingMachine = ServingMachine.TestCase
TestServingMachine.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# -- the tree by itself


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


def key_of(numbers: list[int]) -> RadixKey:
    return RadixKey(array("q", numbers))


def insert(server: Server, numbers: list[int]) -> None:
    """What the tree does with the rows of a request: duplicates are freed, the rest
    is the tree's."""
    page = server.page_size
    whole = numbers[: len(numbers) // page * page]
    ids = server.allocator.alloc(len(whole))
    assert ids is not None
    server.allocator.take_new_ids()
    have = server.cache.match_prefix(MatchPrefixParams(key=key_of(whole)))
    server.cache.insert(InsertParams(key=key_of(whole), value=ids))
    new = ids[have.device_prefix_len :: page].numpy() // page
    server.ledger.give_to_tree(new)


steps = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "lock", "lock", "unlock", "evict"]),
        pick,
        st.integers(1, 12),
    ),
    min_size=8,
    max_size=30,
)


@settings(max_examples=80, deadline=None)
@given(page_size=st.sampled_from([1, 4]), steps=steps)
def test_mllm_656_sizes_after_any_split_and_lock(
    page_size: int, steps: list[tuple[str, int, int]]
) -> None:
    """mllm#656: the evictable size went negative after a split and a lock.

    A sequence that is inserted leaves one that is known after ``depth`` tokens, a
    lock is on the first ``depth`` tokens of one.
    """
    server = Server(page_size=page_size, t0=500, window=8, host=50)
    cache, ledger = server.cache, server.ledger
    held: list[TreeLock] = []
    known = [list(range(8))]
    for what, which, depth in steps:
        path = known[which % len(known)][:depth]
        if what == "insert":
            known.append([*path, which % 5, which % 3, which % 7, 0, which % 2])
            insert(server, known[-1])
        elif what == "lock":
            match = cache.match_prefix(MatchPrefixParams(key=key_of(path)))
            held.append(cache.lock(match.last_device_node))
        elif what == "unlock" and held:
            cache.unlock(held.pop(which % len(held)))
        elif what == "evict":
            evictable = cache.evictable_size()
            evicted = cache.evict(EvictParams(num_tokens=depth)).num_tokens_evicted
            assert evicted >= min(depth, evictable)
        server.check_integrity()
        tree = ledger.live & ~ledger.private
        cold = int((tree & (ledger.readers == 0)).sum())
        assert cache.evictable_size() == cold * page_size
        assert cache.protected_size() == (int(tree.sum()) - cold) * page_size
    for lock in held:
        cache.unlock(lock)
    assert cache.protected_size() == 0
    server.close()


def test_a_lock_reads_its_whole_path(server: Server) -> None:
    insert(server, [1, 2, 3, 4])
    match = server.cache.match_prefix(MatchPrefixParams(key=key_of([1, 2, 3])))
    lock = server.cache.lock(match.last_device_node)
    path = server.cache._path_pages(match.last_device_node)
    assert server.ledger.readers[path].tolist() == [1, 1, 1]
    assert server.ledger.read_pages == 3
    server.cache.unlock(lock)
    assert server.ledger.read_pages == 0


def test_a_lock_outlives_a_split_of_its_path(server: Server) -> None:
    insert(server, [1, 2, 3, 4])
    match = server.cache.match_prefix(MatchPrefixParams(key=key_of([1, 2, 3, 4])))
    lock = server.cache.lock(match.last_device_node)
    insert(server, [1, 2, 7, 8])
    assert server.ledger.read_pages == 4
    server.check_integrity()
    server.cache.unlock(lock)
    assert server.ledger.read_pages == 0


def test_an_audit_finds_a_reader_without_a_lock(server: Server) -> None:
    insert(server, [1, 2, 3])
    page = np.flatnonzero(server.ledger.live)[:1]
    server.manager.read(page)
    with pytest.raises(AssertionError, match="readers are wrong"):
        server.cache.check_integrity()
    server.manager.unread(page)


# -- rows that change hands

PROMPT = [9, 9, 9, 9, 1, 2, 3, 4]


def run_one(server: Server, prompt: list[int], new: int, rid: str) -> Req:
    req = server.request(prompt, new, rid)
    server.run()
    return req


def test_a_prompt_is_given_to_the_tree_when_it_is_computed(server: Server) -> None:
    req = server.request(PROMPT, 5, "r")
    server.step()
    assert req.kv.cache_protected_len == len(PROMPT)
    assert int((server.ledger.live & ~server.ledger.private).sum()) == len(PROMPT)
    server.run()


def test_rows_given_to_the_tree_stay_where_they_are(server: Server) -> None:
    run_one(server, PROMPT, 5, "r")
    assert server.manager.counters.demoted == 0
    assert server.ledger.t0_unread == len(PROMPT) + 4


def test_duplicates_are_freed_and_the_trees_rows_are_read(server: Server) -> None:
    """Two equal prompts in one batch: both compute them, the tree keeps one."""
    first = server.request(PROMPT, 5, "r")
    second = server.request(PROMPT, 5, "s")
    server.step()
    assert server.ledger.virtual.used == len(PROMPT)
    shared = server.cache._path_pages(first.last_node)
    assert server.ledger.readers[shared].tolist() == [2] * len(PROMPT)
    server.run()
    assert list(first.output_ids) == list(second.output_ids)


def test_duplicates_that_left_t0_are_freed(make_server: Callable[..., Server]) -> None:
    server = make_server(page_size=4, t0=8, window=8, host=20)
    first = server.request(PROMPT, 9, "r")
    server.request(PROMPT, 9, "s")
    for _ in range(7):
        server.step()
    assert server.manager.make_room(server.ledger.t0.available + 2)
    server.run()
    assert list(first.output_ids) == server.expected(PROMPT, 9)
    assert server.ledger.live.sum() == server.cache.evictable_size() // 4


def test_a_prefix_in_t1_is_matched_like_any_other(server: Server) -> None:
    run_one(server, PROMPT, 5, "r")
    server.manager.make_room(32)
    assert server.ledger.t1 == len(PROMPT) + 4
    req = run_one(server, [*PROMPT, 7, 7], 5, "s")
    assert req.cached_tokens == len(PROMPT)
    assert list(req.output_ids) == server.expected([*PROMPT, 7, 7], 5)


def test_a_second_turn_reads_the_first_ones_output(server: Server) -> None:
    first = run_one(server, PROMPT, 6, "r")
    prompt = [*PROMPT, *first.output_ids, 7]
    second = run_one(server, prompt, 6, "s")
    assert second.cached_tokens == len(prompt) - 2
    assert list(second.output_ids) == server.expected(prompt, 6)


# -- parking


def running(server: Server, new: int = 12, steps: int = 5) -> Req:
    req = server.request(PROMPT, new, "r")
    for _ in range(steps):
        server.step()
    return req


def test_a_parked_request_keeps_its_rows_and_reads_none(server: Server) -> None:
    req = running(server)
    rows = req.kv.kv_allocated_len
    server.retract(req)
    assert server.ledger.virtual.used == rows
    assert server.ledger.read_pages == 0
    assert server.ledger.parks.sum() == rows
    assert server.cache.evictable_size() == 0
    server.run()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_parked_request_recomputes_at_most_a_page(
    page_size: int, make_server: Callable[..., Server]
) -> None:
    server = make_server(page_size=page_size, t0=24, window=8, host=32)
    req = running(server)
    server.retract(req)
    server.run()
    assert 0 < server.recomputed <= page_size
    assert list(req.output_ids) == server.expected(PROMPT, 12)


def test_a_request_that_resumed_is_not_parked_any_more(server: Server) -> None:
    req = running(server)
    server.retract(req)
    server.step()
    assert server.cache.parked_requests() == 0
    assert not server.ledger.parks.any()
    server.run()
    assert req.finished()


def test_parked_rows_are_not_evicted(server: Server) -> None:
    req = running(server)
    server.retract(req)
    assert server.cache.evict(EvictParams(num_tokens=100)).num_tokens_evicted == 0
    server.run()
    assert server.recomputed == 1
    assert req.finished()


def test_parked_rows_wait_in_t1(server: Server) -> None:
    req = running(server)
    server.retract(req)
    assert server.manager.make_room(32)
    assert server.ledger.window.used == 0
    server.run()
    assert list(req.output_ids) == server.expected(PROMPT, 12)


def test_two_parked_requests_share_a_prefix(server: Server) -> None:
    reqs = [server.request([*PROMPT, n], 12, f"r{n}") for n in range(2)]
    for _ in range(5):
        server.step()
    for req in reqs:
        server.retract(req)
    server.abort(reqs[0])
    shared = server.ledger.parks[server.ledger.live]
    assert (shared > 0).sum() == len(PROMPT) + 5
    server.run()
    assert list(reqs[1].output_ids) == server.expected([*PROMPT, 1], 12)


def test_a_finished_request_is_not_parked(server: Server) -> None:
    req = running(server)
    server.abort(req)
    server.cache.park(req)
    assert server.cache.parked_requests() == 0
    server.run()


def test_a_session_turn_is_not_parked(server: Server) -> None:
    session = server.session()
    req = server.request(PROMPT, 12, "r", session)
    for _ in range(5):
        server.step()
    server.retract(req)
    assert server.cache.parked_requests() == 0
    server.run()
    assert server.recomputed == 1
    assert list(req.output_ids) == server.expected(PROMPT, 12)


# -- sessions


def turn(server: Server, session: Session, tokens: list[int], rid: str) -> list[int]:
    """One turn of four tokens: its whole prompt."""
    req = server.request(tokens, 4, rid, session)
    prompt = list(req.origin_input_ids)
    server.run()
    assert list(req.output_ids) == server.expected(prompt, 4)
    return prompt


@pytest.fixture(params=[1, 4], ids=lambda size: f"page{size}")
def paged(request: pytest.FixtureRequest, make_server: Callable[..., Server]) -> Server:
    size = request.param
    return make_server(
        page_size=size, t0=32 // size, window=16 // size, host=64 // size
    )


def test_an_idle_session_keeps_its_rows_and_reads_none(paged: Server) -> None:
    session = paged.session()
    turn(paged, session, PROMPT, "t1")
    assert paged.ledger.read_pages == 0
    assert paged.ledger.virtual.used * paged.page_size >= len(PROMPT) + 3
    paged.close_session(session)


def test_a_turn_goes_on_from_rows_in_t1(paged: Server) -> None:
    session = paged.session()
    turn(paged, session, PROMPT, "t1")
    assert paged.manager.make_room(paged.ledger.t0.count)
    turn(paged, session, [5, 6, 7], "t2")
    turn(paged, session, [5], "t3")
    paged.close_session(session)


def test_a_turn_does_not_send_its_own_rows_away(
    make_server: Callable[..., Server],
) -> None:
    """Rows of a turn that is let in are read before its new rows are allocated."""
    server = make_server(t0=24, window=4, host=60, chunk=16)
    session = server.session()
    turn(server, session, PROMPT, "t1")
    run_one(server, [7] * 10, 3, "cold")
    turn(server, session, [5] * 8, "t2")
    server.close_session(session)


def test_a_session_gives_up_its_rows_when_nothing_else_is_left(
    make_server: Callable[..., Server],
) -> None:
    """Ids that idle sessions hold would otherwise stop every request for ever."""
    server = make_server(t0=16, window=8, host=16, chunk=16)
    sessions = [server.session() for _ in range(2)]
    for n, session in enumerate(sessions):
        turn(server, session, [n, *PROMPT], f"t{n}")
    req = run_one(server, [3, 1, 4], 11, "r")
    assert list(req.output_ids) == server.expected([3, 1, 4], 11)
    for n, session in enumerate(sessions):
        turn(server, session, [5], f"u{n}")
        server.close_session(session)


def test_a_waiting_turn_begins_anew_when_its_session_has_lost_its_rows(
    server: Server,
) -> None:
    session = server.session()
    turn(server, session, PROMPT, "t1")
    req = server.request([5, 5], 4, "t2", session)
    prompt = list(req.origin_input_ids)
    req.init_next_round_input(server.cache)
    assert req.kv.holds_kv
    server.cache._reclaim(server.ledger.virtual.count)
    assert not req.kv.holds_kv
    assert req.kv.is_kv_released
    assert req.kv.cache_protected_len == 0
    server.run()
    assert list(req.output_ids) == server.expected(prompt, 4)
    server.close_session(session)


def test_a_turn_that_fills_the_tiers_to_their_last_page_is_let_in(
    make_server: Callable[..., Server],
) -> None:
    """It goes on inside a page and needs no new one."""
    server = make_server(page_size=4, t0=8, window=4, host=20, chunk=16)
    session = server.session()
    server.request([1] * 30, 12, "t1", session)
    server.run()
    req = server.request([5], 1, "t2", session)
    server.run(limit=10)
    assert req.kv.kv_allocated_len == 0
    assert len(req.output_ids) == 1
    server.close_session(session)


# -- admission


def test_rows_of_an_idle_session_are_less_room_for_its_own_turn(
    make_server: Callable[..., Server],
) -> None:
    """Once it reads them they need T0 or the window."""
    server = make_server(window=4)
    session = server.session()
    turn(server, session, PROMPT, "t1")
    held = server.ledger.virtual.used
    req = server.request([5], 4, "t2", session)
    budget = server.allocator.create_prefill_budget(server.cache)
    assert budget.remaining_current == 32
    req.init_next_round_input(server.cache)
    assert server.cache.session_pages() == held
    assert budget.remaining_current == 32 - held + 4
    server.run()
    server.close_session(session)


def test_every_hit_counts_the_rows_that_have_no_place(server: Server) -> None:
    """The scheduler pins a candidate's prefix while it asks what is left."""
    run_one(server, PROMPT * 2, 5, "r")
    server.manager.make_room(32)
    server.request([1] * 20, 2, "s")
    server.step()
    budget = server.allocator.create_prefill_budget(server.cache)
    before = budget.remaining_current
    match = server.cache.match_prefix(MatchPrefixParams(key=key_of(PROMPT * 2)))
    lock = server.cache.lock(match.last_device_node)
    assert budget.remaining_current == before - len(PROMPT) * 2
    server.cache.unlock(lock)
    server.run()


def test_only_who_does_not_fit_beside_running_requests_closes_admission(
    server: Server,
) -> None:
    """(False, None) closes it until a request finishes. Whoever was let in by the same
    pass counts with all it may write, and in the next one with much less."""
    run_one(server, [1, 2, 3], 1, "gone")
    server.request([1] * 10, 20, "running")
    server.step()
    candidate = {
        "extend_input_len": 10,
        "input_tokens": 10,
        "max_new_tokens": 85,
        "total_tokens": 95,
        "swa_host_hit_length": 0,
        "chunk_limit": None,
    }
    budget = server.allocator.create_prefill_budget(server.cache)
    assert budget.check_prefill(**candidate) == (False, None)
    budget.reserve(1, 1)
    assert budget.check_prefill(**candidate) == LATER
    server.run()


def test_a_flush_forgets_everybody(server: Server) -> None:
    turn(server, server.session(), PROMPT, "t1")
    run_one(server, PROMPT, 4, "r")
    server.flush()
    assert server.ledger.virtual.used == 0
    assert run_one(server, PROMPT, 4, "s").cached_tokens == 0
