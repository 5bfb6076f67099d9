"""How far the chosen option is from the fastest that fits, over clusters and jobs: python benchmarks/plan_choice.py"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import replace

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.plan.plan import make_plan

CLUSTERS = (("a100_40", 22.8), ("a100_80", 0.25), ("a100_80", 5.7), ("h100", 1.0), ("h100", 45.6), ("h200", 45.6),
            ("b200", 45.6), ("mi300x", 45.6), ("l40s", 11.4))  # fmt: skip
NODES = (1, 2, 16, 256)
MODELS = ("llama_1b", "llama3_8b", "llama3_70b")
SEQUENCES = ((2048, 4), (8192, 1))  # tokens, microbatch


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    began, gaps, unfit = time.perf_counter(), [], 0
    configs = {
        (hardware, model): compose_job(
            [f"hardware={hardware}", f"model={model}", "data=synthetic", "fsdp.activation_checkpointing=full"]
        )
        for hardware in {name for name, _ in CLUSTERS}
        for model in MODELS
    }
    for (hardware, network), nodes, model, (seq_len, micro) in itertools.product(CLUSTERS, NODES, MODELS, SEQUENCES):
        config = configs[hardware, model]
        config = replace(
            config,
            nodes=nodes,
            hardware=replace(config.hardware, inter_node_gb_s=network),
            data=replace(config.data, seq_len=seq_len, micro_batch=micro, global_batch=nodes * 8 * micro * 2),
        )
        plan = make_plan(config, seek_remedies=False)
        if not plan.fits:
            assert not any(c.fits for c in plan.considered)
            unfit += 1
            continue
        fastest = min((c for c in plan.considered if c.fits), key=lambda c: c.step_s)
        gap = plan.time.step / fastest.step_s - 1 if plan.time else 0.0
        gaps.append(gap)
        if gap > 0.03:
            print(f"{hardware} {network} GB/s, {nodes} nodes, {model}, {seq_len}: {gap:.1%} behind {fastest.name}")
    near = sum(gap <= 0.03 + 1e-9 for gap in gaps)
    print(f"{len(gaps) + unfit} configurations, of which {unfit} fit in no way; {time.perf_counter() - began:.1f} s")
    print(f"within 3% of the fastest option that fits: {near} of {len(gaps)} ({near / len(gaps):.0%})")
    print(f"largest gap {max(gaps):.2%}")


if __name__ == "__main__":
    main()
