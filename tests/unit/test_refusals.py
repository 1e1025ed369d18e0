"""refusals.py: what the tiered pool does not work with, one case per row."""

import json

import pytest
import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache import memory_pool
from sglang.srt.model_executor.cuda_graph_config import (
    Backend,
    CudaGraphConfig,
    PhaseConfig,
)
from sglang.srt.server_args import ServerArgs

from sglang_tiered.sglang import refusals
from sglang_tiered.sglang.refusals import (
    Refusal,
    check_model,
    check_pool,
    check_server_args,
)

# Written out, not read from the table: removing a row must fail its case.
ARGUMENT_CASES = [
    ("enable_mis", True),
    ("disable_radix_cache", True),
    ("enable_hierarchical_cache", True),
    ("enable_lmcache", True),
    ("enable_flexkv", True),
    ("enable_unified_cache_external_linker", True),
    ("disaggregation_decode_enable_offload_kvcache", True),
    ("disaggregation_decode_retraction_backup", "host_pool"),
    ("enable_unified_memory", True),
    ("enable_page_major_kv_layout", True),
    ("enable_hisparse", True),
    ("enable_kv_cache_sharding", True),
    ("prefill_only_disable_kv_cache", True),
    ("enable_memory_saver", True),
    ("kv_cache_dtype", "fp8_e5m2"),
    ("kv_cache_dtype", "fp8_e4m3"),
    ("kv_cache_dtype", "mxfp8"),
    ("kv_cache_dtype", "nvfp4"),
    ("kv_cache_dtype", "fp4_mx_block16"),
    ("speculative_algorithm", "EAGLE"),
    ("speculative_algorithm", "NGRAM"),
    ("decoupled_spec_role", "verifier"),
    ("disaggregation_mode", "prefill"),
    ("disaggregation_mode", "decode"),
    ("enable_pd_role_switch", True),
    ("enable_pdmux", True),
    ("enable_two_batch_overlap", True),
    ("dllm_algorithm", "LowConfidence"),
    ("kv_canary", "log"),
    ("encoder_only", True),
    ("use_ray", True),
    ("tp_size", 2),
    ("pp_size", 2),
    ("dp_size", 2),
    ("attn_dp_size", 2),
    ("dcp_size", 2),
    ("attn_cp_size", 2),
    ("enable_prefill_cp", True),
    ("enable_torch_compile", True),
    ("enable_nvidia_megakernel", True),
    ("enable_amd_monokernel", True),
    ("device", "npu"),
]

# Features that look close to a refused one and do work.
ALLOWED_ARGUMENTS = [
    ("kv_cache_dtype", "bfloat16"),
    ("enable_session_radix_cache", True),
    ("enable_streaming_session", True),
    ("enable_mixed_chunk", True),
    ("disable_overlap_schedule", True),
    ("enable_priority_scheduling", True),
    ("enable_lora", True),
    ("enable_single_batch_overlap", True),
    ("page_size", 16),
    ("cpu_offload_gb", 1),
    ("disaggregation_decode_retraction_backup", "cpu_tensor"),
]

