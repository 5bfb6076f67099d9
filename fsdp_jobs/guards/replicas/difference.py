"""Find the wrong ranks when replicas differ, by majority or a repeated step. No torch, no network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from fsdp_jobs.run.agreement import Place, majority

Sums = dict[str, str]  # tensor -> checksum; "" stands for all tensors

OUTVOTED, TWO, START = "outvoted", "two", "start"  # findings: wrong rank known; not known; job at fault
TRANSIENT, REPRODUCED, UNKNOWN = "transient", "reproduced", "unknown"  # results of a repeated step


class Difference:
    """A step at which the replicas of some shards differ."""

    def __init__(
        self, step: int, shard_group: int, digests: Mapping[int, str], places: Mapping[int, Place], now: float
    ):
        """`digests` are of the ranks that hold the shards; `places` are where these ranks, and others, run."""
        self.step, self.shard_group, self.places = step, shard_group, places
        self.sums: dict[int, Sums] = {rank: {"": digest} for rank, digest in sorted(digests.items())}
        self.asked_at = now  # when agents were asked for the checksums of single tensors
        self.expected: dict[int, int] = {}  # rank -> number of its tensors

    @property
    def is_complete(self) -> bool:
        """Whether the checksums of all tensors have arrived."""
        return all(len(sums) - 1 == self.expected.get(rank) for rank, sums in self.sums.items())

    def outvoted(self) -> dict[int, list[str]]:
        """Return the ranks outvoted by a strict majority of their replicas, each with the tensors that differ."""
        wrong = defaultdict[int, list[str]](list)
        for name, sums in self._shards():
            if (right := majority(sums.values())) is not None:
                for rank in sums:
                    if sums[rank] != right:
                        wrong[rank].append(name)
        return {rank: [*filter(None, names)] for rank, names in sorted(wrong.items())}

    def tensors(self) -> list[str]:
        """Return the tensors that differ between replicas."""
        return sorted({name for name, sums in self._shards() if name and len({*sums.values()}) > 1})

    def _shards(self) -> list[tuple[str, dict[int, str]]]:
        """Return (tensor, checksum by rank) of each shard; of all tensors together until those of each are known."""
        of, is_complete = defaultdict[tuple[str, int], dict[int, str]](dict), self.is_complete
        for rank, sums in self.sums.items():
            for name, value in sums.items():
                if bool(name) == is_complete:
                    of[name, rank % self.shard_group][rank] = value
        return [(name, by_rank) for (name, _), by_rank in sorted(of.items())]

    def judge(self, digests: Mapping[int, str]) -> tuple[str, list[int]]:
        """Compare with the digests of the repeated step. Returns the finding, and the ranks that were wrong."""
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
    """Return the shards whose replicas differ: ranks with the same index in their shard groups."""
    by_shard = defaultdict[int, set[str | None]](set)
    for rank, value in digests.items():
        by_shard[rank % shard_group].add(value)
    return {shard for shard, values in by_shard.items() if len(values) > 1}
