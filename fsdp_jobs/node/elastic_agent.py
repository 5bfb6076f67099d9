"""torch's elastic agent, extended to get its rounds from the coordinator and report why ranks failed.

torch's agent owns the ranks' processes and runs the loop. Three of its steps are overridden here:

    run -> _initialize_workers   rendezvous (`rendezvous.py`)
             -> _start_workers   counts the kernel's out-of-memory kills, and tiers learn of the round
        -> _monitor_workers      every 0.1 s: expired lease, ranks that failed, left or ended
             -> _stop_workers    when ranks failed, or when the round is over (`num_nodes_waiting` says 1)
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError

from fsdp_jobs.node.memory import kills_for_memory
from fsdp_jobs.node.rank_logs import RankLogs
from fsdp_jobs.node.rendezvous import CoordinatorRendezvous
from fsdp_jobs.run.failure import Failure, summary, waited_s
from fsdp_jobs.run.files import is_there
from fsdp_jobs.run.messages import Round
from fsdp_jobs.run.processes import has_signal, kill_families
from fsdp_jobs.run.rank_state import SAVES_NOTHING, Phase, Request
from fsdp_jobs.run.tail import last_lines, size_of
from fsdp_jobs.run.term import LOOK_S, job_time
from fsdp_jobs.run.threads import start_vital_thread
from fsdp_jobs.run.verdict import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE

logger = logging.getLogger(__name__)

_BEFORE_MESSAGE = re.compile(r"^([\w.]+:)\s+")  # an exception's class; some messages begin on a line of their own
_RAISED = re.compile(  # the end of a traceback
    r"^(?:\[rank\d+\]:)?[ \t]{2,}.*\n((?:\[rank\d+\]: )?[\w.]*(?:Error|Exception)\b.*)", re.MULTILINE
)
_LAST_LINES = 20  # at the end of a rank's log: a program may say more behind its exception
_ABORT_LINES = 100  # at the end of a rank's log, with torch's reason for aborting and the stack
_STOP_RANKS_S = 5  # SIGTERM to SIGKILL for ranks of a broken round: they restart from a checkpoint


class Agent(LocalElasticAgent):
    """torch's agent, extended to report to the coordinator why its ranks failed."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs: RankLogs,
        handler: CoordinatorRendezvous,
        beginnings: Sequence[Callable[[Round], None]],
    ):
        """`beginnings` are called with each round before its ranks start."""
        super().__init__(spec, logs, start_method="forkserver")
        self._handler, self._beginnings, self._node = handler, beginnings, handler.agent.node
        self._is_terminating = False  # ranks that never reported have got SIGTERM
        self._kills_for_memory = 0  # by this machine's kernel, before the round
        self._log_sizes: list[int] = []  # before the round
        handler.workers = lambda: self.get_worker_group().workers
        start_vital_thread(self._keep_lease, "lease")

    def _start_workers(self, worker_group: WorkerGroup) -> Any:
        self._kills_for_memory = kills_for_memory()
        self._log_sizes = [*map(size_of, self._handler.log_files())]
        for begin in self._beginnings:
            begin(self._handler.round)
        return super()._start_workers(worker_group)

    def _keep_lease(self) -> None:
        """Ask the ranks to save once half of this node's lease is over; kill them once it has expired."""
        handler = self._handler
        has_asked = False
        while True:
            time.sleep(LOOK_S)
            is_late = handler.lease.left_s() < handler.lease_s / 2
            if is_late and not has_asked:
                handler.request(Request.SAVE)
            has_asked = is_late
            if handler.is_cut_off() and handler.running_round >= 0:
                kill_families(handler.pids())

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        handler, healthy = self._handler, RunResult(state=WorkerState.HEALTHY)
        if handler.has_ended:  # other nodes' ranks may run; if one fails, this node joins the new round
            if handler.end is not None or is_there(handler.run.verdict(handler.agent.attempt)):
                raise RendezvousGracefulExitError("the attempt is over")
            return healthy
        if handler.is_cut_off():
            return healthy  # not a failure; torch's agent then begins a new round
        if handler.is_stop_requested and not self._is_terminating:
            self._terminate_silent_ranks()
        if self._is_terminating and None in self._exit_codes():
            return healthy  # torch's method would signal again once the first has ended
        if failures := self._dead(worker_group):
            self._report(failures)
            self._stop_workers(worker_group)
            return RunResult(state=WorkerState.FAILED, failures=failures)
        codes = self._exit_codes()
        for state, code in zip(handler.states, codes, strict=False):
            if code == EXIT_DONE and not state.read().time:  # the rank has never reported
                state.report(-1, SAVES_NOTHING, Phase.DONE)
        if {*codes} != {EXIT_DONE}:
            result: RunResult = super()._monitor_workers(worker_group)
            if result.state == WorkerState.FAILED:
                self._report(result.failures)
            return result
        if any(state.read().phase == Phase.LEAVING for state in handler.states):
            handler.failed(
                [
                    Failure(self._node, worker.global_rank, EXIT_REQUEUE, "", job_time(), state.read().step)
                    for worker, state in zip(worker_group.workers, handler.states, strict=True)
                ]
            )
            return RunResult(state=WorkerState.FAILED)
        handler.ended()
        return healthy

    def _exit_codes(self) -> list[int | None]:
        """Return the exit code of each rank, None while it runs."""
        context = self._pcontext
        if isinstance(context, MultiprocessContext) and context._pc is not None:
            return [process.exitcode for process in context._pc.processes]
        if isinstance(context, SubprocessContext):
            return [handler.proc.poll() for _, handler in sorted(context.subprocess_handlers.items())]
        return []

    def _dead(self, worker_group: WorkerGroup) -> dict[int, ProcessFailure]:
        """Return failed ranks at once; torch's agent reports them after it ended the others, up to 30 s later."""
        context, codes = self._pcontext, self._exit_codes()
        failed = [code not in (None, EXIT_DONE, EXIT_REQUEUE) for code in codes]
        if context is None or not any(failed):
            return {}
        failures: dict[int, ProcessFailure] = {}
        for w, code, has_failed in zip(worker_group.workers, codes, failed, strict=True):
            file = Path(context.error_files[w.local_rank])
            if has_failed or file.exists():
                end = (w.local_rank, w.id, code or EXIT_FAILED, str(file))
                try:
                    failure = ProcessFailure(*end)
                except (ValueError, LookupError, TypeError):  # an incomplete file: being written, or a full disk
                    if not has_failed:
                        continue
                    file.unlink(missing_ok=True)
                    failure = ProcessFailure(*end)
                failures[w.global_rank] = failure
        return failures

    def _terminate_silent_ranks(self) -> None:
        """Send SIGTERM, as torchrun does, to ranks that have never reported: they read no requests."""
        if any(state.read().step >= 0 for state in self._handler.states):
            return
        self._is_terminating = True
        # The workers of a Python program's data loaders get no signal.
        send = os.kill if isinstance(self._pcontext, MultiprocessContext) else os.killpg
        for pid in self._handler.pids():
            with suppress(ProcessLookupError):
                send(pid, signal.SIGTERM)

    def _report(self, failures: dict[int, ProcessFailure]) -> None:
        self._handler.failed([self._describe(rank, failure) for rank, failure in failures.items()])

    def _describe(self, rank: int, failure: ProcessFailure) -> Failure:
        """Report a failed rank with a summary of its exception, from torch elastic's error file."""
        error, text, last_line, has_file = "", "", "", Path(failure.error_file).exists()
        log = self._handler.log_files()[failure.local_rank]
        if failure.exitcode == -signal.SIGKILL and kills_for_memory() > self._kills_for_memory:
            error = "OutOfMemoryError: the kernel killed it because memory had run out"
        elif failure.exitcode == -signal.SIGABRT:  # maybe by NCCL's watchdog, whose reason is only in the log
            text = last_lines(log, _ABORT_LINES)
        elif failure.exitcode >= 0 and not has_file:
            said = last_lines(log, _LAST_LINES, self._log_sizes[failure.local_rank])
            last_line = summary((_RAISED.findall(said) or said.splitlines() or [""])[-1])
        elif failure.exitcode >= 0:
            content = failure.message
            text = content["message"] if isinstance(content, dict) else content
            text = text.encode(errors="replace").decode()  # messages must be UTF-8, but file names in them may not be
            text = _BEFORE_MESSAGE.sub(r"\1 ", text.strip())
            error = summary(text)
        ended_at = failure.timestamp + self._handler.lease.ahead_s() if has_file else job_time()
        step = self._handler.states[failure.local_rank].read().step
        return Failure(self._node, rank, failure.exitcode, error, ended_at, step, waited_s(text), last_line)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        pids = [] if self._handler.has_ended else self._handler.pids()  # other processes may have these ids by now
        for pid in pids:
            with suppress(OSError):
                if has_signal(pid, "SigIgn", signal.SIGTERM):
                    os.kill(pid, signal.SIGKILL)
        if self._pcontext is not None:
            self._pcontext.close(signal.SIGTERM, _STOP_RANKS_S)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # a rank's children would hold its GPU's memory, or a port
        while None in self._exit_codes() and self._handler.end is None:  # a rank blocked in the kernel holds them too
            time.sleep(self._worker_group.spec.monitor_interval)
