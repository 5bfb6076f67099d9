"""Situations with the answer of an expert. python -m tests.plan.test_situations prints the docs' table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.plan.plan import Plan, make_plan

DOCS = Path(__file__).parents[2] / "docs" / "guides/sharding.md"
FULL = "fsdp.activation_checkpointing=full"
THIRTEEN = "model=llama2_7b model.dim=5120 model.n_layers=40 model.n_heads=40 model.n_kv_heads=40 model.ffn_dim=13824"
HUGE = "model=llama3_70b model.dim=16384 model.n_layers=126 model.n_heads=128 model.n_kv_heads=8 model.ffn_dim=53248"


@dataclass(frozen=True)
class Situation:
    """A job, what is right for it, and why."""

    job: str
    overrides: str
    answer: str
    why: str
    is_answer: Callable[[Plan], bool]


def group(plan: Plan) -> int:
    return plan.layout.shard_group


def remedies(plan: Plan) -> str:
    return " ".join(o for r in plan.remedies for o in r.overrides)


SITUATIONS = (
    Situation(
        "160M, 1 node of H100", "nodes=1 hardware=h100 model=llama_160m data.seq_len=2048 data.micro_batch=8 "
        "data.global_batch=64",
        "any; no faster than DDP, no more memory",
        "NVLink hides all traffic of a small model; sharding frees memory at no cost",
        lambda p: p.fits and p.inside in ("domain", "node", "all") and p.memory.total < 16 * 2**30,
    ),
    Situation(
        "8B, 1 node of H100", f"nodes=1 hardware=h100 model=llama3_8b data.micro_batch=1 data.global_batch=64 {FULL}",
        "shards over the node", "128 GB of fp32 states do not fit on one GPU; NVLink makes a node as fast as parts",
        lambda p: p.fits and group(p) == 8,
    ),
    Situation(
        "8B, 4 nodes of H200", f"nodes=4 hardware=h200 model=llama3_8b data.micro_batch=1 data.global_batch=128 {FULL}",
        "HSDP, groups inside nodes", "the model fits into a node, so only one all-reduce a step crosses the network",
        lambda p: p.fits and group(p) <= 8 and p.layout.replicas >= 4,
    ),
    Situation(
        "8B, 2,048 nodes of H100",
        f"nodes=2048 hardware=h100 model=llama3_8b data.micro_batch=1 data.global_batch=16384 {FULL}",
        "a hybrid, nearly the speed per GPU of one node", "latency limits one ring of 16,384 ranks",
        lambda p: p.fits and p.layout.replicas > 1 and p.time.tokens_per_s_per_rank > 5500,
    ),
    Situation(
        "7B, 2 nodes of A100, Ethernet at 25 Gb/s",
        f"nodes=2 hardware=a100_80 hardware.inter_node_gb_s=0.25 model=llama2_7b data.seq_len=4096 data.micro_batch=1 "
        f"data.global_batch=64 {FULL}",
        "HSDP, 8 x 2", "gathers stay on NVLink; a wider group is several times slower, a smaller one sends more",
        lambda p: group(p) == 8 and p.layout.replicas == 2,
    ),
    Situation(
        "1B, 8 nodes of A100, Ethernet at 100 Gb/s",
        f"nodes=8 hardware=a100_80 hardware.inter_node_gb_s=1.0 model=llama_1b data.seq_len=4096 data.micro_batch=4 "
        f"data.global_batch=256 {FULL}",
        "ZeRO-2 over all",
        "the network limits: bf16 gather and fp32 reduce-scatter send 6 bytes per parameter, an fp32 all-reduce 8",
        lambda p: p.layout.strategy == "shard_grad_op" and group(p) == 64,
    ),
    Situation(
        "7B, 16 nodes of A100 40 GB, EFA at 400 Gb/s",
        f"nodes=16 hardware=a100_40 hardware.inter_node_gb_s=5.7 model=llama2_7b data.seq_len=4096 data.micro_batch=2 "
        f"data.global_batch=512 {FULL}",
        "HSDP, groups of a node", "four microbatches gather eight times: that belongs on NVLink",
        lambda p: group(p) == 8 and p.layout.replicas == 16,
    ),
    Situation(
        "8B, 4 nodes of L40S (PCIe)",
        f"nodes=4 hardware=l40s model=llama3_8b data.seq_len=4096 data.micro_batch=1 data.global_batch=64 {FULL}",
        "HSDP over a node, parameters kept gathered", "PCIe is slow, so gathering once per microbatch pays",
        lambda p: p.layout.strategy == "hybrid_shard_zero2" and group(p) == 8,
    ),
    Situation(
        "70B, 1 node of A100 80 GB",
        f"nodes=1 hardware=a100_80 model=llama2_70b data.seq_len=4096 data.micro_batch=1 data.global_batch=8 {FULL}",
        "does not fit; offload with masters in bf16, or 3 nodes",
        "1,104 GB of states on 640 GB; they exceed the host's 1 TiB, too",
        lambda p: not p.fits and "fsdp.cpu_offload=true fsdp.master_dtype=bf16_stochastic nodes=3" in remedies(p),
    ),
    Situation(
        "the same, host memory of 2 TiB",
        f"nodes=1 hardware=a100_80 hardware.host_memory_gib=2048 model=llama2_70b data.seq_len=4096 "
        f"data.micro_batch=1 data.global_batch=8 {FULL}",
        "does not fit; offload or 3 nodes", "the host holds states and gradients",
        lambda p: not p.fits and "fsdp.cpu_offload=true" in remedies(p) and "nodes=3" in remedies(p),
    ),
    Situation(
        "70B, 8 nodes of A100 80 GB, 16 microbatches",
        f"nodes=8 hardware=a100_80 model=llama2_70b data.seq_len=4096 data.micro_batch=1 data.global_batch=1024 {FULL}",
        "HSDP over 4 nodes", "2 nodes do not hold it, 4 do, and twice 32 ranks make shorter rings than 64",
        lambda p: p.fits and p.layout.strategy == "hybrid_shard" and group(p) == 32,
    ),
    Situation(
        "70B, 2 racks of GB200 NVL72",
        f"nodes=36 hardware=b200 hardware.gpus_per_node=4 hardware.nvlink_domain=72 model=llama3_70b "
        f"data.micro_batch=1 data.global_batch=288 {FULL}",
        "HSDP, a rack each", "NVLink joins the 18 nodes of a rack; only the all-reduce leaves it",
        lambda p: p.inside == "domain" and group(p) == 72,
    ),
    Situation(
        "13B, 1 node of A100 40 GB", f"nodes=1 hardware=a100_40 {THIRTEEN} data.seq_len=2048 data.micro_batch=4 "
        f"data.global_batch=64 fsdp.master_dtype=bf16_stochastic {FULL}",
        "fits over the node with a third less memory than in fp32", "states take 8 bytes per parameter, not 16",
        lambda p: p.fits and group(p) == 8 and p.memory.total < 24 * 2**30,
    ),
    Situation(
        "8B, 32,768 tokens, 1 node of H100",
        f"nodes=1 hardware=h100 model=llama3_8b data.seq_len=32768 data.micro_batch=1 data.global_batch=16 {FULL}",
        "fits, over the node", "recomputation keeps 8 GiB of inputs; the loss in chunks makes no 59 GiB of logits",
        lambda p: p.fits and group(p) == 8 and p.memory.logits < 6 * 2**30,
    ),
    Situation(
        "405B, 128 nodes of H100", f"nodes=128 hardware=h100 {HUGE} data.micro_batch=1 data.global_batch=1024 {FULL}",
        "narrowly does not fit; twice the nodes", "126 block inputs of 8,192 x 16,384 take 32 GiB",
        lambda p: not p.fits and p.memory.total < 80 * 2**30 and "nodes=256" in remedies(p),
    ),
    Situation(
        "8B, 4 nodes of H100, objective memory",
        f"nodes=4 hardware=h100 model=llama3_8b data.micro_batch=1 data.global_batch=64 fsdp.objective=memory {FULL}",
        "ZeRO-3 over all", "leaves most room for longer sequences",
        lambda p: p.layout.strategy == "full_shard" and group(p) == 32,
    ),
)  # fmt: skip


def planned(situation: Situation) -> Plan:
    overrides = situation.overrides.split()
    chosen = {o.partition("=")[0] for o in overrides}
    defaults = [o for o in ("data.seq_len=8192",) if o.partition("=")[0] not in chosen]
    return make_plan(compose_job(["data=synthetic", *defaults, *overrides]))


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda s: s.job)
def test_the_plan_gives_the_experts_answer(situation: Situation) -> None:
    plan = planned(situation)
    assert situation.is_answer(plan), (plan.layout, plan.inside, plan.reasons, remedies(plan))


def table() -> str:
    rows = [f"| {s.job} | {s.answer} | {s.why} |" for s in SITUATIONS]
    return "\n".join(["| job | answer | why |", "|---|---|---|", *rows])


def test_the_docs_have_the_table() -> None:
    assert len(SITUATIONS) >= 15 and table() in DOCS.read_text()


if __name__ == "__main__":
    print(table())
