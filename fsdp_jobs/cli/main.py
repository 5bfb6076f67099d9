"""The command line: verbs, and Hydra overrides for those that compose a job. No torch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fsdp_jobs.cli import runs as run_verbs
from fsdp_jobs.cli import status as status_verb
from fsdp_jobs.config.errors import BadInput, JobFailed, Problem, nearest
from fsdp_jobs.config.hydra import CONF_DIR, compose_job, groups, merge_overrides, register_schemas
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.run.directory import write_atomic
from fsdp_jobs.run.env import TRACEBACK_ENV
from fsdp_jobs.run.verdict import EXIT_FAILED

EXIT_BAD_INPUT = 2

# Hydra's own flags: with one of these the command line is Hydra's.
_MULTIRUN = ("--multirun", "-m")
_PRINTING = ("--cfg", "-c", "--info", "-i", "--hydra-help")
_HYDRA_FLAGS = (*_MULTIRUN, *_PRINTING)

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

_VERBS = {
    "submit": "compose, plan and submit a job; the verb may be left out",
    "plan": "show how a job would be sharded, and why [--json] [--svg FILE]",
    "status": "what runs are doing: status [NAME|HANDLE] [--watch] [--json]",
    "logs": "what a run's ranks print: logs NAME [-f] [--rank R] [--node I] [--attempt K] [--errors]",
    "cancel": "save a checkpoint and stop: cancel NAME [--now]",
    "report": "a run's curves, faults, goodput and plan as one HTML file: report NAME [--png]",
    "sweep": "all jobs of a --multirun: sweep status|resume|retry-failed|cancel|best|report NAME",
    "dashboard": "all runs live in a browser: dashboard [--port P] [--host ADDRESS]",
    "list": "all runs: the same as status without a name",
    "resume": "go on with a run, changed or not: resume NAME [overrides]",
    "doctor": "can jobs run on a cluster from here: doctor cluster=slurm",
    "rehearse": "your job in small on this machine suffers a fault for real: rehearse kill_node [overrides]",
    "import-accelerate": "a file of accelerate config as overrides: import-accelerate FILE [--experiment NAME]",
    "export": "one safetensors or .pt file from a checkpoint: export NAME [--format pt] [--step N] [--out DIR]",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0; 1 when a job failed; 2 for bad input; 75 when a job was stopped to be requeued."""
    args = list(sys.argv[1:] if argv is None else argv)
    verb = args.pop(0) if args and args[0] in _VERBS else "submit"
    if args and verb == "submit" and args[0].isidentifier():
        return _bad_input(BadInput([Problem(args[0], "is no verb", nearest(args[0], _VERBS) or "fsdp-jobs --help")]))
    try:
        if verb in ("submit", "plan"):
            if "--help" in args or "-h" in args:
                show_help()
                return 0
            if any(a.split("=")[0] in _HYDRA_FLAGS for a in args):
                return _by_hydra(args) if any(a.split("=")[0] in _PRINTING for a in args) else _multirun(args)
            return _submit(args) if verb == "submit" else _plan(args)
        commands: dict[str, Callable[[list[str]], int]] = {
            "status": status_verb.status,
            "logs": run_verbs.logs,
            "cancel": run_verbs.cancel,
            "report": run_verbs.report,
            "dashboard": run_verbs.dashboard,
            "sweep": _sweep,
            "list": status_verb.list_runs,
            "resume": _resume,
            "doctor": _doctor,
            "rehearse": _rehearse,
            "import-accelerate": _import_accelerate,
            "export": run_verbs.export,
        }
        return commands[verb](args)
    except BadInput as e:
        return _bad_input(e)
    except JobFailed as e:
        errors.print(str(e), style="red", markup=False, soft_wrap=True)
        return EXIT_FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _bad_input(error: BadInput) -> int:
    if TRACEBACK_ENV in os.environ:
        errors.print_exception()
    count = len(error.problems)
    errors.print(f"Nothing was done: {count} problem{'s' if count > 1 else ''}.", style="bold red")
    errors.print(str(error), markup=False, soft_wrap=True)
    return EXIT_BAD_INPUT


