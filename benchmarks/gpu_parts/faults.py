"""Faults that must be named, or cost nothing. For gpu.py."""

from __future__ import annotations

import json
import pickle
import signal
from collections.abc import Callable, Iterator

import psutil

from benchmarks.gpu_parts.bench import PROGRAMS, RANDOM, TINY, Bench, Case, Job, Row
from fsdp_jobs.run.verdict import Verdict


def of_fault(name: str, act: Callable[[Bench], Iterator[Row]], expected: str, *needs: str, seconds: int = 25) -> Case:
    return Case("faults", name, expected, act, needs, seconds)


def names(job: Job, name: str, word: str) -> Row:
    """Whether the verdict has a word."""
    told = job.why()
    return Row(name, float(word.lower() in told.lower()), 1, 1, note=told[:160])


def out_of_memory(bench: Bench) -> Iterator[Row]:
    huge = (*RANDOM, "model=llama3_8b", "data.vocab_size=128256", "data.seq_len=8192", "data.micro_batch=16")
    job = bench.job("oom", *huge, "data.global_batch=16", "elastic.max_failures_without_progress=0")
    yield names(job.wait(), "out of memory", "memory")


def flight_records(dump: bytes) -> tuple[int, int]:
    """Return how many collectives a file of NCCL's flight recorder has, and how many of them were not completed."""
    entries = pickle.loads(dump)["entries"]
    return len(entries), sum(entry["state"] != "completed" for entry in entries)


def standstill(bench: Bench) -> Iterator[Row]:
    """A kernel, on a CPU a sleep, that does not end: the verdict, the stacks, and with NCCL its flight recorder."""
    limits = ("elastic.stall_timeout_s=10", "elastic.max_failures_without_progress=0")
    job = bench.job("hang", f"script={PROGRAMS / 'hang.py'}", *limits).wait(180)
    yield names(job, "a standstill", "no rank has done a step")
    stacks = [f.read_text() for f in job.run.path.glob("attempts/*/node-*/stacks-rank-*.txt")]
    yield Row("a standstill: stacks with the line", sum("hang.py" in text for text in stacks), 1)
    if bench.gpus:
        found = [flight_records(f.read_bytes()) for f in job.run.path.glob("attempts/*/node-*/nccl-trace-rank-*")]
        recorded, pending = map(sum, zip(*found, strict=True)) if found else (0, 0)
        yield Row("a standstill: collectives recorded", recorded, 4, note=f"{pending} not completed")
        yield Row("a standstill: collectives not completed", pending, 1)


def preempted(bench: Bench) -> Iterator[Row]:
    """SIGTERM to the agent, as a cluster sends it: the step is saved, and the next attempt begins there."""
    job = bench.job("preempted", *TINY, "steps=100000", "checkpoint.every_steps=100000")
    job.until_step(8)
    supervisor = json.loads((job.run.submit / "supervisor.json").read_text())["pid"]
    agents = [c for c in psutil.Process(supervisor).children() if "fsdp_jobs.node.agent" in c.cmdline()]
    agents[0].send_signal(signal.SIGTERM)
    job.until(lambda: job.events("resumed"), "the next attempt", 90)
    saved, resumed_at = job.events("checkpoint")[0]["step"], job.events("resumed")[0]["step"]
    told = Verdict.read(job.run, 0)
    job.stop()
    is_preempted = told is not None and told.verdict == "preempted"
    yield Row("preemption", float(is_preempted), 1, 1, note=told.reason if told else "")
    yield Row("preemption: steps lost", saved - resumed_at, 0, 0, note=f"saved at step {saved}")


CASES = (
    of_fault("out of memory", out_of_memory, "the verdict says memory", "gpu"),
    of_fault("a standstill", standstill, "verdict, stacks and NCCL's record", seconds=25),
    of_fault("preemption", preempted, "saved, and nothing done again"),
)
