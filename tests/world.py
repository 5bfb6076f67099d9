"""A world of ranks in real processes with gloo between them, for tests of what runs inside a rank."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from queue import Empty
from typing import Any

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import JobConfig, dump_config
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, LAYOUT_ENV, ROUND_ENV, RUN_DIR_ENV
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.processes import die_with_parent
from fsdp_jobs.run.tail import read_json_lines

TINY_LLAMA = ("model.dim=64", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=96")
TINY_TASK = (
    "data=synthetic",
    "data.tokens=40000",
    "data.seq_len=32",
    "data.global_batch=8",
    "data.micro_batch=2",
    "data.workers=0",
    "optim.warmup_steps=2",
    "checkpoint.every_steps=0",
)
TINY = (*TINY_LLAMA, *TINY_TASK)
PRELOADED = ["tests.composed", "fsdp_jobs.train.trainer", "fsdp_jobs.plan.plan", "torch.utils.tensorboard"]
# A job that is only to be kept alive leaves the cores to others: 10 microbatches a second.
PACED = ("model=custom", "model._target_=tests.models.paced", "model.wrap_classes=[Block]")


def tiny_for(overrides: Sequence[str]) -> tuple[str, ...]:
    """What makes a job tiny: its task, and the Llama unless it has a model of its own."""
    return TINY_TASK if "model=custom" in overrides else TINY


def run_world(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(*args)` in `ranks` processes with a process group; returns what each returned.

    A rank that raises fails the test with its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    queue = context.Queue()
    with meeting_place() as meeting:
        processes = [
            context.Process(target=_rank, args=(r, ranks, meeting, queue, function, args)) for r in range(ranks)
        ]
        for process in processes:
            process.start()
        results: dict[int, Any] = {}
        try:
            for _ in range(ranks):
                rank, ok, value = _next_result(queue, processes)
                assert ok, f"rank {rank}:\n{value}"
                results[rank] = value
        finally:
            for process in processes:
                if len(results) < ranks:
                    process.kill()
                process.join(30)
    return [results[r] for r in range(ranks)]


def _next_result(queue: Any, processes: Sequence[Any]) -> tuple[int, bool, Any]:
    """What a rank returned; a rank that dies before it has a result fails the test at once."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        died = [r for r, process in enumerate(processes) if process.exitcode]
        try:
            return queue.get(timeout=1)
        except Empty:
            assert not died, f"ranks {died} died without a result"
    raise AssertionError("no result from a rank within 240 s")


@contextmanager
def meeting_place() -> Iterator[str]:
    """A file through which ranks find each other; a port that is free now may be taken when it is used."""
    with tempfile.TemporaryDirectory() as folder:
        yield f"{folder}/ranks"


def _rank(rank: int, ranks: int, meeting: str, queue: Any, function: Callable[..., Any], args: Sequence[Any]) -> None:
    die_with_parent()
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    try:
        store = dist.FileStore(meeting, ranks)
        dist.init_process_group("gloo", timeout=timedelta(seconds=120), store=store, rank=rank, world_size=ranks)
        value = function(*args)
        dist.barrier()
        queue.put((rank, True, value))
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
        sys.exit(1)


def train_here(run_dir: str, overrides: Sequence[str], nodes: int = 1) -> list[float]:
    """Train in the present process group; returns the losses by step. Every rank calls this."""
    import torch.distributed as dist

    from fsdp_jobs.plan.plan import make_plan

    world = dist.get_world_size()
    config = compose_job([*tiny_for(overrides), f"nodes={nodes}", f"nproc_per_node={world // nodes}", *overrides])
    no_shard = config.fsdp.strategy == "no_shard"
    by_hand = Layout("no_shard" if no_shard else "full_shard", world, 1 if no_shard else world)
    return train_as(run_dir, config, by_hand if "model=custom" in overrides else make_plan(config).layout)


def undisturbed_losses(folder: Path, nodes: int, ranks: int, *overrides: str) -> dict[int, float]:
    """Step -> loss of a job of so many nodes, and ranks in all, that has no launcher, agents or faults."""
    losses = run_world(ranks, train_here, str(folder / "undisturbed"), overrides, nodes)[0]
    return dict(enumerate(losses, start=1))


def train_as(run_dir: str, config: JobConfig, layout: Layout) -> list[float]:
    """Train a configuration in the present process group, as `train_here` does."""
    import torch.distributed as dist

    from fsdp_jobs import job
    from fsdp_jobs.train import trainer

    run, restart = RunDir(run_dir), [uuid.uuid4().hex]
    if dist.get_rank() == 0:
        run.path.mkdir(parents=True, exist_ok=True)
        write_atomic(run.config, dump_config(config))
    dist.broadcast_object_list(restart, src=0)
    os.environ |= {RUN_DIR_ENV: run_dir, LAYOUT_ENV: layout.to_json(), ATTEMPT_ENV: "0", ROUND_ENV: restart[0]}
    try:
        assert trainer.main() == 0
    finally:
        job._job = None  # a job that failed is over, too
    dist.barrier()
    return losses_of(run)


def losses_of(run: RunDir) -> list[float]:
    """The loss of each step, the newest where a step was done again."""
    by_step = {m["step"]: m["loss"] for m in read_json_lines(run.metrics)}
    return [by_step[s] for s in sorted(by_step)]


def events_of(run: RunDir, name: str) -> list[dict[str, Any]]:
    return [e for e in read_json_lines(run.events) if e["event"] == name]


def flip_byte(file: Path) -> None:
    """Damage one byte in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)
