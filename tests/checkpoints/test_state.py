"""What a checkpoint holds is the whole state as it was when it was saved, and comes back as it was."""

from __future__ import annotations

import gc
import io
import random
import threading
import weakref
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fsdp_jobs.checkpoints.state import Hyperparameters, RandomState, State, _packed, _unpacked
from fsdp_jobs.checkpoints.tensors import local
from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.run.threads import wait_until
from tests.checkpoints.saving import save_steps, trained, value_of
from tests.world import run_world

pytestmark = pytest.mark.integration


def _draw() -> list[float]:
    return [torch.rand(()).item(), np.random.rand(), np.random.randn(), random.random(), random.gauss(0.0, 1.0)]


def test_random_numbers_go_on_where_they_were() -> None:
    _draw()  # one of a pair of normal numbers is kept for the next call: part of the state
    state = RandomState(torch.device("cpu"))
    saved = _packed("rng", state.state_dict())
    expected = _draw() + _draw()
    state.load_state_dict(_unpacked(saved))
    assert _draw() + _draw() == expected


def test_a_rate_that_numpy_computes_is_a_plain_value() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(step + 1)))
    for state in (Hyperparameters(optimizer).state_dict(), schedule.state_dict()):
        assert "np.float64" in repr(state)
        assert _unpacked(_packed("schedule", state)) == state


def test_groups_of_parameters_that_are_not_those_of_the_checkpoint_are_named() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    saved = Hyperparameters(torch.optim.SGD([{"params": [w]} for w in weights])).state_dict()
    fresh = torch.optim.SGD(weights[:1])
    with pytest.raises(JobFailed, match="has 1 group of parameters, and 2 in the checkpoint"):
        Hyperparameters(fresh).load_state_dict(saved)
    with pytest.raises(TypeError, match="the optimizer's hyperparameters have this name"):
        State(nn.Linear(1, 1), fresh, {"hyperparameters": RandomState(torch.device("cpu"))}, torch.device("cpu"))


class _Sam(torch.optim.SGD):
    def step(self, closure: Any) -> Any:
        loss = closure()
        super().step()
        return loss


