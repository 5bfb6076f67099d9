"""Submit latency on a real SLURM cluster, side by side: this project, bare sbatch, TorchX, submitit.

    python benchmarks/submit.py [--times 10] [--jobs 100] [--rounds 3]

One job: each side is a fresh process on the login node of deploy/slurm, timed from its start until it has printed a
job id. Many jobs: until SLURM has all of them. Sides take turns. The partition is down, so that no job starts, and
what was submitted is cancelled. hydra-submitit-launcher is measured when it is installed.
Needs root and what deploy/slurm needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

CLUSTER = Path(__file__).parent.parent / "deploy" / "slurm" / "cluster"
BIN = Path(sys.executable).parent
OURS = ["cluster=slurm", "cluster.accelerator=cpu", "hardware=cpu", "data=synthetic", "nodes=2"]
TORCHX = [str(BIN / "torchx"), "run", "--workspace", "", "-s", "slurm", "utils.sh", "--num_replicas", "2", "true"]
ONE_IN = 20  # one in so many stands for the others where each job is a process of its own

_SUBMITIT = """
import submitit
executor = submitit.SlurmExecutor(folder="submitit")
executor.update_parameters(nodes=2, ntasks_per_node=1, time=5)
for i in range({jobs}):
    print(executor.submit(print, i).job_id)
"""

_HYDRA = """
import hydra
@hydra.main(version_base="1.3", config_path=None)
def app(config):
    pass
