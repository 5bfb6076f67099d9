"""What a user types and reads on a login node of a real SLURM cluster, and what bad input gets there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.launchers.slurm.site import load
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import write_atomic
from tests.jobs import cli, environment
from tests.launchers.slurm.lab import CLUSTER, ON_CPU, Lab, slurm_job
from tests.launchers.slurm.test_jobs import ENDLESS, as_undisturbed
from tests.world import TINY

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

REFUSED = {
    "cluster.partition=nope": ("one of main, urgent",),
    "cluster.account=nope": ("your accounts: root (QOS normal)",),
    "cluster.qos=nope": ("your accounts: root (QOS normal)",),
    "cluster.time=2-00:00:00": ("cluster.time=2-00:00:00", "partition main allows 1-00:00:00"),
    "cluster.time=1": ("no time is left to train in",),
    "cluster.constraint=fast": ("cluster.constraint=fast", "Invalid feature"),
    "cluster.reservation=mine": ("cluster.reservation=mine",),
    "cluster.nodelist=node9": ("Invalid node name",),
    "cluster.extra=['-Melsewhere']": ("--clusters is not for the user to set", "a login node of that cluster"),
    "cluster.extra=['--array=0-3']": ("--multirun makes arrays",),
    "cluster.extra=['-W']": ("attach=true follows the job",),
    "cluster.extra=['--quiet']": ("is not for the user to set",),
    "cluster.extra=['--exclusive=user']": ("with one CPU of each", "cluster.exclusive=false, too"),
    "cluster.extra=['--bogus']": ("unrecognized option '--bogus'",),
    "nodes=5": ("nodes=5", "partition main has 4 nodes with up to 2 CPUs, 8000 MB, gpu:8"),
    "cluster.cpus_per_task=3": ("cluster.cpus_per_task=3", "up to 2 CPUs"),
    "cluster.gpus_per_node='9'": ("cluster.gpus_per_node=9", "gpu:8"),
    "cluster.mem=99G": ("8000 MB",),
    'name="\'; rm -rf x"': ("not a valid run name",),
}


def test_without_slurm_a_submission_says_so_and_a_plan_works(tmp_path: Path) -> None:
    refused = cli(tmp_path, *ON_CPU, "nodes=2", "name=a", PATH="/nowhere")
    assert refused.returncode == 2
    assert "there is no SLURM to submit to: scontrol is not on this machine's PATH" in refused.stderr
    assert not (tmp_path / "runs").exists()
    assert cli(tmp_path, "plan", "cluster=slurm", "nodes=4", "model=llama3_70b", PATH="/nowhere").returncode == 0


def test_bad_input_is_refused_with_our_keys_and_nothing_is_written(lab: Lab, tmp_path: Path) -> None:
    names = [[] if override.startswith("name=") else ["name=bad"] for override in REFUSED]
    commands = [[*ON_CPU, *TINY, *name, override] for name, override in zip(names, REFUSED, strict=True)]
    for (override, expected), (code, said) in zip(REFUSED.items(), lab.several(tmp_path, *commands), strict=True):
        assert code == 2, f"{override}: {said}"
        for words in expected:
            assert words in said, f"{override}: {said}"
        assert len(said.splitlines()) < 12, said
    done = lab.cli(tmp_path, *ON_CPU, *TINY, "name=bad", f"runs_dir={lab.folder}/scratch")
    assert "in this machine's memory: the nodes cannot see it" in done.stderr
    done = lab.cli(tmp_path, *ON_CPU, *TINY, "name=bad", SLURM_CLUSTERS="elsewhere")
    assert "SLURM_CLUSTERS=elsewhere: jobs go to lab, the cluster of this machine" in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists()
    assert lab.on_login("squeue", "-h") == ""


def test_doctor_looks_at_the_cluster_and_at_one_of_its_nodes(lab: Lab, tmp_path: Path) -> None:
    done = lab.cli(tmp_path, "doctor", *ON_CPU)
    assert done.returncode == 0, done.stdout + done.stderr
    for fact in (
        "cluster lab, SLURM",
        "main: 4 nodes",
        "sacct answers",
        f"sees {tmp_path}/runs",
        f"torch {version('torch')}",
        "time",
    ):
        assert fact in done.stdout
    assert "a preempted job has 35 s to save" in done.stdout
    without = cli(tmp_path, "doctor", *ON_CPU, PATH="/nowhere")
    assert without.returncode == 1 and "scontrol is not on this machine's PATH" in without.stdout, without.stdout
    done = lab.cli(tmp_path, "doctor", *ON_CPU, "cluster.partition=urgent")
    assert "no job of this partition is preempted" in done.stdout, done.stdout
    done = lab.cli(tmp_path, "doctor", *ON_CPU, "cluster.python=/nowhere/python")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "/nowhere/python" in done.stdout
    done = lab.cli(tmp_path, "doctor", *ON_CPU, f"runs_dir={lab.folder}/scratch")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the nodes do not see" in done.stdout
    assert not list(Path(tmp_path, "runs").iterdir()), "nothing is left"


# Runs what it is given, without another root, if that is in its one image.
APPTAINER = """#!/bin/sh
shift
while [ "${1#--}" != "$1" ]; do shift; done
[ "$1" = torch.sif ] || { echo "FATAL: could not open image $1" >&2; exit 255; }
shift
IN_CONTAINER=yes exec "$@"
"""
IMAGES_PYTHON = """#!/bin/sh
[ "$IN_CONTAINER" ] || { echo "$0 is only in the image" >&2; exit 127; }
exec PYTHON "$@"
"""


def test_agents_run_in_a_container_simulated_apptainer(lab: Lab, tmp_path: Path) -> None:
    """With its own interpreter, which the coordinator and the batch step outside do not have."""
    python = tmp_path / "images_python"
    for command, script in ((tmp_path / "apptainer", APPTAINER), (python, IMAGES_PYTHON)):
        command.write_text(script.replace("PYTHON", sys.executable))
        command.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    inside = ["cluster.container_runtime=apptainer", f"cluster.python={python}"]
    done = lab.cli(tmp_path, "doctor", *ON_CPU, *inside, "cluster.container=torch.sif", **path)
    assert f"runs {python} in torch.sif with fsdp_jobs" in done.stdout, done.stdout + done.stderr
    assert f"runs {sys.executable} with fsdp_jobs" in done.stdout, "what stays outside"
    done = lab.cli(tmp_path, "doctor", *ON_CPU, *inside, "cluster.container=none.sif", **path)
    assert done.returncode == 1 and "container       FATAL: could not open image none.sif" in done.stdout, done.stdout

    (tmp_path / "where.py").write_text("import os; print(os.environ['IN_CONTAINER'], os.getcwd())")
    job = ["name=inside", "attach=true", f"checkpoint.dir={tmp_path}/saved", *inside, "cluster.container=torch.sif"]
    done = lab.cli(tmp_path, *ON_CPU, *job, "nodes=1", "where.py", **path)
    assert done.returncode == 0 and f"yes {tmp_path}" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "saved").is_dir(), "a container mounts only what is there"
    done = lab.cli(tmp_path, *ON_CPU, *job, f"runs_dir={tmp_path}/a:b", "nodes=1", "where.py", **path)
    assert done.returncode == 2 and "a:b/inside: cannot be mounted in a container" in done.stderr, done.stderr


# `python -c` of this is `python -m fsdp_jobs`, but its submissions have always the same id.
SAME_ID = """
import sys
from fsdp_jobs.cli.main import main
from fsdp_jobs.submit import submit
submit.new_submission = lambda: "261122210000-0a1b2c"
sys.exit(main(sys.argv[1:]))
"""


def test_away_from_the_cluster_a_dry_run_is_what_slurm_gets(lab: Lab, tmp_path: Path) -> None:
    """With the site file that doctor has saved, byte for byte; a shard group that spans nodes asks for switches."""
    done = lab.cli(tmp_path, "doctor", *ON_CPU, "--save", "lab.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    saved = (tmp_path / "lab.yaml").read_text()
    assert saved.startswith("# fsdp-jobs doctor cluster=slurm") and "\ncluster: lab\n" in saved, saved
    job = ["name=away", "nodes=4", "cluster=slurm", "hardware=h100", "model=llama3_8b", "fsdp=hybrid_shard"]
    job += ["fsdp.shard_group=16", "nproc_per_node=8", "data=synthetic", "data.vocab_size=128256"]
    job += [f"runs_dir={tmp_path}/runs", "cluster.extra=['--hold']", f"cluster.site={tmp_path}/lab.yaml"]
    env = environment(tmp_path, PATH="/nowhere")
    dry = [sys.executable, "-c", SAME_ID, *job, "dry_run=true", "--output", "script"]
    away = subprocess.run(dry, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert away.returncode == 0, away.stdout + away.stderr
    assert "scontrol is not on this machine's PATH" in away.stderr and "not checked: partition" in away.stderr
    assert f"by {tmp_path}/lab.yaml of cluster lab" in away.stderr and "FITS" in away.stderr, away.stderr
    assert not list((tmp_path / "runs").iterdir()), "only doctor's folder"

    on_login = [str(CLUSTER), "run", "login", sys.executable, "-c", SAME_ID, *job]
    env = environment(tmp_path, FSDP_JOBS_SLURM=str(lab.folder))
    submitted = subprocess.run(on_login, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    (id,) = lab.on_login("squeue", "-h", "-o", "%i", "-n", "away").split()
    try:
        assert away.stdout == lab.on_login("scontrol", "write", "batch_script", id, "-")
        assert "#SBATCH --switches=2\n" in away.stdout and "#SBATCH --gpus-per-node=8\n" in away.stdout
    finally:
        lab.on_login("scancel", id)

    (tmp_path / "other.yaml").write_text(saved.replace("cluster: lab", "cluster: other"))
    for verb in ([], ["dry_run=true"]):
        refused = lab.cli(tmp_path, *job[:-1], "name=b", *verb, f"cluster.site={tmp_path}/other.yaml")
        assert refused.returncode == 2 and "is of the cluster other; commands here reach lab" in refused.stderr
        assert "doctor cluster=slurm --save" in refused.stderr, refused.stderr


def test_without_a_site_file_a_dry_run_says_what_it_assumes(tmp_path: Path) -> None:
    job = ["cluster=slurm", "nodes=2", "name=a", "data=tokens", "data.path=/shared/corpus.bin", "runs_dir=/shared/runs"]
    job += ["data.vocab_size=256"]
    shown = cli(tmp_path, *job, "dry_run=true", PATH="/nowhere")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "#SBATCH --gpus-per-node=8\n" in shown.stdout and '"agent": [' in shown.stdout
    assert shown.stdout.index("assumed: '--gpus-per-node=<GPUs of a node>'") < shown.stdout.index("FITS")
    assert "cluster.site=FILE tells: fsdp-jobs doctor cluster=slurm --save FILE" in shown.stdout
    sweep = cli(tmp_path, "--multirun", *job, "seed=1,2", "dry_run=true", PATH="/nowhere")
    assert sweep.returncode == 0 and "not checked: partition" in sweep.stdout and "a-001" in sweep.stdout, sweep.stderr
    planned = cli(tmp_path, "plan", *job, f"cluster.site={tmp_path}/none.yaml", PATH="/nowhere")
    assert planned.returncode == 2 and "No such file" in planned.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cluster: [lab\n", "while parsing a flow sequence"),
        ("- lab\n", "ListConfig"),
        ("lab", "Key 'lab' not in 'Site'"),
        ("", "cluster"),
        ("partitions: {}\n", "cluster"),
        ("cluster: lab\npartitons: {}\n", "partitons"),
        ("cluster: lab\nswitches: 3\n", "switches"),
        ("cluster: lab\nswitches: [leaf1]\n", "has neither SwitchName nor BlockName"),
        ("cluster: lab\npartitions: {main: 'node[1-'}\n", "a bracket is open"),
    ],
)
def test_a_broken_site_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(BadInput) as raised:
        load(str(tmp_path / "site.yaml"))
    (problem,) = raised.value.problems
    assert problem.where == f"cluster.site={tmp_path}/site.yaml" and words in problem.what, problem
    assert problem.instead.startswith("fsdp-jobs doctor cluster=slurm --save FILE") and "\n" not in problem.what


def torchx(lab: Lab, folder: Path, *args: str) -> str:
    command = [str(CLUSTER), "run", "login", str(Path(sys.executable).with_name("torchx")), *args]
    env = environment(folder, FSDP_JOBS_SLURM=str(lab.folder))
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def test_a_run_with_time_limits_hostile_words_and_a_secret(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run longer than its time limit goes on after a requeue; others wait for it, are shown and cancelled."""
    folder = tmp_path / "it's; touch owned $(touch owned) 100%"
    folder.mkdir()
    monkeypatch.setenv("MY_TOKEN", "very-secret")
    hostile = 'cluster.comment="it\'s; LAB\\me; $(touch owned) #"'
    setup = """cluster.setup=['test -n "$MY_TOKEN"']"""
    # SLURM may send its signal a minute early: of one minute, a busy machine has not begun to train by then.
    limits = ("cluster.time=2", "elastic.stop_grace_s=10")
    with slurm_job(lab, folder, "long", "nodes=1", *limits, hostile, setup, *ENDLESS) as job:
        job.until_attempt(0)
        handle = f"slurm_fsdp://lab/{job.id}"
        assert "RUNNING" in torchx(lab, folder, "status", handle)
        assert handle in torchx(lab, folder, "list", "-s", "slurm_fsdp").split()
        shown = lab.on_login("scontrol", "show", "job", job.id)
        assert "Comment=it's; LAB\\me; $(touch owned) #" in shown
        public = "".join(f.read_text() for f in job.run.path.rglob("*.log")) + shown
        submitted = "".join(f.read_text() for f in job.run.submit.rglob("*") if f.is_file())
        assert "very-secret" not in public + submitted.replace(setup, "").replace("= very-secret", "")

        later = "cluster.extra=['--begin=now+1hour']"  # waits even while a time limit frees the nodes
        queued = lab.cli(folder, *ON_CPU, *TINY, "name=queued", "nodes=4", later)
        waiting = queued.stdout.partition("slurm_fsdp://lab/")[2].split()[0]
        assert f"SLURM job {waiting} waits" in queued.stdout
        assert f"SLURM job {waiting} waits (" in lab.cli(folder, "status", "queued").stdout
        assert "PENDING" in torchx(lab, folder, "status", f"slurm_fsdp://lab/{waiting}")
        torchx(lab, folder, "cancel", f"slurm_fsdp://lab/{waiting}")
        assert "stopped" in lab.cli(folder, "status", "queued").stdout

        job.until_attempt(1, 300)
        assert "SIGUSR1 received" in job.verdict(0).reason
        assert lab.cli(folder, "cancel", "long").returncode == 0
        steps = max(job.losses()) + 5
        job.submit("resume", "long", f"steps={steps}", "cluster.time=null")
        job.until(lambda: job.state() == "COMPLETED", "the end", 150)
        handle = f"slurm_fsdp://lab/{job.id}"
        assert "SUCCEEDED" in torchx(lab, folder, "status", handle)
        assert "resumed from step" in torchx(lab, folder, "log", f"{handle}/trainer/0")
        assert not list(tmp_path.rglob("owned"))
        as_undisturbed(job, tmp_path, *ENDLESS)


