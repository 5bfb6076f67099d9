"""What this project does on a GPU, in under ten minutes: a table, PASS or how far off, and JSON.

    python benchmarks/gpu.py [PART ...] [--json FILE] [--dry-run] [--limit SECONDS]
    python benchmarks/gpu.py --pack 3.12      # before: wheels for a machine without a network, into benchmarks/wheels/

Parts: `works`, `faults`, `memory`, `rates`, `recovery`, `speed`, `saving`; all of them when none is named. Most cases
are real jobs (`python -m fsdp_jobs`) on one GPU of this machine. Without a GPU those that a CPU can run do so on the
CPU. What is skipped is named, with the reason: no GPU, a package that is not installed, or no time left of `--limit`
(600 s with a GPU). `--dry-run` shows every case, what is expected of it and how long it takes, and starts nothing.
Exit code 1: something was out of its range.

Expected are: the verdict `done` and finite losses; memory within 10% and speed within 15% of the plan; at least 0.98
of the tokens/s of a hand-written loop, of Accelerate and of torchtitan; saves that wait at most 5% of their time and
no longer than `dcp.async_save`; what conf/hardware says of the device.
"""

# ruff: noqa: E402
from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_programs import travel

if __name__ == "__main__" and "--pack" not in sys.argv:
    travel.settle()

import argparse
import importlib.metadata
import json
import math
import os
import pickle
import platform
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import yaml

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.hydra import merge_overrides
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.tail import last_lines, read_json_lines
from fsdp_jobs.run.verdict import Verdict

