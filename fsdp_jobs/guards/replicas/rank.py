"""Checksums of the tensors that a rank shares with its replicas, computed where the tensors are."""

from __future__ import annotations

import os

from fsdp_jobs.checkpoints.checkpointer import Checkpointer
from fsdp_jobs.checkpoints.tensors import checksum, hexadecimal, is_as_planned, local
from fsdp_jobs.run.agreement import write_sums
from fsdp_jobs.run.env import RANK_STATE_ENV


class Guard:
    """Computes checksums of a rank's state after steps."""

    def __init__(self, checkpoints: Checkpointer):
        self._checkpoints = checkpoints

    def after_step(self, step: int, is_end: bool) -> None:
        """Send checksums to the agent, if there is one, when they are due and tensors are sharded as planned.

        With snapshots, agents compare the checksums that seal them; only at `is_end` are others needed.
        """
        checkpoints = self._checkpoints
        every = checkpoints.job.integrity.every_steps
        is_due = is_end if checkpoints.snapshots else every > 0 and (is_end or step % every == 0)
        if not is_due or checkpoints.layout.replicas == 1 or RANK_STATE_ENV not in os.environ:
            return
        state, tensors = checkpoints.state, checkpoints.state.to_compare()
        if tensors and all(is_as_planned(tensor, checkpoints.layout) for tensor in tensors.values()):
            sums = {name: checksum(local(t)).to(state.device, non_blocking=True) for name, t in tensors.items()}
            write_sums(step, checkpoints.rank, hexadecimal(sums))
