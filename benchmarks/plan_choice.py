"""How much faster any other sharding is than the plan's, over clusters and jobs: python benchmarks/plan_choice.py

Others include those that the plan does not consider: every strategy on every group size, with gradients whole or
sharded between microbatches, with whole logits or the loss in chunks.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import replace

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.plan.choose import Option, price
from fsdp_jobs.plan.grouping import Grouping
from fsdp_jobs.plan.layout import HYBRID, WHOLE
from fsdp_jobs.plan.plan import make_plan
from fsdp_jobs.plan.shape_client import shape_of
from fsdp_jobs.plan.topology import Topology

CLUSTERS = (("a100_40", 22.8), ("a100_80", 0.25), ("a100_80", 5.7), ("h100", 1.0), ("h100", 45.6), ("h200", 45.6),
            ("b200", 45.6), ("mi300x", 45.6), ("l40s", 11.4))  # fmt: skip
NODES = (1, 2, 16, 256)
MODELS = ("llama_1b", "llama3_8b", "llama3_70b")
SEQUENCES = ((2048, 4), (8192, 1))  # tokens, microbatch
RECOMPUTED = ("full", "none")
SETTINGS = (False, True)


def main() -> None:
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
    argparse.ArgumentParser(description=__doc__).parse_args()
    began, gaps, unfit = time.perf_counter(), [], 0
    for config in jobs():
        plan = make_plan(config, seek_remedies=False)
        others = [option for option in every_option(config) if option.fits]
        if not plan.fits:
            assert not others
            unfit += 1
            continue
        assert plan.time is not None
        fastest = max(others, key=lambda o: o.time.tokens_per_s)
        gap = fastest.time.tokens_per_s / plan.time.tokens_per_s - 1
        gaps.append(gap)
        if gap > 0.03:
            hardware, model = config.hardware, config.model.kind
            where = f"{hardware.name} {hardware.inter_node_gb_s} GB/s, {config.nodes} nodes, {model}"
            print(f"{where}, {config.data.seq_len} tokens: {gap:.1%} behind {fastest.name}")
    near = sum(gap <= 0.03 + 1e-9 for gap in gaps)
    print(f"{len(gaps) + unfit} configurations, of which {unfit} fit in no way; {time.perf_counter() - began:.0f} s")
    print(f"within 3% of the fastest of all that fit: {near} of {len(gaps)} ({near / len(gaps):.0%})")
    print(f"largest gap {max(gaps):.2%}")


def jobs() -> Iterator[JobConfig]:
    for hardware, model, recomputed in itertools.product({name for name, _ in CLUSTERS}, MODELS, RECOMPUTED):
        kept = f"fsdp.activation_checkpointing={recomputed}"
        config = compose_job([f"hardware={hardware}", f"model={model}", "data=synthetic", kept])
        networks = [network for name, network in CLUSTERS if name == hardware]
        for network, nodes, (seq_len, micro) in itertools.product(networks, NODES, SEQUENCES):
            yield replace(
                config,
                nodes=nodes,
                hardware=replace(config.hardware, inter_node_gb_s=network),
                data=replace(config.data, seq_len=seq_len, micro_batch=micro, global_batch=nodes * 8 * micro * 2),
            )


def every_option(config: JobConfig) -> Iterator[Option]:
    shape = shape_of(config)
    assert shape is not None
    grouping = Grouping(config, Topology.flat(int(config.nodes)))
    set_to = [
        replace(config, fsdp=replace(config.fsdp, accumulate_unsharded=whole_gradients, chunked_loss=chunked))
        for whole_gradients, chunked in itertools.product(SETTINGS, SETTINGS)
    ]
    for placement in filter(None, map(grouping.place, range(1, grouping.world + 1))):
        world = len(placement.used) * grouping.per_node
        names = ("no_shard",) if placement.group == 1 else WHOLE if placement.group == world else HYBRID
        for strategy, other in itertools.product(names, set_to):
            yield price(other, shape, strategy, placement)


if __name__ == "__main__":
    main()
