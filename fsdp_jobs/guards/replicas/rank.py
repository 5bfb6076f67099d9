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
    """Looks at a rank's state after its steps."""

    def __init__(self, checkpoints: Checkpointer):
        self._checkpoints = checkpoints

    def after_step(self, step: int, is_end: bool) -> None:
        """Tell this rank's agent what it holds, if it is time to; what is captured is compared anyway."""
        checkpoints = self._checkpoints
        every = checkpoints.job.integrity.every_steps
        is_due = is_end if checkpoints.snapshots else every > 0 and (is_end or step % every == 0)
        if is_due and checkpoints.layout.replicas > 1:
            _tell_sums(checkpoints.state, checkpoints.layout, step, checkpoints.rank)


def _tell_sums(state: State, layout: Layout, step: int, rank: int) -> None:
    """Tell this rank's agent, if it has one, what it holds after `step` steps, if that is what the layout says."""
    tensors = state.to_compare() if RANK_STATE_ENV in os.environ else {}
    if tensors and all(is_as_planned(tensor, layout) for tensor in tensors.values()):
        sums = [checksum(local(tensor)).to(state.device, non_blocking=True) for tensor in tensors.values()]
        values = torch.stack(sums).tolist()
        write_sums(step, rank, {name: f"{value:x}" for name, value in zip(tensors, values, strict=True)})
