"""The verbs that look at runs or act on them. No torch but for export."""

from __future__ import annotations

import argparse
import sys
import time

from rich.console import Console

from fsdp_jobs.config.errors import BadInput, Problem, nearest
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.run.directory import RunDir, find_run, runs_in
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.tail import follow_files, label, looks_like_error

console = Console(highlight=False, markup=False)  # what runs and launchers say is shown as it is


def existing_run(name: str, runs_dir: str) -> RunDir:
    """The run of a name, or of the handle that a submission printed.

    Raises:
        BadInput: there is none.
    """
    if "://" in name:
        return _run_of_handle(name)
    run = find_run(runs_dir, name)
    if not run.is_submitted:
        names = [r.name for r in runs_in(runs_dir)]
        what = f"there is no such run under {runs_dir}/"
        raise BadInput([Problem(name, what, nearest(name, names) or "fsdp-jobs list")])
    return run


def _run_of_handle(handle: str) -> RunDir:
    from fsdp_jobs.launchers.base import run_of

    launcher, _, place = handle.partition("://")
    run = run_of(launcher, place.partition("/")[2])
    if run is None or run.read_job().get("handle") != handle:
        what = "is no newest submission of a run, made on this machine"
        raise BadInput([Problem(handle, what, "name the run: fsdp-jobs list")])
    return run


def run_parser(verb: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"fsdp-jobs {verb}", allow_abbrev=False)
    parser.add_argument("name", help="of the run, or its handle")
    return parser


def take_runs_dir(args: list[str]) -> tuple[list[str], str]:
    """`runs_dir=...` is understood by every verb."""
    given = [a.removeprefix("runs_dir=") for a in args if a.startswith("runs_dir=")]
    return [a for a in args if not a.startswith("runs_dir=")], given[-1] if given else "runs"


def logs(args: list[str]) -> int:
    from fsdp_jobs.submit.submit import is_active

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
            asked_at, alive = time.monotonic(), is_active(handle)
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
    from fsdp_jobs.submit import submit as submission
    from fsdp_jobs.submit.stop import stop

    args, runs_dir = take_runs_dir(args)
    parser = run_parser("cancel")
    parser.add_argument("--now", action="store_true", help="at once, without a checkpoint")
    flags = parser.parse_args(args)
    run = existing_run(flags.name, runs_dir)
    if not submission.is_active(run.read_job()["handle"]):
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
        from fsdp_jobs.observe.report.page import write_report
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
        from fsdp_jobs.observe.dashboard.serve import serve
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