def show_help() -> None:
    """Every verb and every group with one line each."""
    console.print("Plan, launch and keep alive FSDP training.\n")
    console.print("  fsdp-jobs [verb] [group=option ...] [key=value ...]     (or python -m fsdp_jobs)\n", markup=False)
    verbs = Table.grid(padding=(0, 3))
    for verb, text in _VERBS.items():
        verbs.add_row(f"  {verb}", text.replace("[", r"\["))
    console.print("[bold]verbs[/bold]", verbs, sep="\n")
    console.print("\n[bold]groups[/bold] (the first comment of each file in conf/)")
    table = Table.grid(padding=(0, 3))
    for group, options in groups().items():
        for option in options:
            comment = (CONF_DIR / group / f"{option}.yaml").read_text().splitlines()
            first = next((c[2:] for c in comment if c.startswith("# ") and not c.startswith("# @")), "")
            table.add_row(f"  {group}={option}", first)
    table.columns[0].no_wrap = table.columns[1].no_wrap = True  # one line each; the files have the rest
    table.columns[0].min_width = 36
    console.print(table)
    console.print(
        "\n[bold]often changed[/bold]  name nodes nproc_per_node steps seed optim.lr data.path fsdp.strategy\n"
        "               fsdp.shard_group checkpoint.every_steps checkpoint.keep runs_dir attach dry_run\n"
        "[bold]Hydra[/bold]          --cfg job  --multirun  --config-dir DIR  --info  --hydra-help",
        highlight=False,
    )


def _split_config_dir(args: list[str]) -> tuple[list[str], str | None]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    known, overrides = parser.parse_known_args(args)
    unknown = [o for o in overrides if o.startswith("-")]
    if unknown:
        raise BadInput([Problem(u, "there is no such flag", "fsdp-jobs --help") for u in unknown])
    return overrides, known.config_dir


def _by_hydra(args: list[str]) -> int:
    """Hydra's own flags that print: --cfg and --info."""
    import hydra

    if several := [a for a in args if a in _MULTIRUN]:
        raise BadInput([Problem(several[0], "submits, and the other flag prints", "dry_run=true shows a sweep's jobs")])
    register_schemas()

    @hydra.main(config_path=str(CONF_DIR), config_name="config", version_base="1.3")
    def run(_config: object) -> None:
        raise AssertionError("with these flags Hydra runs nothing")

    sys.argv = [sys.argv[0], *args]
    run()
    return 0


def _multirun(args: list[str]) -> int:
    from fsdp_jobs.sweeps.hydra_launcher import multirun

    overrides, config_dir = _split_config_dir([a for a in args if a not in _MULTIRUN])
    try:
        return EXIT_FAILED if multirun(overrides, config_dir) else 0
    except KeyboardInterrupt:
        console.print("the jobs go on; the same command waits for them again", style="yellow")
        return EXIT_FAILED


def _checked_job(overrides: Sequence[str], config_dir: str | None, files: bool = True) -> JobConfig:
    """The composed and checked configuration.

    Raises:
        BadInput: with what is wrong with overrides, and with what the good ones make, all at once.
    """
    from fsdp_jobs.submit.validate import composed, validate

    (config,) = composed([overrides], config_dir, files)
    validate(config, files)
    return config


def _submit(args: list[str]) -> int:
    overrides, config_dir = _split_config_dir(args)
    return _submit_config(_checked_job(overrides, config_dir), overrides, config_dir)


def _submit_config(config: JobConfig, overrides: Sequence[str], config_dir: str | None = None) -> int:
    from fsdp_jobs.cli.follow import Follower, summary
    from fsdp_jobs.launchers.state import State
    from fsdp_jobs.plan.render import render
    from fsdp_jobs.submit import submit as submission

    (job,) = submission.prepare([config])
    console.print(render(job.plan))
    if config.dry_run:
        console.print(str(job.request), markup=False, soft_wrap=True)
        console.print("dry run: nothing was submitted", style="yellow")
        return 0
    kept = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    follower = None
    if config.attach:
        follower = Follower(job.run, config, console, lambda: submission.is_active(handle))
    (handle,) = submission.submit([job], [[*kept, *overrides]])
    console.print(f"submitted {handle}\nrun directory {job.run.path}", markup=False, soft_wrap=True)
    (described,) = submission.describe([handle])
    if described.state is State.QUEUED:
        console.print(described.message, markup=False, soft_wrap=True)
    if follower is None:
        console.print(f"follow with: fsdp-jobs logs -f {job.run.name}", markup=False)
        return 0
    try:
        status = follower.follow()
    except KeyboardInterrupt:
        console.print("saving a checkpoint, then stopping; Ctrl-C again stops at once", style="yellow")
        write_atomic(job.run.stop_request, "Ctrl-C")
        try:
            status = follower.follow()
        except KeyboardInterrupt:
            submission.kill([handle])
            follower.status.update()
            status = follower.status
    summary(status, config, console)
    return 0 if status.state in ("done", "stopped") else EXIT_FAILED


