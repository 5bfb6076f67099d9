"""Shapes without torch against the model's own parameters and the trainer's own cutting into units."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.flop_counter import FlopCounterMode

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import CustomModelConfig, FsdpConfig, JobConfig, LlamaConfig
from fsdp_jobs.job import sharding
from fsdp_jobs.models.build import build_model, find_blocks
from fsdp_jobs.plan import shape_client
from fsdp_jobs.plan.choose import price
from fsdp_jobs.plan.grouping import Grouping
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.plan.memory import peak_memory, snapshot_bytes
from fsdp_jobs.plan.plan import make_plan
from fsdp_jobs.plan.shape_client import probe
from fsdp_jobs.plan.shapes import Activations, ModelShape, Unit, llama_shape
from fsdp_jobs.plan.step_time import LAYER_MATMUL
from fsdp_jobs.plan.topology import Topology
from fsdp_jobs.train import shape_probe
from fsdp_jobs.train.shape_probe import activations_of, shape_of, units_of
from tests.plan.test_memory import fake_world

CONF = Path(__file__).parents[2] / "conf" / "model"
PRESETS = sorted(p.stem for p in CONF.glob("llama*.yaml"))
GQA = LlamaConfig(vocab_size=512, dim=64, n_layers=3, n_heads=8, n_kv_heads=2, ffn_dim=176)


@pytest.mark.parametrize("preset", PRESETS)
def test_names_and_shapes_are_the_models_own(preset: str) -> None:
    config = compose_job([f"model={preset}"]).model
    assert isinstance(config, LlamaConfig)
    with torch.device("meta"):
        model = build_model(config)
    shape = llama_shape(config)
    ours = {
        f"layers.{i}.{name}": size
        for (layers,) in [shape.blocks]
        for i in range(layers.count)
        for name, size in layers.params
    }
    ours |= dict([*shape.root.params, *shape.head.params])
    assert ours == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert shape.numel == sum(p.numel() for p in model.parameters())


def test_recomputation_runs_all_matmuls_of_a_block_but_the_last() -> None:
    model = build_model(GQA)
    tokens = torch.randint(GQA.vocab_size, (2, 16))

    def matmul_flops() -> int:
        with FlopCounterMode(display=False) as counter:
            model(tokens).sum().backward()
        return int(counter.get_flop_counts()["Global"][torch.ops.aten.mm])

    stored = matmul_flops()
    apply_activation_checkpointing(model, check_fn=list(model.layers.children()).__contains__)
    a = llama_shape(GQA).activations
    assert matmul_flops() - stored == tokens.numel() * GQA.n_layers * (a.matmul_flops - a.last_flops)


def units_of_the_trainer(config: LlamaConfig, fsdp: FsdpConfig) -> list[int]:
    with torch.device("meta"):
        model = build_model(config)
    taken: set[nn.Parameter] = set()
    sizes = []
    for block in find_blocks(model, config, fsdp):
        own = [p for p in block.parameters() if p not in taken]
        taken.update(own)
        sizes.append(sum(p.numel() for p in own))
    return sorted(s for s in sizes if s)  # with tied weights the second holder of one has none of its own


@pytest.mark.parametrize("wrap", ["layer", "none", "size"])
@pytest.mark.parametrize("least", [1, 5_000, 20_000, 60_000, 10**9])
@pytest.mark.parametrize("tied", [False, True])
def test_units_are_the_trainers_own(wrap: str, least: int, tied: bool) -> None:
    model, fsdp = replace(GQA, tie_embeddings=tied), FsdpConfig(wrap=wrap, min_num_params=least)
    config = replace(compose_job([]), model=model, fsdp=fsdp)
    shape = llama_shape(model) if wrap == "layer" else shape_of(config)
    ours = sorted(b.numel for b in shape.blocks for _ in range(b.count) if b.numel)
    assert ours == units_of_the_trainer(model, fsdp)
    assert shape.numel == llama_shape(model).numel


def test_a_tied_head_waits_for_the_blocks_backward() -> None:
    """Its gradient exists before theirs."""
    assert llama_shape(replace(GQA, tie_embeddings=True)).waiting == (GQA.vocab_size + 1) * GQA.dim


def test_flops_are_six_a_weight_and_attention() -> None:
    shape = llama_shape(GQA)
    weights = (
        shape.numel - GQA.vocab_size * GQA.dim - GQA.dim * (2 * GQA.n_layers + 1)
    )  # embedding and norms compute none
    assert shape.flops_per_token(100) == 6 * weights + 12 * GQA.n_layers * GQA.dim * 100


FACTORY = """
import copy
import torch
from fsdp_jobs.config.schema import LlamaConfig
from fsdp_jobs.models.llama import Llama

