"""Tests of interpreted kernels run in a process of their own.

Triton decides at its import whether kernels are compiled or interpreted, and the rest
of this run must not meet interpreted ones. So the first of these tests starts one child
pytest, with TRITON_INTERPRET=1, that runs all of them which were selected; each then
passes or fails here as it did there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

IN_CHILD = "TRITON_INTERPRET" in os.environ
# Where the child tells how its tests ended.
OUTCOMES = "INTERPRETED_OUTCOMES"

_outcomes: dict[str, str] = {}


def is_interpreted(item: pytest.Item) -> bool:
    return item.get_closest_marker("interpreted") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if IN_CHILD or not is_interpreted(pyfuncitem):
        return None
    if not _outcomes:
        _outcomes.update(run_child(pyfuncitem.session))
    failure = _outcomes.get(pyfuncitem.nodeid, "did not run: the child ended before")
    if failure:
        pytest.fail(failure, pytrace=False)
    return True


def run_child(session: pytest.Session) -> dict[str, str]:
    """How each interpreted test of this run ended: what it failed with, "" if not."""
    tests = [item.nodeid for item in session.items if is_interpreted(item)]
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "outcomes.json"
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
            cwd=session.config.rootpath,
            env={**os.environ, "TRITON_INTERPRET": "1", OUTCOMES: str(told)},
            capture_output=True,
            text=True,
            check=False,
        )
        if not told.exists():
            pytest.fail(f"{ended.stdout}\n{ended.stderr}", pytrace=False)
        outcomes: dict[str, str] = json.loads(told.read_text())
    return outcomes


if IN_CHILD:
    from tests.cuda.interpreter import make_bfloat16_exact

    make_bfloat16_exact()

    def pytest_runtest_logreport(report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            _outcomes[report.nodeid] = report.longreprtext or report.outcome
        elif report.when == "call":
            _outcomes.setdefault(report.nodeid, "")

    def pytest_sessionfinish() -> None:
        if told := os.environ.get(OUTCOMES):
            Path(told).write_text(json.dumps(_outcomes))
