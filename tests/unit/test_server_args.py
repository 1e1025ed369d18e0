"""server_args.py: the --tiered-* flags on SGLang's own parser, through its registry."""

import logging
import os

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import ServerArgs, prepare_server_args

from sglang_tiered.flags import FLAGS
from sglang_tiered.sglang import server_args

TIERED = ["--radix-cache-backend", "tiered"]
EXAMPLES = [(flag.cli, flag.env, flag.example) for flag in FLAGS]
# Settings that are only accepted together with others.
INT8 = {"SGLANG_TIERED_INT8_GB": "4"}
COMPANIONS = {
    "--tiered-hbm-ratio": {"SGLANG_TIERED_MODE": "ratio"},
    "--tiered-budget": {"SGLANG_TIERED_POLICY": "h2o"},
    "--tiered-compress-ratio": INT8,
    "--tiered-request-compress": INT8,
    "--tiered-int8-gb": {"SGLANG_TIERED_COMPRESS_RATIO": "0.2"},
}
HOOKS = {
    "add_cli_args": server_args.add_cli_args_hook,
    "from_cli_args": server_args.from_cli_args_hook,
}


@pytest.fixture(scope="module", autouse=True)
def _hooks_applied():
    stock = {name: vars(ServerArgs)[name] for name in HOOKS}
    targets = {f"sglang.srt.server_args.ServerArgs.{name}": name for name in HOOKS}
    for target, name in targets.items():
        HookRegistry.register(target, HOOKS[name], HookType.AROUND)
    HookRegistry.apply_hooks()
    yield
    for target, name in targets.items():
        setattr(ServerArgs, name, stock[name])
        HookRegistry._hooks.pop(target)
        HookRegistry._patched.discard(target)


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    """A copy of the environment, without our settings, that the test may change."""
    copy = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_TIERED_")}
    monkeypatch.setattr(os, "environ", copy)
    # Parsing points the root logger at this test's stderr, which closes with it.
    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: None)
    return copy


def parse(*argv):
    return prepare_server_args(["--model-path", "model", *argv])


def error_line(capsys, *argv):
    """The one line on stderr with which the launcher ends, exit code 2."""
    with pytest.raises(SystemExit) as exit_:
        parse(*argv)
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if line.startswith("sglang-tiered: error: ")]
    return line.removeprefix("sglang-tiered: error: ")


@pytest.mark.parametrize(("cli", "env", "value"), EXAMPLES)
def test_a_flag_is_written_to_the_environment(environ, cli, env, value):
    environ.update(COMPANIONS.get(cli, {}))
    parse(*TIERED, cli, value)
    assert environ[env] == value


def test_a_flag_wins_over_the_environment(environ):
    environ["SGLANG_TIERED_HOST_GB"] = "1"
    parse(*TIERED, "--tiered-host-gb", "2")
    assert environ["SGLANG_TIERED_HOST_GB"] == "2"


def test_without_our_flags_the_environment_is_left_alone(environ):
    before = dict(environ)
    parse()
    assert {k: v for k, v in environ.items() if "TIERED" in k} == {}
    assert before.items() <= environ.items()


def test_the_arguments_of_sglang_are_parsed_as_before():
    args = parse(*TIERED, "--tiered-host-gb", "2", "--max-total-tokens", "2000")
    assert (args.radix_cache_backend, args.max_total_tokens) == ("tiered", 2000)


def test_a_config_file_sets_our_flags(environ, tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text(
        "model-path: model\nradix-cache-backend: tiered\ntiered-window-tokens: 1536\n",
        encoding="utf-8",
    )
    prepare_server_args(["--config", str(path)])
    assert environ["SGLANG_TIERED_WINDOW_TOKENS"] == "1536"


def test_the_command_line_wins_over_a_config_file(environ, tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text(
        "radix-cache-backend: tiered\ntiered-host-gb: 1\n", encoding="utf-8"
    )
    parse("--config", str(path), "--tiered-host-gb", "2")
    assert environ["SGLANG_TIERED_HOST_GB"] == "2"


@pytest.mark.parametrize(("cli", "env", "value"), EXAMPLES)
def test_a_flag_without_the_tiered_cache_is_refused(capsys, environ, cli, env, value):
    line = error_line(capsys, cli, value)
    assert line == (
        f"{cli} {value}: has no effect without the tiered cache; "
        f"fix: add --radix-cache-backend tiered, or drop {cli}"
    )
    assert env not in environ


def test_a_bad_value_ends_the_launcher_with_one_line(capsys, environ):
    line = error_line(capsys, *TIERED, "--tiered-host-gb", "lots")
    assert line.startswith("--tiered-host-gb lots: must be a finite number")
    assert "SGLANG_TIERED_HOST_GB" not in environ


def test_a_bad_value_in_the_environment_ends_the_launcher_too(capsys, environ):
    environ["SGLANG_TIERED_WINDOW_TOKENS"] = "0"
    line = error_line(capsys, *TIERED)
    assert line.startswith("--tiered-window-tokens 0: must be a whole number")


def test_the_environment_is_not_looked_at_without_the_tiered_cache(environ):
    environ["SGLANG_TIERED_WINDOW_TOKENS"] = "0"
    parse()


def test_the_help_lists_our_flags(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    assert [flag.cli for flag in FLAGS if flag.cli not in text] == []
