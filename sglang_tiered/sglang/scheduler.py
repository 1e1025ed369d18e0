"""Hooks on the scheduler: around every forward, before a retraction, and where a
request that cannot run here is told so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from sglang_tiered.memory.manager import BatchRows
from sglang_tiered.sglang.allocator import TieredAllocator
from sglang_tiered.sglang.radix_cache import TieredRadixCache

logger = logging.getLogger(__name__)


def run_batch_hook(
    original: Callable[..., Any],
    scheduler: Any,
    batch: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND ``Scheduler.run_batch``: rows are placed and fills started right
    before the forward, and it is known to be over right after it.

    On a CPU the forward runs inside this call; nothing else runs meanwhile.
    """
    cache = scheduler.tree_cache
    if not isinstance(cache, TieredRadixCache):
        return original(scheduler, batch, *args, **kwargs)
    manager = cache.manager
    rows = batch_rows(batch, scheduler.token_to_kv_pool_allocator.take_new_ids())
    manager.begin_forward(rows, read_by_extend(batch, cache))
    try:
        return original(scheduler, batch, *args, **kwargs)
    finally:
        manager.end_forward(rows)
        cache.after_forward()


def batch_rows(batch: Any, new_ids: np.ndarray) -> BatchRows:
    """What the tier manager needs to know of a ``ScheduleBatch``."""
    count = len(batch.reqs)
    if batch.forward_mode.is_decode():
        new_tokens = np.ones(count, dtype=np.int64)
        decode = np.ones(count, dtype=bool)
    else:
        new_tokens = np.array(batch.extend_lens, dtype=np.int64)
        # A mixed batch carries its decode rows behind the extends.
        decode = np.zeros(count, dtype=bool)
        decode[count - len(batch.decoding_reqs or ()) :] = True
    if int(new_tokens.sum()) != len(new_ids):
        raise RuntimeError(
            f"the batch writes {int(new_tokens.sum())} rows, "
            f"{len(new_ids)} were allocated"
        )
    return BatchRows(
        row=batch.req_pool_indices_cpu.numpy(),
        length=batch.seq_lens_cpu.numpy(),
        new_tokens=new_tokens,
        prompt=np.array([len(r.origin_input_ids) for r in batch.reqs], dtype=np.int64),
        new_ids=new_ids,
        decode=decode,
    )


def read_by_extend(batch: Any, cache: TieredRadixCache) -> np.ndarray | None:
    """Virtual pages that an extend batch reads; None for a batch with decode rows
    (every running request is in it)."""
    if batch.forward_mode.is_decode() or batch.decoding_reqs:
        return None
    return np.concatenate([cache.read_by(req) for req in batch.reqs])


def release_req_hook(
    original: Callable[..., Any], *, req: Any, tree_cache: Any, **kwargs: Any
) -> Any:
    """AROUND ``schedule_batch.release_req``: a retracted request keeps its rows."""
    if not isinstance(tree_cache, TieredRadixCache):
        return original(req=req, tree_cache=tree_cache, **kwargs)
    tree_cache.park(req)
    released = original(req=req, tree_cache=tree_cache, **kwargs)
    tree_cache.publish_metrics()
    return released


def init_req_max_new_tokens_hook(
    original: Callable[..., Any], scheduler: Any, req: Any
) -> None:
    """AROUND ``Scheduler.init_req_max_new_tokens``: a prompt that can never fit is
    refused with the numbers, where stock names only its length, and an output that
    cannot fit behind it is cut short with a line in the log."""
    prompt, asked = len(req.origin_input_ids), req.sampling_params.max_new_tokens
    original(scheduler, req)
    allocator = scheduler.token_to_kv_pool_allocator
    if not isinstance(allocator, TieredAllocator):
        return
    longest = allocator.longest_request(scheduler.chunked_prefill_size)
    ledger, page = allocator.manager.ledger, allocator.page_size
    limit = (
        f"one request can have at most {longest} tokens (T0 {ledger.t0.count * page} + "
        f"window {ledger.window.count * page}, less one page). Raise "
        "--max-total-tokens or --tiered-window-tokens"
    )
    if req.to_finish is not None and prompt >= longest:
        req.to_finish.message = (
            f"The prompt of {prompt} tokens cannot run here: {limit}, or shorten the "
            "prompt."
        )
    elif asked is not None and longest < min(prompt + asked, scheduler.max_req_len - 1):
        logger.warning(
            "Request %s asks for %d new tokens behind a prompt of %d and will get at "
            "most %d: %s.",
            req.rid,
            asked,
            prompt,
            req.sampling_params.max_new_tokens,
            limit,
        )


def validate_beam_hook(
    original: Callable[..., str | None], coordinator: Any, *args: Any, **kwargs: Any
) -> str | None:
    """AROUND ``BeamCoordinator.validate_and_init``: a beam's member rows have no
    request of their own to name as their owner, so beam requests are refused."""
    if isinstance(coordinator.tree_cache, TieredRadixCache):
        return (
            "Beam search is not supported with --radix-cache-backend tiered; send "
            "the request without beam_width."
        )
    return original(coordinator, *args, **kwargs)
