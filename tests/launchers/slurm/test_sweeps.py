"""A hundred jobs on a real SLURM cluster: submitted at once, seen at once, and only what failed is done again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fsdp_jobs.run.directory import RunDir
from tests.jobs import Watched
from tests.launchers.slurm.lab import ON_CPU, Lab, agent_of
from tests.world import PACED, TINY_TASK

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SMALL = (*ON_CPU[:-1], "nproc_per_node=1", "nodes=1", "cluster.exclusive=false", *TINY_TASK, *PACED)
ENDLESS = ("steps=100000", "optim.schedule=constant", "checkpoint.every_steps=20")


SUBMIT = ("--multirun", *SMALL, *ENDLESS, "seed=range(100)", "sweep.name=grid")


class Sweep:
    """The sweep `grid` as a user on the login node has it."""

    def __init__(self, lab: Lab, folder: Path):
        self.lab, self.folder = lab, folder

    def cli(self, *args: str, **env: str) -> str:
        done = self.lab.cli(self.folder, *args, **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def rows(self, **env: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.cli("sweep", "status", "grid", "--json", **env))
        return rows

    def job(self, number: int) -> Watched:
        return Watched(RunDir(self.folder / "runs" / f"grid-{number:03d}"))

    def handles(self) -> list[str]:
        return [str(self.job(n).run.read_job()["handle"]).rpartition("/")[2] for n in range(100)]

    def counted(self, command: str) -> dict[str, str]:
        """An environment in which each call of a command leaves a line in the file of its name."""
        place = self.folder / "counted"
        place.mkdir()
        (place / command).write_text(f'#!/bin/sh\necho >> {self.folder}/{command}\nexec /usr/bin/{command} "$@"\n')
        (place / command).chmod(0o755)
        return {"PATH": f"{place}:{os.environ['PATH']}"}


def kill_rank(job: Watched) -> None:
    """Of a job that has only this one."""
    agent = agent_of(job.run, 0)
    assert agent is not None, job.story()
    for child in agent.children():
        if "fork server" in " ".join(child.cmdline()):
            child.children()[0].kill()


def test_a_hundred_jobs_are_one_array_and_only_the_failed_ones_are_done_again(lab: Lab, tmp_path: Path) -> None:
    sweep = Sweep(lab, tmp_path)
    try:
        sweep.cli(*SUBMIT, "sweep.parallelism=3", "elastic.max_failures_without_progress=0")
        ids = sweep.handles()
        array = ids[0].partition("_")[0]
        assert ids == [f"{array}_{task}" for task in range(100)]
        assert len(list((tmp_path / "sweeps/grid/slurm").rglob("*_submission.sh"))) == 1
        assert "ArrayTaskThrottle=3" in lab.on_login("scontrol", "show", "job", array)

        running = range(3)
        for n in running:
            sweep.job(n).until(lambda n=n: bool(sweep.job(n).events("checkpoint")), f"a checkpoint of {n}", 180)
        rows = sweep.rows(**sweep.counted("squeue"))
        assert [row["state"] for row in rows] == ["running"] * 3 + ["queued"] * 97
        assert (tmp_path / "squeue").read_text() == "\n", "one squeue answered for all"

        lab.on_login("scontrol", "update", f"JobId={array}", "ArrayTaskThrottle=1")  # no others in their place
        for n in (0, 2):
            kill_rank(sweep.job(n))
        for n in (0, 2):
            sweep.job(n).until(lambda n=n: sweep.job(n).run.verdict(0).exists(), f"the end of {n}")
        sweep.cli("sweep", "retry-failed", "grid")
        now = sweep.handles()
        assert [n for n in range(100) if now[n] != ids[n]] == [0, 2]
        assert len({now[n].partition("_")[0] for n in (0, 2)}) == 1
        for n in (0, 2):
            job = sweep.job(n)
            job.until(lambda job=job: bool(job.events("resumed")), f"{n} again", 180)
            saved = [e["step"] for e in job.events("checkpoint") if e["attempt"] == 0]
            resumed = job.events("resumed")[0]["step"]  # killed between a commit and its event, from the one after
            assert resumed in (saved[-1], saved[-1] + 20)

        # The last task of an array has the array's number; what is done to it concerns no other.
        last = sweep.job(2)
        assert lab.on_login("squeue", "-h", "-j", now[2], "-o", "%A").strip() == now[2].partition("_")[0]
        lab.on_login("scancel", "--signal=USR1", now[2])
        last.until(lambda: any(m["attempt"] == 2 for m in last.metrics()), "attempt 2", 180)
        assert last.events("attempt_started")[-1]["slurm_job"] == now[2]
        assert sweep.job(0).run.last_attempt() == 1
    finally:
        sweep.cli("sweep", "cancel", "grid")
        lab.wait_idle()
    assert {row["state"] for row in sweep.rows()} == {"stopped"}
    assert sweep.job(1).events("attempt_ended")[-1]["reason"].startswith("cancelled; saved at step")


def test_what_slurm_has_against_all_jobs_is_said_once_and_nothing_is_submitted(lab: Lab, tmp_path: Path) -> None:
    def refused(*more: str) -> str:
        done = lab.cli(tmp_path, *SUBMIT, *more)
        assert done.returncode == 2, done.stdout + done.stderr
        assert len(done.stderr.splitlines()) < 6, done.stderr
        return done.stderr

    message = refused("cluster.partition=nope")
    assert "1 problem" in message
    assert "one of main, urgent" in message
    limit = ("sacctmgr", "--immediate", "modify", "user", "root", "set")
    lab.on_login(*limit, "MaxSubmitJobs=50")
    try:
        message = refused()
    finally:
        lab.on_login(*limit, "MaxSubmitJobs=-1")
    assert "100 jobs at once: more than SLURM takes: AssocMaxSubmitJobLimit" in message
    assert lab.on_login("squeue", "-h") == ""
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "sweeps").exists()
