"""Triton's interpreter, made exact for bfloat16 and watched.

As it is, the interpreter computes with the bits of bfloat16 numbers as if they were
integers, cuts float32 off instead of rounding it, checks no address, and runs programs
one after the other, so that a race looks like a success.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

NOBODY, SEVERAL = -1, -2


def widen(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits, uint16, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bfloat16, ties to even: uint16 bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def is_bfloat16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


@functools.cache
def make_bfloat16_exact() -> None:
    """Compute with bfloat16 as a device does, or refuse; for the whole process.

    A float32 result of two bfloat16 numbers that is rounded once more is the correctly
    rounded result: float32 has more than twice the digits.
    """
    builder: Any = InterpreterBuilder

    def compute(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
        """With the operation, a numpy function, as the last argument."""

        def operate(self: Any, *operands: Any) -> TensorHandle:
            *handles, operation = operands
            if operation is np.where or not any(map(is_bfloat16, handles)):
                return original(self, *operands)
            result = operation(*(_float32(handle) for handle in handles))
            if result.dtype == bool:
                return TensorHandle(result, tl.int1)
            return TensorHandle(narrow(result), tl.bfloat16)

        return operate

    def cast(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
        def convert(self: Any, source: TensorHandle, target: Any) -> TensorHandle:
            pair = source.dtype.scalar, target.scalar
            if pair == (tl.float32, tl.bfloat16):
                return TensorHandle(narrow(source.data), tl.bfloat16)
            if pair == (tl.bfloat16, tl.float32):
                return TensorHandle(widen(source.data), tl.float32)
            if tl.bfloat16 in pair:
                raise NotImplementedError(f"{pair[0]} to {pair[1]}: go by float32")
            return original(self, source, target)

        return convert

    def dot(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
        def multiply(
            self: Any, left: Any, right: Any, total: Any, *options: Any
        ) -> TensorHandle:
            if is_bfloat16(left):
                left, right = (
                    TensorHandle(widen(side.data), tl.float32) for side in (left, right)
                )
            return original(self, left, right, total, *options)

        return multiply

    def refuse(original: Callable[..., Any]) -> Callable[..., Any]:
        def check(self: Any, *operands: Any) -> Any:
            flat = [
                part
                for operand in operands
                for part in (operand if isinstance(operand, tuple) else (operand,))
            ]
            for operand in flat:
                handle = getattr(operand, "handle", operand)
                if isinstance(handle, TensorHandle) and is_bfloat16(handle):
                    raise NotImplementedError("bfloat16 here: go by float32")
            return original(self, *operands)

        return check

    for name, change in {
        "binary_op": compute,
        "unary_op": compute,
        "ternary_op": compute,
        "cast_impl": cast,
        "create_dot": dot,
        "create_fp_to_fp": refuse,
        "create_fma": refuse,
        "create_rsqrt": refuse,
        "create_erf": refuse,
        "create_dot_scaled": refuse,
        "create_atomic_rmw": refuse,
        "create_atomic_cas": refuse,
    }.items():
        setattr(builder, name, change(getattr(builder, name)))
    for operations in (interpreter.ReduceOps, interpreter.ScanOps):
        operations.apply = refuse(operations.apply)


def _float32(handle: TensorHandle) -> np.ndarray:
    return widen(handle.data) if is_bfloat16(handle) else handle.data


class KernelFault(AssertionError):
    """A kernel did what a device would not forgive."""


class Guard:
    """Launches inside it may touch these tensors only, and no two programs may meet.

    Raises KernelFault, before anything is touched, when a lane lies outside
    ``inputs`` and ``outputs`` or stores to a mere input, when a store has two lanes at
    one byte, and when in one launch a byte is stored twice, or stored by one program
    and loaded or added to by another. A program may store a byte again if ``rewrites``.
    A tensor means its own bytes, not the rest of its memory: what lies behind a view is
    outside.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
        *,
        rewrites: bool = False,
    ) -> None:
        regions = [(*_span(tensor), False) for tensor in inputs if tensor.numel()]
        regions += [(*_span(tensor), True) for tensor in outputs if tensor.numel()]
        merged: list[tuple[int, int, bool]] = []
        for start, end, writable in sorted(regions):
            if merged and start < merged[-1][1]:
                first, last, before = merged.pop()
                start, end, writable = first, max(last, end), before or writable
            merged.append((start, end, writable))
        self._starts = np.array([start for start, _, _ in merged], np.int64)
        self._ends = np.array([end for _, end, _ in merged], np.int64)
        self._writable = np.array([writable for _, _, writable in merged], bool)
        sizes = self._ends - self._starts
        self._offsets = np.cumsum(sizes) - sizes
        self._size = int(sizes.sum())
        self._rewrites = rewrites

    def __enter__(self) -> Guard:
        builder: Any = InterpreterBuilder
        changes = {
            "set_grid_dim": self._begin,
            "create_masked_load": self._load,
            "create_masked_store": self._store,
            "create_atomic_rmw": self._atomic,
        }
        self._originals = {name: getattr(builder, name) for name in changes}
        for name, check in changes.items():
            setattr(builder, name, _before(check, self._originals[name]))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, original in self._originals.items():
            setattr(InterpreterBuilder, name, original)
        if isinstance(error, InterpreterError) and isinstance(
            error.__cause__, KernelFault
        ):
            raise error.__cause__ from None

    def _begin(self, builder: Any, *grid: int) -> None:
        """Launches are in order: only programs of one meet."""
        self._stored_by = np.full(self._size, NOBODY, np.int32)
        self._loaded_by = np.full(self._size, NOBODY, np.int32)
        self._added_by = np.full(self._size, NOBODY, np.int32)

    def _load(self, builder: Any, pointers: Any, mask: Any, *rest: Any) -> None:
        lanes = self._bytes("load", builder, pointers, mask)
        program = _program(builder)
        for by in (self._stored_by, self._added_by):
            self._alone("load", "stored", builder, by[lanes], program)
        _note(self._loaded_by, lanes, program)

    def _store(
        self, builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> None:
        lanes = self._bytes("store", builder, pointers, mask, writes=True)
        program = _program(builder)
        if len(np.unique(lanes)) != len(lanes):
            raise KernelFault(f"program {builder.grid_idx}: two lanes store one byte")
        if not self._rewrites and (self._stored_by[lanes] == program).any():
            raise KernelFault(f"program {builder.grid_idx} stores a byte twice")
        self._alone("store", "stored", builder, self._stored_by[lanes], program)
        self._alone("store", "loaded", builder, self._loaded_by[lanes], program)
        self._alone("store", "added to", builder, self._added_by[lanes], program)
        self._stored_by[lanes] = program

    def _atomic(
        self,
        builder: Any,
        operation: Any,
        pointers: Any,
        value: Any,
        mask: Any,
        *_: Any,
    ) -> None:
        lanes = self._bytes("atomic", builder, pointers, mask, writes=True)
        program = _program(builder)
        self._alone("atomic", "stored", builder, self._stored_by[lanes], program)
        self._alone("atomic", "loaded", builder, self._loaded_by[lanes], program)
        _note(self._added_by, np.unique(lanes), program)

    def _bytes(
        self, what: str, builder: Any, pointers: Any, mask: Any, writes: bool = False
    ) -> np.ndarray:
        """Which of the watched bytes the lanes touch, int64 [lanes * size]."""
        size = pointers.get_element_ty().primitive_bitwidth // 8
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        chosen = np.broadcast_to(mask.data, shape).astype(bool)
        addresses = np.broadcast_to(pointers.data, shape)[chosen].astype(np.int64)
        region = np.searchsorted(self._starts, addresses, side="right") - 1
        outside = region < 0
        region[outside] = 0
        if len(self._starts):
            outside |= addresses + size > self._ends[region]
        if outside.any():
            raise KernelFault(
                f"{what} by program {builder.grid_idx}: {outside.sum()} of "
                f"{len(addresses)} lanes out of bounds"
            )
        if writes and not self._writable[region].all():
            raise KernelFault(f"program {builder.grid_idx} stores to an input")
        first = self._offsets[region] + addresses - self._starts[region]
        return (first[:, None] + np.arange(size)).reshape(-1)

    def _alone(
        self, what: str, done: str, builder: Any, others: np.ndarray, program: int
    ) -> None:
        race = (others != NOBODY) & (others != program)
        if race.any():
            raise KernelFault(
                f"race: {what} by program {builder.grid_idx} where another has "
                f"{done}, {race.sum()} bytes"
            )


@contextmanager
def shuffled_programs(seed: int) -> Iterator[None]:
    """Launches inside it run their programs in a random order."""
    builder: Any = InterpreterBuilder
    begin, choose = builder.set_grid_dim, builder.set_grid_idx
    generator = np.random.default_rng(seed)
    order: list[tuple[int, int, int]] = []

    def set_grid_dim(self: Any, *grid: int) -> None:
        begin(self, *grid)
        order[:] = [tuple(map(int, index)) for index in np.ndindex(*grid)]
        generator.shuffle(order)

    def set_grid_idx(self: Any, *index: int) -> None:
        choose(self, *order.pop())

    builder.set_grid_dim, builder.set_grid_idx = set_grid_dim, set_grid_idx
    try:
        yield
    finally:
        builder.set_grid_dim, builder.set_grid_idx = begin, choose


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor and the one after its last."""
    last = sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.itemsize


def _before(check: Callable[..., None], original: Callable[..., Any]) -> Any:
    def checked(builder: Any, *args: Any, **kwargs: Any) -> Any:
        check(builder, *args)
        return original(builder, *args, **kwargs)

    return checked


def _program(builder: Any) -> int:
    x, y, z = builder.grid_idx
    wide, high, _ = builder.grid_dim
    return int(x + wide * (y + high * z))


def _note(by: np.ndarray, lanes: np.ndarray, program: int) -> None:
    seen = by[lanes]
    by[lanes] = np.where((seen == NOBODY) | (seen == program), program, SEVERAL)
