import pytest
import torch

from sglang_tiered.memory import int8_pool
from sglang_tiered.memory.host_pool import RESERVE_BYTES
from sglang_tiered.memory.int8_pool import Int8Pool, int8_bytes_per_token
from sglang_tiered.memory.int8_rows import KeyRows, ValueRows
from sglang_tiered.memory.layout import PoolLayout, RowBuffer

KEY_VALUE = (
    RowBuffer("k", (3, 20), torch.float32),
    RowBuffer("v", (3, 16), torch.float16),
)
LATENT = (RowBuffer("latent", (576,), torch.bfloat16),)


def make_layout(buffers: tuple[RowBuffer, ...], page_size: int = 1) -> PoolLayout:
    return PoolLayout(page_size, 8, 4, 16, (buffers,) * 3)


def pages(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def random_pages(layout: PoolLayout, name: str, n: int) -> torch.Tensor:
    buffer = layout.row_buffer(0, name)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(n, layout.page_size * buffer.row_width, generator=generator)
    return rows.to(buffer.dtype)


def test_bytes_per_token_by_hand() -> None:
    """Keys: 60 codes, 8 bytes of ninth bits, 3 scales, 6 values and channels apart.
    Values: 48 codes and 3 scales."""
    key, value = 60 + 8 + 3 * 4 + 6 * 5, 48 + 3 * 4
    # 16 channels are one group of 16, 20 channels one group of 20.
    assert int8_bytes_per_token(make_layout(KEY_VALUE).layers) == 3 * (key + value)


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("buffers", [KEY_VALUE, LATENT], ids=["k-v", "latent"])
def test_the_pool_has_exactly_the_size_asked_for(
    buffers: tuple[RowBuffer, ...], page_size: int
) -> None:
    layout = make_layout(buffers, page_size)
    pool = Int8Pool(layout, 37)
    held = sum(
        pool.records(layer, buffer.name).untyped_storage().nbytes()
        for layer in range(3)
        for buffer in buffers
    )
    assert held == pool.nbytes == 37 * page_size * int8_bytes_per_token(layout.layers)
    assert pool.count == 37


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_page_comes_back_as_its_codec_rounds_it(page_size: int) -> None:
    layout = make_layout(KEY_VALUE, page_size)
    pool = Int8Pool(layout, 9)
    for name, dim in (("k", 20), ("v", 16)):
        rows = random_pages(layout, name, 3)
        pool.write(1, name, pages(7, 0, 4), rows)
        back = pool.read(1, name, pages(4, 7, 0, 4))
        codec = pool.codec(1, name)
        tokens = rows.view(-1, 3, dim)
        expected = codec.dequantise(codec.quantise(tokens)).view_as(rows)
        assert torch.equal(back, expected[[2, 0, 1, 2]])
        assert back.dtype == layout.row_buffer(1, name).dtype
        torch.testing.assert_close(back, rows[[2, 0, 1, 2]], atol=0.02, rtol=0)


def test_a_row_is_rounded_the_same_in_any_page_and_company() -> None:
    layout = make_layout(KEY_VALUE, page_size=2)
    together, alone = Int8Pool(layout, 8), Int8Pool(layout, 8)
    rows = random_pages(layout, "k", 8)
    together.write(0, "k", torch.arange(8), rows)
    for i in range(8):
        alone.write(0, "k", pages(7 - i), rows[i : i + 1])
    assert torch.equal(together.records(0, "k"), alone.records(0, "k").flip(0))


def test_a_write_touches_only_its_pages() -> None:
    layout = make_layout(KEY_VALUE, page_size=2)
    pool = Int8Pool(layout, 5)
    pool.write(1, "k", pages(3), random_pages(layout, "k", 1))
    touched = [
        (layer, name, page)
        for layer in range(3)
        for name in ("k", "v")
        for page in range(5)
        if pool.records(layer, name)[page].any()
    ]
    assert touched == [(1, "k", 3)]


# -- codes and scales are one record


LOUDNESS = torch.tensor([[1e3], [1e-3]])


def loud_and_quiet(layout: PoolLayout, name: str) -> torch.Tensor:
    """Two pages: with the scale of the other, neither would be recognised."""
    rows = random_pages(layout, name, 2).float() * LOUDNESS
    return rows.to(layout.row_buffer(0, name).dtype)


@pytest.mark.parametrize("name", ["k", "v"])
def test_sglang_35888_a_row_moves_with_its_scales(name: str) -> None:
    """sglang#35888: a pool's scales were left behind by an offload. Here the bytes of a
    page are all there is of it."""
    layout = make_layout(KEY_VALUE, page_size=4)
    pool, other = Int8Pool(layout, 2), Int8Pool(layout, 2)
    rows = loud_and_quiet(layout, name)
    pool.write(0, name, pages(0, 1), rows)
    other.records(0, name)[pages(1, 0)] = pool.records(0, name)
    moved = other.read(0, name, pages(1, 0))
    assert torch.equal(moved, pool.read(0, name, pages(0, 1)))
    close = torch.testing.assert_close
    close(moved / LOUDNESS, rows / LOUDNESS, atol=0.02, rtol=0)


@pytest.mark.parametrize("name", ["k", "v"])
def test_sglang_35888_a_token_of_a_page_is_sliced_with_its_scales(name: str) -> None:
    """sglang#35888."""
    layout = make_layout(KEY_VALUE, page_size=4)
    pool = Int8Pool(layout, 2)
    pool.write(0, name, pages(0, 1), loud_and_quiet(layout, name))
    codec = pool.codec(0, name)
    whole = pool.read(0, name, pages(0, 1)).view(8, codec.heads, codec.dim)
    records = pool.records(0, name).view(8, codec.record_bytes)
    for token in range(8):
        alone = codec.dequantise(records[token : token + 1])
        assert torch.equal(alone, whole[token : token + 1])


@pytest.mark.parametrize("name", ["k", "v"])
def test_sglang_35888_a_page_that_is_used_again_keeps_no_scale(name: str) -> None:
    """sglang#35888."""
    layout = make_layout(KEY_VALUE, page_size=4)
    used, fresh = Int8Pool(layout, 1), Int8Pool(layout, 1)
    loud, quiet = loud_and_quiet(layout, name).split(1)
    used.write(0, name, pages(0), loud)
    for pool in (used, fresh):
        pool.write(0, name, pages(0), quiet)
    assert torch.equal(used.records(0, name), fresh.records(0, name))


def test_pages_never_written_are_zero() -> None:
    pool = Int8Pool(make_layout(LATENT, page_size=4), 2)
    assert not pool.read(0, "latent", pages(0, 1)).any()


def test_no_pages_may_be_written_and_read() -> None:
    layout = make_layout(KEY_VALUE, page_size=2)
    pool = Int8Pool(layout, 2)
    pool.write(0, "k", pages(), random_pages(layout, "k", 0))
    assert pool.read(0, "k", pages()).shape == (0, 120)


def test_keys_and_values_have_codecs_of_their_own() -> None:
    pool = Int8Pool(make_layout(KEY_VALUE), 1)
    assert isinstance(pool.codec(2, "k"), KeyRows)
    assert isinstance(pool.codec(2, "v"), ValueRows)


def test_a_latent_row_is_one_head() -> None:
    codec = Int8Pool(make_layout(LATENT), 1).codec(0, "latent")
    assert (codec.heads, codec.dim, codec.group) == (1, 576, 32)


@pytest.mark.parametrize("page", [2, 99])
def test_a_page_that_is_not_there_is_refused(page: int) -> None:
    layout = make_layout(LATENT)
    pool = Int8Pool(layout, 2)
    with pytest.raises(IndexError):
        pool.read(0, "latent", pages(page))
    with pytest.raises(IndexError):
        pool.write(0, "latent", pages(page), random_pages(layout, "latent", 1))


def test_every_call_returns_the_same_tensor() -> None:
    pool = Int8Pool(make_layout(LATENT), 1)
    assert pool.records(0, "latent") is pool.records(0, "latent")


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="int8_pages must be at least 1, got 0"):
        Int8Pool(make_layout(LATENT), 0)


def test_a_pool_larger_than_memory_is_refused_at_construction() -> None:
    with pytest.raises(MemoryError, match="--tiered-int8-gb"):
        Int8Pool(make_layout(LATENT), 1 << 40)


def test_the_refusal_names_flag_asked_and_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_pool, "free_host_bytes", lambda: RESERVE_BYTES)
    with pytest.raises(
        MemoryError,
        match=r"--tiered-int8-gb: 0\.000 GiB of host memory asked, 0\.250 GiB free "
        r"\(0\.250 GiB of it kept back\): lower --tiered-int8-gb",
    ):
        Int8Pool(make_layout(LATENT), 1)
