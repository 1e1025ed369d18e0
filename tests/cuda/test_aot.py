"""Every kernel compiles for the devices it is meant for, the way it was meant."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from sglang_tiered.attention.score_kernel import PackedTable, ScorePass
from sglang_tiered.transfer.gather import PageBuffers, PagePlan, copy_pages
from tests.cuda.aot import SHARED_MEMORY, Compiled, compiled

CAPABILITIES = (80, 90, 100)
# Page bytes: one row of 8 and of 4 heads of 128 channels in two bytes, one latent row,
# a page of 16 rows, and one of a size that no load of 16 bytes divides.
PAGES = (2048, 1024, 1152, 16384, 30)
WIDE_PAGES = PAGES[:-1]
# Group, head size and type of the keys.
MODELS = (
    (7, 128, torch.bfloat16),
    (1, 64, torch.bfloat16),
    (16, 256, torch.bfloat16),
    (8, 128, torch.float32),
)
# Of the 65536 of a multiprocessor a block of gathering has at most a quarter, one of
# scoring at most an eighth.
MOST_GATHER_REGISTERS = 64
MOST_SCORE_REGISTERS = 64

every_device = pytest.mark.parametrize("capability", CAPABILITIES)
every_page = pytest.mark.parametrize("page_bytes", PAGES)
every_model = pytest.mark.parametrize(
    ("group", "dim", "dtype"),
    MODELS,
    ids=[f"{group}-{dim}-{str(dtype)[6:]}" for group, dim, dtype in MODELS],
)


@functools.cache
def gather(page_bytes: int, capability: int) -> Compiled:
    pages = torch.zeros(4, page_bytes, dtype=torch.uint8)
    buffers = PageBuffers([pages, pages], [pages.clone(), pages.clone()], "cpu")
    plan = PagePlan(4, "cpu")
    (kernel,) = compiled(lambda: copy_pages(buffers, plan), capability)
    return kernel


@functools.cache
def score(
    group: int, dim: int, dtype: torch.dtype, capability: int
) -> tuple[Compiled, ...]:
    """All of the score pass: both layer kinds, the LSE of its own, both ways to end."""
    batch, kv_heads, rows = 3, 2, 64
    query = torch.zeros(batch, kv_heads * group, dim, dtype=dtype)
    keys = torch.zeros(rows, kv_heads, dim, dtype=dtype)
    table = PackedTable(
        torch.zeros(batch + 1, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int64),
        torch.ones(batch, dtype=torch.bool),
    )
    books = torch.zeros(rows), torch.zeros(rows)

    def launch() -> None:
        for deterministic in (False, True):
            scores = ScorePass(
                batch=batch,
                heads=kv_heads * group,
                kv_heads=kv_heads,
                capacity=rows,
                device="cpu",
                deterministic=deterministic,
            )
            scores.add_layer(query, keys, table, dim**-0.5)
            scores.add_layer(query, keys, table, dim**-0.5)
            scores.enter(*books, table)

    return tuple(
        {kernel.ptx: kernel for kernel in compiled(launch, capability)}.values()
    )


@every_device
@every_page
def test_gather_compiles_for_the_device(page_bytes: int, capability: int) -> None:
    assert f".target sm_{capability}" in gather(page_bytes, capability).ptx


@every_device
@pytest.mark.parametrize("page_bytes", WIDE_PAGES)
def test_gather_loads_rows_sixteen_bytes_at_a_time(
    page_bytes: int, capability: int
) -> None:
    """The rest of its loads are the table and the plan, words of eight bytes."""
    loads = gather(page_bytes, capability).accesses("ld")
    rows = [bits for bits in loads if bits > 64]
    assert rows
    assert set(rows) == {128}


@every_device
@pytest.mark.parametrize("page_bytes", WIDE_PAGES)
def test_gather_stores_rows_sixteen_bytes_at_a_time(
    page_bytes: int, capability: int
) -> None:
    assert set(gather(page_bytes, capability).accesses("st")) == {128}


@every_device
@pytest.mark.parametrize("page_bytes", WIDE_PAGES)
def test_gather_has_four_wide_loads_in_flight(page_bytes: int, capability: int) -> None:
    """In the machine code: as many before the first store of a row."""
    code = gather(page_bytes, capability).sass
    before, _, _ = code.partition("STG.E")
    assert len(re.findall(r"LDG\.E\.128", before)) == 4


@every_device
@every_page
def test_gather_keeps_everything_in_registers(page_bytes: int, capability: int) -> None:
    kernel = gather(page_bytes, capability)
    assert (kernel.stack, kernel.local) == (0, 0)
    assert not re.search(r"\b(LDL|STL)\b", kernel.sass)


@every_device
@every_page
def test_gather_uses_few_registers(page_bytes: int, capability: int) -> None:
    assert gather(page_bytes, capability).registers <= MOST_GATHER_REGISTERS


@every_device
@every_model
def test_the_score_pass_compiles_for_the_device(
    group: int, dim: int, dtype: torch.dtype, capability: int
) -> None:
    kernels = score(group, dim, dtype, capability)
    assert len(kernels) == 6
    assert all(f".target sm_{capability}" in kernel.ptx for kernel in kernels)


@every_device
@every_model
def test_the_score_pass_keeps_everything_in_registers(
    group: int, dim: int, dtype: torch.dtype, capability: int
) -> None:
    for kernel in score(group, dim, dtype, capability):
        assert (kernel.stack, kernel.local) == (0, 0), kernel.name
        assert not re.search(r"\b(LDL|STL)\b", kernel.sass), kernel.name


@every_device
@every_model
def test_the_score_pass_uses_few_registers(
    group: int, dim: int, dtype: torch.dtype, capability: int
) -> None:
    for kernel in score(group, dim, dtype, capability):
        assert kernel.registers <= MOST_SCORE_REGISTERS, kernel.name


@every_device
@every_model
def test_three_blocks_of_the_score_pass_fit_in_shared_memory(
    group: int, dim: int, dtype: torch.dtype, capability: int
) -> None:
    for kernel in score(group, dim, dtype, capability):
        assert 3 * kernel.shared <= SHARED_MEMORY[capability], kernel.name


@every_device
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_scores_multiply_on_tensor_cores(dim: int, capability: int) -> None:
    model = {64: MODELS[1], 128: MODELS[0], 256: MODELS[2]}[dim]
    kernels = score(*model, capability)
    multiplying = [kernel for kernel in kernels if "HMMA" in kernel.sass]
    assert len(multiplying) == 3


@every_device
def test_only_the_default_ending_adds_with_atomics(capability: int) -> None:
    kernels = score(*MODELS[0], capability)
    adding = {kernel.name for kernel in kernels if "atom" in kernel.ptx}
    assert adding == {"_enter"}
