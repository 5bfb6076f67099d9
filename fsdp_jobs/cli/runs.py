"""Implement the verbs that show runs or act on them. No torch except for export."""

from __future__ import annotations

import argparse
import math
import operator
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fsdp_jobs.checkpoints.catalog import answering
from fsdp_jobs.config.arguments import RUNS_DIR, Parser, split_folders
from fsdp_jobs.config.errors import BadInput, JobFailed, nearest
from fsdp_jobs.config.keys import dotted
from fsdp_jobs.config.schema import load_config, plain_values
from fsdp_jobs.config.terminal import complain, print_json, say, show_table
from fsdp_jobs.run.directory import RunDir, checkpoints_of, pending_in, rank_logs, runs_in, user_name
from fsdp_jobs.run.status import OVER, RunStatus
from fsdp_jobs.run.table import counted, size
from fsdp_jobs.run.tail import follow_files, label, looks_like_error, numbers_of
from fsdp_jobs.run.verdict import EXIT_FAILED, EXIT_REQUEUE
from fsdp_jobs.submit.overview import UNREADABLE, VERDICT_S, Overview, RunSummary, story_of
from fsdp_jobs.submit.stop import stop
from fsdp_jobs.submit.submitted import answers_of, check_own, existing_run, has_ended, job_has_ended, kill, settle

_WATCH_S = 2.0  # between looks of `status --watch` and of `wait`
EXIT_TIMEOUT = 124  # as of timeout(1)
_CONDITION = re.compile(r"([\w.]+)(<=|>=|!=|<|>|=)([^=].*)")
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
_STATES = ("submitted", "queued", "starting", "running", "recovering", "saving", *OVER, UNREADABLE)
_NUMBERS = ("step", "loss", "tok/s", "eta", "goodput")  # right-aligned columns


class VerbParser(Parser):
    """Arguments of a verb about runs; every such verb also accepts `runs_dir=...`."""

    def parse(self, args: Sequence[str]) -> argparse.Namespace:
        """Return the flags, with `runs_dir` and the `run` of the argument `name`.

        Raises:
            BadInput: there is no such run.
        """
        folders, rest = split_folders(args, RUNS_DIR)
        flags = self.parse_args(rest)
        flags.runs_dir = folders["runs_dir"]
        if getattr(flags, "name", None) is not None:
            flags.run = existing_run(flags.name, flags.runs_dir)
        return flags


def run_parser(verb: str) -> VerbParser:
    """Make the parser of a verb that takes the name of a run."""
    parser = VerbParser(verb)
    parser.add_argument("name", help="of the run, or its handle")
    return parser


def status(args: list[str], verb: str = "status") -> int:
    parser = VerbParser(verb)
    what = "of a run, its handle, a pattern as 'llama-*', or what its configuration has, as 'optim.lr>1e-3'"
    parser.add_argument("names", nargs="*", metavar="NAME", help=what)
    parser.add_argument("--state", type=_states, help="only runs in this state, or several: running,failed")
    parser.add_argument(
        "--last", type=_at_least_one, default=0, metavar="N", help="only the N that were submitted last"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="go on until all have ended, or Ctrl-C")
    how.add_argument("--json", action="store_true", help="a list of objects, for scripts")
    flags = parser.parse(args)
    if not flags.names:
        settle(pending_in(flags.runs_dir))
    runs = _named(flags.names, flags.runs_dir)[-flags.last :]
    overview = Overview(patience_s=VERDICT_S if flags.watch else 0.0)
    rows = overview.look(runs)
    if flags.state is not None:
        rows = {run: row for run, row in rows.items() if row.state in flags.state}
    if flags.json:
        print_json([asdict(row) for row in rows.values()])
    elif not rows:
        say(f"no runs {'of that kind ' if flags.names or flags.state else ''}under {flags.runs_dir}/")
    elif flags.watch:
        _watch(overview, [run for run, row in rows.items() if flags.names or not row.is_over])
    else:
        cells = [row.cells() for row in rows.values()]
        if any(row.owner for row in rows.values()):
            cells = [{"owner": row.owner or user_name(), **row.cells()} for row in rows.values()]
        show_table(list(cells[0]), [list(row.values()) for row in cells], _NUMBERS)
        if flags.names and len(rows) == 1:
            ((run, row),) = rows.items()
            current = RunStatus(run)
            current.update()
            for heading, sentence in story_of(current, row.state):
                say(f"{heading:<8}  {sentence}")
    return 0


