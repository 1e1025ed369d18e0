"""Memory that is not there, and sizes that only a starting server can compare: it says
so in one clear line and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.server import ServerError
from tests.e2e.conftest import TINY
from tests.e2e.servers import ServerUnderTest, Tiers

pytestmark = pytest.mark.server


def last_words(model: Path, log: Path, tiers: Tiers, *extra: str) -> str:
    """The log of a server that must not start."""
    server = ServerUnderTest(model, tiers.flags((*TINY, *extra)), log)
    with pytest.raises(ServerError, match=r"the server ended with code [^0]"), server:
        pass
    return log.read_text(errors="replace")


def test_more_host_memory_than_there_is(tiny_model: Path, tmp_path: Path) -> None:
    """sglang#14282: found before the pool is filled, not when it is."""
    tiers = Tiers(t0=500, window=400, host_gb=100_000)
    log = last_words(tiny_model, tmp_path / "log", tiers)
    assert "Traceback" not in log
    [line] = [line for line in log.splitlines() if "error:" in line]
    assert line.startswith("sglang-tiered: error: --tiered-host-gb:")


def test_a_window_larger_than_the_host_tier(tiny_model: Path, tmp_path: Path) -> None:
    tiers = Tiers(t0=500, window=400, host_gb=0.0001)
    log = last_words(tiny_model, tmp_path / "log", tiers)
    assert "--tiered-window-tokens 400: larger than the host tier" in log
