import pytest
import torch

from sglang_tiered.memory.layout import PoolLayout, RowBuffer

KEY = RowBuffer("k", (3, 20), torch.float32)
VALUE = RowBuffer("v", (3, 16), torch.bfloat16)
LATENT = RowBuffer("latent", (576,), torch.bfloat16)


def layout(*layers: tuple[RowBuffer, ...], page_size: int = 1) -> PoolLayout:
    return PoolLayout(page_size, 8, 4, 16, layers)


def test_row_bytes_are_elements_times_element_size() -> None:
    assert (KEY.row_bytes, VALUE.row_bytes, LATENT.row_bytes) == (240, 96, 1152)


def test_bytes_per_token_sums_over_layers_and_buffers() -> None:
    assert layout((KEY, VALUE), (LATENT,), (KEY, VALUE)).bytes_per_token == 1824


def test_a_page_holds_page_size_rows() -> None:
    assert layout((KEY, VALUE), page_size=16).page_bytes(0, "v") == 16 * 96


def test_layers_of_different_parity_may_differ() -> None:
    assert layout((KEY,), (LATENT,)).num_layers == 2


def test_layers_of_one_parity_must_agree() -> None:
    with pytest.raises(ValueError, match="layer 3 shares its window with layer 1"):
        layout((KEY,), (KEY,), (KEY,), (LATENT,))


def test_two_buffers_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="layer 1: needs row buffers"):
        layout((KEY,), (KEY, KEY))


def test_a_layer_without_buffers_is_refused() -> None:
    with pytest.raises(ValueError, match="layer 0: needs row buffers"):
        layout(())


def test_a_pool_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        layout()


@pytest.mark.parametrize(
    "field", ["page_size", "t0_pages", "window_pages", "host_pages"]
)
def test_an_empty_tier_is_refused_by_name(field: str) -> None:
    sizes = {"page_size": 1, "t0_pages": 1, "window_pages": 1, "host_pages": 1}
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        PoolLayout(**{**sizes, field: 0}, layers=((KEY,),))


@pytest.mark.parametrize("shape", [(), (0,), (3, -1)])
def test_a_row_without_elements_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="holds no elements"):
        RowBuffer("k", shape, torch.float32)


def test_a_row_buffer_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a name"):
        RowBuffer("", (1,), torch.float32)
