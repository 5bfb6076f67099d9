"""The launcher `compose_fsdp`, and the programs of deploy/compose.yaml's services. No torch.

    python -m fsdp_jobs.launchers.compose submit NAME [key=value ...]
    python -m fsdp_jobs.launchers.compose coordinator | node NAME

`submit` writes the run directory; the others run the job. Compose decides how many nodes there are, so a node takes
the lowest number that no other has.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from fsdp_jobs.config.errors import Problem
from fsdp_jobs.config.resolve import ranks_per_node
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.launchers import attempts
from fsdp_jobs.launchers.base import SESSION, Description, Job, Launcher, prepare_each
from fsdp_jobs.run.directory import RunDir, runs_in
from fsdp_jobs.run.files import try_lock, write_atomic
from fsdp_jobs.run.verdict import Verdict

RUNS = Path("/runs")  # the volume that all services mount
_PORT = "29400"


class ComposeLauncher(Launcher):
    """Hands a job to the services of deploy/compose.yaml, which already run. An app's id is its run's name."""

    name = "compose_fsdp"

    def prepare(self, jobs: Sequence[Job]) -> list[Path]:
        return prepare_each(jobs, _problems, lambda job: job.run.path)  # the services need nothing else

    def submit(self, requests: Sequence[Path], parallelism: int, folder: Path | None) -> list[str]:
        return [run_dir.name for run_dir in requests]

    def find_one(self, run: RunDir) -> str:
        return run.name  # the services run whatever is in their volume

    def cluster_of(self, app_id: str) -> str:
        return SESSION

    def run_of(self, app_id: str, cluster: str = "") -> RunDir | None:
        run = RunDir(RUNS / app_id)
        return run if run.is_submitted else None

    def describe(self, app_ids: Sequence[str]) -> list[Description | None]:
        runs = [self.run_of(app_id) for app_id in app_ids]
        return [None if run is None else Description.of_run(run, Verdict.final(run) is None) for run in runs]

    def known(self) -> list[str]:
        return [run.name for run in runs_in(str(RUNS))]

    def end(self, app_id: str) -> None:
        """Ask the job to save and stop; from a container it cannot be killed."""
        write_atomic(RunDir(RUNS / app_id).stop_request, "cancelled")


create_scheduler = ComposeLauncher.scheduler


def _problems(job: Job) -> Iterator[Problem]:
    if job.run.path.parent != RUNS:
        what = f"the services of deploy/compose.yaml share {RUNS} only"
        cure = "docker compose -f deploy/compose.yaml up; cluster=docker needs no compose"
        yield Problem(f"runs_dir={job.run.path.parent}", what, cure)


def submit(run: RunDir, overrides: Sequence[str]) -> int:
    """Run the submit command, unless the job is still active; return the exit code."""
    if run.is_submitted and Verdict.final(run) is None:
        print(f"{run.name} continues as it was submitted")
        return 0
    own = ["cluster=compose", f"runs_dir={RUNS}", f"name={run.name}", "attach=false"]
    return subprocess.run([sys.executable, "-m", "fsdp_jobs", *own, *overrides]).returncode


def claim_node(run: RunDir) -> tuple[int, IO[str]]:
    """Return the lowest number that no other container has, and the lock that holds it."""
    node = 0
    while not try_lock(lock := (run.submit / f"node-{node}.lock").open("w")):
        lock.close()
        node += 1
    return node, lock


def main(argv: Sequence[str]) -> int:
    service, name, *overrides = argv
    run = RunDir(RUNS / name)
    if service == "submit":
        return submit(run, overrides)
    wrapped = ("--", sys.executable, "-m")
    if service == "coordinator":
        command = ["fsdp_jobs.control.server", str(run.path)]
        return attempts.main("coordinator", str(run.path), _PORT, *wrapped, *command)
    node, _lock = claim_node(run)
    nproc = ranks_per_node(load_config(run.config))
    command = ["fsdp_jobs.node.agent", str(run.path), "--node", str(node), "--nproc", str(nproc)]
    return attempts.main("node", str(run.path), f"coordinator:{_PORT}", *wrapped, *command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
