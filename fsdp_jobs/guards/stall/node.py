"""Collect the stacks of this node's ranks when the coordinator asks."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil

from fsdp_jobs.guards.stall.messages import Dump, RankStack, Stacks
from fsdp_jobs.node import guard
from fsdp_jobs.node.rank_logs import FLIGHT_RECORDER
from fsdp_jobs.node.stacks import stacks_of
from fsdp_jobs.run.beside import start_thread
from fsdp_jobs.run.rank_state import Phase


class Guard(guard.Guard):
    """Answers `Dump`."""

    takes = (Dump,)

    def on_message(self, message: Dump) -> None:
        start_thread(self._dump, "dump")

    def _dump(self) -> None:
        """Make every rank write its stacks, and send the coordinator the state of each rank."""
        node, ranks = self.node, list[RankStack]()
        pids, numbers = node.pids(), node.ranks()
        if len(pids) < len(numbers):
            return  # they are being restarted
        for local_rank, stack in enumerate(stacks_of(pids, node.stack_files())):
            report, status, rank = node.states[local_rank].read(), "gone", numbers[local_rank]
            with suppress(psutil.NoSuchProcess):
                status = psutil.Process(pids[local_rank]).status()
            with suppress(OSError):  # with NCCL only: ProcessGroupNCCL reads the pipe and then writes its record
                pipe = node.folder / f"{FLIGHT_RECORDER}{rank}.pipe"
                with open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w") as f:
                    f.write("1")
            ended, waits = status == "gone" or report.phase == Phase.DONE, stack.is_in_collective
            ranks.append(RankStack(rank, status, bool(stack.frames), report.step, ended, str(stack), waits))
        node.link.send(Stacks(ranks))
