"""What the tiered pool does not work with, refused by name before the server starts.

Under virtual ids many features of SGLang would read or move the wrong rows, most of
them without an error. Each row of the tables here names one: the flag, why it cannot
work, and what to do. SGLang keeps the same kind of list for its own virtual ids
(``handle_unified_memory_pool``), but keyed on a flag that is off here.

``check_server_args`` looks at the arguments, ``check_model`` at the model's
configuration, ``check_pool`` at what is known when the pool is built. All raise
``Refusal`` with one line per problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class Refusal(ValueError):
    """The configuration cannot run on the tiered pool; one line per problem."""


@dataclass(frozen=True)
class Row:
    """One refused argument: ``refused(value)`` decides, the rest is the message."""

    field: str
    refused: Callable[[Any], bool]
    why: str
    fix: str

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")

    def message(self, value: object) -> str:
        shown = self.flag if value is True else f"{self.flag} {value}"
        return f"{shown}: {self.why}; fix: {self.fix}"


def _switch(field: str, why: str) -> Row:
    flag = "--" + field.replace("_", "-")
    return Row(field, bool, why, f"drop {flag}")


def _size(field: str, why: str) -> Row:
    flag = "--" + field.replace("_", "-")
    return Row(field, lambda value: value > 1, why, f"use {flag} 1")


def _only(field: str, default: str | None, why: str) -> Row:
    flag = "--" + field.replace("_", "-")
    return Row(field, lambda value: value != default, why, f"drop {flag}")


# The backends that read the KV pool through SGLang's KVIndexTranslator, per device.
ATTENTION_BACKENDS: dict[str, tuple[str, ...]] = {
    "cuda": ("flashinfer", "triton", "fa3"),
    "cpu": ("tiered_cpu",),
}

_OWN_TIER = "it keeps its own host tier and copies rows by the ids it is handed"
_RANKS = "the ranks' placement decisions are not yet kept equal"
_CONTEXT = "a rank would hold a share of each row, which the page table cannot express"
_OTHER_POOL = "it replaces the KV pool that the tiers are built on"
_KERNEL = "its kernels read the KV pool by ids that were not translated"

SERVER_ARG_ROWS: tuple[Row, ...] = (
    # The tree and other tiers. --enable-mis first: it also switches the tree off.
    _switch("enable_mis", "it switches off the prefix cache that the tiers live in"),
    _switch("disable_radix_cache", "the tiers live in the prefix cache"),
    _switch("enable_hierarchical_cache", _OWN_TIER),
    _switch("enable_lmcache", _OWN_TIER),
    _switch("enable_flexkv", _OWN_TIER),
    _switch("enable_unified_cache_external_linker", _OWN_TIER),
    _switch("disaggregation_decode_enable_offload_kvcache", _OWN_TIER),
    Row(
        "disaggregation_decode_retraction_backup",
        lambda value: value == "host_pool",
        "retracted requests are parked in the tiers instead",
        "drop --disaggregation-decode-retraction-backup",
    ),
    # Other pools and layouts.
    _switch("enable_unified_memory", _OTHER_POOL),
    _switch("enable_page_major_kv_layout", _OTHER_POOL),
    _switch("enable_hisparse", _OTHER_POOL),
    _switch("enable_kv_cache_sharding", _OTHER_POOL),
    _switch("prefill_only_disable_kv_cache", _OTHER_POOL),
    _switch("enable_memory_saver", "it unmaps the pool's memory behind the page table"),
    Row(
        "kv_cache_dtype",
        lambda value: value not in ("auto", "bf16", "bfloat16"),
        "only rows in the model's own precision can be moved between the tiers",
        "use --kv-cache-dtype auto",
    ),
    # Other ways to schedule and decode.
    _only("speculative_algorithm", None, "its verify step moves rows inside the pool"),
    _only("decoupled_spec_role", "null", "its verify step moves rows inside the pool"),
    _only("disaggregation_mode", "null", "it sends device rows, and rows may be away"),
    _switch("enable_pd_role_switch", "it sends device rows, and rows may be away"),
    _switch("enable_pdmux", "two forwards at once would share one window"),
    _switch("enable_two_batch_overlap", "two forwards at once would share one window"),
    _only(
        "dllm_algorithm", None, "its decoding rewrites rows that were written before"
    ),
    _only("kv_canary", "none", "it checks the pool by ids that were not translated"),
    _switch("encoder_only", "an encoder server has no KV cache"),
    _switch("use_ray", "Ray's workers do not inherit the SGLANG_TIERED_* settings"),
    # More than one rank.
    _size("tp_size", _RANKS),
    _size("pp_size", _RANKS),
    _size("dp_size", _RANKS),
    _size("attn_dp_size", _RANKS),
    _size("dcp_size", _CONTEXT),
    _size("attn_cp_size", _CONTEXT),
    _switch("enable_prefill_cp", _CONTEXT),
    # Kernels that do not call the pool's accessors.
    _switch("enable_torch_compile", "a compiled forward does not wait for host rows"),
    _switch("enable_nvidia_megakernel", _KERNEL),
    _switch("enable_amd_monokernel", _KERNEL),
    Row(
        "device",
        lambda value: value not in (None, *ATTENTION_BACKENDS),
        "there is no tiered pool for this device",
        "use --device cuda or --device cpu",
    ),
)

_TRUE = frozenset({"true", "1", "yes", "y"})

# Switches that exist only as environment variables: name -> (refused, why).
ENVIRONMENT_ROWS: dict[str, tuple[Callable[[str], bool], str]] = {
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": (
        lambda value: value.lower() in _TRUE,
        "it sizes the KV pool after the tiers have been laid out",
    ),
    "SGLANG_USE_HND_KVCACHE": (
        lambda value: value.lower() in _TRUE,
        "in the HND layout a token's row is not one piece of memory",
    ),
    "SGLANG_RUST_SERVER": (
        lambda value: value.lower() in _TRUE,
        "it cannot carry what becomes of a request's rows",
    ),
    "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": (
        lambda value: True,
        "it allocates the KV pool's memory elsewhere",
    ),
}


def check_server_args(
    cfg: Any, environ: Mapping[str, str], *, resolved: bool = True
) -> None:
    """Raise Refusal if the server arguments do not fit the tiered pool.

    cfg: a view with SGLang's argument names as attributes, ``resolving_view(args)``.
    environ: the process environment, after resolution (models may set variables).
    resolved: False leaves out what SGLang itself decides unless told: attention
    backends and graphs.
    """
    problems = [*_argument_problems(cfg), *_environment_problems(environ)]
    if resolved:
        problems += [*_backend_problems(cfg), *_graph_problems(cfg)]
    _refuse(*problems)


def _argument_problems(cfg: Any) -> Iterable[str]:
    for row in SERVER_ARG_ROWS:
        value = getattr(cfg, row.field)
        if row.refused(value):
            yield row.message(value)


def _backend_problems(cfg: Any) -> Iterable[str]:
    supported = ATTENTION_BACKENDS.get(cfg.device)
    if supported is None:  # refused by its own row
        return
    fix = f"use --attention-backend {supported[0]}"
    if cfg.device == "cpu":
        fix += " (registered only where no accelerator is visible)"
    for phase in ("prefill", "decode"):
        field = f"{phase}_attention_backend"
        if getattr(cfg, field) is None:
            field = "attention_backend"
        value = getattr(cfg, field)
        if value not in supported:
            yield Row(
                field,
                bool,
                f"this backend does not read the KV pool through the page table on "
                f"{cfg.device} (known: {', '.join(supported)})",
                fix,
            ).message(value)
            return


def _graph_problems(cfg: Any) -> Iterable[str]:
    graphs = cfg.cuda_graph_config
    # A breakable prefill graph runs attention eagerly, so it asks for each layer.
    if graphs.prefill.backend == "full":
        yield (
            "--cuda-graph-backend-prefill full: a replayed graph waits once for all "
            "layers, and the window holds two; fix: use "
            "--cuda-graph-backend-prefill breakable"
        )
    if graphs.decode.backend != "disabled":
        yield (
            f"--cuda-graph-backend-decode {graphs.decode.backend}: a replayed graph "
            f"does not fill the window in this version; fix: use "
            f"--cuda-graph-backend-decode disabled"
        )


def _environment_problems(environ: Mapping[str, str]) -> Iterable[str]:
    for name, (refused, why) in ENVIRONMENT_ROWS.items():
        value = environ.get(name)
        if value is not None and refused(value):
            yield f"{name}={value}: {why}; fix: unset {name}"


def check_model(model_config: Any, attention_backends: Iterable[str]) -> None:
    """Raise Refusal if the model's KV cache does not fit the tiered pool.

    model_config: SGLang's ModelConfig.
    attention_backends: the resolved prefill and decode backends.
    """
    name = (model_config.hf_config.architectures or ["this model"])[0]
    problems = [
        f"--model-path ({name}): {why}; fix: {fix}"
        for refused, why, fix in _MODEL_ROWS
        if refused(model_config)
    ]
    if model_config.is_local_attention_model and "fa3" in attention_backends:
        problems.append(
            f"--attention-backend fa3: its local attention ({name}) cuts the page "
            f"table by untranslated ids; fix: use --attention-backend triton"
        )
    _refuse(*problems)


_OTHER_MODEL = "serve this model without the tiered cache"


def _is_mla(model_config: Any) -> bool:
    return model_config.attention_arch.name == "MLA"


def _has_recurrent_state(model_config: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return (
        model_config.attention_arch.name == "SSM"
        or mambaish_config(model_config) is not None
    )


def _has_sparse_index(model_config: Any) -> bool:
    from sglang.srt.configs.model_config import is_minimax_sparse

    return is_minimax_sparse(model_config.hf_config)


_MODEL_ROWS: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (_is_mla, "latent (MLA) rows are not supported yet", _OTHER_MODEL),
    (
        lambda config: config.is_hybrid_swa,
        "sliding-window layers have a KV pool of their own",
        _OTHER_MODEL,
    ),
    (
        _has_recurrent_state,
        "recurrent (Mamba, linear attention) state cannot be tiered",
        _OTHER_MODEL,
    ),
    (
        lambda config: config.is_encoder_decoder,
        "encoder-decoder models keep encoder rows outside the page table",
        _OTHER_MODEL,
    ),
    (
        _has_sparse_index,
        "its index rows live beside the KV rows and would stay behind",
        _OTHER_MODEL,
    ),
    (
        lambda config: bool(getattr(config.hf_text_config, "num_kv_shared_layers", 0)),
        "late layers read an early layer's rows, after the window has moved on",
        _OTHER_MODEL,
    ),
)


def check_pool(
    pool_class: type, *, dtype: Any, quantized: bool, post_capture: bool
) -> None:
    """Raise Refusal if SGLang is about to build a KV pool that cannot be tiered.

    pool_class: the class SGLang chose; only the plain MHA pool can be replaced.
    dtype: the pool's torch dtype (a checkpoint may ask for fp8 by itself).
    quantized: whether a quantisation method owns the rows.
    post_capture: whether the pool is sized after graph capture.
    """
    problems = []
    if pool_class.__name__ != "MHATokenToKVPool":
        problems.append(
            f"KV pool {pool_class.__name__}: only MHATokenToKVPool can be tiered; "
            f"fix: {_OTHER_MODEL}"
        )
    if str(dtype) not in ("torch.float32", "torch.float16", "torch.bfloat16"):
        problems.append(
            f"KV rows of {dtype}: only float32, float16 and bfloat16 rows can be "
            f"tiered; fix: use --kv-cache-dtype bfloat16"
        )
    elif quantized:
        problems.append(
            "quantized KV rows: their scales would stay behind; "
            "fix: use --kv-cache-dtype bfloat16"
        )
    if post_capture:
        _, why = ENVIRONMENT_ROWS["SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"]
        problems.append(
            f"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: {why}; fix: set it to 0"
        )
    _refuse(*problems)


def _refuse(*problems: str) -> None:
    if problems:
        raise Refusal("\n".join(problems))
