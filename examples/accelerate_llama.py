"""A language model trained with Accelerate: fsdp= shards it, save_state keeps it, a new round goes on from there.

Nothing in here is fsdp_jobs' own. The layout comes in the variables that accelerate launch sets, so that this also runs
under accelerate launch. Needs Accelerate and transformers: pip install 'fsdp_jobs[accelerate]'

    fsdp-jobs script=examples/accelerate_llama.py fsdp=hybrid_shard nodes=2 script_args="--model FOLDER"
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig


def accelerator_here(accumulation: int) -> Accelerator:
    """An Accelerator. It shards on GPUs alone, so on a CPU, for a rehearsal, it is told that it stands on some."""
    if not torch.cuda.is_available():
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    return Accelerator(gradient_accumulation_steps=accumulation)


def text_of(path: str | None) -> torch.Tensor:
    """Ids below 256: the bytes of a file, or of this one."""
    return torch.frombuffer(bytearray(Path(path or __file__).read_bytes()), dtype=torch.uint8).long()


def newest(folder: Path) -> Path | None:
    """The newest state that was saved to its end."""
    return max(folder.glob("step-[0-9]*[0-9]"), default=None)


def save(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Save under a name that counts as unfinished until all ranks are done."""
    unfinished = folder / f"step-{step:06d}.tmp"
    accelerator.save_state(str(unfinished))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        unfinished.rename(folder / f"step-{step:06d}")
    accelerator.wait_for_everyone()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder that save_pretrained wrote; without it, a small Llama")
    parser.add_argument("--text", help="a file; without it, this one")
    parser.add_argument("--out", default=os.environ.get("FSDP_JOBS_RUN_DIR", "."))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between states; 0 for none")
    parser.add_argument("--batch", type=int, default=16, help="samples a step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--stride", type=int, default=0, help="bytes from a sample to the next; 0 for its length")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    world = int(os.environ.get("WORLD_SIZE", "1"))
    share = args.batch // world
    micro = min(args.micro_batch, share)
    accelerator = accelerator_here(accumulation=share // micro)
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads))
    model.train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    first = next(iter(model.parameters()))
    accelerator.print(f"sharded: {getattr(first, 'placements', None)} over {getattr(first, 'device_mesh', None)}")

    states, done = Path(args.out) / "states", 0
    state = newest(states)
    if state is not None:
        accelerator.load_state(str(state))
        done = int(state.name.removeprefix("step-"))
        accelerator.print(f"resumed from step {done}")

    text = text_of(args.text)
    stride = args.stride or args.length
    samples = (len(text) - args.length - 1) // stride + 1
    for step in range(done, args.steps):
        began, total = time.perf_counter(), torch.zeros((), device=accelerator.device)
        mine = step * args.batch + accelerator.process_index * share
        for start in range(mine, mine + share, micro):
            rows = [(i % samples) * stride for i in range(start, start + micro)]
            batch = torch.stack([text[r : r + args.length + 1] for r in rows]).to(accelerator.device)
            with accelerator.accumulate(model):
                logits = model(batch[:, :-1]).logits
                loss = cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() * micro / share
        mean = accelerator.reduce(total, "mean").item()
        if accelerator.is_main_process:
            line = {"step": step + 1, "loss": mean, "seconds": time.perf_counter() - began}
            with (Path(args.out) / "losses.jsonl").open("a") as f:
                f.write(json.dumps(line) + "\n")
            print(f"step {step + 1} loss {mean:.4f}", flush=True)
        if args.every and (step + 1) % args.every == 0:
            save(accelerator, states, step + 1)
    accelerator.end_training()


if __name__ == "__main__":
    main()
