"""How a job is sharded never changes what it computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.world import run_world, train_here

pytestmark = pytest.mark.integration

STEPS = "steps=8"
EVERY_STRATEGY = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")

# Options of FSDP that change how it computes, not what.
OPTIONS = (
    (),
    ("fsdp.accumulate_unsharded=false",),
    ("fsdp=hybrid_shard", "fsdp.accumulate_unsharded=false"),
    ("fsdp.activation_checkpointing=full",),
    ("fsdp.activation_checkpointing=every_n",),
    ("fsdp.activation_checkpointing=selective",),
    ("fsdp.activation_checkpointing=full", "fsdp.activation_offload=true"),
    ("fsdp.cpu_offload=true",),
    ("fsdp.wrap=size", "fsdp.min_num_params=10000"),
    ("fsdp.wrap=none",),
    ("fsdp.forward_prefetch=1", "fsdp.backward_prefetch=1"),
    ("fsdp.meta_init=false", "model=custom", "model._target_=tests.models.tiny", "model.wrap_classes=[Block]"),
    ("model=custom", "model._target_=tests.models.tiny", "model.wrap_classes=[Block]"),
    ("model=custom", "model._target_=tests.models.tiny", "model.wrap_classes=[Block,Linear]"),
    ("model=custom", "model._target_=tests.models.tiny", "fsdp.activation_checkpointing=selective"),
    ("model=custom", "model._target_=tests.models.staged"),
    ("fsdp=no_shard", "model=custom", "model._target_=tests.models.tiny", "model.wrap_classes=[Block]"),
    ("model.tie_embeddings=true",),
    ("model.tie_embeddings=true", "fsdp=no_shard"),
    ("data.micro_batch=3",),
    ("data.workers=1",),
)


def _every_strategy(folder: str) -> dict[str, list[float]]:
    import torch.distributed as dist

    world = dist.get_world_size()
    found = {}
    for strategy in EVERY_STRATEGY:
        if world == 1 and "hybrid" in strategy:
            continue
        group = [f"fsdp.shard_group={max(1, world // 2)}"] if "hybrid" in strategy and world > 2 else []
        overrides = [STEPS, f"fsdp={strategy}", *group]
        found[strategy] = train_here(f"{folder}/{strategy}-{world}", overrides, nodes=2 if world == 4 else 1)
    return found


def test_losses_do_not_depend_on_strategy_or_world_size(tmp_path: Path) -> None:
    reference: list[float] = []
    for world in (1, 2, 4):
        for strategy, losses in run_world(world, _every_strategy, str(tmp_path))[0].items():
            assert len(losses) == 8
            reference = reference or losses
            assert losses == pytest.approx(reference, rel=1e-5), f"{strategy} on {world} ranks"
    assert reference[-1] < reference[0]


def _every_option(folder: str) -> list[tuple[str, list[float]]]:
    return [
        (" ".join(option), train_here(f"{folder}/{i}", ["steps=6", "data.micro_batch=1", "fsdp=full_shard", *option]))
        for i, option in enumerate(OPTIONS)
    ]


def test_options_of_fsdp_do_not_change_the_losses(tmp_path: Path) -> None:
    by_option = dict(run_world(2, _every_option, str(tmp_path))[0])
    for option, losses in by_option.items():
        if "tests.models" in option:
            same = next(o for o in by_option if "tests.models" in o)
        else:
            same = "model.tie_embeddings=true" if "tie_embeddings" in option else ""
        assert losses == pytest.approx(by_option[same], rel=1e-5), option


def _precisions(folder: str) -> dict[str, list[float]]:
    return {
        dtype: train_here(f"{folder}/{dtype}", ["steps=10", f"fsdp.param_dtype={dtype}", f"fsdp.output_dtype={out}"])
        for dtype, out in (("fp32", "auto"), ("bf16", "fp32"), ("fp16", "auto"))
    }


def test_fewer_experts_than_ranks_are_sharded_inside_and_saved(tmp_path: Path) -> None:
    mixture = ("model=custom", "model._target_=tests.models.mixture", "model.wrap_classes=[Block]")
    given = (*mixture, "optim.schedule=constant", "checkpoint.every_steps=4")
    alone = run_world(1, train_here, f"{tmp_path}/alone", [*given, "steps=8"])[0]
    first = run_world(4, train_here, f"{tmp_path}/moved", [*given, "steps=4"])[0]
    again = run_world(2, train_here, f"{tmp_path}/moved", [*given, "steps=8"])[0]
    assert [*first, *again[-4:]] == pytest.approx(alone, rel=1e-5)


def test_mixed_precision_trains_to_nearly_the_same_losses(tmp_path: Path) -> None:
    found = run_world(2, _precisions, str(tmp_path))[0]
    assert found["bf16"] == pytest.approx(found["fp32"], rel=2e-2)
    assert found["fp16"] == pytest.approx(found["fp32"], rel=2e-2)
    assert found["bf16"] != found["fp32"]


def _one_rank_overflows() -> tuple[float, float, bool, bool]:
    """One optimizer update in fp16 where rank 1 alone has an infinite gradient in its shard."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from fsdp_jobs.config.hydra import compose_job
    from fsdp_jobs.job.sharding import build_mesh
    from fsdp_jobs.plan.plan import make_plan
    from fsdp_jobs.train.sources import open_samples
    from fsdp_jobs.train.trainer import Learner
    from tests.world import TINY

    config = compose_job([*TINY, "nodes=1", "nproc_per_node=2", "fsdp=full_shard", "fsdp.param_dtype=fp16", "steps=3"])
    layout = make_plan(config).layout
    learner = Learner(config, layout, build_mesh(layout, "cpu"), torch.device("cpu"))
    learner.initialize()
    assert learner.scaler is not None
    samples = open_samples(config.data, config.seed)
    batch = [samples[i] for i in range(2)]
    learner.backward([(torch.stack([t for t, _ in batch]), torch.stack([y for _, y in batch]))])
    weight = learner.model.get_parameter("layers.0.attention.wq.weight")
    assert isinstance(weight, DTensor) and isinstance(weight.grad, DTensor)
    if dist.get_rank() == 1:
        weight.grad.to_local()[0, 0] = float("inf")
    before, scale = weight.to_local().clone(), learner.scaler.get_scale()
    learner.update(learner.clip())
    after = learner.scaler.get_scale()
    return scale, after, torch.equal(before, weight.to_local()), True


def test_an_overflow_on_one_rank_skips_the_update_on_all() -> None:
    for scale, after, unchanged, _ in run_world(2, _one_rank_overflows):
        assert unchanged
        assert after == scale / 2
