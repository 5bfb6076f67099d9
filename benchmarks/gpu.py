"""What this project does on a GPU, in under ten minutes: a table, PASS or how far off, and JSON.

    python benchmarks/gpu.py [PART ...] [--json FILE] [--dry-run]

Parts: `works`, `faults`, `memory`, `speed`, `saving`, `recovery`, `rates`; all of them when none is named. Every part
runs real jobs (`python -m fsdp_jobs`) on one GPU of this machine. Without a GPU `works`, `faults` and `recovery` run
on the CPU, and each case that needs a GPU says that it was skipped. `--dry-run` shows every case, what is expected of
it and how long it takes, and starts nothing. Exit code 1: something was out of its range.

Expected are: the verdict `done` and finite losses; memory within 10% and speed within 15% of the plan; at least 0.98
of the hand-written loop's tokens/s; at most 5% of a save waited for; what conf/hardware says of the device.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fsdp_jobs.config.hydra import merge_overrides
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.tail import last_lines, read_json_lines
from fsdp_jobs.run.verdict import Verdict

HERE = Path(__file__).resolve().parent
GIB = 2**30
WARMUP = 4  # steps that no speed is taken from
TINY = (
    *("model.dim=64", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=96"),
    *("data=synthetic", "data.tokens=40000", "data.seq_len=32", "data.global_batch=8", "data.micro_batch=2"),
    *("data.workers=0", "optim.warmup_steps=2", "checkpoint.every_steps=0", "steps=12"),
)
SHAPE_3B = (  # of Llama 3.2 3B
    *("model=llama_1b", "model.dim=3072", "model.n_layers=28", "model.n_heads=24", "model.ffn_dim=8192"),
)
RANDOM = ("data=synthetic", "data.tokens=4000000", "data.workers=1", "checkpoint.every_steps=0", "steps=12")


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


@dataclass(frozen=True)
class Case:
    """Something to run: its name, how long it takes on a GPU, and what gives its rows."""

    part: str
    name: str
    expected: str
    run: Callable[[Bench], Iterator[Row]]
    needs_gpu: bool = False
    seconds: int = 20


@dataclass
class Bench:
    """The machine and a folder for runs."""

    folder: Path
    gpus: int
    hardware: str = "cpu"  # option of conf/hardware
    facts: dict[str, str] = field(default_factory=dict)

    def job(self, name: str, *overrides: str) -> Job:
        """Start a job of one node and one rank, unless the overrides say otherwise."""
        device = "cuda" if self.gpus else "cpu"
        here = (f"cluster.accelerator={device}", f"hardware={self.hardware}", "nodes=1", "nproc_per_node=1")
        return Job(self.folder, name, merge_overrides(here, overrides))


class Job:
    """A job of this machine, started as a user starts it."""

    def __init__(self, folder: Path, name: str, overrides: Sequence[str]):
        self.run = RunDir(folder / name)
        command = [sys.executable, "-m", "fsdp_jobs", f"name={name}", f"runs_dir={folder}", *overrides]
        self.output = folder / f"{name}.out"
        with self.output.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)

    def wait(self, seconds: float = 300) -> Job:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)
        return self

    def until_step(self, step: int, seconds: float = 180) -> None:
        """Wait until a step has been recorded.

        Raises:
            RuntimeError: it was not within so many seconds, or the job ended before.
        """
        deadline = time.monotonic() + seconds
        while not any(m["step"] >= step for m in self.metrics()):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"{self.run.name} did not reach step {step}: {self.why()}")
            time.sleep(0.05)

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

    def finished(self) -> Row:
        """Whether it is done, and every loss that it recorded finite: 1 or 0."""
        verdict = self.verdict()
        finite = all(math.isfinite(m["loss"]) for m in self.metrics())
        done = verdict is not None and verdict.verdict == "done"
        return Row(self.run.name, float(done and finite), 1, 1, note="" if done and finite else self.why())

    def median(self, key: str) -> float | None:
        """Return the median of a metric after the first steps."""
        values = [m[key] for m in self.metrics()[WARMUP:] if key in m]
        return statistics.median(values) if values else None

    def plan(self) -> Plan:
        return Plan.from_json(self.run.plan.read_text())


def works(name: str, *overrides: str, ranks: int = 1, needs_gpu: bool = False, task: Sequence[str] = TINY) -> Case:
    """A job that must end `done`; more ranks than GPUs are ranks on the CPU, unless it is a program."""

    def run(bench: Bench) -> Iterator[Row]:
        where = ("cluster.accelerator=cpu", "hardware=cpu") if ranks > bench.gpus else ()
        yield bench.job(name, *task, *overrides, f"nproc_per_node={ranks}", *where).wait().finished()

    return Case("works", name, "done, finite losses", run, needs_gpu)


def resumed(bench: Bench) -> Iterator[Row]:
    """Save asynchronously, stop, resume, export."""
    saved = bench.job("resume", *TINY, "checkpoint.every_steps=4").wait()
    yield saved.finished()
    again = bench.job("resume", *TINY, "checkpoint.every_steps=4", "steps=20").wait()
    steps = [e["step"] for e in again.events("resumed")]
    yield Row("resumed from step", steps[-1] if steps else None, 12, 12, note="" if steps else again.why())
    command = [sys.executable, "-m", "fsdp_jobs", "export", "resume", f"runs_dir={bench.folder}"]
    done = subprocess.run(command, capture_output=True, text=True)
    yield Row("export's exit code", done.returncode, 0, 0, note=done.stderr.strip()[-200:])


def of_fault(name: str, act: Callable[[Bench], tuple[Job, str]], expected: str, needs_gpu: bool = False) -> Case:
    """A fault whose verdict must name it."""

    def run(bench: Bench) -> Iterator[Row]:
        job, word = act(bench)
        told = job.why()
        yield Row(name, float(word.lower() in told.lower()), 1, 1, note=told[:160])

    return Case("faults", name, expected, run, needs_gpu, 60)


def out_of_memory(bench: Bench) -> tuple[Job, str]:
    huge = (*RANDOM, "model=llama3_8b", "data.vocab_size=128256", "data.seq_len=8192", "data.micro_batch=16")
    job = bench.job("oom", *huge, "data.global_batch=16", "elastic.max_failures_without_progress=0")
    return job.wait(), "memory"


def hanging_kernel(bench: Bench) -> tuple[Job, str]:
    script = HERE / "gpu_programs" / "hang.py"
    job = bench.job("hang", f"script={script}", "elastic.stall_timeout_s=15", "elastic.max_failures_without_progress=0")
    return job.wait(180), "rank 0"


def preempted(bench: Bench) -> tuple[Job, str]:
    job = bench.job("preempted", *TINY, "steps=100000", "checkpoint.every_steps=1000")
    job.until_step(8)
    supervisor = json.loads((job.run.submit / "supervisor.json").read_text())["pid"]
    agents = [c for c in psutil.Process(supervisor).children() if "fsdp_jobs.elastic.agent" in c.cmdline()]
    agents[0].send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 60
    while not job.run.verdicts() and time.monotonic() < deadline:
        time.sleep(0.1)
    told = Verdict.read(job.run, 0)
    job.process.send_signal(signal.SIGINT)
    job.wait(60)
    saved = job.events("checkpoint")
    word = "preempt" if told is not None and told.verdict == "preempted" and saved else "nothing was saved"
    return job, "stop" if word == "preempt" else word  # its own last verdict is that of the Ctrl-C


def recovery(bench: Bench) -> Iterator[Row]:
    """SIGKILL a rank; where the seconds to the next step go."""
    job = bench.job("recovery", *TINY, "steps=100000", "checkpoint.every_steps=10")
    job.until_step(25)
    before = len(job.metrics())
    killed = time.time()
    job.ranks()[0].kill()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        after = [m for m in job.metrics()[before:] if m["time"] > killed and job.events("resumed")]
        if after and after[-1]["time"] > job.events("resumed")[-1]["time"]:
            break
        time.sleep(0.05)
    job.process.send_signal(signal.SIGINT)
    job.wait(60)
    rounds, loaded = job.events("round_started"), job.events("resumed")
    if len(rounds) < 2 or not loaded:
        yield Row("recovery", None, note=job.why())
        return
    first = next((m["time"] for m in job.metrics()[before:] if m["time"] > loaded[-1]["time"]), math.nan)
    yield Row("killed to next round", rounds[1]["time"] - killed, 0, 5, "s")
    yield Row("round to checkpoint loaded", loaded[-1]["time"] - rounds[1]["time"], 0, 10, "s")
    yield Row("loaded to first step", first - loaded[-1]["time"], 0, 10, "s")
    yield Row("killed to first step", first - killed, 0, 20, "s")


def of_memory(name: str, *overrides: str, seconds: int = 30) -> Case:
    """Peak memory of a job against its plan."""

    def run(bench: Bench) -> Iterator[Row]:
        job = bench.job(f"memory-{name}", *RANDOM, "steps=4", *overrides).wait()
        peaks = [m["peak_memory_gib"] for m in job.metrics() if "peak_memory_gib" in m]
        if not peaks:
            yield Row(name, None, note=job.why())
            return
        memory = job.plan().memory
        assert memory is not None
        planned = (memory.total - memory.reserve) / GIB
        yield Row(name, peaks[-1] / planned, 0.9, 1.1, note=f"{peaks[-1]:.1f} GiB measured, {planned:.1f} planned")

    return Case("memory", name, "0.9 to 1.1 of the plan", run, True, seconds)


def of_speed(name: str, *overrides: str, seconds: int = 40, compiled: bool = False) -> Case:
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

    return Case("speed", name, "0.85 to 1.18 of the plan", run, True, seconds)


def against_hand(bench: Bench) -> Iterator[Row]:
    """The 1B model against `minimal_fsdp2.py`, alternating."""
    task = (*RANDOM, *SIZES["1b"], "fsdp=full_shard", "data.global_batch=4", "data.micro_batch=4", "nproc_per_node=1")
    ratios = []
    for pair in range(2):
        ours = bench.job(f"by-hand-{pair}", *task).wait().median("step_s")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        command += [str(HERE / "minimal_fsdp2.py"), "--steps", "12", "nodes=1", *task]
        done = subprocess.run(command, capture_output=True, text=True)
        if ours is None or done.returncode:
            yield Row("ours / by hand, tokens/s", None, note=done.stderr.strip()[-200:])
            return
        ratios.append(statistics.median(json.loads(done.stdout.splitlines()[-1])[WARMUP:]) / ours)
    yield Row("ours / by hand, tokens/s", statistics.median(ratios), 0.98, note=f"{len(ratios)} pairs")


def saving(bench: Bench) -> Iterator[Row]:
    """How long the trainer waits for asynchronous saves, of how long they take."""
    saves = ("checkpoint.every_steps=6", "steps=24", "checkpoint.async_mode=process", "checkpoint.keep=1")
    job = bench.job("saving", *RANDOM, *SIZES["1b"], "data.micro_batch=4", "data.global_batch=4", *saves).wait()
    took = [e["seconds"] for e in job.events("checkpoint")]
    waited = [m["checkpoint_stall_s"] for m in job.metrics() if m["step"] % 6 == 1 and m["step"] > 6]
    if not took or not waited:
        yield Row("saving", None, note=job.why())
        return
    size = job.events("checkpoint")[-1]["bytes"] / GIB
    yield Row("waited / duration of a save", max(waited) / statistics.median(took), 0, 0.05, note=f"{size:.1f} GiB")
    yield Row("duration of a save", statistics.median(took), 0, 120, "s", f"{size / statistics.median(took):.2f} GiB/s")


def rates(bench: Bench) -> Iterator[Row]:
    """Matmul, memory and host rates of the device against conf/hardware."""
    import yaml

    done = subprocess.run([sys.executable, str(HERE / "gpu_programs" / "rates.py")], capture_output=True, text=True)
    if done.returncode:
        yield Row("rates", None, note=done.stderr.strip()[-200:])
        return
    measured = json.loads(done.stdout.splitlines()[-1])
    said = yaml.safe_load((HERE.parent / "conf" / "hardware" / f"{bench.hardware}.yaml").read_text())
    for key in ("bf16_tflops", "memory_gb_s", "host_gb_s"):
        known = said[key] * (said["matmul_efficiency"] if key == "bf16_tflops" else 1)
        yield Row(key, measured[key] / known, 0.85, 1.15, note=f"{measured[key]:,.1f} measured, {known:,.1f} in conf")


SIZES = {
    "160m": ("model=llama_160m", "data.vocab_size=256", "data.seq_len=1024"),
    "1b": ("model=llama_1b", "data.vocab_size=128256", "data.seq_len=2048"),
    "3b": (*SHAPE_3B, "data.vocab_size=128256", "data.seq_len=2048"),
    "8b": ("model=llama3_8b", "data.vocab_size=128256", "data.seq_len=2048"),
}
FULL = "fsdp.activation_checkpointing=full"


def batch(samples: int) -> tuple[str, str]:
    return f"data.micro_batch={samples}", f"data.global_batch={samples}"


CASES = (
    works("main"),
    *(works(s, f"fsdp={s}") for s in ("full_shard", "shard_grad_op", "no_shard")),
    *(works(s, f"fsdp={s}", "fsdp.shard_group=1", ranks=2) for s in ("hybrid_shard", "hybrid_shard_zero2")),
    works("bf16", "fsdp.param_dtype=bf16"),
    works("fp16", "fsdp.param_dtype=fp16"),
    *(works(f"recompute-{kind}", f"fsdp.activation_checkpointing={kind}") for kind in ("full", "every_n", "selective")),
    works("offload-parameters", "fsdp.cpu_offload=true"),
    works("offload-activations", FULL, "fsdp.activation_offload=true"),
    works("compile", "fsdp.compile=true", needs_gpu=True),
    works("save-process", "checkpoint.every_steps=4", "checkpoint.async_mode=process"),
    Case("works", "resume", "resumed from step 12, exported", resumed, seconds=60),
    works("script", f"script={HERE.parent / 'examples' / 'plain_torchrun.py'}", "script_args='--steps 20'", task=()),
    works("ranks-share-a-gpu", f"script={HERE / 'gpu_programs' / 'shared_gpu.py'}", ranks=4, needs_gpu=True, task=()),
    of_fault("out of memory", out_of_memory, "the verdict says memory", needs_gpu=True),
    of_fault("a kernel that never ends", hanging_kernel, "the verdict names rank 0", needs_gpu=True),
    of_fault("preemption", preempted, "saved before the end"),
    of_memory("160m", *SIZES["160m"], *batch(8)),
    of_memory("160m-long", "model=llama_160m", "data.seq_len=8192", *batch(2)),
    of_memory("160m-full", *SIZES["160m"], *batch(8), FULL),
    of_memory("1b", *SIZES["1b"], *batch(4)),
    of_memory("1b-full", *SIZES["1b"], *batch(4), FULL),
    of_memory("1b-selective", *SIZES["1b"], *batch(4), "fsdp.activation_checkpointing=selective"),
    of_memory("1b-every-2", *SIZES["1b"], *batch(4), "fsdp.activation_checkpointing=every_n"),
    of_memory("1b-fp32", *SIZES["1b"], *batch(2), "fsdp.param_dtype=fp32"),
    of_memory("1b-offload", *SIZES["1b"], *batch(4), "fsdp.cpu_offload=true"),
    of_memory("1b-activations", *SIZES["1b"], *batch(4), FULL, "fsdp.activation_offload=true"),
    of_memory("3b-full", *SIZES["3b"], *batch(4), FULL),
    of_memory("8b-full", *SIZES["8b"], *batch(1), FULL, "fsdp.cpu_offload=true", seconds=60),
    of_speed("160m", *SIZES["160m"], *batch(32)),
    of_speed("1b", *SIZES["1b"], *batch(4)),
    of_speed("1b-compiled", *SIZES["1b"], *batch(4), compiled=True, seconds=70),
    of_speed("3b-full", *SIZES["3b"], *batch(4), FULL),
    Case("speed", "by hand", "at least 0.98", against_hand, True, 120),
    Case("saving", "1b", "waits at most 5% of a save", saving, True, 60),
    Case("recovery", "a killed rank", "at most 20 s", recovery, seconds=60),
    Case("rates", "device", "0.85 to 1.15 of conf/hardware", rates, True, 20),
)
TOGETHER = ("works",)  # parts whose cases run at the same time: nothing is timed


def machine() -> Bench:
    """Find out what is here."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts = {"python": platform.python_version(), "torch": torch.__version__, "cores": str(os.cpu_count())}
    hardware = "cpu"
    if gpus:
        name = torch.cuda.get_device_name(0)
        known = [f.stem for f in (HERE.parent / "conf" / "hardware").glob("*.yaml")]
        hardware = option_of(name, known, torch.cuda.get_device_properties(0).total_memory / GIB)
        facts |= {"GPU": f"{gpus} x {name}", "CUDA": str(torch.version.cuda), "hardware": hardware}
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
        bounds = [f"at least {row.low:g}" * (row.low > -math.inf), f"at most {row.high:g}" * (row.high < math.inf)]
        yield f"| {part} | {row.name} | {value} | {', '.join(filter(None, bounds))} | {row.verdict} | {row.note} |"


