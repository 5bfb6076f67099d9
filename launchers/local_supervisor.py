"""The supervisor of a job whose nodes are processes of this machine; it acts as the cluster's scheduler. No torch.

    python -m fsdp_jobs.launchers.local_supervisor RUN_DIR

It outlives the terminal: it starts the coordinator and the agents of an attempt, restarts dead ones as a cluster would
replace a node, and begins the attempts that verdicts ask for. Ranks wait for it to start, so it imports little.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_jobs.launchers.app import with_environment
from fsdp_jobs.launchers.supervisor import Attempt, Process, main, staged
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ADDRESS_ENV, ATTEMPT_ENV, COORDINATOR_ENV
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.processes import NO_GPU, gpus_variable, hold_port
from fsdp_jobs.run.rank_state import remove_leftovers
from fsdp_jobs.run.verdict import Verdict

_LEAVE_S = 20.0  # after an attempt's verdict, for its processes to end


@dataclass
class LocalRequest:
    """The processes of a job."""

    run_dir: str
    gpus: list[str]  # ids; none unless there is one for every rank
    env: dict[str, str]
    coordinator: list[str]  # its command line
    nodes: list[list[str]]
    restart_nodes: bool

    def processes(self) -> Iterator[tuple[str, list[str], dict[str, str]]]:
        """Yield name, command line and own environment of each process; every node has its share of the GPUs."""
        yield "coordinator", self.coordinator, self.env
        size = len(self.gpus) // len(self.nodes)
        for node, argv in enumerate(self.nodes):
            own = self.gpus[node * size : (node + 1) * size]
            yield f"node-{node}", argv, {**self.env, gpus_variable(): ",".join(own) or NO_GPU}

    def __str__(self) -> str:
        commands = ((name, [*map("=".join, env.items()), *argv]) for name, argv, env in self.processes())
        return "\n".join(f"{name}: {' '.join(words)}" for name, words in commands)


class _LocalAttempt(Attempt):
    """An attempt whose nodes are processes of this machine."""

    def __init__(self, run: RunDir, request: LocalRequest):
        super().__init__(run)
        self.request = request

    def restarts(self, process: Process) -> bool:
        return super().restarts(process) and (self.request.restart_nodes or process.name == "coordinator")

    def go(self) -> Verdict:
        """Run the attempt to its end."""
        self.begin(events.AttemptStarted(len(self.request.nodes)))
        with hold_port() as held:
            address = f"127.0.0.1:{held.getsockname()[1]}"
            env = {ATTEMPT_ENV: str(self.number), COORDINATOR_ENV: address, ADDRESS_ENV: "127.0.0.1"}
            for name, argv, own in self.request.processes():
                self.start(name, argv, {**with_environment(own), **env})
            verdict = self.supervise()
        assert verdict is not None
        self.finish(_LEAVE_S)
        remove_leftovers()
        return verdict


def supervise(run: RunDir) -> int:
    """Run attempts until a verdict stops the job; return the exit code."""
    request = LocalRequest(**staged(run))

    def stop(number: int, _frame: object) -> None:
        write_atomic(run.stop_request, f"{signal.Signals(number).name} to the supervisor")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    while (verdict := _LocalAttempt(run, request).go()).decision == "requeue":
        pass
    return verdict.exit_code_of_attempt


if __name__ == "__main__":
    main(supervise)
