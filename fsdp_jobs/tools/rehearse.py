"""Rehearse a real fault with the user's own configuration, scaled down to this machine. No torch."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import psutil

from fsdp_jobs.checkpoints import catalog
from fsdp_jobs.config.clusters import LocalClusterConfig
from fsdp_jobs.config.errors import BadInput, JobFailed
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.resolve import node_range
from fsdp_jobs.config.schema import JobConfig, LlamaConfig
from fsdp_jobs.config.terminal import say
from fsdp_jobs.plan.layout import partners
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import as_written, write_atomic
from fsdp_jobs.run.processes import all_processes, command_of
from fsdp_jobs.run.tail import newest_json_lines, read_json_lines
from fsdp_jobs.run.threads import wait_until
from fsdp_jobs.run.verdict import Verdict
from fsdp_jobs.submit import submit as submission
from fsdp_jobs.submit.submitted import job_has_ended, kill
from fsdp_jobs.tiers.memory.slots import slots_in

FAULTS = {
    "kill_node": "SIGKILL to a node's agent; its ranks die with it",
    "kill_rank": "SIGKILL to one rank",
    "hang_node": "a node hangs for longer than the heartbeat's timeout, then continues",
    "preempt": "SIGTERM to one node: all ranks save and exit, and the job is restarted",
    "corrupt_checkpoint": "a bit of the newest checkpoint flips while the job is stopped",
    "flip_bit": "a bit flips in each snapshot in a node's memory, and its ranks are killed",
    "full_memory": "a node has no more memory for snapshots, and a rank is killed",
    "lose_two_nodes": "two nodes that keep each other's snapshots are lost at once, with their memory",
    "slow_node": "a node's ranks stand still for a part of the time",
    "nan": "an infinite learning rate makes weights and gradients not finite until the job ends; then as before",
}
_OF_SNAPSHOTS = ("flip_bit", "full_memory")
_STEPS, _EVERY, _FAULT_AT = 60, 10, 25
_MANY_STEPS = 100_000  # more than are done before a slow node is detected
_TIMEOUT_S = 300.0
_ROOM = 1 << 20  # largest file, in bytes, that a node with full memory may still write: logs, a rank's checkpoint part


@dataclass(frozen=True)
class Outcome:
    """The result of a rehearsal."""

    passed: bool
    why: str
    recovery_s: float | None  # from the fault to the next step
    lost_steps: int


def scaled(config: JobConfig, fault: str) -> JobConfig:
    """Scale a job down: 2 nodes of at most 2 local ranks, or more nodes of 1; 2 thin Llama layers; short samples.

    Everything that recovery depends on stays: strategy, checkpointing, elastic settings, data order, precision.
    """
    model, data = config.model, config.data
    if isinstance(model, LlamaConfig):
        kv, vocab = max(1, 4 * model.n_kv_heads // model.n_heads), min(model.vocab_size, 1024)
        model = replace(model, vocab_size=vocab, dim=64, ffn_dim=128, n_layers=2, n_heads=4, n_kv_heads=kv)
        if data.kind != "python_stdlib":
            data = replace(data, kind="synthetic", path=None, tokens=100_000, vocab_size=vocab)
    data = replace(data, seq_len=min(data.seq_len, 64), global_batch=min(data.global_batch, 8), micro_batch=2)
    ranks = config.nproc_per_node if isinstance(config.nproc_per_node, int) else 2
    nodes, ranks = {"lose_two_nodes": (4, 1), "slow_node": (3, 1)}.get(fault, (2, min(ranks, 2)))
    least, most = node_range(config.nodes)
    elastic = replace(config.elastic, heartbeat_timeout_s=min(config.elastic.heartbeat_timeout_s, 5.0))
    if fault == "nan":
        elastic = replace(elastic, max_skipped_updates=min(elastic.max_skipped_updates or 5, 5))
    return replace(
        config,
        name=f"{submission.REHEARSED}{fault}-{time.strftime('%Y%m%d-%H%M%S')}",
        cluster=LocalClusterConfig(),
        hardware=compose_job([]).hardware,
        model=model,
        data=data,
        nodes=f"1:{nodes}" if least < most else nodes,
        nproc_per_node=ranks,
        steps=_STEPS if fault != "slow_node" else _MANY_STEPS,
        checkpoint=replace(config.checkpoint, every_steps=_EVERY, every_minutes=0.0, dir=None),
        elastic=elastic,
        init_from=None,  # its weights are those of a larger model
        init_key_map=[],
        log_every_steps=1,
    )


def rehearse(config: JobConfig, fault: str) -> Outcome:
    """Run the scaled job, inject a fault at its 25th step, and judge whether it recovers completely.

    Raises:
        BadInput: the scaled configuration cannot be run here.
        JobFailed: the job failed before the fault.
    """
    if program := config.script or config.module:
        what = "its steps cannot be compared: only those of the built-in trainer can"
        raise BadInput.at(f"script={program}", what, "rehearse without it")
    if fault in _OF_SNAPSHOTS and not config.checkpoint.memory.every_steps:
        what = f"this job takes no snapshots in memory, which {fault} is about"
        raise BadInput.at("checkpoint.memory.every_steps=0", what, "checkpoint.memory.every_steps=1")
    (job,) = submission.prepare([scaled(config, fault)])
    run = job.run
    try:
        submission.submit([job], [[]])
        say(f"run {run.path}: training to step {_FAULT_AT}", "dim")
        _wait_until(lambda: _step(run) >= _FAULT_AT, run, f"step {_FAULT_AT} was not reached")
        say(f"step {_step(run)}: {FAULTS[fault]}", "dim")
        injected_at = time.time()
        if fault == "slow_node":
            return _slow_down(run)
        if fault in _WHILE_STOPPED:
            write_atomic(run.stop_request, "rehearsal")
            _wait_until(lambda: job_has_ended(run), None, "the job did not stop")
            _WHILE_STOPPED[fault](job)
        else:
            _inject(job, fault)
        _wait_until(lambda: Verdict.final(run) is not None, run, "the job did not end")
        return _judge(run, fault, injected_at)
    finally:
        if run.is_submitted:  # the handle of its newest submission: some faults resume the run
            kill([run.handle])


def _inject(job: submission.Prepared, fault: str) -> None:
    """Inject a fault into the processes of node 1, and of the node that holds the copies of its snapshots."""
    run = job.run
    agent = _agent(run, node=1)
    match fault:
        case "kill_node":
            agent.kill()
        case "kill_rank":
            _ranks(agent)[0].kill()
        case "preempt":
            agent.terminate()
        case "flip_bit":
            _flip_snapshots(agent)
        case "full_memory":
            for server in _fork_servers(agent):  # a limit on files in place of memory: no other process is affected
                server.rlimit(psutil.RLIMIT_FSIZE, (_ROOM, server.rlimit(psutil.RLIMIT_FSIZE)[1]))
            _ranks(agent)[0].kill()
        case "lose_two_nodes":
            started = next(events.newest_of(run, events.RoundStarted)).nodes
            other = started[partners(len(started))[started.index(1)] or 0]
            lost = [agent, _agent(run, other)]
            for process in lost:
                process.suspend()
            for folder in filter(None, map(_snapshots, lost)):
                shutil.rmtree(folder)
            for process in lost:
                process.kill()
        case "hang_node":
            processes = [agent, *agent.children(recursive=True)]
            for process in processes:
                process.suspend()
            time.sleep(job.config.elastic.heartbeat_timeout_s + 3.0)
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.resume()


def _slow_down(run: RunDir) -> Outcome:
    """Pause the ranks of node 1 for two thirds of the time, until a node is reported as slow."""
    ranks, began, began_at = _ranks(_agent(run, node=1)), _step(run), time.time()
    named: list[events.SlowNode] = []

    def is_named() -> bool:
        for rank in ranks:
            rank.suspend()
        time.sleep(0.1)
        for rank in ranks:
            rank.resume()
        named.extend(e for e in events.newest_of(run, events.SlowNode) if e.time > began_at)
        return bool(named)

    _wait_until(is_named, run, "no node was named as slow")
    why = f"after {_step(run) - began} steps and {time.time() - began_at:.0f} s: {named[0].sentence()}"
    return Outcome(named[0].node == 1, why, None, 0)


def _flip_snapshots(agent: psutil.Process) -> None:
    """Flip a bit in each sealed snapshot of a node's ranks, and kill the ranks."""
    ranks, folder = _ranks(agent), _snapshots(agent)
    assert folder is not None
    for rank in ranks:
        rank.suspend()
    _wait_until(lambda: all(slot.copied.exists() for slot in slots_in(folder)), None, "snapshots were not sealed")
    for slot in slots_in(folder):
        if (snapshot := slot.snapshot()) is not None:
            largest = max(snapshot.entries, key=lambda entry: entry.bytes)
            _flip(slot.data, largest.begin + largest.bytes // 2)
    for rank in ranks:
        rank.kill()


def _flip(file: Path, at: int) -> None:
    with file.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 1]))