def measure(case: Case, bench: Bench) -> list[Row]:
    """Run a case; what goes wrong in it is its row."""
    try:
        return list(case.run(bench))
    except Exception as e:
        return [Row(case.name, None, note=f"{type(e).__name__}: {e}"[:200])]


def main(argv: Sequence[str] | None = None) -> int:
    parts = tuple(dict.fromkeys(case.part for case in CASES))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*parts, []], help=", ".join(parts))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(argv)
    bench = machine()
    print(time.strftime("%Y-%m-%d"), *(f"{k} {v}" for k, v in bench.facts.items()), sep=", ")
    chosen = [case for case in CASES if case.part in (args.parts or parts)]
    if args.dry_run:
        for case in chosen:
            here = "needs a GPU: skipped here" if case.needs_gpu and not bench.gpus else f"about {case.seconds} s"
            print(f"{case.part:<9} {case.name:<26} {case.expected:<34} {here}")
        return 0
    skipped = [case for case in chosen if case.needs_gpu and not bench.gpus]
    rows: list[tuple[str, Row]] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench.folder = Path(folder)
        for part in dict.fromkeys(case.part for case in chosen):
            cases = [case for case in chosen if case.part == part and case not in skipped]
            with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4) if part in TOGETHER else 1) as pool:
                for case, found in zip(cases, pool.map(lambda c: measure(c, bench), cases), strict=True):
                    rows += [(part, row) for row in found]
                    for row in found:
                        print(f"{part:<9} {case.name:<26} {row.name:<28} {row.verdict:<10} {row.note}", flush=True)
    print(f"{time.monotonic() - began:.0f} s\n", *table(rows), sep="\n")
    if skipped:
        print("\nskipped, for want of a GPU:", ", ".join(f"{case.part} {case.name}" for case in skipped))
    if args.json is not None:
        content = {"facts": bench.facts, "rows": [{"part": p, **asdict(r), "verdict": r.verdict} for p, r in rows]}
        args.json.write_text(json.dumps(content, indent=1))
    return int(any(row.verdict != "PASS" for _, row in rows))


if __name__ == "__main__":
    sys.exit(main())
