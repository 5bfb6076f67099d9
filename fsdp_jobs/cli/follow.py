"""The terminal while a job runs: one live line, events as they happen, rank 0's words and every rank's errors."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.elastic.failures import speaks_of_lost_peer
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.run.directory import RANK_LOGS, RunDir
from fsdp_jobs.run.goodput import goodput_of
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.table import duration
from fsdp_jobs.run.tail import Logs, looks_like_error
from fsdp_jobs.run.verdict import Verdict

_REFRESH_S = 0.25
_PLAIN_EVERY_S = 5.0  # between progress lines where there is no terminal to redraw


def progress_line(status: RunStatus, config: JobConfig) -> Table:
    """Bar, step, loss, speed, checkpoint age, time left."""
    cells: list[RenderableType] = [
        Text(status.state, style="bold"),
        ProgressBar(total=None if status.is_program else config.steps, completed=status.step, width=24),
        Text(f"step {status.step_of(config.steps)}"),
        Text(f"loss {status.loss:.4f}" if status.loss is not None else "loss -"),
        Text(f"{status.tokens_per_s:,.0f} tok/s"),
        Text(f"ckpt {status.checkpoint_age()}"),
        Text(f"eta {duration(status.eta_s(config.steps))}"),
    ]
    if status.mfu is not None:
        cells.insert(5, Text(f"MFU {status.mfu:.1%}"))
    table = Table.grid(padding=(0, 2))
    table.add_row(*cells)
    return table


def plain_line(status: RunStatus, config: JobConfig) -> str:
    loss = f"{status.loss:.4f}" if status.loss is not None else "-"
    return (
        f"{status.state}  step {status.step_of(config.steps)}  loss {loss}  {status.tokens_per_s:,.0f} tok/s  "
        f"ckpt {status.checkpoint_age()}  eta {duration(status.eta_s(config.steps))}"
    )


class Follower:
    """Shows a run until its newest attempt has ended, or until the job is no longer there."""

    def __init__(self, run: RunDir, config: JobConfig, console: Console, alive: Callable[[], bool]):
        self.run, self.config, self.console, self.alive = run, config, console, alive
        self.status = RunStatus(run)
        self.status.update()  # what an earlier submission of the same run did is not news
        self.status.state = "submitted"
        self._logs = Logs(run.path, RANK_LOGS)
        self._logs.skip()
        self._checked_alive = time.monotonic()

    def follow(self) -> RunStatus:
        """Returns the status at the end. KeyboardInterrupt passes through."""
        if self.console.is_terminal:
            with Live(console=self.console, refresh_per_second=8, transient=True) as live:
                while not self._turn():
                    live.update(progress_line(self.status, self.config))
                    time.sleep(_REFRESH_S)
        else:
            last = (0.0, -1)
            while not self._turn():
                if time.monotonic() - last[0] > _PLAIN_EVERY_S and self.status.step != last[1]:
                    self.console.print(plain_line(self.status, self.config), soft_wrap=True)
                    last = (time.monotonic(), self.status.step)
                time.sleep(_REFRESH_S)
        return self.status

    def _turn(self) -> bool:
        """Show what is new; True when it is over."""
        self._show_news()
        if self.status.ended:
            return True
        if time.monotonic() - self._checked_alive > 2:
            self._checked_alive = time.monotonic()
            if not self.alive():
                self._show_news()
                if not self.status.ended:
                    self.status.state, self.status.reason = "failed", "its launcher no longer knows the job"
                return True
        return False

    def _show_news(self) -> None:
        for event in self.status.update():
            if sentence := event.sentence():
                stamp = time.strftime("%H:%M:%S", time.localtime(event.time))
                self.console.print(Text.assemble((f"{stamp} ", "dim"), (sentence, event.style)), soft_wrap=True)
        for file, line in self._logs.new():
            rank = file.stem.removeprefix("rank-")
            if (rank == "0" or looks_like_error(line)) and not speaks_of_lost_peer(line):
                self.console.print(Text(f"[{file.parent.name} rank {rank}] {line}"), style="dim", soft_wrap=True)


def summary(status: RunStatus, config: JobConfig, console: Console) -> None:
    """How the job ended and what to type next."""
    run = status.run
    name = run.name if config.runs_dir == "runs" else f"{run.name} runs_dir={config.runs_dir}"
    style = {"done": "bold green", "stopped": "bold yellow"}.get(status.state, "bold red")
    console.print(Text(f"{run.name}: {status.state}", style=style).append(f" - {status.reason}", style="default"))
    if status.loss is not None and status.first_loss is not None:
        console.print(f"  loss        {status.first_loss:.3f} -> {status.loss:.3f} over {status.step} steps")
    recoveries = [b.recovered_s for b in status.breaks if b.recovered_s is not None]
    if recoveries:
        times = ", ".join(f"{s:.1f} s" for s in recoveries)
        then = "its ranks run again" if status.is_program and not status.step else "the next step"
        console.print(f"  recoveries  {len(recoveries)}: {times} until {then}; {status.lost_steps} steps done again")
    if status.step or not status.is_program:
        console.print(f"  goodput     {goodput_of(run)}")
    if status.tokens_per_s and run.plan.exists():
        planned = Plan.from_json(run.plan.read_text()).time
        beside = f", {planned.tokens_per_s:,.0f} planned" if planned is not None else ""
        console.print(f"  speed       {status.tokens_per_s:,.0f} tokens/s measured{beside}")
    console.print(f"  run         {run.path}")
    if status.state == "done" and status.is_program:
        return
    if status.state == "done":
        console.print(f"  next        fsdp-jobs export {name}    fsdp-jobs resume {name} steps={2 * config.steps}")
        return
    verdict = Verdict.read(run, run.last_attempt())
    told = verdict is not None and verdict.error.startswith(("JobFailed", "BadInput"))  # the reason says it all
    if verdict is not None and verdict.last_lines and not told:
        console.print(Text(f"  the last lines of its log:\n{verdict.last_lines}", style="dim"), soft_wrap=True)
    console.print(f"  next        fsdp-jobs logs {name}    fsdp-jobs resume {name}")