ENVIRONMENT_CASES = [
    ("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1"),
    ("SGLANG_USE_HND_KVCACHE", "true"),
    ("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "NVLINK"),
    ("SGLANG_RUST_SERVER", "1"),
]


def view(**fields):
    """SGLang's own arguments on a CPU, as far as they matter here, with ``fields``."""
    resolved = {
        "device": "cpu",
        "attention_backend": "tiered_cpu",
        "cuda_graph_config": graphs(),
    }
    return resolving_view(ServerArgs(model_path="model", **resolved | fields))


def graphs(*, decode=Backend.DISABLED, prefill=Backend.DISABLED):
    return CudaGraphConfig(decode=PhaseConfig(decode), prefill=PhaseConfig(prefill))


def refused_lines(cfg, environ=None):
    with pytest.raises(Refusal) as error:
        check_server_args(cfg, environ or {})
    return str(error.value).splitlines()


def test_plain_arguments_are_accepted():
    check_server_args(view(), {})


@pytest.mark.parametrize(("field", "value"), ARGUMENT_CASES)
def test_an_argument_is_refused_naming_flag_value_and_fix(field, value):
    (line,) = refused_lines(view(**{field: value}))
    flag = "--" + field.replace("_", "-")
    shown = flag if value is True else f"{flag} {value}"
    assert line.startswith(f"{shown}: ")
    assert "; fix: " in line


@pytest.mark.parametrize(("field", "value"), ALLOWED_ARGUMENTS)
def test_a_neighbouring_argument_is_accepted(field, value):
    check_server_args(view(**{field: value}), {})


def test_every_row_has_a_case():
    rows = {row.field for row in refusals.SERVER_ARG_ROWS}
    assert rows == {field for field, _ in ARGUMENT_CASES}


def test_every_refused_flag_exists_in_this_sglang(sglang_options):
    missing = [row.flag for row in refusals.SERVER_ARG_ROWS]
    missing = [flag for flag in missing if flag not in sglang_options]
    assert missing == []


def test_every_flag_named_in_a_fix_exists_in_this_sglang(sglang_options):
    words = " ".join(row.fix for row in refusals.SERVER_ARG_ROWS).split()
    assert {word for word in words if word.startswith("--")} <= sglang_options


@pytest.fixture(scope="module")
def sglang_options():
    import argparse

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {option for action in parser._actions for option in action.option_strings}


def test_all_problems_are_listed_one_a_line():
    lines = refused_lines(view(tp_size=2, enable_hisparse=True))
    assert [line.split(":")[0] for line in lines] == [
        "--enable-hisparse",
        "--tp-size 2",
    ]


# --- attention backends ------------------------------------------------------


@pytest.mark.parametrize("backend", ["flashinfer", "triton", "fa3"])
def test_backends_that_read_through_the_page_table_are_accepted_on_cuda(backend):
    check_server_args(view(device="cuda", attention_backend=backend), {})


@pytest.mark.parametrize(
    "backend",
    ["torch_native", "flex_attention", "fa4", "trtllm_mha", "aiter", "tiered_cpu"],
)
def test_other_backends_are_refused_on_cuda(backend):
    (line,) = refused_lines(view(device="cuda", attention_backend=backend))
    assert line.startswith(f"--attention-backend {backend}: ")
    assert "fix: use --attention-backend flashinfer" in line


@pytest.mark.parametrize("backend", ["torch_native", "intel_amx", "triton"])
def test_other_backends_are_refused_on_the_cpu(backend):
    (line,) = refused_lines(view(attention_backend=backend))
    assert line.startswith(f"--attention-backend {backend}: ")
    assert "fix: use --attention-backend tiered_cpu" in line


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_backend_of_one_phase_is_refused_by_its_own_flag(phase):
    field = f"{phase}_attention_backend"
    (line,) = refused_lines(view(**{field: "torch_native"}))
    assert line.startswith(f"--{phase}-attention-backend torch_native: ")


def test_a_backend_that_no_phase_uses_is_not_looked_at():
    cfg = view(
        device="cuda",
        attention_backend="torch_native",
        prefill_attention_backend="fa3",
        decode_attention_backend="flashinfer",
    )
    check_server_args(cfg, {})


# --- graphs ------------------------------------------------------------------


def test_a_full_prefill_graph_is_refused():
    (line,) = refused_lines(view(cuda_graph_config=graphs(prefill=Backend.FULL)))
    assert line.startswith("--cuda-graph-backend-prefill full: ")


def test_a_breakable_prefill_graph_is_accepted():
    check_server_args(view(cuda_graph_config=graphs(prefill=Backend.BREAKABLE)), {})


@pytest.mark.parametrize("backend", [Backend.FULL, Backend.BREAKABLE])
def test_a_decode_graph_is_refused(backend):
    (line,) = refused_lines(view(cuda_graph_config=graphs(decode=backend)))
    assert line.startswith(f"--cuda-graph-backend-decode {backend}: ")


def test_unresolved_arguments_are_not_held_to_sglangs_own_choices():
    cfg = resolving_view(ServerArgs(model_path="model", device="cpu"))
    check_server_args(cfg, {}, resolved=False)


def test_unresolved_arguments_are_checked_for_what_the_user_gave():
    cfg = resolving_view(ServerArgs(model_path="model", enable_hisparse=True))
    with pytest.raises(Refusal, match=r"^--enable-hisparse: "):
        check_server_args(cfg, {}, resolved=False)


# --- environment -------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), ENVIRONMENT_CASES)
def test_an_environment_switch_is_refused(name, value):
    (line,) = refused_lines(view(), {name: value})
    assert line.startswith(f"{name}={value}: ")
    assert line.endswith(f"fix: unset {name}")


@pytest.mark.parametrize("name", [name for name, _ in ENVIRONMENT_CASES[:2]])
def test_an_environment_switch_that_is_off_is_accepted(name):
    check_server_args(view(), {name: "0"})


def test_every_environment_row_has_a_case():
    assert set(refusals.ENVIRONMENT_ROWS) == {name for name, _ in ENVIRONMENT_CASES}


# --- models ------------------------------------------------------------------

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "vocab_size": 512,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
MLA = SMALL | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
HALF_SLIDING = ["sliding_attention", "full_attention"] * 4
SLIDING = SMALL | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "sliding_window": 128,
    "layer_types": HALF_SLIDING,
}
HYBRID_MAMBA = SMALL | {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
}
LINEAR = SMALL | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
PURE_MAMBA = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 512,
    "num_heads": 4,
    "head_dim": 32,
    "n_groups": 1,
    "state_size": 16,
}
ENCODER_DECODER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
SHARED_KV = SMALL | {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "num_kv_shared_layers": 2,
    "layer_types": HALF_SLIDING,
}
LOCAL = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": SMALL | {"model_type": "llama4_text", "attention_chunk_size": 128},
}
PLAIN = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.fixture
def model_config(tmp_path):
    def build(config, **kwargs):
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return ModelConfig(model_path=str(tmp_path), **kwargs)

    return build


