"""Settings for every test. In CI (the variable CI is set) whatever is skipped fails the run."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

import tests.composed  # noqa: F401  (once for all tests of a worker)

os.environ.setdefault("OMP_NUM_THREADS", "1")

_LONGEST = ("docker", "slurm", "integration", "kubernetes")

_skipped: list[str] = []


class _WholeFiles(LoadScopeScheduling):
    """With several workers (make test) a file stays together, and so do all files that share a cluster."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        shared = {"slurm", "docker"} & set(Path(path).parts)
        return shared.pop() if shared else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _WholeFiles(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first."""

    def place(item: pytest.Item) -> int:
        folders = item.path.relative_to(Path(__file__).parent).parts
        return next((i for i, name in enumerate(_LONGEST) if name in folders), len(_LONGEST))

    items.sort(key=place)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)], capture_output=True)
    if made.returncode:
        pytest.skip("needs root to mount a small file system")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:  # a module whose importorskip found nothing
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("CI") and _skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("CI") and _skipped:
        terminalreporter.write_line("In CI nothing may be skipped; see the reasons above.", red=True)
