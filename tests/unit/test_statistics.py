"""Statistics of rows against float64 references, wherever the rows are."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from sglang_tiered.memory.backing import MemfdBacking
from sglang_tiered.memory.host_pool import HostPool
from sglang_tiered.memory.layout import PoolLayout, RowBuffer
from sglang_tiered.memory.places import Places
from sglang_tiered.transfer import statistics
from sglang_tiered.transfer.statistics import RowStatistics, key_redundancy

LAYERS = 3
HEADS, DIM = 2, 8
PAGES = 24  # in each of T0, the host pool and the quantised host pool

Array = np.ndarray


class Int8Stub:
    """The read side of a quantised host pool, exact: rows by (layer, buffer name)."""

    def __init__(self, rows: dict[tuple[int, str], torch.Tensor]) -> None:
        self._rows = rows

    def read(self, layer: int, name: str, pages: torch.Tensor) -> torch.Tensor:
        return self._rows[layer, name][pages]


class Pools:
    """Three tiers full of different rows."""

    def __init__(self, page_size: int, dtype: torch.dtype) -> None:
        layer = tuple(RowBuffer(name, (HEADS, DIM), dtype) for name in ("k", "v"))
        self.layout = PoolLayout(page_size, PAGES, 4, PAGES, (layer,) * LAYERS)
        self.backing = MemfdBacking(self.layout)
        self.host = HostPool(self.layout)
        generator = torch.Generator().manual_seed(page_size)
        self.int8: dict[tuple[int, str], torch.Tensor] = {}
        for index in range(LAYERS):
            for buffer in layer:
                key = (index, buffer.name)
                host = self.host.pages(*key)
                self.int8[key] = torch.empty_like(host)
                for rows in (self.backing.pages(*key), host, self.int8[key]):
                    rows.copy_(torch.randn(rows.shape, generator=generator))
        self.statistics = RowStatistics(self.backing, self.host, Int8Stub(self.int8))

    def rows(self, places: Places, layer: int, name: str) -> Array:
        """float64 [n * page_size, heads, dim]: what the statistics should read."""
        pages = [
            self.backing.pages(layer, name)[t0]
            if t0 >= 0
            else self.host.pages(layer, name)[host]
            if host >= 0
            else self.int8[layer, name][int8]
            for t0, host, int8 in zip(places.t0, places.host, places.int8, strict=True)
        ]
        return torch.stack(pages).double().view(-1, HEADS, DIM).numpy()


@pytest.fixture(params=[(1, torch.float32), (16, torch.float32), (16, torch.bfloat16)])
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    pools = Pools(*request.param)
    yield pools
    pools.backing.close()


def places(t0: list[int], host: list[int], int8: list[int]) -> Places:
    return Places(*(np.array(pages, dtype=np.int64) for pages in (t0, host, int8)))


# Clean rows are in two tiers; T0 comes first.
SPREAD = places(
    [-1, 5, 3, -1, -1, 20, -1, 1],
    [7, 2, -1, -1, 0, -1, -1, 3],
    [-1, -1, -1, 9, 4, -1, 0, 3],
)


def reference_redundancy(keys: Array) -> Array:
    """R-KV's redundancy of keys [n, d], pair by pair in float64."""
    unit = keys / (np.linalg.norm(keys, axis=1, keepdims=True) + 1e-8)
    similarity = unit @ unit.T
    np.fill_diagonal(similarity, 0)
    for row in similarity:
        similar = np.flatnonzero(row > 0.5)
        if len(similar):
            row[similar[-1]] = 0
    mean = similarity.mean(axis=0)
    weights = np.exp(mean - mean.max())
    return weights / weights.sum()


def test_value_norms_equal_the_reference(pools: Pools) -> None:
    layers = [
        np.linalg.norm(pools.rows(SPREAD, layer, "v"), axis=-1)
        .reshape(len(SPREAD), -1)
        .mean(axis=1)
        for layer in range(LAYERS)
    ]
    norms = pools.statistics.value_norms(SPREAD)
    assert norms.dtype == np.float32
    np.testing.assert_allclose(norms, np.mean(layers, axis=0), rtol=1e-6)