def test_a_plain_model_is_accepted(model_config):
    check_model(model_config(PLAIN), ("fa3", "fa3"))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (MLA, "latent"),
        (SLIDING, "sliding-window"),
        (HYBRID_MAMBA, "recurrent"),
        (LINEAR, "recurrent"),
        (PURE_MAMBA, "recurrent"),
        (ENCODER_DECODER, "encoder-decoder"),
        (SHARED_KV, "late layers read an early layer's rows"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_model_is_refused_by_name(model_config, config, why):
    with pytest.raises(Refusal) as error:
        check_model(model_config(config), ("tiered_cpu", "tiered_cpu"))
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"--model-path ({config['architectures'][0]}): {why}")
    assert "; fix: " in line


def test_a_model_with_a_sparse_index_is_refused(model_config):
    # This architecture's configuration is not in the transformers release.
    config = model_config(PLAIN)
    config.hf_config.architectures = ["MiniMaxM3SparseForCausalLM"]
    with pytest.raises(Refusal, match="its index rows"):
        check_model(config, ("fa3", "fa3"))


def test_local_attention_is_refused_on_fa3(model_config):
    config = model_config(LOCAL, disable_hybrid_swa_memory=True)
    with pytest.raises(Refusal, match=r"^--attention-backend fa3: its local attention"):
        check_model(config, ("fa3", "triton"))


def test_local_attention_is_accepted_elsewhere(model_config):
    config = model_config(LOCAL, disable_hybrid_swa_memory=True)
    check_model(config, ("triton", "triton"))


# --- pools -------------------------------------------------------------------

PLAIN_POOL = {
    "pool_class": memory_pool.MHATokenToKVPool,
    "dtype": torch.bfloat16,
    "quantized": False,
    "post_capture": False,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_plain_pool_is_accepted(dtype):
    check_pool(**PLAIN_POOL | {"dtype": dtype})


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("pool_class", memory_pool.MLATokenToKVPool, "MLATokenToKVPool"),
        ("pool_class", memory_pool.MHATokenToKVPoolFP4, "MHATokenToKVPoolFP4"),
        ("pool_class", memory_pool.MHATokenToKVPoolMXFP8, "MHATokenToKVPoolMXFP8"),
        ("pool_class", memory_pool.PageMajorMHATokenToKVPool, "PageMajorMHATokenToKV"),
        ("pool_class", memory_pool.NoOpMHATokenToKVPool, "NoOpMHATokenToKVPool"),
        ("dtype", torch.float8_e4m3fn, "float8_e4m3fn"),
        ("dtype", torch.float8_e5m2, "float8_e5m2"),
        ("dtype", torch.float4_e2m1fn_x2, "float4_e2m1fn_x2"),
        ("quantized", True, "quantized KV rows"),
        ("post_capture", True, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
    ],
)
def test_another_pool_is_refused_by_name(field, value, named):
    with pytest.raises(Refusal, match=f"{named}.*; fix: ") as error:
        check_pool(**PLAIN_POOL | {field: value})
    assert "\n" not in str(error.value)
