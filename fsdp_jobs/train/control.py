"""How ranks agree, at a step boundary, on what was asked of any one of them."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_jobs.elastic.rank_state import Phase, RankState, Request
from fsdp_jobs.run.env import RANK_STATE_ENV


class Control:
    """A maximum over all ranks of what each was asked, computed beside each step at no cost to it."""

    def __init__(self, wants_save: Callable[[], bool]):
        """`wants_save` is asked once a step, on every rank; one that says yes is enough."""
        self.group = dist.new_group(backend="gloo")
        folder = os.environ.get(RANK_STATE_ENV)
        self.state = RankState(folder, int(os.environ["LOCAL_RANK"])) if folder else None
        self.wants_save = wants_save
        self.noticed = Request.NONE  # what this rank was told otherwise than by its rank state
        self._value = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def begin(self) -> None:
        """Send off this rank's request; `agreed` gets the answer."""
        own = Request.SAVE if self.wants_save() else Request.NONE
        own = max(own, self.noticed)
        if self.state is not None:
            own = max(own, self.state.requested())
            if own is Request.SAVE:
                self.state.request(Request.NONE)  # done once; the others stay until the ranks have gone
        self._value.fill_(int(own))
        self._work = dist.all_reduce(self._value, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def agreed(self) -> Request:
        """What all ranks now do: the same on every one."""
        assert self._work is not None
        self._work.wait()
        return Request(int(self._value.item()))

    def report(self, step: int, committed: int, phase: Phase) -> None:
        """Tell this node's agent how far this rank is."""
        if self.state is not None:
            self.state.report(step, committed, phase)