PROGRAMS = ROOT / "benchmarks" / "gpu_programs"
EXAMPLES = ROOT / "examples"
HARDWARE = ROOT / "conf" / "hardware"
GIB = 2**30
LIMIT_S = 600.0  # of a run on a GPU
WARMUP = 4  # steps that no speed is taken from
TINY = (
    *("model.dim=64", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=96"),
    *("data=synthetic", "data.tokens=40000", "data.seq_len=32", "data.global_batch=8", "data.micro_batch=2"),
    *("data.workers=0", "optim.warmup_steps=2", "checkpoint.every_steps=0", "steps=12"),
)
SHAPE_3B = (  # of Llama 3.2 3B
    *("model=llama_1b", "model.dim=3072", "model.n_layers=28", "model.n_heads=24", "model.ffn_dim=8192"),
)
RANDOM = (
    *("data=synthetic", "data.tokens=4000000", "data.workers=1", "steps=12"),
    *("checkpoint.every_steps=0", "checkpoint.every_minutes=0"),
)


@dataclass(frozen=True)
class Row:
    """One measured figure beside what is expected of it."""

    name: str
    value: float | None  # None: could not be measured; the note says why
    low: float = -math.inf
    high: float = math.inf
    unit: str = ""
    note: str = ""

    @property
    def verdict(self) -> str:
        """PASS; or how far off."""
        if self.value is None or math.isnan(self.value):
            return "FAIL"
        if self.low <= self.value <= self.high:
            return "PASS"
        bound = self.low if self.value < self.low else self.high
        word = "below" if self.value < self.low else "above"
        return f"{abs(self.value / bound - 1):.0%} {word}" if bound else f"{abs(self.value - bound):g} {word}"

    @property
    def expected(self) -> str:
        bounds = [f"at least {self.low:g}" * (self.low > -math.inf), f"at most {self.high:g}" * (self.high < math.inf)]
        return f"{self.low:g}" if self.low == self.high else ", ".join(filter(None, bounds))


@dataclass(frozen=True)
class Case:
    """Something to run: its name, how long it takes on a GPU, and what gives its rows."""

    part: str
    name: str
    expected: str
    run: Callable[[Bench], Iterator[Row]]
    needs: tuple[str, ...] = ()  # gpu, compiler, or packages
    seconds: int = 12


@dataclass
class Bench:
    """The machine and a folder for runs."""

    folder: Path
    gpus: int
    hardware: str = "cpu"  # option of conf/hardware
    facts: dict[str, str] = field(default_factory=dict)

    def job(self, name: str, *overrides: str, **env: str) -> Job:
        """Start a job of one node and one rank, unless the overrides say otherwise."""
        device = "cuda" if self.gpus else "cpu"
        here = [f"cluster.accelerator={device}", f"hardware={self.hardware}", "nodes=1", "nproc_per_node=1"]
        return Job(self.folder, name, merge_overrides(here, overrides), self.environment | env)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of jobs."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def lacks(self, case: Case) -> str:
        """Return why a case cannot be run here; empty when it can."""
        return ", ".join(filter(None, map(self._lack, case.needs)))

    def _lack(self, what: str) -> str:
        if what == "gpu":
            return "" if self.gpus else "no GPU"
        if what == "compiler":
            return "" if shutil.which(os.environ.get("CXX", "g++")) else "no C++ compiler"
        name, _, wanted = what.partition(" ")
        found = version_of(name)
        if not found:
            return f"{name} is not installed"
        return "" if found.startswith(wanted) else f"{name} is {found}, not {wanted}"


class Job:
    """A job of this machine, started as a user starts it; what its program writes where it is goes into `folder`."""

    def __init__(self, folder: Path, name: str, overrides: Sequence[str], env: dict[str, str]):
        self.run = RunDir(folder / name)
        command = [sys.executable, "-m", "fsdp_jobs", f"name={name}", f"runs_dir={folder}", *overrides]
        self.output = folder / f"{name}.out"
        with self.output.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=folder)

    def wait(self, seconds: float = 300) -> Job:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.stop()
        return self

    def stop(self) -> None:
        """End it as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(180)

    def until(self, true: Callable[[], Any], what: str, seconds: float = 180) -> None:
        """Wait until something holds.

        Raises:
            RuntimeError: it does not within so many seconds, or the job ended before.
        """
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"{self.run.name} did not reach {what}: {self.why()}")
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        self.until(lambda: any(m["step"] >= step for m in self.metrics()), f"step {step}")

    def metrics(self) -> list[dict[str, Any]]:
        return list(read_json_lines(self.run.metrics))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in read_json_lines(self.run.events) if e["event"] == name]

    def ranks(self) -> list[psutil.Process]:
        """Return the running ranks, which carry the run's name in their title."""
        title = f"fsdp_jobs: {self.run.name} rank "
        found = psutil.process_iter(["cmdline"])
        named = [p for p in found if " ".join(p.info["cmdline"] or []).startswith(title)]
        return [p for p in named if p.ppid() not in {other.pid for other in named}]  # not their data workers

    def verdict(self) -> Verdict | None:
        return Verdict.read(self.run, self.run.last_attempt())

    def why(self) -> str:
        verdict = self.verdict()
        return verdict.reason if verdict is not None else last_lines(self.output, 2)

    def finished(self, on_gpu: bool = False) -> Row:
        """Whether it is done, every loss that it recorded finite, and memory of the GPU was used: 1 or 0."""
        verdict, metrics = self.verdict(), self.metrics()
        why = "" if verdict is not None and verdict.verdict == "done" else self.why()
        if not all(math.isfinite(m["loss"]) for m in metrics):
            why = why or "a loss is not finite"
        if on_gpu and metrics and not metrics[-1].get("peak_memory_gib"):
            why = why or "it ran on the CPU"
        return Row(self.run.name, float(not why), 1, 1, note=why)

    def median(self, key: str) -> float | None:
        """Return the median of a metric after the first steps."""
        values = [m[key] for m in self.metrics()[WARMUP:] if key in m]
        return statistics.median(values) if values else None

    def plan(self) -> Plan:
        return Plan.from_json(self.run.plan.read_text())


def works(
    name: str, *overrides: str, ranks: int = 1, needs: tuple[str, ...] = (), task: Sequence[str] = TINY, logs: str = ""
) -> Case:
    """A job that must end `done`, and have logged a metric; ranks without a GPU each are ranks on the CPU."""

    def run(bench: Bench) -> Iterator[Row]:
        own = 0 < ranks <= bench.gpus
        where = () if own else ("cluster.accelerator=cpu", "hardware=cpu")
        job = bench.job(name, *task, *overrides, f"nproc_per_node={ranks}", *where).wait()
        yield job.finished(on_gpu=own)
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


