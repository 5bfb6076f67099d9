"""A Llama of transformers, built block by block and wrapped by the recipe itself: FSDP2 around each LlamaDecoderLayer.

The plan's device mesh, checkpoints and preemption come from fsdp_jobs' small library; how the model is sharded is all
the recipe's. Needs transformers: pip install 'fsdp_jobs[hf]'

    fsdp-jobs script=examples/llama_recipe.py fsdp=hybrid_shard nodes=2
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fsdp_jobs import job


def sharded_llama(config: LlamaConfig) -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(job.device())
    on_gpu = job.device().type == "cuda"
    policy = MixedPrecisionPolicy(torch.bfloat16 if on_gpu else None, torch.float32)
    for layer in model.modules():
        if isinstance(layer, LlamaDecoderLayer):
            fully_shard(layer, mesh=job.mesh(), mp_policy=policy)
    return fully_shard(model, mesh=job.mesh(), mp_policy=policy)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()

    device = job.init()
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = sharded_llama(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    checkpoints = job.checkpointer(model, optimizer)
    first = checkpoints.restore()

    text = torch.tensor(list(Path(__file__).read_bytes()))
    samples = text.unfold(0, 65, 16)  # 64 bytes and the one that follows each
    order = iter(job.ElasticSampler(samples, batch=16).after(first))
    for step in range(first + 1, args.steps + 1):
        tokens = samples[next(order)].to(device)
        logits = model(tokens[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.step(step, loss=loss, tokens=16 * 64)
        if job.should_stop():
            break
    job.finish()


if __name__ == "__main__":
    main()
