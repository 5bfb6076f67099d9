"""Programs around FSDP1, as most of them are: a rank is killed, and every step done again gives the same loss."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.integration.test_scripts import QUICK, log_of, until_said
from tests.jobs import Job, cli, job

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

_COMMON = """
import os, pathlib, sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, FullStateDictConfig, ShardingStrategy
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

def wrapped(**how):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)), nn.Linear(16, 1))
    policy = ModuleWrapPolicy({nn.Sequential})
    return FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **how)

def train(model, optimizer, step):
    time.sleep(0.05)  # else all steps are done before who counts them has seen one
    torch.manual_seed(1000 * step + dist.get_rank())
    x = torch.randn(8, 16)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item().hex()}", flush=True)
"""

_LIBRARY = """
from fsdp_jobs import job
job.init()
assert job.layout().strategy == "hybrid_shard", job.layout()
model = wrapped(device_mesh=job.mesh(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
checkpoints = job.checkpointer(model, optimizer)
for step in range(checkpoints.restore() + 1, 41):
    train(model, optimizer, step)
    job.step(step, last=step == 40)
    if job.should_stop():
        break
job.finish()
"""

_OWN = """
dist.init_process_group("gloo")
model = wrapped(sharding_strategy=ShardingStrategy.FULL_SHARD)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
folder, full = pathlib.Path("own"), sys.argv[1] == "full"
if full:
    kind, config = StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)
else:
    kind, config = StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()

def load(step):
    if full:
        state = torch.load(folder / f"{step}.pt")
        with FSDP.state_dict_type(model, kind):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optim"]))
        return
    with FSDP.state_dict_type(model, kind):
        optim = FSDP.optim_state_dict(model, optimizer)
        state = {"model": model.state_dict(), "optim": optim["state"]}
        dcp.load(state, checkpoint_id=folder / f"{step}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, optim))

def save(step):
    with FSDP.state_dict_type(model, kind, config):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        if not full:
            dcp.save({**state, "optim": state["optim"]["state"]}, checkpoint_id=folder / f"{step}")
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        if full:
            torch.save(state, folder / f"{step}.pt")
        (folder / "newest.tmp").write_text(str(step))
        (folder / "newest.tmp").rename(folder / "newest")

first = int((folder / "newest").read_text()) if (folder / "newest").exists() else 0
if first:
    if not full:
        train(model, optimizer, 0)  # the optimizer's state exists after a step
    load(first)
for step in range(first + 1, 41):
    train(model, optimizer, step)
    if step % 10 == 0:
        save(step)
"""


def losses(run: Job) -> dict[int, list[str]]:
    """Step -> its losses, to the bit, of all rounds."""
    found = defaultdict(list)
    for step, loss in re.findall(r"^step (\d+) loss (\S+)$", log_of(run), re.MULTILINE):
        found[int(step)].append(loss)
    found.pop(0, None)
    return found


def check(run: Job) -> None:
    assert run.wait(200).verdict == "done", run.story()
    by_step = losses(run)
    assert sorted(by_step) == list(range(1, 41))
    again = [step for step, values in by_step.items() if len(values) > 1]
    assert again and min(again) > 10, "it went on from a checkpoint"
    assert all(len(set(values)) == 1 for values in by_step.values()), by_step


def test_library_saves_and_resumes_hybrid_shards_on_the_plans_mesh(tmp_path: Path) -> None:
    (tmp_path / "guest.py").write_text(_COMMON + _LIBRARY)
    with job(tmp_path, "guest", "script=guest.py", "fsdp=hybrid_shard", *QUICK, nproc=2, tiny=False) as run:
        until_said(run, "step 17 ")
        run.ranks(1)[1].kill()
        check(run)
        (resumed,) = run.events("resumed")
        assert resumed["step"] >= 10 and resumed["world_size"] == 4
    exported = cli(tmp_path, "export", "guest")
    assert exported.returncode == 0, exported.stderr


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_program_with_state_dicts_of_fsdp1_as_it_stands(tmp_path: Path, kind: str) -> None:
    (tmp_path / "own.py").write_text(_COMMON + _OWN)
    with job(tmp_path, kind, "script=own.py", f"script_args={kind}", *QUICK, nodes="1", nproc=2, tiny=False) as run:
        until_said(run, "step 17 ")
        run.ranks(0)[1].kill()
        check(run)
