"""Peaks of optimizer steps against the plan. For gpu.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

from benchmarks.gpu_parts.bench import FULL, GIB, PROGRAMS, RANDOM, SIZES, Bench, Case, Row, batch
from fsdp_jobs.config.hydra import merge_overrides


def of_transformers(name: str) -> tuple[str, ...]:
    """Return what asks for a model by a configuration in gpu_programs/."""
    return "model=hf", f"model.name_or_path={PROGRAMS / name}", "model.pretrained=false"


MEMORY = {
    "160m": (*SIZES["160m"], *batch(8)),
    "160m, long context": ("model=llama_160m", "data.seq_len=16384", *batch(1), FULL),
    "160m, full recomputation": (*SIZES["160m"], *batch(8), FULL),
    "1b": (*SIZES["1b"], *batch(4)),
    "1b, full recomputation": (*SIZES["1b"], *batch(4), FULL),
    "1b, selective recomputation": (*SIZES["1b"], *batch(4), "fsdp.activation_checkpointing=selective"),
    "1b, every second block": (*SIZES["1b"], *batch(4), "fsdp.activation_checkpointing=every_n"),
    "1b, fp32": (*SIZES["1b"], *batch(2), "fsdp.param_dtype=fp32"),
    "1b, parameters offloaded": (*SIZES["1b"], *batch(4), "fsdp.cpu_offload=true"),
    "1b, activations offloaded": (*SIZES["1b"], *batch(4), FULL, "fsdp.activation_offload=true"),
    "1b, chunked loss": (*SIZES["1b"], *batch(4), "fsdp.chunked_loss=true"),
    "1b, compiled": (*SIZES["1b"], *batch(4), "fsdp.compile=true"),
    "GPT-2 of transformers": (*of_transformers("gpt2"), "data.vocab_size=50304", "data.seq_len=1024", *batch(8)),
    "Llama of transformers": (*of_transformers("llama"), "data.vocab_size=128256", "data.seq_len=2048", *batch(2)),
    "3b, full recomputation": (*SIZES["3b"], *batch(4), FULL),
    "8b, bf16 masters": (*SIZES["8b"], *batch(1), FULL, "fsdp.master_dtype=bf16"),
    "8b, full recomputation": (*SIZES["8b"], *batch(1), FULL),
}


def memory(bench: Bench) -> Iterator[Row]:
    """Peaks of optimizer steps, by torch and by the driver, of what the plan says that they take."""
    base = (*RANDOM, "nodes=1", "nproc_per_node=1", "cluster.accelerator=cuda", f"hardware={bench.hardware}")
    configurations = [merge_overrides([*base, "fsdp=full_shard"], overrides) for overrides in MEMORY.values()]
    command = [sys.executable, str(PROGRAMS / "memory.py"), json.dumps(configurations)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    yield from memory_rows(list(MEMORY), answers(done.stdout), done.stderr)


def answers(stdout: str) -> list[str]:
    """Return the lines that the program itself printed: Gloo of torch 2.10 prints some, too."""
    return [line for line in stdout.splitlines() if line.startswith("{")]


def memory_rows(configurations: Sequence[str], lines: Sequence[str], stderr: str) -> Iterator[Row]:
    """Compare what gpu_programs/memory.py printed: the allocator's peak with the tensors, the driver's with all.

    Configurations that do not fit into this device have no rows.
    """
    for i, name in enumerate(configurations):
        found = json.loads(lines[i]) if i < len(lines) else {"error": stderr.strip()[-200:] or "no answer"}
        if "too large" in found:
            continue
        if "error" in found:
            yield Row(name, None, note=found["error"])
            continue
        tensors = found["planned"] - found["reserve"]
        note = f"{found['torch'] / GIB:.1f} GiB measured, {tensors / GIB:.1f} planned"
        yield Row(f"{name}, torch", found["torch"] / tensors, 0.9, 1.1, note=note)
        given = f"{found['driver'] / GIB:.1f} GiB measured, {found['planned'] / GIB:.1f} planned and given"
        note = f"{given}; the cache was freed {found['retries']} times in {found['steps']} steps"
        yield Row(f"{name}, driver", found["driver"] / found["planned"], 0.9, 1.02, note=note)


CASES = (Case("memory", f"{len(MEMORY)} configurations", "0.9 to 1.1 of the plan", memory, ("gpu",), 100),)
