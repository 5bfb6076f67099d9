"""Run the command line: the table of verbs, help, and the output of errors. No torch."""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from shutil import which

from rich.table import Table
from rich.text import Text

import fsdp_jobs
from fsdp_jobs.config import habits
from fsdp_jobs.config.errors import BadInput, JobFailed, name_file, nearest
from fsdp_jobs.config.groups import choosing, groups, summary
from fsdp_jobs.config.terminal import complain, console, errors, say, silence
from fsdp_jobs.run.env import RANK_STATE_ENV, TRACEBACK_ENV
from fsdp_jobs.run.table import counted
from fsdp_jobs.run.verdict import EXIT_FAILED

EXIT_BAD_INPUT = 2
_ACTING = ("submit", "resume", "cancel", "sweep", "rehearse", "prune", "dashboard")  # they continue without a reader
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as of a shell
_CURES = {
    errno.ENOSPC: "make room there, then repeat the command",
    errno.EDQUOT: "make room in your quota, then repeat the command",
    errno.EACCES: "only its owner may do that; report and export write elsewhere with --out, a job with runs_dir=...",
    errno.EROFS: "make it writable, or choose another current folder, runs_dir=..., or --out=... of report and export",
    errno.ENOENT: "choose a folder that exists or can be made; repeat the command if something has just removed it",
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.EEXIST), "move it away, or give another name"),
    errno.ENAMETOOLONG: "a shorter name",
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENOTCONN), "check its disk or mount, then repeat the command"),
}


