"""Checksums of the tensors that a rank shares with its replicas, computed where the tensors are."""

from __future__ import annotations

import os

import torch

from fsdp_jobs.checkpoints.checkpointer import Checkpointer
from fsdp_jobs.checkpoints.state import State
from fsdp_jobs.checkpoints.tensors import checksum, is_as_planned, local
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run.agreement import write_sums
from fsdp_jobs.run.env import RANK_STATE_ENV


class Guard:
    """Computes checksums of a rank's state after steps."""

    def __init__(self, checkpoints: Checkpointer):
        self._checkpoints = checkpoints

    def after_step(self, step: int, is_end: bool) -> None:
        """Send checksums to the agent if they are due; those of snapshots are compared without it."""
        checkpoints = self._checkpoints
        every = checkpoints.job.integrity.every_steps
        is_due = is_end if checkpoints.snapshots else every > 0 and (is_end or step % every == 0)
        if is_due and checkpoints.layout.replicas > 1:
            _send_sums(checkpoints.state, checkpoints.layout, step, checkpoints.rank)


def _send_sums(state: State, layout: Layout, step: int, rank: int) -> None:
    """Send checksums after `step` steps to the agent, if there is one and tensors are sharded as planned."""
    tensors = state.to_compare() if RANK_STATE_ENV in os.environ else {}
    if tensors and all(is_as_planned(tensor, layout) for tensor in tensors.values()):
        sums = [checksum(local(tensor)).to(state.device, non_blocking=True) for tensor in tensors.values()]
        values = torch.stack(sums).tolist()
        write_sums(step, rank, {name: f"{value:x}" for name, value in zip(tensors, values, strict=True)})
