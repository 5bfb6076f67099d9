"""A count of what rings send, hop by hop: what the plan's closed form is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_jobs.plan.traffic import RingBytes


def sent_by_place(ring: RingBytes, shard_groups: Sequence[Sequence[int]], places: Sequence[str]) -> dict[str, float]:
    """Count the bytes that leave each place in a step, for any grouping of ranks, as counters on its link would.

    Args:
        ring: what each rank sends.
        shard_groups: the ranks of each shard group; the i-th of every group form the i-th replica ring.
            Rings run in ascending rank order, as process groups sort their ranks.
        places: the node, or the leaf switch, of each rank.
    """
    sent = dict.fromkeys(places, 0.0)
    replica_rings = [list(ranks) for ranks in zip(*shard_groups, strict=True)]
    for rings, amount in ((shard_groups, ring.shard_ring), (replica_rings, ring.all_reduce)):
        for members in rings:
            ordered = sorted(members)
            for here, there in zip(ordered, [*ordered[1:], ordered[0]], strict=True):
                if places[here] != places[there]:
                    sent[places[here]] += amount
    return sent
