"""The tiered radix cache inside SGLang's own scheduling: who reads which rows, what is
kept for whom, and that nothing is lost or kept for ever."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
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
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.session.session_controller import Session

from sglang_tiered.memory.manager import TierPolicy


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
        ratio=st.sampled_from([None, None, 0.3]),
    )
    def start(
        self,
        page_size: int,
        tight: bool,
        chunk: int | None,
        overlap: bool,
        mixed: bool,
        ratio: float | None,
    ) -> None:
        tokens = (40, 16, 40) if tight else (64, 32, 120)
        t0, window, host = (n // page_size for n in tokens)
        self.server = Server(
            page_size=page_size,
            t0=t0,
            window=window,
            host=host,
            rows=4,
            chunk=chunk,
            overlap=overlap,
            mixed=mixed and chunk is not None,
            policy=TierPolicy(
                sink_tokens=1, recent_window=3, retier_interval=5, hbm_ratio=ratio
            ),
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
            self.add([6, *turn], new, session)

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
        pools = (ledger.virtual, ledger.t0, ledger.host, ledger.window)
        assert [pool.used for pool in pools] == [0, 0, 0, 0]

    @invariant()
    def the_books_agree(self) -> None:
        self.server.check_integrity()


TestServingMachine = ServingMachine.TestCase
TestServingMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