def _prepared(_: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = _Sam(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    before, step = [p.clone() for p in model.parameters()], optimizer.step
    tensors, _ = State(model, optimizer, {}, torch.device("cpu")).live()
    assert sum("momentum_buffer" in name for name in tensors) == 2
    assert all(map(torch.equal, before, model.parameters())) and optimizer.step == step, "nothing else has changed"


def test_an_optimizer_whose_step_needs_a_closure_has_a_state_to_load_into() -> None:
    run_world(1, _prepared, "")


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
                self.state[p][0] = -self.state[p]["step"]


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
    assert again.state.optimizer.state[again.state.model.linear.weight][0] == -6  # type: ignore[index, union-attr]
    assert expected["model._extra_state"] == {"words": ["forward"] * 6}


@pytest.mark.parametrize("mode", ["off", "thread"])
def test_what_is_assigned_anew_or_is_no_tensor_comes_back(tmp_path: Path, mode: str) -> None:
    run_world(2, _assigned_anew, str(tmp_path), mode)


def _torn(folder: str) -> None:
    checkpoints = trained(folder, model=_Averaging(), async_mode="thread")
    _step(checkpoints, 1)
    gate = threading.Event()
    stage = checkpoints.saver.stager.stage

    def late(*args: Any, **kwargs: Any) -> Any:
        gate.wait(30)
        return stage(*args, **kwargs)

    checkpoints.saver.stager.stage = late  # type: ignore[method-assign]
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
    to_save, save = checkpoints.state.to_save, dcp.save

    def noted() -> Any:
        tensors, objects = to_save()
        copied.extend(weakref.ref(tensors[name]) for name in tensors.keys() & checkpoints.state.buffers)
        return tensors, objects

    def late(*args: Any, **kwargs: Any) -> Any:
        gate.wait(30)
        return save(*args, **kwargs)

    checkpoints.state.to_save, dcp.save = noted, late  # type: ignore[method-assign, assignment]
    checkpoints.save(1)
    checkpoints.before_update()

    def are_freed() -> bool:
        gc.collect()
        return all(ref() is None for ref in copied)

    is_freed = wait_until(are_freed, 10)  # by the thread that has staged them
    assert copied and is_freed, "copies on the device live until they are written"
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


class _Parts(nn.Module):
    """One part is used, one never is, and one only once it is thawed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.used, self.aside, self.frozen = (nn.Linear(4, 4) for _ in range(3))
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.used(x))  # type: ignore[no-any-return]


def _go_on(checkpoints: Any, begin: int, end: int) -> None:
    for number in range(begin, end):
        if number == 3:
            checkpoints.state.model.frozen.requires_grad_(requires_grad=True)
        _step(checkpoints, number)
        checkpoints.save(number, block=True)


def _partly(folder: str) -> None:
    calm = trained(f"{folder}/calm", model=_Parts())
    _go_on(calm, 1, 6)
    for saved in range(5):
        run = f"{folder}/{saved}"
        first = trained(run, model=_Parts())
        first.save(0, block=True)  # before any update
        _go_on(first, 1, saved + 1)
        first.close()
        again = trained(run, "0-1", model=_Parts())
        assert again.restore() == saved
        assert "optim.state.aside.weight.exp_avg" not in again.state.live()[0]
        if saved >= 3:  # as a program does that knows its step
            again.state.model.frozen.requires_grad_(requires_grad=True)
        _go_on(again, saved + 1, 6)
        here, there = _values(again), _values(calm)
        assert here == there, [k for k in here.keys() | there.keys() if here.get(k) != there.get(k)]
        again.close()


def test_parameters_that_have_had_no_gradient_yet_stop_no_restart(tmp_path: Path) -> None:
    run_world(2, _partly, str(tmp_path))


def _swapped(folder: str, mode: str) -> None:
    """Weights are swapped after a save has begun, as for an evaluation with averaged ones, and then swapped back."""
    checkpoints = trained(folder, model=nn.Linear(1024, 1024), async_mode=mode)
    gate, stage = threading.Event(), checkpoints.saver.stager.stage
    at_most_s = iter((5, 1, 1))  # of the first the gate opens; for the others the update waits itself

    def late(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:  # one is enough
            gate.wait(next(at_most_s))
        return stage(*args, **kwargs)

    checkpoints.saver.stager.stage = late  # type: ignore[method-assign]
    weight = checkpoints.state.model.weight
    for step in range(1, 4):
        checkpoints.save(step)
        with torch.no_grad():
            weight.mul_(2.0)
        gate.set()
        checkpoints.before_update()
        checkpoints.finish()
        gate.clear()
        assert (checkpoints.failure is None) == (step > 1), checkpoints.failure
        if step == 1:
            assert "model.weight changed before the next optimizer step" in str(checkpoints.failure)
    expected = 0.5 * local(weight).clone()
    checkpoints.close()
    again = trained(folder, "0-1", model=nn.Linear(1024, 1024))
    assert again.restore() == 3
    assert torch.equal(local(again.state.model.weight), expected)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_weights_that_change_while_they_are_copied_are_not_saved_half(tmp_path: Path, mode: str) -> None:
    run_world(2, _swapped, str(tmp_path), mode)


class _OwnMean(torch.optim.SGD):
    """Keeps a mean of this rank's part of each gradient."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["mean"] = torch.zeros_like(local(p))


def _of_one_rank(folder: str) -> None:
    checkpoints = trained(folder, optimizer=_OwnMean)
    weight = checkpoints.state.model.weight
    with pytest.raises(TypeError, match=r"^others\.ema holds sharded tensors"):
        _packed("others.ema", {"averages": [weight.detach().clone()]})
    checkpoints.state.model(torch.ones(2, 8)).sum().backward()
    checkpoints.state.optimizer.step()
    optimizer = checkpoints.state.optimizer
    for means in (optimizer.state[weight]["mean"], [torch.ones(4)]):
        optimizer.state[weight]["mean"] = means
        with pytest.raises(TypeError, match=r"^optim\.state\.weight\.mean is each rank's own"):
            checkpoints.save(1)


def test_what_is_one_ranks_alone_is_not_saved_for_all(tmp_path: Path) -> None:
    run_world(2, _of_one_rank, str(tmp_path))


class _LooksAhead(torch.optim.AdamW):
    """Adds to its state at its third step, as Lookahead and LBFGS do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            if self.state[p]["step"] >= 3:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                slow.lerp_(p.detach(), 0.5)


class _AveragesLater(torch.optim.SGD):
    """Has only a number in its state before its third step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            done = self.state[p]["done"] = self.state[p].get("done", 0) + 1
            if done >= 3:
                self.state[p].setdefault("slow", p.detach().clone()).lerp_(p.detach(), 0.5)


def _later_keys(folder: str, optimizer: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    first = trained(folder, optimizer=optimizer, model=nn.Linear(4, 4))
    for number in range(1, 5):
        _step(first, number)
    first.save(4, block=True)
    expected = _values(first)
    first.close()
    assert "optim.state.weight.slow" in expected
    again = trained(folder, "0-1", optimizer=optimizer, model=nn.Linear(4, 4))
    assert again.restore() == 4 and _values(again) == expected
    _step(again, 5)
    again.close()


def _another_dtype(folder: str) -> None:
    first = trained(folder, model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(torch.bfloat16))
    first.state.model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    first.state.optimizer.step()
    first.save(1, block=True)
    first.close()
    again = trained(folder, "0-1", model=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert again.restore() == 1
    _step(again, 2)
    moments = [v for one in again.state.optimizer.state.values() for k, v in one.items() if k.startswith("exp_avg")]
    assert {moment.dtype for moment in moments} == {torch.float32}
    again.close()


def _of_several_dtypes(folder: str, restart: str) -> Any:
    checkpoints = trained(folder, restart)
    dtypes = (torch.float32, torch.bfloat16, torch.complex64)
    model = nn.ParameterList(torch.ones(4, dtype=dtype) for dtype in dtypes)
    checkpoints.state = State(model, torch.optim.AdamW(model.parameters()), {}, torch.device("cpu"))
    return checkpoints


def _several_dtypes(folder: str) -> None:
    first, again = (_of_several_dtypes(folder, restart) for restart in ("0-0", "0-1"))
    for parameter in first.state.model.parameters():
        parameter.grad = torch.full_like(parameter, 1.1 + 2.3j if parameter.is_complex() else 1.1)
    first.state.optimizer.step()
    first.save(1, block=True)
    assert again.restore() == 1 and _values(again) == _values(first)
    here, there = ({n: t.dtype for n, t in c.state.live()[0].items()} for c in (again, first))
    assert here == there


def _elsewhere(_: str) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import takes a while

    model = nn.Linear(2, 2)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    with pytest.raises(TypeError) as refused:
        State(model, zero, {}, torch.device("cpu"))
    return str(refused.value)


def _around(_: str) -> str:
    model = nn.Linear(2, 2)
    sam = torch.optim.SGD(model.parameters())
    sam.base_optimizer = torch.optim.AdamW(sam.param_groups)  # type: ignore[attr-defined]
    with pytest.raises(TypeError) as refused:
        State(model, sam, {}, torch.device("cpu"))
    State(model, sam.base_optimizer, {}, torch.device("cpu"))  # type: ignore[attr-defined]
    return str(refused.value)


def _several(_: str) -> str:
    model = nn.Linear(2, 2)
    both = torch.optim.SGD(model.parameters())
    both.parts = [torch.optim.AdamW([p]) for p in model.parameters()]  # type: ignore[attr-defined]
    with pytest.raises(TypeError) as refused:
        State(model, both, {}, torch.device("cpu"))
    for part in both.parts:  # type: ignore[attr-defined]
        part.state = both.state
    State(model, both, {}, torch.device("cpu"))
    return str(refused.value)


def _with_lbfgs(folder: str, is_sharded: bool) -> str:
    if not is_sharded:
        model = nn.Linear(2, 2)
        State(model, torch.optim.LBFGS(model.parameters()), {}, torch.device("cpu"))
        return ""
    with pytest.raises(TypeError) as refused:
        trained(folder, optimizer=torch.optim.LBFGS)
    return str(refused.value)


def _expanded(_: str) -> str:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model.register_buffer("mask", torch.zeros(1, 4).expand(3, 4), persistent=False)
    State(model, optimizer, {}, torch.device("cpu"))
    model.register_buffer("mask", torch.zeros(1, 4).expand(3, 4))
    with pytest.raises(TypeError) as refused:
        State(model, optimizer, {}, torch.device("cpu"))
    for edges in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        model.mask = edges
        with pytest.raises(TypeError, match=r"model.mask is sparse"):
            State(model, optimizer, {}, torch.device("cpu"))
    return str(refused.value)


def test_a_buffer_that_cannot_be_restored_is_refused_before_the_first_step() -> None:
    assert run_world(1, _expanded, "")[0].startswith("model.mask shares memory between its elements")


def test_an_optimizer_that_cannot_be_restored_under_fsdp_is_refused_before_the_first_step(tmp_path: Path) -> None:
    assert "LBFGS keeps vectors of all parameters together" in run_world(1, _with_lbfgs, str(tmp_path), True)[0]
    assert run_world(1, _with_lbfgs, str(tmp_path), False) == [""]


def test_optimizers_that_grow_change_their_dtype_or_keep_their_state_elsewhere(tmp_path: Path) -> None:
    run_world(2, _later_keys, str(tmp_path / "later"), _LooksAhead)
    run_world(1, _later_keys, str(tmp_path / "much-later"), _AveragesLater)
    run_world(1, _another_dtype, str(tmp_path / "dtype"))
    run_world(1, _several_dtypes, str(tmp_path / "dtypes"))
    assert "keeps its state in another optimizer, its optim" in run_world(1, _elsewhere, "")[0]
    assert "keeps its state in another optimizer, its base_optimizer" in run_world(1, _around, "")[0]
    assert "keeps its state in another optimizer, its parts" in run_world(1, _several, "")[0]


class _ScheduleFree(torch.optim.AdamW):
    """Refuses to step before `train()`, as schedule-free optimizers do."""

    def train(self) -> None:
        self.param_groups[0]["train_mode"] = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if "train_mode" not in self.param_groups[0]:
            raise RuntimeError("the optimizer was not in train mode when step was called")
        super().step()
        for one in self.state.values():
            one["done"] = one.get("done", 0) + 1


def _begun_later(folder: str) -> None:
    first, again = (trained(folder, restart, optimizer=_ScheduleFree, model=nn.Linear(4, 4)) for restart in ("0", "1"))
    first.state.optimizer.train()  # type: ignore[attr-defined]
    _step(first, 1)
    first.save(1, block=True)
    assert again.restore() == 1 and _values(again) == _values(first)
    for checkpoints in (first, again):
        _step(checkpoints, 2)
    assert _values(again) == _values(first)


def test_an_optimizer_that_is_not_in_its_training_mode_yet_is_restored(tmp_path: Path) -> None:
    run_world(2, _begun_later, str(tmp_path))


class _OneRate(torch.optim.AdamW):
    """Adapts one rate for all parameters, and keeps it beside its state and its groups."""

    rate = 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.rate *= 1.5
        for group in self.param_groups:
            group["lr"] = 1e-3 * self.rate
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rate": self.rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.rate = state["rate"]


def _with_one_rate(folder: str) -> None:
    first, again = (trained(folder, r, optimizer=_OneRate, model=nn.Linear(4, 4)) for r in ("0", "1"))
    for number in (1, 2):
        _step(first, number)
    first.save(2, block=True)
    assert again.restore() == 2 and _values(again) == _values(first)
    for checkpoints in (first, again):
        _step(checkpoints, 3)
    assert again.state.optimizer.rate == first.state.optimizer.rate == 1.5**3  # type: ignore[attr-defined]
    assert _values(again) == _values(first)


def test_what_an_optimizers_own_state_dict_adds_is_restored(tmp_path: Path) -> None:
    run_world(2, _with_one_rate, str(tmp_path))


def _of_its_stage(folder: str, restart: str) -> Any:
    checkpoints = trained(folder, restart)
    stage = nn.ModuleDict({f"layer{dist.get_rank()}": nn.Linear(4, 4)})
    checkpoints.state = State(stage, torch.optim.AdamW(stage.parameters()), {}, torch.device("cpu"))
    return checkpoints


def _staged(folder: str) -> str:
    first = _of_its_stage(folder, "0-0")
    (layer,) = first.state.model.values()
    layer(torch.ones(2, 4)).sum().backward()
    first.state.optimizer.step()
    first.save(1, block=True)
    again = _of_its_stage(folder, "0-1")
    assert again.restore() == 1 and _values(again) == _values(first)
    if dist.get_rank() == 1:
        again.state.model["renamed"] = again.state.model.pop("layer1")  # type: ignore[operator]
    with pytest.raises(JobFailed) as refused:
        again.restore()
    return str(refused.value)


def test_each_rank_may_hold_another_stage_of_a_pipeline(tmp_path: Path) -> None:
    said = run_world(2, _staged, str(tmp_path))[0]
    assert "model.layer1.weight is not here" in said and "layer0" not in said


class _Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def _with_another_object(folder: str) -> str:
    kept, added = _Counter(), _Counter()
    first = trained(folder, others={"kept": kept})
    kept.count = 7
    save_steps(first, 3)
    kept.count, added.count = 0, 5
    again = trained(folder, "0-1", others={"kept": kept, "added": added})
    with redirect_stdout(io.StringIO()) as printed:
        assert (again.restore(), value_of(again), kept.count, added.count) == (3, 3.0, 7, 5)
    return printed.getvalue()


def test_an_object_that_older_checkpoints_lack_begins_as_it_is_and_is_named(tmp_path: Path) -> None:
    printed, of_rank_1 = run_world(2, _with_another_object, str(tmp_path))
    assert "WARNING step-00000003 has no added: it stays as it is" in printed
    assert not of_rank_1


def _frozen_later(folder: str) -> str:
    def made(parameters: Any, lr: float) -> Any:
        return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=lr)

    def two() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    first = trained(folder, optimizer=made, model=two())
    _step(first, 1)
    first.save(1, block=True)
    before = _values(first)
    model = two()
    model[0].requires_grad_(requires_grad=False)
    again = trained(folder, "0-1", optimizer=made, model=model)
    with redirect_stdout(io.StringIO()) as printed:
        assert again.restore() == 1
    assert _values(again) == {name: value for name, value in before.items() if not name.startswith("optim.state.0.")}
    _step(again, 2)
    again.save(2, block=True)
    model = two()
    model[0].requires_grad_(requires_grad=False)
    assert trained(folder, "0-2", optimizer=made, model=model).restore() == 2
    without = trained(
        folder, "0-3", optimizer=lambda parameters, lr: torch.optim.AdamW([*parameters][:1], lr=lr), model=two()
    )
    with pytest.raises(JobFailed, match=r"another optimizer: optim\.state\.1\.bias\.\w+ is not here"):
        without.restore()
    return printed.getvalue()


def test_a_model_that_is_frozen_in_part_later_keeps_its_weights(tmp_path: Path) -> None:
    said, of_rank_1 = run_world(2, _frozen_later, str(tmp_path))
    assert "step-00000001: left out the optimizer state of 2 parameters, now frozen" in said
    assert not of_rank_1
