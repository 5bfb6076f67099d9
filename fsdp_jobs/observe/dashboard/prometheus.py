"""Format runs as Prometheus' text (prometheus.io/docs/instrumenting/exposition_formats). No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fsdp_jobs.submit.overview import RunSummary

_OF_A_RUN = {  # field of a row -> name, help
    "step": ("step", "Steps done."),
    "steps": ("steps", "Steps asked for."),
    "loss": ("loss", "Of the newest step."),
    "tokens_per_s": ("tokens_per_second", "Of all ranks."),
    "mfu": ("mfu_ratio", "Part of the devices' peak."),
    "goodput": ("goodput_ratio", "Part of the time that went into steps that count."),
    "checkpoint_at": ("checkpoint_timestamp_seconds", "When the newest checkpoint was committed."),
    "failures": ("failures_total", "Rounds that a failure has ended."),
}


def exposition(rows: Sequence[RunSummary]) -> str:
    """Return the number of runs in each state, and the known metrics of each run that has not ended."""
    return "\n".join([*_lines(rows), ""])


def _lines(rows: Sequence[RunSummary]) -> Iterator[str]:
    yield from _about("runs", "Runs by state.")
    for state, count in sorted(Counter(row.state for row in rows).items()):
        yield f'fsdp_jobs_runs{{state="{state}"}} {count}'
    live = [row for row in rows if not row.is_over]
    for key, (name, text) in _OF_A_RUN.items():
        yield from _about(name, text)
        for row in live:
            if (value := getattr(row, key)) is not None:
                yield f'fsdp_jobs_{name}{{run="{_quoted(row.run)}"}} {value}'


def _about(name: str, text: str) -> Iterator[str]:
    kind = "counter" if name.endswith("_total") else "gauge"
    yield f"# HELP fsdp_jobs_{name} {text}"
    yield f"# TYPE fsdp_jobs_{name} {kind}"


def _quoted(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
