"""A gradient that is not finite changes nothing, and a state that is not finite is nothing to go on from."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_jobs.checkpoints import catalog
from fsdp_jobs.checkpoints.catalog import NOT_FINITE, Manifest
from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.config.schema import JobConfig, NoModelConfig
from fsdp_jobs.job.metrics import MetricsLog
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import lock
from fsdp_jobs.run.tail import read_json_lines
from fsdp_jobs.run.threads import in_thread, wait_until
from fsdp_jobs.train import trainer
from tests.checkpoints.saving import fill, save_steps, trained, value_of
from tests.jobs import ROOT
from tests.world import events_of, run_world, train_here

pytestmark = pytest.mark.integration


def _train(folder: str, bad_steps: tuple[int, ...], value: float, *overrides: str) -> str | list[float]:
    """Train while the last rank's gradients of some steps are not finite."""
    honest, steps = trainer.Learner.backward, 0

    def backward(self: trainer.Learner, microbatches: Any) -> Any:
        nonlocal steps
        steps += 1
        is_bad = steps in bad_steps and dist.get_rank() == dist.get_world_size() - 1

        def spoil(_module: nn.Module, _args: Any, logits: Tensor) -> None:
            logits.register_hook(lambda gradient: gradient * value)

        hook = self.model.register_forward_hook(spoil) if is_bad else None
        loss = honest(self, microbatches)
        if hook is not None:
            hook.remove()
        return loss

    trainer.Learner.backward = backward  # type: ignore[method-assign]
    given = ["steps=8", "checkpoint.every_steps=2", "checkpoint.keep=0", "optim.decay_steps=8"]
    try:
        return train_here(folder, [*given, *overrides])
    except JobFailed as e:
        return str(e)


def _manifests(folder: Path) -> dict[int, Manifest]:
    return {catalog.step_of(f): Manifest.read(f) for f in catalog.find_checkpoints(folder / "checkpoints")}


@pytest.mark.parametrize(
    ("value", "overrides"),
    [
        (math.nan, []),
        (math.inf, ["optim.grad_clip_norm=0"]),
        (math.nan, ["fsdp.cpu_offload=true"]),
        (math.nan, ["fsdp=no_shard"]),
        (math.inf, ["fsdp.param_dtype=fp16"]),
        (math.nan, ["fsdp.master_dtype=bf16_stochastic"]),
    ],
)
def test_one_bad_gradient_skips_one_update(tmp_path: Path, value: float, overrides: list[str]) -> None:
    losses = run_world(2, _train, str(tmp_path), (5,), value, *overrides)[0]
    assert len(losses) == 8 and all(map(math.isfinite, losses)), losses
    lines = {m["step"]: m for m in read_json_lines(RunDir(tmp_path).metrics)}
    assert [s for s, m in lines.items() if "skipped_updates" in m] == [5]
    assert not math.isfinite(lines[5]["grad_norm"]) and math.isfinite(lines[6]["grad_norm"])
    manifests = _manifests(tmp_path)
    assert sorted(manifests) == [2, 4, 6, 8] and all(m.finite for m in manifests.values())


def test_gradients_that_stay_bad_end_the_run_at_the_last_finite_checkpoint(tmp_path: Path) -> None:
    said = run_world(2, _train, str(tmp_path), tuple(range(4, 99)), math.nan, "elastic.max_skipped_updates=3")
    assert all("the newest finite checkpoint is of step" in s and "3 steps in a row" in s for s in said), said
    assert all(m.finite for m in _manifests(tmp_path).values())


