"""What holds for the whole run.

Under CI it fails when other tests were skipped than those listed here, so that no test
stops running without anybody noticing. It ends with the counters that passed tests
recorded with `record_property`. Tests that start servers share one worker of
pytest-xdist: there is memory and processor for one server at a time. So do those of
interpreted kernels, which share one child process.
"""

from __future__ import annotations

import os

import pytest

# Ids of the tests that CI may skip: none.
EXPECTED_SKIPS: frozenset[str] = frozenset()

# Tests of each of these markers run on one worker.
TOGETHER = ("server", "interpreted")

_skipped: set[str] = set()


# First: xdist reads the groups in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            for marker in TOGETHER:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.xdist_group(marker))


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
    counted = [
        report
        for report in terminalreporter.stats.get("passed", [])
        if report.user_properties
    ]
    if counted:
        terminalreporter.section("counters")
    for report in counted:
        numbers = ", ".join(f"{name} {value}" for name, value in report.user_properties)
        terminalreporter.write_line(f"{report.nodeid}: {numbers}")
    if os.environ.get("CI") and _skipped != EXPECTED_SKIPS:
        terminalreporter.write_line(
            f"skipped: {sorted(_skipped)}, expected: {sorted(EXPECTED_SKIPS)}", red=True
        )
