"""memory/vmm.py over an emulated driver (`driver.c`): mappings, sizes, life times."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cuda.emulated import NOTHING_ALIVE, run_job

GRANULARITY = 2 << 20


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return run_job("kv", "pages", "latent")


@pytest.fixture(params=["kv", "pages", "latent"])
def case(told: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    return told[request.param]


def test_the_layers_of_one_parity_share_their_window(case: Any) -> None:
    layers = range(len(case["aliases"]))
    assert case["aliases"] == [
        [other for other in layers if other % 2 == layer % 2] for layer in layers
    ]


def test_every_layer_has_a_t0_of_its_own(case: Any) -> None:
    assert case["own_t0"] == [layer + 1 for layer in range(len(case["own_t0"]))]


def test_new_memory_is_zero(case: Any) -> None:
    assert case["zero"]


def test_t0_and_window_are_one_contiguous_tensor(case: Any) -> None:
    assert case["contiguous"]


def test_the_window_begins_on_the_granularity(case: Any) -> None:
    assert case["window_offset"] % GRANULARITY == 0


def test_device_bytes_are_t0_and_two_windows(case: Any) -> None:
    """T0 with what lies before the window, and the end of each window, rounded."""
    assert case["mapped"] == case["built"]["bytes"]
    windows = 2 * case["buffers"]
    rounding = windows * GRANULARITY
    assert case["needed"] <= case["mapped"] <= case["needed"] + rounding


def test_a_tensor_keeps_its_memory_beyond_the_pool(case: Any) -> None:
    assert case["closed"]["ranges"] == 1
    assert case["kept"] == 1


def test_nothing_is_left_when_the_last_tensor_is_gone(case: Any) -> None:
    assert case["released"] == NOTHING_ALIVE


def test_too_little_memory_names_the_flags_and_leaves_nothing() -> None:
    told = run_job("fails", EMULATED_VMM_BYTES=str(20 << 20))["fails"]
    assert told["error"] == "MemoryError"
    assert "lower --max-total-tokens" in told["message"]
    assert told["alive"] == NOTHING_ALIVE


def test_a_device_without_the_feature_is_told_apart() -> None:
    told = run_job("fails", EMULATED_VMM="0")["fails"]
    assert told["error"] == "OSError"
    assert "no virtual memory management" in told["message"]
