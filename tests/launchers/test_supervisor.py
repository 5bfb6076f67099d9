"""Processes of an attempt that die."""

from __future__ import annotations

from pathlib import Path

from fsdp_jobs.launchers.supervisor import Attempt
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.verdict import Verdict
from tests.nfs import nfs_client

_LIVES_ONCE = 'echo >> "$0"; if [ $(wc -l < "$0") = 3 ]; then sleep 1.5; fi; exit 1'


class _Impatient(Attempt):
    early_s = 1.0


def test_a_process_is_given_up_after_three_early_deaths_in_a_row(tmp_path: Path) -> None:
    run, lives = RunDir(tmp_path / "run"), tmp_path / "lives"
    run.attempt(0).mkdir(parents=True)
    attempt = _Impatient(run, 0)
    attempt.start("coordinator", ["sh", "-c", _LIVES_ONCE, str(lives)], {"PATH": "/usr/bin:/bin"})
    verdict = attempt.supervise()
    assert verdict is not None and verdict.verdict == "infrastructure" and "died three times" in verdict.reason
    assert len(lives.read_text().splitlines()) == 2 + 1 + 3, "the one that lived longer begins a new count"


def test_an_agent_that_leaves_after_the_verdict_is_not_started_again_simulated_nfs(tmp_path: Path) -> None:
    """The coordinator, on another machine, has written the verdict, which this machine has looked for before."""
    run, verdict = RunDir(tmp_path / "run"), Verdict("done", "stop", "all steps are done")
    run.attempt(0).mkdir(parents=True)
    ends = 'sleep 0.5; echo "$1" > "$0"; exit 1'
    attempt = Attempt(run, 0)
    with nfs_client():
        attempt.start("node-0", ["sh", "-c", ends, str(run.verdict(0)), verdict.to_json()], {"PATH": "/usr/bin:/bin"})
        assert attempt.supervise() == verdict
    assert not run.events.exists(), run.events.read_text()
