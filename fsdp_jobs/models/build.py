"""From a model configuration to an nn.Module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hydra.utils import get_method
from torch import nn

from fsdp_jobs.config.schema import CustomModelConfig, HfConfig, LlamaConfig, ModelConfig
from fsdp_jobs.models.huggingface import build_hf, hf_head_modules, is_hf, layer_classes
from fsdp_jobs.models.llama import Llama


def build_model(config: ModelConfig) -> nn.Module:
    """The model on the current default device (`with torch.device("meta")` for shapes only).

    Raises:
        TypeError: a custom factory that does not return an nn.Module.
        ImportError, AttributeError: a custom factory that is not there.
        BadInput, OSError, ValueError: a model of transformers that cannot be had.
    """
    if isinstance(config, LlamaConfig):
        return Llama(config)
    if isinstance(config, HfConfig):
        return build_hf(config)
    assert isinstance(config, CustomModelConfig)
    factory: Callable[..., Any] = get_method(config._target_)
    model = factory(**config.kwargs)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model._target_={config._target_} returned a {type(model).__name__}, not an nn.Module")
    return model


def wrap_classes_of(model: nn.Module, config: ModelConfig) -> list[str]:
    """Class names of the layers: as configured, or as a model of transformers says itself."""
    return config.wrap_classes or (layer_classes(model) if is_hf(model) else [])


def head_modules_of(model: nn.Module) -> list[nn.Module]:
    """What runs last and is needed first in backward, to be gathered as one unit; empty when the model says nothing."""
    if is_hf(model):
        return hf_head_modules(model)
    modules: list[nn.Module] = model.head_modules() if hasattr(model, "head_modules") else []  # type: ignore[operator]
    return modules
