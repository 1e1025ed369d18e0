"""memory/pinned.py over an emulated driver (`driver.c`): sizes, pieces, life times."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda.emulated import NOTHING_ALIVE, PIECE_BYTES, run_job


@pytest.fixture(scope="module")
def told() -> Any:
    return run_job("host")["host"]


def test_exactly_the_pool_is_locked(told: Any) -> None:
    """sglang#37285: not the next power of two."""
    assert told["built"]["locked bytes"] == told["needed"]


def test_it_is_locked_in_pieces(told: Any) -> None:
    """sglang#7666: one block of many gigabytes could not be registered."""
    each = -(-told["needed"] // told["buffers"] // PIECE_BYTES)
    assert told["built"]["locks"] == told["buffers"] * each > told["buffers"]


def test_it_is_zero_and_has_the_shape_of_a_host_pool(told: Any) -> None:
    assert told["zero"]
    assert told["shape"] == [9000, 256]


def test_a_tensor_keeps_its_memory_locked(told: Any) -> None:
    """LMCache#2017: what is locked is unlocked once, and not too early."""
    assert told["kept"]["locked bytes"] == told["needed"] // told["buffers"]
    assert told["value"] == 3


def test_nothing_stays_locked(told: Any) -> None:
    """LMCache#2017"""
    assert told["released"] == NOTHING_ALIVE


def test_what_cannot_be_locked_is_refused_and_never_used_unlocked() -> None:
    """InferenceX#2146"""
    told = run_job("host_fails", EMULATED_PINNED_BYTES=str(5 * PIECE_BYTES))[
        "host_fails"
    ]
    assert "lower --tiered-host-gb" in told["message"]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in told["message"]
    assert told["alive"] == NOTHING_ALIVE
