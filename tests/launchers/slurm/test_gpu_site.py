"""A site with rules, as an ordinary user with umask 077: projects, interleaved leaves, limits, private data."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from fsdp_jobs.run.directory import RunDir
from tests.jobs import Watched
from tests.launchers.slurm.lab import Lab, Ordinary
from tests.launchers.slurm.test_jobs import ENDLESS
from tests.world import TINY, TINY_TASK

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PROJECT = ["cluster=slurm", "cluster.accelerator=cpu", "hardware=cpu", "nproc_per_node=1", "attach=false"]
JOB = [*PROJECT, "cluster.account=proj", *TINY_TASK, *ENDLESS]


@pytest.fixture(scope="module")
def user(gpu: Lab) -> Iterator[Ordinary]:
    folder = Path(tempfile.mkdtemp(prefix="fsdp_jobs-home-"))  # pytest's own folders are closed to others
    yield Ordinary(gpu, folder)
    gpu.do("run", "login", "scancel", "--user=nobody", check=False)
    gpu.wait_idle()
    shutil.rmtree(folder)


def test_the_sites_own_words_are_told(user: Ordinary) -> None:
    refused = user.cli(*PROJECT, *TINY, "name=none", "nodes=2")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    words = "cluster.account=None: SLURM says: SITE POLICY: jobs need a project code; ask hpc-help@example.org for one"
    assert words in refused.stderr and "-> your accounts: proj" in refused.stderr, refused.stderr
    examined = user.cli("doctor", *PROJECT)
    assert "SITE POLICY: jobs need a project code" in examined.stdout, examined.stdout


def test_gpus_are_requested_and_switches_counted_as_the_site_has_them(user: Ordinary) -> None:
    (user.folder / "quick.py").write_text("print('done')")
    on_gpus = [*PROJECT, "cluster.account=proj", "cluster.accelerator=cuda", "hardware=h100", "nproc_per_node=8"]
    for nodes, switches in ((2, 1), (3, 2), (4, 3)):  # the leaves have 2, 1 and 1
        script = user.cli(*on_gpus, "script=quick.py", "name=big", f"nodes={nodes}", "dry_run=true").stdout
        assert f"#SBATCH --gpus-per-node=8\n#SBATCH --exclusive\n#SBATCH --switches={switches}\n" in script, script
    many = user.cli(*on_gpus, "script=quick.py", "name=big", "nproc_per_node=9", "dry_run=true")
    assert many.returncode == 2 and "gpu:h100:8" in many.stderr, many.stdout + many.stderr


def test_a_job_follows_the_leaves_saves_when_preempted_and_waits_with_a_reason(gpu: Lab, user: Ordinary) -> None:
    gpu.on_login("sacctmgr", "-i", "add", "qos", "single", "MaxJobsPerUser=1")
    gpu.on_login("sacctmgr", "-i", "modify", "user", "where", "name=nobody", "set", "qos+=single")
    submitted = user.cli(*JOB, "name=own", "nodes=4", "fsdp=hybrid_shard", "fsdp.shard_group=2", "cluster.qos=single")
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    job = Watched(RunDir(user.folder / "runs" / "own"))
    job.until(lambda: job.metrics() and job.step() >= 25, "steps", 120)
    (begun,) = job.events("round_started")
    assert begun["hosts"] == ["node1", "node4", "node2", "node3"], "groups of two cross no leaf that they can avoid"

    assert user.cli(*JOB, "name=other", "nodes=1", "cluster.qos=single").returncode == 0
    waits = "QOSMaxJobsPerUserLimit: a limit of its QOS"
    job.until(lambda: waits in user.cli("status", "other").stdout, "the reason for waiting", 60)
    assert "other stopped" in user.cli("cancel", "other", "--now").stdout

    assert json.loads(gpu.cli(user.folder, "status", "--json", "own").stdout)[0]["state"] == "running"
    urgent = ["sbatch", "--account=proj", "--partition=high", "--nodes=4", "--exclusive", "-o", "/dev/null"]
    subprocess.run([*user.under(), *urgent, "--wrap=sleep 3"], env=gpu._env, check=True, cwd=user.folder)
    job.until(lambda: bool(job.events("attempt_ended")), "the preemption", 60)
    (ended,) = job.events("attempt_ended")
    assert ended["verdict"] == "preempted" and ended["committed"] == ended["step"] > 0, job.story()
    job.until(lambda: any(m["attempt"] == 1 for m in job.metrics()), "attempt 1", 120)
    assert job.events("resumed")[-1]["step"] == ended["step"]
    cancelled = user.cli("cancel", "own")
    assert "own stopped: cancelled; saved at step" in cancelled.stdout, cancelled.stdout + cancelled.stderr
    assert not [f for f in job.run.path.iterdir() if f.stat().st_mode & 0o077], "umask 077"


def test_where_jobs_are_not_requeued_a_new_one_continues(gpu: Lab, user: Ordinary) -> None:
    """Of a sweep: the task of an array. Its handle stays the one that was printed."""
    urgent = [*JOB, "cluster.partition=urgent", "elastic.stop_grace_s=30"]
    examined = user.cli("doctor", *urgent)
    assert "requeue         the site forbids it: a new job continues one that has saved" in examined.stdout
    assert user.cli(*urgent, "--multirun", "name=on", "nodes=1", "seed=1,2", "sweep.parallelism=1").returncode == 0
    job = Watched(RunDir(user.folder / "runs" / "on-000"))
    job.until(lambda: bool(job.metrics()), "steps", 120)
    (first,) = job.events("attempt_started")
    own_number = gpu.on_login("squeue", "-h", "-j", first["slurm_job"], "-o", "%A").strip()
    gpu.on_login("scancel", "--signal=USR1", own_number)
    job.until(lambda: any(m["attempt"] == 1 for m in job.metrics()), "attempt 1", 120)
    (ended,), (continued,) = job.events("attempt_ended"), job.events("continued")
    assert job.events("resumed")[-1]["step"] == ended["step"] > 0
    assert "Requested operation is presently disabled" in continued["why"], continued
    assert job.events("attempt_started")[1]["slurm_job"] == continued["slurm_job"] != first["slurm_job"]
    assert job.run.read_job()["handle"] == f"slurm_fsdp://gpu/{first['slurm_job']}"
    assert "on-000  running" in user.cli("status", "on-000").stdout
    cancelled = user.cli("sweep", "cancel", "on", "--now")
    assert cancelled.returncode == 0, cancelled.stdout + cancelled.stderr
    gpu.wait_idle()
    assert "on-000  stopped" in user.cli("status", "on-000").stdout


def test_a_sweep_larger_than_an_array_may_be_is_several_arrays(user: Ordinary) -> None:
    (user.folder / "quick.py").write_text("print('done')")
    sweep = [*PROJECT[:-1], "cluster.account=proj", "name=grid", "nodes=1", "script=quick.py", "seed=range(7)"]
    done = user.cli("--multirun", *sweep, "sweep.wait=true")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(user.cli("sweep", "status", "grid", "--json").stdout)
    assert [row["state"] for row in rows] == ["done"] * 7, rows
    handles = [RunDir(user.folder / "runs" / f"grid-{n:03d}").read_job()["handle"] for n in range(7)]
    assert [len(list(tasks)) for _, tasks in groupby(handles, lambda handle: handle.rpartition("_")[0])] == [5, 2]
