"""From a model configuration to an nn.Module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hydra.utils import get_method
from torch import nn

from fsdp_jobs.config import CustomModelConfig, LlamaConfig, ModelConfig
from fsdp_jobs.models.llama import Llama


def build_model(config: ModelConfig) -> nn.Module:
    """The model on the current default device (`with torch.device("meta")` for shapes only).

    Raises:
        TypeError: a custom factory that does not return an nn.Module.
        ImportError, AttributeError: a custom factory that is not there.
    """
    if isinstance(config, LlamaConfig):
        return Llama(config)
    assert isinstance(config, CustomModelConfig)
    factory: Callable[..., Any] = get_method(config._target_)
    model = factory(**config.kwargs)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model._target_={config._target_} returned a {type(model).__name__}, not an nn.Module")
    return model
