"""Models of transformers, and weights from elsewhere: made here, small, without the hub."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_jobs.config.hydra import compose_job
from tests.jobs import cli, environment, family, signal_all
from tests.world import TINY_LLAMA, TINY_TASK, run_world, train_as

pytestmark = pytest.mark.integration

_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _save_models(folder: str) -> None:
    """A Llama in three files, a Qwen2 with tied embeddings, a GPT-2 without its prefix, as old files have it."""
    import torch
    import transformers as t
    from safetensors.torch import save_file

    torch.manual_seed(7)
    llama = t.LlamaForCausalLM(t.LlamaConfig(**_SHAPE))
    llama.save_pretrained(f"{folder}/llama", max_shard_size="150KB")
    Path(f"{folder}/llama/tokenizer_config.json").write_text("{}")
    t.Qwen2ForCausalLM(t.Qwen2Config(**_SHAPE, tie_word_embeddings=True)).save_pretrained(f"{folder}/qwen2")
    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    small = t.GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64, eos_token_id=0, **quiet)
    gpt2 = t.GPT2LMHeadModel(small)
    gpt2.save_pretrained(f"{folder}/gpt2")
    bare = {n.removeprefix("transformer."): v.clone() for n, v in gpt2.state_dict().items() if n != "lm_head.weight"}
    save_file(bare, f"{folder}/gpt2/model.safetensors")
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    t.MixtralForCausalLM(t.MixtralConfig(**_SHAPE, **sizes)).save_pretrained(f"{folder}/mixtral")


def _first_loss(name_or_path: str) -> float:
    """transformers' own loss of the first step's 8 samples, in one process."""
    import torch
    import transformers as t

    from fsdp_jobs.train.data import Samples
    from fsdp_jobs.train.sources import open_tokens

    data = compose_job(list(TINY_TASK)).data
    samples = Samples(open_tokens(data), data.seq_len, 0)
    tokens, labels = (torch.stack(s) for s in zip(*(samples[i] for i in range(8)), strict=True))
    model = t.AutoModelForCausalLM.from_pretrained(name_or_path)
    with torch.no_grad():
        logits = model(tokens).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def _train(run_dir: str, overrides: Sequence[str], nodes: int = 1) -> list[float]:
    """Train in the present process group, full_shard unless a strategy is named; every rank calls this."""
    import torch.distributed as dist

    from fsdp_jobs.plan.layout import Layout

    world = dist.get_world_size()
    config = compose_job([*TINY_TASK, f"nodes={nodes}", f"nproc_per_node={world // nodes}", *overrides])
    strategy = "full_shard" if config.fsdp.strategy == "auto" else config.fsdp.strategy
    group = {"no_shard": 1, "hybrid_shard": 2}.get(strategy, world)
    return train_as(run_dir, config, Layout(strategy, world, group))


def _pretrained(folder: str) -> dict[str, list[float]]:
    found = {}
    for name in ("llama", "qwen2", "gpt2", "mixtral"):
        model = ["model=hf", f"model.name_or_path={folder}/{name}", "steps=3"]
        found[name] = _train(f"{folder}/runs/{name}", model)
    llama = ["model=hf", f"model.name_or_path={folder}/llama"]
    checkpointed = ["fsdp.activation_checkpointing=full", "fsdp.meta_init=false"]
    found["checkpointed"] = _train(f"{folder}/runs/checkpointed", [*llama, "steps=3", *checkpointed])
    # Its weights are not needed once there is a checkpoint.
    shutil.copytree(f"{folder}/llama", f"{folder}/gone", dirs_exist_ok=True)
    gone = ["model=hf", f"model.name_or_path={folder}/gone"]
    _train(f"{folder}/runs/resumed", [*gone, "steps=2", "optim.decay_steps=3"])
    for file in Path(folder, "gone").glob("*.safetensors*"):
        file.unlink(missing_ok=True)
    found["resumed"] = _train(f"{folder}/runs/resumed", [*gone, "steps=3"])
    return found


def _export_and_compare(folder: Path, name: str) -> None:
    """What `export` writes opens in transformers, and computes what our own state does."""
    import torch
    import transformers as t

    from fsdp_jobs.config.schema import load_config
    from fsdp_jobs.hub.export import export
    from fsdp_jobs.run.directory import RunDir
    from fsdp_jobs.run.files import write_atomic

    run = RunDir(folder / "runs" / name)
    config = load_config(run.config)
    index = run.export / "model.safetensors.index.json"
    write_atomic(index, "{}")  # of an earlier export, in several files
    export(run, config, "safetensors", None, None)
    assert not index.exists()
    (state,) = export(run, config, "pt", None, None)
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        logits = t.AutoModelForCausalLM.from_pretrained(run.path / "export")(tokens).logits
        untrained = t.AutoModelForCausalLM.from_pretrained(folder / name)(tokens).logits
        assert (logits - untrained).abs().max() > 1e-4
        ours = t.AutoModelForCausalLM.from_config(t.AutoConfig.from_pretrained(folder / name)).eval()
        left_out = ours.load_state_dict(torch.load(state), strict=False)
        assert set(left_out.missing_keys) <= {"lm_head.weight"}
        assert torch.equal(ours(tokens).logits, logits)


def test_pretrained_models_start_where_transformers_does_and_go_back_to_it(tmp_path: Path) -> None:
    _save_models(str(tmp_path))
    found = run_world(2, _pretrained, str(tmp_path))[0]
    for name in ("llama", "qwen2", "gpt2", "mixtral"):
        assert found[name][0] == pytest.approx(_first_loss(f"{tmp_path}/{name}"), abs=1e-5), name
    assert found["checkpointed"] == pytest.approx(found["llama"], rel=1e-5)
    assert found["resumed"] == pytest.approx(found["llama"], rel=1e-5)
    for name in ("llama", "qwen2", "gpt2", "mixtral"):
        _export_and_compare(tmp_path, name)
    assert (tmp_path / "runs/llama/export/tokenizer_config.json").read_text() == "{}"
    assert json.loads((tmp_path / "runs/llama/export/config.json").read_text())["model_type"] == "llama"


def _random(folder: str) -> list[Any]:
    import torch.distributed as dist

    model = ["model=hf", "model.pretrained=false", "steps=1", f"model.name_or_path={folder}"]
    world = dist.get_world_size()
    return [
        _train(f"{folder}/runs/{strategy}-{world}", [*model, f"fsdp={strategy}"])[0]
        for strategy in ("full_shard", "no_shard")
    ]


def test_random_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    import transformers as t

    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    t.GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64, **quiet).save_pretrained(tmp_path)
    losses = [*run_world(1, _random, str(tmp_path))[0], *run_world(2, _random, str(tmp_path))[0]]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    assert losses[0] == pytest.approx(5.545, abs=0.05)  # ln 256


_TO_OURS = (  # transformers' names of a Llama's weights into ours
    "^model\\.embed_tokens=>tok_embeddings",
    "^lm_head=>output",
    "^model\\.=>",
    "self_attn\\.(.)_proj=>attention.w\\1",
    "mlp\\.gate_proj=>feed_forward.w1",
    "mlp\\.down_proj=>feed_forward.w2",
    "mlp\\.up_proj=>feed_forward.w3",
    "post_attention_layernorm=>ffn_norm",
    "input_layernorm=>attention_norm",
)


def _save_forms(folder: str) -> None:
    """The Llama of _save_models under our names: as .pt, and as torchtitan writes it with DCP."""
    import re

    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    state: dict[str, Any] = {}
    for file in Path(folder, "llama").glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            for rule in _TO_OURS:
                name = re.sub(*rule.split("=>"), name)
            state[name] = tensor
    torch.save({"model": state, "step": 3}, f"{folder}/model.pt")
    for name, tensor in state.items():
        if name.endswith(("wq.weight", "wk.weight")):  # torchtitan rotates neighbours: (i, i + 8) -> (2i, 2i + 1)
            state[name] = tensor.reshape(-1, 2, 8, 64).transpose(1, 2).reshape(tensor.shape).contiguous()
    rest = {"optimizer.state.norm.weight.exp_avg": torch.zeros(64), "train_state": torch.zeros(1)}
    dcp.save({**state, **rest}, checkpoint_id=f"{folder}/titan", no_dist=True)
    dcp.save({f"model.{n}": t for n, t in state.items()}, checkpoint_id=f"{folder}/titan_model", no_dist=True)
    torch.save({n: t for n, t in state.items() if "layers.1." not in n}, f"{folder}/one_layer.bin")


def test_files_that_a_mac_hides_beside_weights_are_none(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from fsdp_jobs.hub.pretrained import _open

    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "._model.safetensors").write_bytes(b"\0\5\26\7")
    assert _open(tmp_path, "init_from")[0] == {"a": (2,)}


def _from_elsewhere(folder: str) -> tuple[dict[str, float], dict[str, str]]:
    ours = [*TINY_LLAMA, "model.norm_eps=1e-6", "steps=1"]
    renamed = "init_key_map=[" + ",".join(f"'{rule}'" for rule in _TO_OURS) + "]"
    sources = {
        "llama": [],
        "model.pt": [],
        "titan": ["init_rope=interleaved"],
        "titan_model": ["init_rope=interleaved"],
    }
    losses = {s: _train(f"{folder}/from/{s}", [*ours, f"init_from={folder}/{s}", *o])[0] for s, o in sources.items()}
    hf = ["model=hf", f"model.name_or_path={folder}/llama", "model.pretrained=false", "steps=1"]
    losses["hf"] = _train(f"{folder}/from/hf", [*hf, f"init_from={folder}/llama"])[0]
    problems = {}
    for name, options in {
        "one_layer.bin": [],
        "model.pt": ["model.n_layers=1"],
        "titan": ["model.ffn_dim=128"],
        "titan_model": [],
        "llama": [renamed, "model.tie_embeddings=true"],
    }.items():
        prefixed = [*ours, f"init_from={folder}/{name}", *options]
        if name == "titan_model":
            prefixed.append("init_key_map=['^model.norm=>model.nrm','^model.output.*=>']")
        try:
            _train(f"{folder}/wrong/{name}", prefixed)
        except Exception as e:
            problems[name] = str(e)
    return losses, problems


def test_a_run_begins_with_weights_from_elsewhere(tmp_path: Path) -> None:
    _save_models(str(tmp_path))
    _save_forms(str(tmp_path))
    losses, problems = run_world(2, _from_elsewhere, str(tmp_path))[0]
    assert losses == pytest.approx(dict.fromkeys(losses, _first_loss(f"{tmp_path}/llama")), abs=1e-5)
    assert "has nothing for layers.1.attention.wq.weight" in problems["one_layer.bin"]
    assert "holds more than the model has: model.layers.1." in problems["model.pt"]
    assert "layers.0.feed_forward.w1.weight: is [128, 64] in the model and [96, 64] in the source" in problems["titan"]
    assert "has nothing for norm.weight, output.weight" in problems["titan_model"]
    assert "holds more than the model has: model.norm.weight" in problems["titan_model"]
    assert "are one tensor in this model, and differ in the source" in problems["llama"]
    named = [*TINY_LLAMA, *TINY_TASK, f"init_from={tmp_path}/model.pt", "model.n_layers=1", "name=never"]
    done = cli(tmp_path, *named)
    assert done.returncode == 2 and "holds more than the model has: model.layers.1." in done.stderr
    import torch

    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    done = cli(tmp_path, *named, f"init_from={tmp_path}/list.pt")
    assert done.returncode == 2 and "list.pt: holds a list\n" in done.stderr
    assert not (tmp_path / "runs" / "never").exists()


def test_a_hub_that_does_not_answer_is_named_while_the_plan_waits(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:  # accepts, and says nothing
        waiting = subprocess.Popen(
            [sys.executable, "-m", "fsdp_jobs", "plan", "model=hf", "model.name_or_path=owner/name", "data=synthetic"],
            cwd=tmp_path,
            env=environment(tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{hub.getsockname()[1]}", HF_HOME=str(tmp_path)),
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert waiting.stderr is not None
            assert waiting.stderr.readline() == "reading owner/name from the Hugging Face hub or its cache\n"
            assert waiting.poll() is None
        finally:
            signal_all(family(psutil.Process(waiting.pid)))
            waiting.communicate()
