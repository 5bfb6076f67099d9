"""`rehearse FAULT`: the user's own configuration, scaled to this machine, suffers a fault for real. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from fsdp_jobs.checkpoints import catalog
from fsdp_jobs.config.clusters import LocalClusterConfig
from fsdp_jobs.config.errors import BadInput, JobFailed, Problem
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.resolve import node_range
from fsdp_jobs.config.schema import JobConfig, LlamaConfig
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.tail import read_json_lines
from fsdp_jobs.submit import submit as submission

FAULTS = {
    "kill_node": "SIGKILL to a node's agent; its ranks die with it",
    "kill_rank": "SIGKILL to one rank",
    "hang_node": "a node stands still for longer than the heartbeat's timeout, then wakes up",
    "preempt": "SIGTERM to one node: all save, leave, and are started again",
    "corrupt_checkpoint": "a byte of the newest checkpoint changes while the job is stopped",
}
_STEPS, _EVERY, _FAULT_AT = 60, 10, 25
_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Outcome:
    """What a rehearsal showed."""

    passed: bool
    why: str
    recovery_s: float | None  # from the fault to the next step
    lost_steps: int
    run: RunDir


def scaled(config: JobConfig, fault: str) -> JobConfig:
    """The same job in small: 2 nodes of at most 2 ranks on this machine, a Llama of 2 thin layers, short samples.

    What recovery depends on stays as it is: strategy, checkpointing, elastic settings, data order, precision.
    """
    small = compose_job([])
    model, data = config.model, config.data
    if isinstance(model, LlamaConfig):
        kv = max(1, 4 * model.n_kv_heads // model.n_heads)
        model = replace(model, vocab_size=min(model.vocab_size, 1024), dim=64, n_layers=2, n_heads=4, n_kv_heads=kv)
        model = replace(model, ffn_dim=128)
    if data.kind != "python_stdlib" and isinstance(model, LlamaConfig):
        data = replace(data, kind="synthetic", path=None, tokens=100_000, vocab_size=model.vocab_size)
    data = replace(data, seq_len=min(data.seq_len, 64), global_batch=min(data.global_batch, 8), micro_batch=2)
    ranks = config.nproc_per_node if isinstance(config.nproc_per_node, int) else 2
    elastic = replace(config.elastic, heartbeat_timeout_s=min(config.elastic.heartbeat_timeout_s, 5.0))
    return replace(
        config,
        name=f"rehearse-{fault}-{time.strftime('%Y%m%d-%H%M%S')}",
        cluster=LocalClusterConfig(),
        hardware=small.hardware,
        model=model,
        data=data,
        nodes="1:2" if node_range(config.nodes)[0] < node_range(config.nodes)[1] else 2,
        nproc_per_node=min(ranks, 2),
        steps=_STEPS,
        checkpoint=replace(config.checkpoint, every_steps=_EVERY, every_minutes=0.0, dir=None),
        elastic=elastic,
        attach=False,
        init_from=None,  # weights of a larger model
        init_key_map=[],
        log_every_steps=1,
    )


def rehearse(config: JobConfig, fault: str, say: Callable[[str], None]) -> Outcome:
    """Run the scaled job, inject the fault at its 25th step, and see whether it ends as if nothing had happened.

    Raises:
        BadInput: the scaled configuration cannot be run here.
        JobFailed: the job did not get as far as the fault.
    """
    if config.is_program:
        what = "is no trainer of ours, so that its steps cannot be compared"
        raise BadInput([Problem(f"script={config.script or config.module}", what, "rehearse without it")])
    (job,) = submission.prepare([scaled(config, fault)])
    run = job.run
    (handle,) = submission.submit([job], [[]])
    try:
        say(f"run {run.path}: training to step {_FAULT_AT}")
        _until(lambda: _step(run) >= _FAULT_AT, handle, f"step {_FAULT_AT} was not reached")
        say(f"step {_step(run)}: {FAULTS[fault]}")
        hurt_at = time.time()
        if fault == "corrupt_checkpoint":
            hurt_at = _corrupt(job, handle, say)
        else:
            _hurt(run, fault, config.elastic.heartbeat_timeout_s)
        _until(lambda: _ended(run), handle, "the job did not end")
        return _judge(run, hurt_at)
    finally:
        submission.kill([handle])


def _hurt(run: RunDir, fault: str, heartbeat_timeout_s: float) -> None:
    agent = _agent(run, node=1)
    if fault == "kill_node":
        agent.kill()
    elif fault == "kill_rank":
        _ranks(agent)[0].kill()
    elif fault == "preempt":
        agent.terminate()
    else:
        family = [agent, *agent.children(recursive=True)]
        for process in family:
            process.suspend()
        time.sleep(min(heartbeat_timeout_s, 5.0) + 3.0)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def _corrupt(job: submission.Prepared, handle: str, say: Callable[[str], None]) -> float:
    """Stop the job, damage its newest checkpoint, start it again. Returns when it was started again."""
    run = job.run
    write_atomic(run.stop_request, "rehearsal")
    _until(lambda: not submission.is_active(handle), handle, "the job did not stop", alive=False)
    newest = catalog.find_checkpoints(run.checkpoints)[0]
    shard = max(newest.glob("*.distcp"), key=lambda f: f.stat().st_size)
    with shard.open("r+b") as f:
        f.seek(shard.stat().st_size // 2)
        byte = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte[0] ^ 1]))
    say(f"one bit of {newest.name}/{shard.name} is changed; resuming")
    started = time.time()
    submission.submit(submission.prepare([job.config]), [[]])
    return started


def _judge(run: RunDir, hurt_at: float) -> Outcome:
    happened = list(events.read_events(run))
    metrics = list(read_json_lines(run.metrics))
    seen: dict[int, float] = {}
    lost, worst = 0, 0.0
    for record in metrics:
        if record["step"] in seen:
            lost += 1
            worst = max(worst, abs(record["loss"] - seen[record["step"]]) / abs(record["loss"]))
        seen[record["step"]] = record["loss"]
    after = [m["time"] for m in metrics if m["time"] > hurt_at]
    resumed = [e for e in happened if isinstance(e, events.Resumed) and e.time > hurt_at]
    back = min((t for t in after if resumed and t > resumed[0].time), default=None)
    end = next((e for e in reversed(happened) if isinstance(e, events.AttemptEnded)), None)
    if end is None or end.verdict != "done":
        why = f"the job ended {end.verdict}: {end.reason}" if end else "the job has no verdict"
    elif not resumed:
        why = "the job was done, but never resumed from a checkpoint: the fault did not hit it"
    elif sorted(seen) != list(range(1, _STEPS + 1)):
        why = f"steps are missing: {len(seen)} of {_STEPS}"
    elif worst > 1e-5:
        why = f"steps done again had other losses: off by {worst:.1e}"
    elif lost > 2 * _EVERY:
        why = f"{lost} steps were done again; a checkpoint was taken every {_EVERY}"
    else:
        return Outcome(True, f"resumed from step {resumed[0].step}", _span(hurt_at, back), lost, run)
    return Outcome(False, why, _span(hurt_at, back), lost, run)


def _span(begin: float, end: float | None) -> float | None:
    return None if end is None else end - begin


def _until(true: Callable[[], bool], handle: str, otherwise: str, alive: bool = True) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not true():
        gone = alive and not submission.is_active(handle)
        if (gone and not true()) or time.monotonic() > deadline:
            raise JobFailed(f"{otherwise} within {_TIMEOUT_S:.0f} s; fsdp-jobs logs shows why")
        time.sleep(0.05)


def _step(run: RunDir) -> int:
    return max((m["step"] for m in read_json_lines(run.metrics)), default=0)


def _ended(run: RunDir) -> bool:
    for event in events.newest_events(run):
        match event:
            case events.AttemptEnded():
                return event.decision != "requeue"
            case events.Submitted():
                return False
    return False


def _agent(run: RunDir, node: int) -> psutil.Process:
    """The agent of a node of this run, by its command line."""
    wanted = ["fsdp_jobs.elastic.agent", str(Path(run.path).resolve()), "--node", str(node)]
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if all(word in line for word in wanted):
            return process
    raise JobFailed(f"node {node} of {run.name} has no agent on this machine")


def _ranks(agent: psutil.Process) -> list[psutil.Process]:
    servers = [c for c in agent.children() if any("forkserver" in word for word in c.cmdline())]
    return [rank for server in servers for rank in server.children()]
