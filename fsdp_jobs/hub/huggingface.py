"""Causal language models of transformers: tokens in, logits out, built on the meta device."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.schema import HfConfig
from fsdp_jobs.models.weights import seed_of

SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]  # of a repository: configuration, tokenizer


def transformers(where: str = "model=hf") -> Any:
    """Import the library, which a key asks for.

    Raises:
        BadInput: it is not installed.
    """
    try:
        import transformers
    except ImportError as e:
        raise BadInput.at(where, str(e), "pip install 'fsdp_jobs[hf]', here and on the nodes") from e
    return transformers


def build_hf(config: HfConfig) -> nn.Module:
    """Build the model of a folder or hub repository, without its weights, in fp32 on the default device.

    Parameters keep transformers' names. The forward pass returns only the logits.

    Raises:
        OSError: there is no such folder or repository.
        ValueError: it does not hold a causal language model.
    """
    library = transformers()
    described = library.AutoConfig.from_pretrained(config.name_or_path, trust_remote_code=False)
    described.use_cache = False
    model: nn.Module = library.AutoModelForCausalLM.from_config(described, dtype=torch.float32, trust_remote_code=False)
    model.register_forward_hook(lambda _module, _args, out: out.logits)
    return model


def folder_of(config: HfConfig, weights: bool = True) -> Path:
    """Return the folder with the model's files, downloaded from the hub once; weights only on request."""
    if Path(config.name_or_path).is_dir():
        return Path(config.name_or_path)
    from huggingface_hub import snapshot_download

    patterns = [*SMALL_FILES, "*.safetensors"] if weights else SMALL_FILES
    return Path(snapshot_download(config.name_or_path, allow_patterns=patterns))


def is_hf(model: nn.Module) -> bool:
    """Whether a model is one of transformers, sharded or not."""
    return hasattr(model, "_no_split_modules") and hasattr(model, "get_output_embeddings")


def layer_classes(model: Any) -> list[str]:
    """Return the class names of a model's layers, as transformers lists them for splitting over devices."""
    return sorted(model._no_split_modules or [])


def initial_pieces(
    config: HfConfig, device: torch.device, seed: int, names: Collection[str]
) -> Iterator[dict[str, Tensor]]:
    """Yield the initial values of the modules that hold `names`, a layer or less at a time.

    They are those of transformers. The random numbers of a piece depend only on the seed and the piece's name.
    """
    with torch.device("meta"):
        model: Any = build_hf(config)
    classes = set(layer_classes(model))
    inside: set[nn.Module] = set()
    owners: dict[str, Any] = {"": model}
    for name, module in model.named_modules():
        owner = module if hasattr(module, "_init_weights") else owners[name.rpartition(".")[0]]
        owners[name] = owner
        if module in inside:
            continue
        whole = type(module).__name__ in classes
        if whole:
            inside.update(module.modules())
        own = [*module.named_parameters(name, whole), *module.named_buffers(name, whole)]
        if not any(n in names for n, _ in own):
            continue
        module.to_empty(device=device, recurse=whole)
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed_of(seed, name))
            module.apply(owner._init_weights) if whole else owner._init_weights(module)
        filled = [*module.named_parameters(name, whole), *module.named_buffers(name, whole)]
        yield {n: t.detach() for n, t in filled}
        module.to_empty(device="meta", recurse=whole)
