"""Copying scattered pages with a kernel: what a captured decode graph fills its windows
with, and how demotion and promotion gather pages into long runs for the DMA engine.

A copy is `target[target_pages[i]] = source[source_pages[i]]` for every buffer of a
layer (or of all layers) in one launch. Pages are opaque bytes. Either side may be
page-locked host memory, which the kernel reads and writes over the link:

* fill: host pool -> window rows, one launch per layer, on the fill stream;
* demotion: T0 rows -> staging, and promotion: staging -> T0 rows, one launch for all
  layers, on the schedule stream, before and after the DMA.

Protocol. The transfer engine calls this and owns every wait; nothing here waits:

* `copy_pages` launches on the current stream. Before it may run: what wrote its sources
  has ended (for host pages the D2H that filled them), whoever reads or writes its
  targets has ended (for a window the attention of the layer of its parity before it),
  and so has the `PagePlan.write` of its plan.
* Whoever reads the targets waits for the end of the kernel. Windows are aliased: a
  layer's window is written through that layer's own tensors, and read through them.
* `PagePlan.write` also goes to the current stream. It overwrites the plan in place, so
  every launch that reads the plan has ended before it; and its staging memory belongs
  to it until the copy that it issues has ended.
* In a graph the launch is captured, with its buffers and its plan; each replay copies
  what the plan holds by then. The first launch compiles, so one comes before a capture.
* It is never the reader in a programmatic dependent launch: it loads its plan at once.

Host memory must be page-locked and have the same address on the device as on the host
(`cudaHostRegister` under unified addressing): the kernel sees plain addresses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sglang_tiered.transfer.row_copy import Pages

# A program moves this many words at a time: 16 KiB of 8-byte words, four loads of 16
# bytes in flight per thread.
_TILE_WORDS = 2048
_NUM_WARPS = 8
# Few, so that a fill leaves the multiprocessors to the layer that computes beside it.
# 16 tiles in flight are 256 KiB; a link of 64 GB/s carries 64 KiB in the microsecond
# that a read takes.
PROGRAMS = 16
# The widest load of a thread, in bytes.
_WIDEST = 16
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


class PageBuffers:
    """The buffers of a copy: pages of ``sources[i]`` go to pages of ``targets[i]``.

    Args:
        sources, targets: contiguous tensors [pages, ...], equally many, with pages of
            equally many bytes in pairs. Their types do not matter.
        device: where the kernel runs.

    Keeps the tensors alive. Raises ValueError for tensors that are not such pairs.
    """

    def __init__(
        self,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        device: str | torch.device,
    ) -> None:
        if not sources or len(sources) != len(targets):
            raise ValueError(f"{len(sources)} source, {len(targets)} target buffers")
        self._tensors = (*sources, *targets)
        if not all(tensor.is_contiguous() for tensor in self._tensors):
            raise ValueError("the buffers of a copy must be contiguous")
        page_bytes = [_page_bytes(source) for source in sources]
        if page_bytes != [_page_bytes(target) for target in targets]:
            raise ValueError("source and target pages differ in size")
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        # What divides every address that a row of words can begin at.
        align = math.gcd(_WIDEST, *addresses, *page_bytes)
        self.word_bytes = min(align, max(_WORDS))
        self.vector = align // self.word_bytes
        self.count = len(sources)
        words = [size // self.word_bytes for size in page_bytes]
        self.columns = _columns(max(words))
        self.chunks = triton.cdiv(max(words), self.columns)
        # Per buffer: source address, target address, words of a page.
        self.table = torch.tensor(
            list(
                zip(
                    addresses[: self.count],
                    addresses[self.count :],
                    words,
                    strict=True,
                )
            ),
            dtype=torch.int64,
            device=device,
        )


class PagePlan:
    """Which pages a copy moves, in device memory that is never reallocated.

    ``table``: int64 [1 + capacity, 2]. Row 0 begins with the count; row 1 + i holds
    source page i and target page i, and rows past the count mean nothing. A new plan
    copies nothing.
    """

    def __init__(self, capacity: int, device: str | torch.device) -> None:
        self.capacity = capacity
        self.table = torch.zeros(1 + capacity, 2, dtype=torch.int64, device=device)

    def new_staging(self) -> torch.Tensor:
        """Host memory for `write`, int64 [1 + capacity, 2], page-locked if the plan is
        on a CUDA device."""
        pinned = self.table.device.type == "cuda"
        return torch.zeros(self.table.shape, dtype=torch.int64, pin_memory=pinned)

    def write(
        self, source_pages: Pages, target_pages: Pages, staging: torch.Tensor
    ) -> None:
        """Plan `target[target_pages[i]] = source[source_pages[i]]`, int64 [n] each, by
        one asynchronous copy from ``staging``.

        The pages are those of the buffers and the targets all different: the caller has
        checked. Raises ValueError unless they are equally many, at most the capacity.
        """
        count = len(target_pages)
        if source_pages.shape != target_pages.shape or source_pages.ndim != 1:
            raise ValueError(
                f"source pages {source_pages.shape}, target pages {target_pages.shape}"
            )
        if count > self.capacity:
            raise ValueError(f"{count} pages in a plan of at most {self.capacity}")
        staged = staging[: 1 + count]
        rows = staged.numpy()
        rows[0] = count, 0
        rows[1:, 0], rows[1:, 1] = source_pages, target_pages
        self.table[: 1 + count].copy_(staged, non_blocking=True)


def copy_pages(buffers: PageBuffers, plan: PagePlan, programs: int = PROGRAMS) -> None:
    """Launch the copy that ``plan`` holds when it runs, for all ``buffers``.

    Never reads past the plan or beyond its capacity, whatever the count in it says.
    """
    _copy_pages[(programs,)](
        buffers.table,
        plan.table,
        plan.capacity,
        buffers.count,
        WORD=_WORDS[buffers.word_bytes],
        WORD_BYTES=buffers.word_bytes,
        VECTOR=buffers.vector,
        CHUNKS=buffers.chunks,
        ROWS=_TILE_WORDS // buffers.columns,
        COLUMNS=buffers.columns,
        num_warps=_NUM_WARPS,
    )


@triton.jit(do_not_specialize=("capacity", "buffers"))
def _copy_pages(
    table: tl.tensor,
    plan: tl.tensor,
    capacity: tl.tensor,
    buffers: tl.tensor,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    VECTOR: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Programs stride over tiles of ROWS pages x COLUMNS words, chunk by chunk of a
    page. Addresses and page sizes are multiples of VECTOR words."""
    count = tl.maximum(tl.minimum(tl.load(plan), capacity), 0).to(tl.int32)
    tiles = tl.cdiv(count, ROWS) * CHUNKS
    for tile in range(tl.program_id(0), tiles * buffers, tl.num_programs(0)):
        entry = table + tile // tiles * 3
        source = tl.load(entry).to(tl.pointer_type(WORD))
        target = tl.load(entry + 1).to(tl.pointer_type(WORD))
        words = tl.load(entry + 2)
        # Without these the compiler must load word by word.
        source = tl.multiple_of(source, WORD_BYTES * VECTOR)
        target = tl.multiple_of(target, WORD_BYTES * VECTOR)
        words = tl.multiple_of(words, VECTOR)
        row = tile % tiles // CHUNKS * ROWS + tl.arange(0, ROWS)
        planned = row < count
        pair = plan + 2 + 2 * row.to(tl.int64)
        # int64: a page number times the words of a page passes 2^31.
        source_page = tl.load(pair, mask=planned, other=0)
        target_page = tl.load(pair + 1, mask=planned, other=0)
        column = tile % CHUNKS * COLUMNS + tl.arange(0, COLUMNS)
        mask = planned[:, None] & (column < words)[None, :]
        # Read once: past the first cache.
        data = tl.load(
            source + source_page[:, None] * words + column[None, :],
            mask=mask,
            other=0,
            cache_modifier=".cg",
        )
        tl.store(
            target + target_page[:, None] * words + column[None, :], data, mask=mask
        )


def _page_bytes(pages: torch.Tensor) -> int:
    return math.prod(pages.shape[1:]) * pages.itemsize


def _columns(words: int) -> int:
    """Words of a tile's row: as much of a page as leaves few threads without work."""
    columns = min(triton.next_power_of_2(words), _TILE_WORDS)
    while columns > 16 and 8 * triton.cdiv(words, columns) * columns > 9 * words:
        columns //= 2
    return columns
