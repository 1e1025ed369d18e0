"""A request's own policy: ``sampling_params.custom_params["tiered"]``.

    {"custom_params": {"tiered": {"policy": "h2o", "budget": 0.5}}}

``policy`` names it and the other keys are its settings; without a name it is the
server's policy, with the server's settings where the request names none. A request may
always ask for an exact policy; one that compresses or drops rows must stay within
``--tiered-request-compress`` and ``--tiered-request-evict``. A bad value is a
ValueError where SGLang checks sampling parameters, which it answers with a 400.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
from sglang.srt.runtime_context import get_memory

from sglang_tiered.config import RADIX_CACHE_BACKEND, SHARE_ROUNDING, TieredConfig
from sglang_tiered.policy.base import Policy
from sglang_tiered.policy.recency import Recency
from sglang_tiered.policy.registry import make_policy

KEY = "tiered"


def verify_hook(
    original: Callable[..., None], sampling_params: Any, *args: Any, **kwargs: Any
) -> None:
    """AROUND ``SamplingParams.verify``: refuse a policy that cannot be had."""
    original(sampling_params, *args, **kwargs)
    if get_memory().radix_cache_backend == RADIX_CACHE_BACKEND:
        policy_asked_for(sampling_params.custom_params, _config())


@cache
def _config() -> TieredConfig:
    return TieredConfig.from_env(os.environ)


def policy_asked_for(
    custom_params: Mapping[str, Any] | None, config: TieredConfig
) -> Policy | None:
    """The policy that a request asks for, None if it asks for nothing. Raises
    ValueError, in one line for the client."""
    if custom_params is not None and not isinstance(custom_params, Mapping):
        raise ValueError("custom_params: must be an object")
    asked = (custom_params or {}).get(KEY)
    if asked is None:
        return None
    if not isinstance(asked, Mapping):
        raise ValueError(f'{KEY}: must be an object like {{"policy": "hierarchy"}}')
    settings = {key: value for key, value in asked.items() if key != "policy"}
    name = asked.get("policy")
    if name is None:
        name = config.policy
        settings = dataclasses.asdict(config.make_policy()) | settings  # type: ignore[call-overload]
    try:
        policy = make_policy(name, settings)
    except ValueError as error:
        raise ValueError(f"{KEY}: {error}") from None
    for share, most, flag in (
        (policy.compress_share, config.most_compress, "--tiered-request-compress"),
        (policy.evict_share, config.most_evict, "--tiered-request-evict"),
    ):
        if share > most + SHARE_ROUNDING:
            raise ValueError(
                f"{KEY}: policy {name} with these settings asks for a share of "
                f"{share:g}; this server allows {most:g} ({flag})"
            )
    if policy.reads_scores and not config.feeds_scores:
        raise ValueError(
            f"{KEY}: policy {name} needs attention scores, which --tiered-policy "
            f"{config.policy} does not keep; start the server with another policy"
        )
    return policy


def policy_of(req: Any, default: Policy) -> Policy | None:
    """The policy of ``req`` if it is not the server's. The rows of a streaming session
    outlive the request, so they stay exact."""
    asked = policy_asked_for(req.sampling_params.custom_params, _config())
    policy = default if asked is None else asked
    if req.session is not None and req.session.streaming and policy.is_lossy:
        return Recency(hbm_ratio=policy.hbm_ratio)
    return asked


def seed_of(req: Any) -> int:
    """The same for the same request on every server, and for all its samples."""
    seed = req.sampling_params.sampling_seed
    if seed is not None:
        return int(seed)
    return zlib.crc32(np.asarray(req.origin_input_ids, dtype=np.int64).tobytes())