def _states(text: str) -> list[str]:
    """Raises: BadInput for a state that no run has."""
    for state in text.split(","):
        if state not in _STATES:
            raise BadInput.at(f"--state {state}", f"there are {', '.join(_STATES)}", nearest(state, _STATES))
    return text.split(",")


def _at_least_one(number: str) -> int:
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number of at least 1")
    return int(number)


def _named(names: Sequence[str], runs_dir: str) -> list[RunDir]:
    """Return the runs of names, handles and patterns, oldest first; without any of them, all runs.

    If there are conditions, only runs whose configuration meets them are returned.

    Raises:
        BadInput: there is no run of a name.
    """
    conditions = [found for name in names if (found := _CONDITION.fullmatch(name))]
    names = [name for name in names if not _CONDITION.fullmatch(name)]
    patterns = [name for name in names if set("*?[") & set(name)]
    named = [existing_run(name, runs_dir) for name in names if name not in patterns]
    every = runs_in(runs_dir) if patterns or not names else []
    runs = named + [run for run in every if not names or any(fnmatchcase(run.name, p) for p in patterns)]
    return _meeting(conditions, runs) if conditions else runs


def _meeting(conditions: Sequence[re.Match[str]], runs: Sequence[RunDir]) -> list[RunDir]:
    """Return the runs whose configuration meets all conditions; name a key that none of them has."""
    configured: dict[RunDir, dict[str, Any]] = {run: {} for run in runs}
    for run in runs:
        with suppress(OSError, BadInput):
            configured[run] = dict(dotted(plain_values(run.config)))
    known = {key for values in configured.values() for key in values}
    asked = [found.groups() for found in conditions]
    for key, _, _ in asked:
        if known and key not in known:
            complain(f"no run here is configured with {key}; {nearest(key, known)}".removesuffix("; "), "yellow")
    return [
        run
        for run, values in configured.items()
        if all(key in values and _compared(values[key], how, wanted) for key, how, wanted in asked)
    ]


def _compared(value: object, how: str, wanted: str) -> bool:
    """Compare numbers by value, and everything else as text."""
    try:
        return _COMPARISONS[how](float(str(value)), float(wanted))
    except ValueError:
        return how in ("=", "!=") and _COMPARISONS[how](str(value).lower(), wanted.lower())


def list_runs(args: list[str]) -> int:
    return status(args, "list")


def _watch(overview: Overview, runs: Sequence[RunDir]) -> None:
    """Show runs repeatedly until all of them have ended or the user presses Ctrl-C."""
    from fsdp_jobs.cli.follow import LiveView

    if not runs:
        say("all runs have ended")
        return
    with suppress(KeyboardInterrupt), LiveView() as view:
        while True:
            rows = overview.look(runs)
            view.show(rows)
            if all(row.is_over for row in rows.values()):
                return
            time.sleep(_WATCH_S)


