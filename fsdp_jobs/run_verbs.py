"""The verbs that look at runs or act on them. No torch but for export."""

from __future__ import annotations

import argparse
import sys
import time

from rich.console import Console
from rich.table import Table

from fsdp_jobs.config import load_config, plain_values
from fsdp_jobs.ledger import ledger_of
from fsdp_jobs.logs import follow_files, label, looks_like_error
from fsdp_jobs.problems import BadInput, Problem, nearest
from fsdp_jobs.run_dir import RunDir, find_run, runs_in
from fsdp_jobs.status import RunStatus, duration

console = Console(highlight=False, markup=False)  # what runs and launchers say is shown as it is


def existing_run(name: str, runs_dir: str) -> RunDir:
    run = find_run(runs_dir, name)
    if not run.job.exists():
        names = [r.name for r in runs_in(runs_dir)]
        what = f"there is no such run under {runs_dir}/"
        raise BadInput([Problem(name, what, nearest(name, names) or "fsdp-jobs list")])
    return run


def run_parser(verb: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"fsdp-jobs {verb}", allow_abbrev=False)
    parser.add_argument("name", help="of the run")
    return parser


def take_runs_dir(args: list[str]) -> tuple[list[str], str]:
    """`runs_dir=...` is understood by every verb."""
    given = [a.removeprefix("runs_dir=") for a in args if a.startswith("runs_dir=")]
    return [a for a in args if not a.startswith("runs_dir=")], given[-1] if given else "runs"


def status(args: list[str]) -> int:
    args, runs_dir = take_runs_dir(args)
    if not args:
        return _show_table(runs_in(runs_dir), runs_dir)
    run = existing_run(run_parser("status").parse_args(args).name, runs_dir)
    _show_table([run], runs_dir)
    return _show_story(run)


def _show_story(run: RunDir) -> int:
    """What went wrong in a run, what each failure cost, what it does now, and where its time went."""
    status = RunStatus(run)
    status.update()
    for b in status.breaks:
        stamp = time.strftime("%b %d %H:%M:%S", time.localtime(b.time))
        again = "no step since" if b.recovered_s is None else f"training again after {b.recovered_s:.1f} s"
        console.print(f"{stamp}  {b.why}: {b.lost_steps} steps lost, {again}", soft_wrap=True)
    for host, why in run.excluded_hosts().items():
        console.print(f"without {host}: {why}", soft_wrap=True)
    console.print(f"now      {status.doing}")
    if status.step or not status.is_program:
        console.print(f"goodput  {ledger_of(run)}")
    return 0


def list_runs(args: list[str]) -> int:
    args, runs_dir = take_runs_dir(args)
    if args:
        raise BadInput([Problem(args[0], "list takes no arguments but runs_dir=...")])
    return _show_table(runs_in(runs_dir), runs_dir)


def _show_table(runs: list[RunDir], runs_dir: str) -> int:
    from fsdp_jobs.submission import status_of

    if not runs:
        console.print(f"no runs under {runs_dir}/")
        return 0
    table = Table(box=None, pad_edge=False)
    for heading in (
        "run",
        "state",
        "attempt",
        "nodes",
        "step",
        "loss",
        "tok/s",
        "checkpoint",
        "eta",
        "what happened last",
    ):
        table.add_column(heading, justify="right" if heading in ("step", "loss", "tok/s", "eta") else "left")
    for column in table.columns[:-1]:
        column.no_wrap = True  # the last one gives way
    table.columns[0].min_width = max(len(run.name) for run in runs)
    for run in runs:
        status, config = status_of(run), plain_values(run.config)
        table.add_row(
            run.name,
            status.state,
            str(status.attempt),
            f"{len(status.nodes)}/{config['nodes']}",
            status.step_of(config["steps"]),
            f"{status.loss:.4f}" if status.loss is not None else "-",
            f"{status.tokens_per_s:,.0f}",
            f"step {status.committed}, {status.checkpoint_age()}" if status.committed >= 0 else "-",
            duration(status.eta_s(config["steps"])),
            status.reason,
        )
    console.print(table)
    return 0


