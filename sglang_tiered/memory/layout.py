"""The shape of a tiered pool: the row buffers of each layer, the pages of each tier.

A token owns one row in every row buffer of every layer: two buffers ("k", "v") for
plain attention, one ("latent") for latent attention. Everything inside the package
counts in pages of `page_size` tokens; a page size of 1 is not special.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class RowBuffer:
    """One per-token buffer of a layer.

    `shape` is the shape of one token's row, for example `(kv_heads, head_dim)`, and
    `dtype` its element type. Raises ValueError for an empty name or a shape without
    elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a row buffer needs a name")
        if not self.shape or any(size < 1 for size in self.shape):
            raise ValueError(
                f"row buffer {self.name!r}: shape {self.shape} holds no elements"
            )

    @property
    def row_width(self) -> int:
        """Elements in one token's row."""
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row."""
        return self.row_width * self.dtype.itemsize


@dataclass(frozen=True)
class PoolLayout:
    """Row buffers per layer and the capacity of each tier, in pages.

    The sink page 0 is not part of `t0_pages`: a layer's device buffer holds page 0,
    then T0, then padding, then the window. Raises ValueError, naming the layer or the
    field, when a count is below 1, a layer has no buffer or two of one name, or the
    layers of one parity, which share a window, differ in their buffers.
    """

    page_size: int
    t0_pages: int
    window_pages: int
    host_pages: int
    layers: tuple[tuple[RowBuffer, ...], ...]
    _by_name: tuple[dict[str, RowBuffer], ...] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name in ("page_size", "t0_pages", "window_pages", "host_pages"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        if not self.layers:
            raise ValueError("a pool needs at least one layer")
        for index, buffers in enumerate(self.layers):
            names = [buffer.name for buffer in buffers]
            if not names or len(set(names)) != len(names):
                raise ValueError(
                    f"layer {index}: needs row buffers of different names, got {names}"
                )
            if buffers != self.layers[index % 2]:
                raise ValueError(
                    f"layer {index} shares its window with layer {index % 2}, but its "
                    f"row buffers {buffers} differ from {self.layers[index % 2]}"
                )
        by_name = tuple(
            {buffer.name: buffer for buffer in buffers} for buffers in self.layers
        )
        object.__setattr__(self, "_by_name", by_name)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's rows over all layers and buffers."""
        return sum(buffer.row_bytes for buffers in self.layers for buffer in buffers)

    def row_buffer(self, layer: int, name: str) -> RowBuffer:
        """The buffer called `name` of `layer`. Raises KeyError for an unknown name."""
        return self._by_name[layer][name]

    def page_bytes(self, layer: int, name: str) -> int:
        """Bytes of one page of one buffer of one layer."""
        return self.row_buffer(layer, name).row_bytes * self.page_size
