"""The program of a job's containers (Docker, Compose, Kubernetes): run its command in each attempt. No torch.

    python -m fsdp_jobs.launchers.attempts coordinator RUN_DIR PORT -- COMMAND...
    python -m fsdp_jobs.launchers.attempts node RUN_DIR HOST:PORT -- COMMAND...

The coordinator's container begins an attempt after each verdict to continue; the nodes' containers take part in it.
They share only the run directory, and each may be restarted at any time.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

from fsdp_jobs.config.resolve import most_nodes
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.launchers.supervisor import MOMENT_S, Attempt, Process, StorageErrors, is_superseded
from fsdp_jobs.run import events, log
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, COORDINATOR_ENV
from fsdp_jobs.run.processes import STOP_SIGNALS, this_machine
from fsdp_jobs.run.threads import wait_until
from fsdp_jobs.run.verdict import EXIT_FAILED, EXIT_REQUEUE, Verdict

_POLL_S = 0.5
_RECORD_S = 20.0  # to wait until the submitting command has recorded the handle; it may have died
_LEAVE_S = 20.0  # after an attempt's verdict, for the command to end

logger = logging.getLogger(__name__)


class Container(Attempt):
    """This container's part of a job: its command, run once or more in each attempt; `number` is the present one's."""

    poll_s = _POLL_S
    echo = True

    def __init__(self, run: RunDir, name: str, coordinator: str, command: Sequence[str]):
        """`name` is coordinator or node-<i>; `coordinator` is the coordinator's address, for itself its port."""
        super().__init__(run, -1)
        self.name, self.coordinator, self.command = name, coordinator, command
        self.is_leaving = False  # this container is being stopped
        for number in STOP_SIGNALS:
            signal.signal(number, self._forward)

    def _forward(self, number: int, _frame: object) -> None:
        self.is_leaving |= number != signal.SIGUSR1
        for process in self.processes:
            process.popen.send_signal(number)

    def work(self) -> int:
        """Take part in every attempt until the job or this container ends; return the exit code.

        An attempt without a verdict is continued: its coordinator died, and the new one adopts its round.
        """
        storage_errors = StorageErrors(MOMENT_S)
        while True:
            with storage_errors:
                if is_superseded(self.run):
                    return EXIT_FAILED
                self.number = self.run.last_attempt()
                is_open = self.number >= self.run.first_attempt() and self.verdict is None
                if (final := Verdict.final(self.run)) is not None:
                    return final.exit_code_of_attempt
                if self.is_leaving:
                    return EXIT_REQUEUE
                if is_open:
                    self._take_part()
                    continue
                if self.name == "coordinator":
                    wait_until(lambda: self.run.pending_launcher is None, _RECORD_S)
                    nodes = most_nodes(load_config(self.run.config))
                    self.number += 1
                    self.begin(events.AttemptStarted(nodes))
                    continue
            time.sleep(_POLL_S)

    def _take_part(self) -> None:
        """Restart the command until the attempt has its verdict or this container leaves."""
        self.processes = []
        env = {**os.environ, ATTEMPT_ENV: str(self.number), COORDINATOR_ENV: self.coordinator}
        process = self.start(self.name, self.command, env)
        if self.is_leaving:  # the signal came while the command was started
            process.popen.terminate()
        self.supervise()
        self.finish(0 if is_superseded(self.run) else _LEAVE_S)

    def is_over(self) -> bool:
        if is_superseded(self.run):
            return True
        return super().is_over() or (self.is_leaving and all(p.has_ended for p in self.processes))

    def restarts(self, process: Process) -> bool:
        """Whether the command, which has ended, is restarted; on an excluded machine this container ends instead."""
        if this_machine() in self.run.excluded_hosts() and self.name != "coordinator":
            self.is_leaving = True
        return not self.is_leaving

    def give_up(self, process: Process, verdict: Verdict) -> None:
        """End the job if the command never worked on any node; otherwise end only this container."""
        worked = any(e.attempt == self.number for e in events.newest_of(self.run, events.RoundStarted))
        if worked and self.name != "coordinator":
            sys.exit(EXIT_FAILED)
        super().give_up(process, verdict)


def main(role: str, run_dir: str, address: str, _dashes: str, *command: str) -> int:
    """Do the work of a container and return its exit code.

    Args:
        role: coordinator or node.
        run_dir: as it is mounted here.
        address: for the coordinator its port, for a node the coordinator's host:port.
        command: from the AppDef; a node's command has its number as `--node I`.
    """
    log.configure()
    name = role if role == "coordinator" else f"node-{command[command.index('--node') + 1]}"
    try:
        return Container(RunDir(run_dir), name, address, command).work()
    except OSError:  # the run directory's storage failed here; it may work in other containers
        logger.exception("%s cannot work here", name)
        return EXIT_REQUEUE


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