def logs(args: list[str]) -> int:
    from fsdp_jobs.submission import ACTIVE, state_of

    args, runs_dir = take_runs_dir(args)
    parser = run_parser("logs")
    parser.add_argument("-f", "--follow", action="store_true")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--node", type=int)
    parser.add_argument("--attempt", type=int)
    parser.add_argument("--errors", action="store_true", help="only lines that look like trouble")
    flags = parser.parse_args(args)
    run = existing_run(flags.name, runs_dir)
    handle = run.read_job()["handle"]
    asked_at = 0.0
    alive = True

    def running() -> bool:
        nonlocal asked_at, alive
        if alive and (flags.follow or not asked_at) and time.monotonic() - asked_at > 2:
            asked_at, alive = time.monotonic(), state_of(handle) in ACTIVE
        return bool(flags.follow) and alive

    def any_of(number: int | None) -> str:
        return "*" if number is None else str(number)

    pattern = f"attempts/{any_of(flags.attempt)}/node-{any_of(flags.node)}/rank-{any_of(flags.rank)}.log"
    for file, line in follow_files(run.path, pattern, running):
        if not flags.errors or looks_like_error(line):
            sys.stdout.write(f"[{label(file)}] {line}\n")
            sys.stdout.flush()
    return 0


def cancel(args: list[str]) -> int:
    from fsdp_jobs import submission
    from fsdp_jobs.stopping import stop

    args, runs_dir = take_runs_dir(args)
    parser = run_parser("cancel")
    parser.add_argument("--now", action="store_true", help="at once, without a checkpoint")
    flags = parser.parse_args(args)
    run = existing_run(flags.name, runs_dir)
    if submission.state_of(run.read_job()["handle"]) not in submission.ACTIVE:
        console.print(f"{run.name} is not running")
        return 0
    stop([run], flags.now, lambda text: console.print(text, style="yellow"))
    status = RunStatus(run)
    status.update()
    console.print(f"{run.name} {status.state}: {status.reason}")
    return 0


def report(args: list[str]) -> int:
    args, runs_dir = take_runs_dir(args)
    parser = run_parser("report")
    parser.add_argument("--png", action="store_true", help="also a picture a chart, for slides")
    flags = parser.parse_args(args)
    run = existing_run(flags.name, runs_dir)
    try:
        from fsdp_jobs.report.page import write_report
    except ImportError as e:
        raise BadInput([Problem("report", str(e), "pip install 'fsdp_jobs[report]'")]) from e
    for file in write_report(run, flags.png):
        console.print(str(file), soft_wrap=True)
    return 0


def dashboard(args: list[str]) -> int:
    args, runs_dir = take_runs_dir(args)
    parser = argparse.ArgumentParser(prog="fsdp-jobs dashboard", allow_abbrev=False)
    parser.add_argument("--port", type=int, default=8265, help="0 takes a free one")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; other than this machine's own needs a token"
    )
    flags = parser.parse_args(args)
    try:
        from fsdp_jobs.dashboard.serve import serve
    except ImportError as e:
        raise BadInput([Problem("dashboard", str(e), "pip install 'fsdp_jobs[dashboard]'")]) from e
    return serve(runs_dir, flags.host, flags.port, lambda url: console.print(url, soft_wrap=True))


def export(args: list[str]) -> int:
    args, runs_dir = take_runs_dir(args)
    parser = run_parser("export")
    parser.add_argument("--format", choices=("safetensors", "pt"), default="safetensors")
    parser.add_argument("--step", type=int, help="of the checkpoint; the newest sound one when left out")
    parser.add_argument("--out", help="folder to write; <run directory>/export when left out")
    flags = parser.parse_args(args)
    run = existing_run(flags.name, runs_dir)
    from fsdp_jobs.checkpoints.export import export

    written = export(run, load_config(run.config), flags.format, flags.step, flags.out)
    for file in written:
        console.print(str(file), soft_wrap=True)
    return 0
