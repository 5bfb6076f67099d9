"""Cross-entropy summed over tokens: of whole logits, or in chunks of tokens, never holding all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_jobs.config.resolve import loss_chunk
from fsdp_jobs.config.schema import FsdpConfig
from fsdp_jobs.models.build import linear_head_of
from fsdp_jobs.train.data import IGNORE


class TokenLoss:
    """The loss of a microbatch. Chunks need a model that returns the output of its linear head unchanged."""

    def __init__(self, model: nn.Module, fsdp: FsdpConfig, planned: bool | None = None):
        self.model, self.fsdp, self.planned = model, fsdp, planned
        self.head = linear_head_of(model)

    def __call__(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of `labels` [batch, length], summed over those that are not ignored."""
        if self.head is not None and (
            chunk := loss_chunk(self.fsdp, tokens.numel(), self.head.out_features, self.planned)
        ):
            loss = self._chunked(self.head, tokens, labels, chunk)
            if loss is not None:
                return loss
            self.head = None  # the model changes its logits (a soft cap, a scale)
        logits = self.model(tokens)
        return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")

    def _chunked(self, head: nn.Linear, tokens: Tensor, labels: Tensor, chunk: int) -> Tensor | None:
        """Have the head return the loss in place of logits: inside FSDP's hooks its weight is whole."""
        losses: list[Tensor] = []

        def forward(hidden: Tensor) -> Tensor:
            losses.append(_ChunkedLoss.apply(hidden.flatten(0, -2), head.weight, head.bias, labels.flatten(), chunk))  # type: ignore[no-untyped-call]
            return losses[-1]

        head.__dict__["forward"] = forward  # overrides the class's
        try:
            out = self.model(tokens)
        finally:
            del head.__dict__["forward"]
        return losses[0] if len(losses) == 1 and out is losses[0] else None


class _ChunkedLoss(torch.autograd.Function):
    """Summed cross-entropy of a linear layer; gradients are computed with the loss, from each chunk's logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int) -> Tensor:
        """Go through `hidden` [tokens, width] in chunks; logits are `weight`'s dtype, softmax and sums fp32."""
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        wants = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if wants[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants[2] else None
        for start in range(0, len(hidden), chunk):
            part, wanted = hidden[start : start + chunk], labels[start : start + chunk]
            counts = (wanted != IGNORE).unsqueeze(1)
            at = wanted.clamp(min=0).unsqueeze(1)
            logits = F.linear(part, weight, bias)
            scores = F.log_softmax(logits, dim=-1, dtype=torch.float32)
            del logits
            total -= (scores.gather(1, at) * counts).sum()
            errors = scores.exp_().scatter_add_(1, at, -counts.float()).to(weight.dtype)
            del scores
            if grad_weight is not None:
                rows = part * counts
                if weight.dtype == torch.float32:
                    grad_weight.addmm_(errors.T, rows)
                else:
                    grad_weight += errors.T @ rows
            if grad_bias is not None:
                grad_bias += (errors * counts).sum(0, dtype=torch.float32)
            if grad_hidden is not None:
                torch.mm(errors, weight, out=grad_hidden[start : start + len(part)]).mul_(counts)
            del errors
        ctx.gradients = grad_hidden, grad_weight, grad_bias
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (scale,) = grad_outputs
        gradients, ctx.gradients = ctx.gradients, None
        pairs = zip(gradients, ctx.dtypes, strict=True)
        return *(None if g is None else g.mul_(scale).to(dtype) for g, dtype in pairs), None, None
