"""Ours against Accelerate: a small Llama of transformers, the same weights, samples and settings, FSDP2 on both sides.

    python benchmarks/against_accelerate.py [--pairs 4] [--steps 40] [--ranks 2] [--together]

Alternating pairs of whole jobs in fp32, on GPUs where there is one for each rank: `model=hf` of ours, and
examples/accelerate_llama.py under `accelerate launch`. Losses have to agree within 1e-4 at every step. Each side's
figure is the median step after the first five. With --together both sides of a pair run at the same time, each on a
core of its own, and change cores with each pair: for a machine on which other work comes and goes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.run.processes import free_port, visible_gpus
from fsdp_jobs.run.tail import read_json_lines

ROOT = Path(__file__).parent.parent
RANKS, LENGTH, BATCH, MICRO_BATCH, RATE = 2, 128, 16, 4, 1e-3
WARMUP = 5

Figures = tuple[list[float], list[float]]  # losses, seconds of each step


def prepare(folder: Path, steps: int, width: int) -> None:
    """A Llama with random weights; tokens for our side; for theirs the samples one after the other, in our order."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from fsdp_jobs.train.data import Samples
    from fsdp_jobs.train.sources import open_tokens

    torch.manual_seed(0)
    heads = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=width, intermediate_size=11 * width // 4, **heads)
    ).save_pretrained(folder / "model")
    tokens = open_tokens(compose_job([]).data)
    tokens[:2_000_000].astype(np.uint16).tofile(folder / "tokens.bin")
    samples = Samples(tokens[:2_000_000], LENGTH, seed=0)
    with (folder / "samples.bin").open("wb") as f:
        for position in range(steps * BATCH):
            row, labels = samples[position]
            f.write(bytes([*row.tolist(), int(labels[-1])]))


def ours(folder: Path, name: str, steps: int, under: tuple[str, ...] = (), ranks: int = RANKS) -> Figures:
    """A whole job of ours, `under` another command: coordinator, agent, metrics, control; the last checkpoint only."""
    same = [f"nodes=1 nproc_per_node={ranks} fsdp=full_shard fsdp.param_dtype=fp32 checkpoint.every_steps=0"]
    same += [f"data.workers=0 data=tokens data.path={folder}/tokens.bin data.vocab_size=256 data.seq_len={LENGTH}"]
    same += [f"data.global_batch={BATCH} data.micro_batch={MICRO_BATCH} optim.lr={RATE} optim.weight_decay=0"]
    same += [f"optim.schedule=constant optim.warmup_steps=0 model=hf model.name_or_path={folder}/model"]
    command = [sys.executable, "-m", "fsdp_jobs", f"name={name}", f"runs_dir={folder}", f"steps={steps}"]
    subprocess.run([*under, *command, *" ".join(same).split()], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    lines = list(read_json_lines(folder / name / "metrics.jsonl"))
    return [m["loss"] for m in lines], [m["step_s"] for m in lines]


def theirs(folder: Path, name: str, steps: int, under: tuple[str, ...] = (), ranks: int = RANKS) -> Figures:
    """The example under `accelerate launch`, without states."""
    config: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_machines": 1}
    config |= {"num_processes": ranks, "mixed_precision": "no", "main_process_port": free_port(), "use_cpu": False}
    config["fsdp_config"] = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    out = folder / name
    out.mkdir()
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(folder / f"{name}.yaml")]
    script = f"--model {folder}/model --text {folder}/samples.bin --out {out} --steps {steps} --every 0 --batch {BATCH}"
    script += f" --micro-batch {MICRO_BATCH} --length {LENGTH} --stride {LENGTH + 1} --lr {RATE}"
    program = [str(ROOT / "examples" / "accelerate_llama.py"), *script.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if len(visible_gpus()) < ranks:
        environment["ACCELERATE_USE_CPU"] = "true"
    done = subprocess.run([*under, *command, *program], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    lines = [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
    return [m["loss"] for m in lines], [m["seconds"] for m in lines]


def furthest(one: list[float], other: list[float]) -> float:
    """The largest difference of two runs' losses.

    Raises:
        RuntimeError: it is above 1e-4, or they have not the same steps.
    """
    apart = max(abs(a - b) for a, b in zip(one, other, strict=True))
    if apart > 1e-4:
        raise RuntimeError(f"losses are {apart:.1e} apart: the two sides do not train the same")
    return apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--together", action="store_true")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {args.ranks} ranks, {args.steps} steps a run")
    print(f"{'pair':>4}  {'ours tokens/s':>14}  {'accelerate tokens/s':>20}  {'ours / accelerate':>18}  losses apart")
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, args.steps, args.width)
        for pair in range(args.pairs):
            found = {}
            sides = (ours, theirs) if pair % 2 == 0 else (theirs, ours)
            with ThreadPoolExecutor(2 if args.together else 1) as pool:
                for core, side in enumerate(sides):
                    under = ("taskset", "-c", str(core)) if args.together else ()
                    found[side] = pool.submit(side, folder, f"{side.__name__}-{pair}", args.steps, under, args.ranks)
            apart = furthest(found[ours].result()[0], found[theirs].result()[0])
            rates = [BATCH * LENGTH / statistics.median(found[s].result()[1][WARMUP:]) for s in (ours, theirs)]
            ratios.append(rates[0] / rates[1])
            print(f"{pair:>4}  {rates[0]:>14,.0f}  {rates[1]:>20,.0f}  {ratios[-1]:>18.3f}  {apart:.1e}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f} (goal: at least 1.05)")


if __name__ == "__main__":
    main()
