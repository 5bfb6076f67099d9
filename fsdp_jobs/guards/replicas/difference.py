"""Replicas that differ: which ranks are outvoted, and what repeating the step shows. No torch, no network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_jobs.run.agreement import Place, majority

Sums = dict[str, str]  # tensor -> sum; the tensor "" is all of them

OUTVOTED, TWO, START = "outvoted", "two", "start"  # findings: the wrong rank is known, or not; the job is to blame
TRANSIENT, REPRODUCED, UNKNOWN = "transient", "reproduced", "unknown"  # what a replay has shown


@dataclass
class Difference:
    """A step at which the replicas of some shards differ."""

    step: int
    shard_group: int
    sums: dict[int, Sums]  # by rank, of those that hold the shards
    places: dict[int, Place]
    asked_at: float  # agents, for the sums of single tensors
    expected: dict[int, int] = field(default_factory=dict)  # rank -> how many there are

    @classmethod
    def of(
        cls, step: int, shard_group: int, digests: Mapping[int, str], places: Mapping[int, Place], now: float
    ) -> Difference:
        sums = {rank: {"": digest} for rank, digest in sorted(digests.items())}
        return cls(step, shard_group, sums, {rank: places[rank] for rank in sums}, now)

    @property
    def is_told(self) -> bool:
        """Whether the sums of all tensors are there."""
        return all(len(sums) - 1 == self.expected.get(rank) for rank, sums in self.sums.items())

    def outvoted(self) -> dict[int, list[str]]:
        """Return the ranks that differ from a strict majority of their replicas, each with its tensors."""
        wrong = defaultdict[int, list[str]](list)
        for name, sums in self._shards():
            if (right := majority(sums.values())) is not None:
                for rank in sums:
                    if sums[rank] != right:
                        wrong[rank].append(name)
        return {rank: [*filter(None, names)] for rank, names in sorted(wrong.items())}

    def tensors(self) -> list[str]:
        """Return the tensors of which replicas differ."""
        return sorted({name for name, sums in self._shards() if name and len({*sums.values()}) > 1})

    def _shards(self) -> list[tuple[str, dict[int, str]]]:
        """Return for each tensor of each shard its sums by rank; where they are not known, those of all tensors."""
        of, is_told = defaultdict[tuple[str, int], dict[int, str]](dict), self.is_told
        for rank, sums in self.sums.items():
            for name, value in sums.items():
                if bool(name) == is_told:
                    of[name, rank % self.shard_group][rank] = value
        return [(name, by_rank) for (name, _), by_rank in sorted(of.items())]

    def judge(self, digests: Mapping[int, str]) -> tuple[str, list[int]]:
        """Judge by the digests of the same step, done again. Returns the finding, and the ranks that were wrong."""
        before = {rank: sums[""] for rank, sums in self.sums.items()}
        after = {rank: digests.get(rank) for rank in before}
        changed = [rank for rank in before if before[rank] != after[rank]]
        if not changed:
            return REPRODUCED, []
        right = {rank % self.shard_group for rank in before.keys() - {*changed}}
        if differing(after, self.shard_group) or right != {rank % self.shard_group for rank in before}:
            return UNKNOWN, []
        return TRANSIENT, changed


def differing(digests: Mapping[int, str | None], shard_group: int) -> set[int]:
    """Return the shards that ranks at the same place of their shard groups do not hold with the same bits."""
    by_shard = defaultdict[int, set[str | None]](set)
    for rank, value in digests.items():
        by_shard[rank % shard_group].add(value)
    return {shard for shard, values in by_shard.items() if len(values) > 1}