# Verb -> module:function under fsdp_jobs, imported on use (from arguments to an exit code), and the line of help.
VERBS = {
    "submit": (
        "cli.jobs:submit",
        "plan and submit a job; the verb may be left out [--json] [--output FORMAT]",
    ),
    "plan": ("cli.jobs:plan", "show how a job would be sharded, and why [--json] [--svg FILE]"),
    "status": ("cli.runs:status", "what runs are doing: status [NAME ...] [--state S] [--last N] [--watch] [--json]"),
    "logs": (
        "cli.runs:logs",
        "what ranks print: logs NAME [-f] [--rank R] [--node I] [--attempt K] [--errors]",
    ),
    "wait": ("cli.runs:wait", "wait until runs have ended, for scripts: wait NAME... [--timeout SECONDS]"),
    "cancel": ("cli.runs:cancel", "save a checkpoint and stop: cancel NAME [--now] [--json]"),
    "report": (
        "cli.runs:report",
        "curves, faults, goodput and plan as an HTML file: report NAME [--png] [--out DIR]",
    ),
    "sweep": ("sweeps.verbs:sweep", "jobs of a --multirun: sweep status|resume|retry-failed|cancel|best|report NAME"),
    "dashboard": ("cli.runs:dashboard", "all runs live in a browser: dashboard [--port P] [--host ADDRESS]"),
    "list": ("cli.runs:list_runs", "the same as status: list [NAME ...] [--state S] [--last N] [--watch] [--json]"),
    "resume": ("cli.jobs:resume", "continue a run, changed or not: resume NAME [overrides] [--json]"),
    "doctor": ("cli.jobs:examine", "can jobs run here, or on a cluster: doctor [cluster=slurm] [--save FILE] [--json]"),
    "rehearse": (
        "cli.jobs:rehearse",
        "a small copy of your job suffers a real fault here: rehearse FAULT [overrides]",
    ),
    "prune": ("cli.runs:prune", "remove runs that ended long ago: prune --older-than 30d [--keep-best] [--yes]"),
    "import-accelerate": (
        "hub.import_accelerate:main",
        "a file of accelerate config as overrides: import-accelerate FILE [--experiment NAME]",
    ),
    "init": ("cli.setup:init", "files to start from, in this folder: init cluster=docker|kubernetes|local|slurm"),
    "schema": ("cli.setup:schema", "a JSON schema with which editors complete and check a job's YAML"),
    "completion": ("cli.setup:completion", "a script that makes a shell complete commands: completion bash|zsh|fish"),
    "export": (
        "cli.runs:export",
        "a file of weights: export NAME [--format safetensors|pt] [--step N] [--out DIR]",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code, as docs/reference/exit-codes.md lists them.
    """
    os.environ.pop(RANK_STATE_ENV, None)  # a job that a rank submits is not the rank's own job
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["help"]:
        args = [*args[1:], "--help"]
    verb = args.pop(0) if args and args[0] in VERBS else "submit"
    try:
        if args == ["--version"]:
            print(f"fsdp_jobs {fsdp_jobs.__version__}", flush=True)
            return 0
        asks_help = verb == "submit" and bool({"--help", "-h"} & {*args[: habits.program_at(args)]})
        if asks_help and args[0] in groups():
            _show_rows((f"{args[0]}={option}", summary(args[0], option)) for option in groups()[args[0]])
            return 0
        if verb == "submit" and args and args[0].isidentifier():
            word = args[0]
            meant = f"fsdp-jobs {habits.VERBS[word]}" if word in habits.VERBS else habits.meant_by(word)
            program = f"a program: script={found}" if (found := which(word)) else ""
            cure = " ".join(filter(None, [nearest(word, VERBS), program])) or "fsdp-jobs --help"
            raise BadInput.at(word, "not a verb", meant or choosing(word) or cure)
        if asks_help:
            show_help()
            return 0
        if verb in ("submit", "plan"):
            args = habits.program_as_overrides(args)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal's encoding may lack letters of paths and messages
        console.ends_with_its_reader = verb not in _ACTING
        module, _, name = VERBS[verb][0].partition(":")
        Path.cwd()  # fails now if it was removed: torch and Hydra need one
        function: Callable[[list[str]], int] = getattr(importlib.import_module(f"fsdp_jobs.{module}"), name)
        return function(args)
    except BadInput as e:
        return _bad_input(e)
    except JobFailed as e:
        complain(str(e), "red")
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        silence(sys.stdout)
        return 0
    except OSError as e:
        if e.filename is None and _output_is_lost():
            complain(f"the output cannot be written: {e.strerror}; what is submitted continues", "red")
            return EXIT_FAILED
        name_file(e)
        if e.errno not in _CURES or (e.filename is None and e.errno != errno.ENOENT):
            raise
        # filename2 is the target of a copy or rename. Only errors about the current folder name no file.
        place = e.filename2 or e.filename or "the current folder"
        return _bad_input(BadInput.at(str(place), str(e.strerror), _CURES[e.errno]))
    finally:
        console.write_to(stderr=False)  # a verb's --json holds for that verb


def _output_is_lost() -> bool:
    """Whether stdout cannot be written, as on a full disk; then nothing more is written to it."""
    try:
        print(flush=True)
    except OSError:
        silence(sys.stdout)
        return True
    return False


def _bad_input(error: BadInput) -> int:
    if TRACEBACK_ENV in os.environ:
        errors.print_exception()
    complain(f"Nothing was done: {counted(len(error.problems), 'problem')}.", "bold red")
    complain(str(error))
    return EXIT_BAD_INPUT


def what_of(verb: str) -> str:
    """Return what a verb does, without its arguments."""
    return re.split(rf": {verb}| \[", VERBS[verb][1])[0]


def show_help() -> None:
    """Print the verbs, and the groups with their options, on one screen."""
    say("Plan, launch and keep alive FSDP training.\n")
    say("  fsdp-jobs [verb] [group=option ...] [key=value ...]")
    say("  fsdp-jobs [key=value ...] train.py --lr 3e-4     (your program; or -m pkg.train)\n")
    say(Text.assemble(("verbs", "bold"), "   fsdp-jobs help VERB shows the arguments"))
    _show_rows((verb, what_of(verb)) for verb in VERBS)
    say(Text.assemble(("\ngroups", "bold"), "  fsdp-jobs help GROUP describes the options"))
    _show_rows((group, " ".join(options)) for group, options in groups().items())
    say(
        Text.assemble(
            ("\noften changed", "bold"),
            "  name nodes nproc_per_node steps seed optim.lr data.path fsdp.strategy\n"
            "               fsdp.shard_group checkpoint.every_steps checkpoint.keep runs_dir attach dry_run\n",
            ("Hydra", "bold"),
            "          --cfg job  --multirun  --config-dir DIR  --info  --hydra-help",
        )
    )


def _show_rows(rows: Iterable[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 3))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # no word is cut in a narrow terminal
    for name, about in rows:
        table.add_row(f"  {name}", about)
    say(table)
