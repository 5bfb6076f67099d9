"""Find ranks that compute wrong gradients: all compute one microbatch, and compare before averaging.

The trainer calls this every `integrity.probe_every_steps`. Averaging spreads a wrong gradient equally to all ranks, so
comparing replicas (run/agreement.py) does not detect it. Here all ranks are peers under any sharding, and a strict
majority is right. Each computes twice, so that kernels with a nondeterministic order of sums do not count as faults.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_jobs.checkpoints.ranks import Ranks
from fsdp_jobs.checkpoints.tensors import checksum, hexadecimal
from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.resolve import probe_every_steps
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.guards.probe.state import held_by, kept
from fsdp_jobs.models.weights import plain_name
from fsdp_jobs.run import events
from fsdp_jobs.run.agreement import Place, corruption, digest, majority
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, RUN_DIR_ENV
from fsdp_jobs.run.verdict import notify

Microbatch = tuple[Tensor, Tensor]
_UNSTEADY = {"the same computation, done twice": "differs"}
_NAMED = 3  # tensors of a rank in a sentence


class ComputesWrong(RuntimeError):
    """This rank's gradients differ from those of most ranks for the same tokens."""


class Probe:
    """Compares the gradients of one microbatch on all ranks, every `integrity.probe_every_steps` steps."""

    def __init__(
        self,
        config: JobConfig,
        model: nn.Module,
        device: torch.device,
        backward: Callable[[list[Microbatch]], Tensor],
    ):
        self.config, self.model, self.device, self._backward = config, model, device, backward
        self._ranks = Ranks()
        self.every_steps = probe_every_steps(config) if self._ranks.world > 1 else 0
        self._agreed = -1  # the newest step of this round at which all ranks agreed

    def run(self, step: int, microbatch: Microbatch) -> None:
        """Compare the gradients of rank 0's microbatch. All ranks call it together, between two steps.

        It clears the gradients and changes nothing else. If ranks hold different buffers or attributes, or a rank gets
        different gradients in its two passes before any probe has succeeded, no rank is at fault and probing stops.

        Raises:
            ComputesWrong: this rank's gradients differ, and `integrity.action` is not report.
        """
        held = held_by(self.model)
        theirs, microbatch = self._ranks.from_rank_0(lambda: (held, microbatch))
        if different := self._differing(held, theirs):
            self._stop(f"{different[0]} differs between ranks, so their gradients may differ, too")
            return
        sums = self._sums(step, microbatch)
        if sums != self._sums(step, microbatch):
            sums = _UNSTEADY
        digests, unsteady = self._ranks.gather(digest(sums)), digest(_UNSTEADY)
        right = majority(digests)
        if right == unsteady or (unsteady in digests and self._agreed < 0):
            self._stop(f"{digests.count(unsteady)} of {len(digests)} ranks do not get the same gradients twice")
        elif len({*digests}) == 1:
            self._agreed = step
        else:
            self._find(step, sums, digests, right)

    def _differing(self, own: dict[str, str], theirs: dict[str, str]) -> list[str]:
        """Return the names of entries that differ on any rank, a few per rank."""
        names = sorted({name for name, _ in own.items() ^ theirs.items()})
        return sorted({name for of_rank in self._ranks.gather(names[:_NAMED]) for name in of_rank})

    def _stop(self, why: str) -> None:
        self.every_steps = 0
        if self._ranks.rank == 0:
            print(f"WARNING no probe in this round: {why}", flush=True)

    def _sums(self, step: int, microbatch: Microbatch) -> dict[str, str]:
        """Return checksums of the loss and of this rank's gradients, of whole parameters and before averaging."""
        found: dict[str, Tensor] = {}
        hooks = []

        def note(name: str, gradient: Tensor) -> None:
            found[name] = checksum(gradient)

        def gathered(prefix: str, unit: nn.Module, _inputs: object) -> None:
            for name, parameter in unit.named_parameters(prefix):
                name = plain_name(name)
                if parameter.requires_grad and not isinstance(parameter, DTensor) and name not in watched:
                    watched.add(name)
                    hooks.append(parameter.register_hook(partial(note, name)))

        watched: set[str] = set()
        unit: nn.Module
        for prefix, unit in self.model.named_modules():
            if isinstance(unit, FSDPModule):  # this hook runs inside FSDP's, after the gather
                hooks.append(unit.register_forward_pre_hook(partial(gathered, prefix)))
        try:
            with kept(self.model, self.device, step):
                found["the loss"] = checksum(self._backward([microbatch]))
        finally:
            for hook in hooks:
                hook.remove()
        for parameter in self.model.parameters():
            parameter.grad = None
        return hexadecimal(found)

    def _find(self, step: int, sums: dict[str, str], digests: list[str], right: str | None) -> None:
        """Record which ranks differ from the majority, if there is one, and end those if the config says so."""
        theirs = [sums]
        dist.broadcast_object_list(theirs, src=digests.index(right) if right else 0)
        tensors = self._differing(sums, theirs[0])
        wrong = [r for r, found in enumerate(digests) if found != right] if right else [*range(len(digests))]
        # A rank that differs since the first probe may run on other hardware than most.
        ends = right is not None and self._agreed >= 0 and self.config.integrity.action != "report"
        record = partial(self._record, step, wrong, tensors, right is not None, ends)
        why = self._ranks.from_rank_0(record)  # before any rank ends
        if not ends:
            self.every_steps = 0  # reported once
        elif self._ranks.rank in wrong:
            raise ComputesWrong(why)

    def _record(self, step: int, wrong: list[int], tensors: list[str], is_known: bool, ends: bool) -> str:
        """Record the finding, and exclude wrong ranks' machines if the config says so. Returns its sentence."""
        run, attempt = RunDir(os.environ[RUN_DIR_ENV]), int(os.environ[ATTEMPT_ENV])
        round_ = next(events.newest_of(run, events.RoundStarted))
        nproc = round_.world_size // len(round_.nodes)
        places = {r: Place(round_.nodes[r // nproc], round_.hosts[r // nproc], r % nproc) for r in wrong}
        others = "than most ranks" if is_known else "than each other, and it is not known which is right"
        since = f"the last probe at which all were the same was at step {self._agreed}"
        if self._agreed < 0:
            since = "it was so at the first probe already: does the machine have other hardware or software?"
        what = f"computed other gradients {others} from the same tokens: {', '.join(tensors)}; {since}"
        found = corruption(step, self._agreed, "computed" if is_known else "unknown", places, tensors, what)
        events.record(run, attempt, found)
        notify(run, attempt, "corruption", found.why)
        hosts = {*found.hosts}
        if ends and self.config.integrity.action == "exclude" and {*round_.hosts} - hosts:
            for host in hosts:
                try:
                    run.exclude(host, self.config.elastic.exclude_for_s, found.why)
                except (BadInput, OSError) as e:  # the user edits the file, or the disk is full
                    print(f"WARNING {host} cannot be excluded: {e}", flush=True)
                else:
                    events.record(run, attempt, events.MachineExcluded(host, found.why))
        return found.why
