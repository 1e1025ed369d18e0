"""Int8 rows: what a record holds, how far a row is off, and what must never leak."""

import math

import pytest
import torch

from sglang_tiered.memory.int8_rows import Int8Rows, KeyRows, ValueRows, codec_for
from sglang_tiered.memory.layout import RowBuffer

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((3, 64), (1, 256), (2, 80), (3, 20), (2, 5), (2, 1), (1, 320))
CODECS = [
    codec_for(RowBuffer(name, shape, dtype))
    for name in ("k", "v")
    for shape in SHAPES
    for dtype in FLOATS
]


def name_of(codec: Int8Rows) -> str:
    kind = type(codec).__name__
    return f"{kind}-{codec.heads}x{codec.dim}-{str(codec.dtype).partition('.')[2]}"


every_codec = pytest.mark.parametrize("codec", CODECS, ids=name_of)


def random_rows(codec: Int8Rows, n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, codec.heads, codec.dim, generator=generator)
    # Tokens and channels of different magnitude, like real ones.
    rows *= torch.rand(n, 1, 1, generator=generator) * 10
    return (rows * (1 + torch.arange(codec.dim) % 7)).to(codec.dtype)


def round_trip(codec: Int8Rows, rows: torch.Tensor) -> torch.Tensor:
    return codec.dequantise(codec.quantise(rows))


def as_bytes(rows: torch.Tensor) -> list[int]:
    return rows.contiguous().view(torch.uint8).flatten().tolist()


def floats(part: torch.Tensor) -> list[list[float]]:
    packed = part.clone(memory_format=torch.contiguous_format)
    return packed.view(torch.float32).tolist()


# -- by hand -------------------------------------------------------------------------


def test_a_value_is_a_code_times_the_scale_of_its_group() -> None:
    codec = ValueRows(1, 4, torch.float32, group=2)
    rows = torch.tensor([[[127.0, -3.4, 0.0, -254.0]]])
    record = codec.quantise(rows)
    assert record[:, :4].view(torch.int8).tolist() == [[127, -3, 0, -127]]
    assert floats(record[:, 4:]) == [[1.0, 2.0]]
    assert codec.dequantise(record).tolist() == [[[127.0, -3.0, 0.0, -254.0]]]


def test_a_key_has_nine_bits_and_its_two_largest_apart() -> None:
    codec = KeyRows(1, 8, torch.float32, group=4)
    rows = torch.tensor([[[255.0, -3.4, 2e9, 2.0, -510.0, 6.0, 0.0, -1e6]]])
    record = codec.quantise(rows)
    codes, ninth, scales, values, channels = record.split([8, 1, 8, 8, 2], 1)
    # A code is twice the int8 code plus its ninth bit.
    assert codes.view(torch.int8).tolist() == [[127, -2, 0, 1, -128, 1, 0, 0]]
    assert ninth.tolist() == [[0b00110011]]
    assert floats(scales) == [[1.0, 2.0]]
    assert floats(values) == [[2e9, -1e6]]
    assert channels.tolist() == [[2, 7]]
    expected = [[[255.0, -3.0, 2e9, 2.0, -510.0, 6.0, 0.0, -1e6]]]
    assert codec.dequantise(record).tolist() == expected


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "size"),
    [
        ("v", (3, 64), torch.bfloat16, 3 * (64 + 2 * 4)),
        ("v", (512,), torch.bfloat16, 512 + 16 * 4),
        ("k", (3, 64), torch.bfloat16, 3 * (64 + 8 + 2 * 4 + 2 * 3)),
        ("k", (3, 64), torch.float32, 3 * (64 + 8 + 2 * 4 + 2 * 5)),
        # 9 bits of 15 elements take 15 + 2 bytes; 320 channels need a wider number.
        ("k", (3, 5), torch.float16, 15 + 2 + 3 * (4 + 2 * 3)),
        ("k", (1, 320), torch.float16, 320 + 40 + 10 * 4 + 2 * 6),
    ],
)
def test_bytes_of_a_record(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, size: int
) -> None:
    assert codec_for(RowBuffer(name, shape, dtype)).record_bytes == size


