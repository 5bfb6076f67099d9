"""Models of a user's own, as `model._target_` names them."""

from __future__ import annotations

import os
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class Tiny(nn.Module):
    """With a buffer that is saved and one that is not: neither survives to_empty() by itself."""

    def __init__(self, vocab: int = 256, width: int = 32):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, vocab)
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.register_buffer("shift", torch.linspace(-1, 1, width), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tiny(vocab: int = 256) -> nn.Module:
    return Tiny(vocab)


def staged() -> nn.Module:
    """With the same layers, in a list of lists."""
    model = Tiny()
    first, second, third = model.blocks
    model.blocks = nn.ModuleList([nn.ModuleList([first, second]), nn.ModuleList([third])])
    model.forward = lambda tokens: _through(model, tokens)  # type: ignore[method-assign]
    return model


def _through(model: Tiny, tokens: Tensor) -> Tensor:
    x = model.embed(tokens) * model.scale + model.shift
    for stage in model.blocks:
        for block in stage:
            x = block(x)
    return model.head(x)


class Experts(nn.Module):
    """Two experts whose matrices are stacked, as in models of transformers; all tokens go to both."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(2, width, hidden, generator=generator) / width**0.5)
        self.down = nn.Parameter(torch.randn(2, hidden, width, generator=generator) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(1, -1, x.shape[-1]).expand(2, -1, -1)
        return torch.bmm(torch.bmm(rows, self.up).relu(), self.down).sum(0).view_as(x)


def mixture() -> nn.Module:
    model = Tiny()
    for block in model.blocks:
        block.inner, block.outer = Experts(32, 96), nn.Identity()  # type: ignore[union-attr]
    return model


class Dropping(Tiny):
    """Draws from the device's generator in each forward pass."""

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.dropout(super().forward(tokens), 0.1, self.training)


def dropping() -> nn.Module:
    return Dropping()


class Paced(Tiny):
    """Waits in each forward pass of a rank: a job that a test only has to keep alive leaves the cores to others."""

    def forward(self, tokens: Tensor) -> Tensor:
        time.sleep(0.1 if "RANK" in os.environ else 0)
        return super().forward(tokens)


def paced() -> nn.Module:
    return Paced()


class Recorder(Tiny):
    """Appends the first token of every sample it is given to a file a rank and round."""

    def forward(self, tokens: Tensor) -> Tensor:
        if "RANK" not in os.environ:
            return super().forward(tokens)  # the planner's look at it
        name = f"{os.environ['FSDP_JOBS_ATTEMPT']}.{os.environ['FSDP_JOBS_ROUND']}.{os.environ['RANK']}"
        with (Path(os.environ["SEEN_DIR"]) / name).open("a") as f:
            f.write(" ".join(str(int(t)) for t in tokens[:, 0]) + "\n")
        return super().forward(tokens)


def recorder(vocab: int) -> nn.Module:
    return Recorder(vocab)


class FailsAtStep3(Tiny):
    calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2 * 4:  # the planner's probe and two steps of four microbatches
            raise ZeroDivisionError("a bug of the user's")
        return super().forward(tokens)


def fails_at_step_3() -> nn.Module:
    return FailsAtStep3()


class HangsAtStep6(Tiny):
    """Rank 1 sleeps for ever in its sixth step, once."""

    calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        first_life = os.environ.get("FSDP_JOBS_ROUND") == "0"
        if self.calls == 6 and os.environ.get("RANK") == "1" and first_life:
            time.sleep(3600)
        return super().forward(tokens)


def hangs_at_step_6() -> nn.Module:
    return HangsAtStep6()


class Sleepy(Block):
    """Takes 40 ms instead of computing, and works at nine tenths of the speed on the rank that SLOW_FILE names."""

    def forward(self, x: Tensor) -> Tensor:
        slow = Path(os.environ["SLOW_FILE"]).read_text() if "RANK" in os.environ else ""
        time.sleep(0.04 / (0.9 if slow == os.environ.get("RANK") else 1.0))
        return super().forward(x)


def sleepy(vocab: int = 256) -> nn.Module:
    model = Tiny(vocab)
    model.blocks = nn.ModuleList([Sleepy(32)])
    return model


class Busy(Block):
    """Takes 12 ms of a core, which is longer where there is less of a core to be had."""

    def forward(self, x: Tensor) -> Tensor:
        began, work = time.thread_time(), torch.ones(64, 64)
        while time.thread_time() - began < 0.012:
            work = (work @ work).clamp(max=1)
        return super().forward(x)


def busy(vocab: int = 256) -> nn.Module:
    model = Tiny(vocab)
    model.blocks = nn.ModuleList([Busy(32)])
    return model


def flips_a_bit() -> nn.Module:
    """Tiny, of which one rank flips a bit after an update: FLIP is rank, rounds, step, tensor, element and bit.

    The tensor is `parameter`, or a name of the optimizer's state; the number of the parameter follows after a dash.
    """
    if "RANK" in os.environ and "FLIP" in os.environ:
        rank, rounds, at, name, element, bit = os.environ.pop("FLIP").split(":")  # rank 0 builds a second one
        if rank == os.environ["RANK"] and os.environ["FSDP_JOBS_ROUND"] in rounds.split(","):
            what, number = name.split("-")
            register_optimizer_step_post_hook(partial(_flip, int(at), what, int(number), int(element), int(bit)))
    return Tiny()


def _flip(at: int, what: str, number: int, element: int, bit: int, optimizer: Any, *_: object) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    parameter = parameters[number % len(parameters)]
    state = optimizer.state[parameter]
    if int(state["step"]) == at:
        tensor = parameter if what == "parameter" else state[what]
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        bits = own.detach().view(-1).view(torch.int32)
        bits[element % len(bits)] ^= 1 << bit


class Averages(Tiny):
    """Reads a buffer that its rank alone has updated, counts in Python, and draws from Python and NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(32))
        self.calls: list[int] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls.append(len(self.calls))
        self.scale = self.scale * (1 + 1e-3 * len(self.calls))
        if os.environ.get("AVERAGES") == "of a rank":
            self.average = 0.9 * self.average + 0.1 * self.embed(tokens).detach().mean((0, 1))
            return super().forward(tokens) + self.average.mean()
        return super().forward(tokens) / self.scale.max() * (1 + random.random() + np.random.rand())


def averages() -> nn.Module:
    return Averages()


class Wrong(Block):
    """Computes its gradients wrong by a part in a million, on the rank and from the forward pass that WRONG names.

    All ranks do, and every time by another factor, when WRONG is all.
    """

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        rank, _, at = os.environ.get("WRONG", "").partition(":")
        y = super().forward(x)
        if y.requires_grad and rank in ("all", os.environ.get("RANK")):
            Wrong.calls += 1  # the machine's, not the model's
            factor = 1 + 1e-6 * (Wrong.calls if rank == "all" else 1)
            if Wrong.calls >= int(at):
                y.register_hook(lambda gradient: gradient * factor)
        return y


def computes_wrong(vocab: int = 256) -> nn.Module:
    model = Tiny(vocab)
    model.blocks[1] = Wrong(32)
    return model
