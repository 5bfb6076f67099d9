"""What a batch step and its helpers share: the recorded commands of a job, its steps, and how it starts again."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fsdp_jobs.config.errors import one_line
from fsdp_jobs.launchers.slurm import client
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import as_written, write_atomic
from fsdp_jobs.run.record import Record

EXCLUDE_S = 6 * 3600.0  # exclusion of a node that fails the node test, or starts no job
LEAST_TRAINING_S = 30  # between the start of a job and its last save


@dataclass
class Commands(Record):
    """The commands of a job. The agent's arguments have `{node}` in place of the node's number."""

    coordinator: list[str]
    agent: list[str]
    node_test: list[str]  # empty: none
    env: dict[str, str]
    max_nodes: int
    regrow: bool
    exclude: list[str]  # hostlists excluded by the user
    submit: list[str]  # options of sbatch for a companion
    continued: dict[str, str] = field(default_factory=dict)  # id of a job -> id of the job that continues it
    required: list[str] = field(default_factory=list)  # hosts of the user's nodelist
    margin_s: int = 0  # between the last save and the time limit
    place: str = ""  # in a sweep: <number of the script in its submission>_<task>; no task if it is a plain job

    @property
    def job_id(self) -> str:
        """The id of the job that this process belongs to, as squeue shows it.

        In the last task of an array to start, SLURM_JOB_ID is the number of the array, which stands for all its tasks.
        A job that was submitted from inside a task of another array may have that array's variables.
        """
        if self.place.partition("_")[2]:
            return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        return os.environ["SLURM_JOB_ID"]

    def write(self, run: RunDir) -> None:
        write_atomic(run.submit / "steps.json", self.to_json(indent=2))

    @classmethod
    def read(cls, run: RunDir) -> Commands:
        return cls.from_json((run.submit / "steps.json").read_bytes())

    def newest(self, job_id: str) -> str:
        """Return the id of the last job that continues this one; its own id if there is none."""
        while job_id in self.continued:
            job_id = self.continued[job_id]
        return job_id

    def excluding(self, hosts: Iterable[str]) -> list[str]:
        """Return what to exclude: these hosts and what the user excludes, without what the user requires.

        SLURM refuses, or never starts, a job that both requires and excludes a host.
        """
        return [*sorted({*hosts} - {*self.required}), *self.exclude]

    def agent_of(self, node: int) -> list[str]:
        return [argument.replace("{node}", str(node)) for argument in self.agent]


def srun(hosts: Sequence[str], cpus: int | None = None) -> list[str]:
    """Return the beginning of a command line: srun for one task per host, in a step that survives the loss of hosts.

    In a job submitted with --export=NONE srun inherits that option, but steps need the whole environment.
    """
    return [
        "srun",
        "--export=ALL",
        f"--chdir={as_written('.')}",
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts)}",
        f"--nodelist={','.join(hosts)}",
        "--overlap",
        "--cpu-bind=none",
        "--mpi=none",
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
    ]


def start_again(run: RunDir, attempt: int, job_id: str, excluded: Sequence[str]) -> bool:
    """Requeue this job or, where the site forbids requeues, submit its script again to start when it ends.

    Returns:
        True if it was submitted.

    Raises:
        SlurmError: SLURM does not answer, or refuses both.
        BadInput: another command is submitting the run.
    """
    try:
        client.call("scontrol", "requeue", job_id)
        return False
    except client.SlurmError as e:
        if client.running(job_id) is None:  # it was requeued despite the error, or has ended
            raise
        why = one_line(e)
    with run.locked():  # two guards may get here at the same time
        commands = Commands.read(run)
        if job_id in commands.continued:
            return True
        try:
            commands.continued[job_id] = new = _submitted_before(job_id) or _submit(job_id, excluded)
        except client.SlurmError as e:
            raise client.SlurmError(f"no requeue: {why}; no new job: {one_line(e)}") from e
        commands.write(run)
        events.record(run, attempt, events.Continued(new, why))
    return True


def _submitted_before(job_id: str) -> str:
    """Return the job that already continues this one, of a submission that was taken and not answered; else empty."""
    jobs, (_, _, task) = client.queue(fresh=True), job_id.partition("_")
    own = jobs[job_id].tag if job_id in jobs else ""
    others = (job for job in jobs.values() if own and job.tag == own and job.id != job_id and job.state.is_active)
    return next((job.id for job in others if not task or job.id.endswith(f"_{task}")), "")


def _submit(job_id: str, excluded: Sequence[str]) -> str:
    """Submit this job's script again with its environment; for a task of an array, only that task."""
    _, _, task = job_id.partition("_")
    script = client.call("scontrol", "write", "batch_script", os.environ["SLURM_JOB_ID"], "-")
    script = re.sub(r"^#SBATCH '?(--hold|-H)\b.*\n", "", script, flags=re.MULTILINE)  # it has been released
    options = [f"--dependency=afterany:{job_id}", "--begin=now", *([f"--array={task}"] if task else [])]
    options += [f"--exclude={','.join(excluded)}"] if excluded else []
    new = client.sbatch(script, *options, env=os.environ)
    return f"{new}_{task}" if task else new
