"""What a batch step starts, as the submission wrote it down, and the options of srun for a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_jobs.run.directory import RunDir, as_written, write_atomic
from fsdp_jobs.run.record import Record


@dataclass
class Commands(Record):
    """The commands of a job. `{node}` in the agent's arguments stands for the node's number."""

    coordinator: list[str]
    agent: list[str]
    node_test: list[str]  # empty: none
    env: dict[str, str]
    max_nodes: int
    regrow: bool
    exclude: list[str]  # hostlists that the user excludes
    submit: list[str]  # options of sbatch for one more node
    continued: dict[str, str] = field(default_factory=dict)  # id of a job -> of the one that continues it
    place: str = ""  # in a sweep: <number of the script in its submission>_<task>; no task where it is no array

    @property
    def is_task(self) -> bool:
        """Whether the job was submitted as a task of an array."""
        return bool(self.place.partition("_")[2])

    def write(self, run: RunDir) -> None:
        write_atomic(run.submit / "steps.json", self.to_json(indent=2))

    @classmethod
    def read(cls, run: RunDir) -> Commands:
        return cls.from_json((run.submit / "steps.json").read_bytes())

    def newest(self, job_id: str) -> str:
        """Return the id of the last of the jobs that continue this one; its own where none does."""
        while job_id in self.continued:
            job_id = self.continued[job_id]
        return job_id

    def agent_of(self, node: int) -> list[str]:
        return [argument.replace("{node}", str(node)) for argument in self.agent]


def srun(hosts: Sequence[str], cpus: int | None = None) -> list[str]:
    """Return the start of a command line: a step with one task per host that survives the loss of hosts.

    A job submitted with --export=NONE passes that on to srun by its environment; steps need all of it.
    """
    where = [f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}", f"--nodelist={','.join(hosts)}"]
    share = ["--overlap", "--cpu-bind=none", "--mpi=none", *([f"--cpus-per-task={cpus}"] if cpus else [])]
    return [
        "srun",
        "--export=ALL",
        f"--chdir={as_written('.')}",
        *where,
        *share,
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
    ]
