"""Show a job in the terminal while it runs: one live line, events, rank 0's output, every rank's errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fsdp_jobs.elastic.failures import speaks_of_lost_peer
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.run.directory import RunDir, rank_logs
from fsdp_jobs.run.status import RunStatus, steps_done
from fsdp_jobs.run.table import ago, duration
from fsdp_jobs.run.tail import Logs, looks_like_error
from fsdp_jobs.run.verdict import Verdict
from fsdp_jobs.submit.overview import goodput_of

_REFRESH_S = 0.25
_PLAIN_EVERY_S = 5.0  # between progress lines where there is no terminal to redraw


def progress_line(status: RunStatus) -> Table:
    """Draw one live line: state, bar, and the words of `_progress_words`."""
    table = Table.grid(padding=(0, 2))
    bar = ProgressBar(status.steps, status.step, width=24)
    table.add_row(Text(status.state, style="bold"), bar, *_progress_words(status))
    return table


def _progress_words(status: RunStatus) -> list[str]:
    """Return step, loss, speed, model FLOP/s utilization, age of the newest checkpoint, time left."""
    words = [
        f"step {steps_done(status.step, status.steps)}",
        f"loss {status.loss:.4f}" if status.loss is not None else "loss -",
        f"{status.tokens_per_s:,.0f} tok/s",
        f"MFU {status.mfu:.1%}" if status.mfu is not None else "",
        f"ckpt {ago(status.checkpoint_age_s)}",
        f"eta {duration(status.eta_s)}",
    ]
    return [word for word in words if word]


class Follower:
    """A run in the terminal, until its newest attempt has ended or its launcher no longer has the job."""

    def __init__(self, run: RunDir, console: Console):
        self.console = console
        self.status = RunStatus(run)
        self.status.update()  # earlier submissions of the run are not shown
        self.status.state = "submitted"
        self._logs = Logs(run.path, rank_logs())
        self._logs.skip()

    def follow(self, active: Callable[[], bool]) -> None:
        """Show the run until it has ended, or is not active any more. KeyboardInterrupt passes through."""
        shown_at, shown_step = 0.0, -1
        is_live = self.console.is_terminal
        with Live(console=self.console, refresh_per_second=8, transient=True) if is_live else nullcontext() as live:
            while not self._turn(active):
                if live is not None:
                    live.update(progress_line(self.status))
                elif time.monotonic() - shown_at > _PLAIN_EVERY_S and self.status.step != shown_step:
                    self.console.print("  ".join([self.status.state, *_progress_words(self.status)]), soft_wrap=True)
                    shown_at, shown_step = time.monotonic(), self.status.step
                time.sleep(_REFRESH_S)

    def _turn(self, active: Callable[[], bool]) -> bool:
        """Show what is new; return whether it is over."""
        self._show_news()
        if not self.status.ended and active():
            return False
        self._show_news()
        if not self.status.ended:
            self.status.state, self.status.reason = "failed", "its launcher no longer knows the job"
        return True

    def _show_news(self) -> None:
        for event in self.status.update():
            if sentence := event.sentence():
                stamp = time.strftime("%H:%M:%S", time.localtime(event.time))
                self.console.print(Text.assemble((f"{stamp} ", "dim"), (sentence, event.style)), soft_wrap=True)
        for file, line in self._logs.new():
            rank = file.stem.removeprefix("rank-")
            if (rank == "0" or looks_like_error(line)) and not speaks_of_lost_peer(line):
                self.console.print(Text(f"[{file.parent.name} rank {rank}] {line}"), style="dim", soft_wrap=True)


def summary(status: RunStatus, console: Console) -> None:
    """Print how the job ended and what to type next."""
    run = status.run
    style = {"done": "bold green", "stopped": "bold yellow"}.get(status.state, "bold red")
    console.print(Text(f"{run.name}: {status.state}", style=style).append(f" - {status.reason}", style="default"))
    for what, value in _facts(status):
        console.print(f"  {what:<12}{value}")
    verdict = Verdict.read(run, run.last_attempt()) if status.state != "done" else None
    if verdict is not None and verdict.last_lines and not verdict.explains_itself:
        console.print(Text(f"  the last lines of its log:\n{verdict.last_lines}", style="dim"), soft_wrap=True)
    name = run.name if str(run.path.parent) == "runs" else f"{run.name} runs_dir={run.path.parent}"
    if status.state != "done":
        console.print(f"  next        fsdp-jobs logs {name}    fsdp-jobs resume {name}")
    elif status.steps is not None:
        console.print(f"  next        fsdp-jobs export {name}    fsdp-jobs resume {name} steps={2 * status.steps}")


def _facts(status: RunStatus) -> Iterator[tuple[str, str]]:
    if status.loss is not None and status.first_loss is not None:
        yield "loss", f"{status.first_loss:.3f} -> {status.loss:.3f} over {status.step} steps"
    if recoveries := [b.recovered for b in status.breaks]:
        repeated = status.lost_steps if status.has_steps else "-"
        yield "failures", f"{len(recoveries)}: {', '.join(recoveries)} until the next step; {repeated} steps repeated"
    if status.has_steps:
        yield "goodput", goodput_of(status)
    if status.tokens_per_s:
        plan = Plan.of(status.run)
        beside = f", {plan.time.tokens_per_s:,.0f} planned" if plan is not None and plan.time is not None else ""
        yield "speed", f"{status.tokens_per_s:,.0f} tokens/s measured{beside}"
    yield "run", str(status.run.path)
