"""Configure torchtitan 0.3: Llama 3.2 1B on random tokens, on one GPU, without saves. For gpu.py.

torchrun --nproc-per-node=1 -m torchtitan.train --module benchmarks.gpu_programs.titan --config llama_1b
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

VOCABULARY = 128256


class NoTokenizer(BaseTokenizer):
    """Stands where torchtitan wants a tokenizer; the data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_paths: str):
        super().__init__()

    def encode(self, *_args: Any, **_kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_args: Any, **_kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


class RandomTokens(BaseDataLoader):
    """The same random batch again and again."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, seq_len: int, local_batch_size: int, **_others: Any):
        tokens = torch.randint(VOCABULARY, (local_batch_size, seq_len + 1))
        positions = torch.arange(seq_len).expand(local_batch_size, seq_len).contiguous()
        self.batch = {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            yield self.batch

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def llama_1b() -> Trainer.Config:
    """Return the shape, the batch and the switches of gpu.py's own 1B run."""
    config = llama3_debugmodel()
    config.model_spec = model_registry("1B")
    config.loss.loss_fn.global_vocab_size = VOCABULARY
    config.tokenizer, config.dataloader = NoTokenizer.Config(), RandomTokens.Config()
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 4, 2048, 12
    config.activation_checkpoint = None
    config.compile.enable = config.checkpoint.enable = config.validator.enable = False
    return config
