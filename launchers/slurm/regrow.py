"""New nodes for old: SLURM gives a job no node in place of a lost one, so a job of one node is sent to fill in.

The batch step submits it, and it runs as `python -m fsdp_jobs.launchers.slurm.regrow RUN_DIR NODE JOB`: one agent
that joins the rendezvous of the job it belongs to, and leaves with it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress

from fsdp_jobs.launchers.slurm import client
from fsdp_jobs.launchers.slurm.script import Steps
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, HOST_ENV
from fsdp_jobs.run.events import record_event
from fsdp_jobs.run.processes import die_with_parent
from fsdp_jobs.run.verdict import EXIT_FAILED, Verdict

_LIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
_TRIES = 3  # a number
_POLL_S = 1.0
_ASK_SLURM_S = 10.0
_LEAVE_S = 15.0  # for the agent, after the verdict


class Companions:
    """The one-node jobs of an attempt, by the number of the node that each stands in for."""

    def __init__(self, run: RunDir, steps: Steps, env: dict[str, str], attempt: int, job_id: str):
        self.run, self.steps, self.env, self.attempt, self.job_id = run, steps, env, attempt, job_id
        self.jobs: dict[int, str] = {}
        self.tries: dict[int, int] = {}

    def ask_for(self, numbers: list[int]) -> None:
        """Have a job queued or running for each of these nodes.

        Raises:
            SlurmError: SLURM does not answer, or does not want it.
        """
        if not self.steps.regrow:
            return
        known = client.my_jobs()
        for number in numbers:
            mine = known.get(self.jobs.get(number, ""))
            alive = mine is not None and mine.state in _LIVE
            if not alive and self.tries.get(number, 0) < _TRIES:
                self.tries[number] = self.tries.get(number, 0) + 1
                self.jobs[number] = self._submit(number)
                record_event(self.run, "node_asked_for", self.attempt, node=number, slurm_job=self.jobs[number])

    def _submit(self, number: int) -> str:
        module = ["-m", "fsdp_jobs.launchers.slurm.regrow"]
        program = [sys.executable, *module, str(self.run.path), str(number), self.job_id]
        script = f"#!/bin/bash\nexec {shlex.join(program)}\n"
        name = os.environ.get("SLURM_JOB_NAME", self.run.name)
        log = str(self.run.node(self.attempt, number)).replace("%", "%%") + "/companion-%j.out"
        options = ["--parsable", "--nodes=1", "--no-requeue", f"--job-name={name}-node-{number}", f"--output={log}"]
        if excluded := [*self.run.excluded_hosts(), *self.steps.exclude]:
            options.append(f"--exclude={','.join(excluded)}")
        self.run.node(self.attempt, number).mkdir(parents=True, exist_ok=True)
        # What this job's environment says of its own allocation would be taken for wishes.
        env = {k: v for k, v in self.env.items() if not k.startswith(("SLURM_", "SBATCH_")) or k == "SLURM_CONF"}
        return client.call("sbatch", *options, *self.steps.submit, stdin=script, env=env).strip().partition(";")[0]

    def release(self) -> None:
        """Give back what was asked for. Running ones leave by themselves, too; waiting ones would start in vain."""
        if self.jobs:
            try:
                client.call("scancel", "--quiet", *self.jobs.values())
            except client.SlurmError as e:
                print(f"WARNING {e}", flush=True)


def fill_in(run: RunDir, number: int, job_id: str) -> int:
    """Run one agent until the attempt it was asked for is over."""
    attempt = int(os.environ[ATTEMPT_ENV])
    steps = Steps.from_json((run.submit / "steps.json").read_text())
    node = ["srun", "--overlap", "--cpu-bind=none", "--mpi=none", f"--cpus-per-task={os.environ['SLURM_CPUS_ON_NODE']}"]
    command = [*node, *(a.replace("{node}", str(number)) for a in steps.agent)]
    env = {**os.environ, HOST_ENV: os.environ["SLURMD_NODENAME"]}
    agent: subprocess.Popen[bytes] | None = None
    asked_at = -_ASK_SLURM_S
    while Verdict.read(run, attempt) is None and run.last_attempt() == attempt:
        if time.monotonic() - asked_at > _ASK_SLURM_S:
            asked_at = time.monotonic()
            parent = client.my_jobs(fresh=True).get(job_id)
            if parent is None or parent.state != "RUNNING":
                return 0
        if agent is None:
            with (run.node(attempt, number) / "agent.log").open("ab") as log:
                agent = subprocess.Popen(command, env=env, stdout=log, stderr=log, preexec_fn=die_with_parent)
        if agent.poll() is not None:
            return agent.returncode
        time.sleep(_POLL_S)
    with suppress(subprocess.TimeoutExpired):
        return agent.wait(_LEAVE_S) if agent is not None else 0
    return EXIT_FAILED  # its coordinator died before it could say that it is over; the end of this job ends it


if __name__ == "__main__":
    sys.exit(fill_in(RunDir(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
