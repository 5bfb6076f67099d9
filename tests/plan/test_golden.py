"""Requests as people make them, what the plan chooses, and what it says: golden.yaml. To write it anew, and read it:

python -m tests.plan.test_golden && git diff tests/plan/golden.yaml
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.plan.plan import make_plan
from fsdp_jobs.plan.render import summary_of, title_of

GOLDEN = Path(__file__).with_name("golden.yaml")
ENTRIES: dict[str, dict[str, Any]] = yaml.safe_load(GOLDEN.read_text())


def answer(request: str) -> dict[str, Any]:
    """Return the choice and the lines of a request's plan."""
    config = compose_job(["data=synthetic", *request.split()])
    plan = make_plan(config)
    assert plan.memory is not None
    samples = -(-config.data.global_batch // plan.layout.world_size)
    micro_batch = min(config.data.micro_batch, samples)
    loss = "the loss in chunks" if plan.layout.chunked_loss else "whole logits"
    recomputed = config.fsdp.activation_checkpointing
    gib = f"{plan.memory.total / 2**30:.1f} of {plan.usable_bytes / 2**30:.1f} GiB"
    return {
        "request": request,
        "choice": f"{title_of(plan)}; {'fits' if plan.fits else 'does not fit'}, {gib}",
        "step": f"{micro_batch} x {plan.microbatches} samples, checkpointing {recomputed}, {loss}",
        "speed": summary_of(plan),
        "said": list(plan.reasons),
        "remedies": [f"{' '.join(r.overrides)} ({r.result})" for r in plan.remedies],
    }


@pytest.mark.parametrize("name", ENTRIES)
def test_a_request_is_answered_as_before(name: str) -> None:
    assert answer(ENTRIES[name]["request"]) == ENTRIES[name]


if __name__ == "__main__":
    answers = {name: answer(entry["request"]) for name, entry in ENTRIES.items()}
    GOLDEN.write_text(yaml.safe_dump(answers, sort_keys=False, width=110))
