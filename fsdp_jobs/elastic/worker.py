"""The first thing a rank does: tie its life to its agent's, and send its output to its log file.

Our trainer is entered by `train` in a process forked from one that has imported torch already; any other
program by `python -m fsdp_jobs.elastic.worker PROGRAM ARGS...`, which becomes that program.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path

from fsdp_jobs.processes import die_with_parent

LOG_ENV = "FSDP_JOBS_LOG"  # this rank's log file
STACKS_ENV = "FSDP_JOBS_STACKS"  # where it writes its stacks on SIGUSR2


def enter() -> None:
    """Die when the parent dies (Linux), and append stdout and stderr to the rank's log."""
    die_with_parent()
    if os.getppid() == 1 and os.environ.get("FSDP_JOBS_AGENT_PID") != "1":
        os._exit(1)  # the parent died before the line above
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    log = Path(os.environ[LOG_ENV])
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def train() -> None:
    """A rank of our trainer. Exits with 75 after a requested stop."""
    enter()
    stacks = open(os.environ[STACKS_ENV], "a")  # noqa: SIM115 - stays open for as long as the rank lives
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    from fsdp_jobs.problems import BadInput, JobFailed
    from fsdp_jobs.training.entry import main

    try:
        exit_code = main()
    except (BadInput, JobFailed) as e:
        print(f"{type(e).__name__}: {e}", flush=True)
        raise
    except BaseException:
        traceback.print_exc()  # into the rank's log; torch's wrapper keeps it for itself
        raise
    if exit_code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)  # the state is saved and the group destroyed: nothing is left to clean up


if __name__ == "__main__":
    enter()
    os.execvp(sys.argv[1], sys.argv[1:])
