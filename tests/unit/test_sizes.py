"""sizes.py: sizes in pages."""

import pytest

from sglang_tiered.config import TieredConfig
from sglang_tiered.flags import ConfigError
from sglang_tiered.sizes import Sizes, resolve_sizes, rounding_notes

GIB = 1 << 30


def sizes(cfg, *, t0=1000, page=1, layers=8, row=1024, free=100 * GIB):
    return resolve_sizes(cfg, t0, page, layers, row, row // 4, free)


def test_an_explicit_host_size_is_gib_rounded_down_to_pages():
    # 16 tokens x 1000 bytes = 16000 bytes a page; 1 GiB / 16000 = 67108.8 pages.
    got = sizes(TieredConfig(host_gb=1.0), page=16, row=1000)
    assert got.host_pages == 67108


def test_without_a_host_size_it_is_four_times_t0():
    assert sizes(TieredConfig()).host_pages == 4000


def test_without_a_host_size_it_is_at_most_half_of_what_is_free():
    assert sizes(TieredConfig(), free=2 * 1024 * 500).host_pages == 500


def test_an_explicit_host_size_does_not_look_at_free_memory():
    assert sizes(TieredConfig(host_gb=1.0), free=0).host_pages == GIB // 1024


def test_without_a_window_it_is_t0_times_layers_over_sixteen():
    assert sizes(TieredConfig(), layers=8).window_pages == 500


def test_two_default_windows_cost_an_eighth_of_t0():
    got = sizes(TieredConfig(), t0=1600, layers=32)
    assert 2 * got.window_pages * 8 == got.t0_pages * 32


def test_the_default_window_is_no_larger_than_the_host_tier():
    got = sizes(TieredConfig(host_gb=1.0), row=GIB // 64)
    assert got == Sizes(t0_pages=1000, window_pages=64, host_pages=64, int8_pages=0)


def test_the_default_window_is_at_least_one_page():
    cfg = TieredConfig(recent_window=1, sink_tokens=0)
    assert sizes(cfg, t0=48, page=16, layers=1).window_pages == 1


def test_sizes_are_rounded_down_to_pages():
    got = sizes(TieredConfig(window_tokens=100), t0=1000, page=16)
    assert (got.t0_pages, got.window_pages) == (62, 6)


def test_what_is_rounded_down_is_said():
    notes = rounding_notes(TieredConfig(window_tokens=100), 1000, 16)
    assert notes == [
        "T0 (--max-total-tokens): 1000 tokens rounded down to 992, whole pages of 16",
        "--tiered-window-tokens: 100 tokens rounded down to 96, whole pages of 16",
    ]


def test_whole_pages_are_not_worth_a_note():
    assert rounding_notes(TieredConfig(window_tokens=96), 992, 16) == []


def test_no_more_layers_are_skipped_than_there_are():
    with pytest.raises(ConfigError, match=r"--tiered-score-layers 9: .* 8 layers"):
        sizes(TieredConfig(score_layers=9), layers=8)


def test_an_int8_pool_smaller_than_a_page_is_refused():
    config = TieredConfig(int8_gb=1e-6, compress_ratio=0.5)
    with pytest.raises(ConfigError, match=r"--tiered-int8-gb 1e-06: holds no page"):
        sizes(config, page=16, row=1024)


def test_the_int8_size_is_gib_rounded_down_to_pages():
    got = sizes(TieredConfig(int8_gb=1, compress_ratio=0.5), page=16, row=1000)
    assert got.int8_pages == GIB // (16 * 250)


def test_v_is_t0_plus_both_host_tiers_without_the_window():
    sizes = Sizes(t0_pages=10, window_pages=5, host_pages=40, int8_pages=7)
    assert sizes.virtual_pages == 57


def test_a_window_smaller_than_a_page_is_refused():
    with pytest.raises(ConfigError, match=r"--tiered-window-tokens 15: .* 16 tokens"):
        sizes(TieredConfig(window_tokens=15), page=16)


def test_a_window_larger_than_the_host_tier_is_refused_naming_both_flags():
    cfg = TieredConfig(host_gb=1.0, window_tokens=65)
    with pytest.raises(
        ConfigError, match=r"--tiered-window-tokens 65: .* 64 tokens.*--tiered-host-gb"
    ):
        sizes(cfg, row=GIB // 64)


def test_the_host_size_named_for_a_large_window_works():
    with pytest.raises(ConfigError) as error:
        sizes(TieredConfig(host_gb=1.0, window_tokens=1001), row=GIB // 64)
    needed = float(str(error.value).rsplit(" ", 1)[1])
    got = sizes(TieredConfig(host_gb=needed, window_tokens=1001), row=GIB // 64)
    assert got.window_pages == 1001


def test_a_host_tier_smaller_than_one_page_is_refused_with_a_size_that_works():
    with pytest.raises(ConfigError, match=r"--tiered-host-gb 0\.5: holds") as error:
        sizes(TieredConfig(host_gb=0.5), row=GIB)
    needed = float(str(error.value).rsplit(" ", 1)[1])
    assert sizes(TieredConfig(host_gb=needed), row=GIB).host_pages == 1


def test_no_free_memory_is_refused_when_the_size_is_left_to_us():
    with pytest.raises(ConfigError, match=r"--tiered-host-gb \(default\): holds no"):
        sizes(TieredConfig(), free=0)


@pytest.mark.parametrize("page", [1, 16])
def test_a_t0_too_small_for_the_protected_rows_is_refused_with_one_that_works(page):
    with pytest.raises(
        ConfigError, match=r"--max-total-tokens 100: .*--tiered-recent-window 128"
    ) as error:
        sizes(TieredConfig(), t0=100, page=page)
    least = int(str(error.value).split("raise --max-total-tokens to ")[1].split(",")[0])
    assert sizes(TieredConfig(), t0=least, page=page).t0_pages == least // page
    with pytest.raises(ConfigError, match="--max-total-tokens"):
        sizes(TieredConfig(), t0=least - 1, page=page)
