"""The verbs that look at runs or act on them. No torch but for export."""

from __future__ import annotations

import argparse
import importlib
import math
import operator
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

from fsdp_jobs.config.arguments import Parser
from fsdp_jobs.config.errors import BadInput, JobFailed, Problem
from fsdp_jobs.config.keys import dotted
from fsdp_jobs.config.schema import load_config, plain_values
from fsdp_jobs.config.terminal import complain, say, show_table, tell
from fsdp_jobs.run.directory import RunDir, pending_in, rank_logs, runs_in, user_name
from fsdp_jobs.run.identity import check_may_act
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.table import counted
from fsdp_jobs.run.tail import follow_files, label, looks_like_error, numbers_of
from fsdp_jobs.run.verdict import EXIT_FAILED, EXIT_REQUEUE
from fsdp_jobs.submit.overview import Overview, RunSummary, story_of
from fsdp_jobs.submit.stop import stop
from fsdp_jobs.submit.submitted import activity_of, check_own, existing_run, has_ended, job_of, kill, settle

_WATCH_S = 2.0  # between two looks of `status --watch`, and of `wait`
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
_NUMBERS = ("step", "loss", "tok/s", "eta", "goodput")  # columns that are aligned to the right


class VerbParser(Parser):
    """Arguments of a verb about runs; each understands `runs_dir=...`, too."""

    def parse(self, args: Sequence[str]) -> argparse.Namespace:
        """Return the flags, with `runs_dir`, and with the `run` that the argument `name` names.

        Raises:
            BadInput: there is no such run.
        """
        given = [a for a in args if a.startswith("runs_dir=")]
        flags = self.parse_args([a for a in args if a not in given])
        flags.runs_dir = given[-1].removeprefix("runs_dir=") if given else "runs"
        if getattr(flags, "name", None) is not None:
            flags.run = existing_run(flags.name, flags.runs_dir)
        return flags


def run_parser(verb: str) -> VerbParser:
    """Make the parser of a verb that takes the name of a run."""
    parser = VerbParser(verb)
    parser.add_argument("name", help="of the run, or its handle")
    return parser


def status(args: list[str]) -> int:
    parser = VerbParser("status")
    what = "of a run, its handle, a pattern as 'llama-*', or what its configuration has, as 'optim.lr>1e-3'"
    parser.add_argument("names", nargs="*", metavar="NAME", help=what)
    parser.add_argument("--state", help="only runs in this state, or several: running,failed")
    parser.add_argument("--last", type=int, metavar="N", help="only the N that were submitted last")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="go on until all have ended, or Ctrl-C")
    how.add_argument("--json", action="store_true", help="a list of objects, for scripts")
    flags = parser.parse(args)
    if not flags.names:
        settle(pending_in(flags.runs_dir))
    runs = _named(flags.names, flags.runs_dir)[-flags.last if flags.last else None :]
    overview = Overview()
    rows = overview.look(runs)
    if flags.state is not None:
        kept = [(run, row) for run, row in zip(runs, rows, strict=True) if row.state in flags.state.split(",")]
        runs, rows = [run for run, _ in kept], [row for _, row in kept]
    if flags.json:
        tell([asdict(row) for row in rows])
    elif not runs:
        say(f"no runs {'of that kind ' if flags.names or flags.state else ''}under {flags.runs_dir}/")
    elif flags.watch:
        _watch(overview, [run for run, row in zip(runs, rows, strict=True) if flags.names or not row.is_over])
    else:
        _show(rows)
        if flags.names and len(runs) == 1:
            told = RunStatus(runs[0])
            told.update()
            for heading, sentence in story_of(told, rows[0].state):
                say(f"{heading:<8}  {sentence}")
    return 0


def _named(names: Sequence[str], runs_dir: str) -> list[RunDir]:
    """Return the runs that names, handles and patterns mean, oldest first; all without any.

    Of these only those whose configuration has what the conditions say.

    Raises:
        BadInput: there is no run of a name.
    """
    conditions = [found for name in names if (found := _CONDITION.fullmatch(name))]
    names = [name for name in names if not _CONDITION.fullmatch(name)]
    patterns = [name for name in names if set("*?[") & set(name)]
    named = [existing_run(name, runs_dir) for name in names if name not in patterns]
    every = runs_in(runs_dir) if patterns or not names else []
    runs = named + [run for run in every if not names or any(fnmatchcase(run.name, p) for p in patterns)]
    return [run for run in runs if not conditions or _has(run, conditions)]


