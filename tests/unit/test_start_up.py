"""start_up.py: what is refused before SGLang starts a child process, and how."""

import json
import logging
import os

import pytest
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import ServerArgs, prepare_server_args

from sglang_tiered.sglang import server_args, start_up
from sglang_tiered.sglang.platform import accelerator_present
from sglang_tiered.sglang.refusals import Refusal

needs_cpu_platform = pytest.mark.skipif(
    accelerator_present(), reason="our platform steps aside where an accelerator is"
)

# Refused arguments that SGLang itself does not resolve here, each in its own words.
STOCK_ERRORS = [
    ["--enable-page-major-kv-layout"],
    ["--enable-unified-cache-external-linker"],
    ["--enable-kv-cache-sharding"],
    ["--kv-cache-dtype", "mxfp8"],
    ["--speculative-algorithm", "EAGLE"],
    ["--dllm-algorithm", "LowConfidence"],
    ["--attn-dp-size", "2"],
    ["--device", "npu"],
]
TIERED = ["--radix-cache-backend", "tiered"]
HOOKS = {
    "add_cli_args": server_args.add_cli_args_hook,
    "from_cli_args": server_args.from_cli_args_hook,
    "resolve_once": start_up.resolve_once_hook,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "vocab_size": 512,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
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


@pytest.fixture
def model(tmp_path):
    """A function that writes a model folder: its configuration and nothing else."""

    def write(**config):
        text = json.dumps(LLAMA | config)
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        return str(tmp_path)

    return write


def parse(*argv, model_path="model"):
    return prepare_server_args(["--model-path", model_path, *argv])


def only_line(capsys):
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if line.startswith("sglang-tiered: error: ")]
    return line.removeprefix("sglang-tiered: error: ")


@needs_cpu_platform
def test_plain_arguments_resolve(model):
    args = parse(*TIERED, model_path=model())
    args.resolve_once()
    assert resolving_view(args).attention_backend == "tiered_cpu"


@needs_cpu_platform
@pytest.mark.parametrize("argv", STOCK_ERRORS, ids=" ".join)
def test_our_line_is_told_where_sglang_has_an_error_of_its_own(capsys, model, argv):
    args = parse(*TIERED, *argv, model_path=model())
    with pytest.raises(SystemExit) as exit_:
        args.resolve_once()
    assert exit_.value.code == 2
    assert f"sglang-tiered: error: {' '.join(argv)}: " in capsys.readouterr().err


@needs_cpu_platform
def test_the_old_name_of_attention_data_parallelism_is_refused(capsys, model):
    old = ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"]
    with pytest.raises(SystemExit):
        parse(*TIERED, *old, model_path=model()).resolve_once()
    assert "sglang-tiered: error: --attn-dp-size 2: " in capsys.readouterr().err


@needs_cpu_platform
def test_a_refused_argument_ends_the_launcher_with_one_line(capsys, model):
    args = parse(*TIERED, "--disable-radix-cache", model_path=model())
    with pytest.raises(SystemExit) as exit_:
        args.resolve_once()
    assert exit_.value.code == 2
    assert only_line(capsys).startswith("--disable-radix-cache: ")


@needs_cpu_platform
def test_a_refused_model_ends_the_launcher_with_one_line(capsys, model):
    sliding = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    }
    args = parse(*TIERED, model_path=model(**sliding))
    with pytest.raises(SystemExit):
        args.resolve_once()
    assert only_line(capsys).startswith("--model-path (GptOssForCausalLM): ")


@needs_cpu_platform
def test_every_problem_has_a_line(capsys, model):
    args = parse(*TIERED, "--disable-radix-cache", "--tp-size", "2", model_path=model())
    with pytest.raises(SystemExit):
        args.resolve_once()
    lines = capsys.readouterr().err.splitlines()
    ours = [line for line in lines if line.startswith("sglang-tiered: error: --")]
    assert len(ours) == 2


@needs_cpu_platform
def test_arguments_of_an_engine_raise(model):
    args = ServerArgs(
        model_path=model(), radix_cache_backend="tiered", disable_radix_cache=True
    )
    with pytest.raises(Refusal, match=r"^--disable-radix-cache: "):
        args.resolve_once()


@needs_cpu_platform
def test_the_settings_of_an_engine_are_checked(environ, model):
    environ["SGLANG_TIERED_MODE"] = "fast"
    args = ServerArgs(model_path=model(), radix_cache_backend="tiered")
    with pytest.raises(ValueError, match=r"^--tiered-mode fast: "):
        args.resolve_once()


def test_nothing_is_refused_without_the_tiered_cache(environ, model):
    environ["SGLANG_TIERED_MODE"] = "fast"
    parse("--disable-radix-cache", model_path=model()).resolve_once()