@pytest.mark.parametrize(
    ("dim", "group"), [(64, 32), (96, 32), (80, 16), (72, 8), (20, 20), (1, 1)]
)
def test_groups_divide_a_head(dim: int, group: int) -> None:
    assert codec_for(RowBuffer("k", (2, dim), torch.float32)).group == group


def test_a_group_that_does_not_divide_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="groups of 3 do not divide 8 channels"):
        ValueRows(1, 8, torch.float32, group=3)


def test_only_k_is_rounded_as_keys() -> None:
    kinds = [
        type(codec_for(RowBuffer(name, (2, 8), torch.float32)))
        for name in ("k", "v", "latent")
    ]
    assert kinds == [KeyRows, ValueRows, ValueRows]


# -- every codec ---------------------------------------------------------------------


@every_codec
def test_shapes_and_types(codec: Int8Rows) -> None:
    for n in (0, 1, 7):
        rows = random_rows(codec, n)
        records = codec.quantise(rows)
        assert records.shape == (n, codec.record_bytes)
        assert records.dtype == torch.uint8
        back = codec.dequantise(records)
        assert back.shape == rows.shape
        assert back.dtype == codec.dtype


@every_codec
def test_an_element_is_off_by_at_most_half_a_step(codec: Int8Rows) -> None:
    rows = random_rows(codec, 200).double()
    back = round_trip(codec, rows.to(codec.dtype)).double()
    rest = rows.clone()
    largest = 127
    if isinstance(codec, KeyRows):
        largest = 255
        order = rows.abs().sort(stable=True, descending=True).indices
        apart = order[..., :2]
        assert torch.equal(back.gather(-1, apart), rows.gather(-1, apart))
        rest.scatter_(-1, apart, 0.0)
    groups = rest.view(200, codec.heads, -1, codec.group)
    step = groups.abs().amax(-1, keepdim=True) / largest
    off = (back - rows).view_as(groups).abs()
    # What the buffer's type cannot hold comes on top.
    rounding = back.view_as(groups).abs() * torch.finfo(codec.dtype).eps
    assert torch.all(off <= step * (0.5 + 1e-4) + rounding)


@every_codec
def test_a_record_depends_on_its_own_row_only(codec: Int8Rows) -> None:
    """Bit for bit: alone, among others, in another order and not contiguous."""
    rows = random_rows(codec, 67)
    records = codec.quantise(rows)
    back = codec.dequantise(records)
    for i in (0, 1, 33, 66):
        assert torch.equal(codec.quantise(rows[i : i + 1])[0], records[i])
        assert as_bytes(codec.dequantise(records[i : i + 1])[0]) == as_bytes(back[i])
    order = torch.randperm(67, generator=torch.Generator().manual_seed(1))
    assert torch.equal(codec.quantise(rows[order]), records[order])
    turned = rows.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(codec.quantise(turned), records)
    wide = torch.zeros(67, codec.record_bytes + 3, dtype=torch.uint8)
    wide[:, 3:] = records
    assert as_bytes(codec.dequantise(wide[:, 3:])) == as_bytes(back)


@every_codec
def test_equal_elements_have_one_record(codec: Int8Rows) -> None:
    rows = torch.ones(33, codec.heads, codec.dim, dtype=codec.dtype)
    records = codec.quantise(rows)
    assert torch.equal(records, records[:1].expand_as(records))
    torch.testing.assert_close(codec.dequantise(records), rows)


@every_codec
def test_infinilm_553_zero_rows_are_exact(codec: Int8Rows) -> None:
    """InfiniLM#553, llm-compressor#937: no scale is no reason for NaN."""
    rows = random_rows(codec, 3)
    rows[1] = 0
    rows[2, 0] = 0
    back = round_trip(codec, rows)
    assert as_bytes(back[1]) == as_bytes(torch.zeros_like(rows[1]))
    assert not back[2, 0].any()
    assert bool(back.isfinite().all())


