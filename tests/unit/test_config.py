"""config.py and flags.py: one table of flags; values checked with one line."""

from pathlib import Path

import pytest

from sglang_tiered import config, flags, sizes
from sglang_tiered.config import TieredConfig
from sglang_tiered.flags import FLAGS, ConfigError

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
    ("hbm_ratio", "1.01"),
    ("hbm_ratio", "-0.1"),
    ("hbm_ratio", "nan"),
    ("policy", "belady"),
    ("policy", ""),
    ("compress_ratio", "1.5"),
    ("compress_ratio", "some"),
    ("evict_ratio", "-0.1"),
    ("evict_ratio", "nan"),
    ("evict_schedule", "never"),
    ("value_guard", "true"),
    ("budget", "1.1"),
    ("budget", "0"),
    ("budget", "-1"),
    ("int8_gb", "-1"),
    ("int8_gb", "inf"),
    ("request_compress", "2"),
    ("request_evict", "-1"),
    ("score_layers", "0"),
    ("score_layers", "1.5"),
    ("score_interval", "0"),
]
# What some flags are only read with.
WITH = {
    "hbm_ratio": {"mode": "ratio"},
    "compress_ratio": {"int8_gb": "4"},
    "request_compress": {"int8_gb": "4"},
    "int8_gb": {"compress_ratio": "0.2"},
    "budget": {"policy": "h2o"},
}


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


def test_every_flag_has_a_bad_value_above():
    assert {field for field, _ in BAD} == {flag.field for flag in FLAGS}


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.field)
def test_the_fix_named_in_the_message_works(flag):
    others = {env_name(field): text for field, text in WITH.get(flag.field, {}).items()}
    read = TieredConfig.from_env({**others, flag.env: flag.example})
    assert getattr(read, flag.field) == flag.kind(flag.example)


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


@pytest.mark.parametrize("module", [config, flags, sizes])
def test_settings_import_nothing_of_sglang(module):
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert "import sglang" not in source
    assert "from sglang." not in source
