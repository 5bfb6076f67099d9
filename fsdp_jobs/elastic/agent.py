"""One a node: torch's elastic agent, with rendezvous through our coordinator.

It differs from plain torchrun in four things. Ranks are numbered in topology order. A broken round stops
its ranks at once instead of when a collective times out. Ranks are forked from a process that has imported
torch, so a restart takes no imports. A signal becomes a request to save that all ranks agree on.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from fsdp_jobs.config.resolve import accelerator_of_node
from fsdp_jobs.config.schema import JobConfig, load_config
from fsdp_jobs.elastic import accelerate_env as accelerate
from fsdp_jobs.elastic import worker
from fsdp_jobs.elastic.log_times import LogTimes
from fsdp_jobs.elastic.program import Program
from fsdp_jobs.elastic.protocol import Message
from fsdp_jobs.elastic.rank_state import Board, Phase
from fsdp_jobs.elastic.rendezvous import CoordinatorRendezvous
from fsdp_jobs.observe.trackers.beside import Beside
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.plan.sources import path_from_slurm
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import (
    ADDRESS_ENV,
    AGENT_PID_ENV,
    ATTEMPT_ENV,
    COORDINATOR_ENV,
    HOST_ENV,
    LAYOUT_ENV,
    LOG_ENV,
    PROGRAM_ENV,
    RANK_STATE_ENV,
    ROUND_ENV,
    RUN_DIR_ENV,
    STACKS_ENV,
)
from fsdp_jobs.run.verdict import EXIT_FAILED, EXIT_REQUEUE

_MANY = 1 << 30  # restarts: the coordinator counts, not the agent
_MONITOR_S = 0.1
_BOARDS = "fsdp_jobs-"  # folder names of boards begin so
_DUMP_S = 2.0  # for ranks to write their stacks
_FLIGHT_RECORDER = "nccl-trace-rank-"  # NCCL's record of collectives: the rank is appended
_STOP_RANKS_S = 5  # SIGTERM to SIGKILL, for ranks of a broken round: what they know is in the checkpoint


class RunDirLogs(LogsSpecs):
    """Gives each rank its log, error file, board and layout by environment; its output it redirects itself."""

    def __init__(
        self,
        config: JobConfig,
        run: RunDir,
        attempt: int,
        node: int,
        boards: Path,
        handler: CoordinatorRendezvous,
    ):
        super().__init__()
        self.config, self.run, self.attempt, self.node = config, run, attempt, node
        self.boards, self.handler = boards, handler

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        error_files = {}
        policy = self._policy(len(envs)) if self.config.is_program else {}
        for local_rank, env in envs.items():
            error_files[local_rank] = str(self.boards / f"error-{local_rank}.json")
            Path(error_files[local_rank]).unlink(missing_ok=True)
            env |= {
                "TORCHELASTIC_ERROR_FILE": error_files[local_rank],
                LOG_ENV: str(self.run.rank_log(self.attempt, self.node, int(env["RANK"]))),
                STACKS_ENV: str(self.run.stacks(self.attempt, self.node, int(env["RANK"]))),
                LAYOUT_ENV: self.handler.round["layout"],
                ROUND_ENV: str(self.handler.round["round"]),
                "TORCHELASTIC_RESTART_COUNT": str(self.handler.round["round"]),  # the same on every node
                "TORCH_FR_DUMP_TEMP_FILE": f"{self.run.node(self.attempt, self.node)}/{_FLIGHT_RECORDER}",
                "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{self.boards}/{_FLIGHT_RECORDER}",
            } | policy
        silent = dict.fromkeys(envs, "")
        return LogsDest(silent, dict(silent), {}, {}, error_files, "", "")

    def _policy(self, ranks: int) -> dict[str, str]:
        """The layout as Accelerate reads it, less what the user's own environment says."""
        device = accelerator_of_node(self.config, torch.cuda.device_count(), ranks)
        layout = Layout.from_json(self.handler.round["layout"])
        policy = accelerate.environment(self.config, layout, device)
        return {name: value for name, value in policy.items() if name not in os.environ}

    @property
    def root_log_dir(self) -> str:
        return str(self.run.attempt(self.attempt))


