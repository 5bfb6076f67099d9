"""The loss in chunks of tokens is the loss of whole logits; bf16 weights learn as fp32 ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fsdp_jobs.config.schema import FsdpConfig, LlamaConfig, OptimConfig
from fsdp_jobs.job.sharding import build_mesh
from fsdp_jobs.models.llama import Llama
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.train import loss as loss_module
from fsdp_jobs.train.data import IGNORE
from fsdp_jobs.train.loss import TokenLoss
from fsdp_jobs.train.optim import StochasticAdamW, build_optimizer, round_stochastically
from tests.world import run_world, train_here

TINY = LlamaConfig(vocab_size=97, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48)
CHUNKED, WHOLE = FsdpConfig(chunked_loss=True), FsdpConfig(chunked_loss=False)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "loss_chunk", lambda fsdp, *_: 7 if fsdp.chunked_loss else 0)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 97, (3, 17), generator=generator)
    labels = torch.randint(0, 97, (3, 17), generator=generator)
    labels[1, 4:9] = IGNORE
    return tokens, labels


def model_of(tied: bool = False) -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig(**{**TINY.__dict__, "tie_embeddings": tied}))


def run(model: nn.Module, fsdp: FsdpConfig) -> tuple[float, dict[str, Tensor]]:
    value = TokenLoss(model, fsdp)(*batch())
    (value * 0.25).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return value.item(), gradients


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_those_of_whole_logits(tied: bool) -> None:
    model = model_of(tied)
    (whole, expected), (chunked, gradients) = run(model, WHOLE), run(model, CHUNKED)
    assert chunked == pytest.approx(whole, rel=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    assert "forward" not in vars(model.output)


@pytest.mark.usefixtures("small_chunks")
def test_a_model_that_changes_its_logits_keeps_whole_ones() -> None:
    class Capped(Llama):
        def forward(self, tokens: Tensor) -> Tensor:
            return 3 * torch.tanh(super().forward(tokens) / 3)

    torch.manual_seed(0)
    model = Capped(TINY)
    tokens, labels = batch()
    expected = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    loss = TokenLoss(model, CHUNKED)
    for _ in range(2):
        torch.testing.assert_close(loss(tokens, labels), expected)


@pytest.mark.usefixtures("small_chunks")
def test_a_model_without_a_linear_head_keeps_whole_logits() -> None:
    model = nn.Embedding(97, 97)
    tokens, labels = batch()
    expected = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(TokenLoss(model, CHUNKED)(tokens, labels), expected)


@pytest.mark.integration
@pytest.mark.parametrize(
    "overrides",
    [
        ("fsdp=full_shard",),
        ("fsdp=full_shard", "model.tie_embeddings=true"),
        ("fsdp=full_shard", "fsdp.wrap=none"),
        ("fsdp=no_shard", "fsdp.activation_checkpointing=full"),
    ],
    ids=" ".join,
)
def test_training_is_the_same_under_fsdp(overrides: tuple[str, ...], tmp_path: Path) -> None:
    args = ("steps=4", "model.vocab_size=256", *overrides)
    whole = run_world(2, train_here, str(tmp_path / "whole"), (*args, "fsdp.chunked_loss=false"))[0]
    chunked = run_world(2, train_here, str(tmp_path / "chunked"), (*args, "fsdp.chunked_loss=true"))[0]
    assert chunked == pytest.approx(whole, rel=1e-6)


def test_stochastic_rounding_has_no_bias_and_keeps_what_bf16_can_hold() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.full((200_000,), 1.0 + 2.0**-10)  # an eighth of the way from 1 to the next bf16
    target = torch.empty_like(exact, dtype=torch.bfloat16)
    round_stochastically(target, exact, generator)
    assert set(target.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert target.double().mean().item() == pytest.approx(exact[0].item(), abs=5e-5)
    special = torch.tensor([0.0, -2.5, float("inf"), float("-inf"), float("nan")])
    target = torch.empty(5, dtype=torch.bfloat16)
    round_stochastically(target, special, generator)
    torch.testing.assert_close(target.float(), special, equal_nan=True)


def descend(master_dtype: str, steps: int = 400) -> float:
    """Walk a weight of 1 down by 1e-3 a step: each update is below half a step of bf16 (2^-8)."""
    model = nn.Linear(512, 8, bias=False)
    dtype = torch.float32 if master_dtype == "fp32" else torch.bfloat16
    model.weight.data = torch.ones_like(model.weight, dtype=dtype)
    optimizer = build_optimizer(model, OptimConfig(lr=1e-3, weight_decay=0.0), master_dtype)
    for _ in range(steps):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    return model.weight.detach().float().mean().item()


def test_small_updates_reach_bf16_weights_with_stochastic_rounding_only() -> None:
    assert descend("fp32") == pytest.approx(0.6, abs=1e-3)
    assert descend("bf16_stochastic") == pytest.approx(0.6, abs=5e-3)
    assert descend("bf16") == 1.0


def test_a_gradient_that_is_not_finite_changes_no_bf16_weight() -> None:
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    optimizer, before = build_optimizer(model, OptimConfig(), "bf16_stochastic"), model.weight.detach().clone()
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    model.weight.grad = torch.full_like(model.weight, float("nan"))
    optimizer.step()
    assert torch.equal(model.weight, before)


def test_the_arithmetic_is_that_of_adamw() -> None:
    def weights(kind: Any, dtype: torch.dtype) -> Tensor:
        torch.manual_seed(3)
        parameter = nn.Parameter(torch.randn(64, 64).to(dtype))
        optimizer = kind([parameter], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
        for _ in range(20):
            parameter.grad = torch.randn(64, 64).to(dtype)
            optimizer.step()
        return parameter.detach().float()

    exact, rounded = weights(torch.optim.AdamW, torch.float32), weights(StochasticAdamW, torch.bfloat16)
    assert (exact - rounded).abs().mean() < 0.01 and abs((exact - rounded).mean()) < 1e-3


@pytest.mark.integration
@pytest.mark.parametrize("master_dtype", ["bf16", "bf16_stochastic"])
def test_bf16_weights_train_on_a_hybrid(master_dtype: str, tmp_path: Path) -> None:
    args = ("steps=6", "optim.lr=0.01", "fsdp=hybrid_shard", "fsdp.shard_group=2")
    expected = run_world(4, train_here, str(tmp_path / "fp32"), args)[0]
    losses = run_world(4, train_here, str(tmp_path / "bf16"), (*args, f"fsdp.master_dtype={master_dtype}"))[0]
    assert losses == pytest.approx(expected, rel=0.01) and losses != expected


def shards_after_updates() -> list[float]:
    layout = Layout("hybrid_shard", 4, 2)
    mesh = build_mesh(layout, "cpu")
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(model, OptimConfig(lr=1e-3), "bf16_stochastic")
    for _ in range(3):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    return model.weight.to_local().flatten().tolist()  # type: ignore[operator]


def test_replicas_round_alike_and_shards_do_not() -> None:
    first, second, third, fourth = run_world(4, shards_after_updates)
    assert first == third and second == fourth and first != second
