"""Virtual to physical pages, in a tensor that never moves."""

import numpy as np
import pytest
import torch

from sglang_tiered.memory.page_table import PageTable


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


@pytest.fixture
def table() -> PageTable:
    return PageTable(8, 4)


def test_nothing_has_a_place_at_first(table: PageTable) -> None:
    assert table.v2p.tolist() == [0] * 9


def test_entries_are_int64(table: PageTable) -> None:
    """flashinfer#3136: 32-bit page arithmetic wraps."""
    assert table.v2p.dtype == torch.int64


def test_a_page_is_where_it_was_placed(table: PageTable) -> None:
    table.place(pages(3, 5), pages(70, 80))
    assert table.v2p[[3, 5]].tolist() == [70, 80]


def test_a_page_without_a_place_maps_to_the_sink(table: PageTable) -> None:
    table.place(pages(3, 5), pages(70, 80))
    table.clear(pages(3))
    assert table.v2p[[3, 5]].tolist() == [0, 80]


def test_the_sink_maps_to_itself(table: PageTable) -> None:
    table.place(pages(1), pages(7))
    assert table.translate(torch.arange(4)).tolist() == [0, 1, 2, 3]


def test_tokens_keep_their_place_in_the_page(table: PageTable) -> None:
    table.place(pages(3, 5), pages(70, 80))
    ids = torch.tensor([12, 15, 20, 22])
    assert table.translate(ids).tolist() == [280, 283, 320, 322]


def test_a_page_of_one_token_is_a_row() -> None:
    table = PageTable(8, 1)
    table.place(pages(3), pages(70))
    assert table.translate(torch.tensor([3, 0])).tolist() == [70, 0]


def test_ids_of_any_shape_and_integer_type_are_translated(table: PageTable) -> None:
    table.place(pages(1), pages(7))
    rows = table.translate(torch.tensor([[4, 5], [6, 7]], dtype=torch.int32))
    assert rows.tolist() == [[28, 29], [30, 31]]
    assert rows.dtype == torch.int64


def test_flashinfer_3136_rows_beyond_32_bits_are_exact() -> None:
    """flashinfer#3136."""
    table = PageTable(1, 64)
    table.place(pages(1), pages(2**40))
    assert table.translate(torch.tensor([65])).tolist() == [2**46 + 1]


@pytest.mark.parametrize("change", ["place", "clear", "reset"])
def test_the_tensor_never_moves(change: str, table: PageTable) -> None:
    address, tensor = table.v2p.data_ptr(), table.v2p
    if change == "reset":
        table.reset()
    else:
        getattr(table, change)(pages(2), *([pages(9)] if change == "place" else []))
    assert table.v2p is tensor
    assert table.v2p.data_ptr() == address


def test_a_reset_forgets_every_place(table: PageTable) -> None:
    table.place(pages(3, 5), pages(70, 80))
    table.reset()
    assert table.v2p.tolist() == [0] * 9
