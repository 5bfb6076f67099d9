"""The loss in chunks against whole logits, CPU seconds of a step: python benchmarks/plan_loss.py"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch

from fsdp_jobs.config.schema import FsdpConfig, LlamaConfig
from fsdp_jobs.models.llama import Llama
from fsdp_jobs.train import loss as losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--chunk", type=int, default=256, help="tokens whose logits exist at once")
    parser.add_argument("--steps", type=int, default=5)
    flags = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocab_size=flags.vocabulary, dim=512, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=1408))
    tokens = torch.randint(0, flags.vocabulary, (2, 512))
    kinds = {"whole": losses.TokenLoss(model, FsdpConfig(chunked_loss=False))}
    kinds["chunked"] = losses.TokenLoss(model, FsdpConfig(chunked_loss=True))
    losses.loss_chunk = lambda fsdp, *_: flags.chunk if fsdp.chunked_loss else 0
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    values: dict[str, float] = {}
    for step in range(flags.steps + 1):
        for name, loss in kinds.items():
            began = time.process_time()
            value = loss(tokens, tokens)
            value.backward()
            model.zero_grad()
            values[name] = value.item()
            if step:  # the first warms up
                seconds[name].append(time.process_time() - began)
    whole, chunked = (statistics.median(seconds[name]) for name in ("whole", "chunked"))
    print(f"{tokens.numel()} tokens, vocabulary {flags.vocabulary}, chunks of {flags.chunk}")
    print(f"CPU seconds per step: whole {whole:.3f}, chunked {chunked:.3f}; tokens/s ratio {whole / chunked:.3f}")
    print(f"losses differ by {abs(values['whole'] / values['chunked'] - 1):.1e}")


if __name__ == "__main__":
    main()