def _has(run: RunDir, conditions: Sequence[re.Match[str]]) -> bool:
    """Tell whether values of a run's configuration are as asked; one that is not there is not."""
    with suppress(OSError, BadInput, ValueError):
        values = dict(dotted(plain_values(run.config)))
        return all(_compared(values.get(key), *asked) for key, *asked in (found.groups() for found in conditions))
    return False


def _compared(value: object, how: str, wanted: str) -> bool:
    """Compare numbers as such, and anything else as it is written."""
    try:
        return _COMPARISONS[how](float(str(value)), float(wanted))
    except ValueError:
        return how in ("=", "!=") and _COMPARISONS[how](str(value).lower(), wanted.lower())


def list_runs(args: list[str]) -> int:
    if names := [a for a in args if not a.startswith(("-", "runs_dir="))]:
        raise BadInput([Problem(names[0], "list shows all runs", f"fsdp-jobs status {names[0]}")])
    return status(args)


def _show(rows: Sequence[RunSummary]) -> None:
    cells = [row.cells() for row in rows]
    if any(row.owner for row in rows):
        cells = [{"owner": row.owner or user_name()} | cell for row, cell in zip(rows, cells, strict=True)]
    show_table(list(cells[0]), [list(row.values()) for row in cells], _NUMBERS)


def _watch(overview: Overview, runs: Sequence[RunDir]) -> None:
    """Show runs again and again, until all of them have ended or the user has seen enough."""
    from fsdp_jobs.cli.follow import LiveView

    if not runs:
        say("all runs have ended")
        return
    with suppress(KeyboardInterrupt), LiveView() as view:
        while True:
            rows = overview.look(runs)
            view.show(runs, rows)
            if all(row.is_over for row in rows):
                return
            time.sleep(_WATCH_S)


def logs(args: list[str]) -> int:
    parser = VerbParser("logs")
    parser.add_argument("name", nargs="?", help="of the run, or its handle; the newest run when left out")
    parser.add_switch("-f", "--follow")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--node", type=int)
    parser.add_argument("--attempt", type=int)
    parser.add_switch("--errors", what="only lines that look like an error")
    parser.add_json("an object for each line")
    flags = parser.parse(args)
    if flags.name is None:
        if not (runs := runs_in(flags.runs_dir)):
            raise BadInput([Problem("logs", f"there are no runs under {flags.runs_dir}/", "runs_dir=...")])
        flags.run = runs[-1]
        complain(f"the newest run, {flags.run.name}", "dim")
    active = activity_of(flags.run)
    pattern = rank_logs(flags.attempt, flags.node, flags.rank)
    if not any(flags.run.path.glob(pattern)):
        (row,) = Overview().look([flags.run])  # its launcher may fetch them
        why = f": {row.reason}" if row.reason else ""
        if not any(flags.run.path.glob(pattern)):
            complain(f"nothing is written there yet; {flags.run.name} is {row.state}{why}")
    # the launcher is asked once in any case: it may have to fetch the logs
    for file, line in follow_files(flags.run.path, pattern, lambda: active() and flags.follow):
        if flags.errors and not looks_like_error(line):
            continue
        if flags.json:
            attempt, node, rank = numbers_of(file)
            tell({"attempt": attempt, "node": node, "rank": rank, "line": line})
        else:
            sys.stdout.write(f"[{label(file)}] {line}\n")
            sys.stdout.flush()
    return 0


def wait(args: list[str]) -> int:
    parser = VerbParser("wait")
    parser.add_argument("names", nargs="+", metavar="NAME", help="of runs, or their handles")
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="exit with 124 when they have not ended by then"
    )
    flags = parser.parse(args)
    left = {name: existing_run(name, flags.runs_dir) for name in dict.fromkeys(flags.names)}
    deadline = time.monotonic() + (flags.timeout if flags.timeout is not None else math.inf)
    overview, states = Overview(), set[str]()
    while True:
        for name, row in zip(tuple(left), overview.look([*left.values()]), strict=True):
            if row.is_over:
                del left[name]
                states.add(row.state)
                say(f"{row.run} {row.state}: {row.reason}")
        if not left:
            return EXIT_FAILED if states - {"done", "stopped"} else EXIT_REQUEUE if "stopped" in states else 0
        if time.monotonic() > deadline:
            complain(f"still running: {', '.join(left)}")
            return EXIT_TIMEOUT
        time.sleep(_WATCH_S)


