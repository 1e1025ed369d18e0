"""The names of the policies, and how one is made from a user's settings.

Another package adds a policy through an entry point of the group
``sglang_tiered.policies``: its name is the policy's, its object the class.
"""

from __future__ import annotations

import dataclasses
import inspect
import reprlib
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import TypeGuard

from sglang_tiered.policy.base import Policy, check_share
from sglang_tiered.policy.full import Full
from sglang_tiered.policy.h2o import H2O
from sglang_tiered.policy.hierarchy import Hierarchy
from sglang_tiered.policy.random import Random
from sglang_tiered.policy.recency import Recency
from sglang_tiered.policy.rkv import RKV
from sglang_tiered.policy.streaming import Streaming

ENTRY_POINTS = "sglang_tiered.policies"

POLICIES: dict[str, type[Policy]] = {
    "full": Full,
    "h2o": H2O,
    "hierarchy": Hierarchy,
    "random": Random,
    "recency": Recency,
    "rkv": RKV,
    "streaming": Streaming,
}


def policy_names() -> tuple[str, ...]:
    """All names, sorted. Raises ValueError if another package's policy is unusable."""
    return tuple(sorted(_all_policies()))


def make_policy(name: str, settings: Mapping[str, object]) -> Policy:
    """The policy of that name with these settings.

    Raises ValueError with one line: an unknown name, an unknown or a missing setting,
    or a value that is not allowed.
    """
    if name not in policy_names():
        raise ValueError(
            f"policy {reprlib.repr(name)}: no such policy; "
            f"fix: use one of {', '.join(policy_names())}"
        )
    policy = _all_policies()[name]
    fields = {
        field.name: field
        for field in dataclasses.fields(policy)  # type: ignore[arg-type]
        if field.init
    }
    allowed = f"use {', '.join(fields)}" if fields else "give it no settings"
    for setting in settings:
        if setting not in fields:
            raise ValueError(
                f"policy {name}: no such setting {reprlib.repr(setting)}; "
                f"fix: {allowed}"
            )
    for setting, field in fields.items():
        if setting not in settings and _required(field):
            raise ValueError(
                f"policy {name}: the setting {setting} is missing; fix: give it a value"
            )
    try:
        made = policy(**settings)
    except ValueError:
        raise
    except Exception as error:  # of another package, whose checks we do not know
        what = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise ValueError(
            f"policy {name}: cannot be made ({what}); fix: check its settings"
        ) from error
    # The plan rule computes with these, far from whoever gave them.
    if made.hbm_ratio is not None:
        check_share("hbm_ratio", made.hbm_ratio)
    check_share("evict_share", made.evict_share)
    check_share("compress_share", made.compress_share)
    return made


def _required(field: dataclasses.Field[object]) -> bool:
    none = dataclasses.MISSING
    return field.default is none and field.default_factory is none


@cache
def _all_policies() -> Mapping[str, type[Policy]]:
    """The policies of this package and of others, which are loaded once."""
    policies = dict(POLICIES)
    for entry in metadata.entry_points(group=ENTRY_POINTS):
        if entry.name in policies:
            raise _unusable(entry, "the name is taken", "choose another name")
        policies[entry.name] = _load(entry)
    return policies


def _load(entry: metadata.EntryPoint) -> type[Policy]:
    try:
        policy = entry.load()
    except Exception as error:
        what = f"cannot be loaded ({type(error).__name__}: {error})".replace("\n", " ")
        raise _unusable(entry, what, "repair or uninstall its package") from error
    if not _is_policy(policy):
        fix = f"make it a dataclass on {Policy.__module__}.{Policy.__name__}"
        raise _unusable(entry, "is no policy", fix)
    if getattr(policy, "name", None) != entry.name:
        fix = f"set its name to {entry.name!r}"
        raise _unusable(entry, "calls itself by another name", fix)
    return policy


def _is_policy(loaded: object) -> TypeGuard[type[Policy]]:
    return (
        isinstance(loaded, type)
        and issubclass(loaded, Policy)
        and not inspect.isabstract(loaded)
        and dataclasses.is_dataclass(loaded)
    )


def _unusable(entry: metadata.EntryPoint, what: str, fix: str) -> ValueError:
    return ValueError(
        f"policy {entry.name} ({entry.value}, entry point of {ENTRY_POINTS}): "
        f"{what}; fix: {fix}"
    )
