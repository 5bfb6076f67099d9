"""Environment, logs and error files of a node's ranks, and the rotation of logs."""

from __future__ import annotations

import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from fsdp_jobs.config.resolve import accelerator_of_node
from fsdp_jobs.node import accelerate_env
from fsdp_jobs.node.rendezvous import CoordinatorRendezvous
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.plan.topology import expand_hostlist
from fsdp_jobs.run.env import LAYOUT_ENV, LOG_ENV, ROUND_ENV, STACKS_ENV, TERM_ENV
from fsdp_jobs.run.files import replacing
from fsdp_jobs.run.processes import gloo_interface
from fsdp_jobs.run.rank_state import temporaries
from fsdp_jobs.run.tail import TIMES, rank_of
from fsdp_jobs.run.threads import start_thread

_EVERY_S = 1.0  # between two checks of the logs' sizes
FLIGHT_RECORDER = "nccl-trace-rank-"  # NCCL's record of collectives; NCCL appends the rank
# How many collectives it keeps. Some versions of torch write no record on request unless the second is set.
_RECORDER_ENV = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RECORDED = "2000"
# Variables that configure CUDA's allocator; all supported versions of torch read the first.
_ALLOCATOR_ENV = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

# SLURM's variables of a task, its step and job, and torchrun's with the value for a rank. SLURM's describe the agent,
# which is its step's only task, and the nodes at the start of the job; programs read them as a rank's, as under srun.
_TASK = {
    "SLURM_PROCID": "RANK",
    "SLURM_LOCALID": "LOCAL_RANK",
    "SLURM_NTASKS": "WORLD_SIZE",
    "SLURM_NPROCS": "WORLD_SIZE",
    "SLURM_NTASKS_PER_NODE": "LOCAL_WORLD_SIZE",
    "SLURM_NODEID": "GROUP_RANK",
    "SLURM_NNODES": "GROUP_WORLD_SIZE",
    "SLURM_JOB_NUM_NODES": "GROUP_WORLD_SIZE",
    "SLURM_STEP_NUM_NODES": "GROUP_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS": "WORLD_SIZE",
}
_NODELISTS = ("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST")  # the first node is rank 0's: MASTER_ADDR


class RankLogs(LogsSpecs):
    """Passes each rank its log, error file and layout in its environment; ranks redirect their own output."""

    def __init__(self, handler: CoordinatorRendezvous):
        super().__init__()
        self.handler, self.run = handler, handler.run
        self.attempt, self.node = handler.agent.attempt, handler.agent.node

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        error_files = {}
        current, config, folder = self.handler.round, self.handler.config, self.handler.folder
        if config.is_program:
            device = accelerator_of_node(config, torch.cuda.device_count(), len(envs))
            defaults = accelerate_env.environment(config, Layout.from_json(current.layout), device)
        else:
            is_chosen = any(name in os.environ for name in _ALLOCATOR_ENV)
            defaults = {} if is_chosen else {_ALLOCATOR_ENV[0]: "expandable_segments:True"}
        recorded = next((os.environ[name] for name in _RECORDER_ENV if name in os.environ), _RECORDED)
        defaults |= dict.fromkeys(_RECORDER_ENV, recorded)
        defaults |= temporaries(folder)
        defaults |= gloo_interface([envs[0]["MASTER_ADDR"], *expand_hostlist(current.hosts)[:2]])
        for local_rank, env in envs.items():
            error_file = folder / f"error-{local_rank}.json"
            error_file.unlink(missing_ok=True)
            error_files[local_rank] = str(error_file)
            place = (self.attempt, self.node, int(env["RANK"]))
            env |= {
                "TORCHELASTIC_ERROR_FILE": str(error_file),
                LOG_ENV: str(self.run.rank_log(*place)),
                STACKS_ENV: str(self.run.stacks(*place)),
                LAYOUT_ENV: current.layout,
                ROUND_ENV: str(current.number),
                TERM_ENV: str(current.term),
                "TORCHELASTIC_RESTART_COUNT": str(current.number),  # the same on every node
                "NODE_RANK": env["GROUP_RANK"],  # of Composer's launcher
                "TORCH_ELASTIC_WORKER_IDENTICAL": "0",  # the agent's: a rank may be a torchrun of unequal nodes
                "TORCH_FR_DUMP_TEMP_FILE": f"{self.run.node(self.attempt, self.node)}/{FLIGHT_RECORDER}",
                "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{folder}/{FLIGHT_RECORDER}",
            } | defaults
            env |= {name: env[of_rank] for name, of_rank in _TASK.items() if name in os.environ}
            env |= {name: current.hosts for name in _NODELISTS if current.hosts and name in os.environ}
        no_files = dict.fromkeys(envs, "")
        return LogsDest(stdouts=no_files, stderrs=no_files, error_files=error_files)  # newer versions have more fields

    @property
    def root_log_dir(self) -> str:
        return str(self.run.attempt(self.attempt))


class LogKeeper:
    """Records the sizes of a node's rank logs, and rotates them, in a thread.

    The sizes over time order the lines of all nodes. A log that is too long is moved to `rank-<r>.log.1`,
    which replaces an older one, and starts empty; a line printed at that moment may be lost.
    """

    def __init__(self, folder: Path, longest: int = 1 << 30):
        """`longest`: most bytes of a log."""
        self._folder, self._longest = folder, longest
        self._known: dict[str, tuple[int, float]] = {}
        self._could_not: set[Path] = set()  # logs that the disk had no room to copy
        self._over = threading.Event()
        self._thread = start_thread(self._watch, "logs")

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._note()
            with suppress(OSError):  # the folder's storage does not answer
                self._shorten()
        self._note()

    def _note(self) -> None:
        """Append a line with the changed sizes, and when each file was last written."""
        with suppress(OSError):  # a full disk, or a file just removed: only the order of lines suffers
            stats = ((rank_of(f), f.stat()) for f in self._folder.glob("rank-*.log"))
            sizes = {rank: (stat.st_size, round(stat.st_mtime, 3)) for rank, stat in stats if stat.st_size}
            if changed := dict(sizes.items() - self._known.items()):
                with (self._folder / TIMES).open("a") as f:
                    f.write(json.dumps(changed) + "\n")
                self._known |= changed

    def _shorten(self) -> None:
        for log in self._folder.glob("rank-*.log"):
            try:
                if log.stat().st_size > self._longest and log not in self._could_not:
                    with replacing(log.with_name(f"{log.name}.1")) as part:
                        shutil.copyfile(log, part)
                    os.truncate(log, 0)
            except OSError:  # no room on the disk: do not try again
                self._could_not.add(log)

    def close(self) -> None:
        self._over.set()
        self._thread.join(_EVERY_S)