def _plan(args: list[str]) -> int:
    from fsdp_jobs.plan.render import render, to_svg
    from fsdp_jobs.submit.submit import plan_of

    parser = argparse.ArgumentParser(prog="fsdp-jobs plan", add_help=False, allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--svg", metavar="FILE")
    flags, rest = parser.parse_known_args(args)
    overrides, config_dir = _split_config_dir(rest)
    plan, _ = plan_of(_checked_job(overrides, config_dir, files=False))
    if flags.svg:
        with open(flags.svg, "w") as f:
            f.write(to_svg(plan))
    if flags.json:
        sys.stdout.write(plan.to_json() + "\n")
    else:
        console.print(render(plan))
    return 0


def _resume(args: list[str]) -> int:
    args, runs_dir = run_verbs.take_runs_dir(args)
    if not args or "=" in args[0] or args[0].startswith("-"):
        run_verbs.run_parser("resume").parse_args(["--help"] if "--help" in args or "-h" in args else [])
    run = run_verbs.existing_run(args[0], runs_dir)
    runs_dir = str(run.path.parent) if "://" in args[0] else runs_dir
    before = [o for o in run.read_job()["overrides"] if o.partition("=")[0] not in ("attach", "dry_run")]
    overrides = merge_overrides(before, [*args[1:], f"name={run.name}", f"runs_dir={runs_dir}"])
    return _submit_config(compose_job(overrides), overrides)


def _sweep(args: list[str]) -> int:
    from fsdp_jobs.sweeps.verbs import sweep

    return sweep(args)


def _doctor(args: list[str]) -> int:
    from fsdp_jobs.tools.doctor import doctor

    overrides, config_dir = _split_config_dir(args)
    return doctor(_checked_job(overrides, config_dir, files=False), console)


def _rehearse(args: list[str]) -> int:
    from fsdp_jobs.tools.rehearse import FAULTS, rehearse

    if not args or args[0] not in FAULTS:
        given = args[0] if args else "rehearse"
        faults = "; ".join(f"{name}: {text}" for name, text in FAULTS.items())
        raise BadInput([Problem(given, f"name a fault. {faults}", nearest(given, FAULTS))])
    overrides, config_dir = _split_config_dir(args[1:])
    outcome = rehearse(compose_job(overrides, config_dir), args[0], lambda text: console.print(text, style="dim"))
    took = "-" if outcome.recovery_s is None else f"{outcome.recovery_s:.1f} s"
    word = "[bold green]PASS[/bold green]" if outcome.passed else "[bold red]FAIL[/bold red]"
    console.print(f"{word} {args[0]}: {outcome.why}; next step after {took}, {outcome.lost_steps} steps done again")
    return 0 if outcome.passed else EXIT_FAILED


def _import_accelerate(args: list[str]) -> int:
    from fsdp_jobs.tools.import_accelerate import read

    parser = argparse.ArgumentParser(prog="fsdp-jobs import-accelerate", allow_abbrev=False)
    parser.add_argument("file", type=Path, help="that accelerate config wrote")
    parser.add_argument("--experiment", metavar="NAME", help="as a file for the group experiment")
    parser.add_argument("--config-dir", metavar="DIR", type=Path, help="where to write that file")
    given = parser.parse_args(args)
    found = read(given.file)
    text = found.experiment(given.file.name) if given.experiment else " ".join(found.overrides()) + "\n"
    if given.experiment and given.config_dir is not None:
        file = given.config_dir / "experiment" / f"{given.experiment}.yaml"
        write_atomic(file, text)
        text = f"{file}\n"
    sys.stdout.write(text)
    for key, note in found.notes.items():
        errors.print(f"{key}: {note}", style="dim", markup=False, soft_wrap=True)
    return 0
