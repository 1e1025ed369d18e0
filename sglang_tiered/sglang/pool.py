"""The KV pool: SGLang's MHA pool over buffers of ``[sink | T0 | window]`` rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.memory_pool import KvBufferDesc, MHATokenToKVPool

from sglang_tiered.memory.backing import make_backing
from sglang_tiered.memory.host_pool import HostPool
from sglang_tiered.memory.int8_pool import Int8Pool
from sglang_tiered.sglang import deployment, refusals
from sglang_tiered.transfer.engine import TransferEngine
from sglang_tiered.transfer.streams import InlineStream, ThreadStream


class TieredKVPool(MHATokenToKVPool):
    """``size`` is V; the buffers hold T0 and the window.

    ``get_key_buffer``/``get_value_buffer`` wait, through SGLang's own
    ``layer_transfer_counter``, until the layer's window has been filled.
    """

    def _create_buffers_normal(self) -> None:
        parts = deployment.current()
        parts.backing = make_backing(parts.layout, self.device)
        parts.host = HostPool(parts.layout, device=self.device)
        if parts.int8_pages:
            parts.int8 = Int8Pool(parts.layout, parts.int8_pages, self.device)
        parts.engine = TransferEngine(
            parts.backing,
            parts.host,
            int8=parts.int8,
            schedule=InlineStream(),
            fill=ThreadStream("sglang-tiered-fill"),
        )
        parts.engine.skip_fill = "skip-fill" in parts.config.test_switches
        self.tiered_parts = parts
        layers = range(self.layer_num)
        self.k_buffer = [parts.backing.buffer(layer, "k") for layer in layers]
        self.v_buffer = [parts.backing.buffer(layer, "v") for layer in layers]
        self.register_layer_transfer_counter(parts.engine)

    def _build_kv_buffer_descs(self) -> list[KvBufferDesc]:
        # The stock check wants V rows; ours hold T0 and the window.
        return [
            KvBufferDesc(
                f"{name}{layer}",
                tuple(buffer.shape),
                row_bytes=buffer.stride(0) * buffer.itemsize,
                tokens_per_row=1,
            )
            for name, buffers in (("k", self.k_buffer), ("v", self.v_buffer))
            for layer, buffer in enumerate(buffers)
        ]

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """(K, V) bytes of device memory; the window counts once per parity."""
        backing = self.tiered_parts.backing
        assert backing is not None
        k = sum(b.nbytes for b in self.k_buffer)
        v = sum(b.nbytes for b in self.v_buffer)
        mapped = backing.mapped_bytes()
        return mapped * k // (k + v), mapped - mapped * k // (k + v)


def build_mha_kv_pool_hook(
    original: Callable[..., Any], configurator: Any, **kwargs: Any
) -> Any:
    """AROUND ``KVCacheConfigurator._build_mha_kv_pool``: build our pool class."""
    if deployment.is_enabled():
        refusals.check_pool(
            kwargs["mha_pool_class"],
            dtype=configurator.kv_cache_dtype,
            quantized=kwargs.get("quant_method") is not None,
            post_capture=configurator.post_capture_kv_active,
        )
        kwargs["mha_pool_class"] = TieredKVPool
    return original(configurator, **kwargs)
