"""What the evicting baselines share: a budget, and the same guard for all."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_tiered.policy.base import Policy, check_share, check_switch


@dataclass(frozen=True, kw_only=True)
class EvictingPolicy(Policy):
    """Keeps a share of a request's candidates and drops the rest at every re-tier.

    budget: the share that may stay, above 0. The others go to T3.
    value_guard: see ``Policy``; off for the published form of a baseline.
    """

    budget: float
    value_guard: bool = True

    def __post_init__(self) -> None:
        check_share("budget", self.budget, above_zero=True)
        check_switch("value_guard", self.value_guard)

    @property
    def evict_share(self) -> float:
        return 1.0 - self.budget
