"""Rehearse a fault for real, with the user's own configuration scaled down to this machine. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
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
from fsdp_jobs.run.tail import newest_json_lines, read_json_lines
from fsdp_jobs.run.verdict import Verdict
from fsdp_jobs.submit import submit as submission
from fsdp_jobs.submit.submitted import is_active, kill

FAULTS = {
    "kill_node": "SIGKILL to a node's agent; its ranks die with it",
    "kill_rank": "SIGKILL to one rank",
    "hang_node": "a node hangs for longer than the heartbeat's timeout, then continues",
    "preempt": "SIGTERM to one node: all ranks save and exit, and the job is restarted",
    "corrupt_checkpoint": "a bit of the newest checkpoint flips while the job is stopped",
}
_STEPS, _EVERY, _FAULT_AT = 60, 10, 25
_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Outcome:
    """The result of a rehearsal."""

    passed: bool
    why: str
    recovery_s: float | None  # from the fault to the next step
    lost_steps: int


def scaled(config: JobConfig, fault: str) -> JobConfig:
    """Scale a job down: 2 nodes of at most 2 local ranks, a Llama of 2 thin layers, short samples.

    What recovery depends on stays: strategy, checkpointing, elastic settings, data order, precision.
    """
    small = compose_job([])
    model, data = config.model, config.data
    if isinstance(model, LlamaConfig):
        kv, vocab = max(1, 4 * model.n_kv_heads // model.n_heads), min(model.vocab_size, 1024)
        model = replace(model, vocab_size=vocab, dim=64, ffn_dim=128, n_layers=2, n_heads=4, n_kv_heads=kv)
        if data.kind != "python_stdlib":
            data = replace(data, kind="synthetic", path=None, tokens=100_000, vocab_size=vocab)
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
    """Run the scaled job, inject a fault at its 25th step, and judge whether it recovers completely.

    Raises:
        BadInput: the scaled configuration cannot be run here.
        JobFailed: the job did not get as far as the fault.
    """
    if program := config.script or config.module:
        what = "its steps cannot be compared: only those of the built-in trainer can"
        raise BadInput([Problem(f"script={program}", what, "rehearse without it")])
    (job,) = submission.prepare([scaled(config, fault)])
    run = job.run
    (handle,) = submission.submit([job], [[]])
    try:
        say(f"run {run.path}: training to step {_FAULT_AT}")
        _wait_until(lambda: _step(run) >= _FAULT_AT, handle, f"step {_FAULT_AT} was not reached")
        say(f"step {_step(run)}: {FAULTS[fault]}")
        injected_at = time.time()
        if fault == "corrupt_checkpoint":
            handle = _corrupt_checkpoint(job, handle, say)
        else:
            _inject(run, fault, config.elastic.heartbeat_timeout_s)
        _wait_until(lambda: Verdict.final(run) is not None, handle, "the job did not end")
        return _judge(run, injected_at)
    finally:
        kill([handle])


def _inject(run: RunDir, fault: str, heartbeat_timeout_s: float) -> None:
    """Inject a fault into the processes of node 1."""
    agent = _agent(run, node=1)
    if fault == "kill_node":
        agent.kill()
    elif fault == "kill_rank":
        _ranks(agent)[0].kill()
    elif fault == "preempt":
        agent.terminate()
    else:
        processes = [agent, *agent.children(recursive=True)]
        for process in processes:
            process.suspend()
        time.sleep(min(heartbeat_timeout_s, 5.0) + 3.0)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def _corrupt_checkpoint(job: submission.Prepared, handle: str, say: Callable[[str], None]) -> str:
    """Stop the job, flip a bit of its newest checkpoint, and resume it. Returns the new handle."""
    write_atomic(job.run.stop_request, "rehearsal")
    _wait_until(lambda: not is_active(handle), None, "the job did not stop")
    newest = catalog.find_checkpoints(job.run.checkpoints)[0]
    shard = max(newest.glob("*.distcp"), key=lambda f: f.stat().st_size)
    with shard.open("r+b") as f:
        f.seek(shard.stat().st_size // 2)
        byte = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte[0] ^ 1]))
    say(f"one bit of {newest.name}/{shard.name} is flipped; resuming")
    (resumed,) = submission.submit(submission.prepare([job.config]), [[]])
    return resumed


def _judge(run: RunDir, injected_at: float) -> Outcome:
    recorded, metrics = events.read_events(run), list(read_json_lines(run.metrics))
    losses: dict[int, list[float]] = {}  # of each step, as often as it was done
    for record in metrics:
        losses.setdefault(record["step"], []).append(record["loss"])
    worst = max((abs(b - a) / abs(b) for of_step in losses.values() for a, b in pairwise(of_step)), default=0.0)
    repeated = len(metrics) - len(losses)
    resumed = next((e for e in recorded if isinstance(e, events.Resumed) and e.time > injected_at), None)
    recovered_at = min((m["time"] for m in metrics if resumed and m["time"] > resumed.time), default=None)
    end = Verdict.final(run)
    passed = False
    if end is None or end.verdict != "done":
        why = f"the job ended {end.verdict}: {end.reason}" if end else "the job has no verdict"
    elif resumed is None:
        why = "the job was done, but never resumed from a checkpoint: the fault did not hit it"
    elif sorted(losses) != list(range(1, _STEPS + 1)):
        why = f"steps are missing: {len(losses)} of {_STEPS}"
    elif worst > 1e-5:
        why = f"repeated steps had other losses: off by {worst:.1e}"
    elif repeated > 2 * _EVERY:
        why = f"{repeated} steps were repeated; a checkpoint was saved every {_EVERY}"
    else:
        passed, why = True, f"resumed from step {resumed.step}"
    return Outcome(passed, why, None if recovered_at is None else recovered_at - injected_at, repeated)


def _wait_until(condition: Callable[[], bool], handle: str | None, problem: str) -> None:
    """Wait for a condition while the job `handle` is active; None for whether it is or not.

    Raises:
        JobFailed: it did not come about.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        has_ended = handle is not None and not is_active(handle)
        if (has_ended and not condition()) or time.monotonic() > deadline:
            raise JobFailed(f"{problem} within {_TIMEOUT_S:.0f} s; fsdp-jobs logs shows why")
        time.sleep(0.05)


def _step(run: RunDir) -> int:
    return int(next(newest_json_lines(run.metrics), {"step": 0})["step"])


def _agent(run: RunDir, node: int) -> psutil.Process:
    """Find the agent of a node by its command line."""
    words = ["fsdp_jobs.elastic.agent", str(Path(run.path).resolve()), "--node", str(node)]
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if all(word in command for word in words):
            return process
    raise JobFailed(f"node {node} of {run.name} has no agent on this machine")


def _ranks(agent: psutil.Process) -> list[psutil.Process]:
    servers = [c for c in agent.children() if any("fork server" in word for word in c.cmdline())]
    return [rank for server in servers for rank in server.children()]
