"""The settings of the tiered pool, as the user gave them.

The environment is the one way a setting travels: command-line flags are written there,
so that child processes and ``sglang.Engine`` read what the launcher read. ``flags.py``
has the table of them, ``sizes.py`` turns them into pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_tiered.flags import ENV_PREFIX, FLAG_OF, FLAGS, ConfigError
from sglang_tiered.policy.base import Policy
from sglang_tiered.policy.registry import make_policy

# The value of SGLang's --radix-cache-backend that switches everything here on.
RADIX_CACHE_BACKEND = "tiered"

TEST_ENV = ENV_PREFIX + "TEST"
TEST_SWITCHES = frozenset({"poison", "skip-fill", "audit"})

# 1 - 0.7 is more than 0.3 in binary; a user means the same.
SHARE_ROUNDING = 1e-9


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
            raise ConfigError(f"{FLAG_OF['policy'].cli}: {error}") from None

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
        return lossy or self.make_policy().reads_scores

    def _check_lossy(self, policy: Policy) -> None:
        int8 = FLAG_OF["int8_gb"]
        for name, share in (
            ("compress_ratio", policy.compress_share),
            ("request_compress", self.request_compress or 0.0),
        ):
            if share > 0 and self.int8_gb == 0:
                raise ConfigError(
                    f"{FLAG_OF[name].cli} {share:g}: there is no int8 tier; "
                    f"fix: add {int8.cli} {int8.example}"
                )
        for name, most, least in (
            ("request_compress", self.request_compress, policy.compress_share),
            ("request_evict", self.request_evict, policy.evict_share),
        ):
            if most is not None and most < least - SHARE_ROUNDING:
                raise ConfigError(
                    f"{FLAG_OF[name].cli} {most:g}: less than what the server's own "
                    f"policy takes ({least:g}); fix: raise it, or leave it out"
                )
        if self.int8_gb > 0 and self.most_compress == 0:
            own, others = FLAG_OF["compress_ratio"], FLAG_OF["request_compress"]
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
        ratio = FLAG_OF["hbm_ratio"]
        if ratio.field in values and values.get("mode", cls.mode) != "ratio":
            raise ConfigError(
                f"{ratio.cli} {environ[ratio.env]}: only read in ratio mode; "
                f"fix: add {FLAG_OF['mode'].cli} ratio, or drop {ratio.cli}"
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