def cancel(args: list[str]) -> int:
    parser = run_parser("cancel")
    parser.add_switch("--now", what="at once, without a checkpoint")
    parser.add_json()
    flags = parser.parse(args)
    check_may_act(flags.run)
    check_own(flags.run)
    if has_ended(flags.run, job_of(flags.run)):
        with suppress(BadInput, JobFailed):  # its launcher does not answer here
            kill([flags.run.read_job()["handle"]])  # whatever its end has left
        say(f"{flags.run.name} is not running")
        tell_run(flags.run, flags.json)
        return 0
    stop([flags.run], flags.now)
    status = RunStatus(flags.run)
    status.update()
    say(f"{flags.run.name} {status.state}: {status.reason}")
    tell_run(flags.run, flags.json)
    return 0


def tell_run(run: RunDir, as_json: bool) -> None:
    """With `--json` print what `status` does of a run, and where it is."""
    if as_json:
        (row,) = Overview().look([run])
        tell(asdict(row) | {"directory": str(run.path)})


def export(args: list[str]) -> int:
    parser = run_parser("export")
    parser.add_argument("--format", choices=("safetensors", "pt"), default="safetensors")
    parser.add_argument("--step", type=int, help="of the checkpoint; the newest sound one when left out")
    parser.add_argument("--out", help="folder to write; <run directory>/export when left out")
    parser.add_json()
    flags = parser.parse(args)
    from fsdp_jobs.hub.export import export

    return _tell_files(
        export(flags.run, load_config(flags.run.config), flags.format, flags.step, flags.out), flags.json
    )


def _tell_files(files: Iterable[Path], as_json: bool) -> int:
    if as_json:
        tell({"files": [str(file) for file in files]})
        return 0
    for file in files:
        say(str(file))
    return 0


def report(args: list[str]) -> int:
    parser = run_parser("report")
    parser.add_switch("--png", what="also a picture of it, drawn by Chromium or Chrome")
    parser.add_json()
    flags = parser.parse(args)
    from fsdp_jobs.observe.report import write_report

    return _tell_files(write_report(flags.run, flags.png), flags.json)


def prune(args: list[str]) -> int:
    from fsdp_jobs.plan.memory import size
    from fsdp_jobs.sweeps.jobs import best_runs
    from fsdp_jobs.tools.prune import old_runs, remove

    parser = VerbParser("prune")
    parser.add_argument("--older-than", metavar="AGE", required=True, help="since a run's newest change: 30d, 12h")
    parser.add_switch("--keep-best", what="of each sweep the run with the best objective")
    parser.add_switch("--yes", what="remove them; without it they are only shown")
    flags = parser.parse(args)
    kept = best_runs(flags.runs_dir) if flags.keep_best else []
    found = list(old_runs(flags.runs_dir, _seconds(flags.older_than), kept))
    failed = False
    for old in found:
        since = time.strftime("%Y-%m-%d", time.localtime(old.ended_at))
        say(f"{old.run.name}  {old.state} since {since}  {size(old.bytes)}")
        for problem in remove(old) if flags.yes else []:
            failed = True
            complain(f"not removed: {problem}")
    total = f"{counted(len(found), 'run')}, {size(sum(old.bytes for old in found))}"
    say(f"removed {total}" if flags.yes else f"{total} would be removed, with checkpoints: add --yes")
    return EXIT_FAILED if failed else 0


def _seconds(age: str) -> float:
    """Raises: BadInput for what is not a number with d, h or m."""
    units = {"d": 86400.0, "h": 3600.0, "m": 60.0}
    if not re.fullmatch(r"\d+(\.\d+)?[dhm]", age):
        raise BadInput([Problem(f"--older-than {age}", "is not a number with d, h or m", "--older-than 30d")])
    return float(age[:-1]) * units[age[-1]]


def dashboard(args: list[str]) -> int:
    from fsdp_jobs.sweeps.jobs import measured
    from fsdp_jobs.sweeps.table import sweeps_in

    parser = VerbParser("dashboard")
    parser.add_argument("--port", type=int, default=8265, help="0 takes a free one")
    where = "address to listen on; any other than this machine's own needs a token"
    parser.add_argument("--host", default="127.0.0.1", help=where)
    parser.add_argument("--token-file", metavar="FILE", help="keep the token there, as monitoring needs it")
    flags = parser.parse(args)
    leaf = _leaf("dashboard", "fsdp_jobs.observe.dashboard.serve")
    shown = leaf.Dashboard(flags.runs_dir, sweeps_in, measured)
    return int(leaf.serve(shown, flags.host, flags.port, flags.token_file))


def _leaf(verb: str, module: str) -> ModuleType:
    """Import what a verb needs; the verb's name is that of the extra that installs its libraries.

    Raises:
        BadInput: they are not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise BadInput([Problem(verb, str(e), f"pip install 'fsdp_jobs[{verb}]'")]) from e
