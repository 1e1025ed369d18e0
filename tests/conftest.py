"""Under CI the run fails when other tests were skipped than those listed here, so that
no test stops running without anybody noticing."""

from __future__ import annotations

import os

import pytest

# Ids of the tests that CI may skip: none.
EXPECTED_SKIPS: frozenset[str] = frozenset()

_skipped: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _skipped.add(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("CI") and _skipped != EXPECTED_SKIPS:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("CI") and _skipped != EXPECTED_SKIPS:
        terminalreporter.write_line(
            f"skipped: {sorted(_skipped)}, expected: {sorted(EXPECTED_SKIPS)}", red=True
        )
