"""The settings of the tiered pool: one table of flags, and sizes in pages.

``FLAGS`` is the only list of settings. The command line (``--tiered-*``), the
environment (``SGLANG_TIERED_*``), help texts, parsing and range checks all come from
it. The environment is the one way a setting travels: command-line flags are written
there, so that child processes and ``sglang.Engine`` read what the launcher read.

Contract: a value that is not usable raises ``ConfigError`` with one line naming the
flag, the value, what is wrong and what to do. Nothing is clipped silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_tiered.policy.base import Policy, Statistic
from sglang_tiered.policy.registry import make_policy, policy_names

# The value of SGLang's --radix-cache-backend that switches everything here on.
RADIX_CACHE_BACKEND = "tiered"

ENV_PREFIX = "SGLANG_TIERED_"
TEST_ENV = ENV_PREFIX + "TEST"
TEST_SWITCHES = frozenset({"poison", "skip-fill", "audit"})

_GIB = 1 << 30
# 1 - 0.7 is more than 0.3 in binary; a user means the same.
SHARE_ROUNDING = 1e-9
# Without --tiered-host-gb: this many times T0, and at most this share of free memory.
_DEFAULT_HOST_TO_T0 = 4
_DEFAULT_HOST_FREE_SHARE = 0.5
# Without --tiered-window-tokens: the window has T0's rows x layers / 16 rows. There
# are two windows, so they take an eighth of the device bytes of T0.
_DEFAULT_WINDOW_DIVISOR = 16
# Far above any real pool; keeps byte counts within what a float can hold.
_MOST_COUNT = 10**12
# The least T0: the protected rows of one request, its open page and one to write.
_SPARE_T0_PAGES = 2


class ConfigError(ValueError):
    """A setting that cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class Flag:
    """One setting: its names, its type, its range and its help text.

    ``minimum`` and ``maximum`` are inclusive unless ``above_minimum`` is set.
    ``choices`` makes it a word out of a list.
    """

    field: str
    kind: type
    metavar: str
    help: str
    example: str
    minimum: float | None = None
    above_minimum: bool = False
    maximum: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def cli(self) -> str:
        return "--tiered-" + self.field.replace("_", "-")

    @property
    def dest(self) -> str:
        """The attribute argparse stores the flag under."""
        return "tiered_" + self.field

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.field.upper()

    @property
    def _range(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        number = "a whole number" if self.kind is int else "a finite number"
        if self.minimum is None:
            return number
        low = "greater than" if self.above_minimum else "at least"
        text = f"{number}, {low} {self.minimum:g}"
        return text if self.maximum is None else f"{text}, at most {self.maximum:g}"

    def parse(self, text: str) -> Any:
        """The value of ``text`` as typed by a user. Raises ConfigError."""
        try:
            value = self.kind(text.strip())
        except ValueError:
            raise self.error(text) from None
        if not self._accepts(value):
            raise self.error(text)
        return value

    def check(self, value: object) -> None:
        """Raises ConfigError unless ``value`` has the right type and range."""
        if not self._accepts(value):
            raise self.error(value)

    def _accepts(self, value: object) -> bool:
        if self.choices:
            return value in self.choices
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if self.kind is int and not isinstance(value, int):
            return False
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.maximum is None else self.maximum
        if self.above_minimum and value == low:
            return False
        return low <= value <= high and math.isfinite(value)

    def error(self, value: object) -> ConfigError:
        return ConfigError(
            f"{self.cli} {value}: must be {self._range}; "
            f"fix: for example {self.cli} {self.example}"
        )


FLAGS: tuple[Flag, ...] = (
    Flag(
        field="host_gb",
        kind=float,
        metavar="GIB",
        help=(
            "Host memory for tier T1, in GiB per rank: KV rows that do not fit on the "
            "device wait there, in full precision. Default: 4 times the bytes of T0, "
            "at most half of the memory that is free at start."
        ),
        example="8",
        minimum=0,
        above_minimum=True,
        maximum=1e6,
    ),
    Flag(
        field="window_tokens",
        kind=int,
        metavar="TOKENS",
        help=(
            "Rows of the window, through which the host rows of running requests pass "
            "on their way to attention. One request can be as long as T0 plus the "
            "window. Two windows are kept (even and odd layers), so it costs twice "
            "this many rows of one layer. Default: T0 rows x layers / 16, at most the "
            "host rows."
        ),
        example="1024",
        minimum=1,
        maximum=_MOST_COUNT,
    ),
    Flag(
        field="mode",
        kind=str,
        metavar="{pressure,ratio}",
        help=(
            "When rows leave the device. 'pressure' (default): only when T0 is short. "
            "'ratio': a fixed share of every request's older generated rows, see "
            "--tiered-hbm-ratio."
        ),
        example="pressure",
        choices=("pressure", "ratio"),
    ),
    Flag(
        field="hbm_ratio",
        kind=float,
        metavar="SHARE",
        help=(
            "With --tiered-mode ratio: the share of each request's unprotected "
            "generated rows that stays on the device. Default: 0.5."
        ),
        example="0.5",
        minimum=0,
        maximum=1,
    ),
    Flag(
        field="policy",
        kind=str,
        metavar="NAME",
        help=(
            "Which rows go first. 'hierarchy' (default): those that attention has "
            "looked at least; exact unless told otherwise. 'recency': the oldest. "
            "'full': nothing moves by itself. 'random', 'h2o', 'streaming', 'rkv': "
            "evicting baselines that DROP rows for good, see --tiered-budget."
        ),
        example="hierarchy",
        choices=policy_names(),
    ),
    Flag(
        field="compress_ratio",
        kind=float,
        metavar="SHARE",
        help=(
            "With policy hierarchy, LOSSY: the share of each request's unprotected "
            "generated rows that may be rounded to int8 in host memory, the least "
            "looked at first. Needs --tiered-int8-gb. Default: 0."
        ),
        example="0.2",
        minimum=0,
        maximum=1,
    ),
    Flag(
        field="evict_ratio",
        kind=float,
        metavar="SHARE",
        help=(
            "With policy hierarchy, LOSSY: the share of each request's unprotected "
            "generated rows that may be dropped for good, ever. Default: 0."
        ),
        example="0.03",
        minimum=0,
        maximum=1,
    ),
    Flag(
        field="evict_schedule",
        kind=str,
        metavar="{cumulative,per_interval}",
        help=(
            "How --tiered-evict-ratio counts. 'cumulative': of all rows of the "
            "request. 'per_interval': of the rows that are left, again every "
            "--tiered-retier-interval steps, as in the paper: it compounds. "
            "Default: cumulative."
        ),
        example="cumulative",
        choices=("cumulative", "per_interval"),
    ),
    Flag(
        field="value_guard",
        kind=str,
        metavar="{on,off}",
        help=(
            "Rows whose value vectors are unusually large are dropped only when no "
            "other is left. Default: on."
        ),
        example="on",
        choices=("on", "off"),
    ),
    Flag(
        field="budget",
        kind=float,
        metavar="SHARE",
        help=(
            "With an evicting policy: the share of each request's unprotected "
            "generated rows that may stay; the others are dropped for good. "
            "Default: none, such a policy must be given one."
        ),
        example="0.5",
        minimum=0,
        maximum=1,
    ),
    Flag(
        field="int8_gb",
        kind=float,
        metavar="GIB",
        help=(
            "Host memory for tier T2, int8 rows with their scales, in GiB per rank. "
            "Default: 0. That is: no such tier."
        ),
        example="4",
        minimum=0,
        maximum=1e6,
    ),
    Flag(
        field="request_compress",
        kind=float,
        metavar="SHARE",
        help=(
            "The largest share that a request may ask to compress for itself, with "
            'custom_params {"tiered": {...}}. Default: what the server\'s own policy '
            "compresses."
        ),
        example="0.5",
        minimum=0,
        maximum=1,
    ),
    Flag(
        field="request_evict",
        kind=float,
        metavar="SHARE",
        help=(
            "The largest share that a request may ask to drop for itself. Default: "
            "what the server's own policy drops."
        ),
        example="0.9",
        minimum=0,
        maximum=1,
    ),
    Flag(
        field="score_layers",
        kind=int,
        metavar="N",
        help="Attention scores are taken from every N-th layer. Default: 1.",
        example="4",
        minimum=1,
        maximum=_MOST_COUNT,
    ),
    Flag(
        field="score_interval",
        kind=int,
        metavar="N",
        help="Attention scores are taken in every N-th step. Default: 1.",
        example="4",
        minimum=1,
        maximum=_MOST_COUNT,
    ),
    Flag(
        field="sink_tokens",
        kind=int,
        metavar="TOKENS",
        help=(
            "The first generated tokens of each request: like its prompt, they leave "
            "the device only after everything unprotected has. Default: 4."
        ),
        example="4",
        minimum=0,
        maximum=_MOST_COUNT,
    ),
    Flag(
        field="recent_window",
        kind=int,
        metavar="TOKENS",
        help=(
            "The newest rows of each request, which leave the device last of all. "
            "Default: 128."
        ),
        example="128",
        minimum=1,
        maximum=_MOST_COUNT,
    ),
    Flag(
        field="retier_interval",
        kind=int,
        metavar="STEPS",
        help=(
            "Decode steps of a request between two looks at which of its rows belong "
            "on the device. Default: 64."
        ),
        example="64",
        minimum=1,
        maximum=_MOST_COUNT,
    ),
)

_FLAG_OF = {flag.field: flag for flag in FLAGS}


@dataclass(frozen=True)
class TieredConfig:
    """The settings as the user gave them; None means "derive it at start".

    host_gb: GiB of host memory for T1, per rank.
    window_tokens: rows of the window, in tokens.
    mode: "pressure" or "ratio".
    hbm_ratio: 0..1, used in ratio mode only.
    policy: a name out of ``policy_names()``.
    compress_ratio, evict_ratio, evict_schedule, value_guard, budget: settings of the
        policy, for those that have them.
    int8_gb: GiB of host memory for T2, per rank.
    request_compress, request_evict: the most that a request may ask for itself.
    score_layers, score_interval: every n-th layer, every n-th forward.
    sink_tokens, recent_window: protected rows per request, in tokens.
    retier_interval: decode steps.
    test_switches: names out of TEST_SWITCHES; from the environment only.

    Raises ConfigError when a field is out of its range.
    """

    host_gb: float | None = None
    window_tokens: int | None = None
    mode: str = "pressure"
    hbm_ratio: float = 0.5
    sink_tokens: int = 4
    recent_window: int = 128
    retier_interval: int = 64
    policy: str = "hierarchy"
    compress_ratio: float | None = None
    evict_ratio: float | None = None
    evict_schedule: str | None = None
    value_guard: str | None = None
    budget: float | None = None
    int8_gb: float = 0
    request_compress: float | None = None
    request_evict: float | None = None
    score_layers: int = 1
    score_interval: int = 1
    test_switches: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for flag in FLAGS:
            value = getattr(self, flag.field)
            if value is not None:
                flag.check(value)
        self._check_lossy(self.make_policy())

    def make_policy(self) -> Policy:
        """The server's own policy. Raises ConfigError for a setting that it lacks or
        cannot use."""
        settings: dict[str, Any] = {
            name: value
            for name in ("compress_ratio", "evict_ratio", "evict_schedule", "budget")
            if (value := getattr(self, name)) is not None
        }
        if self.value_guard is not None:
            settings["value_guard"] = self.value_guard == "on"
        if self.mode == "ratio":
            settings["hbm_ratio"] = self.hbm_ratio
        try:
            return make_policy(self.policy, settings)
        except ValueError as error:
            raise ConfigError(f"{_FLAG_OF['policy'].cli}: {error}") from None

    @property
    def most_compress(self) -> float:
        """The largest share of a request's rows that may be compressed."""
        if self.request_compress is not None:
            return self.request_compress
        return self.make_policy().compress_share

    @property
    def most_evict(self) -> float:
        """The largest share of a request's rows that may be dropped."""
        if self.request_evict is not None:
            return self.request_evict
        return self.make_policy().evict_share

    @property
    def feeds_scores(self) -> bool:
        """Attention keeps scores: the policy reads them, or a request's may."""
        lossy = self.most_compress > 0 or self.most_evict > 0
        return lossy or Statistic.SCORE in self.make_policy().needs

    def _check_lossy(self, policy: Policy) -> None:
        int8 = _FLAG_OF["int8_gb"]
        for name, share in (
            ("compress_ratio", policy.compress_share),
            ("request_compress", self.request_compress or 0.0),
        ):
            if share > 0 and self.int8_gb == 0:
                raise ConfigError(
                    f"{_FLAG_OF[name].cli} {share:g}: there is no int8 tier; "
                    f"fix: add {int8.cli} {int8.example}"
                )
        for name, most, least in (
            ("request_compress", self.request_compress, policy.compress_share),
            ("request_evict", self.request_evict, policy.evict_share),
        ):
            if most is not None and most < least - SHARE_ROUNDING:
                raise ConfigError(
                    f"{_FLAG_OF[name].cli} {most:g}: less than what the server's own "
                    f"policy takes ({least:g}); fix: raise it, or leave it out"
                )
        if self.int8_gb > 0 and self.most_compress == 0:
            own, others = _FLAG_OF["compress_ratio"], _FLAG_OF["request_compress"]
            raise ConfigError(
                f"{int8.cli} {self.int8_gb:g}: nothing would use it; "
                f"fix: add {own.cli} or {others.cli}, or drop it"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> TieredConfig:
        """Read every ``SGLANG_TIERED_*`` variable. Raises ConfigError."""
        values: dict[str, Any] = {
            flag.field: flag.parse(environ[flag.env])
            for flag in FLAGS
            if flag.env in environ
        }
        _refuse_unknown_names(environ)
        ratio = _FLAG_OF["hbm_ratio"]
        if ratio.field in values and values.get("mode", cls.mode) != "ratio":
            raise ConfigError(
                f"{ratio.cli} {environ[ratio.env]}: only read in ratio mode; "
                f"fix: add {_FLAG_OF['mode'].cli} ratio, or drop {ratio.cli}"
            )
        return cls(**values, test_switches=_test_switches(environ))


def _refuse_unknown_names(environ: Mapping[str, str]) -> None:
    # A misspelt variable would otherwise be a setting that silently does nothing.
    known = {flag.env for flag in FLAGS} | {TEST_ENV}
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            raise ConfigError(
                f"{name}={environ[name]}: no such setting; "
                f"fix: use one of {', '.join(sorted(known - {TEST_ENV}))}"
            )


def _test_switches(environ: Mapping[str, str]) -> frozenset[str]:
    text = environ.get(TEST_ENV, "")
    switches = frozenset(word.strip() for word in text.split(",") if word.strip())
    if unknown := switches - TEST_SWITCHES:
        raise ConfigError(
            f"{TEST_ENV}={text}: unknown test switch {', '.join(sorted(unknown))}; "
            f"fix: use {', '.join(sorted(TEST_SWITCHES))}"
        )
    return switches


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
    host, window = _FLAG_OF["host_gb"], _FLAG_OF["window_tokens"]
    layers = _FLAG_OF["score_layers"]
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

    int8 = _FLAG_OF["int8_gb"]
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
        (_FLAG_OF["window_tokens"].cli, config.window_tokens),
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
    recent = _FLAG_OF["recent_window"]
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
