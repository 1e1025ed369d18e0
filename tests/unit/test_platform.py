"""platform.py: SGLang on a machine without an accelerator, and stepping aside."""

import json
import os
import types

import pytest
import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.platforms import _load_platform_class, current_platform
from sglang.srt.server_args import ServerArgs

from sglang_tiered.sglang import platform
from sglang_tiered.sglang.platform import TieredCpuPlatform, accelerator_present

needs_cpu_platform = pytest.mark.skipif(
    accelerator_present(), reason="our platform steps aside where an accelerator is"
)

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


@pytest.fixture
def resolve(tmp_path, monkeypatch):
    """Resolve server arguments the way a launcher does."""
    # Resolution writes to the environment.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")

    def resolved(**fields):
        args = ServerArgs(model_path=str(tmp_path), **fields)
        args.resolve_once()
        return resolving_view(args)

    return resolved


@pytest.fixture
def bare_machine(monkeypatch):
    """No accelerator and no switch, whatever this machine has."""
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(platform, "accelerator_present", lambda: False)


@pytest.mark.usefixtures("bare_machine")
def test_the_entry_point_names_a_class_that_sglang_accepts():
    assert _load_platform_class(platform.activate()) is TieredCpuPlatform


@pytest.mark.usefixtures("bare_machine")
def test_it_steps_aside_for_sglangs_own_cpu_engine(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platform.activate() is None


@pytest.mark.parametrize("name", ["cuda", "xpu", "npu", "mps", "hpu", "musa"])
def test_it_steps_aside_where_an_accelerator_is_present(monkeypatch, name):
    present = types.SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(torch, name, present, raising=False)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    assert platform.activate() is None


@needs_cpu_platform
def test_sglang_finds_it():
    assert type(current_platform) is TieredCpuPlatform


def test_it_counts_as_out_of_tree():
    assert TieredCpuPlatform().is_out_of_tree()


def test_it_pins_no_memory():
    assert TieredCpuPlatform().is_pin_memory_available() is False


@needs_cpu_platform
def test_the_device_needs_no_flag(resolve):
    assert resolve().device == "cpu"


@needs_cpu_platform
def test_a_stock_server_gets_the_native_attention(resolve):
    assert resolve().attention_backend == "torch_native"


@needs_cpu_platform
def test_a_tiered_server_gets_ours(resolve):
    assert resolve(radix_cache_backend="tiered").attention_backend == "tiered_cpu"


@needs_cpu_platform
def test_the_users_own_attention_backend_stays(resolve):
    cfg = resolve(radix_cache_backend="tiered", attention_backend="torch_native")
    assert cfg.attention_backend == "torch_native"


@needs_cpu_platform
def test_sampling_needs_no_flag(resolve):
    assert resolve().sampling_backend == "pytorch"


@needs_cpu_platform
def test_there_are_no_graphs(resolve):
    graphs = resolve(radix_cache_backend="tiered").cuda_graph_config
    assert (graphs.decode.backend, graphs.prefill.backend) == (Backend.DISABLED,) * 2
