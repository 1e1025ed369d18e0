"""The table of flags: the only list of settings.

The command line (``--tiered-*``), the environment (``SGLANG_TIERED_*``), help texts,
parsing and range checks all come from ``FLAGS``.

Contract: a value that is not usable raises ``ConfigError`` with one line naming the
flag, the value, what is wrong and what to do. Nothing is clipped silently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sglang_tiered.policy.registry import policy_names

ENV_PREFIX = "SGLANG_TIERED_"

# Far above any real pool; keeps byte counts within what a float can hold.
_MOST_COUNT = 10**12


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
        above_minimum=True,
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

FLAG_OF = {flag.field: flag for flag in FLAGS}
