"""The small library for programs of one's own: its page, and what it promises of order and state."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import dump_config
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, LAYOUT_ENV, ROUND_ENV, RUN_DIR_ENV
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.tail import read_json_lines
from tests.jobs import ROOT, environment
from tests.world import run_world


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.integration
def test_the_page_runs_alone_and_goes_on_under_torchrun(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guides/library.md").read_text()
    program = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    (tmp_path / "page.py").write_text(program.replace("61", "41"))
    said = run(tmp_path, sys.executable, "page.py")
    assert "each parameter is in 1 parts" in said
    assert [int(n) for n in re.findall(r"^step (\d+)  loss", said, re.MULTILINE)] == list(range(1, 41))
    assert re.search(r"^step 40  loss .* lr .*validation", said, re.MULTILINE), said[-500:]
    (tmp_path / "page.py").write_text(program)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    said = run(tmp_path, *torchrun, "page.py")
    assert "resumed from step 40 on 2 ranks" in said and "each parameter is in 2 parts" in said
    assert [int(n) for n in re.findall(r"^step (\d+)  loss", said, re.MULTILINE)] == list(range(41, 61))
    assert sorted(f.name for f in (tmp_path / "runs/page/checkpoints").iterdir())[-1] == "step-00000060"


_STATE = """
import os, signal, sys
import torch
from fsdp_jobs import job

class Diary:
    def __init__(self): self.lines = []
    def state_dict(self): return {"lines": self.lines}
    def load_state_dict(self, state): self.lines = state["lines"]

job.init()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
diary = Diary()
inputs = torch.ones(1, 4)
torch.set_default_device("meta")  # as programs set "cuda": the library's own tensors stay in host memory
checkpoints = job.checkpointer(model, optimizer, diary=diary)
first = checkpoints.restore()
print("began", first, diary.lines, optimizer.param_groups[0]["lr"], flush=True)
for number in range(first + 1, first + 100):
    model(inputs).sum().backward()
    optimizer.step()
    diary.lines.append("x" * number)
    if number == first + 3:
        os.kill(os.getpid(), signal.SIGTERM)
    job.step(number)
    if job.should_stop():
        break