@every_codec
@pytest.mark.parametrize("element", [0.0, math.nan, math.inf])
def test_infinilm_553_a_code_is_a_number_without_a_scale_too(
    codec: Int8Rows, element: float
) -> None:
    """InfiniLM#553, llm-compressor#937: what int8 makes of a NaN is not defined; that
    x86 makes it 0 must not be what zero rows rest on."""
    rows = torch.full((2, codec.heads, codec.dim), element, dtype=codec.dtype)
    codes, _ = codec._round(rows, 127)
    assert not codes.any()


@every_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_llm_compressor_937_what_is_not_finite_stays_so_and_there(
    codec: Int8Rows, bad: float
) -> None:
    """InfiniLM#553, llm-compressor#937: one bad element, or a whole bad head."""
    rows = random_rows(codec, 5)
    clean = round_trip(codec, rows)
    rows[1, -1, codec.dim // 2] = bad
    rows[3, 0] = bad
    back = round_trip(codec, rows)
    assert not back[1, -1, codec.dim // 2].isfinite()
    assert not back[3, 0].isfinite().any()
    touched = torch.zeros(5, codec.heads, dtype=torch.bool)
    touched[1, -1] = touched[3, 0] = True
    assert as_bytes(back[~touched]) == as_bytes(clean[~touched])


@every_codec
def test_infinilm_553_scales_come_from_the_data(codec: Int8Rows) -> None:
    """InfiniLM#553, llm-compressor#937: rows of any magnitude are as exact."""
    rows = random_rows(codec, 20)
    for factor in (2.0**-9, 2.0**8):
        scaled = (rows * factor).to(codec.dtype)
        back = round_trip(codec, scaled).double()
        off = (back - scaled.double()).norm() / scaled.double().norm()
        assert off < 0.02


@every_codec
def test_the_largest_and_smallest_numbers_of_the_type(codec: Int8Rows) -> None:
    most = torch.finfo(codec.dtype).max
    rows = random_rows(codec, 2).clamp(-1, 1)
    rows[0, 0, 0] = most if codec.dtype == torch.float16 else most / 2
    rows[1] = torch.finfo(codec.dtype).smallest_normal
    back = round_trip(codec, rows)
    assert bool(back.isfinite().all())
    torch.testing.assert_close(back[1], rows[1], atol=1e-7, rtol=0.01)


# -- attention -----------------------------------------------------------------------


def output(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attention of one head, float64; queries, keys and values are [n, 64]."""
    logits = queries.double() @ keys.double().T / 8
    return logits.softmax(-1) @ values.double()


@pytest.mark.parametrize("channels", [(5,), (37,), (5, 37)], ids=str)
@pytest.mark.parametrize("same_attention", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_verl_4435_vllm_10411_outlier_key_channels_are_survived(
    channels: tuple[int, ...], same_attention: bool, dtype: torch.dtype
) -> None:
    """verl#4435, vllm#10411: the Qwen2.5 family has key channels a hundred times the
    rest. Two of them, 32 apart, are what RoPE makes of one in a head of 64."""
    codec = codec_for(RowBuffer("k", (1, 64), dtype))
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = torch.randn(3, 256, 64, generator=generator)
    factor = torch.ones(64)
    factor[list(channels)] = 100
    keys = (keys * factor).to(dtype)
    if same_attention:
        queries = queries / factor
    exact = output(queries, keys, values)
    rounded = output(queries, round_trip(codec, keys[:, None])[:, 0], values)
    assert (rounded - exact).norm() / exact.norm() < 1e-2


def test_verl_4435_vllm_10411_the_outlier_test_would_notice() -> None:
    """verl#4435, vllm#10411: a scale per token and head is far off."""
    codec = ValueRows(1, 64, torch.float32, group=64)
    queries, keys, values = torch.randn(
        3, 256, 64, generator=torch.Generator().manual_seed(0)
    )
    keys[:, 5] *= 100
    queries[:, 5] /= 100
    exact = output(queries, keys, values)
    rounded = output(queries, round_trip(codec, keys[:, None])[:, 0], values)
    assert (rounded - exact).norm() / exact.norm() > 0.1
