"""SGLang's own scheduling parts over the tiered pool, around a forward without a model.

Requests, batches, admission, rows, tree and sessions are SGLang's; the pool and the
hooks are ours. A token's rows hold a number that names the whole sequence up to it, as
real keys and values depend on all of it: a row of another request, position or time is
seen by the next forward that reads it.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from applied_hooks import applied
from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session.session_controller import Session
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from tiers import LAYERS, Array, Tiers

from sglang_tiered.memory.manager import TierRules
from sglang_tiered.policy.base import Policy
from sglang_tiered.sglang import budget
from sglang_tiered.sglang.allocator import TieredAllocator
from sglang_tiered.sglang.radix_cache import TieredRadixCache
from sglang_tiered.sglang.scheduler import run_batch_hook

VOCAB = 512
CONTEXT = 512
NEW_TOKEN_RATIO = 0.3
GROWTH_TOKENS = 4


@contextmanager
def scheduler_process() -> Iterator[None]:
    """SGLang's process-wide configuration, as a server on a CPU publishes it, and
    our hooks. Requests come in as close together as these small pools allow."""
    settings = get_context().override_server_args(
        attention_backend="torch_native", device="cpu"
    )
    crowded = patch.object(budget, "GROWTH_TOKENS", GROWTH_TOKENS)
    with settings, applied(), crowded:
        yield


class Names:
    """A number for every sequence of tokens, and the token that follows it."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] = {}

    def of(self, tokens: Sequence[int]) -> Array:
        """The name of every prefix of ``tokens``: float32 [len(tokens)]."""
        names, name = [], 0
        for token in tokens:
            name = self._children.setdefault((name, token), len(self._children) + 1)
            names.append(name)
        return np.array(names, dtype=np.float32)

    @staticmethod
    def next_token(name: float) -> int:
        return int(name) * 7 % 5


