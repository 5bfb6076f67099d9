"""The rendered script of six configurations, as reviewed; and that nothing of a user's reaches a shell unquoted.

After a change that is meant: FSDP_JOBS_WRITE_GOLDEN=1 pytest tests/launchers/slurm/test_script.py, and read the diff.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.base import Job
from fsdp_jobs.launchers.slurm.script import Site, commands, margin_s, script
from fsdp_jobs.launchers.slurm.site import topology_of
from fsdp_jobs.launchers.slurm.steps import Commands
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import as_written
from fsdp_jobs.submit.submit import plan_of

GOLDEN = Path(__file__).parent / "golden"
OLD = Site("old", gpu_option="--gres=gpu:{}", python="/env/bin/python")
LEAVES = [f"SwitchName=leaf{i} Nodes=n[{18 * i + 1}-{18 * i + 18}]" for i in range(4)]
TREE = Site("tree", python="/env/bin/python", partitions={"main*": "n[1-72]", "gpu": "n[1-72]"}, switches=LEAVES)
NO_GPUS = Site("cpus", gpu_option="", python="/env/bin/python")

CASES: dict[str, tuple[Site, list[str]]] = {
    "plain": (TREE, ["nodes=4", "model=llama_1b", "fsdp=full_shard"]),
    "group_over_nodes": (TREE, ["nodes=32", "model=llama3_70b", "fsdp=hybrid_shard", "fsdp.shard_group=64"]),
    "elastic_shared": (OLD, ["nodes=2:8", "nproc_per_node=4", "cluster.exclusive=false", "cluster.cpus_per_task=32"]),
    "everything": (
        TREE,
        [
            "nodes=2",
            "cluster.partition=gpu",
            "cluster.account=llm",
            "cluster.qos=high",
            "cluster.time=2-00:00:00",
            "cluster.gpus_per_node='h100:8'",
            "cluster.mem='0'",
            "cluster.constraint='h100&ib'",
            "cluster.nodelist='node[1-8]'",
            "cluster.exclude=node7",
            "cluster.reservation=maint",
            "cluster.switches='1@2:00:00'",
            "cluster.comment='it is ours; $HOME'",
            "cluster.mail_user=me@example.org",
            "cluster.mail_type=END",
            "cluster.extra=['--licenses=foo','--nice=100']",
            "cluster.setup=['module load cuda/12.4','source ~/env.sh']",
            "cluster.python=/sw/python",
        ],
    ),
    "pyxis": (
        TREE,
        [
            "nodes=2",
            "checkpoint.dir=/scratch/saved",
            "cluster.container=/images/torch.sqsh",
            "cluster.container_mounts=['/data:/data']",
            "cluster.python=/opt/conda/bin/python",
        ],
    ),
    "apptainer_cpu": (
        NO_GPUS,
        [
            "nodes=2",
            "hardware=cpu",
            "cluster.accelerator=cpu",
            "cluster.container=torch.sif",
            "cluster.container_runtime=apptainer",
            "cluster.snapshot_mb=0",
        ],
    ),
}


def rendered(site: Site, overrides: list[str], run_dir: str = "/shared/runs/golden") -> str:
    config = compose_job(["cluster=slurm", "model=llama_debug", *overrides])
    plan, _ = plan_of(config)
    job = Job(config, RunDir(run_dir), plan)
    for role in job.app.roles:
        role.env = {"OMP_NUM_THREADS": "1"}
    made = script(job, site, topology_of(site, config), 70)
    agent = shlex.join(commands(job, made).agent)
    text = made.of_run(run_dir, job.app.name, "250101120000-0a1b2c")
    return f"{text}\n# agent: {agent}\n".replace(str(as_written(".")), "/shared/me")  # where the tests run


def commands_of(config: JobConfig) -> Commands:
    job = Job(config, RunDir("/runs/a"), plan_of(config)[0])
    return commands(job, script(job, TREE, None, 70))


@pytest.mark.parametrize("name", CASES)
def test_script_is_the_reviewed_one(name: str) -> None:
    text = rendered(*CASES[name])
    file = GOLDEN / f"{name}.sh"
    if "FSDP_JOBS_WRITE_GOLDEN" in os.environ:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_hostile_run_directory_is_one_word_to_the_shell(tmp_path: Path) -> None:
    hostile = f"{tmp_path}/it's; touch {tmp_path}/owned $(touch {tmp_path}/owned) $$ 100%"
    text = rendered(TREE, ["cluster.python=echo"], f"{hostile}/run")
    done = subprocess.run(["bash"], input=text, capture_output=True, text=True, check=True)
    assert done.stdout == f"-m fsdp_jobs.launchers.slurm.batch {hostile}/run\n"
    assert not (tmp_path / "owned").exists()
    assert shlex.quote(f"{hostile}/run") in text.partition("# agent: ")[2], "and no macro of TorchX"


def test_a_signal_while_the_users_lines_run_reaches_the_batch_step() -> None:
    """The shell alone gets it, before the time limit and at a preemption."""
    shell = subprocess.Popen(["bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert shell.stdin is not None
    shell.stdin.write(rendered(TREE, ["cluster.python=echo", "cluster.setup=['set -u','echo begun','sleep 1']"]))
    shell.stdin.close()
    assert shell.stdout is not None and shell.stdout.readline() == "begun\n"
    shell.send_signal(signal.SIGUSR1)
    assert shell.stdout.read() == "-m fsdp_jobs.launchers.slurm.batch /shared/runs/golden SIGUSR1\n"
    assert shell.wait(10) == 0


def test_a_signal_while_python_starts_does_not_end_the_job(tmp_path: Path) -> None:
    """It has no handler yet. SLURM itself starts a preempted job again, but not one that has ended."""
    starting = tmp_path / "python"
    starting.write_text('#!/bin/sh\nkill -USR1 $$\necho "$@"\n')
    starting.chmod(0o755)
    text = rendered(TREE, [f"cluster.python={starting}"])
    done = subprocess.run(["bash"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "-m fsdp_jobs.launchers.slurm.batch /shared/runs/golden\n")


def test_a_comment_stays_as_it_was_written() -> None:
    lines = rendered(TREE, ["cluster.comment='lr = 3'"]).splitlines()
    assert "#SBATCH --comment='lr = 3 fsdp_jobs:250101120000-0a1b2c'" in lines


def test_nodes_excluded_by_an_option_stay_so_at_each_requeue_and_one_node_more_asks_for_a_nodes_share() -> None:
    """A requeue sets the list anew."""
    extra = "cluster.extra=['-x n7','-G16','-q high','--export=NONE']"
    config = compose_job(["cluster=slurm", "model=llama_debug", "nodes=2", extra, "cluster.comment=ours"])
    made = commands_of(config)
    assert made.exclude == ["n7"]
    assert made.submit == ["--comment=ours", "--gpus-per-node=8", "--exclusive", "--qos=high"]


def test_cpus_are_requested_once() -> None:
    """SLURM refuses --cpus-per-gpu beside --cpus-per-task."""
    shared = rendered(TREE, ["cluster.exclusive=false"])
    assert "--cpus-per-task=8" in shared
    by_gpu = rendered(TREE, ["cluster.exclusive=false", "cluster.extra=['--cpus-per-gpu 4']"])
    assert "#SBATCH --cpus-per-gpu=4" in by_gpu and "--cpus-per-task" not in by_gpu


def test_what_the_user_requires_is_not_excluded_and_files_list_hosts(tmp_path: Path) -> None:
    """SLURM 22.05 lets a job wait for ever (BadConstraints) that requires and excludes a host, or refuses it."""
    listed = tmp_path / "left-out"
    listed.write_text("n7\nn[11-12]\n")
    where = ["cluster.nodelist='n[1-2],n4'", f"cluster.exclude={listed}"]
    config = compose_job(["cluster=slurm", "model=llama_debug", "nodes=3", *where])
    made = commands_of(config)
    assert made.excluding(["n5", "n4", "n3"]) == ["n3", "n5", "n7", "n[11-12]"]
    config.cluster.exclude = str(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"cluster\.exclude=.*: No such file"):
        commands_of(config)


def test_margin_follows_what_saves_took() -> None:
    assert margin_s(save_s=0, step_s=0, grace_s=60) == 70
    assert margin_s(save_s=8, step_s=2, grace_s=60) == 30
    assert margin_s(save_s=200, step_s=2, grace_s=60) == 70, "the coordinator waits no longer than the grace"
