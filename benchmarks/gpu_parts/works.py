"""Jobs that must end well: strategies, dtypes, recomputation, saves, programs. For gpu.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.bench import ACCELERATE, EXAMPLES, FULL, PROGRAMS, TINY, Bench, Case, Row


def works(
    name: str, *overrides: str, ranks: int = 1, needs: tuple[str, ...] = (), task: Sequence[str] = TINY, logs: str = ""
) -> Case:
    """A job that must end `done`, and have logged a metric; ranks without a GPU each are ranks on the CPU.

    Only the trainer's task tells how much of the GPU it used.
    """

    def run(bench: Bench) -> Iterator[Row]:
        own = 0 < ranks <= bench.gpus
        where = () if own else ("cluster.accelerator=cpu", "hardware=cpu")
        job = bench.job(name, *task, *overrides, f"nproc_per_node={ranks}", *where).wait()
        yield job.finished(on_gpu=own and bool(task))
        if logs:
            yield Row(f"{name}: steps with {logs}", sum(logs in m for m in job.metrics()), 1)

    return Case("works", name, "done, finite losses" + f", {logs}" * bool(logs), run, needs)


def program(name: str, file: Path, args: str, **kwargs: Any) -> Case:
    """A `script=` that must end `done`."""
    return works(name, f"script={file}", f"script_args='{args}'", task=(), **kwargs)


def hf_model(bench: Bench) -> Iterator[Row]:
    """A Llama of transformers by its configuration alone, with random weights."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    folder = bench.folder / "hf-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    task = [o for o in TINY if not o.startswith("model.")]
    job = bench.job("model-hf", *task, "model=hf", f"model.name_or_path={folder}", "model.pretrained=false")
    yield job.wait().finished(on_gpu=bench.gpus > 0)


def resumed(bench: Bench) -> Iterator[Row]:
    """Save asynchronously, in a process, stop, resume, export."""
    saves = ("checkpoint.every_steps=4", "checkpoint.async_mode=process")
    yield bench.job("resume", *TINY, *saves).wait().finished(on_gpu=bench.gpus > 0)
    again = bench.job("resume", *TINY, *saves, "steps=20").wait()
    steps = [e["step"] for e in again.events("resumed")]
    yield Row("resumed from step", steps[-1] if steps else None, 12, 12, note="" if steps else again.why())
    yield Row("steps saved", len(again.events("checkpoint")), 5, 5)
    command = [sys.executable, "-m", "fsdp_jobs", "export", "resume", f"runs_dir={bench.folder}"]
    done = subprocess.run(command, capture_output=True, text=True)
    yield Row("export's exit code", done.returncode, 0, 0, note=done.stderr.strip()[-200:])


def shared_gpu(bench: Bench) -> Iterator[Row]:
    """Four ranks in two replicas, of one GPU where there is one: one is killed, and all resume."""
    where = ("cluster.accelerator=cpu", "hardware=cpu", "nproc_per_node=4", "fsdp=hybrid_shard", "fsdp.shard_group=2")
    job = bench.job("ranks-share", f"script={PROGRAMS / 'shared_gpu.py'}", *where, "checkpoint.every_steps=5")
    job.until(lambda: job.events("checkpoint"), "its first checkpoint")
    job.ranks()[1].kill()
    yield job.wait().finished()
    yield Row("ranks-share: rounds", len(job.events("round_started")), 2, 2)
    yield Row("ranks-share: resumed", len(job.events("resumed")), 1, 1)


CASES = (
    works("main"),
    *(works(s, f"fsdp={s}") for s in ("full_shard", "shard_grad_op")),
    works("no_shard", "fsdp=no_shard"),
    *(works(s, f"fsdp={s}", "fsdp.shard_group=2", ranks=4) for s in ("hybrid_shard", "hybrid_shard_zero2")),
    works("bf16", "fsdp.param_dtype=bf16"),
    works("fp16", "fsdp.param_dtype=fp16", logs="loss_scale"),
    *(works(f"recompute-{k}", f"fsdp.activation_checkpointing={k}") for k in ("none", "full", "every_n", "selective")),
    works("offload-parameters", "fsdp.cpu_offload=true"),
    works("offload-activations", FULL, "fsdp.activation_offload=true"),
    works("compile", "fsdp.compile=true", needs=("compiler",)),
    works("chunked-loss", "fsdp.chunked_loss=true"),
    works("save-thread", "checkpoint.every_steps=4", "checkpoint.async_mode=thread"),
    Case("works", "resume", "resumed from step 12, exported", resumed, seconds=45),
    Case("works", "ranks-share", "four ranks of one GPU resume after a kill", shared_gpu, seconds=30),
    program("script-fsdp2", EXAMPLES / "plain_torchrun.py", "--steps 20"),
    program("script-fsdp1", EXAMPLES / "fsdp1_library.py", "--steps 20"),
    Case("works", "model-hf", "done, finite losses", hf_model, ("transformers",)),
    program("accelerate", EXAMPLES / "accelerate_llama.py", "--steps 8 --every 4", needs=ACCELERATE),
)
