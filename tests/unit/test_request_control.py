"""What a request may ask for itself, and what it inherits."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sglang_tiered.config import TieredConfig
from sglang_tiered.policy import registry
from sglang_tiered.policy.base import Candidates, Policy
from sglang_tiered.policy.hierarchy import Hierarchy
from sglang_tiered.policy.random import Random
from sglang_tiered.sglang.request_control import policy_asked_for


@dataclass(frozen=True)
class Odd(Policy):
    """A policy of another package, which checks nothing."""

    name = "odd"
    keep: Any = 0.5

    @property
    def hbm_ratio(self) -> Any:
        return self.keep

    def value(self, candidates: Candidates) -> np.ndarray:
        return candidates.index


@dataclass(frozen=True)
class Broken(Odd):
    """One that fails on what it does not expect."""

    name = "broken"

    def __post_init__(self) -> None:
        _ = self.keep + 1


@pytest.fixture(autouse=True)
def _others(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = {**registry.POLICIES, "odd": Odd, "broken": Broken}
    monkeypatch.setattr(registry, "_all_policies", lambda: everything)


def asked(wish: Any, **server: Any) -> Policy | None:
    return policy_asked_for({"tiered": wish}, TieredConfig(**server))


def test_without_a_name_it_is_the_server_s_policy_with_its_settings() -> None:
    server = {"policy": "random", "budget": 0.5}
    assert asked({}, **server) == Random(budget=0.5)


def test_a_wish_changes_only_what_it_names() -> None:
    server = {"evict_ratio": 0.1, "value_guard": "off"}
    wish = {"hbm_ratio": 0.3}
    right = Hierarchy(hbm_ratio=0.3, evict_ratio=0.1, value_guard=False)
    assert asked(wish, **server) == right


def test_a_policy_asked_for_by_name_has_its_own_defaults() -> None:
    server = {"evict_ratio": 0.1, "value_guard": "off"}
    assert asked({"policy": "hierarchy"}, **server) == Hierarchy()


@pytest.mark.parametrize("share", ["abc", 2, float("nan")])
def test_a_share_that_another_package_lets_through_is_refused(share: Any) -> None:
    with pytest.raises(ValueError, match=r"hbm_ratio .*: must be between 0 and 1"):
        asked({"policy": "odd", "keep": share})


def test_another_package_s_exception_is_a_refusal() -> None:
    with pytest.raises(ValueError, match=r"policy broken: cannot be made \(TypeError"):
        asked({"policy": "broken", "keep": "abc"})
