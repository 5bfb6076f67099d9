"""The terminal while a job runs: one live line, events as they happen, rank 0's words and every rank's errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.elastic.failures import speaks_of_lost_peer
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.goodput import ledger_of
from fsdp_jobs.run.status import RunStatus, duration
from fsdp_jobs.run.tail import looks_like_error
from fsdp_jobs.run.verdict import Verdict

_REFRESH_S = 0.25
_PLAIN_EVERY_S = 5.0  # between progress lines where there is no terminal to redraw


def describe_event(event: dict[str, Any]) -> tuple[str, str] | None:
    """An event as (style, sentence), or None for one that only machines need."""
    kind = event["event"]
    if kind == "round_started":
        nodes, hosts = event["nodes"], sorted(set(event["hosts"]))
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
        return "cyan", (
            f"round {event['round']}: {len(nodes)} nodes, {event['world_size']} ranks on {where}, "
            f"{event['strategy']} over groups of {event['shard_group']}"
        )
    if kind == "resumed":
        where = f", read from {event['place']}" if event.get("place") == "the nodes' disks" else ""
        return "green", f"resumed from the checkpoint of step {event['step']} on {event['world_size']} ranks{where}"
    if kind == "round_broken":
        known = event["step"] > 0 or event["committed"] >= 0
        where = f"; at step {event['step']}, newest checkpoint {event['committed']}" if known else ""
        return "yellow", f"{event['why']}{where}"
    if kind == "node_lost":
        return "yellow", f"lost node {event['node']}: {event['why']}"
    if kind == "machine_excluded":
        return "red", f"machine {event['host']} is done without for a while: {event['why']}"
    if kind == "process_restarted":
        return "yellow", f"{event['process']} ended with {event['exit_code']} and is started again"
    if kind == "checkpoint":
        return "blue", f"checkpoint of step {event['step']}: {event['bytes'] / 1e6:.1f} MB in {event['seconds']:.1f} s"
    if kind == "checkpoint_on_nodes":
        return "blue", f"step {event['step']} is on the nodes' disks after {event['seconds']:.1f} s"
    if kind == "checkpoint_failed":
        return "red", event["error"]
    if kind == "checkpoint_skipped":
        return "red", f"{event['checkpoint']} cannot be used: {'; '.join(event['why'])}"
    if kind == "waiting":
        return "yellow", event["why"]
    if kind == "tracking_failed":
        return "yellow", f"{event['tracker']} does not get the metrics: {event['why']}"
    if kind == "notify_failed":
        return "yellow", f"nobody was told by notify.{event['way']}: {event['why']}"
    if kind == "stop_requested":
        return "yellow", f"asked to stop ({event['why']}): saving"
    if kind == "attempt_ended":
        return ("green" if event["verdict"] == "done" else "red"), f"{event['verdict']}: {event['reason']}"
    return None


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
        self._log_places: dict[str, int] = {}
        for file in run.path.glob("attempts/*/node-*/rank-*.log"):
            self._log_places[str(file)] = file.stat().st_size
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
            told = describe_event(event)
            if told is not None:
                stamp = time.strftime("%H:%M:%S", time.localtime(event["time"]))
                self.console.print(Text.assemble((f"{stamp} ", "dim"), (told[1], told[0])), soft_wrap=True)
        self._show_logs()

    def _show_logs(self) -> None:
        for file in sorted(self.run.path.glob("attempts/*/node-*/rank-*.log")):
            with file.open("rb") as f:
                f.seek(self._log_places.get(str(file), 0))
                content = f.read()
            complete = content.rfind(b"\n") + 1
            self._log_places[str(file)] = self._log_places.get(str(file), 0) + complete
            rank = file.stem.removeprefix("rank-")
            for line in content[:complete].decode(errors="replace").splitlines():
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
        console.print(f"  goodput     {ledger_of(run)}")
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
