"""A real SGLang server as a subprocess, and what it says about itself on /metrics.

`Server` starts the stock launcher in a process group of its own, with its output in a
log file, and is ready when the block is entered. It hides GPUs and adds the flags that
SGLang needs on a CPU. `Counters` reads the numbers that the benchmarks
compare; `Sampler` polls /metrics while a block runs.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.workload import RequestError

# A start takes about 30 s on two cores; a large model on a cold disk takes minutes.
START_SECONDS = 600.0
STOP_SECONDS = 20.0
LOG_LINES_SHOWN = 25

# The layers share two windows: over the demo model's 30 layers, this much window adds a
# quarter to the device memory of T0.
WINDOW_PER_T0 = 3.75
# This version serves tiers on CPUs only, and both servers must see the same machine.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

LAUNCH_SERVER = (sys.executable, "-m", "sglang.launch_server")

T = TypeVar("T")


class ServerError(RuntimeError):
    """The server did not start, or died; the message ends with the tail of its log."""


@dataclass(frozen=True)
class Flags:
    """What two servers of one comparison may differ in.

    `t0_tokens` is the size of the device pool in tokens; `extra` are further flags of
    the launcher, such as those that `tiered` returns.
    """

    t0_tokens: int
    extra: tuple[str, ...] = ()


def tiered(t0_tokens: int, recent_window: int, *more: str) -> Flags:
    """The flags of a tiered server, and `more`; the host pool has its default size."""
    extra = (
        *("--radix-cache-backend", "tiered"),
        *("--tiered-window-tokens", str(int(t0_tokens * WINDOW_PER_T0))),
        *("--tiered-recent-window", str(recent_window)),
        *more,
    )
    return Flags(t0_tokens, extra)


def launch_command(
    model: Path, flags: Flags, port: int, launcher: Sequence[str] = LAUNCH_SERVER
) -> list[str]:
    command = [*launcher, "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-total-tokens", str(flags.t0_tokens), "--enable-metrics"]
    command += ["--cuda-graph-backend-decode", "disabled"]
    command += ["--cuda-graph-backend-prefill", "disabled"]
    command += ["--device", "cpu", "--sampling-backend", "pytorch"]
    command += ["--dtype", "float32"]
    return [*command, *flags.extra]


class Server:
    """A running server: `with Server(model, flags, log) as server: ...`.

    `environment` is added to this process's own; `launcher` is the command that the
    flags follow. Attributes: `url`, `log` (the file its output goes to). Entering waits
    until the server answers and raises `ServerError` when it dies or is not up in time;
    leaving ends its whole process group.
    """

    def __init__(
        self,
        model: Path,
        flags: Flags,
        log: Path,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = LAUNCH_SERVER,
    ) -> None:
        self.log = log
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = launch_command(model, flags, port, launcher)
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # More threads than one per process slow each other down on few cores.
        self._environment.setdefault("OMP_NUM_THREADS", "1")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                # A group of its own, so that the server's child processes end with it.
                start_new_session=True,
            )
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        if isinstance(error, RequestError):
            raise ServerError(self._message(str(error))) from error

    @property
    def pid(self) -> int:
        """Of the launcher, which leads the group and the session of its children."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def metrics(self) -> Metrics:
        return Metrics(_get(f"{self.url}/metrics").text)

    def counters(self) -> Counters:
        return Counters.read(self.metrics())

    def flush_cache(self) -> None:
        """Forget every cached prefix, as in a fresh server.

        A server is busy for a moment after its last answer: it is given time to end.
        """
        reply = httpx.post(
            f"{self.url}/flush_cache", params={"timeout": STOP_SECONDS}, timeout=60
        )
        if reply.status_code != 200:
            raise ServerError(self._message(f"cannot flush: {reply.text.strip()}"))

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                what = f"the server ended with code {process.returncode}"
                raise ServerError(self._message(what))
            with suppress(httpx.HTTPError):  # not listening yet, or still loading
                if _get(f"{self.url}/health_generate").status_code == 200:
                    return
            time.sleep(0.25)
        raise ServerError(
            self._message(f"the server is not up in {START_SECONDS:.0f} s")
        )

    def _stop(self) -> None:
        if self._process is None:
            return
        # First the launcher alone: it ends its children in order.
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        # Then what is left of the group, which is nothing after an orderly end.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _message(self, what: str) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        tail = "\n".join(f"  | {line}" for line in lines[-LOG_LINES_SHOWN:])
        return f"{what}; the end of {self.log}:\n{tail}"


class Metrics:
    """One scrape of /metrics."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of that name that carry these labels; 0 without any."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@dataclass(frozen=True)
class Counters:
    """What a server has done since its start; subtract two for what happened between.

    `recomputed_tokens` are the tokens that were prefilled again for requests that had
    been retracted; it counts the one token that SGLang extends by at any resume.
    The last three are 0 on a stock server.
    """

    retractions: float
    recomputed_tokens: float
    decode_tokens: float
    decode_steps: float
    demoted_bytes: float
    promoted_bytes: float
    streamed_bytes: float

    @classmethod
    def read(cls, metrics: Metrics) -> Counters:
        # SGLang counts every prefilled token in the first metric, and leaves those of
        # retracted requests out of the second.
        prefilled = metrics.total(
            "sglang:realtime_tokens_total", mode="prefill_compute"
        )
        first_time = metrics.total(
            "sglang:prefill_effective_tokens_total", mode="input"
        )
        passes = "sglang:cuda_graph_passes_total"
        return cls(
            retractions=metrics.total("sglang:num_retracted_requests_total"),
            recomputed_tokens=prefilled - first_time,
            decode_tokens=metrics.total("sglang:realtime_tokens_total", mode="decode"),
            # The name says graphs, but passes without one are counted too.
            decode_steps=metrics.total(passes, mode="decode_none"),
            demoted_bytes=metrics.total("sglang_tiered:demoted_bytes_total"),
            promoted_bytes=metrics.total("sglang_tiered:promoted_bytes_total"),
            streamed_bytes=metrics.total("sglang_tiered:streamed_bytes_total"),
        )

    def __sub__(self, before: Counters) -> Counters:
        return Counters(
            *(getattr(self, f.name) - getattr(before, f.name) for f in fields(self))
        )

    @property
    def mean_running(self) -> float:
        """Requests per decode step, on average over the steps."""
        return self.decode_tokens / max(self.decode_steps, 1)

    @property
    def recomputed_per_resume(self) -> float:
        return self.recomputed_tokens / max(self.retractions, 1)

    @property
    def moved_bytes(self) -> float:
        return self.demoted_bytes + self.promoted_bytes + self.streamed_bytes


class Sampler(Generic[T]):
    """Polls /metrics of a server while its block runs.

    `samples` are (seconds since entry, what `read` made of the scrape), in order.
    """

    def __init__(
        self, server: Server, read: Callable[[Metrics], T], interval_s: float = 0.5
    ) -> None:
        self.samples: list[tuple[float, T]] = []
        self._server = server
        self._read = read
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> Sampler[T]:
        self._start = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._ended.wait(self._interval_s):
            try:
                metrics = self._server.metrics()
            except httpx.HTTPError:
                continue  # a busy server missed one poll; a dead one fails the requests
            seconds = time.monotonic() - self._start
            self.samples.append((seconds, self._read(metrics)))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=30)