def logs(args: list[str]) -> int:
    parser = VerbParser("logs")
    parser.add_argument("name", nargs="?", help="of the run, or its handle; the newest run when left out")
    parser.add_argument("-f", "--follow", action="store_true", help="continue until the job has ended, across restarts")
    parser.add_argument("--rank", type=int, help="only this rank, counted over all nodes")
    parser.add_argument("--node", type=int, help="only ranks of this node, counted from 0")
    parser.add_argument("--attempt", type=int, help="only this attempt, counted from 0")
    parser.add_argument("--errors", action="store_true", help="only lines that look like an error")
    parser.add_json("an object for each line")
    flags = parser.parse(args)
    if flags.name is None:
        if not (runs := runs_in(flags.runs_dir)):
            raise BadInput.at("logs", f"there are no runs under {flags.runs_dir}/", "runs_dir=...")
        flags.run = runs[-1]
        complain(f"the newest run, {flags.run.name}", "dim")
    run = flags.run
    ask = answers_of(run)  # its launcher may have to fetch the logs
    pattern = rank_logs(flags.attempt, flags.node, flags.rank)
    if not any(file.stat().st_size for file in run.path.glob(pattern)):
        row = Overview(ask).look([run])[run]
        why = f": {row.reason}" if row.reason else ""
        what = "nothing is printed there" if any(run.path.glob(pattern)) else "no such rank has begun"
        complain(f"{what}; {run.name} is {row.state}{why}")

    def goes_on() -> bool:
        (job,) = ask([run.handle]).values()
        return flags.follow and not has_ended(run, job)

    for file, line in follow_files(run.path, pattern, goes_on):
        if flags.errors and not looks_like_error(line):
            continue
        if flags.json:
            attempt, node, rank = numbers_of(file)
            print_json({"attempt": attempt, "node": node, "rank": rank, "line": line})
        else:
            print(f"[{label(file)}] {line}", flush=flags.follow)
    print(end="", flush=True)
    return 0


def wait(args: list[str]) -> int:
    parser = VerbParser("wait")
    parser.add_argument("names", nargs="+", metavar="NAME", help="of runs, or their handles")
    what = "exit with 124 when they have not ended by then"
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help=what)
    flags = parser.parse(args)
    left = {existing_run(name, flags.runs_dir): name for name in dict.fromkeys(flags.names)}
    deadline = time.monotonic() + (math.inf if flags.timeout is None else flags.timeout)
    overview, states, told = Overview(patience_s=VERDICT_S), set[str](), set[str]()
    while True:
        for run, row in overview.look([*left]).items():
            if row.is_over:
                del left[run]
                states.add(row.state)
                say(f"{row.run} {row.state}: {row.reason}")
            elif row.state == UNREADABLE and row.reason not in told:
                told.add(row.reason)
                complain(f"{row.run} {row.state}: {row.reason}; waiting")
        if not left:
            return EXIT_FAILED if states - {"done", "stopped"} else EXIT_REQUEUE if "stopped" in states else 0
        if time.monotonic() > deadline:
            complain(f"still running: {', '.join(left.values())}")
            return EXIT_TIMEOUT
        time.sleep(_WATCH_S)


def cancel(args: list[str]) -> int:
    parser = run_parser("cancel")
    parser.add_argument("--now", action="store_true", help="at once, without a checkpoint")
    parser.add_json()
    flags = parser.parse(args)
    run = flags.run
    check_own(run)
    if job_has_ended(run):
        with suppress(BadInput, JobFailed):  # its launcher does not answer here
            kill([run.handle])  # removes leftovers of a job that has ended
        say(f"{run.name} is not running")
    else:
        stop([run], flags.now)
        row = Overview().look([run])[run]
        say(f"{run.name} {row.state}: {row.reason}")
    print_run(run, flags.json)
    return 0


def print_run(run: RunDir, as_json: bool, row: RunSummary | None = None) -> None:
    """With `--json` print the object that `status` prints for a run, and its path; `row`: what a look has shown."""
    if as_json:
        print_json(asdict(row or Overview().look([run])[run]) | {"directory": str(run.path)})


