"""How a row is rounded to int8: codes and scales of one token in one record.

A code is a multiple of a scale, and every scale is the largest magnitude of the few
elements that share it: no statistics from outside the row. All operations are
elementwise or a maximum, so a record depends on its own row only, bit for bit.

Keys need more care than values. A few channels of a key can be a hundred times the
rest (the Qwen2.5 family), and then a scale fits either them or the others: `KeyRows`
keeps the two largest elements of a head apart. docs/int8.md has the measurements.

Zeros return as exact zeros. A group with a NaN or an infinity returns as NaNs, or with
just that element as it was where it is kept apart; other groups and other rows are
not touched. A magnitude below about 1e-43 may return as 0.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from sglang_tiered.memory.layout import RowBuffer

_SCALE = torch.float32
_LARGEST_INT8 = 127
_LARGEST_INT9 = 255
# Smaller groups round less and need more scales: 4 bytes per group.
_GROUPS = (32, 16, 8)
_KEPT_APART = 2
_BIT_VALUES = torch.tensor([2.0**bit for bit in range(8)], dtype=_SCALE)
# Row i holds the bits of i, lowest first.
_BITS = torch.tensor([[i >> bit & 1 for bit in range(8)] for i in range(256)]).to(
    _SCALE
)


@dataclass(frozen=True)
class Int8Rows(abc.ABC):
    """Rounds rows [n, heads, dim] of `dtype`; `group` channels of a head share a scale.

    Raises ValueError if `group` does not divide `dim`.
    """

    heads: int
    dim: int
    dtype: torch.dtype
    group: int

    def __post_init__(self) -> None:
        if self.group < 1 or self.dim % self.group:
            raise ValueError(
                f"groups of {self.group} do not divide {self.dim} channels"
            )

    @property
    @abc.abstractmethod
    def record_bytes(self) -> int:
        """Bytes of one row's codes and scales."""

    @abc.abstractmethod
    def quantise(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n, heads, dim], any float type, as uint8 [n, record_bytes]."""

    @abc.abstractmethod
    def dequantise(self, records: torch.Tensor) -> torch.Tensor:
        """Records, uint8 [n, record_bytes], as rows [n, heads, dim] of `dtype`."""

    @property
    def _elements(self) -> int:
        return self.heads * self.dim

    @property
    def _scale_bytes(self) -> int:
        return self._elements // self.group * _SCALE.itemsize

    def _round(
        self, rows: torch.Tensor, largest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes -largest .. largest, float32 [n, elements], and scales [n, groups]."""
        groups = rows.reshape(len(rows), self._elements // self.group, self.group)
        groups = groups.to(_SCALE)
        scales = groups.abs().amax(-1) / largest
        # 0/0, x/inf and x/NaN become code 0: times the scale that is 0, NaN and NaN.
        codes = torch.nan_to_num(groups / scales[..., None]).round_()
        codes = codes.clamp_(-largest, largest)
        return codes.reshape(len(rows), self._elements), scales

    def _scale(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """float32 [n, heads, dim] from what `_round` returned; overwrites `codes`."""
        groups = codes.view(len(codes), self._elements // self.group, self.group)
        return groups.mul_(scales[..., None]).view(len(codes), self.heads, self.dim)


@dataclass(frozen=True)
class ValueRows(Int8Rows):
    """An int8 code per element. Record: codes, scales.

    An element is off by at most half a scale: 1/254 of the largest of its group.
    """

    @property
    def record_bytes(self) -> int:
        return self._elements + self._scale_bytes

    def quantise(self, rows: torch.Tensor) -> torch.Tensor:
        codes, scales = self._round(rows, _LARGEST_INT8)
        return torch.cat([_bytes(codes.to(torch.int8)), _bytes(scales)], 1)

    def dequantise(self, records: torch.Tensor) -> torch.Tensor:
        codes, scales = torch.split(records, [self._elements, self._scale_bytes], 1)
        codes = codes.view(torch.int8).to(_SCALE)
        return self._scale(codes, _typed(scales, _SCALE)).to(self.dtype)


@dataclass(frozen=True)
class KeyRows(Int8Rows):
    """An int8 code and a ninth bit per element, but the two largest of a head as they
    are. Record: codes, ninth bits (eight in a byte), scales, then values and channels
    of what is kept apart.

    An element is off by at most half a scale: 1/510 of the largest of its group, those
    two not counted.
    """

    @property
    def record_bytes(self) -> int:
        return sum(self._parts)

    @property
    def _channel(self) -> torch.dtype:
        return torch.uint8 if self.dim <= 256 else torch.int32

    @property
    def _parts(self) -> tuple[int, int, int, int, int]:
        apart = self.heads * _KEPT_APART
        return (
            self._elements,
            math.ceil(self._elements / 8),
            self._scale_bytes,
            apart * self.dtype.itemsize,
            apart * self._channel.itemsize,
        )

    def quantise(self, rows: torch.Tensor) -> torch.Tensor:
        channels, rest = self._set_apart(rows.to(_SCALE))
        codes, scales = self._round(rest, _LARGEST_INT9)
        whole = codes.to(torch.int16)
        parts = (
            (whole >> 1).to(torch.int8),
            _pack_bits((whole & 1).to(_SCALE)),
            scales,
            rows.gather(-1, channels).to(self.dtype),
            channels.to(self._channel),
        )
        return torch.cat([_bytes(part) for part in parts], 1)

    def dequantise(self, records: torch.Tensor) -> torch.Tensor:
        n = len(records)
        high, low, scales, values, channels = torch.split(records, list(self._parts), 1)
        codes = high.view(torch.int8).to(_SCALE).mul_(2)
        codes += _unpack_bits(low)[:, : self._elements]
        rows = self._scale(codes, _typed(scales, _SCALE))
        apart = (n, self.heads, _KEPT_APART)
        where = _typed(channels, self._channel).view(apart).to(torch.int64)
        # Before the rows take their type: a scatter of two-byte elements is slow.
        kept = _typed(values, self.dtype).view(apart).to(_SCALE)
        return rows.scatter_(-1, where, kept).to(self.dtype)

    def _set_apart(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Channels of each head's largest, int64 [n, heads, 2], and the other rows'."""
        # Not topk: of equal elements argmax takes the first, whatever else is there.
        # A NaN counts as the largest.
        channels: list[torch.Tensor] = []
        rest = rows
        for _ in range(_KEPT_APART):
            channels.append(rest.abs().argmax(-1, keepdim=True))
            rest = rest.scatter(-1, channels[-1], 0.0)
        return torch.cat(channels, -1), rest


def codec_for(buffer: RowBuffer) -> Int8Rows:
    """The codec of a row buffer: `KeyRows` for "k", `ValueRows` for any other.

    The last axis of the buffer's shape is a head's channels. Groups have 32 channels,
    or 16 or 8 where only these divide a head; else a head is one group.
    """
    *heads, dim = buffer.shape
    group = next((size for size in _GROUPS if dim % size == 0), dim)
    kind = KeyRows if buffer.name == "k" else ValueRows
    return kind(math.prod(heads), dim, buffer.dtype, group)


def _bytes(part: torch.Tensor) -> torch.Tensor:
    """A tensor [n, ...] as uint8 [n, bytes]."""
    flat = part.reshape(len(part), math.prod(part.shape[1:])).contiguous()
    return flat.view(torch.uint8)


def _typed(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Columns of records, uint8 [n, bytes], as `dtype` [n, elements]."""
    # A copy: only that is aligned for the type.
    return part.clone(memory_format=torch.contiguous_format).view(dtype)


def _pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Zeros and ones, float32 [n, m], eight in a byte: uint8 [n, ceil(m / 8)]."""
    n, m = bits.shape
    octets = pad(bits, (0, -m % 8)).view(n, -(-m // 8), 8)
    # Sums of different powers of two below 256: exact in any order.
    return (octets @ _BIT_VALUES).to(torch.uint8)


def _unpack_bits(octets: torch.Tensor) -> torch.Tensor:
    """The inverse of `_pack_bits`: float32 [n, 8 * octets], the padding included."""
    n, m = octets.shape
    return _BITS.index_select(0, octets.reshape(-1).to(torch.int32)).view(n, 8 * m)