def of_fault(name: str, act: Callable[[Bench], Iterator[Row]], expected: str, *needs: str, seconds: int = 30) -> Case:
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


def recovery(bench: Bench) -> Iterator[Row]:
    """SIGKILL a rank; where the seconds to the next step go, without and with compiled blocks, side by side."""
    compiled = [False, True] if not bench._lack("compiler") else [False]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda c: list(_recovered(bench, c)), compiled))
    for rows in found:
        yield from rows
    if bench.gpus:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imported = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch; torch.ones(1).cuda()"], check=True)
        took = (time.perf_counter() - imported) - (imported - began)
        yield Row("a CUDA context, within round to loaded", took, 0, 5, "s", f"import torch {imported - began:.1f} s")


def _recovered(bench: Bench, compiled: bool) -> Iterator[Row]:
    name = "compiled" if compiled else "eager"
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(bench.folder / "inductor")} if compiled else {}
    every = ("steps=100000", "checkpoint.every_steps=10", f"fsdp.compile={str(compiled).lower()}")
    job = bench.job(f"recovery-{name}", *TINY, *every, **caches)
    job.until_step(25)
    job.until(lambda: job.events("checkpoint"), "its first checkpoint")
    before = len(job.metrics())
    killed = time.time()
    job.ranks()[0].kill()

    def again() -> list[float]:
        loaded = job.events("resumed")
        return [m["time"] for m in job.metrics()[before:] if loaded and m["time"] > loaded[-1]["time"]]

    try:
        job.until(again, "a step after the kill", 120)
    finally:
        first = again()
        job.stop()
    broken, rounds, loaded = (job.events(name)[-1]["time"] for name in ("round_broken", "round_started", "resumed"))
    begun = job.metrics()[0]["time"] - job.events("round_started")[0]["time"]
    parts = {
        "first start, round to first step": (begun, 90),
        "killed to noticed": (broken - killed, 2),
        "noticed to next round": (rounds - broken, 5),
        "round to checkpoint loaded": (loaded - rounds, 10),
        "loaded to first step": (first[0] - loaded, 20 if compiled else 5),
        "killed to first step": (first[0] - killed, 30 if compiled else 20),
    }
    for what, (seconds, limit) in parts.items():  # a CPU's seconds, maybe beside other work, have no limit
        yield Row(f"{name}: {what}", seconds, 0, limit if bench.gpus else math.inf, "s")


