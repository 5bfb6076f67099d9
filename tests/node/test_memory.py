"""How near a node is to its memory limit: of a real control group, and of folders laid out like one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_jobs.node import memory

_LIMIT = 400 << 20
_PROGRAM = """
import pathlib, sys
pathlib.Path(sys.argv[1]).write_bytes(bytes(150 << 20))  # cached, which the kernel can give back
held = bytearray(240 << 20)
from fsdp_jobs.node.memory import memory_in_use
print(memory_in_use())
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a memory limit, below the one of the tests."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    kind, own = max((kind, own) for _, kind, own in lines if kind in ("", "memory"))  # "memory" where both are there
    limit = "memory.limit_in_bytes" if kind else "memory.max"
    made = Path("/sys/fs/cgroup", kind, own[1:], f"fsdp-jobs-{os.getpid()}")
    made.mkdir()
    (made / limit).write_text(str(_LIMIT))
    yield made
    made.rmdir()


def test_what_a_process_holds_is_counted_and_what_its_files_are_cached_in_is_not(group: Path, tmp_path: Path) -> None:
    enter = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -c '{_PROGRAM}' {tmp_path}/file"
    done = subprocess.run(["sh", "-c", enter], capture_output=True, text=True, check=True)
    assert 0.6 < float(done.stdout) < 0.8, done.stdout


@pytest.mark.parametrize(("limit", "share"), [(1000, 0.9), ("max", 0.0)], ids=["limited", "unlimited"])
def test_the_fullest_group_above_counts_simulated(
    limit: object, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "groups")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/job_1/step_0\n")
    for name, most, used in (("job_1", limit, 1400), ("job_1/step_0", "max", 1400)):
        folder = tmp_path / "groups" / name
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 800\nfile 500\nactive_file 200\ninactive_file 300\n")
    assert memory.memory_in_use() == share


def test_a_system_without_control_groups_has_no_limit_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    assert memory.memory_in_use() == 0 and memory.kills_for_memory() == 0
