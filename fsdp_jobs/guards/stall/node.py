"""Collect the stacks of this node's ranks when the coordinator asks.

dump                        from the coordinator: write the ranks' stacks
stacks  node, ranks: [...]  the answer: where each rank is
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import psutil

from fsdp_jobs.node import guard
from fsdp_jobs.node.rank_logs import FLIGHT_RECORDER
from fsdp_jobs.node.stacks import stacks_of
from fsdp_jobs.run.protocol import Message
from fsdp_jobs.run.rank_state import Phase


class Guard(guard.Guard):
    """Answers `dump`."""

    kinds = ("dump",)

    def on_message(self, message: Message) -> None:
        threading.Thread(target=self._dump, name="dump", daemon=True).start()

    def _dump(self) -> None:
        """Make every rank write its stacks, and report which did, and where they are."""
        node, ranks = self.node, []
        pids, numbers = node.pids(), node.ranks()
        if len(pids) < len(numbers):
            return  # they are being started again
        for local_rank, stack in enumerate(stacks_of(pids, node.stack_files())):
            report, status, rank = node.states[local_rank].read(), "gone", numbers[local_rank]
            with suppress(psutil.NoSuchProcess):
                status = psutil.Process(pids[local_rank]).status()
            with suppress(OSError):  # only with NCCL: ProcessGroupNCCL reads the pipe and writes its record out
                pipe = node.folder / f"{FLIGHT_RECORDER}{rank}.pipe"
                with open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w") as f:
                    f.write("1")
            about = {"rank": rank, "status": status, "dumped": bool(stack.frames), "step": report.step}
            has_ended = status == "gone" or report.phase == Phase.DONE
            ranks.append(about | {"ended": has_ended, "place": str(stack), "waits": stack.is_in_collective})
        node.send("stacks", node=node.identity["node"], ranks=ranks)