def memory(bench: Bench) -> Iterator[Row]:
    """Peaks of optimizer steps, by torch and by the driver, of what the plan says that they take."""
    base = (*RANDOM, "nodes=1", "nproc_per_node=1", "cluster.accelerator=cuda", f"hardware={bench.hardware}")
    configurations = [merge_overrides([*base, "fsdp=full_shard"], overrides) for overrides in MEMORY.values()]
    command = [sys.executable, str(PROGRAMS / "memory.py"), json.dumps(configurations)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    yield from memory_rows(list(MEMORY), done.stdout.splitlines(), done.stderr)


def memory_rows(configurations: Sequence[str], lines: Sequence[str], stderr: str) -> Iterator[Row]:
    """Compare what gpu_programs/memory.py printed: the allocator's peak with the tensors, the driver's with all."""
    for i, name in enumerate(configurations):
        found = json.loads(lines[i]) if i < len(lines) else {"error": stderr.strip()[-200:] or "no answer"}
        if "error" in found:
            yield Row(name, None, note=found["error"])
            continue
        tensors = found["planned"] - found["reserve"]
        note = f"{found['torch'] / GIB:.1f} GiB measured, {tensors / GIB:.1f} planned"
        yield Row(f"{name}, torch", found["torch"] / tensors, 0.9, 1.1, note=note)
        note = f"{found['driver'] / GIB:.1f} GiB measured, {found['planned'] / GIB:.1f} planned and given"
        yield Row(f"{name}, driver", found["driver"] / found["planned"], 0.9, 1.02, note=note)
        yield Row(f"{name}, retries of the allocator", found["retries"], 0, 2)


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


def saving(bench: Bench) -> Iterator[Row]:
    """Asynchronous saves of the largest model that fits, bf16 states, against `dcp.async_save`: save.py of one rank."""
    disk, host = shutil.disk_usage(bench.folder).free, psutil.virtual_memory().available
    name = fitting(disk, host) if bench.gpus else "small"
    one = ["nodes=1", "nproc_per_node=1", "fsdp=full_shard", "fsdp.shard_group=auto", f"hardware={bench.hardware}"]
    sizes = [*SIZES[name], "fsdp.master_dtype=bf16", "data.seq_len=128"] if bench.gpus else ["model.dim=256"]
    command = [sys.executable, str(ROOT / "benchmarks" / "save.py"), "--ranks", "1", "--only-asynchronous", "--json"]
    command += ["--saves", "1" if name == "8b" else "3", "--folder", str(bench.folder), *one, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    yield from saving_rows(name, found, done.stderr.strip()[-200:], bench.gpus > 0)


def fitting(disk: float, host: float) -> str:
    """Return the largest of `SIZES` whose bf16 states, once on the disk and twice in host memory, have room."""
    states = {"8b": 8.03e9 * 6, "3b": 3.2e9 * 6, "1b": 1.24e9 * 6}
    return next((name for name, size in states.items() if 1.1 * size < disk and 2.2 * size < host), "160m")


def saving_rows(name: str, found: dict[str, float] | None, why: str, on_gpu: bool) -> Iterator[Row]:
    """Compare what save.py measured; a CPU's copies of a small state have no range."""
    if found is None:
        yield Row(name, None, note=why)
        return
    size = f"{found['state'] / GIB:.1f} GiB of state"
    of_save, of_dcp = found["stall"] / found["ours_async"], found["stall"] / found["dcp_stall"]
    rate = found["state"] / found["ours_async"] / GIB
    waits = f"{found['stall']:.3f} s, dcp.async_save {found['dcp_stall']:.3f} s"
    yield Row(f"{name}: waits / its duration", of_save, 0, 0.05 if on_gpu else math.inf, note=size)
    yield Row(f"{name}: waits / dcp.async_save's", of_dcp, 0, 1 if on_gpu else math.inf, note=waits)
    lasts = f"{found['ours_async']:.1f} and {found['dcp_async']:.1f} s, ours {rate:.2f} GiB/s with checksums read back"
    yield Row(f"{name}: duration / dcp.async_save's", found["ours_async"] / found["dcp_async"], 0, 4, note=lasts)


def rates(bench: Bench) -> Iterator[Row]:
    """Matmul, memory and host rates of the device against conf/hardware, and the lines that they would be there."""
    done = subprocess.run([sys.executable, str(PROGRAMS / "rates.py")], capture_output=True, text=True)
    if done.returncode:
        yield Row("rates", None, note=done.stderr.strip()[-200:])
        return
    said = yaml.safe_load((HARDWARE / f"{bench.hardware}.yaml").read_text())
    yield from rate_rows(json.loads(done.stdout.splitlines()[-1]), said)


def rate_rows(measured: dict[str, float], said: dict[str, Any]) -> Iterator[Row]:
    """Compare measured rates with a file of conf/hardware; the notes are its lines with what was measured."""
    efficiency = measured["bf16_tflops"] / said["bf16_tflops"]
    lines = {
        "bf16_tflops": (said["bf16_tflops"] * said["matmul_efficiency"], f"matmul_efficiency: {efficiency:.3f}"),
        "memory_gb_s": (said["memory_gb_s"], f"memory_gb_s: {measured['memory_gb_s']:.1f}"),
        "host_gb_s": (said["host_gb_s"], f"host_gb_s: {measured['host_gb_s']:.1f}"),
    }
    for key, (known, line) in lines.items():
        note = f"{line}  # python benchmarks/gpu.py rates, {time.strftime('%Y-%m-%d')}; {known:,.1f} until now"
        yield Row(key, measured[key] / known, 0.85, 1.15, note=note)


def batch(samples: int) -> tuple[str, str]:
    return f"data.micro_batch={samples}", f"data.global_batch={samples}"


SIZES = {
    "160m": ("model=llama_160m", "data.vocab_size=256", "data.seq_len=1024"),
    "1b": ("model=llama_1b", "data.vocab_size=128256", "data.seq_len=2048"),
    "3b": (*SHAPE_3B, "data.vocab_size=128256", "data.seq_len=2048"),
    "8b": ("model=llama3_8b", "data.vocab_size=128256", "data.seq_len=2048"),
}
FULL = "fsdp.activation_checkpointing=full"
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
    "3b, full recomputation": (*SIZES["3b"], *batch(4), FULL),
    "8b, full recomputation": (*SIZES["8b"], *batch(1), FULL),
}
ACCELERATE = ("accelerate", "transformers")
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
    of_fault("out of memory", out_of_memory, "the verdict says memory", "gpu"),
    of_fault("a standstill", standstill, "verdict, stacks and NCCL's record", seconds=35),
    of_fault("preemption", preempted, "saved, and nothing done again"),
    Case("memory", f"{len(MEMORY)} configurations", "0.9 to 1.1 of the plan", memory, ("gpu",), 75),
    Case("rates", "device", "0.85 to 1.15 of conf/hardware", rates, ("gpu",), 10),
    Case("recovery", "a killed rank", "at most 20 s, compiled 30 s", recovery, seconds=50),
    of_speed("160m", *SIZES["160m"], *batch(32), seconds=15),
    of_speed("1b", *SIZES["1b"], *batch(4), seconds=15),
    of_speed("1b-compiled", *SIZES["1b"], *batch(4), compiled=True, seconds=40),
    of_speed("3b-full", *SIZES["3b"], *batch(4), FULL),
    of_speed("8b-full", *SIZES["8b"], *batch(2), FULL, seconds=25),
    Case("speed", "by hand", "at least 0.98", against_hand, ("gpu",), 30),
    Case("speed", "accelerate", "at least 0.98", against_accelerate, ACCELERATE, 35),
    Case("speed", "torchtitan", "at least 0.98", against_torchtitan, ("gpu", "torchtitan 0.3"), 45),
    Case("saving", "asynchronous", "waits at most dcp.async_save's time", saving, seconds=70),
)
TOGETHER = ("works",)  # parts whose cases run at the same time: nothing is timed


