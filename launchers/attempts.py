"""Attempts inside containers: what starts a job's command in a container that outlives an attempt. No torch.

    python -m fsdp_jobs.launchers.attempts coordinator RUN_DIR PORT -- COMMAND...
    python -m fsdp_jobs.launchers.attempts node RUN_DIR HOST:PORT -- COMMAND...

The coordinator's container begins attempts, one after the other, as the verdicts say; the nodes' containers
follow. Each starts its command again when it dies before the attempt is judged. All they share is the run directory.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fsdp_jobs.config.resolve import node_range
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, COORDINATOR_ENV
from fsdp_jobs.run.processes import die_with_parent
from fsdp_jobs.run.tail import last_lines
from fsdp_jobs.run.verdict import EXIT_FAILED, EXIT_REQUEUE, Verdict

_POLL_S = 0.5
_EARLY_DEATH_S = 10.0  # a command that dies younger than this, three times in a row, is not worth starting again
_LEAVE_S = 20.0  # what still runs so long after its attempt's verdict is killed


class Member:
    """This container's part of a job: its command, run once or more an attempt."""

    def __init__(self, run: RunDir, name: str, coordinator: str, first: int, command: Sequence[str]):
        """`name` is coordinator or node-<i>; attempts before `first` belong to earlier submissions."""
        self.run, self.name, self.coordinator, self.first, self.command = run, name, coordinator, first, command
        self.leaving = False  # this container is being stopped
        self._popen: subprocess.Popen[bytes] | None = None
        self._early_deaths = 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._forward)

    def _forward(self, number: int, _frame: object) -> None:
        self.leaving = self.leaving or number != signal.SIGUSR1
        if self._popen is not None:
            self._popen.send_signal(number)

    def newest(self) -> tuple[int, Verdict | None]:
        """The newest attempt of this submission and its verdict; -1 before the first."""
        attempt = self.run.last_attempt()
        return (attempt, Verdict.read(self.run, attempt)) if attempt >= self.first else (-1, None)

    def live(self, attempt: int) -> None:
        """Run the command until it ends or the attempt is over; a death before that is noted."""
        name = "coordinator.log" if self.name == "coordinator" else f"{self.name}/agent.log"
        log = self.run.attempt(attempt) / name
        born = time.monotonic()
        exit_code = self._run_command(attempt, log)
        if self.leaving or Verdict.read(self.run, attempt) is not None:
            return
        events.record(self.run, attempt, events.ProcessRestarted(self.name, exit_code))
        self._early_deaths = self._early_deaths + 1 if time.monotonic() - born < _EARLY_DEATH_S else 0
        if self._early_deaths == 3:
            self._give_up(attempt, log)

    def _run_command(self, attempt: int, log: Path) -> int:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._popen = subprocess.Popen(
            self.command,
            env={**os.environ, ATTEMPT_ENV: str(attempt), COORDINATOR_ENV: self.coordinator},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )
        if self.leaving:  # the signal came while it was started
            self._popen.terminate()
        copying = threading.Thread(target=_copy, args=(self._popen, log), daemon=True)
        copying.start()
        over_at: float | None = None
        while True:
            with suppress(subprocess.TimeoutExpired):
                exit_code = self._popen.wait(_POLL_S)
                copying.join(1)
                return exit_code
            if over_at is None and self.run.verdict(attempt).exists():
                over_at = time.monotonic()
            if over_at is not None and time.monotonic() - over_at > _LEAVE_S:
                self._popen.kill()

    def _give_up(self, attempt: int, log: Path) -> None:
        """What never worked on any node is no matter of one container: it ends the job, with its last words."""
        reason = f"{self.name} died three times within {_EARLY_DEATH_S:.0f} s of its start"
        worked = any(isinstance(e, events.RoundStarted) and e.attempt == attempt for e in events.read_events(self.run))
        if worked and self.name != "coordinator":
            sys.exit(EXIT_FAILED)
        Verdict("infrastructure", "stop", reason, last_lines=last_lines(log, 15)).close(self.run, attempt)


def _copy(process: subprocess.Popen[bytes], log: Path) -> None:
    """Output of a process into the container's own, and into its log while the disk has room."""
    assert process.stdout is not None
    with log.open("ab", buffering=0) as file:
        while chunk := os.read(process.stdout.fileno(), 1 << 16):
            os.write(sys.stdout.fileno(), chunk)
            try:
                file.write(chunk)
            except OSError as e:
                print(f"WARNING not in {log}: {e.strerror}", flush=True)


def coordinate(member: Member) -> int:
    """Attempts until the job is done, stopped, not worth another one, or this container is. Returns the exit code.

    An attempt without a verdict is gone on with: its coordinator died, and the new one adopts its round.
    """
    nodes = node_range(load_config(member.run.config).nodes)[1]
    while True:
        attempt, verdict = member.newest()
        if verdict is not None and verdict.decision == "stop":
            return verdict.exit_code_of_attempt
        if member.leaving:
            return EXIT_REQUEUE
        if attempt < 0 or verdict is not None:
            attempt = member.run.last_attempt() + 1
            member.run.attempt(attempt).mkdir(parents=True)
            events.record(member.run, attempt, events.AttemptStarted(nodes))
        member.live(attempt)


def follow(member: Member) -> int:
    """This node's part of every attempt, until the job ends or this container is to. Returns the exit code."""
    while True:
        attempt, verdict = member.newest()
        if verdict is not None and verdict.decision == "stop":
            return verdict.exit_code_of_attempt
        if member.leaving:
            return EXIT_REQUEUE
        if attempt < 0 or verdict is not None:
            time.sleep(_POLL_S)
        else:
            member.live(attempt)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One container of a job, through all its attempts.")
    parser.add_argument("role", choices=("coordinator", "node"))
    parser.add_argument("run_dir")
    parser.add_argument("address", help="a coordinator's port, or host:port of a node's coordinator")
    parser.add_argument("--first", type=int, default=0, help="attempt to begin with; older ones are another job's")
    parser.add_argument("command", nargs="+", help="after --; a node's names it as --node I")
    args = parser.parse_args(argv)
    if args.role == "coordinator":
        return coordinate(
            Member(RunDir(args.run_dir), "coordinator", f"0.0.0.0:{args.address}", args.first, args.command)
        )
    node = args.command[args.command.index("--node") + 1]
    return follow(Member(RunDir(args.run_dir), f"node-{node}", args.address, args.first, args.command))


if __name__ == "__main__":
    sys.exit(main())
