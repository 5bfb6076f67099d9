"""Seconds until `fsdp-jobs status` has shown many runs, beside reading everything that they have recorded.

    python benchmarks/status.py [--runs 500] [--steps 10000] [--live 50] [--turns 3]

Runs are made up: a finished or running 2-node job each, with a checkpoint every 20 steps and a failure in the middle.
Those that run (`--live`) have a live process as their supervisor, so that their launcher is asked about them.
All take turns; the process is a new one each time, as at the prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import dump_config
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.goodput import StepClock

_NAIVE = """
import sys
from fsdp_jobs.run.directory import runs_in
from fsdp_jobs.run.tail import read_json_lines
for run in runs_in(sys.argv[1]):
    for event in read_json_lines(run.events): pass
    for record in read_json_lines(run.metrics): pass
"""


def records(folder: Path, steps: int) -> tuple[str, str]:
    """Events and metrics of a run that failed in the middle, as its trainer and coordinator would have written them."""
    run, began = RunDir(folder / "template"), time.time() - steps
    run.path.mkdir(parents=True)
    events = [{"time": began, "event": "submitted", "attempt": -1}]
    lines: list[str] = []
    for life, (first, last) in enumerate(((1, steps // 2), (steps // 2 - 9, steps))):
        placed = {"nodes": [0, 1], "hosts": ["a", "b"], "world_size": 16, "strategy": "full_shard", "shard_group": 16}
        started = {"time": began + first, "event": "round_started", "attempt": 0, "round": life, **placed}
        began_at = {"time": began, "event": "attempt_started", "attempt": 0, "nodes": 2, "hosts": ["a", "b"]}
        events += [began_at] * (life == 0) + [started]
        clock = StepClock(run)
        for step in range(first, last + 1):
            values = {"loss": 4.0, "lr": 1e-3, "grad_norm": 1.0, "data_s": 0.001, "checkpoint_stall_s": 0.0}
            rates = {"step_s": 1.0, "tokens_per_s": 65536.0, "tokens_per_s_per_gpu": 4096.0, "mfu": 0.412345678}
            record = {
                "step": step,
                **values,
                **rates,
                **clock.add(step, began + step, 1.0, 0.0),
                "attempt": 0,
                "time": began + step,
            }
            lines.append(json.dumps(record) + "\n")
            if step % 20 == 0:
                saved = {"step": step, "bytes": 123456789, "seconds": 1.234567}
                events.append({"time": began + step, "event": "checkpoint", "attempt": 0, **saved})
        run.metrics.write_text("".join(lines))
        why = {"why": "node 1 (b) closed its connection: its agent is gone", "step": last, "committed": last - 10}
        events += [{"time": began + last, "event": "round_broken", "attempt": 0, **why}] * (life == 0)
    return "".join(json.dumps(e) + "\n" for e in events), "".join(lines)


def make_runs(folder: Path, runs: int, steps: int, live: int) -> None:
    """Run directories under `folder/runs`, and what the launcher remembers of them under `folder/.state`."""
    events, metrics = records(folder, steps)
    ended = {"time": time.time(), "event": "attempt_ended", "attempt": 0, "verdict": "done", "decision": "stop"}
    ended["reason"] = f"all {steps} steps are done"
    config = dump_config(compose_job([f"steps={steps}"]))
    me = {"pid": os.getpid(), "started": psutil.Process().create_time()}
    for number in range(runs):
        run = RunDir(folder / "runs" / f"run-{number:03d}")
        run.attempt(0).mkdir(parents=True)
        is_live = number >= runs - live
        app_id = f"{run.name}-260101120000-1"
        run.config.write_text(config)
        run.events.write_text(events + ("" if is_live else json.dumps(ended) + "\n"))
        run.metrics.write_text(metrics)
        handle = f"local_fsdp://fsdp_jobs/{app_id}"
        write_atomic(
            run.job,
            json.dumps({"handle": handle, "overrides": [], "nodes": "2", "steps": steps, "submission": app_id[-14:]}),
        )
        write_atomic(run.submit / "supervisor.json", json.dumps(me if is_live else {"pid": 0, "started": 0}))
        link = folder / ".state" / "fsdp_jobs" / "local" / app_id
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(run.path.resolve())


def seconds(folder: Path, *argv: str) -> tuple[float, float, str]:
    """On the clock, of the processor, and what it printed."""
    env = {**os.environ, "XDG_STATE_HOME": str(folder / ".state")}
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu, done.stdout


def arguments(about: str | None) -> argparse.Namespace:
    """How many runs of how many steps there are, how many of them live, and how often it is measured."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--live", type=int, default=50)
    parser.add_argument("--turns", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
    args = arguments(__doc__)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_runs(folder, args.runs, args.steps, args.live)
        size = sum(f.stat().st_size for f in folder.glob("runs/*/*.jsonl"))
        print(f"{args.runs} runs of {args.steps} steps, {args.live} of them running: {size / 1e6:,.0f} MB recorded")
        print("| | seconds | CPU seconds |\n|---|---:|---:|")
        found: dict[str, list[tuple[float, float]]] = {"status": [], "status --json": [], "reading everything": []}
        for _ in range(args.turns):
            for name, argv in (
                ("status", (sys.executable, "-m", "fsdp_jobs", "status")),
                ("status --json", (sys.executable, "-m", "fsdp_jobs", "status", "--json")),
                ("reading everything", (sys.executable, "-c", _NAIVE, "runs")),
            ):
                took, cpu, shown = seconds(folder, *argv)
                found[name].append((took, cpu))
                if name == "status":
                    states = [line.split()[1] for line in shown.splitlines()[1:]]
                    assert states.count("running") == args.live and len(states) == args.runs, shown[:2000]
        for name, all_ in found.items():
            ranges = (f"{min(column):.1f} to {max(column):.1f}" for column in zip(*all_, strict=True))
            print(f"| {name} | {' | '.join(ranges)} |")


if __name__ == "__main__":
    main()
