"""Collect the stacks of this node's ranks when the coordinator asks."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from fsdp_jobs.guards.stall.messages import Dump, RankStack, Stacks
from fsdp_jobs.node import guard
from fsdp_jobs.node.rank_logs import FLIGHT_RECORDER
from fsdp_jobs.node.stacks import stacks_of
from fsdp_jobs.run.rank_state import Phase
from fsdp_jobs.run.threads import start_thread

_RECORD_S = 2.5  # for NCCL to write a record; ProcessGroupNCCL looks at its pipe once a second


class Guard(guard.Guard):
    """Answers `Dump`."""

    takes = (Dump,)

    def on_message(self, message: Dump) -> None:
        start_thread(self._dump, "dump")

    def _dump(self) -> None:
        """Make every rank write its stacks and NCCL's record, and send the coordinator the state of each rank."""
        node, ranks = self.node, list[RankStack]()
        pids, numbers = node.pids(), node.ranks()
        if len(pids) < len(numbers):
            return  # they are being restarted
        asked_at = time.monotonic()
        records: dict[Path, int | None] = {}
        for rank in numbers:
            records |= self._ask_nccl(rank)
        stacks = stacks_of(pids, node.stack_files())
        for rank, pid, state, stack in zip(numbers, pids, node.states, stacks, strict=True):
            report, status = state.read(), "gone"
            with suppress(psutil.NoSuchProcess):
                status = psutil.Process(pid).status()
            ended, waits = status == "gone" or report.phase == Phase.DONE, stack.is_in_collective
            ranks.append(RankStack(rank, status, bool(stack.frames), report.step, ended, str(stack), waits))
        while any(_version(record) in (None, before) for record, before in records.items()):
            if time.monotonic() - asked_at > _RECORD_S:
                break  # NCCL's thread may hang, too
            time.sleep(0.1)
        node.link.send(Stacks(ranks))  # then the coordinator ends the round, and these ranks

    def _ask_nccl(self, rank: int) -> dict[Path, int | None]:
        """Ask a rank's ProcessGroupNCCL for its record of collectives.

        Returns the file that it will write, with the version that is there; nothing without NCCL.
        """
        node = self.node
        record = node.run.node(node.agent.attempt, node.agent.node) / f"{FLIGHT_RECORDER}{rank}"
        before = _version(record)
        with (
            suppress(OSError),
            open(os.open(node.folder / f"{record.name}.pipe", os.O_WRONLY | os.O_NONBLOCK), "w") as pipe,
        ):
            pipe.write("1")
            return {record: before}
        return {}


def _version(file: Path) -> int | None:
    """Return when a file was last written to, in ns; None while it is empty or missing."""
    with suppress(OSError):
        found = file.stat()
        return found.st_mtime_ns if found.st_size else None
    return None