def _save_not_finite(folder: str, value: float) -> Any:
    checkpoints = trained(folder, keep=2)
    save_steps(checkpoints, 2, 4)
    for step in (6, 8, 10):
        fill(checkpoints, value)
        checkpoints.save(step, block=True)
        assert checkpoints.committed_step == 4
    with pytest.raises(JobFailed, match=NOT_FINITE):
        checkpoints.close()
    again = trained(folder, "0-1", keep=2)
    assert again.restore() == 4 and value_of(again) == 4.0
    save_steps(again, 6)
    again.close()
    return checkpoints.failure


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_state_that_is_not_finite_is_kept_and_passed_over(tmp_path: Path, value: float) -> None:
    failure = run_world(2, _save_not_finite, str(tmp_path), value)[0]
    assert "checkpoint of step 10 failed" in failure and "model.weight" in failure, failure
    assert {step: m.finite for step, m in _manifests(tmp_path).items()} == {10: False, 6: True, 4: True}
    skipped = events_of(RunDir(tmp_path), "checkpoint_skipped")
    assert [(e["checkpoint"], e["why"]) for e in skipped] == [("step-00000010", [NOT_FINITE])]


def _save_complex(folder: str) -> str | None:
    model = nn.Linear(8, 8).to(torch.complex64)
    checkpoints = trained(folder, model=model)
    fill(checkpoints, complex(1.0, math.nan))
    checkpoints.save(1, block=True)
    return checkpoints.failure


def test_a_complex_number_is_finite_if_both_its_parts_are(tmp_path: Path) -> None:
    assert "model.weight" in (run_world(2, _save_complex, str(tmp_path))[0] or "")


def test_a_loss_far_above_the_others_is_an_event(tmp_path: Path) -> None:
    log = run_world(1, _log, str(tmp_path))
    assert log == [None]
    (event,) = events_of(RunDir(tmp_path), "loss_spike")
    assert event["step"] == 50 and event["loss"] == 9.0 and event["deviations"] > 6
    steps = [line["step"] for line in read_json_lines(RunDir(tmp_path).metrics)]
    assert steps == [*range(1, 60)], "a value that a program calls `step` is not the line's"


def _log(folder: str) -> None:
    sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]  # packages that cannot be imported
    log = MetricsLog(RunDir(folder), 0, JobConfig(script="p.py", model=NoModelConfig()), torch.device("cpu"))
    for step in range(1, 60):
        loss = 9.0 if step == 50 else 2.0 + 0.1 * math.sin(step) - step / 100
        log.log(step, 0.0, 1, 0.0, {"loss": loss, "step_s": 1.0, "checkpoint_stall_s": 0.0, "step": 7})
    (RunDir(folder).path / "stepped").touch()
    log.close()
    assert log.rests_until == math.inf, "broken packages are tried once"
    (RunDir(folder).path / "done").write_text(json.dumps(len(log.losses)))


def test_steps_go_on_while_the_file_system_hangs_and_their_lines_follow(tmp_path: Path) -> None:
    metrics = RunDir(tmp_path).metrics
    with metrics.open("a") as held:
        lock(held.fileno())  # the rank's own writes wait for it
        run = in_thread(lambda: run_world(1, _log, str(tmp_path)))
        assert wait_until((tmp_path / "stepped").exists, 60), "all steps are logged"
        assert not metrics.read_text()
    run.result()
    assert [line["step"] for line in read_json_lines(metrics)] == [*range(1, 60)]


def test_a_program_may_log_its_last_step_in_a_function_of_atexit(tmp_path: Path) -> None:
    store = "store=dist.HashStore(), rank=0, world_size=1"
    world = f"import torch.distributed as dist; dist.init_process_group('gloo', {store})"
    ends = f"import atexit; from tests.train.test_finite import _repeat; atexit.register(_repeat, {str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", f"{world}; {ends}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    assert [line["step"] for line in read_json_lines(RunDir(tmp_path).metrics)] == [1, 2, 3, 4, 3, 4]


def test_tensorboard_shows_a_repeated_step_once(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_world(1, _repeat, str(tmp_path))
    board = events.EventAccumulator(str(RunDir(tmp_path).tensorboard))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("loss")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def _repeat(folder: str) -> None:
    for loss, steps in ((1.0, (1, 2, 3, 4)), (2.0, (3, 4))):
        log = MetricsLog(RunDir(folder), 0, JobConfig(script="p.py", model=NoModelConfig()), torch.device("cpu"))
        for step in steps:
            log.log(step, 0.0, 1, 0.0, {"loss": loss, "step_s": 1.0, "checkpoint_stall_s": 0.0})
        log.close()
