"""How jobs become arrays, with simulated commands: limits and refusals that a small cluster does not show."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.launchers.slurm import client
from fsdp_jobs.launchers.slurm.script import Script
from fsdp_jobs.launchers.slurm.submission import group_equal, submit_arrays
from fsdp_jobs.run.directory import RunDir
from tests.launchers.slurm.simulated import say

SMALL = Script(("--nodes=1",), (), (), "python", "/home/me", False, margin_s=10)
LARGE = replace(SMALL, resources=("--nodes=2",))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster whose arrays have at most 3 tasks; sbatch counts jobs from 100 and keeps the scripts."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(client, "settings", lambda: {"MaxArraySize": "3"})
    say(tmp_path, "sbatch", 'n=$(ls | grep -c ^script); cp "$2" script-$n; echo $((100 + n))')
    say(tmp_path, "scancel", "echo $* > cancelled")
    say(tmp_path, "srun", "exit 1")  # submitit only looks whether it is there
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submitted(folder: Path, scripts: list[Script], parallelism: int) -> list[str]:
    runs = [RunDir(folder / "runs" / str(i)) for i in range(len(scripts))]
    return submit_arrays(folder / "place", "grid", scripts, runs, group_equal(scripts), parallelism)


def values(folder: Path, option: str) -> list[str]:
    """The value of an option in each script that was submitted; empty where it is not there."""
    lines = [f.read_text().splitlines() for f in sorted(folder.glob("script-*"))]
    begins = f"#SBATCH --{option}="
    return [next((line.removeprefix(begins) for line in text if line.startswith(begins)), "") for text in lines]


def test_equal_jobs_are_one_array_and_each_task_finds_its_run_and_another_job_is_one_of_its_own(slurm: Path) -> None:
    assert submitted(slurm, [SMALL, LARGE, replace(SMALL, margin_s=70)], 0) == ["100_0", "101", "100_1"]
    assert values(slurm, "array") == ["0-1", ""]
    assert values(slurm, "signal") == ["B:USR1@70", "B:USR1@10"]
    assert (slurm / "place" / "0" / "1").resolve() == slurm / "runs" / "2"
    assert values(slurm, "output") == [
        f"{slurm}/place/0/%a/submit/slurm-%A_%a.out",
        f"{slurm}/runs/1/submit/slurm-%j.out",
    ]


def test_no_array_is_larger_than_the_cluster_allows(slurm: Path) -> None:
    ids = submitted(slurm, [SMALL] * 7, 0)
    assert ids == ["100_0", "100_1", "100_2", "101_0", "101_1", "101_2", "102"]


def test_an_array_has_no_more_tasks_than_the_scheduler_takes(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"MaxArraySize": "10001", "SchedulerParameters": "bf_window=1440,max_array_tasks=2,defer"}
    monkeypatch.setattr(client, "settings", lambda: own)
    assert group_equal([SMALL] * 5) == [[0, 1], [2, 3], [4]]


def test_arrays_share_how_many_may_run_at_once(slurm: Path) -> None:
    submitted(slurm, [SMALL] * 7, 5)
    assert values(slurm, "array") == ["0-2%2", "0-2%2", ""]
    assert values(slurm, "dependency") == ["", "", ""]


def test_where_there_are_more_arrays_than_may_run_some_wait_for_others(slurm: Path) -> None:
    submitted(slurm, [SMALL] * 10, 2)
    assert values(slurm, "array") == ["0-2%1", "0-2%1", "0-2%1", ""]
    assert values(slurm, "dependency") == ["", "", "afterany:100", "afterany:101"]


def test_all_are_submitted_or_none(slurm: Path) -> None:
    (slurm / "script-0").touch()
    refused = r"echo 'sbatch: error: ask us\nsbatch: error: Batch job submission failed: Unspecified error' >&2; exit 1"
    say(slurm, "sbatch", f"test $(ls | grep -c ^script) = 3 && {{ {refused}; }}; touch script-$$; echo 7")
    with pytest.raises(JobFailed, match=r"^sbatch: ask us$"):
        submitted(slurm, [SMALL] * 7, 0)
    assert (slurm / "cancelled").read_text() == "--quiet 7 7\n"


def test_what_a_site_says_to_a_job_that_it_takes_is_passed_on_and_no_number_in_it_is_the_jobs(
    slurm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    say(slurm, "sbatch", r"echo 'Hello, job 12 has ended'; printf 'sbatch: moved, f\374r you\n' >&2; echo '7;lab'")
    assert submitted(slurm, [SMALL], 0) == ["7"]
    assert "SLURM says: Hello, job 12 has ended\nsbatch: moved, f\ufffdr you" in caplog.text, "it is not UTF-8"


def test_a_host_without_srun_is_told_in_words(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (slurm / "srun").unlink()
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(JobFailed, match="srun"):
        submitted(slurm, [SMALL], 0)


def test_where_there_are_no_arrays_jobs_are_not_grouped(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "settings", lambda: {"MaxArraySize": "0"})
    assert group_equal([SMALL, SMALL]) == [[0], [1]]


def test_an_sbatch_that_is_killed_without_a_word_is_told_in_words(slurm: Path) -> None:
    say(slurm, "sbatch", "kill -9 $$")
    with pytest.raises(JobFailed, match=r"sbatch: .* died with <Signals.SIGKILL: 9>"):
        submitted(slurm, [SMALL], 0)