def build(**kwargs):
    return Llama(LlamaConfig(**kwargs))

def adapted(**kwargs):
    model = build(**kwargs)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("output")
    return model

def copied(**kwargs):
    model = build(**kwargs)
    for name in model.layers._modules:
        model.layers._modules[name] = copy.deepcopy(model.layers._modules["0"])
    return model

def scalar(**kwargs):
    model = build(**kwargs)
    model.temperature = torch.nn.Parameter(torch.tensor(1.0))
    return model

def looks(**kwargs):
    model = build(**kwargs)
    model.register_forward_pre_hook(lambda _, tokens: None if int(tokens[0].max()) < 512 else 1 / 0)
    return model

class Plain(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.temperature, self.unused = inner, torch.ones(512), torch.ones(3)

    def forward(self, tokens):
        return self.inner(tokens) * self.temperature

def plain(**kwargs):
    return Plain(build(**kwargs))

class Looping(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        x = self.inner(*args)
        return torch.stack([token * 1 for token in x.unbind(1)], dim=1)

def loops(**kwargs):
    model = build(**kwargs)
    for name, layer in model.layers.named_children():
        model.layers._modules[name] = Looping(layer)
    return model

def wrong(**kwargs):
    model = build(**kwargs)
    model.output = torch.nn.Linear(3, 512)
    return model

def broken(**kwargs):
    return 7
"""


class Biased(nn.Module):
    """A block whose linear layers have a bias, and attention with dropout."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.outer(torch.relu(self.inner(x)))


class OfBiased(nn.Module):
    def __init__(self, width: int = 64, dropout: float = 0.1):
        super().__init__()
        self.embed = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Biased(width, dropout) for _ in range(3))
        self.head = nn.Linear(width, 512)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("seq_len", [32, 128, 1024])
def test_biased_layers_are_six_flops_a_weight_and_attention(seq_len: int) -> None:
    with FakeTensorMode():
        model = OfBiased()
        blocks = list(model.blocks)
        shape = units_of(model, blocks, blocks, [], activations_of(model, blocks, seq_len))
    weights = sum(p.numel() for n, p in model.named_parameters() if p.ndim > 1 and not n.startswith("embed"))
    assert shape.flops_per_token(seq_len) == 6 * weights + 12 * 3 * 64 * seq_len


def test_dropout_in_attention_costs_no_matrix_of_scores() -> None:
    def saved(dropout: float) -> int:
        with FakeTensorMode():
            model = OfBiased(dropout=dropout)
            return activations_of(model, list(model.blocks), 4096).block_saved

    assert saved(0.1) == saved(0.0)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gpt2_is_six_flops_a_weight_and_attention(tmp_path: Path, dropout: float) -> None:
    sizes = {"n_embd": 128, "n_layer": 3, "n_head": 4, "vocab_size": 512, "n_positions": 256, "attn_pdrop": dropout}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    model = ["model=hf", f"model.name_or_path={tmp_path}", "model.pretrained=false"]
    shape = shape_of(compose_job([*model, "data.vocab_size=512", "data.seq_len=256"]))
    weights = 3 * 12 * 128**2 + 512 * 128
    assert shape.flops_per_token(256) == 6 * weights + 12 * 3 * 128 * 256


@pytest.mark.parametrize("hardware", ["cpu", "h100"])
def test_experts_cost_what_a_token_uses_of_them(tmp_path: Path, hardware: str) -> None:
    d, f, experts, used = 64, 96, 8, 2
    sizes = {"hidden_size": d, "intermediate_size": f, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 4, "num_local_experts": experts, "num_experts_per_tok": used}  # fmt: skip
    shape = shape_of(_of(tmp_path, "mixtral", sizes, "data.seq_len=32", f"hardware={hardware}"))
    attention, router, expert = 4 * d * d, experts * d, 3 * d * f
    assert shape.activations.matmul_flops == 2 * (attention + router + used * expert)
    assert shape.largest.numel == attention + router + experts * expert + 2 * d
    assert shape.activations.block_peak == 2 * used * 2 * f  # gate and up are one matrix


def test_buffers_are_there_once_and_are_no_activations() -> None:
    class Caching(OfBiased):
        def __init__(self) -> None:
            super().__init__(dropout=0.0)
            self.register_buffer("places", torch.zeros(4096, 64), persistent=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) * (self.places[: tokens.shape[1]] + 1).mean()

    with FakeTensorMode():
        plain, caching = (activations_of(m, list(m.blocks), 32) for m in (OfBiased(dropout=0.0), Caching()))
    assert caching.head_saved - plain.head_saved < 4096, "not 4096 x 64 elements for 32 tokens"
    config = compose_job(["model=llama_debug", "nodes=1"])
    shape = llama_shape(GQA)
    one, two = (
        peak_memory(replace(shape, buffers=size), Layout("full_shard", 2, 2), config.fsdp, config.data, "cpu", 1)
        for size in (0, 10**9)
    )
    assert (two.total - one.total, two.buffers) == (10**9, 10**9)


def test_frozen_parameters_have_no_gradients_and_no_moments() -> None:
    shape, config, layout = llama_shape(GQA), compose_job(["nodes=1"]), Layout("full_shard", 2, 2)
    adapted = replace(shape, frozen=shape.numel * 9 // 10)
    all_, few = (peak_memory(s, layout, config.fsdp, config.data, "cpu", 4) for s in (shape, adapted))
    assert few.parameters == all_.parameters
    assert few.optimizer == pytest.approx(all_.optimizer / 10, rel=0.01)
    assert few.gradients <= all_.gradients / 9 and few.reduction <= all_.reduction / 9
    assert snapshot_bytes(adapted, layout, config.fsdp, True) == pytest.approx(
        snapshot_bytes(shape, layout, config.fsdp, True) * 1.2 / 3, rel=0.01
    )


def test_frozen_parameters_have_no_gradients_to_make_and_to_send() -> None:
    """A backward has two matmuls for each trained weight, and one for a frozen one."""
    config = compose_job(["nodes=2", "hardware=h100", "model=llama_1b", "data=synthetic", "data.seq_len=8192"])
    assert isinstance(config.model, LlamaConfig)
    shape, placement = llama_shape(config.model), Grouping(config, Topology.flat(2)).place(8)
    assert placement is not None
    adapters = replace(shape, frozen=int(shape.numel * 0.99))
    whole, few = (price(config, s, "hybrid_shard", placement) for s in (shape, adapters))
    assert few.traffic["nccl"].inter_node == pytest.approx(whole.traffic["nccl"].inter_node / 100, rel=0.01)
    a, rate = shape.activations, 989e12 * 0.803 * LAYER_MATMUL
    gradients = 0.99 * (a.layers * a.matmul_flops + a.head_flops) * config.data.global_batch * 8192 / 16 / rate
    assert 1 < (whole.time.step - few.time.step) / gradients < 1.25, "and their copies, and the optimizer"
    matmuls, weights = adapters.flops_per_token(0) / 2, a.layers * a.matmul_flops // 2 + a.head_flops // 2
    assert matmuls == pytest.approx((2 + 0.01) * weights, rel=1e-3)


def test_values_of_another_width_than_keys_cost_no_matrix_of_scores() -> None:
    """As in DeepSeek's attention."""

    class Narrow(Biased):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
            seen = nn.functional.scaled_dot_product_attention(q, k, v[..., :8], is_causal=True)
            return x + self.out(nn.functional.pad(seen, (0, 8)).transpose(1, 2).flatten(2))

    def of(seq_len: int) -> Activations:
        with FakeTensorMode():
            model = OfBiased()
            model.blocks = nn.ModuleList([Narrow(64, 0.0)])
            return activations_of(model, list(model.blocks), seq_len)

    assert of(2048).block_saved == of(256).block_saved and of(256).attention_width > 0


def test_a_convolution_is_two_flops_a_weight_and_position() -> None:
    class Convolving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(64, 64, 5, padding=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.conv(x.transpose(1, 2)).transpose(1, 2)

    with FakeTensorMode():
        model = OfBiased()
        model.blocks = nn.ModuleList([Convolving(), Convolving()])
        assert activations_of(model, list(model.blocks), 32).matmul_flops == 2 * 64 * 64 * 5


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: int) -> None:
        super().__init__()
        self.layers = kind(64, 64, num_layers=2, batch_first=True, bidirectional=True, **options)
        self.out = nn.Linear(2 * (options.get("proj_size") or 64), 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(x)[0])  # type: ignore[no-any-return]


def of_recurrent(
    kind: type[nn.RNNBase], seq_len: int, dtype: torch.dtype = torch.float32, **options: int
) -> Activations:
    with FakeTensorMode():
        model = OfBiased()
        model.blocks = nn.ModuleList([Recurrent(kind, **options), Recurrent(kind, **options)])
        return activations_of(model, list(model.blocks), seq_len, dtype)


@pytest.mark.parametrize("options", [{}, {"proj_size": 16}])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recurrent_layer_is_two_flops_a_weight_and_token(
    kind: type[nn.RNNBase], dtype: torch.dtype, options: dict[str, int]
) -> None:
    options = options if kind is nn.LSTM else {}
    weights = sum(p.numel() for p in Recurrent(kind, **options).parameters() if p.ndim > 1)
    assert of_recurrent(kind, 8, dtype, **options).matmul_flops == 2 * weights


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_of_many_tokens_is_measured_at_once(kind: type[nn.RNNBase]) -> None:
    assert of_recurrent(kind, 131_072) == replace(of_recurrent(kind, 128), elementwise=ANY)


@pytest.mark.parametrize(("kind", "needed"), [(nn.LSTM, 4 + 2), (nn.GRU, 3 + 2), (nn.RNN, 1 + 1)])
def test_a_recurrent_layer_keeps_gates_and_states_of_each_layer_and_direction(
    kind: type[nn.RNNBase], needed: int
) -> None:
    """A CPU's kernels keep less."""
    layers, directions, width = 2, 2, 64
    a = of_recurrent(kind, 128)
    assert a.block_saved == width + directions * width + layers * directions * needed * width
    assert a.block_matmul == 64, "checkpointing keeps the linear layer, and runs recurrent ones again"


def test_units_inside_units_are_counted_once() -> None:
    with FakeTensorMode():
        model = OfBiased(dropout=0.0)
        blocks = [m for m in model.modules() if isinstance(m, Biased | nn.Linear) and m is not model.head]
        nested = units_of(model, blocks, blocks, [], activations_of(model, blocks, 32))
        plain = activations_of(model, list(model.blocks), 32)
    assert nested.numel == sum(p.numel() for p in model.parameters()) and nested.n_blocks == 15
    assert nested.activations.head_saved == plain.head_saved, "what follows a unit inside is still in the one around"


def test_what_a_model_computes_in_fp32_keeps_four_bytes(tmp_path: Path) -> None:
    """In bf16 the norms of transformers' Llama keep copies of their input in fp32."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    fp32, bf16 = (
        shape_of(_of(tmp_path, "llama", sizes, "data.seq_len=32", f"fsdp.param_dtype={dtype}")).activations
        for dtype in ("fp32", "bf16")
    )
    assert bf16.block_saved < fp32.block_saved and bf16.block_saved_fp32 - fp32.block_saved_fp32 >= 2 * 64
    assert bf16.head_saved_fp32 - fp32.head_saved_fp32 >= 64
    assert (bf16.matmul_flops, bf16.attention_width) == (fp32.matmul_flops, fp32.attention_width)


def _of(folder: Path, kind: str, sizes: dict[str, int], *more: str) -> JobConfig:
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 256, **sizes}))
    return compose_job(["model=hf", f"model.name_or_path={folder}", "model.pretrained=false", *more])


@pytest.mark.parametrize(
    ("kind", "sizes", "positions"),
    [
        ("gpt2", {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 256}, 256),
        ("opt", {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 64,
                 "max_position_embeddings": 256, "word_embed_proj_dim": 64}, 256),
        ("llama", {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
                   "max_position_embeddings": 256}, 0),
        ("bert", {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
                  "max_position_embeddings": 256, "is_decoder": True}, 256),
    ],
)  # fmt: skip
def test_only_a_table_of_places_ends(tmp_path: Path, kind: str, sizes: dict[str, int], positions: int) -> None:
    assert shape_of(_of(tmp_path, kind, sizes, "data.seq_len=256")).positions == positions


@pytest.mark.integration
def test_samples_longer_than_a_models_table_of_places_are_refused(tmp_path: Path) -> None:
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 256}
    with pytest.raises(BadInput, match="the model has places for 256 tokens"):
        probe(_of(tmp_path, "gpt2", sizes, "data.seq_len=300"))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("least", [1_000, 30_000, 100_000])
def test_units_by_size_keep_ties_and_may_be_inside_others(tmp_path: Path, tied: bool, least: int) -> None:
    """GPT-2's body became a unit after those inside it, which FSDP refuses; a tied head was trained apart."""
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "tie_word_embeddings": tied}
    by_size = ("fsdp.wrap=size", f"fsdp.min_num_params={least}")
    config, layout = _of(tmp_path, "gpt2", sizes, *by_size), Layout("full_shard", 2, 2)
    with fake_world(2):
        model = build_model(config.model)
        blocks = find_blocks(model, config.model, config.fsdp)
        sharding.shard(model, blocks, config.fsdp, layout, sharding.build_mesh(layout, "cpu"), torch.device("cpu"))
    assert blocks or tied
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied


def test_layers_that_share_a_weight_are_no_units() -> None:
    """FSDP would train it as two."""
    layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
    layers[1].weight = layers[0].weight
    assert find_blocks(nn.Sequential(layers), CustomModelConfig(_target_="any.where"), FsdpConfig()) == [layers[2]]


@pytest.mark.integration
def test_an_encoder_is_refused_in_a_few_lines(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"T5Config.* for this kind of AutoModel: AutoModelForCausalLM") as refused:
        probe(_of(tmp_path, "t5", {"d_model": 64}))
    assert len(str(refused.value)) < 1000


def test_without_a_name_the_units_are_what_a_list_or_a_sequence_repeats() -> None:
    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(8, 1, 8)

    class Classifier(nn.Module):
        def __init__(self, body: nn.Module):
            super().__init__()
            self.stem, self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), body

    model_config, fsdp = CustomModelConfig(_target_="any.where"), FsdpConfig()
    stages = nn.ModuleList([nn.ModuleList([block()]), nn.ModuleList([block()])])
    for body in (
        nn.ModuleList([block(), block()]),
        stages,
        nn.Sequential(nn.Linear(8, 8), block(), block(), nn.Linear(8, 8)),
    ):
        found = find_blocks(Classifier(body), model_config, fsdp)
        assert [type(unit).__name__ for unit in found] == ["TransformerEncoderLayer"] * 2
    with pytest.raises(ValueError, match="name their class"):
        find_blocks(Classifier(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), model_config, fsdp)