print("left", number, flush=True)
job.finish()
"""


@pytest.mark.integration
def test_a_signal_without_a_launcher_saves_all_that_has_a_state(tmp_path: Path) -> None:
    (tmp_path / "state.py").write_text(_STATE)
    said = run(tmp_path, sys.executable, "state.py", "0.5")
    assert "began 0 [] 0.5" in said and "left 4" in said, said
    said = run(tmp_path, sys.executable, "state.py", "0.1")
    assert "began 4 ['x', 'xx', 'xxx', 'xxxx'] 0.5" in said, said
    events = [json.loads(line)["event"] for line in (tmp_path / "runs/state/events.jsonl").read_text().splitlines()]
    assert events == ["checkpoint", "resumed", "checkpoint"]


def test_each_sample_comes_once_an_epoch_whatever_becomes_of_the_world() -> None:
    from fsdp_jobs.job.sampler import ElasticSampler

    samples, batch, seen, by_step = range(60), 12, Counter[int](), []
    step = 0
    for world, steps in ((1, 2), (5, 4), (3, 3), (12, 1)):
        for _ in range(steps):
            taken = []
            for rank in range(world):
                sampler = ElasticSampler(samples, batch, seed=3)
                sampler.rank, sampler.world = rank, world
                taken += next(iter(sampler.after(step)))
            seen.update(taken)
            by_step.append(taken)
            step += 1
    assert seen == Counter(dict.fromkeys(samples, 2)), "two epochs of five steps"
    alone = iter(ElasticSampler(samples, batch, seed=3))
    assert [next(alone) for _ in range(step)] == by_step, "the same samples at each step"
    assert by_step[:5] != by_step[5:]


def test_workers_of_a_loader_are_seeded_by_rank_and_step() -> None:
    from fsdp_jobs.job.sampler import ElasticSampler

    seeds = []
    for rank in range(4):
        sampler = ElasticSampler(range(60), 12)
        sampler.rank, sampler.world = rank, 4
        seeds += [sampler.after(step).generator.initial_seed() for step in (0, 7)]
    assert len(set(seeds)) == 8
    assert ElasticSampler(range(60), 12).after(7).generator.initial_seed() == seeds[1]


def test_a_batch_that_is_too_small_for_the_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    from fsdp_jobs.job.sampler import ElasticSampler

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(ValueError, match="batch=3 leaves some of 4 ranks without"):
        ElasticSampler(range(9), 3)


def _sharded_by_hand() -> None:
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from fsdp_jobs.job.sharding import build_mesh

    mesh = build_mesh(Layout("no_shard", 2, 1), "cpu")
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    assert mesh["shard"].size() == 1 and model.weight.to_local().shape == (4, 4)


def test_a_program_that_shards_over_the_mesh_of_no_shard_keeps_whole_weights() -> None:
    """Its only dimension was `replicate`, and `fully_shard` took that one for its shards."""
    run_world(2, _sharded_by_hand)


def _steps(folder: str) -> list[float]:
    from fsdp_jobs import job

    run = RunDir(folder)
    write_atomic(run.config, dump_config(compose_job(["script=program.py"])))
    os.environ |= {RUN_DIR_ENV: folder, LAYOUT_ENV: Layout("full_shard", 1, 1).to_json()}
    os.environ |= {ATTEMPT_ENV: "0", ROUND_ENV: "0"}
    job.init()
    with pytest.raises(TypeError, match="note='warm' is not a number"):
        job.log(note="warm")  # type: ignore[arg-type]
    done = []
    for number in np.arange(1, 4):
        time.sleep(1)
        job.step(number, last=number == 3)
        done.append(time.time())
    assert job.finish()
    assert [line["step"] for line in read_json_lines(run.metrics)] == [1, 2, 3]
    return [line["time"] - at for line, at in zip(read_json_lines(run.metrics), done, strict=True)]


@pytest.mark.integration
def test_a_line_says_when_its_step_was_done(tmp_path: Path) -> None:
    (late,) = run_world(1, _steps, str(tmp_path))
    assert all(abs(seconds) < 0.5 for seconds in late), late


def test_a_loader_that_only_knows_its_own_ranks_place_is_refused_at_the_start() -> None:
    import torch
    from torch.utils.data import DataLoader

    from fsdp_jobs import job

    class StatefulDataLoader(DataLoader):  # type: ignore[type-arg]
        """As torchdata's."""

        def state_dict(self) -> dict[str, int]:
            return {"read": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    class Loader:
        """As torchdata.nodes', which reads from its beginning if `state_dict` was called before `load_state_dict`."""

        __module__ = "torchdata.nodes.loader"
        state_dict, load_state_dict = StatefulDataLoader.state_dict, StatefulDataLoader.load_state_dict

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for loader in (StatefulDataLoader([1, 2]), Loader(), type("Mine", (Loader,), {})()):
        what = rf"loader is a {type(loader).__name__}, whose state fits one rank.*ElasticSampler"
        with pytest.raises(TypeError, match=what):
            job.checkpointer(model, optimizer, loader=loader)
    with pytest.raises(TypeError, match=r"mean is a AveragedModel, .*put several networks into one nn.Module"):
        job.checkpointer(model, optimizer, mean=torch.optim.swa_utils.AveragedModel(model))


def _unequal(_: str) -> list[bool]:
    """Rows at the end are new, and every rank has drawn its own; a second checkpointer is asked for."""
    import torch
    import torch.distributed as dist

    from fsdp_jobs.job.sharding import make_equal

    torch.manual_seed(0)
    model = torch.nn.Embedding(64, 8)
    model.codes = torch.nn.Buffer(torch.full((2, 3), dist.get_rank(), dtype=torch.int16).t())  # gloo has no such dtype
    model.turns = torch.nn.Buffer(torch.full((2,), 1j * dist.get_rank()).conj())
    model.edges = torch.nn.Buffer(torch.eye(3).to_sparse(), persistent=False)
    with torch.no_grad():
        model.weight[-1] = dist.get_rank()
    make_equal(model, dist.group.WORLD)  # type: ignore[arg-type]
    return [bool((tensor == 0).all()) for tensor in (model.weight[-1], model.codes, model.turns)]


@pytest.mark.integration
def test_ranks_begin_with_rank_0s_weights_wherever_they_differ() -> None:
    assert run_world(2, _unequal, "") == [[True] * 3] * 2


@pytest.mark.integration
def test_a_second_pass_and_a_second_checkpointer_are_spoken_of(tmp_path: Path) -> None:
    from fsdp_jobs.job.sampler import ElasticSampler

    order = ElasticSampler(range(60), 12)
    next(iter(order))
    with pytest.warns(UserWarning, match=r"begins again at step 0: call after\(step\)"):
        next(iter(order))
    program = (
        "import torch\nfrom fsdp_jobs import job\njob.init()\n"
        "a, b = (torch.nn.Linear(2, 2) for _ in range(2))\n"
        "job.checkpointer(a, torch.optim.SGD(a.parameters()))\njob.checkpointer(b, torch.optim.SGD(b.parameters()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment(tmp_path), capture_output=True)
    assert "a job has one checkpointer" in done.stderr.decode()


@pytest.mark.integration
def test_ranks_that_have_parted_cannot_join_again(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(
        "from fsdp_jobs import job\nfor _ in range(2):\n    job.init()\n    job.finish()\n"
    )
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "twice.py")
    done = subprocess.run(torchrun, cwd=tmp_path, env=environment(tmp_path), capture_output=True, timeout=100)
    assert "JobFailed: job.init() after job.finish(): call finish() once" in done.stderr.decode()
