"""What a checkpoint holds is the whole state as it was when it was saved, and comes back as it was."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fsdp_jobs.checkpoints.state import RandomState, _packed, _unpacked
from tests.checkpoints.saving import trained
from tests.world import run_world


def _draw() -> list[float]:
    return [torch.rand(()).item(), np.random.rand(), np.random.randn(), random.random(), random.gauss(0.0, 1.0)]


def test_random_numbers_go_on_where_they_were() -> None:
    _draw()  # one of a pair of normal numbers is kept for the next call: part of the state
    state = RandomState(torch.device("cpu"))
    saved = _packed("rng", state.state_dict())
    expected = _draw() + _draw()
    state.load_state_dict(_unpacked(saved))
    assert _draw() + _draw() == expected


class _Averaging(nn.Module):
    """Assigns its buffer anew at each forward, changes another in place, and has a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("seen", torch.zeros(()))
        self.words: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.5 * self.average + 0.5 * x.mean(0)
        self.seen += 1
        self.words.append("forward")
        return self.linear(x)  # type: ignore[no-any-return]

    def get_extra_state(self) -> dict[str, Any]:
        return {"words": self.words}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.words = state["words"]


class _Anew(torch.optim.SGD):
    """Assigns its state anew at each step, and counts in a Python number."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                before = self.state[p].get("mean", torch.zeros_like(p))
                self.state[p]["mean"] = before * 0.5 + (torch.zeros_like(p) if p.grad is None else p.grad)
                self.state[p]["step"] = self.state[p].get("step", 0) + 1
                self.state[p]["name"] = None


def _step(checkpoints: Any, number: int) -> None:
    model, optimizer = checkpoints.state.model, checkpoints.state.optimizer
    model(torch.full((2, 4), float(number))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _values(checkpoints: Any) -> dict[str, Any]:
    tensors, values = checkpoints.state.live()
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()}
    return {**{n: t.flatten().tolist() for n, t in whole.items()}, **values}


def _assigned_anew(folder: str, mode: str) -> None:
    checkpoints = trained(folder, optimizer=_Anew, model=_Averaging(), async_mode=mode)
    for number in range(1, 7):
        _step(checkpoints, number)
        if number % 2 == 0:
            checkpoints.save(number, block=number == 6)
    expected = _values(checkpoints)
    checkpoints.close()
    again = trained(folder, "0-1", optimizer=_Anew, model=_Averaging())
    assert again.restore() == 6
    assert _values(again) == expected
    assert expected["optim.state.linear.weight.step"] == 6
    assert expected["model._extra_state"] == {"words": ["forward"] * 6}


@pytest.mark.parametrize("mode", ["off", "thread"])
def test_what_is_assigned_anew_or_is_no_tensor_comes_back(tmp_path: Path, mode: str) -> None:
    run_world(2, _assigned_anew, str(tmp_path), mode)


def _torn(folder: str) -> None:
    checkpoints = trained(folder, model=_Averaging(), async_mode="thread")
    _step(checkpoints, 1)
    gate = threading.Event()
    stage = checkpoints.saver.stager._stage

    def late(*args: Any, **kwargs: Any) -> Any:
        gate.wait(30)
        return stage(*args, **kwargs)

    checkpoints.saver.stager._stage = late  # type: ignore[method-assign]
    checkpoints.save(1)
    checkpoints.state.model(torch.ones(2, 4))  # the next step's forward, while nothing has been copied yet
    gate.set()
    checkpoints.close()
    again = trained(folder, "0-1", model=_Averaging())
    assert again.restore() == 1
    assert again.state.model.seen.item() == 1.0  # type: ignore[union-attr, operator]


def test_the_next_forward_does_not_change_the_buffers_of_a_save(tmp_path: Path) -> None:
    run_world(1, _torn, str(tmp_path))


def _held(folder: str) -> None:
    checkpoints = trained(folder, model=_Averaging(), async_mode="thread")
    _step(checkpoints, 1)
    copied, gate = [], threading.Event()
    to_capture, save = checkpoints.state.to_capture, dcp.save

    def noted() -> Any:
        tensors, objects = to_capture()
        copied.extend(weakref.ref(tensors[name]) for name in tensors.keys() & checkpoints.state.buffers)
        return tensors, objects

    def late(*args: Any, **kwargs: Any) -> Any:
        gate.wait(30)
        return save(*args, **kwargs)

    checkpoints.state.to_capture, dcp.save = noted, late  # type: ignore[method-assign, assignment]
    checkpoints.save(1)
    checkpoints.before_update()
    gc.collect()
    assert copied and not any(ref() is not None for ref in copied), "copies on the device live until they are written"
    gate.set()
    checkpoints.close()


def test_what_a_save_was_staged_from_is_freed_while_it_is_written(tmp_path: Path) -> None:
    run_world(1, _held, str(tmp_path))


class _Odd(nn.Linear):
    def get_extra_state(self) -> Any:
        return threading.Event

    def set_extra_state(self, state: Any) -> None:
        pass


def _refused(folder: str) -> str:
    with pytest.raises(TypeError) as refused:
        trained(folder, model=nn.Sequential(_Odd(4, 4)))
    return str(refused.value)


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    (said,) = run_world(1, _refused, str(tmp_path))
    assert "model.0._extra_state" in said and "cannot be saved" in said
