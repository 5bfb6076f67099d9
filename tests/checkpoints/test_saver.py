"""Asynchronous copies of a state, one after the other."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from fsdp_jobs.checkpoints import catalog, checkpointer, storage
from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.goodput import slowest_save_s
from tests.checkpoints.saving import fill, save_steps, trained, value_of
from tests.jobs import ROOT
from tests.nfs import nfs_client
from tests.world import run_world

pytestmark = pytest.mark.integration


def _five_saves(folder: str, mode: str, shard_group: int) -> None:
    checkpoints = trained(folder, async_mode=mode, keep=0, shard_group=shard_group)
    for step in range(1, 6):
        fill(checkpoints, float(step))
        checkpoints.save(step)
        checkpoints.before_update()
    checkpoints.finish()
    assert not checkpoints.failure
    checkpoints.close()
    again = trained(folder, "0-1", shard_group=shard_group)
    assert (again.restore(), value_of(again)) == (5, 5.0)


@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize(("ranks", "shard_group"), [(2, 0), (4, 2)])
def test_five_asynchronous_saves_in_a_row(tmp_path: Path, mode: str, ranks: int, shard_group: int) -> None:
    run_world(ranks, _five_saves, str(tmp_path), mode, shard_group)
    saved = catalog.find_checkpoints(tmp_path / "checkpoints")
    assert [catalog.step_of(folder) for folder in saved] == [5, 4, 3, 2, 1]
    assert all(catalog.verify(folder) == [] for folder in saved)


def _save_while_the_clock_is_set(folder: str) -> None:
    checkpoints, clock, is_finite = trained(folder), time.time, storage.is_finite

    def set_forward(*args: Any) -> bool:
        time.time = lambda: clock() + 7200
        return is_finite(*args)

    storage.is_finite = set_forward
    save_steps(checkpoints, 2)


def test_a_clock_that_is_set_during_a_save_makes_it_no_slower(tmp_path: Path) -> None:
    """Kubernetes waits twice as long as the slowest save took before it kills a pod."""
    run_world(1, _save_while_the_clock_is_set, str(tmp_path))
    assert 0 < slowest_save_s(RunDir(tmp_path)) < 60


def _save_onto_nfs(folder: str) -> str | None:
    checkpoints, made = trained(folder), Path.mkdir

    def make_late(path: Path, *args: Any, **keys: Any) -> None:
        time.sleep(0.3)
        made(path, *args, **keys)

    Path.mkdir = make_late  # type: ignore[method-assign]
    with nfs_client() if dist.get_rank() == 1 else nullcontext():
        save_steps(checkpoints, 1)
        checkpoints.close()
    return checkpoints.failure


def test_no_rank_looks_for_a_saves_folder_before_it_is_made_simulated_nfs(tmp_path: Path) -> None:
    assert run_world(2, _save_onto_nfs, str(tmp_path)) == [None, None]


def _plan_twice(folder: str) -> None:
    got = list[list[int]]()
    dedup = DefaultSavePlanner._dedup_save_plans

    def noted(planner: DefaultSavePlanner, plans: list[SavePlan]) -> list[SavePlan]:
        got.append([len(plan.items) for plan in plans])
        return dedup(planner, plans)

    DefaultSavePlanner._dedup_save_plans = noted  # type: ignore[method-assign]
    checkpoints = trained(folder, shard_group=2)
    checkpoints.state.live()
    save_steps(checkpoints, 1, 2)
    if dist.get_rank() == 0:
        (of_ranks,) = got  # once for both saves
        shared, own = 2 + 2 * 3, 3  # weight, bias and AdamW's three of each; values, hyperparameters, random state
        assert sum(of_ranks) == 2 * shared + 4 * own, "each that replicas share once for each shard"
        assert max(of_ranks) < shared + own
    checkpoints.close()
    again = trained(folder, "0-1", shard_group=2)
    assert (again.restore(), value_of(again)) == (2, 2.0)


def test_a_rank_plans_only_its_replicas_part_of_what_replicas_share(tmp_path: Path) -> None:
    """Rank 0 gets the plans of all: a thousand replicas would send it each tensor a thousand times."""
    run_world(4, _plan_twice, str(tmp_path))
    (newest, _) = catalog.find_checkpoints(tmp_path / "checkpoints")
    metadata = storage.SafeReader(newest).read_metadata()
    assert metadata.planner_data.keys() == metadata.state_dict_metadata.keys()
    assert len(metadata.state_dict_metadata) == 2 + 2 * 3 + 2 + 4


def _last_save_in_an_outage(folder: str, lasts: int) -> str | None:
    checkpoints, outages = trained(folder), iter(range(lasts))
    checkpointer._AGAIN_S, write = 0.05, storage.CommittingWriter.write_data

    def write_or_fail(writer: storage.CommittingWriter, *args: Any) -> Any:
        if dist.get_rank() == 1 and next(outages, None) is not None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return write(writer, *args)

    storage.CommittingWriter.write_data = write_or_fail  # type: ignore[method-assign]
    checkpoints.save(7, block=True)
    with suppress(JobFailed):
        checkpoints.close()
    return checkpoints.failure


def test_a_last_save_waits_for_storage_that_is_away(tmp_path: Path) -> None:
    """A job that a file server's outage met at its end had failed, one that was preempted was not requeued."""
    assert run_world(2, _last_save_in_an_outage, str(tmp_path / "short"), 3) == [None, None]
    (saved,) = catalog.find_checkpoints(tmp_path / "short" / "checkpoints")
    assert catalog.step_of(saved) == 7 and catalog.verify(saved) == []
    (told, _) = run_world(2, _last_save_in_an_outage, str(tmp_path / "long"), 99)
    assert told is not None and "Check the disk or mount" in told


_SAVES_AT_EXIT = """
import atexit, sys, torch
from fsdp_jobs import job
job.init()
model = torch.nn.Linear(2, 2)
checkpoints = job.checkpointer(model, torch.optim.SGD(model.parameters(), lr=0.1))
checkpoints.restore()
checkpoints.saver.mode = sys.argv[1]
checkpoints.save(1, block=sys.argv[1] == "process")
atexit.register(checkpoints.save, 2, block=sys.argv[1] == "thread")
"""


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_a_program_may_save_in_a_function_of_atexit(tmp_path: Path, mode: str) -> None:
    """Threads begin nothing more there, nor does DCP's process."""
    (tmp_path / "program.py").write_text(_SAVES_AT_EXIT)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "program.py", mode]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    saved = catalog.find_checkpoints(RunDir(tmp_path / "runs" / "program").checkpoints)
    assert [catalog.step_of(folder) for folder in saved] == [2, 1]
