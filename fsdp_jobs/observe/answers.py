"""Build the JSON objects that pages show. The dashboard sends them, and a report contains them. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

from fsdp_jobs.config.terminal import finite
from fsdp_jobs.plan.memory import GIB
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.events import RoundBroken, Submitted, seldom_events
from fsdp_jobs.run.goodput import costs_of
from fsdp_jobs.run.record import JsonObject
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.table import percent
from fsdp_jobs.run.tail import Tail, sampled_json_lines
from fsdp_jobs.submit.overview import RunSummary, story_of

_POINTS = 1000  # of a curve


def row_of(summary: RunSummary) -> JsonObject:
    """Return a run's row in the table of runs: with the time of its checkpoint, because its age always changes.

    `owner` is None for this user's runs.
    """
    return {**summary.cells(), "checkpoint": summary.checkpoint_at, "owner": summary.owner}


def about(status: RunStatus, state: str) -> JsonObject:
    """Return the content of `status NAME`, events with sentences, plan against measurement, and the submission.

    `status` must have been read from the beginning, without `glance`; `state` is that of its row.
    """
    run = status.run
    happened = [{**event.to_record(), "sentence": event.sentence()} for event in seldom_events(Tail(run.events))]
    content = {
        "story": list(story_of(status, state)),
        "events": happened,
        "compared": list(_compared(status)),
        "submitted": run.read_job(),
        "config": run.config.read_text(errors="replace") if run.config.exists() else "",
    }
    answer: JsonObject = finite(content)
    return answer


def curves(run: RunDir) -> JsonObject:
    """Return the columns of at most about 1,000 lines of metrics.jsonl, newest first; None for values but numbers.

    `gaps` has the time of each submission and the seconds since the last record before it; `faults` has times.
    """
    lines = list(sampled_json_lines(run.metrics, _POINTS))
    keys = dict.fromkeys(chain.from_iterable(lines))
    columns = {key: [_finite(line.get(key)) for line in lines] for key in keys}
    happened = list(seldom_events(Tail(run.events)))
    stepped = [line.get("time", 0.0) for line in lines]
    gaps = []
    for before, new in pairwise(happened[:1] + happened):
        if isinstance(new, Submitted):
            recorded = [before.time, *(at for at in stepped if at < new.time)]
            gaps.append((new.time, new.time - max(recorded)))
    faults = [event.time for event in happened if isinstance(event, RoundBroken) and not event.is_planned]
    return {"columns": columns, "gaps": gaps, "faults": faults}


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _compared(status: RunStatus) -> Iterator[tuple[str, str, str]]:
    """Yield (quantity, planned, measured): medians over all steps; of a repeated step the last run counts."""
    plan, costs, goodput = Plan.of(status.run), costs_of(status.run), status.goodput
    if plan is None or plan.time is None or plan.memory is None:  # nothing is predicted of an unknown model
        return
    if goodput.useful_s:  # else no step has counted yet
        yield "goodput", percent(plan.expected.goodput, 1), percent(goodput.fraction, 1)
    if costs is not None and costs.restart_s:
        yield "seconds to recover", f"{plan.expected.restart_s:.1f}", f"{costs.restart_s:.1f}"
    for tier in plan.expected.tiers:
        if tier.place == "memory" and costs is not None and costs.snapshot_s:
            yield "steps between snapshots in memory", f"{tier.every_steps:.3g}", f"{costs.snapshot_steps:.3g}"
            yield "seconds that steps wait for each", f"{tier.stall_s:.4f}", f"{costs.snapshot_s:.4f}"
    newest_first = sampled_json_lines(status.run.metrics, _POINTS)
    by_step = {line.get("step"): line for line in reversed(list(newest_first))}
    for what, form, planned, key in (
        ("seconds per step", ".3f", plan.time.step, "step_s"),
        ("tokens/s, all ranks", ",.0f", plan.time.tokens_per_s, "tokens_per_s"),
        ("peak GiB per GPU", ".2f", plan.memory.total / GIB, "peak_memory_gib"),
    ):
        values = [line[key] for line in by_step.values() if line.get(key) is not None]
        if values:
            yield what, format(planned, form), format(statistics.median(values), form)
