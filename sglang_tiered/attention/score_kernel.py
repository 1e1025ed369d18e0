"""Attention scores of a decode batch on CUDA, over the merged page table.

Stock decode kernels return no weights, so they are computed once more from query, keys
and the log-sum-exp of the logits. With l = scale * log2(e) * <q[h], k[row]>,

    weight[h, row] = exp2(l - lse[h]),    lse[h] = log2(sum over rows of exp2(l)),

which is the softmax: FlashInfer's log-sum-exp is of base 2 like this one. The score of
a token grows in every decode step by the mean over the scored layers of the mean over
query heads of its weight (arXiv 2605.09490, as in memory/score_book.py):

    score[id] += sum over layers, heads of weight / (layers * heads);    steps[id] += 1

Weights of the layers add up in a workspace of one number per kv head and packed row,
each written by one program only, in the same order every time; `ScorePass.enter` then
adds the sum over kv heads to the book. Only there two requests can meet at one row: by
default with atomics, whose order, and with it the last bit, may change from run to run
for a row that requests share, and for no other; or, if asked, request after request.

Protocol. The attention backend calls this in a decode forward, on the forward's stream,
where everything is in order: `add_layer` after the layer's window is filled and before
it may be overwritten, `enter` after the last scored layer. Table, lanes and workspaces
stay as they are from the first `add_layer` to `enter`, and a pass serves one forward at
a time. Whoever reads score or steps, or resets an id, waits for
`enter`. All of it can be captured in a graph: nothing allocates or waits, grids depend
on the batch size only, lengths are read on the device. The first call of each kind
compiles, so one comes before a capture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# A group of query heads is padded to the rows of a tensor core tile.
MOST_HEADS_PER_GROUP = 16
HEAD_SIZES = (16, 32, 64, 128, 256)
# Bytes of keys that a program multiplies at a time.
_KEY_TILE_BYTES = 16 << 10
_MOST_SPLITS = 64
_ROWS_PER_BLOCK = 256


@dataclass(frozen=True)
class PackedTable:
    """The rows that each request of a batch attends to, packed one after the other.

    ``indptr``: int32 [b + 1], where each request's rows begin; ``rows``: int32 or int64
    [n], the physical row of each; ``ids``: int64 [n], its virtual token id; ``lanes``:
    bool [b], which requests are scored. All contiguous, and under graphs the same
    memory at every replay, with n the most rows a batch can have.

    The ids of a request are all different. A token that two requests share is at the
    same place in both: what requests share is a prefix.

    Raises ValueError for other shapes or types.
    """

    indptr: torch.Tensor
    rows: torch.Tensor
    ids: torch.Tensor
    lanes: torch.Tensor

    def __post_init__(self) -> None:
        for name, types in _TABLE_TYPES.items():
            tensor = getattr(self, name)
            if tensor.dtype not in types or tensor.ndim != 1:
                raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name} is not contiguous")
        if len(self.indptr) != len(self.lanes) + 1 or len(self.rows) != len(self.ids):
            raise ValueError(
                f"{len(self.indptr)} bounds of {len(self.lanes)} requests, "
                f"{len(self.rows)} rows with {len(self.ids)} ids"
            )

    @property
    def batch(self) -> int:
        return len(self.lanes)


_TABLE_TYPES = {
    "indptr": (torch.int32,),
    "rows": (torch.int32, torch.int64),
    "ids": (torch.int64,),
    "lanes": (torch.bool,),
}


class ScorePass:
    """Scores of batches of at most ``batch`` requests and ``capacity`` packed rows.

    Args:
        heads, kv_heads: of the model on this device; query head h reads kv head
            ``h // (heads / kv_heads)``.
        programs: how many programs a launch is cut into where the batch allows, several
            for each multiprocessor.
        deterministic: enter the scores request by request, without atomics.

    Raises ValueError for heads that do not divide or groups above 16.
    """

    def __init__(
        self,
        *,
        batch: int,
        heads: int,
        kv_heads: int,
        capacity: int,
        device: str | torch.device,
        programs: int = 1024,
        deterministic: bool = False,
    ) -> None:
        if heads % kv_heads or heads // kv_heads > MOST_HEADS_PER_GROUP:
            raise ValueError(
                f"{heads} query heads over {kv_heads} kv heads: needs 1 to "
                f"{MOST_HEADS_PER_GROUP} whole heads for each"
            )
        self.batch, self.capacity = batch, capacity
        self.heads, self.kv_heads = heads, kv_heads
        self.deterministic = deterministic
        self._programs = programs
        self._layers = 0
        self._weights = torch.zeros(kv_heads, capacity, device=device)
        self._lse = torch.zeros(batch, heads, device=device)
        # Splits times requests never pass this: see `_splits`.
        parts = max(batch, programs // kv_heads)
        self._parts = torch.zeros(parts, heads, device=device)

    @property
    def workspaces(self) -> tuple[torch.Tensor, ...]:
        """The device memory that this holds."""
        return self._weights, self._lse, self._parts

    def log_sum_exp(
        self, query: torch.Tensor, keys: torch.Tensor, table: PackedTable, scale: float
    ) -> torch.Tensor:
        """Base-2 log-sum-exp of the logits, for a backend that gives none.

        Arguments as in `add_layer`. Returns float32 [b, heads], valid to the next call:
        -inf for a request without rows, and nothing meaningful where it is not scored.
        """
        self._check(query, keys, table)
        splits = self._splits(table.batch, self.kv_heads)
        lse = self._lse[: table.batch]
        _partial_log_sum_exp[(splits, table.batch, self.kv_heads)](
            query,
            keys,
            table.indptr,
            table.rows,
            table.lanes,
            self._parts,
            len(table.rows),
            scale * math.log2(math.e),
            *query.stride()[:2],
            *keys.stride()[:2],
            **self._shape(keys),
        )
        _merge_log_sum_exp[(table.batch, self.kv_heads)](
            self._parts,
            lse,
            splits,
            HEADS=self.heads,
            GROUP=self.heads // self.kv_heads,
            PADDED=MOST_HEADS_PER_GROUP,
            MOST_SPLITS=_MOST_SPLITS,
            num_warps=4,
        )
        return lse

    def add_layer(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        table: PackedTable,
        scale: float,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Add the weights of one scored layer.

        Args:
            query: [b, heads, d], the decode query of each request.
            keys: [rows, kv heads, d], the layer's whole key buffer, of the same type.
                Only rows in the table of scored requests are read.
            scale: of the logits, usually ``d ** -0.5``.
            lse: float32 [b, heads], contiguous, of base 2, over exactly the rows in
                the table; None to compute it here.

        Raises ValueError for shapes that do not go together, a table larger than the
        pass, or a head size that is not one of HEAD_SIZES.
        """
        self._check(query, keys, table)
        if lse is None:
            lse = self.log_sum_exp(query, keys, table, scale)
        elif lse.shape != query.shape[:2] or not lse.is_contiguous():
            raise ValueError(f"lse {tuple(lse.shape)} of query {tuple(query.shape)}")
        splits = self._splits(table.batch, self.kv_heads)
        _add_weights[(splits, table.batch, self.kv_heads)](
            query,
            keys,
            table.indptr,
            table.rows,
            table.lanes,
            lse,
            self._weights,
            len(table.rows),
            self.capacity,
            scale * math.log2(math.e),
            *query.stride()[:2],
            *keys.stride()[:2],
            **self._shape(keys),
            FIRST=self._layers == 0,
        )
        self._layers += 1

    def enter(
        self, score: torch.Tensor, steps: torch.Tensor, table: PackedTable
    ) -> None:
        """Add the mean over the layers added to ``score`` and one step to ``steps``,
        float32 [ids] each, for every row of every scored request; begin anew.

        Raises RuntimeError if no layer was added.
        """
        if not self._layers:
            raise RuntimeError("scores entered without a layer")
        weight = 1 / (self._layers * self.heads)
        self._layers = 0
        operands = (
            self._weights,
            table.indptr,
            table.ids,
            table.lanes,
            score,
            steps,
            len(table.ids),
            self.capacity,
            weight,
        )
        sizes = {"KV_HEADS": self.kv_heads, "BLOCK": _ROWS_PER_BLOCK, "num_warps": 4}
        if self.deterministic:
            _enter_in_order[(_MOST_SPLITS,)](*operands, table.batch, **sizes)
        else:
            _enter[(self._splits(table.batch, 1), table.batch)](*operands, **sizes)

    def _splits(self, batch: int, kv_heads: int) -> int:
        """Into how many programs the rows of one request are cut."""
        return min(_MOST_SPLITS, max(1, self._programs // (batch * kv_heads)))

    def _shape(self, keys: torch.Tensor) -> dict[str, int]:
        dim = keys.shape[-1]
        return {
            "HEADS": self.heads,
            "GROUP": self.heads // self.kv_heads,
            "PADDED": MOST_HEADS_PER_GROUP,
            "DIM": dim,
            "BLOCK": max(16, _KEY_TILE_BYTES // (dim * keys.itemsize)),
            "num_warps": 4,
            "num_stages": 2,
        }

    def _check(
        self, query: torch.Tensor, keys: torch.Tensor, table: PackedTable
    ) -> None:
        if table.batch > self.batch or len(table.rows) > self.capacity:
            raise ValueError(
                f"{table.batch} requests with {len(table.rows)} rows: this pass has "
                f"room for {self.batch} with {self.capacity}"
            )
        dim = keys.shape[-1]
        if query.shape != (table.batch, self.heads, dim) or keys.shape[1:] != (
            self.kv_heads,
            dim,
        ):
            raise ValueError(
                f"query {tuple(query.shape)}, keys {tuple(keys.shape)} of "
                f"{table.batch} requests, {self.heads} heads over {self.kv_heads}"
            )
        if dim not in HEAD_SIZES:
            raise ValueError(f"head size {dim}: must be one of {HEAD_SIZES}")
        if query.dtype != keys.dtype or query.stride(2) != 1 or keys.stride(2) != 1:
            raise ValueError("query and keys: one type, channels side by side")


@triton.jit
def _bounds(
    indptr: tl.tensor, request: tl.tensor, size: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Where a request's packed rows begin, and how many they are."""
    begin = tl.load(indptr + request)
    # Bounds that do not fit the table are a bug elsewhere: not one to write memory by.
    return begin, tl.minimum(tl.load(indptr + request + 1), size) - begin


@triton.jit
def _query_of(
    query: tl.tensor,
    request: tl.tensor,
    head: tl.tensor,
    real: tl.tensor,
    stride: tl.tensor,
    head_stride: tl.tensor,
    DIM: tl.constexpr,
) -> tl.tensor:
    """[group, DIM]: the query heads ``head`` of a request; 0 where not ``real``."""
    heads = head[:, None] * head_stride + tl.arange(0, DIM)[None, :]
    at = query + request.to(tl.int64) * stride + heads
    return tl.load(at, mask=real[:, None], other=0.0)


@triton.jit
def _logits(
    q: tl.tensor,
    key: tl.tensor,
    rows: tl.tensor,
    there: tl.tensor,
    stride: tl.tensor,
    DIM: tl.constexpr,
) -> tl.tensor:
    """[group, block]: unscaled, with the keys of one kv head at ``rows``; 0 where not
    ``there``."""
    # int64: a row times the stride of a row passes 2^31.
    row = tl.load(rows, mask=there, other=0).to(tl.int64)
    at = key + row[None, :] * stride + tl.arange(0, DIM)[:, None]
    k = tl.load(at, mask=there[None, :], other=0.0)
    return tl.dot(q, k, input_precision="ieee")


@triton.jit
def _over_kv_heads(
    weights: tl.tensor,
    there: tl.tensor,
    capacity: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """[block]: the sum of the kv heads' weights, which lie ``capacity`` apart."""
    total = tl.zeros([BLOCK], tl.float32)
    for kv_head in range(KV_HEADS):
        at = weights + tl.cast(kv_head, tl.int64) * capacity
        total += tl.load(at, mask=there, other=0.0)
    return total


@triton.jit(do_not_specialize=("size",))
def _add_weights(
    query: tl.tensor,
    keys: tl.tensor,
    indptr: tl.tensor,
    rows: tl.tensor,
    lanes: tl.tensor,
    lse: tl.tensor,
    weights: tl.tensor,
    size: tl.tensor,
    capacity: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
) -> None:
    """weights[kv head, packed row] (+)= sum over the group of exp2(l - lse).

    A program takes every ``num_programs(0)``-th block of one request's rows.
    """
    split, request, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, length = _bounds(indptr, request, size)
    if (tl.load(lanes + request) == 0) | (split * BLOCK >= length):
        return
    group = tl.arange(0, PADDED)
    real = group < GROUP
    head = kv_head * GROUP + group
    q = _query_of(query, request, head, real, query_stride, query_head_stride, DIM)
    base = tl.load(lse + request * HEADS + head, mask=real, other=0.0)
    for block in range(split, tl.cdiv(length, BLOCK), tl.num_programs(0)):
        place = block * BLOCK + tl.arange(0, BLOCK)
        there = place < length
        key = keys + kv_head * key_head_stride
        logits = _logits(q, key, rows + begin + place, there, key_stride, DIM) * scale
        weight = tl.where(real[:, None], tl.exp2(logits - base[:, None]), 0.0)
        total = tl.sum(weight, 0)
        at = weights + kv_head.to(tl.int64) * capacity + begin + place
        if not FIRST:
            total += tl.load(at, mask=there, other=0.0)
        tl.store(at, total, mask=there)


@triton.jit(do_not_specialize=("size",))
def _partial_log_sum_exp(
    query: tl.tensor,
    keys: tl.tensor,
    indptr: tl.tensor,
    rows: tl.tensor,
    lanes: tl.tensor,
    parts: tl.tensor,
    size: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """parts[split, request, head] = log2(sum over the split's rows of exp2(l)), -inf
    for a split without rows. Programs as in `_add_weights`."""
    split, request, kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(lanes + request) == 0:
        return
    begin, length = _bounds(indptr, request, size)
    group = tl.arange(0, PADDED)
    real = group < GROUP
    head = kv_head * GROUP + group
    q = _query_of(query, request, head, real, query_stride, query_head_stride, DIM)
    top = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    for block in range(split, tl.cdiv(length, BLOCK), tl.num_programs(0)):
        place = block * BLOCK + tl.arange(0, BLOCK)
        there = place < length
        key = keys + kv_head * key_head_stride
        logits = _logits(q, key, rows + begin + place, there, key_stride, DIM) * scale
        logits = tl.where(there[None, :], logits, float("-inf"))
        # Finite: every block has a row.
        higher = tl.maximum(top, tl.max(logits, 1))
        new = tl.sum(tl.exp2(logits - higher[:, None]), 1)
        total = total * tl.exp2(top - higher) + new
        top = higher
    at = (split * tl.num_programs(1) + request) * HEADS + head
    tl.store(parts + at, top + tl.log2(total), mask=real)


@triton.jit(do_not_specialize=("splits",))
def _merge_log_sum_exp(
    parts: tl.tensor,
    lse: tl.tensor,
    splits: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
) -> None:
    """lse[request, head] of the splits' parts: -inf if all of them are."""
    request, kv_head = tl.program_id(0), tl.program_id(1)
    group, split = tl.arange(0, PADDED), tl.arange(0, MOST_SPLITS)
    real = group < GROUP
    head = kv_head * GROUP + group
    at = (split[:, None] * tl.num_programs(0) + request) * HEADS + head[None, :]
    mask = (split < splits)[:, None] & real[None, :]
    part = tl.load(parts + at, mask=mask, other=float("-inf"))
    top = tl.max(part, 0)
    # Where nothing is there, -inf - -inf would be NaN.
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(part - top[None, :]), 0)
    tl.store(lse + request * HEADS + head, top + tl.log2(total), mask=real)


@triton.jit(do_not_specialize=("size",))
def _enter(
    weights: tl.tensor,
    indptr: tl.tensor,
    ids: tl.tensor,
    lanes: tl.tensor,
    score: tl.tensor,
    steps: tl.tensor,
    size: tl.tensor,
    capacity: tl.tensor,
    weight: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """score[id] += weight * sum over kv heads; steps[id] += 1; with atomics."""
    request = tl.program_id(1)
    if tl.load(lanes + request) == 0:
        return
    begin, length = _bounds(indptr, request, size)
    for block in range(tl.program_id(0), tl.cdiv(length, BLOCK), tl.num_programs(0)):
        place = block * BLOCK + tl.arange(0, BLOCK)
        there = place < length
        at = weights + begin + place
        total = _over_kv_heads(at, there, capacity, KV_HEADS, BLOCK)
        token = tl.load(ids + begin + place, mask=there, other=0)
        one = tl.full([BLOCK], 1.0, tl.float32)
        tl.atomic_add(score + token, total * weight, mask=there, sem="relaxed")
        tl.atomic_add(steps + token, one, mask=there, sem="relaxed")


@triton.jit(do_not_specialize=("size", "batch"))
def _enter_in_order(
    weights: tl.tensor,
    indptr: tl.tensor,
    ids: tl.tensor,
    lanes: tl.tensor,
    score: tl.tensor,
    steps: tl.tensor,
    size: tl.tensor,
    capacity: tl.tensor,
    weight: tl.tensor,
    batch: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The same without atomics. A program has the same places of all requests, one
    after the other: nobody else has a token that they share."""
    for request in range(batch):
        begin, length = _bounds(indptr, request, size)
        length = tl.where(tl.load(lanes + request) != 0, length, 0)
        for block in range(
            tl.program_id(0), tl.cdiv(length, BLOCK), tl.num_programs(0)
        ):
            place = block * BLOCK + tl.arange(0, BLOCK)
            there = place < length
            at = weights + begin + place
            total = _over_kv_heads(at, there, capacity, KV_HEADS, BLOCK)
            token = tl.load(ids + begin + place, mask=there, other=0)
            before = tl.load(score + token, mask=there, other=0.0)
            tl.store(score + token, before + total * weight, mask=there)
            count = tl.load(steps + token, mask=there, other=0.0)
            tl.store(steps + token, count + 1.0, mask=there)
        # The next request reads what other threads of this program may have written.
        tl.debug_barrier()
