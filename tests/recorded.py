"""A run directory as if a job had been there: 20 steps, a failure, and hostile words wherever a run can write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import dump_config
from fsdp_jobs.plan.plan import make_plan
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.goodput import StepClock

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)> & \"quoted\" ${jinja} {{ 7 * 7 }} [/red]"


def add_line(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as f:
        f.write(json.dumps(record) + "\n")


def recorded_run(folder: Path, name: str = "recorded") -> RunDir:
    """It fails at step 12, goes back to step 10, and ends."""
    run = RunDir(folder / name)
    config = compose_job([f"name={name}", "nodes=2", "nproc_per_node=2", "fsdp=hybrid_shard", "steps=20"])
    write_atomic(run.config, dump_config(config))
    write_atomic(run.plan, make_plan(config).to_json())
    submitted = {"handle": HOSTILE, "overrides": [HOSTILE], "submitted": 100.0, "nodes": "2", "steps": 20}
    write_atomic(run.job, json.dumps(submitted))
    write_atomic(run.rank_log(0, 0, 0), f"{HOSTILE}\n")
    placed = {"strategy": "hybrid_shard", "shard_group": 2, "world_size": 4, "spares": [], "why": []}
    placed |= {"nodes": [0, 1], "hosts": [HOSTILE, "two"]}
    slow = {"node": 1, "host": HOSTILE, "cause": "compute", "own_s": 0.3, "others_s": 0.2, "others": 1}
    slow |= {"lost_s": 0.1, "step_s": 1.0, "hours_per_day": 9.6, "throttled": [HOSTILE]}
    ended = {"verdict": "done", "decision": "stop", "reason": HOSTILE}
    for time, event, details in (
        (100.0, "submitted", {"attempt": -1}),
        (101.0, "attempt_started", {}),
        (102.0, "round_started", {"round": 0, **placed}),
        (113.5, "checkpoint", {"step": 10}),
        (115.0, "round_broken", {"step": 12, "committed": 10, "why": HOSTILE}),
        (116.0, "round_started", {"round": 1, **placed}),
        (120.0, "slow_node", slow),
        (130.0, "attempt_ended", ended),
    ):
        add_line(run.events, {"time": time, "event": event, "attempt": 0, **details})
    for life, began in ((range(1, 13), 102.0), (range(11, 21), 106.0)):
        clock = StepClock(run)
        for step in life:
            values = {"loss": 5 - step / 10, "lr": 1e-3, "grad_norm": 1.0, "step_s": 1.0, "tokens_per_s": 100.0}
            values |= {"checkpoint_stall_s": 0.0, **clock.add(step, began + step, 1.0, 0.0)}
            add_line(run.metrics, {"step": step, **values, "attempt": 0, "time": began + step})
    return run


def of_sweep(run: RunDir, sweep: str, overrides: Sequence[str], fixed: Sequence[str] = ()) -> RunDir:
    """Make a run one of a sweep's, as its submission does."""
    settings = {"name": sweep, "objective": "loss", "direction": "minimize", "parallelism": 0}
    about = {**settings, "fixed": list(fixed), "overrides": list(overrides)}
    write_atomic(run.job, json.dumps({**run.read_job(), "sweep": about}))
    return run
