"""The machine, a job on it, a case, and the rows that it gives. For gpu.py."""

from __future__ import annotations

import importlib.metadata
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fsdp_jobs.config.hydra import merge_overrides
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.processes import all_processes, command_of
from fsdp_jobs.run.tail import last_lines, read_json_lines
from fsdp_jobs.run.verdict import Verdict

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "benchmarks" / "gpu_programs"
EXAMPLES = ROOT / "examples"
HARDWARE = ROOT / "conf" / "hardware"
GIB = 2**30
ACCELERATE = ("accelerate", "transformers")  # packages
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


def batch(samples: int) -> tuple[str, str]:
    return f"data.micro_batch={samples}", f"data.global_batch={samples}"


SIZES = {
    "160m": ("model=llama_160m", "data.vocab_size=256", "data.seq_len=1024"),
    "1b": ("model=llama_1b", "data.vocab_size=128256", "data.seq_len=2048"),
    "3b": (*SHAPE_3B, "data.vocab_size=128256", "data.seq_len=2048"),
    "8b": ("model=llama3_8b", "data.vocab_size=128256", "data.seq_len=2048"),
}
FULL = "fsdp.activation_checkpointing=full"


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
        """PASS; or how far off; `measured` where nothing is expected."""
        if self.value is None or math.isnan(self.value):
            return "FAIL"
        if not self.expected:
            return "measured"
        if self.low <= self.value <= self.high:
            return "PASS"
        bound = self.low if self.value < self.low else self.high
        word = "below" if self.value < self.low else "above"
        return f"{abs(self.value / bound - 1):.0%} {word}" if bound else f"{abs(self.value - bound):g} {word}"

    @property
    def expected(self) -> str:
        bounds = [
            f"at least {self.low:g}" * (self.low > 0 or self.high < math.inf),
            f"at most {self.high:g}" * (self.high < math.inf),
        ]
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

    def stop(self, at_once: bool = False) -> None:
        """End it as Ctrl-C does; at once, as a second one does: without a last checkpoint."""
        self.process.send_signal(signal.SIGINT)
        if at_once:
            self.until(lambda: self.events("stop_requested"), "its first Ctrl-C")
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
        named = [p for p in all_processes() if " ".join(command_of(p)).startswith(title)]
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


def version_of(package: str) -> str:
    """Return the version of an installed package; empty when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
