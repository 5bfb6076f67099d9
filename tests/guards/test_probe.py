"""All ranks compute the gradients of one microbatch: who gets others is named, and nothing else changes."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.resolve import probe_every_steps
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from tests.world import events_of, run_world, train_here

pytestmark = pytest.mark.integration

WRONG = ("model=custom", "model._target_=tests.models.computes_wrong", "model.wrap_classes=[Block]")
OPTIONS: tuple[tuple[str, ...], ...] = (
    ("fsdp=full_shard", "fsdp.activation_checkpointing=full", "fsdp.chunked_loss=true"),
    ("fsdp=hybrid_shard", "fsdp.shard_group=2", "fsdp.param_dtype=bf16", "model.tie_embeddings=true"),
    ("fsdp=shard_grad_op", "fsdp.param_dtype=fp16"),
    ("fsdp=no_shard", "fsdp.reduce_dtype=bf16"),
)


def _with_and_without(folder: str) -> list[tuple[list[float], list[float]]]:
    found = []
    for i, option in enumerate(OPTIONS):
        both = [f"steps=6 data.micro_batch=1 integrity.probe_every_steps={n}".split() for n in (0, 2)]
        losses = [train_here(f"{folder}/{i}-{n}", [*asked, *option], nodes=2) for n, asked in enumerate(both)]
        found.append((losses[0], losses[1]))
    return found


def test_a_probe_changes_no_loss_and_finds_nothing_wrong(tmp_path: Path) -> None:
    for option, (without, probed) in zip(OPTIONS, run_world(4, _with_and_without, str(tmp_path))[0], strict=True):
        assert probed == without and len(probed) == 6, option
    assert not [run for run in tmp_path.iterdir() if events_of(RunDir(run), "corruption")]


def _train(folder: str, wrong: str, *overrides: str) -> None:
    os.environ["WRONG"] = wrong
    run = RunDir(folder)
    if os.environ["RANK"] == "0":
        run.path.mkdir(exist_ok=True)
        events.record(run, 0, events.RoundStarted([4, 7, 9], ["a", "b", "c"], "full_shard", 3, 3))
    try:
        train_here(folder, [*WRONG, "steps=9", "integrity.probe_every_steps=2", *overrides])
    except Exception as e:
        (run.path / f"rank-{os.environ['RANK']}").write_text(type(e).__name__)
        raise


def _found(run: Path) -> list[dict[str, Any]]:
    return events_of(RunDir(run), "corruption")


def test_a_rank_that_begins_to_compute_wrong_is_named_and_ends(tmp_path: Path) -> None:
    told, excluded = tmp_path / "told", tmp_path / "excluded"
    run_world(3, _train, str(told), "1:9")
    (found,) = _found(told)
    assert (found["finding"], found["ranks"], found["nodes"], found["hosts"]) == ("computed", [1], [7], ["b"])
    assert found["agreed"] >= 2 and "rank 1 on node 7 (b, local rank 0)" in found["why"], found
    assert any("blocks" in name for name in found["tensors"]), found
    with pytest.raises(AssertionError):
        run_world(3, _train, str(excluded), "1:9", "integrity.action=exclude")
    assert [f.name for f in excluded.glob("rank-*") if f.read_text() == "ComputesWrong"] == ["rank-1"]
    assert RunDir(excluded).excluded_hosts().keys() == {"b"}


def test_while_the_list_of_excluded_machines_is_edited_the_wrong_rank_still_ends(tmp_path: Path) -> None:
    (tmp_path / "excluded.json").write_text("{")
    with pytest.raises(AssertionError):
        run_world(3, _train, str(tmp_path), "1:9", "integrity.action=exclude")
    ends = {f.name: f.read_text() for f in tmp_path.glob("rank-*")}
    assert ends["rank-1"] == "ComputesWrong" and "BadInput" not in ends.values(), ends
    assert not events_of(RunDir(tmp_path), "machine_excluded")


@pytest.mark.parametrize("action", ["report", "exclude"])
def test_who_differs_from_the_beginning_is_only_told_of(tmp_path: Path, action: str) -> None:
    run_world(3, _train, str(tmp_path / "run"), "2:1", f"integrity.action={action}")
    (found,) = _found(tmp_path / "run")
    assert (found["ranks"], found["agreed"]) == ([2], -1) and "first probe" in found["why"], found
    assert not RunDir(tmp_path / "run").excluded_hosts()


def test_two_ranks_that_differ_are_both_named(tmp_path: Path) -> None:
    run_world(2, _train, str(tmp_path / "run"), "1:9", "integrity.action=restart")
    (found,) = _found(tmp_path / "run")
    assert (found["finding"], found["ranks"]) == ("unknown", [0, 1]), found


def test_kernels_that_never_add_alike_are_no_fault(tmp_path: Path) -> None:
    run_world(3, _train, str(tmp_path / "run"), "all:1")
    assert not _found(tmp_path / "run")


STATE = ("model=custom", "model._target_=tests.models.averages", "model.wrap_classes=[Block]", "data.micro_batch=1")


def _with_state(folder: str, averages: str) -> list[list[float]]:
    os.environ["AVERAGES"] = averages
    losses = []
    for every in (0, 2):
        random.seed(int(os.environ["RANK"]))
        np.random.seed(int(os.environ["RANK"]))
        asked = (*STATE, "steps=7", f"integrity.probe_every_steps={every}")
        losses.append(train_here(f"{folder}/{every}", asked, nodes=4))
    return losses


@pytest.mark.parametrize("averages", ["of a rank", "none"])
def test_state_of_a_model_is_kept_and_accuses_nobody(tmp_path: Path, averages: str) -> None:
    without, probed = run_world(4, _with_state, str(tmp_path), averages)[0]
    assert probed == without and len(probed) == 7
    assert not _found(tmp_path / "2")


def test_models_of_the_users_own_are_probed_when_that_is_asked_for() -> None:
    own = ("model=custom", "model._target_=tests.models.tiny", "model.wrap_classes=[Block]")
    asked = ([], own, [*own, "integrity.probe_every_steps=50"], ["integrity.probe_every_steps=0"])
    assert [probe_every_steps(compose_job([*overrides])) for overrides in asked] == [1000, 0, 50, 0]