def at_once(part: str, cores: int) -> int:
    """Return how many cases of a part run at the same time."""
    return max(1, cores // 3) if part in TOGETHER else 1


def seconds_of(cases: Sequence[Case], cores: int) -> float:
    """Return about how long cases take on a GPU."""
    return sum(case.seconds / at_once(case.part, cores) for case in cases)


def version_of(package: str) -> str:
    """Return the version of an installed package; empty when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def machine() -> Bench:
    """Find out what is here."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    memory, disk = psutil.virtual_memory().total / GIB, shutil.disk_usage(tempfile.gettempdir()).free / GIB
    facts = {"python": platform.python_version(), "torch": torch.__version__, "cores": str(os.cpu_count())}
    facts |= {"load": f"{os.getloadavg()[0]:.1f}", "memory": f"{memory:.0f} GiB", "free disk": f"{disk:.0f} GiB"}
    facts |= {name: version_of(name) or "missing" for name in ("transformers", "accelerate", "torchtitan")}
    hardware = "cpu"
    if gpus:
        name = torch.cuda.get_device_name(0)
        known = [f.stem for f in HARDWARE.glob("*.yaml")]
        hardware = option_of(name, known, torch.cuda.get_device_properties(0).total_memory / GIB)
        facts |= {"GPU": f"{gpus} x {name}", "CUDA": str(torch.version.cuda), "hardware": hardware}
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        if nvidia_smi := shutil.which("nvidia-smi"):
            query = [nvidia_smi, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
            facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return Bench(Path(), gpus, hardware, facts)


def option_of(name: str, options: Sequence[str], memory_gib: float) -> str:
    """Return the option of conf/hardware for a device: `h200` of `NVIDIA H200`, `a100_40` by its memory."""
    word = name.lower()
    fitting = [o for o in options if o.partition("_")[0] in word]
    sized = [o for o in fitting if o.endswith(f"_{round(memory_gib)}") or f"{o.partition('_')[2]}gb" in word]
    return (sized or sorted(fitting) or ["h100"])[0]


def table(rows: Sequence[tuple[str, Row]]) -> Iterator[str]:
    """Yield the lines of the table of docs/benchmarks.md."""
    yield "| part | case | value | expected | verdict | |"
    yield "|---|---|---|---|---|---|"
    for part, row in rows:
        value = "-" if row.value is None else f"{row.value:.3g} {row.unit}".strip()
        yield f"| {part} | {row.name} | {value} | {row.expected} | {row.verdict} | {row.note} |"


def measure(case: Case, bench: Bench) -> list[Row]:
    """Run a case; what goes wrong in it is its row."""
    try:
        return list(case.run(bench))
    except (Exception, BadInput) as e:
        return [Row(case.name, None, note=f"{type(e).__name__}: {e}"[:200])]


def run(chosen: Sequence[Case], bench: Bench, deadline: float) -> tuple[list[tuple[str, Row]], dict[str, str]]:
    """Run cases, part by part; return their rows, and what was skipped with the reason."""
    rows: list[tuple[str, Row]] = []
    skipped = {f"{case.part} {case.name}": why for case in chosen if (why := bench.lacks(case))}
    possible = [case for case in chosen if f"{case.part} {case.name}" not in skipped]

    def tried(case: Case) -> list[Row] | None:
        return measure(case, bench) if time.monotonic() + case.seconds < deadline else None

    for part in dict.fromkeys(case.part for case in possible):
        cases = [case for case in possible if case.part == part]
        with ThreadPoolExecutor(at_once(part, os.cpu_count() or 1)) as pool:
            for case, found in zip(cases, pool.map(tried, cases), strict=True):
                if found is None:
                    skipped[f"{case.part} {case.name}"] = "no time left; by itself: name its part"
                for row in found or ():
                    rows.append((part, row))
                    print(f"{part:<9} {case.name:<26} {row.name:<40} {row.verdict:<10} {row.note}", flush=True)
    return rows, skipped


def main(argv: Sequence[str] | None = None) -> int:
    parts = tuple(dict.fromkeys(case.part for case in CASES))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*parts, []], help=", ".join(parts))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="default: 600 with a GPU, none without")
    parser.add_argument("--pack", metavar="PYTHON", help="collect wheels for a machine with that version of Python")
    args = parser.parse_args(argv)
    if args.pack:
        travel.pack(args.pack)
        return 0
    bench = machine()
    print(time.strftime("%Y-%m-%d"), *(f"{k} {v}" for k, v in bench.facts.items()), sep=", ", flush=True)
    chosen = [case for case in CASES if case.part in (args.parts or parts)]
    if args.dry_run:
        for case in chosen:
            why = bench.lacks(case)
            here = f"skipped here: {why}" if why else f"about {case.seconds} s"
            print(f"{case.part:<9} {case.name:<26} {case.expected:<42} {here}")
        print(f"about {seconds_of(chosen, os.cpu_count() or 1):.0f} s on a GPU and the cores of this machine")
        return 0
    limit = args.limit or (LIMIT_S if bench.gpus else math.inf)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # processes may still end
        bench.folder = Path(folder)
        rows, skipped = run(chosen, bench, began + limit)
    print(f"{time.monotonic() - began:.0f} s\n", *table(rows), sep="\n")
    if skipped:
        print("\nskipped:", *(f"- {name}: {why}" for name, why in skipped.items()), sep="\n")
    if args.json is not None:
        content = {"facts": bench.facts, "rows": [{"part": p, **asdict(r), "verdict": r.verdict} for p, r in rows]}
        args.json.write_text(json.dumps({**content, "skipped": skipped}, indent=1))
    return int(any(row.verdict != "PASS" for _, row in rows))


if __name__ == "__main__":
    sys.exit(main())