def test_redundancy_equals_the_reference(pools: Pools) -> None:
    heads = [
        reference_redundancy(pools.rows(SPREAD, layer, "k")[:, head])
        for layer in range(LAYERS)
        for head in range(HEADS)
    ]
    redundancy = pools.statistics.redundancy(SPREAD)
    expected = np.mean(heads, axis=0).reshape(len(SPREAD), -1).mean(axis=1)
    assert redundancy.dtype == np.float32
    np.testing.assert_allclose(redundancy, expected, rtol=1e-5)


def test_a_nan_is_not_hidden(pools: Pools) -> None:
    for name in ("k", "v"):
        pools.backing.pages(1, name)[5, 0] = torch.nan
    norms = pools.statistics.value_norms(SPREAD)
    assert np.flatnonzero(np.isnan(norms)).tolist() == [1]
    assert np.isnan(pools.statistics.redundancy(SPREAD)).any()


def test_no_pages_have_no_statistics(pools: Pools) -> None:
    nothing = places([], [], [])
    assert pools.statistics.value_norms(nothing).tolist() == []
    assert pools.statistics.redundancy(nothing).tolist() == []


def test_a_page_without_rows_is_refused(pools: Pools) -> None:
    nowhere = places([2, -1], [-1, -1], [-1, -1])
    with pytest.raises(ValueError, match="rows in no tier"):
        pools.statistics.value_norms(nowhere)


def test_a_quantised_page_without_such_a_pool_is_refused(pools: Pools) -> None:
    plain = RowStatistics(pools.backing, pools.host)
    with pytest.raises(ValueError, match="rows in no tier"):
        plain.redundancy(SPREAD)
    t0_and_host = places([2, -1], [-1, 4], [-1, -1])
    assert np.array_equal(
        plain.value_norms(t0_and_host), pools.statistics.value_norms(t0_and_host)
    )


def near_duplicates(count: int) -> torch.Tensor:
    """``count`` keys in a dozen groups of almost parallel ones."""
    generator = torch.Generator().manual_seed(count)
    centres = torch.randn(12, 32, generator=generator)
    group = torch.randint(12, (count,), generator=generator)
    return centres[group] + 0.1 * torch.randn(count, 32, generator=generator)


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 700])
@pytest.mark.parametrize("duplicates", [False, True])
def test_any_number_of_keys_is_compared(count: int, duplicates: bool) -> None:
    if duplicates:
        keys = near_duplicates(count)
    else:
        keys = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
    np.testing.assert_allclose(
        key_redundancy(keys).numpy(),
        reference_redundancy(keys.double().numpy()),
        rtol=1e-5,
    )


def test_the_newest_of_a_group_of_duplicates_is_the_least_redundant() -> None:
    keys = torch.zeros(5, 4)
    keys[[0, 2, 4], 0] = 1
    keys[1, 1] = keys[3, 2] = 1
    redundancy = key_redundancy(keys)
    assert redundancy[0] > redundancy[2] > redundancy[4]
    assert redundancy[4] == redundancy[1] == redundancy[3]


def test_redundancy_is_a_share() -> None:
    assert float(key_redundancy(near_duplicates(300)).sum()) == pytest.approx(1)


def test_opposite_keys_are_not_redundant() -> None:
    keys = torch.tensor([[1.0, 0], [-1, 0], [1, 0], [1, 0]])
    assert key_redundancy(keys).argmin() == 1


def test_a_zero_key_is_like_no_other() -> None:
    keys = torch.tensor([[0.0, 0], [1, 0], [1, 0]])
    assert torch.isfinite(key_redundancy(keys)).all()


def test_pairs_are_never_stored_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.randn(600, 8, generator=torch.Generator().manual_seed(1))
    whole = key_redundancy(keys)
    monkeypatch.setattr(statistics, "_BLOCK", 7)
    torch.testing.assert_close(key_redundancy(keys), whole, rtol=1e-6, atol=0)
