"""What is offered to a job that does not fit."""

from __future__ import annotations

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.plan.plan import Plan, make_plan

BATCH = ("data=synthetic", "data.seq_len=8192", "data.micro_batch=1")


def offered(plan: Plan) -> list[str]:
    assert not plan.fits
    return [" ".join(r.overrides) for r in plan.remedies]


def test_settings_on_one_gpu_come_before_more_gpus_and_nodes() -> None:
    plan = make_plan(compose_job([*BATCH, "nodes=1", "nproc_per_node=1", "hardware=h100", "model=llama3_8b"]))
    first, more_ranks, more_nodes = offered(plan)
    assert first == "fsdp.activation_checkpointing=full fsdp.cpu_offload=true"
    assert more_ranks == "nproc_per_node=8"
    assert more_nodes.startswith("nodes=")


def test_a_remedy_near_the_limit_says_so() -> None:
    plan = make_plan(compose_job([*BATCH, "nodes=1", "nproc_per_node=1", "hardware=h100", "model=llama3_8b"]))
    usable = plan.usable_bytes / 2**30
    for remedy in plan.remedies:
        gib = float(remedy.result.partition(": ")[2].split()[0])
        assert ("within 3% of the limit" in remedy.result) is (gib > 0.97 * usable)


def test_activations_are_offloaded_when_recomputation_is_not_enough() -> None:
    huge = ("model.dim=16384", "model.n_layers=126", "model.n_heads=128", "model.n_kv_heads=8", "model.ffn_dim=53248")
    full = "fsdp.activation_checkpointing=full"
    plan = make_plan(
        compose_job([*BATCH, "nodes=128", "hardware=h100", "model=llama3_70b", *huge, full, "data.global_batch=1024"])
    )
    assert offered(plan)[0] == "fsdp.activation_offload=true"


def test_a_cpu_is_never_offered_nodes() -> None:
    plan = make_plan(compose_job([*BATCH, "nodes=1", "nproc_per_node=1", "hardware=cpu", "model=llama3_8b"]))
    assert not any("nodes=" in o for o in offered(plan))


def test_one_gpu_shards_over_itself_where_that_fits() -> None:
    three = ("model=llama_1b", "model.dim=3072", "model.n_layers=28", "model.n_heads=24")
    here = ("data=synthetic", "nodes=1", "nproc_per_node=1", "hardware=h100", "data.seq_len=2048")
    batch = ("data.micro_batch=8", "data.global_batch=8", "fsdp.activation_checkpointing=selective")
    plan = make_plan(compose_job([*here, *batch, *three]))
    assert plan.fits and plan.layout.strategy == "full_shard" and plan.layout.shard_group == 1


def test_one_gpu_shards_over_itself_where_the_whole_model_just_fits() -> None:
    here = (
        "data=synthetic",
        "nodes=1",
        "nproc_per_node=1",
        "hardware=h100",
        "model=llama_1b",
        "fsdp.chunked_loss=false",
    )
    whole = make_plan(compose_job([*here]))
    assert whole.layout.strategy == "no_shard" and whole.memory is not None
    least = whole.memory.total / 0.95 / 2**30  # of which the plan leaves 5%
    just = make_plan(compose_job([*here, f"hardware.memory_gib={1.02 * least}"]))
    assert just.fits and just.layout.strategy == "full_shard" and "of the limit" not in " ".join(just.reasons)


def test_no_nodes_are_offered_where_mild_settings_do_without() -> None:
    here = ("data=synthetic", "data.seq_len=2048", "data.micro_batch=1", "data.global_batch=8", "nodes=1")
    plan = make_plan(compose_job([*here, "hardware=h100", "model=llama2_7b", "fsdp=no_shard"]))
    assert offered(plan)[0] == "fsdp=auto" and not any("nodes=" in o for o in offered(plan))


def test_no_nodes_are_offered_where_a_smaller_microbatch_does() -> None:
    """Thirteen nodes would fit because each GPU had fewer samples at once."""
    here = ("data=synthetic", "data.seq_len=8192", "data.micro_batch=3", "data.global_batch=100", "nodes=3")
    plan = make_plan(compose_job([*here, "hardware=h100", "model=llama3_8b"]))
    assert "data.micro_batch=1" in offered(plan) and not any("nodes=" in o for o in offered(plan))
