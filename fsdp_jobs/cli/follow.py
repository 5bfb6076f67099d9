"""Show jobs in the terminal while they run: a live view, events, rank 0's output and every rank's errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fsdp_jobs.config.terminal import console, say
from fsdp_jobs.launchers.base import Description
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.run.directory import RunDir, rank_logs
from fsdp_jobs.run.events import parse_events
from fsdp_jobs.run.failure import reports_lost_peer
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.table import counted
from fsdp_jobs.run.tail import Logs, Tail, label, looks_like_error, pause_s, rank_of
from fsdp_jobs.run.verdict import FINAL_ERRORS, Verdict
from fsdp_jobs.submit.overview import VERDICT_S, Overview, RunSummary, goodput_of
from fsdp_jobs.submit.submitted import named

_REFRESH_S = 0.25
_MOST_BYTES = 1e6  # of a rank's log that are shown at once: terminals are slower than programs
_PLAIN_EVERY_S = 5.0  # between progress lines where nothing can be redrawn


class LiveView:
    """Runs in the terminal, redrawn by each `show`; elsewhere, a plain line for each run that has changed."""

    def __init__(self, transient: bool = False):
        self._live = Live(console=console, auto_refresh=False, transient=transient, vertical_overflow="crop")
        self._redraws = console.is_interactive and console.is_terminal  # the latter of stderr, with --json
        self._lines: dict[str, str] = {}  # run -> its newest plain line
        self._lines_at = 0.0
        self._best_s = cache(RunDir.planned_interval_s)  # cached: reading a plan may take long

    def __enter__(self) -> LiveView:
        if self._redraws:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, rows: Mapping[RunDir, RunSummary]) -> None:
        """Show the summaries of runs."""
        if self._redraws:
            view = Table.grid()
            for run, row in rows.items():
                view.add_row(progress(row))
                view.add_row(_health(row, self._best_s(run)))
            self._live.update(view, refresh=True)
        elif time.monotonic() - self._lines_at > _PLAIN_EVERY_S or all(row.is_over for row in rows.values()):
            self._lines_at = time.monotonic()
            for row in rows.values():
                known = [words for words in _words(row) if "-" not in words.split()]
                if (line := "  ".join([row.run, row.state, *known])) != self._lines.get(row.run):
                    self._lines[row.run] = line
                    say(line)


def _words(row: RunSummary) -> list[str]:
    """Return step, loss, speed, model FLOP/s utilization, age of the newest checkpoint, time left."""
    cells = row.cells()
    mfu = [f"MFU {row.mfu:.1%}"] if row.mfu is not None else []
    speed = [f"loss {cells['loss']}", f"{cells['tok/s']} tok/s", *mfu]
    return [f"step {cells['step']}", *speed, f"ckpt {cells['checkpoint']}", f"eta {cells['eta']}"]


def progress(row: RunSummary) -> Table:
    """Draw a run's state, and a bar of its steps."""
    step, *_, eta = _words(row)
    table = Table.grid(padding=(0, 2))
    for is_bar in (False, False, True, False):
        table.add_column(no_wrap=not is_bar)  # in a narrow terminal the bar becomes shorter before words are cut
    bar = ProgressBar(row.steps, row.step or 0, width=24)
    table.add_row(Text(row.run, style="bold"), row.state, bar, f"{step}  {eta}")
    return table


def _health(row: RunSummary, best_s: float) -> Table:
    """Draw a bar of a run's nodes, and one of its checkpoint's age, which is full after the plan's best interval."""
    _, *speed, checkpoint, _ = _words(row)
    asked = row.nodes_asked.rpartition(":")[2]
    nodes = ProgressBar(int(asked) if asked.isdecimal() else None, row.nodes, width=8)
    age = ProgressBar(best_s, min(best_s, row.checkpoint_age_s or 0.0), width=8)
    table, words = Table.grid(padding=(0, 2)), Text("  ".join([checkpoint, *speed]), no_wrap=True, overflow="ellipsis")
    table.add_row("  nodes", nodes, f"{row.nodes}/{row.nodes_asked}", age, words, style="dim")
    return table


class Follower:
    """Show a run in the terminal until its newest submission has ended; earlier ones are not shown."""

    def __init__(self, run: RunDir):
        self._run, self._events, self._logs = run, Tail(run.events), Logs(run.path, rank_logs())
        self._events.skip()
        self._logs.skip()

    def follow(self, ask: Callable[[Sequence[str]], Mapping[str, Description]]) -> RunSummary:
        """Show the run until it has ended, and sum it up; `ask` as in `Overview`. KeyboardInterrupt is not caught."""
        overview = Overview(ask, VERDICT_S)
        with LiveView(transient=True) as view:
            while True:
                began = time.monotonic()
                (row,) = overview.look([self._run]).values()  # before reading the news, which is then complete
                with suppress(OSError):  # it is in the row
                    self._show_news()
                if row.is_over:
                    return row
                view.show({self._run: row})
                time.sleep(pause_s(began, _REFRESH_S))

    def _show_news(self) -> None:
        for event in parse_events(self._events.records()):
            if sentence := event.sentence():
                say(Text.assemble((f"{datetime.fromtimestamp(event.time):%H:%M:%S} ", "dim"), (sentence, event.style)))
        for file, line in self._logs.new(_MOST_BYTES):
            if (rank_of(file) == "0" or looks_like_error(line)) and not reports_lost_peer(line):
                say(f"[{label(file)}] {line}", "dim")


def summary(run: RunDir, row: RunSummary) -> None:
    """Print how the job ended and which commands may follow."""
    status = RunStatus(run)
    status.update()
    style = {"done": "bold green", "stopped": "bold yellow"}.get(row.state, "bold red")
    say(Text(f"{run.name}: {row.state}", style=style).append(f" - {row.reason}", style="default"))
    for what, value in _facts(status):
        say(f"  {what:<12}{value}")
    verdict = Verdict.read(run, run.last_attempt()) if row.state != "done" else None
    if verdict is not None and verdict.rank != 0 and verdict.last_lines and not verdict.error.startswith(FINAL_ERRORS):
        say(f"  the last lines of its log:\n{verdict.last_lines}", "dim")
    name = named(run)
    if row.state != "done":
        say(f"  next        fsdp-jobs logs {name}    fsdp-jobs resume {name}")
    elif status.steps is not None and not status.is_read:
        say(f"  next        fsdp-jobs export {name}    fsdp-jobs resume {name} steps={2 * status.steps}")


def _facts(status: RunStatus) -> Iterator[tuple[str, str]]:
    if status.loss is not None and status.first_loss is not None:
        yield "loss", f"{status.first_loss:#.4g} -> {status.loss:#.4g} over {counted(status.step, 'step')}"
    if recoveries := [b.recovered for b in status.breaks if not b.is_planned]:
        repeated = f"{counted(status.lost_steps, 'step')} repeated"
        costs = f": {', '.join(recoveries)} until the next step; {repeated}" if status.has_steps else ""
        yield "failures", f"{len(recoveries)}{costs}"
    yield from goodput_of(status)
    if status.tokens_per_s:
        plan = Plan.of(status.run)
        beside = f", {plan.time.tokens_per_s:,.0f} planned" if plan is not None and plan.time is not None else ""
        yield "speed", f"{status.tokens_per_s:,.0f} tokens/s measured{beside}"
    yield "run", str(status.run.path)
