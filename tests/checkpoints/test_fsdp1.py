"""Models that FSDP1 wraps: what they hold comes back to the bit, on other numbers of ranks and in FSDP2, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_jobs.checkpoints.checkpointer import Checkpointer
from fsdp_jobs.config.schema import CheckpointConfig, JobConfig, NoModelConfig
from fsdp_jobs.job.sharding import build_mesh
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run.directory import RunDir
from tests.checkpoints.saving import trained
from tests.world import run_world

pytestmark = pytest.mark.integration


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls  # type: ignore[operator, no-any-return]


class Tied(nn.Module):
    """Blocks with rows that no number of ranks divides, a buffer, a frozen weight, and an embedding used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 5), Counting(), nn.Linear(5, 6)) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


HYBRID = ("hybrid-mesh", "hybrid-groups", "zero2-hybrid-mesh")
KINDS = ("full", "flat", "mesh", "grad_op", "none", *HYBRID)


class Partly(Tied):
    """Has a part that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Sequential(nn.Linear(6, 6))  # a unit of its own


def make(kind: str, folder: str, restart: str, seed: int, mode: str = "off", of: type[Tied] = Tied) -> Checkpointer:
    """Return a checkpointer of a model that FSDP1 wraps in this way."""
    torch.manual_seed(seed)
    world = dist.get_world_size()
    group = world // 2 if kind in HYBRID else 1 if kind == "none" else world
    layout = Layout("hybrid_shard" if kind in HYBRID else "full_shard", world, group)
    strategy = {"grad_op": "SHARD_GRAD_OP", "none": "NO_SHARD", "zero2-hybrid-mesh": "_HYBRID_SHARD_ZERO2"}.get(
        kind, "HYBRID_SHARD" if kind in HYBRID else "FULL_SHARD"
    )
    how: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": kind != "flat"}
    if kind == "grad_op":
        how["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    if kind.endswith("mesh"):
        how["device_mesh"] = build_mesh(layout, "cpu")
    elif kind == "hybrid-groups":
        mesh = build_mesh(layout, "cpu")
        how["process_group"] = (mesh.get_group("shard"), mesh.get_group("replicate"))
    model = of()
    if kind != "flat":
        model.layers[0][0].bias.requires_grad_(False)  # type: ignore[index]
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), device_id=torch.device("cpu"), **how
    )
    if kind == "mesh":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Sequential))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    keys = CheckpointConfig(async_mode=mode, every_steps=1, keep=9)
    config = JobConfig(script="program.py", model=NoModelConfig(), checkpoint=keys)
    run = RunDir(Path(folder))
    return Checkpointer(run, config, layout, model, optimizer, {}, torch.device("cpu"), 0, restart)


def step(checkpoints: Checkpointer, number: int) -> float:
    model, optimizer = checkpoints.state.model, checkpoints.state.optimizer
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    loss = model(torch.randint(0, 11, (8,), generator=generator)).square().mean()
    optimizer.zero_grad()  # gradients are there when it saves
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def whole(checkpoints: Checkpointer) -> dict[str, list[float]]:
    """All tensors of model and optimizer by name, whole."""
    tensors, _ = checkpoints.state.live()
    all_of_it = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()}
    return {n: t.flatten().tolist() for n, t in all_of_it.items()}


def saved(checkpoints: Checkpointer, steps: int) -> dict[str, list[float]]:
    for number in range(1, steps + 1):
        step(checkpoints, number)
    checkpoints.save(steps, block=True)
    assert checkpoints.failure is None
    return whole(checkpoints)


def _goes_on(folder: str, kind: str, mode: str) -> None:
    checkpoints = make(kind, folder, "0-0", seed=1, mode=mode)
    assert not checkpoints.state.optimizer.state, "looking at it leaves nothing behind"
    before = saved(checkpoints, 3)
    losses = [step(checkpoints, number) for number in (4, 5)]
    after = whole(checkpoints)
    checkpoints.close()
    again = make(kind, folder, "0-1", seed=2)
    assert again.restore() == 3
    differ = [name for name, values in whole(again).items() if values != before[name]]
    assert not differ, (kind, differ)
    assert [step(again, number) for number in (4, 5)] == losses
    assert whole(again) == after
    again.close()


def _partly(folder: str) -> None:
    checkpoints = make("full", folder, "0-0", seed=1, of=Partly)
    checkpoints.save(0, block=True)
    fresh = make("full", folder, "0-1", seed=2, of=Partly)
    fresh.restore()
    assert not checkpoints.state.optimizer.state and not fresh.state.optimizer.state, "neither has made an update"
    before = saved(checkpoints, 3)
    assert saved(fresh, 3) == before
    assert "optim.state.aside.0.weight.exp_avg" not in before
    after = [step(checkpoints, number) for number in (4, 5)]
    checkpoints.close()
    again = make("full", folder, "0-2", seed=2, of=Partly)
    assert again.restore() == 3
    assert [step(again, number) for number in (4, 5)] == after
    assert not any(whole(again)["optim.state.aside.0.weight.step"])
    again.close()


def test_a_part_without_gradients_stops_no_restart(tmp_path: Path) -> None:
    run_world(2, _partly, str(tmp_path))


def _all_go_on(folder: str, kinds: list[str]) -> None:
    for kind in kinds:
        _goes_on(f"{folder}/{kind}", kind, "process" if kind == "full" else "thread" if kind == "mesh" else "off")


def test_every_kind_goes_on_to_the_bit(tmp_path: Path) -> None:
    run_world(4, _all_go_on, str(tmp_path), list(KINDS))


def _save_all(folder: str, kinds: list[str]) -> list[dict[str, list[float]]]:
    return [saved(make(kind, f"{folder}/{kind}", "0-0", seed=1), 2) for kind in kinds]


def _read_all(folder: str, kinds: dict[str, str]) -> list[dict[str, list[float]]]:
    read = []
    for kind, other in kinds.items():
        checkpoints = make(other, f"{folder}/{kind}", "0-1", seed=2)
        assert checkpoints.restore() == 2
        read.append(whole(checkpoints))
        step(checkpoints, 3)
    return read


@pytest.mark.parametrize(
    ("ranks", "then", "kinds"),
    [
        (2, 4, {"full": "hybrid-mesh", "mesh": "hybrid-groups", "flat": "flat", "none": "full"}),
        (4, 2, {"hybrid-mesh": "full", "hybrid-groups": "mesh", "flat": "flat", "full": "none"}),
    ],
)
def test_another_world_reads_what_was_saved(tmp_path: Path, ranks: int, then: int, kinds: dict[str, str]) -> None:
    before = run_world(ranks, _save_all, str(tmp_path), list(kinds))[0]
    for read in run_world(then, _read_all, str(tmp_path), kinds):
        for kind, was, now in zip(kinds, before, read, strict=True):
            assert [name for name in was if now[name] != was[name]] == [], kind


def _to_fsdp2(folder: str) -> None:
    before = saved(make("full", folder, "0-0", seed=1), 2)
    model = Tied()
    model.layers[0][0].bias.requires_grad_(False)  # type: ignore[index]
    now = trained(folder, "0-1", model=model)
    assert now.restore() == 2
    assert whole(now) == before


def test_fsdp2_goes_on_where_fsdp1_was(tmp_path: Path) -> None:
    run_world(2, _to_fsdp2, str(tmp_path))


class Quantized(torch.optim.SGD):
    """Keeps one number for each four of a parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["scale"] = torch.zeros(-(-p.numel() // 4))


def _refused(folder: str) -> list[str]:
    layout, device = Layout("full_shard", 2, 2), torch.device("cpu")
    config = JobConfig(script="program.py", model=NoModelConfig())
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    both = dist.new_group([0, 1])
    hybrid = {"process_group": (alone, both), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    said = []
    for how, optimizer_of, is_early in (
        ({"process_group": alone}, torch.optim.AdamW, False),
        (hybrid, torch.optim.AdamW, False),  # torch makes it NO_SHARD, and reduces no gradients
        ({}, Quantized, False),
        ({}, torch.optim.AdamW, True),
    ):
        plain: nn.Module = nn.Linear(7, 7)
        before = list(plain.parameters())
        model = FullyShardedDataParallel(plain, device_id=device, **how)  # type: ignore[arg-type]
        optimizer = optimizer_of(before if is_early else model.parameters(), lr=0.1)
        with pytest.raises(TypeError) as refused:
            Checkpointer(RunDir(folder), config, layout, model, optimizer, {}, device, 0, "0-0")
        said.append(str(refused.value))
    return said


def test_what_cannot_be_saved_is_refused_when_the_object_is_made(tmp_path: Path) -> None:
    alone, hybrid, odd, early = run_world(2, _refused, str(tmp_path))[0]
    assert "FSDP spans 1 of 2 ranks" in alone and "job.mesh()" in alone
    assert "FSDP spans 1 of 2 ranks" in hybrid
    assert "scale of weight has the shape" in odd or "cannot tell" in odd, odd
    assert "make the optimizer after" in early
