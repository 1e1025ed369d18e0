"""What kernel tests rest on: bfloat16 to the last bit, and a guard that sees faults."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.cuda.interpreter import Guard, KernelFault, shuffled_programs

pytestmark = pytest.mark.interpreted

ROWS, WIDTH, BLOCK = 12, 40, 32


@triton.jit
def _round(source: Any, target: Any, SIZE: tl.constexpr) -> None:
    lane = tl.arange(0, SIZE)
    tl.store(target + lane, tl.load(source + lane).to(target.dtype.element_ty))


@triton.jit
def _calculate(
    left: Any, right: Any, target: Any, OP: tl.constexpr, SIZE: tl.constexpr
) -> None:
    lane = tl.arange(0, SIZE)
    x, y = tl.load(left + lane), tl.load(right + lane)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    else:
        z = tl.where(x < y, x, y)
    tl.store(target + lane, z)


@triton.jit
def _multiply(left: Any, right: Any, target: Any, SIZE: tl.constexpr) -> None:
    lane = tl.arange(0, SIZE)
    at = lane[:, None] * SIZE + lane[None, :]
    tl.store(target + at, tl.dot(tl.load(left + at), tl.load(right + at)))


@triton.jit
def _add_up(source: Any, target: Any, SIZE: tl.constexpr) -> None:
    tl.store(target, tl.sum(tl.load(source + tl.arange(0, SIZE)), 0))


@triton.jit
def _gather(
    source: Any,
    index: Any,
    target: Any,
    width: Any,
    source_stride: Any,
    target_stride: Any,
    BLOCK: tl.constexpr,
) -> None:
    """One program per (row, block of columns)."""
    row = tl.program_id(0)
    page = tl.load(index + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    data = tl.load(source + page * source_stride + column, mask=mask, other=0.0)
    tl.store(target + row * target_stride + column, data, mask=mask)


@triton.jit
def _scatter(source: Any, index: Any, target: Any, SIZE: tl.constexpr) -> None:
    """All rows of one element in one store."""
    lane = tl.arange(0, SIZE)
    tl.store(target + tl.load(index + lane), tl.load(source + lane))


@triton.jit
def _shift(data: Any, distance: Any) -> None:
    """A program moves one element."""
    program = tl.program_id(0)
    tl.store(data + program + distance, tl.load(data + program))


@triton.jit
def _count(total: Any, ATOMIC: tl.constexpr, AND_STORE: tl.constexpr) -> None:
    if ATOMIC:
        tl.atomic_add(total, 1.0)
    else:
        tl.store(total, tl.load(total) + 1.0)
    if AND_STORE and tl.program_id(0) == 1:
        tl.store(total, 0.0)


@triton.jit
def _store_repeatedly(target: Any, times: Any) -> None:
    for turn in range(times):
        tl.store(target, turn)


def numbers(seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = 1024
    spread = torch.randint(-20, 20, (size,), generator=generator)
    return (torch.randn(size, generator=generator) * 2.0**spread).to(dtype)


def hard_to_round() -> torch.Tensor:
    """float32: ties to even both ways, their neighbours, the ends of the range."""
    ties = (torch.arange(512) << 15) + 0x3F800000
    bits = torch.cat([ties - 1, ties, ties + 1]).to(torch.int32)
    ends = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.4e38, 1e-40])
    return torch.cat([bits.view(torch.float32), ends, torch.zeros(506)])


def gathered(
    guard: Guard,
    source: torch.Tensor,
    index: torch.Tensor,
    target: torch.Tensor,
    *,
    grid: tuple[int, int] = (ROWS, 2),
    target_stride: int = WIDTH,
) -> None:
    with guard:
        _gather[grid](source, index, target, WIDTH, WIDTH, target_stride, BLOCK=BLOCK)


class Rows:
    """A gather that is all right, as in most tests here but for one thing."""

    def __init__(self) -> None:
        self.source = torch.randn(20, WIDTH)
        self.index = torch.randperm(20)[:ROWS]
        self.target = torch.zeros(ROWS, WIDTH)

    def guard(self) -> Guard:
        return Guard([self.source, self.index], [self.target])


def test_float32_is_rounded_to_the_nearest_bfloat16() -> None:
    source = hard_to_round()
    target = torch.zeros(len(source), dtype=torch.bfloat16)
    _round[(1,)](source, target, SIZE=len(source))
    assert torch.equal(target, source.bfloat16())


def test_nan_stays_nan_in_bfloat16() -> None:
    target = torch.zeros(4, dtype=torch.bfloat16)
    _round[(1,)](torch.full((4,), torch.nan), target, SIZE=4)
    assert target.isnan().all()


def test_bfloat16_is_widened_exactly() -> None:
    source = numbers(0)
    target = torch.zeros(len(source))
    _round[(1,)](source, target, SIZE=len(source))
    assert torch.equal(target, source.float())


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_bfloat16_arithmetic_is_correctly_rounded(name: str) -> None:
    left, right = numbers(1), numbers(2)
    target = torch.zeros_like(left)
    _calculate[(1,)](left, right, target, OP=name, SIZE=len(left))
    exact: Callable[..., torch.Tensor] = getattr(operator, name)
    assert torch.equal(target, exact(left.double(), right.double()).bfloat16())


def test_bfloat16_numbers_compare_as_numbers() -> None:
    left, right = numbers(1), numbers(2)
    target = torch.zeros_like(left)
    _calculate[(1,)](left, right, target, OP="lower", SIZE=len(left))
    assert torch.equal(target, torch.minimum(left, right))


def test_a_product_of_bfloat16_matrices_is_that_of_their_values() -> None:
    left, right = (numbers(seed).view(32, 32) for seed in (1, 2))
    target = torch.zeros(32, 32)
    _multiply[(1,)](left, right, target, SIZE=32)
    exact = left.double() @ right.double()
    size = left.double().abs() @ right.double().abs()
    assert ((target - exact).abs() <= 32 * 2.0**-24 * size).all()


def test_what_is_not_exact_in_bfloat16_is_refused() -> None:
    with pytest.raises(InterpreterError, match="go by float32"):
        _add_up[(1,)](numbers(0), torch.zeros(1, dtype=torch.bfloat16), SIZE=1024)


def test_the_guard_lets_a_right_kernel_run() -> None:
    rows = Rows()
    gathered(rows.guard(), rows.source, rows.index, rows.target)
    assert torch.equal(rows.target, rows.source[rows.index])


def test_an_index_out_of_range_is_reported() -> None:
    rows = Rows()
    rows.index[3] = len(rows.source)
    with pytest.raises(KernelFault, match=r"load by program .* out of bounds"):
        gathered(rows.guard(), rows.source, rows.index, rows.target)


def test_a_negative_index_is_reported() -> None:
    rows = Rows()
    rows.index[3] = -1
    with pytest.raises(KernelFault, match="out of bounds"):
        gathered(rows.guard(), rows.source, rows.index, rows.target)


def test_one_program_too_many_is_reported() -> None:
    rows = Rows()
    with pytest.raises(KernelFault, match="out of bounds"):
        gathered(rows.guard(), rows.source, rows.index, rows.target, grid=(ROWS + 1, 2))


def test_what_lies_behind_a_view_is_out_of_bounds() -> None:
    rows = Rows()
    behind = torch.zeros(ROWS + 1, WIDTH)
    index = torch.cat([rows.index, rows.index[:1]])
    guard = Guard([rows.source, index], [behind[:ROWS]])
    with pytest.raises(KernelFault, match=r"store by program .* out of bounds"):
        gathered(guard, rows.source, index, behind, grid=(ROWS + 1, 2))


def test_overlapping_rows_are_reported() -> None:
    rows = Rows()
    with pytest.raises(KernelFault, match=r"race: store .* another has stored"):
        gathered(
            rows.guard(), rows.source, rows.index, rows.target, target_stride=WIDTH - 8
        )


def test_overlapping_rows_go_unseen_without_the_guard() -> None:
    rows = Rows()
    _gather[(ROWS, 2)](
        rows.source, rows.index, rows.target, WIDTH, WIDTH, WIDTH - 8, BLOCK=BLOCK
    )


def test_duplicate_targets_are_reported() -> None:
    source, target = torch.randn(8), torch.zeros(8)
    index = torch.tensor([0, 1, 2, 3, 4, 5, 6, 3])
    with (
        pytest.raises(KernelFault, match="two lanes store one byte"),
        Guard([source, index], [target]),
    ):
        _scatter[(1,)](source, index, target, SIZE=8)


def test_a_store_to_an_input_is_reported() -> None:
    rows = Rows()
    guard = Guard([rows.source, rows.index, rows.target])
    with pytest.raises(KernelFault, match="stores to an input"):
        gathered(guard, rows.source, rows.index, rows.target)


@pytest.mark.parametrize("distance", [1, -1])
def test_reading_what_another_program_writes_is_reported(distance: int) -> None:
    """Whichever of the two the interpreter happens to run first."""
    data = torch.zeros(8)
    with pytest.raises(KernelFault, match="race"), Guard(outputs=[data]):
        _shift[(6,)](data[1:], distance)


def test_adding_without_atomics_is_reported() -> None:
    total = torch.zeros(1)
    with pytest.raises(KernelFault, match="race"), Guard(outputs=[total]):
        _count[(2,)](total, ATOMIC=False, AND_STORE=False)


def test_adding_with_atomics_is_fine() -> None:
    total = torch.zeros(1)
    with Guard(outputs=[total]):
        _count[(3,)](total, ATOMIC=True, AND_STORE=False)
    assert total.item() == 3


def test_a_store_among_atomics_is_reported() -> None:
    total = torch.zeros(1)
    with (
        pytest.raises(KernelFault, match="another has added to"),
        Guard(outputs=[total]),
    ):
        _count[(2,)](total, ATOMIC=True, AND_STORE=True)


def test_a_second_store_of_one_program_is_reported() -> None:
    target = torch.zeros(1, dtype=torch.int32)
    with (
        pytest.raises(KernelFault, match="stores a byte twice"),
        Guard(outputs=[target]),
    ):
        _store_repeatedly[(1,)](target, 2)


def test_a_second_store_of_one_program_can_be_meant() -> None:
    target = torch.zeros(1, dtype=torch.int32)
    with Guard(outputs=[target], rewrites=True):
        _store_repeatedly[(1,)](target, 2)
    assert target.item() == 1


def test_programs_of_two_launches_do_not_race() -> None:
    total = torch.zeros(1)
    with Guard(outputs=[total]):
        _count[(1,)](total, ATOMIC=False, AND_STORE=False)
        _count[(1,)](total, ATOMIC=False, AND_STORE=False)
    assert total.item() == 2


def test_a_guard_ends_with_its_block() -> None:
    rows = Rows()
    with Guard():
        pass
    _gather[(ROWS, 2)](
        rows.source, rows.index, rows.target, WIDTH, WIDTH, WIDTH, BLOCK=BLOCK
    )
    assert torch.equal(rows.target, rows.source[rows.index])


def test_shuffled_programs_all_run() -> None:
    rows = Rows()
    with shuffled_programs(0), rows.guard():
        _gather[(ROWS, 2)](
            rows.source, rows.index, rows.target, WIDTH, WIDTH, WIDTH, BLOCK=BLOCK
        )
    assert torch.equal(rows.target, rows.source[rows.index])


def test_shuffled_programs_run_in_another_order() -> None:
    """In the usual one every program passes the first element on."""
    plain, shuffled = torch.arange(8.0), torch.arange(8.0)
    _shift[(7,)](plain, 1)
    with shuffled_programs(0):
        _shift[(7,)](shuffled, 1)
    assert not torch.equal(plain, shuffled)
