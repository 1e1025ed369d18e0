"""Any order of requests, moves and forwards against a model that knows only what
every row must hold: the real manager, engine, backing and host pool."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tiers import LAYERS, Array, Tiers, batch_of

from sglang_tiered.memory.manager import TierRules
from sglang_tiered.policy.base import Policy
from sglang_tiered.policy.hierarchy import Hierarchy
from sglang_tiered.policy.random import Random
from sglang_tiered.policy.recency import Recency

ROOT = 0
MAX_ROWS = 7
pick = st.integers(0, 2**16)


@dataclass(eq=False)
class Request:
    """What the scheduler and the tree know of a request."""

    row: int
    prompt: int
    path: list[int] = field(default_factory=list)  # tree pages under its lock
    own: list[int] = field(default_factory=list)
    length: int = 0

    @property
    def pages(self) -> list[int]:
        return self.path + self.own


def array(numbers: Iterable[int]) -> Array:
    return np.array(list(numbers), dtype=np.int64)


class TierMachine(RuleBasedStateMachine):
    """Rules are what SGLang does to a pool; the tree keeps one node a page."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16, 64]),
        sizes=st.sampled_from([(12, 6, 20), (10, 10, 12), (16, 4, 40)]),
        policy=st.sampled_from(
            [
                Recency(),
                Recency(hbm_ratio=0.0),
                Hierarchy(hbm_ratio=0.5),
                Hierarchy(compress_ratio=0.5),
                Hierarchy(hbm_ratio=0.3, compress_ratio=0.3, evict_ratio=0.3),
                Random(budget=0.3),
            ]
        ),
        recent=st.sampled_from([1, 6]),
    )
    def start(
        self,
        page_size: int,
        sizes: tuple[int, int, int],
        policy: Policy,
        recent: int,
    ) -> None:
        t0, window, host = sizes
        self.tiers = Tiers(
            page_size=page_size,
            t0=t0,
            window=window,
            host=host,
            int8=6,
            rows=MAX_ROWS,
            rules=TierRules(sink_tokens=2, recent_window=recent, retier_interval=3),
            policy=policy,
        )
        self.page_size = page_size
        self.ledger, self.manager = self.tiers.ledger, self.tiers.manager
        self.manager.reclaim = self.reclaim
        self.clear()

    def clear(self) -> None:
        self.holds: dict[int, Array] = {}
        self.parent: dict[int, int] = {}
        self.children: Counter[int] = Counter()
        self.locks: Counter[int] = Counter()
        self.read: Counter[int] = Counter()
        self.running: list[Request] = []
        self.parked: list[Request] = []
        self.idle: list[Request] = []
        self.free_rows = list(range(1, MAX_ROWS))
        self.next_value = 1.0

    def teardown(self) -> None:
        if hasattr(self, "tiers"):
            self.tiers.close()

    # -- the tree ----------------------------------------------------------------

    def evictable(self) -> int:
        return sum(1 for page in self.parent if not self.locks[page])

    def reclaim(self, n: int) -> None:
        """Evict ``n`` cold leaves, then give up parked rows, oldest first."""
        while n > 0:
            leaves = [
                page
                for page in self.parent
                if not self.children[page] and not self.locks[page]
            ]
            if leaves:
                self.evict_page(leaves[0])
                n -= 1
            elif self.parked:
                self.unpark(self.parked.pop(0))
            else:
                return

    def evict_page(self, page: int) -> None:
        self.children[self.parent.pop(page)] -= 1
        self.drop([page])

    def drop(self, pages: list[int]) -> None:
        self.manager.release(array(pages))
        for page in pages:
            del self.holds[page]
            self.read[page] = 0

    def lock(self, pages: list[int]) -> None:
        self.manager.read(array(pages))
        self.locks.update(pages)
        self.read.update(pages)

    def unlock(self, pages: list[int]) -> None:
        self.manager.unread(array(pages))
        self.locks.subtract(pages)
        self.read.subtract(pages)

    def checkpoint(self, request: Request, up_to: int) -> None:
        """The tree takes the whole exact pages below token ``up_to``."""
        exact = int(self.ledger.rows.exact_pages[request.row])
        up_to = min(up_to, min(exact, request.length) * self.page_size)
        taken = request.own[: max(0, up_to // self.page_size - len(request.path))]
        last = request.path[-1] if request.path else ROOT
        for page in taken:
            self.parent[page] = last
            self.children[last] += 1
            last = page
        self.unlock(request.path)
        request.path, request.own = request.path + taken, request.own[len(taken) :]
        self.lock(request.path)
        self.ledger.give_to_tree(array(taken))
        self.read.subtract(taken)

    def leave(self, request: Request) -> None:
        """Free what the tree did not take and unlock the rest."""
        self.drop(request.own)
        self.unlock(request.path)
        self.manager.end_request(request.row)
        self.free_rows.append(request.row)

    def unpark(self, parked: Request) -> None:
        self.locks.subtract(parked.path)
        self.ledger.unpark(array(parked.path))

    # -- forwards ------------------------------------------------------------------

    def can_get(self, need: int, t0: int = 0, t1: int = 0) -> bool:
        """What the gates say about ``need`` new pages for a request that begins to
        read ``t0`` and ``t1`` pages."""
        parked = {page for request in self.parked for page in request.path}
        held = Counter(page for r in self.running + self.idle for page in r.path)
        reclaimable = self.evictable() + sum(1 for page in parked if not held[page])
        virtual = self.ledger.available + reclaimable
        overflow = self.ledger.unplaced + t1 - self.ledger.window.available
        return need <= min(self.manager.attainable(t0, t1), virtual - max(overflow, 0))

    def room(self, need: int) -> bool:
        promised = self.can_get(need)
        assert self.manager.make_room(need) == promised
        return promised

    def missing(self, request: Request, tokens: int) -> int:
        return -(-(request.length + tokens) // self.page_size) - len(request.pages)

    def write(self, requests: list[tuple[Request, int]]) -> Array:
        """Give every request its new pages; return the ids of its new tokens."""
        need = sum(self.missing(request, tokens) for request, tokens in requests)
        fresh = self.manager.allocate(need).tolist()
        ids = []
        for request, tokens in requests:
            count = self.missing(request, tokens)
            mine, fresh = fresh[:count], fresh[count:]
            request.own += mine
            for page in mine:
                self.holds[page] = np.full(self.page_size, np.nan, dtype=np.float32)
                self.read[page] = 1
            span = np.arange(request.length, request.length + tokens)
            ids.append(self.ids(request, span))
            request.length += tokens
        return np.concatenate(ids)

    def ids(self, request: Request, span: Array) -> Array:
        pages = array(request.pages)[span // self.page_size]
        return pages * self.page_size + span % self.page_size

    def forward(
        self, extends: list[tuple[Request, int]], decodes: list[Request]
    ) -> None:
        """One forward of a batch whose pages fit, and what its attention reads."""
        entries = extends + [(request, 1) for request in decodes]
        before = [request.pages for request, _ in extends]
        new_ids = self.write(entries)
        batch = batch_of(
            *((r.row, r.length, tokens, r.prompt) for r, tokens in entries),
            ids=new_ids,
        )
        batch.decode[: len(extends)] = False
        read_by_extend = None
        if not decodes:
            read_by_extend = array(page for old in before for page in old)
        self.manager.begin_forward(batch, read_by_extend)
        values = self.next_value + np.arange(len(new_ids), dtype=np.float32)
        self.next_value += len(new_ids)
        for token, value in zip(new_ids.tolist(), values, strict=True):
            page, offset = divmod(token, self.page_size)
            self.holds[page][offset] = value
        read = np.concatenate([self.ids(r, np.arange(r.length)) for r, _ in entries])
        read = read[~self.ledger.dropped[read // self.page_size]]
        self.attend(read)
        held = np.array(
            [self.holds[t // self.page_size][t % self.page_size] for t in read.tolist()]
        )
        for layer in range(LAYERS):
            self.tiers.write(layer, new_ids, values)
            self.tiers.engine.wait_until(layer)
            assert self.tiers.reads(layer, read, held), f"layer {layer}"
        self.manager.end_forward(batch)

    def attend(self, read: Array) -> None:
        """Scores as an attention backend feeds them, of some fixed weights."""
        scores = self.manager.scores
        if scores.lanes.any():
            np.add.at(scores.score, read, (read * 7919 % 101).astype(np.float32))
            np.add.at(scores.steps, read, 1)

    def extend(self, request: Request, tokens: int) -> bool:
        """A chunk of a prompt, if admission lets it in; part of it if not all."""
        t0, t1 = self.waking(request)
        tokens = min(tokens, (self.manager.attainable(t0, t1) - 1) * self.page_size)
        if tokens < 1 or self.manager.room_for_reading() < t0 + t1 + 1:
            return False
        if not self.can_get(self.missing(request, tokens) + 1, t0, t1):
            return False
        self.wake(request)
        if request.length % self.page_size:
            assert self.reopen(request.own[-1])
        assert self.room(self.missing(request, tokens))
        self.forward([(request, tokens)], [])
        return True

    def reopen(self, page: int) -> bool:
        stale = self.ledger.t0_page[page] < 0 or self.ledger.host_page[page] >= 0
        return not stale or self.manager.reopen(array([page]))

    def waking(self, request: Request) -> tuple[int, int]:
        if request not in self.idle:
            return 0, 0
        in_t0 = int((self.ledger.t0_page[array(request.pages)] >= 0).sum())
        return in_t0, len(request.pages) - in_t0

    def wake(self, request: Request) -> None:
        if request in self.idle:
            self.idle.remove(request)
            self.running.append(request)
            self.manager.read(array(request.pages))
            self.read.update(request.pages)

    # -- rules -----------------------------------------------------------------------

    @precondition(lambda self: self.free_rows)
    @rule(seed=pick, depth=pick, prompt=st.integers(1, 40), chunk=st.integers(1, 4))
    def request(self, seed: int, depth: int, prompt: int, chunk: int) -> None:
        """A request that may share a path of the tree, or resume a parked one."""
        tips = sorted(self.parent)
        path: list[int] = []
        if tips and seed % 3:
            page = tips[seed % len(tips)]
            while page != ROOT:
                path.insert(0, page)
                page = self.parent[page]
        path = path[: depth % (len(path) + 1)] if depth % 2 else path
        request = Request(self.free_rows.pop(), 0, path, [], len(path) * self.page_size)
        request.prompt = request.length + prompt
        self.lock(path)
        self.running.append(request)
        if not self.extend(request, min(prompt, chunk * self.page_size)):
            self.running.remove(request)
            self.leave(request)
            return
        for parked in self.parked:
            if parked.path == path:
                self.parked.remove(parked)
                self.unpark(parked)
                break
        self.checkpoint(request, request.length)

    @precondition(lambda self: self.running)
    @rule(which=pick, tokens=st.integers(1, 40))
    def next_chunk(self, which: int, tokens: int) -> None:
        """A prompt goes on; its rows enter the tree in between."""
        request = self.running[which % len(self.running)]
        request.prompt = max(request.prompt, request.length + tokens)
        if self.extend(request, tokens):
            self.checkpoint(request, request.length)

    @precondition(lambda self: self.running)
    @rule(steps=st.integers(1, 30), park=st.booleans())
    def decode(self, steps: int, park: bool) -> None:
        """Decode steps of all; what does not fit is retracted or ends."""
        for _ in range(steps):
            need = self.decode_need()
            while not self.room(need):
                victim = self.running.pop()
                self.retract(victim) if park else self.abort(victim)
                need = self.decode_need()
            if not self.running:
                return
            self.forward([], list(self.running))

    def decode_need(self) -> int:
        return sum(self.missing(request, 1) for request in self.running)

    @precondition(lambda self: len(self.running) > 1)
    @rule(which=pick, tokens=st.integers(1, 20))
    def mixed(self, which: int, tokens: int) -> None:
        """One forward of a chunk and of decode steps."""
        request = self.running[which % len(self.running)]
        others = [other for other in self.running if other is not request]
        need = sum(self.missing(other, 1) for other in others)
        need += self.missing(request, tokens)
        if self.room(need):
            self.forward([(request, tokens)], others)

    @precondition(lambda self: self.running)
    @rule(which=pick, how=st.sampled_from(["finish", "abort", "retract", "sleep"]))
    def stop(self, which: int, how: str) -> None:
        request = self.running[which % len(self.running)]
        # The requests of a session are exact from their first step on.
        if how == "sleep" and self.ledger.rows.is_lossy(request.row):
            return
        self.running.remove(request)
        getattr(self, how)(request)

    def finish(self, request: Request) -> None:
        self.checkpoint(request, request.length)
        self.leave(request)

    def abort(self, request: Request) -> None:
        self.leave(request)

    def retract(self, request: Request) -> None:
        """Park: the exact rows stay in the tree, under a lock that nobody reads."""
        self.checkpoint(request, request.length - 1)
        self.locks.update(request.path)
        self.ledger.park(array(request.path))
        self.parked.append(Request(0, 0, list(request.path)))
        self.leave(request)

    def sleep(self, request: Request) -> None:
        """A streaming session keeps its rows until its next turn."""
        self.manager.start_request(request.row, Recency(), 0)
        self.idle.append(request)
        self.manager.unread(array(request.pages))
        self.read.subtract(request.pages)

    @precondition(lambda self: self.idle)
    @rule(which=pick, tokens=st.integers(1, 30))
    def next_turn(self, which: int, tokens: int) -> None:
        request = self.idle[which % len(self.idle)]
        request.prompt = request.length + tokens
        self.extend(request, tokens)

    @precondition(lambda self: self.idle or self.parked)
    @rule(which=pick)
    def disconnect(self, which: int) -> None:
        """A client that waits goes away: its request was parked, or is a session."""
        waiting = self.parked + self.idle
        gone = waiting[which % len(waiting)]
        if gone in self.parked:
            self.parked.remove(gone)
            self.unpark(gone)
        else:
            self.idle.remove(gone)
            self.manager.read(array(gone.pages))
            self.read.update(gone.pages)
            self.leave(gone)

    @rule(n=st.integers(1, 8))
    def evict(self, n: int) -> None:
        for _ in range(n):
            leaves = [
                page
                for page in sorted(self.parent)
                if not self.children[page] and not self.locks[page]
            ]
            if leaves:
                self.evict_page(leaves[0])

    @precondition(lambda self: not self.running)
    @rule()
    def flush(self) -> None:
        self.manager.reset()
        self.tiers.poison(
            np.arange(1, self.tiers.backing.window_base + self.ledger.window.count)
        )
        self.clear()

    # -- what holds after every rule --------------------------------------------------

    @invariant()
    def the_books_agree(self) -> None:
        self.tiers.check_integrity()
        live = np.flatnonzero(self.ledger.live).tolist()
        assert live == sorted(self.holds)
        assert self.ledger.readers[live].tolist() == [self.read[p] for p in live]

    @invariant()
    def every_copy_holds_its_rows(self) -> None:
        if self.holds:
            live = sorted(self.holds)
            held = np.stack([self.holds[page] for page in live])
            assert self.tiers.holds(array(live), held)


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