def _diverge(job: submission.Prepared) -> None:
    """Resume a stopped job with an infinite learning rate; when the job has failed, resume it with its own rate."""
    again = replace(job.config, allow_config_change=True)
    _resume(replace(again, optim=replace(again.optim, lr=math.inf)))
    _wait_until(lambda: job_has_ended(job.run), None, "the job did not end")
    end = Verdict.final(job.run)
    say(f"it ended {end.verdict}: {end.reason}" if end is not None else "it ended without a verdict", "dim")
    _resume(again)


def _corrupt_checkpoint(job: submission.Prepared) -> None:
    """Flip a bit in a stopped job's newest checkpoint, and resume the job."""
    newest = catalog.find_checkpoints(job.run.checkpoints)[0]
    shard = max(newest.glob("*.distcp"), key=lambda f: f.stat().st_size)
    _flip(shard, shard.stat().st_size // 2)
    say(f"one bit of {newest.name}/{shard.name} is flipped; resuming", "dim")
    _resume(job.config)


def _resume(config: JobConfig) -> None:
    submission.submit(submission.prepare([config]), [[]])


_WHILE_STOPPED = {"corrupt_checkpoint": _corrupt_checkpoint, "nan": _diverge}


def _judge(run: RunDir, fault: str, injected_at: float) -> Outcome:
    recorded = list(events.read_events(run))
    metrics = [record for record in read_json_lines(run.metrics) if math.isfinite(record["loss"])]
    losses: dict[int, list[float]] = {}  # step -> a loss for each time that it was done
    for record in metrics:
        losses.setdefault(record["step"], []).append(record["loss"])
    worst = max((abs(b - a) / abs(b) for of_step in losses.values() for a, b in pairwise(of_step)), default=0.0)
    repeated = len(metrics) - len(losses)
    resumes = [e for e in recorded if isinstance(e, events.Resumed) and e.time > injected_at]
    resumed = resumes[-1 if fault == "nan" else 0] if resumes else None
    recovered_at = min((m["time"] for m in metrics if resumed and m["time"] > resumed.time), default=None)
    end, ends = Verdict.final(run), [e.reason for e in recorded if isinstance(e, events.AttemptEnded)]
    failed = [e.error for e in recorded if isinstance(e, events.CheckpointFailed) and e.time > injected_at]
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
    elif fault == "flip_bit" and (resumed.place != "memory" or not resumed.sent):
        why = f"resumed from {resumed.place} of step {resumed.step}, and not from another node's snapshot"
    elif fault == "full_memory" and not any("checkpoint.memory.dir" in error for error in failed):
        why = "no event reports that there is no room for snapshots"
    elif fault == "nan" and not any("the newest finite checkpoint is" in reason for reason in ends):
        why = f"it did not end with what to do about it: {ends}"
    else:
        sent = f", {resumed.sent:,} bytes of it from other nodes" if resumed.sent else ""
        passed, why = True, f"resumed from step {resumed.step} in {resumed.place}{sent}"
    return Outcome(passed, why, None if recovered_at is None else recovered_at - injected_at, repeated)


def _wait_until(condition: Callable[[], bool], run: RunDir | None, problem: str) -> None:
    """Wait for a condition while the job of `run` is active; with None, whether or not a job is active.

    Raises:
        JobFailed: the condition was not met.
    """
    wait_until(lambda: condition() or (run is not None and job_has_ended(run)), _TIMEOUT_S, 0.05)
    if not condition():
        raise JobFailed(f"{problem} within {_TIMEOUT_S:.0f} s; fsdp-jobs logs shows why")


def _step(run: RunDir) -> int:
    return int(next(newest_json_lines(run.metrics), {"step": 0})["step"])


def _agent(run: RunDir, node: int) -> psutil.Process:
    """Find a node's agent by its command line."""
    path = str(as_written(run.path))
    for process in all_processes():
        command = command_of(process)
        if path in command and "fsdp_jobs.node.agent" in command and ("--node", str(node)) in pairwise(command):
            return process
    raise JobFailed(f"node {node} of {run.name} has no agent on this machine")


def _fork_servers(agent: psutil.Process) -> list[psutil.Process]:
    return [c for c in agent.children() if any("fork server" in word for word in c.cmdline())]


def _ranks(agent: psutil.Process) -> list[psutil.Process]:
    return [rank for server in _fork_servers(agent) for rank in server.children()]


def _snapshots(agent: psutil.Process) -> Path | None:
    """Return the folder of an agent's snapshots, whose lock the agent holds."""
    locks = (Path(f.path) for f in agent.open_files())
    return next((lock.parent for lock in locks if lock.name == "lock" and "-memory-" in lock.parent.name), None)
