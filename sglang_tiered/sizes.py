"""Sizes in pages: what the settings, the model and the machine come to.

Contract: sizes that cannot work together raise ``ConfigError``, one line as in
``flags.py``; what is rounded down is said by ``rounding_notes``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_tiered.config import TieredConfig
from sglang_tiered.flags import FLAG_OF, ConfigError

_GIB = 1 << 30
# Without --tiered-host-gb: this many times T0, and at most this share of free memory.
_DEFAULT_HOST_TO_T0 = 4
_DEFAULT_HOST_FREE_SHARE = 0.5
# Without --tiered-window-tokens: the window has T0's rows x layers / 16 rows. There
# are two windows, so they take an eighth of the device bytes of T0.
_DEFAULT_WINDOW_DIVISOR = 16
# The least T0: the protected rows of one request, its open page and one to write.
_SPARE_T0_PAGES = 2


@dataclass(frozen=True)
class Sizes:
    """Capacities in pages: T0 on the device, one window, T1 and T2 on the host."""

    t0_pages: int
    window_pages: int
    host_pages: int
    int8_pages: int

    @property
    def virtual_pages(self) -> int:
        """V: the pages SGLang may hand out. The window holds copies, not more rows."""
        return self.t0_pages + self.host_pages + self.int8_pages


def resolve_sizes(
    config: TieredConfig,
    t0_tokens: int,
    page_size: int,
    num_layers: int,
    bytes_per_token: int,
    int8_bytes_per_token: int,
    free_host_bytes: int,
) -> Sizes:
    """Turn the settings into pages.

    t0_tokens: device rows, from ``--max-total-tokens`` or ``--mem-fraction-static``.
    bytes_per_token: bytes of one token over all layers and buffers.
    int8_bytes_per_token: the same of a token in T2, scales included.
    free_host_bytes: host memory this rank may use; only the default of host_gb reads
    it, an explicit size is checked where the pool is allocated.

    Token counts are rounded down to whole pages; ``rounding_notes`` says so in words.
    Raises ConfigError when the sizes cannot work together.
    """
    host, window = FLAG_OF["host_gb"], FLAG_OF["window_tokens"]
    layers = FLAG_OF["score_layers"]
    if config.score_layers > num_layers:
        raise ConfigError(
            f"{layers.cli} {config.score_layers}: the model has {num_layers} layers; "
            f"fix: lower it, for example {layers.cli} 1"
        )
    t0_pages = t0_tokens // page_size
    _check_t0(config, t0_tokens, t0_pages, page_size)

    page_bytes = page_size * bytes_per_token
    if config.host_gb is None:
        left = max(0.0, free_host_bytes - config.int8_gb * _GIB)
        host_bytes = int(left * _DEFAULT_HOST_FREE_SHARE)
        host_pages = min(_DEFAULT_HOST_TO_T0 * t0_pages, host_bytes // page_bytes)
    else:
        host_pages = int(config.host_gb * _GIB) // page_bytes
    if host_pages < 1:
        given = "(default)" if config.host_gb is None else f"{config.host_gb:g}"
        raise ConfigError(
            f"{host.cli} {given}: holds no page of {page_bytes} bytes "
            f"({page_size} tokens, {num_layers} layers); fix: give at least "
            f"{host.cli} {_round_up_gib(page_bytes):g}"
        )

    int8 = FLAG_OF["int8_gb"]
    int8_page_bytes = page_size * int8_bytes_per_token
    int8_pages = int(config.int8_gb * _GIB) // int8_page_bytes
    if config.int8_gb > 0 and int8_pages < 1:
        raise ConfigError(
            f"{int8.cli} {config.int8_gb:g}: holds no page of {int8_page_bytes} bytes; "
            f"fix: give at least {int8.cli} {_round_up_gib(int8_page_bytes):g}"
        )

    if config.window_tokens is None:
        rows = t0_tokens * num_layers // _DEFAULT_WINDOW_DIVISOR
        window_pages = max(1, min(host_pages, rows // page_size))
    else:
        window_pages = config.window_tokens // page_size
    if window_pages < 1:
        raise ConfigError(
            f"{window.cli} {config.window_tokens}: smaller than one page of "
            f"{page_size} tokens; fix: give at least {window.cli} {page_size}"
        )
    if window_pages > host_pages:
        needed = _round_up_gib(window_pages * page_bytes)
        raise ConfigError(
            f"{window.cli} {config.window_tokens}: larger than the host tier of "
            f"{host_pages * page_size} tokens, so part of it could never be used; "
            f"fix: lower {window.cli}, or raise {host.cli} to {needed:g}"
        )
    return Sizes(t0_pages, window_pages, host_pages, int8_pages)


def rounding_notes(config: TieredConfig, t0_tokens: int, page_size: int) -> list[str]:
    """One line for each size that ``resolve_sizes`` rounds down to whole pages."""
    sizes = (
        ("T0 (--max-total-tokens)", t0_tokens),
        (FLAG_OF["window_tokens"].cli, config.window_tokens),
    )
    return [
        f"{name}: {tokens} tokens rounded down to {tokens // page_size * page_size}, "
        f"whole pages of {page_size}"
        for name, tokens in sizes
        if tokens is not None and tokens % page_size
    ]


def _check_t0(
    config: TieredConfig, t0_tokens: int, t0_pages: int, page_size: int
) -> None:
    recent = FLAG_OF["recent_window"]
    least = (
        math.ceil(config.recent_window / page_size)
        + math.ceil(config.sink_tokens / page_size)
        + _SPARE_T0_PAGES
    )
    if t0_pages < least:
        raise ConfigError(
            f"--max-total-tokens {t0_tokens}: T0 must hold the protected rows of one "
            f"request ({recent.cli} {config.recent_window}, sink tokens "
            f"{config.sink_tokens}) and {_SPARE_T0_PAGES} pages of {page_size}; "
            f"fix: raise --max-total-tokens to {least * page_size}, or lower "
            f"{recent.cli}"
        )


def _round_up_gib(nbytes: int) -> float:
    """GiB with three digits, rounded up so that typing it back is enough."""
    return math.ceil(nbytes / _GIB * 1000) / 1000
