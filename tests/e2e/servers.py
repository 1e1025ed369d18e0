"""The servers under test: SGLang's own launchers with every strict check on.

`bench.server.Server` starts and stops them; here are the flags and the environment
of a test, and what a test reads off a running server: its tier counters, the
kernel's count of the device bytes, and its log.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.server import LAUNCH_SERVER, Flags, Metrics, Server

STRICT_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "OMP_NUM_THREADS": "1",
}
# An idle server publishes its counters a moment after its last answer, a busy one every
# few steps.
SETTLE_SECONDS = 30.0
_FAULT = re.compile(r"Traceback|[Ll]eak|invariant|double free|CRITICAL")


@dataclass(frozen=True)
class Tiers:
    """The tiers of one server, in tokens; `switches` are test switches."""

    t0: int
    window: int
    host_gb: float = 0.05
    recent_window: int = 32
    switches: tuple[str, ...] = ("poison", "audit")

    def flags(self, extra: Sequence[str] = ()) -> Flags:
        return Flags(
            self.t0,
            (
                *("--radix-cache-backend", "tiered"),
                *("--tiered-host-gb", str(self.host_gb)),
                *("--tiered-window-tokens", str(self.window)),
                *("--tiered-recent-window", str(self.recent_window)),
                *extra,
            ),
        )

    @property
    def environment(self) -> dict[str, str]:
        return {"SGLANG_TIERED_TEST": ",".join(self.switches)}


class ServerUnderTest(Server):
    """A server with every strict check on; the arguments are `Server`'s."""

    def __init__(
        self,
        model: Path,
        flags: Flags,
        log: Path,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = LAUNCH_SERVER,
    ) -> None:
        checked = {**STRICT_CHECKS, **(environment or {})}
        super().__init__(model, flags, log, checked, launcher)

    def tier(self, name: str, **labels: str) -> float:
        """One of our metrics; `name` without the prefix."""
        return self.metrics().total(f"sglang_tiered:{name}", **labels)

    def settle(self, told: Callable[[Metrics], bool], what: str) -> None:
        """Wait until the server's metrics say `told`; fails with `what`."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while not told(self.metrics()):
            assert self.alive, f"the server died; see {self.log}"
            assert time.monotonic() < deadline, what
            time.sleep(0.1)

    def rest(self) -> None:
        """Wait until the idle server has counted all that its requests did."""
        self.settle(
            lambda metrics: not metrics.total("sglang_tiered:private_tokens"),
            "requests left rows behind",
        )

    def faults(self) -> list[str]:
        """Lines of the log that no healthy server writes."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [
            line[:300]
            for line in lines
            if _FAULT.search(line) and "server_args=" not in line
        ]

    def mapped_bytes(self, name: str) -> int:
        """Device bytes behind the mappings whose memfd name starts with `name`, as
        the kernel counts them (Pss: a page that is mapped twice counts once)."""
        return sum(_mapped_bytes(pid, name) for pid in _group(self.pid))


def _group(leader: int) -> list[int]:
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    group = []
    for pid in pids:
        with suppress(ProcessLookupError):
            if os.getsid(pid) == leader:
                group.append(pid)
    return group


def _mapped_bytes(pid: int, name: str) -> int:
    kib = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = f"/memfd:{name}" in line
        elif inside and line.startswith("Pss:"):
            kib += int(line.split()[1])
    return kib * 1024