def export(args: list[str]) -> int:
    parser = run_parser("export")
    parser.add_argument("--format", choices=("safetensors", "pt"), default="safetensors")
    parser.add_argument("--step", type=int, help="of the checkpoint; the newest sound one when left out")
    parser.add_argument("--out", help="folder to write; <run directory>/export when left out")
    parser.add_json()
    flags = parser.parse(args)
    from fsdp_jobs.hub.export import export

    config = load_config(flags.run.config)
    with answering(checkpoints_of(config.checkpoint, flags.run)):
        return _print_files(export(flags.run, config, flags.format, flags.step, flags.out), flags.json)


def _print_files(files: Iterable[Path], as_json: bool) -> int:
    if as_json:
        print_json({"files": [str(file) for file in files]})
        return 0
    for file in files:
        say(str(file))
    return 0


def report(args: list[str]) -> int:
    parser = run_parser("report")
    parser.add_argument("--png", action="store_true", help="also write a picture, drawn by Chromium, Chrome or Edge")
    parser.add_argument("--out", help="folder to write; the run directory when left out")
    parser.add_json()
    flags = parser.parse(args)
    from fsdp_jobs.observe.report import write_report

    return _print_files(write_report(flags.run, flags.png, flags.out), flags.json)


def prune(args: list[str]) -> int:
    from fsdp_jobs.sweeps.jobs import best_runs
    from fsdp_jobs.tools.prune import erase, old_runs, remove, unfinished

    parser = VerbParser("prune")
    parser.add_argument("--older-than", metavar="AGE", required=True, help="since a run's newest change: 30d, 12h")
    parser.add_argument("--keep-best", action="store_true", help="keep each sweep's run with the best objective")
    parser.add_argument("--yes", action="store_true", help="remove them; without it they are only shown")
    flags = parser.parse(args)
    kept = best_runs(flags.runs_dir) if flags.keep_best else []
    found = list(old_runs(flags.runs_dir, _seconds(flags.older_than), kept))
    problems: list[str] = []
    for old in found:
        since = f"{datetime.fromtimestamp(old.ended_at):%Y-%m-%d}"
        say(f"{old.run.name}  {old.state} since {since}  {size(old.bytes)}")
        problems += remove(old) if flags.yes else []
    for folder in unfinished(flags.runs_dir):
        say(f"{folder.name}  left by a prune that was interrupted")
        problems += erase(folder) if flags.yes else []
    for problem in dict.fromkeys(problems):
        complain(f"not removed: {problem}")
    gone = [old for old in found if not (flags.yes and old.run.path.exists())]
    total = f"{counted(len(gone), 'run')}, {size(sum(old.bytes for old in gone))}"
    say(f"removed {total}" if flags.yes else f"{total} would be removed, with checkpoints: add --yes")
    return EXIT_FAILED if problems else 0


def _seconds(age: str) -> float:
    """Raises: BadInput for anything but a number with d, h or m."""
    units = {"d": 86400.0, "h": 3600.0, "m": 60.0}
    if not re.fullmatch(r"\d+(\.\d+)?[dhm]", age):
        raise BadInput.at(f"--older-than {age}", "is not a number with d, h or m", "--older-than 30d")
    return float(age[:-1]) * units[age[-1]]


def dashboard(args: list[str]) -> int:
    from fsdp_jobs.sweeps.jobs import measured
    from fsdp_jobs.sweeps.table import sweeps_in

    parser = VerbParser("dashboard")
    parser.add_argument("--port", type=int, default=8265, help="0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: everywhere")
    parser.add_argument("--token-file", metavar="FILE", help="keep the token in this file, for monitoring")
    flags = parser.parse(args)
    try:
        from fsdp_jobs.observe.dashboard.app import Dashboard
        from fsdp_jobs.observe.dashboard.serve import serve
    except ImportError as e:
        raise BadInput.at("dashboard", str(e), "pip install 'fsdp_jobs[dashboard]'") from e
    return serve(Dashboard(flags.runs_dir, sweeps_in, measured), flags.host, flags.port, flags.token_file)