class Server:
    """One scheduler process without its model, its queues and its clients."""

    def __init__(
        self,
        *,
        page_size: int = 1,
        t0: int = 32,
        window: int = 16,
        host: int = 64,
        rows: int = 8,
        chunk: int | None = None,
        overlap: bool = False,
        mixed: bool = False,
        int8: int = 0,
        rules: TierRules | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.tiers = Tiers(
            page_size=page_size,
            t0=t0,
            window=window,
            host=host,
            rows=rows + 1,
            int8=int8,
            rules=rules or TierRules(sink_tokens=1, recent_window=2),
            policy=policy,
        )
        self.manager, self.ledger = self.tiers.manager, self.tiers.ledger
        self.allocator = TieredAllocator(
            size=self.ledger.virtual.count * page_size,
            page_size=page_size,
            dtype=torch.float32,
            device="cpu",
            kvcache=None,
            manager=self.manager,
            audit=True,
        )
        self.row_pool = ReqToTokenPool(rows, CONTEXT, "cpu", False)
        self.cache = TieredRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.row_pool,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
                chunked_prefill_size=chunk,
            )
        )
        # What the hook on ``Scheduler.run_batch`` looks at.
        self.scheduler = SimpleNamespace(
            tree_cache=self.cache, token_to_kv_pool_allocator=self.allocator
        )
        self.model_config = SimpleNamespace(vocab_size=VOCAB, is_encoder_decoder=False)
        self.page_size, self.chunk = page_size, chunk
        self.overlap, self.mixed = overlap, mixed
        self.names = Names()
        self.sequences: dict[str, list[int]] = {}
        self.waiting: list[Req] = []
        self.chunked: Req | None = None
        self.running = ScheduleBatch(reqs=[])
        self.last: ScheduleBatch | None = None
        self.results: list[tuple[ScheduleBatch, list[int]]] = []
        self.retract_next = False  # as SGLANG_TEST_RETRACT does
        self.aborted: list[Req] = []  # that not even a retraction made room for
        self.forwards = self.retracted = self.recomputed = 0
        self.most_recomputed = 0  # by one resume

    def close(self) -> None:
        self.tiers.close()

    # -- clients -----------------------------------------------------------------

    def request(
        self,
        tokens: Sequence[int],
        new: int,
        rid: str,
        session: Session | None = None,
        tiered: Mapping[str, Any] | None = None,
    ) -> Req:
        """A client's request for ``new`` greedy tokens, in the waiting queue."""
        params = SamplingParams(
            max_new_tokens=new,
            temperature=0,
            ignore_eos=False,
            custom_params=None if tiered is None else {"tiered": tiered},
        )
        params.normalize(None)
        if session is None:
            req = Req(rid, "", array("q", tokens), params, vocab_size=VOCAB)
        else:
            req = session.create_req(
                TokenizedGenerateReqInput(
                    rid=rid,
                    input_text="",
                    input_ids=array("q", tokens),
                    input_embeds=None,
                    token_type_ids=None,
                    mm_inputs=None,
                    sampling_params=params,
                    return_logprob=False,
                    logprob_start_len=-1,
                    top_logprobs_num=0,
                    token_ids_logprob=None,
                    stream=False,
                    session_params=SessionParams(id=session.session_id),
                ),
                None,
                VOCAB,
            )
        longest = self.allocator.longest_request(self.chunk)
        assert len(req.origin_input_ids) + new <= longest, "the test asks for too much"
        self.waiting.append(req)
        return req

    def session(self) -> Session:
        return Session(CONTEXT, streaming=True)

    def close_session(self, session: Session) -> None:
        self.cache.release_session(session.session_id)

    def abort(self, req: Req) -> None:
        """The client of ``req`` goes away."""
        between_chunks = req is self.chunked
        if req in self.waiting:
            self.waiting.remove(req)
            self.cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)
            if req.session is not None:
                req.session.abort_req()
        elif between_chunks:
            req.finished_reason = FINISH_ABORT()
            self.cache.finish(req.cache_request_handle, CacheRequestOutcome.ABORT)
            release_kv_cache(req, self.cache, checkpoint=False)
            self.chunked = None
        elif not req.finished():
            req.to_finish = FINISH_ABORT()

    def flush(self) -> None:
        """``flush_cache`` of an idle server, in SGLang's order."""
        self.running, self.last = ScheduleBatch(reqs=[]), None
        self.cache.reset()
        self.row_pool.clear()
        self.allocator.clear()

    @property
    def idle(self) -> bool:
        return (
            not self.waiting
            and not self.results
            and self.chunked is None
            and self.running.is_empty()
            and (self.last is None or all(r.finished() for r in self.last.reqs))
        )

    # -- the scheduler's loop -------------------------------------------------------

    def run(self, limit: int = 2000) -> None:
        """Until every request has ended."""
        for _ in range(limit):
            if self.idle:
                return
            self.step()
        raise AssertionError(f"not idle after {limit} steps")

    def step(self) -> None:
        """One iteration of the event loop."""
        batch = self._next_batch()
        if batch is not None:
            self.results.append((batch.copy(), self._run(batch)))
        keep = 1 if self.overlap and batch is not None else 0
        while len(self.results) > keep:
            self._process(*self.results.pop(0))
        self.last = batch
        self.check_integrity()

    def _next_batch(self) -> ScheduleBatch | None:
        if (
            self.chunked is not None
            and self.chunked.extend_end > self.chunked.prefix_len
        ):
            checkpoint_kv_cache(self.chunked, self.cache)
        if self.last is not None and self.last.forward_mode.is_extend():
            out = [r for r in (self.chunked, self.last.chunked_req) if r is not None]
            self.last.filter_batch(reqs_to_exclude=out)
            if not self.last.is_empty():
                if self.running.is_empty():
                    self.running = self.last
                else:
                    self.running.merge_batch(self.last)
        self.running.filter_batch()
        prefill = self._prefill()
        if prefill is not None:
            return prefill
        return None if self.running.is_empty() else self._decode()

    def _prefill(self) -> ScheduleBatch | None:
        if self.chunked is None and not self.waiting:
            return None
        adder = PrefillAdder(
            self.page_size,
            self.cache,
            self.allocator,
            self.running,
            NEW_TOKEN_RATIO,
            8192,
            self.chunk,
            len(self.running.reqs) if self.mixed else 0,
        )
        if self.chunked is not None:
            self.chunked.init_next_round_input()
            self.chunked = adder.add_chunked_req(self.chunked)
        for req in self.waiting:
            if adder.budget_state() == AddReqResult.OTHER:
                break
            fresh = [r for r in adder.can_run_list if not r.kv.holds_kv]
            if len(fresh) >= self.row_pool.available_size():
                break
            req.init_next_round_input(self.cache)
            result = adder.add_one_req(
                req,
                has_chunked_req=self.chunked is not None,
                truncation_align_size=None,
            )
            if result != AddReqResult.CONTINUE:
                break
        if not adder.can_run_list:
            return None
        self.waiting = [r for r in self.waiting if r not in adder.can_run_list]
        if adder.new_chunked_req is not None:
            assert self.chunked is None
            self.chunked = adder.new_chunked_req
        if self.chunked is not None:
            self.chunked.inflight_middle_chunks += 1
        for req in adder.can_run_list:
            if req.is_retracted:
                again = len(req.full_untruncated_fill_ids) - req.prefix_len
                self.recomputed += again
                # Without an output it left between two chunks of its prompt, and what
                # was never computed is not computed again.
                if req.output_ids:
                    self.most_recomputed = max(self.most_recomputed, again)
        batch = ScheduleBatch.init_new(
            adder.can_run_list,
            self.row_pool,
            self.allocator,
            self.cache,
            self.model_config,
            self.overlap,
            SpeculativeAlgorithm.NONE,
            chunked_req=self.chunked,
        )
        batch.prepare_for_extend()
        batch.decoding_reqs = None
        if (
            self.mixed
            and not self.running.is_empty()
            and self.running.check_decode_mem()
        ):
            self.running.prepare_for_decode()
            batch.mix_with_running(self.running)
            batch.decoding_reqs = self.running.reqs
            self.running = ScheduleBatch(reqs=[])
        return batch

    def _decode(self) -> ScheduleBatch | None:
        if not self.running.check_decode_mem() or self.retract_next:
            self.retract_next = False
            out, _, aborted = self.running.retract_decode()
            self.aborted += aborted
            self.waiting += out
            self.retracted += len(out)
        if self.running.is_empty():
            return None
        self.running.prepare_for_decode()
        return self.running

    def retract(self, req: Req) -> None:
        """SGLang takes a running request's rows away; it waits again. Not while a
        result is pending: SGLang retracts where it can drop it."""
        assert not self.results
        position = self.running.reqs.index(req)
        self.running.release_req(position, len(self.running.reqs) - 1)
        keep = [i for i in range(len(self.running.reqs)) if i != position]
        self.running.filter_batch(keep_indices=keep)
        self.waiting.append(req)
        self.retracted += 1

    def _process(self, batch: ScheduleBatch, tokens: list[int]) -> None:
        """What the result processor does with a forward's tokens."""
        self.allocator.free_group_begin()
        decoding = batch.decoding_reqs or ()
        for req, token in zip(batch.reqs, tokens, strict=True):
            if req.is_retracted or (req.finished() and req.inflight_middle_chunks <= 0):
                continue
            if req.inflight_middle_chunks > 0:
                req.inflight_middle_chunks -= 1
                continue
            req.output_ids.append(token)
            req.update_finish_state()
            if req.finished():
                release_kv_cache(req, self.cache, checkpoint=True)
            elif batch.forward_mode.is_extend() and req not in decoding:
                checkpoint_kv_cache(req, self.cache)
        self.allocator.free_group_end()

    # -- the forward ----------------------------------------------------------------

    def _run(self, batch: ScheduleBatch) -> list[int]:
        self.forwards += 1
        tokens: list[int] = run_batch_hook(self._forward, self.scheduler, batch)
        return tokens

    def _forward(self, scheduler: Any, batch: ScheduleBatch) -> list[int]:
        """Write the new rows, then look at what attention of every layer reads."""
        extends = len(batch.reqs) - len(batch.decoding_reqs or ())
        if batch.forward_mode.is_decode():
            extends = 0
        ids, held, new = [], [], []
        for i, req in enumerate(batch.reqs):
            length = int(batch.seq_lens_cpu[i])
            if i < extends:
                sequence = list(req.full_untruncated_fill_ids[:length])
                new.append(slice(int(batch.prefix_lens[i]), length))
            else:
                sequence = self.sequences[req.rid]
                sequence.append(self.names.next_token(self.names.of(sequence)[-1]))
                new.append(slice(length - 1, length))
            assert len(sequence) == length
            self.sequences[req.rid] = sequence
            row = self.row_pool.req_to_token[int(batch.req_pool_indices_cpu[i])]
            ids.append(row[:length].numpy().astype(np.int64))
            held.append(self.names.of(sequence))
        self._attend(np.concatenate(ids))
        written = batch.out_cache_loc.numpy()
        values = np.concatenate([h[n] for h, n in zip(held, new, strict=True)])
        where = np.concatenate([i[n] for i, n in zip(ids, new, strict=True)])
        assert written.tolist() == where.tolist()
        for layer in range(LAYERS):
            self.tiers.write(layer, written, values)
            self.tiers.engine.wait_until(layer)
            for req, i, h in zip(batch.reqs, ids, held, strict=True):
                kept = ~self.ledger.dropped[i // self.page_size]
                assert self.tiers.reads(layer, i[kept], h[kept]), (
                    f"{req.rid}, layer {layer}"
                )
        return [self.names.next_token(h[-1]) for h in held]

    def _attend(self, ids: Array) -> None:
        """Scores as an attention backend feeds them, of some fixed weights."""
        scores = self.manager.scores
        if scores.lanes.any():
            np.add.at(scores.score, ids, (ids * 7919 % 101).astype(np.float32))
            np.add.at(scores.steps, ids, 1)

    def expected(self, tokens: Sequence[int], new: int) -> list[int]:
        """The greedy output that nothing but the tokens decides."""
        sequence = list(tokens)
        for _ in range(new):
            sequence.append(self.names.next_token(self.names.of(sequence)[-1]))
        return sequence[len(tokens) :]

    # -- audits ---------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Ours, and SGLang's equation for a pool that nobody may leak from."""
        self.tiers.check_integrity()
        self.cache.check_integrity()
        page = self.page_size
        held = [r for r in self._holders() if r.kv.holds_kv]
        private = sum(
            -(-r.kv.kv_allocated_len // page) * page - r.kv.cache_protected_len
            for r in held
        )
        borrowed = {id(r.kv) for r in held}
        private += sum(
            -(-kv.kv_allocated_len // page) * page - kv.cache_protected_len
            for kv in self.cache.session_records().values()
            if kv.holds_kv and id(kv) not in borrowed
        )
        total = (
            self.allocator.available_size()
            + self.cache.evictable_size()
            + self.cache.protected_size()
            + private
        )
        assert total == self.allocator.size, f"{total} of {self.allocator.size}"

    def _holders(self) -> set[Req]:
        reqs = set(self.running.reqs)
        if self.last is not None:
            reqs |= set(self.last.reqs)
        for batch, _ in self.results:
            reqs |= set(batch.reqs)
        return reqs | ({self.chunked} if self.chunked is not None else set())