class Agent(LocalElasticAgent):
    """torch's agent, telling the coordinator why its ranks failed."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs: RunDirLogs,
        handler: CoordinatorRendezvous,
        tracking: Beside,
        is_program: bool,
    ):
        super().__init__(spec, logs, start_method="forkserver", exit_barrier_timeout=60)
        self._handler, self._logs, self._tracking, self._is_program = handler, logs, tracking, is_program
        self._is_to_stop = False
        self._terminated = False  # the program was told to end by a signal
        self._kills_for_memory = 0  # of this machine's kernel, before the round
        handler.on_dump = self._dump
        if is_program:
            handler.on_stop = self._note_stop

    def _initialize_workers(self, worker_group: WorkerGroup, *args: Any, **kwargs: Any) -> None:
        self._kills_for_memory = kills_for_memory()
        super()._initialize_workers(worker_group, *args, **kwargs)
        self._tracking.stand(with_rank_0=self._handler.round["rank"] == 0)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._is_to_stop and not self._terminated:
            self._terminate_program()
        if self._terminated and self._any_runs():
            return RunResult(state=WorkerState.HEALTHY)  # torch's would signal again as soon as the first has ended
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.SUCCEEDED and self._is_leaving():
            self._handler.failed([self._left(w.global_rank, w.local_rank) for w in worker_group.workers])
            return RunResult(state=WorkerState.FAILED)
        if result.state == WorkerState.FAILED:
            reports = [self._describe(rank, failure) for rank, failure in result.failures.items()]
            self._handler.failed(reports)
        elif result.state == WorkerState.SUCCEEDED:
            self._handler.ended()
        return result

    def _note_stop(self) -> None:
        self._is_to_stop = True  # acted upon when there are ranks

    def _terminate_program(self) -> None:
        """Tell a program to end that has never looked at its board: SIGTERM, as torchrun does."""
        if any(self._step(w.local_rank) >= 0 for w in self.get_worker_group().workers):
            return
        self._terminated = True
        for w in self.get_worker_group().workers:
            with suppress(ProcessLookupError):
                if os.getpgid(w.id) == w.id:  # what a program that is not Python has started, too
                    os.killpg(w.id, signal.SIGTERM)
                else:
                    os.kill(w.id, signal.SIGTERM)

    def _any_runs(self) -> bool:
        for w in self.get_worker_group().workers:
            with suppress(psutil.NoSuchProcess):
                is_alive = psutil.Process(w.id).status() != psutil.STATUS_ZOMBIE
                if is_alive and self._handler.boards[w.local_rank].read().phase != Phase.DONE:
                    return True
        return False

    def _step(self, local_rank: int) -> int:
        """Steps that a rank has said it has done, -1 when it has said nothing."""
        report = self._handler.boards[local_rank].read()
        return report.step if report.time else -1

    def _is_leaving(self) -> bool:
        return any(board.read().phase == Phase.LEAVING for board in self._handler.boards)

    def _left(self, rank: int, local_rank: int) -> Message:
        """The report on a rank of a program that ended because it was asked to."""
        place = {"node": self._handler.identity["node"], "rank": rank, "step": self._step(local_rank)}
        return {**place, "exit_code": EXIT_REQUEUE, "error": "", "time": time.time()}

    def _exit_barrier(self) -> None:
        if not self._is_program:  # its ranks may end hours apart: the coordinator says when all have
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    def _describe(self, rank: int, failure: Any) -> Message:
        error, when = "", time.time()
        if isinstance(failure.error_file_data, dict):
            content = failure.error_file_data.get("message", "")
            text = content.get("message", "") if isinstance(content, dict) else str(content)
            error = text.strip().splitlines()[0][:500] if text.strip() else ""
            with suppress(KeyError, TypeError, ValueError):
                when = float(content["extraInfo"]["timestamp"])
        if failure.exitcode < 0:
            error = ""
            if failure.exitcode == -signal.SIGKILL and kills_for_memory() > self._kills_for_memory:
                error = "OutOfMemoryError: the kernel killed it, for memory had run out"
        return {
            "node": self._handler.identity["node"],
            "rank": rank,
            "exit_code": failure.exitcode,
            "error": error,
            "time": when,
            "step": self._step(failure.local_rank),
        }

    def _dump(self) -> None:
        """Have every rank write its stacks, and report which could."""
        found = []
        for w in self.get_worker_group().workers:
            stacks = self._logs.run.stacks(self._logs.attempt, self._logs.node, w.global_rank)
            before = stacks.stat().st_size if stacks.exists() else 0
            status = "gone"
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                status = psutil.Process(w.id).status()
                os.kill(w.id, signal.SIGUSR2)
            with suppress(OSError):  # there where NCCL is: ProcessGroupNCCL reads it and writes its record out
                pipe = self._logs.boards / f"{_FLIGHT_RECORDER}{w.global_rank}.pipe"
                with open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w") as f:
                    f.write("1")
            found.append((w, stacks, before, status))
        deadline = time.monotonic() + _DUMP_S
        pending = True
        while pending and time.monotonic() < deadline:
            time.sleep(0.1)
            pending = any(not s.exists() or s.stat().st_size == before for _, s, before, _ in found)
        self._handler.send_stacks(
            [
                {
                    "rank": w.global_rank,
                    "status": status,
                    "dumped": stacks.exists() and stacks.stat().st_size > before,
                    "step": self._step(w.local_rank),
                }
                for w, stacks, before, status in found
            ]
        )

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown(timeout=_STOP_RANKS_S)


def kills_for_memory() -> int:
    """Processes that this machine's kernel has killed because memory had run out, since it was started."""
    with suppress(OSError), open("/proc/vmstat") as f:
        for line in f:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def make_boards_dir() -> tuple[Path, IO[str]]:
    """A folder for this node's boards, in memory where there is such a place, and the lock that says it is in use.

    Folders of agents that were killed are removed: the kernel has let go of their locks.
    """
    shm = Path("/dev/shm")
    base = shm if shm.is_dir() else Path(tempfile.gettempdir())
    for old in base.glob(f"{_BOARDS}*/lock"):
        with suppress(OSError), old.open("w") as lock:  # another user's, or one in use, stays
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old.parent)
    folder = Path(tempfile.mkdtemp(prefix=_BOARDS, dir=base))
    lock = (folder / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def run_agent(args: argparse.Namespace) -> int:
    """Run this node's ranks through as many rounds as it takes. Returns the attempt's exit code."""
    run, attempt = RunDir(args.run_dir), int(os.environ[ATTEMPT_ENV])
    config = load_config(run.config)
    boards_dir, _lock = make_boards_dir()
    boards = [Board(boards_dir, local_rank) for local_rank in range(args.nproc)]
    identity: Message = {
        "token": run.token.read_text(),
        "node": args.node,
        "host": os.environ.get(HOST_ENV) or socket.gethostname(),
        "address": os.environ.get(ADDRESS_ENV) or socket.gethostname(),
        "nproc": args.nproc,
        "switches": path_from_slurm(
            os.environ.get("SLURM_TOPOLOGY_ADDR", ""), os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
        ),
        "life": uuid.uuid4().hex,
    }
    elastic = config.elastic
    handler = CoordinatorRendezvous(
        os.environ[COORDINATOR_ENV],
        run.name,
        identity,
        boards,
        elastic.heartbeat_interval_s,
        elastic.heartbeat_timeout_s,
    )
    os.environ |= {
        RANK_STATE_ENV: str(boards_dir),
        RUN_DIR_ENV: str(run.path.resolve()),
        AGENT_PID_ENV: str(os.getpid()),
    }
    entrypoint, entry_args = _entrypoint(config, run)
    spec = WorkerSpec(
        role="trainer",
        local_world_size=args.nproc,
        entrypoint=entrypoint,
        args=entry_args,
        rdzv_handler=handler,
        max_restarts=_MANY,
        monitor_interval=_MONITOR_S,
    )
    tracking, log_times = Beside(config, run, attempt, args.node), LogTimes(run.node(attempt, args.node))
    logs = RunDirLogs(config, run, attempt, args.node, boards_dir, handler)
    agent = Agent(spec, logs, handler, tracking, config.is_program)
    result: list[RunResult | None] = []

    def work() -> None:
        try:
            result.append(agent.run())
        except BaseException:
            traceback.print_exc()

    # In a thread, so that torch leaves the signal handlers to us.
    thread = threading.Thread(target=work, name="elastic-agent")
    _on_signals(handler)
    thread.start()
    thread.join()
    if handler.end is None and result and result[0] is not None and not result[0].is_failed():
        _wait_for_end(handler, math.inf if config.is_program else 10.0)
    handler.shutdown()
    shutil.rmtree(boards_dir, ignore_errors=True)
    log_times.close()
    tracking.close()
    if handler.end is not None:
        return int(handler.end["exit_code"])
    if handler.num_nodes_waiting():
        return EXIT_REQUEUE  # our ranks had finished, but another node's failed: the launcher starts us again
    return 0 if result else EXIT_FAILED


def _entrypoint(config: JobConfig, run: RunDir) -> tuple[Callable[[], None] | str, tuple[str, ...]]:
    """What ranks are started with. What is Python is forked from a process that imports torch while we wait."""
    entry: Callable[[], None] = worker.train
    preload = ["fsdp_jobs.train.entry"]
    if config.is_program:
        program = Program.of(config, run)
        os.environ[PROGRAM_ENV] = program.to_json()
        if not program.is_python:
            return sys.executable, ("-m", "fsdp_jobs.elastic.worker")
        entry, preload = worker.run_program, ["fsdp_jobs.job"]  # and torch with it
    multiprocessing.set_forkserver_preload(["fsdp_jobs.elastic.forkserver", *preload])
    multiprocessing.forkserver.ensure_running()
    return entry, ()


def _wait_for_end(handler: CoordinatorRendezvous, seconds: float) -> None:
    """Our ranks have finished: stay until the coordinator has heard so from every node, or says otherwise."""
    deadline = time.monotonic() + seconds
    while not handler.num_nodes_waiting() and time.monotonic() < deadline:
        time.sleep(0.05)


def _on_signals(handler: CoordinatorRendezvous) -> None:
    """The first signal asks all ranks of the job to save and leave; a second one kills this node's."""
    seen: list[int] = []

    def react(number: int, _frame: object) -> None:
        if seen:
            os._exit(EXIT_REQUEUE)  # the ranks die with us
        seen.append(number)
        handler.notice(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, react)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One node of one attempt.")
    parser.add_argument("run_dir")
    parser.add_argument("--node", type=int, required=True, help="number of this node within the job")
    parser.add_argument("--nproc", type=int, required=True, help="ranks to run here")
    return run_agent(parser.parse_args(argv))


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