def test_a_unit_is_recomputed_as_a_whole() -> None:
    """Cut by size, one may have all layers: checkpointing then frees nothing at the peak, nor without any unit."""
    by_layer = llama_shape(GQA, accelerator="cpu")
    (layers,) = by_layer.blocks
    all_params = tuple((f"{i}.{name}", sizes) for i in range(layers.count) for name, sizes in layers.params)
    one_unit = replace(by_layer, blocks=(Unit("all", all_params),), unit_layers=layers.count)
    root = Unit("root", by_layer.root.params + all_params)
    no_unit = replace(by_layer, blocks=(), root=root, root_layers=layers.count)
    config = compose_job(["data.seq_len=256"])

    def peak(shape: ModelShape, kind: str) -> int:
        fsdp = replace(config.fsdp, activation_checkpointing=kind)
        return peak_memory(shape, Layout("full_shard", 2, 2), fsdp, config.data, "cpu", 1).tensors

    assert peak(by_layer, "full") < peak(by_layer, "none")
    assert peak(one_unit, "full") > 0.8 * peak(one_unit, "none")  # its work on one layer comes later
    assert peak(no_unit, "full") == peak(no_unit, "none")


@pytest.mark.integration
class TestProbe:
    """A custom model is built by a process of its own; here it is a Llama, whose shape is known."""

    def config(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str, *more: str):  # type: ignore[no-untyped-def]
        (tmp_path / "factory_of_the_test.py").write_text(FACTORY)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        kwargs = {"vocab_size": 512, "dim": 64, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "ffn_dim": 176}
        config = compose_job(["model=custom", f"model._target_=factory_of_the_test.{factory}", *more])
        monkeypatch.syspath_prepend(tmp_path)
        return replace(config, model=replace(config.model, kwargs=kwargs))  # type: ignore[call-arg]

    def test_agrees_with_what_is_known(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = self.config(tmp_path, monkeypatch, "build", "model.wrap_classes=[TransformerBlock]")
        found, known = probe(config), llama_shape(GQA, accelerator="cpu")
        assert [(u.count, u.numel, u.shard_numel(3)) for u in found.units] == [
            (u.count, u.numel, u.shard_numel(3)) for u in known.units
        ]
        a, b = found.activations, known.activations
        assert (a.layers, a.block_input, a.vocab, a.attention_width) == (
            b.layers,
            b.block_input,
            b.vocab,
            b.attention_width,
        )
        assert (a.matmul_flops, a.head_flops, a.block_matmul) == (b.matmul_flops, b.head_flops, b.block_matmul)
        assert a.last_flops == b.last_flops
        assert a.block_saved == pytest.approx(b.block_saved + b.block_saved_fp32, rel=0.02)
        assert a.elementwise == pytest.approx(b.elementwise, rel=0.35)
        layout = make_plan(config, shape=found).layout
        one, two = (peak_memory(s, layout, config.fsdp, config.data, "cpu", 1) for s in (found, known))
        assert one.tensors == pytest.approx(two.tensors, rel=0.05)

    @pytest.mark.parametrize("wrap", ["size", "none"])
    def test_the_work_of_a_layer_does_not_depend_on_the_units(
        self, wrap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without units of layers, all elementwise work was left out, and steps were a fifth too fast."""
        cut, whole = (self.config(tmp_path, monkeypatch, "build", *how) for how in ([f"fsdp.wrap={wrap}"], []))
        assert shape_of(cut).activations == shape_of(whole).activations

    def test_frozen_parameters_are_said(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = self.config(tmp_path, monkeypatch, "adapted")
        said = make_plan(config, shape=shape_of(config)).reasons[0]
        assert said.startswith("83% of the parameters are frozen: the plan counts no gradients and moments for them")

    def test_copied_layers_are_layers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        copied, built = (shape_of(self.config(tmp_path, monkeypatch, name)) for name in ("copied", "build"))
        assert copied == built

    def test_a_forward_that_looks_at_values_is_planned_without(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks = self.config(tmp_path, monkeypatch, "looks")
        shape, known = shape_of(looks), shape_of(self.config(tmp_path, monkeypatch, "build"))
        assert (shape.units, shape.activations.vocab) == (known.units, 512)
        assert shape.activations.matmul_flops == pytest.approx(known.activations.matmul_flops, rel=0.01)
        (warning,) = [line for line in make_plan(looks, shape=shape).reasons if "could not be measured" in line]
        assert "DataDependentOutputException" in warning and "lacks all activations" in warning

    def test_a_loop_over_many_tokens_is_planned_without(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Mamba of transformers was refused after five minutes."""
        monkeypatch.setattr(shape_probe, "MOST_OPERATIONS", 1000)
        loops = self.config(tmp_path, monkeypatch, "loops", "data.seq_len=512")
        shape = shape_of(loops)
        assert shape.flops_per_token(512) == pytest.approx(6 * (shape.numel - 512 * 64), rel=0.02)
        (warning,) = [line for line in make_plan(loops, shape=shape).reasons if "could not be measured" in line]
        assert "more than 1,000 operations for one sample" in warning

    def test_what_fsdp_would_refuse_on_the_nodes_is_refused_here(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = {
            "plain": "Plain.temperature is neither parameter nor buffer",
            "scalar": "does not shard a parameter without dimensions, temperature",
            "wrong": "reduction dim",
        }
        for factory, what in told.items():
            with pytest.raises((ValueError, RuntimeError), match=what):
                shape_of(self.config(tmp_path, monkeypatch, factory))

    def test_a_tensor_of_its_own_is_there_if_the_model_is_not_built_empty(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert shape_of(self.config(tmp_path, monkeypatch, "plain", "fsdp.meta_init=false")).activations.vocab == 512

    def test_one_that_takes_too_long_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shape_client, "TIMEOUT_S", 0.01)
        with pytest.raises(BadInput, match="could not be probed: no answer for"):
            probe(self.config(tmp_path, monkeypatch, "build", "data.seq_len=64"))

    def test_one_that_is_no_folder_and_not_on_the_hub_has_a_cure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answer = subprocess.CompletedProcess([], 1, stderr="OSError: We couldn't connect")
        monkeypatch.setattr(shape_client, "run_probe", lambda *_: answer)
        with pytest.raises(BadInput, match=r"We couldn't connect\n      -> a folder \(there is none"):
            probe(compose_job(["model=hf", "model.name_or_path=my_lama"]))

    def test_jobs_that_differ_elsewhere_ask_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A sweep over sizes, limits or savings: each question imports torch."""
        asked = []
        answer = subprocess.CompletedProcess([], 0, stdout=llama_shape(GQA).to_json())
        monkeypatch.setattr(shape_client, "run_probe", lambda *question: asked.append(question) or answer)
        for more in (["cluster=slurm", "cluster.time=5"], ["nodes=4", "checkpoint.keep=2", "elastic.stop_grace_s=9"]):
            probe(self.config(tmp_path, monkeypatch, "build", "cluster.accelerator=cpu", *more))
        assert asked[0] == asked[1]
        for more in ("cluster.accelerator=cuda", "data.seq_len=64", "init_from=there", "fsdp.wrap=size"):
            probe(self.config(tmp_path, monkeypatch, "build", "cluster.accelerator=cpu", more))
        assert len({*asked}) == 5

    def test_says_what_is_wrong(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(BadInput, match=r"returned a int, not an nn\.Module"):
            probe(self.config(tmp_path, monkeypatch, "broken"))
        nowhere = compose_job(["model=custom", "model._target_=nowhere.build"])
        with pytest.raises(ImportError) as raised:
            shape_of(nowhere)
        assert str(raised.value).splitlines()[-1].startswith("Are you sure that module 'nowhere' is installed")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ImportError, match="absent"):
            shape_of(self.config(tmp_path, monkeypatch, "absent"))
        with pytest.raises(ValueError, match="matches no module"):
            shape_of(self.config(tmp_path, monkeypatch, "build", "model.wrap_classes=[Blok]"))
