"""Tokens/s against the plan, a loop by hand, Accelerate and torchtitan. For gpu.py."""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.gpu_parts.bench import ACCELERATE, FULL, RANDOM, ROOT, SIZES, WARMUP, Bench, Case, Row, batch


def of_speed(name: str, *overrides: str, seconds: int = 20, compiled: bool = False) -> Case:
    """Tokens/s of a job against its plan."""

    def run(bench: Bench) -> Iterator[Row]:
        settings = [*RANDOM, *overrides, f"fsdp.compile={str(compiled).lower()}"]
        job = bench.job(f"speed-{name}", *settings).wait()
        measured, time_of_plan, mfu = job.median("tokens_per_s"), job.plan().time, job.median("mfu")
        if measured is None or time_of_plan is None:
            yield Row(name, None, note=job.why())
            return
        note = f"{measured:,.0f} tokens/s, {time_of_plan.tokens_per_s:,.0f} planned, MFU {mfu or math.nan:.1%}"
        yield Row(name, measured / time_of_plan.tokens_per_s, 0.85, 1.18, note=note)

    return Case("speed", name, "0.85 to 1.18 of the plan", run, ("gpu",), seconds)


def against_hand(bench: Bench) -> Iterator[Row]:
    """The 1B model against `minimal_fsdp2.py`."""
    task = (*RANDOM, *SIZES["1b"], "fsdp=full_shard", *batch(4), "nproc_per_node=1")
    ours = bench.job("by-hand", *task).wait().median("step_s")
    run = ["torch.distributed.run", "--standalone", "--nproc-per-node=1", str(ROOT / "benchmarks" / "minimal_fsdp2.py")]
    command = [sys.executable, "-m", *run, "--steps", "12", "nodes=1", *task]
    done = subprocess.run(command, capture_output=True, text=True)
    if ours is None or done.returncode:
        yield Row("ours / by hand, tokens/s", None, note=done.stderr.strip()[-200:])
        return
    theirs = statistics.median(json.loads(done.stdout.splitlines()[-1])[WARMUP:])
    yield Row("ours / by hand, tokens/s", theirs / ours, 0.98, note=f"{ours:.3f} and {theirs:.3f} s/step")


def against_accelerate(bench: Bench) -> Iterator[Row]:
    """A Llama of transformers, fp32, against Accelerate: against_accelerate.py of one rank."""
    size = ("--width", "2048") if bench.gpus else ("--width", "64", "--steps", "12")
    script = str(ROOT / "benchmarks" / "against_accelerate.py")
    command = [sys.executable, script, "--pairs", "1", "--ranks", "1", *size]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=bench.environment)
    ratio = ratio_of(done.stdout)
    note = done.stdout.splitlines()[-2].strip() if ratio is not None else done.stderr.strip()[-200:]
    yield Row("ours / Accelerate, tokens/s", ratio, 0.98 if bench.gpus else 0, note=" ".join(note.split()))


def ratio_of(output: str) -> float | None:
    """Read the median ratio that against_accelerate.py prints."""
    found = re.search(r"^median ratio ([\d.]+)", output, re.MULTILINE)
    return float(found[1]) if found else None


def against_torchtitan(bench: Bench) -> Iterator[Row]:
    """The 1B model, recomputation off, against torchtitan's trainer."""
    ours = bench.job("titan", *RANDOM, *SIZES["1b"], *batch(4)).wait().median("tokens_per_s")
    run = ["torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "torchtitan.train"]
    config = ["--module", "benchmarks.gpu_programs.titan", "--config", "llama_1b"]
    command = [sys.executable, "-m", *run, *config, "--dump_folder", str(bench.folder / "titan-dump")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    theirs = titan_speed(done.stdout + done.stderr)
    if ours is None or theirs is None:
        yield Row("ours / torchtitan, tokens/s", None, note=done.stderr.strip()[-200:])
        return
    yield Row("ours / torchtitan, tokens/s", ours / theirs, 0.98, note=f"{ours:,.0f} and {theirs:,.0f} tokens/s")


def titan_speed(output: str) -> float | None:
    """Return the median tokens/s of torchtitan's log after the first steps; None when it has none."""
    found = [float(n.replace(",", "")) for n in re.findall(r"tps:\s*([\d,]+)", output)][WARMUP:]
    return statistics.median(found) if found else None


CASES = (
    of_speed("160m", *SIZES["160m"], *batch(32), seconds=15),
    of_speed("1b", *SIZES["1b"], *batch(4), seconds=15),
    of_speed("1b-compiled", *SIZES["1b"], *batch(4), compiled=True, seconds=40),
    of_speed("3b-full", *SIZES["3b"], *batch(4), FULL),
    of_speed("8b-full-bf16-masters", *SIZES["8b"], *batch(1), FULL, "fsdp.master_dtype=bf16", seconds=25),
    Case("speed", "by hand", "at least 0.98", against_hand, ("gpu",), 30),
    Case("speed", "accelerate", "at least 0.98", against_accelerate, ACCELERATE, 35),
    Case("speed", "torchtitan", "at least 0.98", against_torchtitan, ("gpu", "torchtitan 0.3"), 45),
)