app()
"""

HYDRA = [sys.executable, "app.py", "--multirun", "hydra/launcher=submitit_slurm"]


class Took(NamedTuple):
    """What one submission cost."""

    seconds: float
    cpu: float  # seconds of all its processes; on a machine with other work the ones to trust


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Login:
    """The login node of a cluster on which no job starts."""

    def __init__(self, root: str, folder: str):
        self.folder = folder
        python = {"XDG_STATE_HOME": f"{folder}/state", "PYTHONDONTWRITEBYTECODE": "1"}
        self.env = {**os.environ, "FSDP_JOBS_SLURM": root, **python}

    def cluster(self, *verb: str) -> str:
        return subprocess.run([CLUSTER, *verb], env=self.env, check=True, capture_output=True, text=True).stdout

    def queued(self) -> int:
        return len(self.cluster("run", "login", "squeue", "--noheader", "--array").splitlines())

    def until_ended(self, command: Sequence[str]) -> Took:
        """Until a command has ended, which it does once it has submitted."""
        begun, before = time.perf_counter(), cpu_of_children()
        done = subprocess.run(
            [CLUSTER, "run", "login", *command], cwd=self.folder, env=self.env, capture_output=True, text=True
        )
        took = Took(time.perf_counter() - begun, cpu_of_children() - before)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
        return took

    def until_queued(self, command: Sequence[str], jobs: int) -> Took:
        """Until SLURM has so many jobs of a command that waits for them; it is ended then."""
        begun = time.perf_counter()
        process = subprocess.Popen(
            [CLUSTER, "run", "login", *command], cwd=self.folder, env=self.env, stdout=subprocess.DEVNULL
        )
        while self.queued() < jobs:
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
            time.sleep(0.02)
        took = time.perf_counter() - begun
        alive = psutil.Process(process.pid)
        used = [p.cpu_times() for p in (alive, *alive.children(recursive=True))]
        process.kill()
        process.wait()
        return Took(took, sum(u.user + u.system for u in used))

    def clear(self) -> None:
        self.cluster("run", "login", "scancel", "--user=root")
        while self.queued():
            time.sleep(0.05)


def has_hydra_submitit() -> bool:
    plugins = importlib.util.find_spec("hydra_plugins")
    return plugins is not None and importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is not None


def one_job(login: Login) -> dict[str, Callable[[int], Took]]:
    """What each side takes for one job of two nodes."""
    commands = {
        "sbatch": ["sbatch", "--nodes=2", "--output=/dev/null", "--wrap=true"],
        "fsdp-jobs": [sys.executable, "-m", "fsdp_jobs", *OURS],
        "TorchX": TORCHX,
        "submitit": [sys.executable, "-c", _SUBMITIT.format(jobs=1)],
    }
    found: dict[str, Callable[[int], Took]] = {
        name: lambda turn, command=command: login.until_ended(command)  # type: ignore[misc]
        for name, command in commands.items()
    }
    if has_hydra_submitit():
        found["hydra-submitit"] = lambda turn: login.until_queued(HYDRA, 1)
    return found


def many_jobs(login: Login, jobs: int) -> dict[str, Callable[[int], Took]]:
    """What each side takes for so many jobs of two nodes, which differ in one value."""
    sample = max(1, jobs // ONE_IN)

    def one_by_one(command: Sequence[str]) -> Took:
        took = [login.until_ended(command) for _ in range(sample)]
        return Took(sum(t.seconds for t in took) * jobs / sample, sum(t.cpu for t in took) * jobs / sample)

    grid = [sys.executable, "-m", "fsdp_jobs", "--multirun", *OURS, f"seed=range({jobs})"]
    found: dict[str, Callable[[int], Took]] = {
        "fsdp-jobs --multirun": lambda turn: login.until_ended([*grid, f"sweep.name=grid{turn}"]),
        f"fsdp-jobs, {jobs} times": lambda turn: one_by_one([sys.executable, "-m", "fsdp_jobs", *OURS]),
        f"TorchX, {jobs} times": lambda turn: one_by_one(TORCHX),
        f"submitit, {jobs} processes": lambda turn: one_by_one([sys.executable, "-c", _SUBMITIT.format(jobs=1)]),
        "submitit, one process": lambda turn: login.until_ended([sys.executable, "-c", _SUBMITIT.format(jobs=jobs)]),
    }
    if has_hydra_submitit():
        swept = [*HYDRA, f"+x=range({jobs})", "hydra.launcher.nodes=2"]
        found["hydra-submitit --multirun"] = lambda turn: login.until_queued(swept, jobs)
    return found


def in_turns(login: Login, sides: dict[str, Callable[[int], Took]], times: int) -> dict[str, list[Took]]:
    """What each side took, after a turn for the caches."""
    took: dict[str, list[Took]] = {name: [] for name in sides}
    for turn in range(times + 1):
        for name, side in sides.items():
            one = side(turn)
            took[name] += [one] if turn else []
            login.clear()
    return took


def show(title: str, took: dict[str, list[Took]], ours: str) -> None:
    print(f"\n{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {title}, seconds")
    print(f"{'':28}{'median':>8}{'least':>8}{'most':>8}{'/ ours':>8}{'CPU':>8}{'/ ours':>8}")
    for name, all_of in took.items():
        seconds, cpu = [t.seconds for t in all_of], [t.cpu for t in all_of]
        wall = statistics.median(t.seconds / o.seconds for t, o in zip(all_of, took[ours], strict=True))
        used = statistics.median(t.cpu / o.cpu for t, o in zip(all_of, took[ours], strict=True))
        print(
            f"{name:28}{statistics.median(seconds):8.2f}{min(seconds):8.2f}{max(seconds):8.2f}{wall:8.1f}"
            f"{statistics.median(cpu):8.2f}{used:8.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10, help="turns with one job; 0 leaves them out")
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3, help="turns with many jobs; 0 leaves them out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "app.py").write_text(_HYDRA)
        login = Login(f"/tmp/fsdp_jobs-slurm-{os.getpid()}", folder)
        try:
            login.cluster("up")
            login.cluster("run", "ctl", "scontrol", "update", "PartitionName=main", "State=DOWN")
            if args.times:
                took = in_turns(login, one_job(login), args.times)
                show(f"{args.times} submissions of 2 nodes each", took, "fsdp-jobs")
            if args.rounds:
                took = in_turns(login, many_jobs(login, args.jobs), args.rounds)
                title = f"{args.jobs} jobs, {args.rounds} rounds, one by one from every {ONE_IN}th"
                show(title, took, "fsdp-jobs --multirun")
        finally:
            login.cluster("down")


if __name__ == "__main__":
    main()
