"""Settings for every test. In CI (the variable CI is set) whatever is skipped fails the run."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

_skipped: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("CI") and _skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("CI") and _skipped:
        terminalreporter.write_line("In CI nothing may be skipped; see the reasons above.", red=True)
