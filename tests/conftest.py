"""Settings for every test. In CI (the variable CI is set) whatever is skipped fails the run."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

_TESTS = Path(__file__).parent
_ONE_CLUSTER = ("slurm", "docker", "kubernetes", "integration")  # begun in this order: what takes longest comes first

_skipped: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers (make test) a file stays together, and so do all files that share a cluster."""

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(_TESTS).parts[0]
        return _ONE_CLUSTER.index(folder) if folder in _ONE_CLUSTER else len(_ONE_CLUSTER)

    items.sort(key=place)
    for item in items:
        folder = item.path.relative_to(_TESTS).parts[0]
        group = folder if folder in ("slurm", "docker") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("CI") and _skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("CI") and _skipped:
        terminalreporter.write_line("In CI nothing may be skipped; see the reasons above.", red=True)
