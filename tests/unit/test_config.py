"""config.py: one table of flags; values checked with one line; sizes in pages."""

from pathlib import Path

import pytest

from sglang_tiered import config
from sglang_tiered.config import (
    FLAGS,
    ConfigError,
    Sizes,
    TieredConfig,
    resolve_sizes,
    rounding_notes,
)

GIB = 1 << 30

# (field, environment text, value). Written out, so that a changed table is noticed.
GOOD = [
    ("host_gb", "0.25", 0.25),
    ("host_gb", " 8 ", 8.0),
    ("window_tokens", "1", 1),
    ("window_tokens", "1536", 1536),
    ("mode", "ratio", "ratio"),
    ("sink_tokens", "0", 0),
    ("recent_window", "1", 1),
    ("retier_interval", "16", 16),
]
BAD = [
    ("host_gb", "0"),
    ("host_gb", "-1"),
    ("host_gb", "nan"),
    ("host_gb", "inf"),
    ("host_gb", "1e400"),
    ("host_gb", "1e7"),
    ("host_gb", "8GB"),
    ("host_gb", ""),
    ("window_tokens", "0"),
    ("window_tokens", "-16"),
    ("window_tokens", "1.5"),
    ("window_tokens", "nan"),
    ("window_tokens", "1" + "0" * 400),
    ("mode", "fast"),
    ("mode", ""),
    ("sink_tokens", "-1"),
    ("recent_window", "0"),
    ("retier_interval", "0"),
    ("retier_interval", "x"),
]


def env_name(field):
    return "SGLANG_TIERED_" + field.upper()


def cli_name(field):
    return "--tiered-" + field.replace("_", "-")


@pytest.mark.parametrize(("field", "text", "value"), GOOD)
def test_a_good_value_is_read_from_the_environment(field, text, value):
    read = TieredConfig.from_env({env_name(field): text})
    assert getattr(read, field) == value


@pytest.mark.parametrize(("field", "text"), BAD)
def test_a_bad_value_is_refused_naming_flag_value_and_fix(field, text):
    with pytest.raises(ConfigError) as error:
        TieredConfig.from_env({env_name(field): text})
    message = str(error.value)
    assert message.startswith(f"{cli_name(field)} {text}: must be ")
    assert f"fix: for example {cli_name(field)} " in message
    assert "\n" not in message


@pytest.mark.parametrize("field", sorted({field for field, _ in BAD}))
def test_the_fix_named_in_the_message_works(field):
    flag = next(flag for flag in FLAGS if flag.field == field)
    TieredConfig.from_env({flag.env: flag.example})


@pytest.mark.parametrize(
    ("field", "value"), [("host_gb", float("nan")), ("window_tokens", 2.0)]
)
def test_a_bad_value_is_refused_on_construction_too(field, value):
    with pytest.raises(ConfigError, match="must be"):
        TieredConfig(**{field: value})


def test_an_empty_environment_gives_the_defaults():
    assert TieredConfig.from_env({}) == TieredConfig()


def test_the_table_names_every_setting_of_the_config():
    fields = set(TieredConfig.__dataclass_fields__) - {"test_switches"}
    assert {flag.field for flag in FLAGS} == fields


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.field)
def test_the_help_states_the_default_that_the_config_has(flag):
    default = getattr(TieredConfig(), flag.field)
    if isinstance(default, str):
        assert f"'{default}' (default)" in flag.help
    elif default is None:
        assert "Default: " in flag.help
    else:
        assert f"Default: {default}." in flag.help


def test_the_ratio_is_refused_in_pressure_mode():
    with pytest.raises(ConfigError, match=r"--tiered-hbm-ratio 0\.3: .*-mode ratio"):
        TieredConfig.from_env({"SGLANG_TIERED_HBM_RATIO": "0.3"})


def test_the_ratio_is_read_in_ratio_mode():
    environ = {"SGLANG_TIERED_HBM_RATIO": "0", "SGLANG_TIERED_MODE": "ratio"}
    assert TieredConfig.from_env(environ).hbm_ratio == 0.0


@pytest.mark.parametrize("text", ["1.01", "-0.1", "nan"])
def test_a_ratio_outside_0_to_1_is_refused(text):
    environ = {"SGLANG_TIERED_HBM_RATIO": text, "SGLANG_TIERED_MODE": "ratio"}
    with pytest.raises(ConfigError, match="--tiered-hbm-ratio"):
        TieredConfig.from_env(environ)


def test_a_misspelt_variable_is_refused():
    with pytest.raises(ConfigError, match="SGLANG_TIERED_HOSTGB=8: no such setting"):
        TieredConfig.from_env({"SGLANG_TIERED_HOSTGB": "8"})


def test_other_variables_are_left_alone():
    assert TieredConfig.from_env({"SGLANG_USE_MODELSCOPE": "x"}) == TieredConfig()


def test_test_switches_are_read_from_the_environment():
    switches = TieredConfig.from_env({"SGLANG_TIERED_TEST": "poison, audit"})
    assert switches.test_switches == {"poison", "audit"}


def test_an_unknown_test_switch_is_refused():
    with pytest.raises(ConfigError, match="unknown test switch poisn"):
        TieredConfig.from_env({"SGLANG_TIERED_TEST": "poisn"})


# --- sizes -------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"compress_ratio": 0.2}, "--tiered-compress-ratio 0.2: there is no int8 tier"),
        ({"request_compress": 0.2}, "--tiered-request-compress 0.2: there is no int8"),
        ({"int8_gb": 1}, "--tiered-int8-gb 1: nothing would use it"),
        (
            {"policy": "h2o"},
            "--tiered-policy: policy h2o: the setting budget is missing",
        ),
        (
            {"policy": "h2o", "budget": 0.5, "request_evict": 0.1},
            "--tiered-request-evict 0.1: less than what the server's own policy takes",
        ),
        ({"budget": 0.5}, "policy hierarchy: no such setting 'budget'"),
        ({"policy": "belady"}, "--tiered-policy belady: must be one of full, h2o"),
    ],
)
def test_lossy_settings_that_do_not_go_together_are_refused(settings, text):
    with pytest.raises(ConfigError) as caught:
        TieredConfig(**settings)
    assert text in str(caught.value)
    assert "fix: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_scores_are_kept_where_a_policy_may_read_them():
    assert TieredConfig().feeds_scores
    assert not TieredConfig(policy="recency").feeds_scores
    assert TieredConfig(policy="recency", request_evict=0.5).feeds_scores


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


def test_config_imports_nothing_of_sglang():
    source = Path(config.__file__).read_text(encoding="utf-8")
    assert "import sglang" not in source
    assert "from sglang." not in source