def test_a_run_directory_that_only_this_machine_has_is_named(lab: Lab, tmp_path: Path) -> None:
    """Nothing on the login node can tell; the job ends before its first line."""
    here = lab.folder / "only-here"
    here.mkdir()
    elsewhere = tmp_path / "disk"
    elsewhere.mkdir()
    lab.on_login("mount", "--bind", str(elsewhere), str(here))
    done = lab.cli(tmp_path, *ON_CPU, *TINY, "name=lost", "nodes=1", f"runs_dir={here}")
    assert done.returncode == 0, done.stdout + done.stderr
    status, deadline = "", time.monotonic() + 90
    while " on node1 before its first line: do the nodes see" not in status:
        assert time.monotonic() < deadline, status
        status = lab.cli(tmp_path, "status", "lost", f"runs_dir={here}").stdout
    assert "now       nothing: it has ended" in status, status


def test_what_users_environments_and_copies_do_not_do_to_a_job(lab: Lab, tmp_path: Path) -> None:
    """Submitted by a rank inside a task of another array, with options and filters set; its directory is copied."""
    outer = {"FSDP_JOBS_RANK_STATE": "/dev/shm/of-the-outer-job", "SLURM_CLUSTERS": "", "SRUN_CPUS_PER_TASK": "64"}
    outer |= {"SLURM_JOB_ID": "76", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "1", "SLURM_MEM_PER_CPU": "100"}
    filters = {"SQUEUE_PARTITION": "urgent", "SQUEUE_STATES": "CD", "SQUEUE_NAMES": "x", "SINFO_PARTITION": "urgent"}
    own = {"SBATCH_NO_REQUEUE": "1", "SBATCH_SIGNAL": "B:USR2@5", "SBATCH_OUTPUT": "/dev/null", "SBATCH_JOB_NAME": "my"}
    os.environ |= {**outer, **filters, **own}
    try:
        with slurm_job(lab, tmp_path, "mine", "nodes=2", "nproc_per_node=1", *ENDLESS) as job:
            job.until_attempt(0)
            (started,) = job.events("attempt_started")
            assert started["slurm_job"] == job.id, "it takes the outer job for itself"
            shown = lab.on_login("scontrol", "show", "job", job.id)
            assert "JobName=mine" in shown and "Requeue=1" in shown and "/mine/submit/slurm-" in shown, shown
            assert "mine  running" in lab.cli(tmp_path, "status", "mine").stdout
            refused = lab.cli(tmp_path, "resume", "mine")
            assert refused.returncode == 2 and "is in use by the live job" in refused.stderr, refused.stderr

            shutil.copytree(tmp_path / "runs" / "mine", tmp_path / "runs" / "copy", symlinks=True)
            said = f"runs/copy is a copy of {tmp_path}/runs/mine, whose job this is"
            refused = lab.cli(tmp_path, "cancel", "copy", "--now")
            assert refused.returncode == 2 and said in refused.stderr, refused.stdout + refused.stderr
            assert said in lab.cli(tmp_path, "status", "copy").stdout

            # A controller that has lost its state gives an id again: simulated by a record of another submission.
            record = {**job.run.read_job(), "submission": "261101000000-aaaaaa"}
            write_atomic(RunDir(tmp_path / "runs" / "copy").job, json.dumps(record))
            refused = lab.cli(tmp_path, "cancel", "copy", "--now")
            said = f"has given its id {job.id} to a job of {job.run.path}"
            assert refused.returncode == 2 and said in refused.stderr, refused.stdout + refused.stderr
            assert said in lab.cli(tmp_path, "status", "copy").stdout
            assert job.state() == "RUNNING" and not job.run.stop_request.exists()

            step = job.step()
            lab.on_login("scancel", "--signal=USR1", job.id)  # as at the time limit: it requeues itself
            job.until_attempt(1)
            assert job.verdict(0).verdict == "preempted" and job.events("resumed")[-1]["step"] >= step
    finally:
        for name in (*outer, *filters, *own):
            del os.environ[name]
