"""The rows of runs in Prometheus' text format (prometheus.io/docs/instrumenting/exposition_formats). No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fsdp_jobs.run.status import ENDED

_OF_A_RUN = {  # key of a row -> name, type, help
    "step": ("step", "gauge", "Steps done."),
    "steps": ("steps", "gauge", "Steps asked for."),
    "loss": ("loss", "gauge", "Of the newest step."),
    "tokens_per_s": ("tokens_per_second", "gauge", "Of all ranks."),
    "mfu": ("mfu_ratio", "gauge", "Part of the devices' peak."),
    "goodput": ("goodput_ratio", "gauge", "Part of the time that went into steps that count."),
    "checkpoint_at": ("checkpoint_timestamp_seconds", "gauge", "When the newest checkpoint was committed."),
    "failures": ("failures_total", "counter", "Rounds that a failure has ended."),
}


def exposition(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return how many runs are in which state, and the known figures of each run that has not ended."""
    return "\n".join([*_lines(list(rows)), ""])


def _lines(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    yield from _about("runs", "gauge", "Runs by state.")
    for state, count in sorted(Counter(str(row["state"]) for row in rows).items()):
        yield f'fsdp_jobs_runs{{state="{_quoted(state)}"}} {count}'
    live = [row for row in rows if row["state"] not in (*ENDED, "damaged")]
    for key, (name, kind, text) in _OF_A_RUN.items():
        yield from _about(name, kind, text)
        for row in live:
            if row.get(key) is not None:
                yield f'fsdp_jobs_{name}{{run="{_quoted(row["run"])}"}} {row[key]}'


def _about(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP fsdp_jobs_{name} {text}"
    yield f"# TYPE fsdp_jobs_{name} {kind}"


def _quoted(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
