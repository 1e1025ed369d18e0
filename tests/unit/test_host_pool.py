from pathlib import Path

import pytest
import torch

from sglang_tiered.memory.host_pool import (
    RESERVE_BYTES,
    HostPool,
    cgroup_free_bytes,
    check_host_budget,
    free_host_bytes,
)
from sglang_tiered.memory.layout import PoolLayout, RowBuffer

KEY_VALUE = (
    RowBuffer("k", (3, 20), torch.float32),
    RowBuffer("v", (3, 16), torch.float16),
)
LATENT = (RowBuffer("latent", (576,), torch.bfloat16),)
GIB = 1 << 30


def make_layout(
    buffers: tuple[RowBuffer, ...], page_size: int = 1, host_pages: int = 37
) -> PoolLayout:
    return PoolLayout(page_size, 8, 4, host_pages, (buffers,) * 3)


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("buffers", [KEY_VALUE, LATENT], ids=["k-v", "latent"])
def test_the_pool_has_exactly_the_size_asked_for(
    buffers: tuple[RowBuffer, ...], page_size: int
) -> None:
    """sglang#7666, sglang#37285: no rounding up to a power of two."""
    layout = make_layout(buffers, page_size)
    pool = HostPool(layout)
    held = sum(
        pool.pages(layer, buffer.name).untyped_storage().nbytes()
        for layer in range(3)
        for buffer in buffers
    )
    assert held == pool.nbytes == 37 * page_size * layout.bytes_per_token


def test_each_layer_and_buffer_has_pages_of_its_own() -> None:
    pool = HostPool(make_layout(KEY_VALUE, page_size=16))
    pool.pages(1, "k").fill_(1)
    touched = [
        (layer, name)
        for layer in range(3)
        for name in ("k", "v")
        if pool.pages(layer, name).any()
    ]
    assert touched == [(1, "k")]


def test_pages_are_contiguous_rows_of_one_buffer() -> None:
    rows = HostPool(make_layout(LATENT, page_size=16)).pages(2, "latent")
    assert rows.shape == (37, 16 * 576)
    assert rows.dtype == torch.bfloat16
    assert rows.is_contiguous()


def test_every_call_returns_the_same_tensor() -> None:
    pool = HostPool(make_layout(LATENT))
    assert pool.pages(0, "latent") is pool.pages(0, "latent")


def test_a_pool_larger_than_memory_is_refused_at_construction() -> None:
    """sglang#14282."""
    with pytest.raises(MemoryError, match="--tiered-host-gb"):
        HostPool(make_layout(LATENT, host_pages=1 << 40))


def test_the_pools_of_all_ranks_must_fit_together() -> None:
    """sglang#14282: four pools of 10 GiB do not fit in 39, though each does."""
    check_host_budget(10 * GIB, 3, 39 * GIB)
    with pytest.raises(MemoryError):
        check_host_budget(10 * GIB, 4, 39 * GIB)


def test_the_refusal_names_flag_asked_and_free() -> None:
    with pytest.raises(
        MemoryError,
        match=r"--tiered-host-gb: 2 rank\(s\) x 10.000 GiB = 20.000 GiB of host memory "
        r"asked, 12.000 GiB free .*lower --tiered-host-gb",
    ):
        check_host_budget(10 * GIB, 2, 12 * GIB)


def test_a_reserve_is_kept_back() -> None:
    check_host_budget(GIB, 1, GIB + RESERVE_BYTES)
    with pytest.raises(MemoryError):
        check_host_budget(GIB, 1, GIB + RESERVE_BYTES - 1)


def test_this_machine_has_memory() -> None:
    assert free_host_bytes() > 0


def limit_v2(folder: Path, most: str, used: int, idle_cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {idle_cache}\n")


def test_a_cgroup_limit_counts_idle_page_cache_as_free(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/pod/box\n")
    limit_v2(tmp_path / "fs/pod/box", "1000", 700, 100)
    assert cgroup_free_bytes(membership, tmp_path / "fs") == 400


def test_the_tightest_limit_of_the_parents_counts(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/pod/box\n")
    limit_v2(tmp_path / "fs/pod/box", "max", 700, 0)
    limit_v2(tmp_path / "fs/pod", "900", 800, 0)
    limit_v2(tmp_path / "fs", "5000", 800, 0)
    assert cgroup_free_bytes(membership, tmp_path / "fs") == 100


def test_a_first_generation_cgroup_counts(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("5:cpu,cpuacct:/box\n4:memory:/box\n")
    folder = tmp_path / "fs/memory/box"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("1000\n")
    (folder / "memory.usage_in_bytes").write_text("600\n")
    (folder / "memory.stat").write_text("cache 9\ninactive_file 50\n")
    assert cgroup_free_bytes(membership, tmp_path / "fs") == 450


def test_a_use_over_the_limit_leaves_nothing(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/\n")
    limit_v2(tmp_path / "fs", "1000", 1200, 0)
    assert cgroup_free_bytes(membership, tmp_path / "fs") == 0


def test_no_limit_is_none(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/box\n")
    limit_v2(tmp_path / "fs/box", "max", 700, 0)
    assert cgroup_free_bytes(membership, tmp_path / "fs") is None


def test_a_system_without_cgroups_has_no_limit(tmp_path: Path) -> None:
    assert cgroup_free_bytes(tmp_path / "cgroup", tmp_path / "fs") is None
