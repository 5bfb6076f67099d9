"""Whole jobs on a real SLURM cluster, and what a cluster does to them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.launchers.slurm.lab import Lab, SlurmJob, slurm_job
from tests.world import PACED, undisturbed_losses

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ENDLESS = ("steps=100000", "optim.schedule=constant", "checkpoint.every_steps=20", "fsdp=full_shard", *PACED)
QUICK = ("elastic.heartbeat_timeout_s=5", "elastic.join_window_s=5")
ONE_RANK = "nproc_per_node=1"  # per node: they all start on the cores of one machine


def as_undisturbed(job: SlurmJob, folder: Path, *overrides: str) -> None:
    """Every step's loss is that of one process that nobody disturbed."""
    losses = job.losses()
    steps = max(losses)
    assert sorted(losses) == list(range(1, steps + 1))
    others = [o for o in overrides if not o.startswith(("steps=", "fsdp=", "checkpoint.", "model._target_="))]
    assert losses == pytest.approx(
        undisturbed_losses(folder, 1, 1, *others, f"steps={steps}", "model._target_=tests.models.tiny"), rel=1e-3
    )


def test_a_job_survives_a_killed_agent_a_signal_and_a_requeue(lab: Lab, tmp_path: Path) -> None:
    """An agent is killed, the job signalled, requeued, and at last continued by another job, as where a site forbids

    requeues; its losses show nothing of it. Preemption: test_gpu_site.
    """
    with slurm_job(lab, tmp_path, "asked", "nodes=1:2", ONE_RANK, *QUICK, *ENDLESS) as job:
        job.until_attempt(0)
        (first,) = job.rounds()
        assert first["hosts"] == ["node1", "node2"]
        assert first["world_size"] == 2

        job.agent(1).send_signal(signal.SIGKILL)
        job.until(lambda: [r["world_size"] for r in job.rounds()] == [2, 1, 2], "one node, then two again")
        job.progress()

        lab.on_login("scancel", "--signal=USR1", job.id)
        job.until_attempt(1)
        assert job.verdict(0).verdict == "preempted"
        last_save = job.events("checkpoint")[-1]["step"]
        assert job.events("resumed")[-1]["step"] == last_save, "nothing that was done before the signal is lost"

        lab.on_login("scontrol", "requeue", job.id)
        job.until_attempt(2)

        lab.on_login("scontrol", "update", f"JobId={job.id}", "requeue=0")
        lab.on_login("scancel", "--signal=USR1", job.id)
        job.until_attempt(3)
        (continued,) = job.events("continued")
        assert continued["slurm_job"] != job.id and "Requested operation is presently disabled" in continued["why"]
        submitted_as, job.id = job.id, continued["slurm_job"]
        (row,) = json.loads(lab.cli(tmp_path, "status", "asked", "--json").stdout)
        assert (row["state"], row["handle"]) == ("running", f"slurm_fsdp://lab/{submitted_as}")
        assert job.state() == "RUNNING"

        done = lab.cli(tmp_path, "cancel", "asked")
        assert "stopped" in done.stdout, done.stdout + done.stderr
        assert job.verdict(3).decision == "stop"
        job.until(lambda: job.state() == "FAILED", "the end of the job")
        as_undisturbed(job, tmp_path, *ENDLESS)


def test_lost_nodes_are_replaced_and_the_loss_of_the_first_one_requeues(lab: Lab, tmp_path: Path) -> None:
    others = "cluster.exclude=node4"  # so that a companion has to wait
    with slurm_job(lab, tmp_path, "lossy", "nodes=2:3", ONE_RANK, others, *QUICK, *ENDLESS) as job:
        job.until_attempt(0)
        lab.crash("node3")
        job.until(lambda: [r["world_size"] for r in job.rounds()] == [3, 2], "two nodes")
        job.until(lambda: bool(job.events("node_asked_for")), "a companion's submission", 120)
        lab.boot("node3")
        job.until(lambda: [r["world_size"] for r in job.rounds()] == [3, 2, 3], "three nodes again", 150)
        job.progress()
        assert job.rounds()[-1]["hosts"] == ["node1", "node2", "node3"]

        lab.crash("node1")
        job.until(lambda: job.run.last_attempt() == 1, "the requeue", 180)
        assert "lost node1" in job.verdict(0).reason
        job.until_attempt(1)
        assert "node1" not in job.rounds()[-1]["hosts"]
        as_undisturbed(job, tmp_path, *ENDLESS)


def test_the_node_test_names_a_bad_node_and_the_job_excludes_it(lab: Lab, tmp_path: Path) -> None:
    lab.do("run", "node2", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm")
    try:
        tested = ("nodes=1:2", ONE_RANK, "cluster.preflight=true", *QUICK, *ENDLESS)
        with slurm_job(lab, tmp_path, "picky", *tested) as job:
            job.until_attempt(1)
            verdict = job.verdict(0)
            assert (verdict.decision, verdict.reason) == ("requeue", "node test: node2: /dev/shm: 1 MB free, 64 needed")
            assert "node2" not in job.rounds()[-1]["hosts"]
            at_step = job.step()
            done = lab.cli(tmp_path, "cancel", "picky", "--now")
            assert "killed on request, without waiting for a checkpoint" in done.stdout, done.stdout + done.stderr
            job.until(lambda: job.state() not in ("RUNNING", "COMPLETING"), "the end")
            assert job.run.last_attempt() == 1, f"requeued after step {at_step}"
    finally:
        lab.do("run", "node2", "umount", "/dev/shm")
