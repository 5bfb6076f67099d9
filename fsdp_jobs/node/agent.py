"""The agent of a node: starts, watches and stops its ranks in all rounds of an attempt.

It differs from plain torchrun in four ways. Ranks are numbered in topology order. When a round breaks, the agent
stops its ranks at once instead of when a collective times out. Ranks are forked from a process that has imported
torch, so a restart costs no imports. A signal becomes a request to save that all ranks agree on.

Importing torch takes seconds, and a signal may come meanwhile, so this module handles signals before it imports torch.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from fsdp_jobs.config.schema import load_config
from fsdp_jobs.node.program import Program, watch_edits
from fsdp_jobs.plan.sources import path_from_slurm
from fsdp_jobs.run import log, messages
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ADDRESS_ENV, AGENT_PID_ENV, ATTEMPT_ENV, PROGRAM_ENV, RANK_STATE_ENV, RUN_DIR_ENV
from fsdp_jobs.run.leaves import tiers_in
from fsdp_jobs.run.processes import STOP_SIGNALS, raise_file_limit, this_machine
from fsdp_jobs.run.rank_state import keep_temporaries_in, make_folder
from fsdp_jobs.run.verdict import EXIT_FAILED, EXIT_REQUEUE, Verdict

logger = logging.getLogger(__name__)

_UNLIMITED = 1 << 30  # restarts: the coordinator limits them, not the agent
_MONITOR_S = 0.1


class Signals:
    """Handles signals: the first asks all ranks of the job to save and exit; a cluster may repeat it meanwhile."""

    def __init__(self) -> None:
        """Handle signals from now on; a signal waits until `pass_on`."""
        self._received: str | None = None
        self._notice: Callable[[str], None] | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._react)

    def _react(self, number: int, _frame: object) -> None:
        if self._received is None:
            self._received = signal.Signals(number).name
            if self._notice is not None:
                self._notice(self._received)

    def pass_on(self, notice: Callable[[str], None]) -> None:
        """Pass on the first signal, even if it has already come."""
        self._notice = notice
        if self._received is not None:
            notice(self._received)


def run_agent(args: argparse.Namespace, signals: Signals) -> int:
    """Run this node's ranks through all rounds of an attempt. Returns the attempt's exit code."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from fsdp_jobs.node import forkserver, worker
    from fsdp_jobs.node.elastic_agent import Agent
    from fsdp_jobs.node.output import OutputMetrics
    from fsdp_jobs.node.rank_logs import LogKeeper, RankLogs
    from fsdp_jobs.node.rendezvous import CoordinatorRendezvous
    from fsdp_jobs.node.tracker import TrackerProcess

    run, attempt = RunDir(args.run_dir), int(os.environ[ATTEMPT_ENV])
    config = load_config(run.config)
    folder = make_folder()
    keep_temporaries_in(folder)
    tiers = [made for tier in tiers_in("node") if (made := tier.of_node(config, run, attempt, args.node)) is not None]
    this = messages.Agent(
        attempt,
        args.node,
        host=this_machine(),
        address=os.environ.get(ADDRESS_ENV) or socket.gethostname(),
        nproc=args.nproc,
        switches=path_from_slurm(
            os.environ.get("SLURM_TOPOLOGY_ADDR", ""), os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
        ),
        copies=max((tier.port for tier in tiers), default=0),
        id=uuid.uuid4().hex,
    )
    program = Program.of(config, run)
    os.environ |= {
        PROGRAM_ENV: program.to_json(),
        RANK_STATE_ENV: str(folder),
        RUN_DIR_ENV: str(run.path),
        AGENT_PID_ENV: str(os.getpid()),
        "TORCH_ELASTIC_WORKER_IDENTICAL": "1",  # nodes have equally many ranks: agents need no store to number them
    }
    for tier in tiers:
        os.environ |= tier.environment
    entrypoint: Callable[[], None] | str = sys.executable
    entry_args: tuple[str, ...] = ("-m", "fsdp_jobs.node.worker")
    if program.is_python:
        forkserver.start(program.preload)  # it forks, so it comes before any thread
        entrypoint, entry_args = worker.run_program, ()
    gc.freeze()
    gc.enable()
    log.take_over("torch.distributed")  # in the agent only: ranks keep torch's handlers
    term = max((tier.newest_term for tier in tiers), default=0)
    handler = CoordinatorRendezvous(config, run, this, term, folder)
    for tier in tiers:
        tier.start(handler.guards)
    spec = WorkerSpec(
        role="trainer",
        local_world_size=args.nproc,
        entrypoint=entrypoint,
        args=entry_args,
        rdzv_handler=handler,
        max_restarts=_UNLIMITED,
        monitor_interval=_MONITOR_S,
    )
    tracker = TrackerProcess(config, run, attempt, args.node)
    beginnings = [tracker.begin_round, *(tier.begin_round for tier in tiers)]
    closes = [LogKeeper(run.node(attempt, args.node)).close, tracker.close]
    if config.script is not None:
        beginnings.append(watch_edits(program.what, run, attempt))
    if config.is_program:
        output = OutputMetrics(config.program.metrics, run, attempt, args.node, handler.states)
        handler.before_end = output.settle
        beginnings.append(output.begin_round)
        closes.insert(0, output.close)  # the tracker then sends the last lines
    agent = Agent(spec, RankLogs(handler), handler, beginnings)
    signals.pass_on(handler.notice)
    ran = ThreadPoolExecutor(1, "elastic-agent").submit(agent.run)  # in a thread, torch installs no signal handlers
    if error := ran.exception():
        logger.error("the agent failed", exc_info=error)
    handler.shutdown()
    for close in closes:
        close()
    exit_code = EXIT_FAILED if error else 0
    if handler.end is not None:
        exit_code = handler.end.exit_code
    elif (verdict := Verdict.read(run, attempt)) is not None:
        exit_code = verdict.exit_code_of_attempt
    for tier in tiers:
        tier.close(is_over=exit_code != EXIT_REQUEUE)
    return exit_code


def main() -> int:
    signals = Signals()
    gc.disable()  # `run_agent` imports torch, whose objects stay: garbage collections would free nothing
    parser = argparse.ArgumentParser(description="One node of one attempt.")
    parser.add_argument("run_dir")
    parser.add_argument("--node", type=int, required=True, help="number of this node within the job")
    parser.add_argument("--nproc", type=int, required=True, help="ranks to run here")
    args = parser.parse_args()
    log.configure()
    raise_file_limit()
    return run_agent(args, signals)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
