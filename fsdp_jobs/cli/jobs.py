"""Implement the verbs that compose a job from Hydra overrides. No torch."""

from __future__ import annotations

import io
import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from fsdp_jobs.cli.follow import Follower, summary
from fsdp_jobs.cli.runs import print_run
from fsdp_jobs.config.arguments import (
    RUNS_DIR,
    ComposingParser,
    Parser,
    file_name,
    overrides_in,
    search_path,
    split_folders,
)
from fsdp_jobs.config.errors import BadInput, nearest
from fsdp_jobs.config.groups import CONF_DIR
from fsdp_jobs.config.hydra import as_hydra_reads, compose_job, key_of, register_schemas
from fsdp_jobs.config.resolve import silence_s
from fsdp_jobs.config.schema import PROGRAM_KEYS, TRAINERS_KEYS
from fsdp_jobs.config.terminal import console, print_json, say
from fsdp_jobs.launchers.base import Description, launcher_of
from fsdp_jobs.plan.render import render
from fsdp_jobs.plan.svg import to_svg
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.identity import check_may_act
from fsdp_jobs.run.processes import exit_on_signals
from fsdp_jobs.run.state import State
from fsdp_jobs.run.table import counted
from fsdp_jobs.run.threads import in_thread
from fsdp_jobs.run.verdict import EXIT_FAILED
from fsdp_jobs.submit import submit as submission
from fsdp_jobs.submit.stop import stop
from fsdp_jobs.submit.submitted import another_runs, answers_of, existing_run, kill, named, replace_lost
from fsdp_jobs.submit.validate import composed, job_without_files

# Hydra's own flags: with one of these, Hydra handles the command line.
_MULTIRUN = ("--multirun", "-m")
_PRINTING = ("--cfg", "-c", "--info", "-i", "--hydra-help")
_SITE_FILE = "# fsdp-jobs doctor"  # a site file begins with this


def submit(args: list[str]) -> int:
    sweeping = _among(args, _MULTIRUN)
    if printing := _among(args, _PRINTING):
        if sweeping:
            what = f"submits jobs, but {printing[0]} only prints"
            raise BadInput.at(sweeping[0], what, "dry_run=true shows a sweep's jobs")
        return _print_by_hydra(args)
    if sweeping:
        from fsdp_jobs.sweeps.hydra_launcher import multirun

        overrides = overrides_in([a for a in args if a not in sweeping])
        _say_unused(overrides)
        return EXIT_FAILED if multirun(overrides) else 0
    what = "with dry_run=true: print only what would be submitted, as yaml (SLURM: script)"
    parser = ComposingParser("submit")
    parser.add_argument("--output", "-o", metavar="FORMAT", help=what)
    parser.add_json()
    flags, overrides = parser.parse(args)
    console.write_to(stderr=console.stderr or flags.output is not None)
    return _submit(overrides, flags.output, flags.json)


def _submit(
    overrides: Sequence[str], output: str | None = None, as_json: bool = False, is_resumed: bool = False
) -> int:
    (config,) = composed([overrides])
    _say_unused(overrides)
    (job,) = submission.prepare([config])
    steps = None if config.is_program else config.steps
    if job.before.get("steps") == steps and not (is_resumed or config.checkpoint.restart_from_zero):
        submission.check_left(job.run, [])
    if job.run.path.resolve() in {Path(word.rpartition("=")[2]).resolve() for word in shlex.split(config.script_args)}:
        what = "has the job's own config.yaml, metrics.jsonl and so on, which the program's may replace"
        say(f"{job.run.path} {what}: give it a folder of its own, as {job.run.path}/own", "yellow")
    if output and (not config.dry_run or output != job.launcher.output):
        what = f"a dry run with {job.launcher.name} shows {job.launcher.output}"
        raise BadInput.at(f"--output {output}", what, f"dry_run=true --output {job.launcher.output}")
    say(render(job.plan, in_brief=True))
    say("the whole plan, with its tables: fsdp-jobs plan and the job's arguments", "dim")
    if config.dry_run:
        if as_json:
            print_json({"request": str(job.request)})
        else:
            print(submission.artefact_of(job, overrides) if output else f"{job.request}\n", end="", flush=True)
        say("dry run: nothing was submitted", "yellow")
        return 0
    follower = Follower(job.run) if config.attach else None
    (handle,) = submission.submit([job], [overrides])
    say(f"submitted {handle}\nrun directory {job.run.path}")
    ask = answers_of(job.run)
    described = ask([handle])[handle]
    if described.state is State.QUEUED:
        say(described.message)
    if config.is_program and not config.elastic.stall_timeout_s:
        limit = f"no output, work or new file for {silence_s(config.elastic) / 60:.0f} minutes counts as a hang"
        say(f"{limit} (elastic.stall_timeout_s)", "dim")
    if follower is None:
        say(f"follow with: fsdp-jobs logs -f {named(job.run)}")
        print_run(job.run, as_json)
        return 0
    try:
        row = follower.follow(ask)
    except KeyboardInterrupt:
        say("Ctrl-C again stops at once, without a checkpoint", "yellow")
        stopping = in_thread(lambda: stop([job.run]))

        def ask_while_stopping(handles: Sequence[str]) -> dict[str, Description]:
            if stopping.done():
                stopping.result()
            return ask(handles)

        try:
            row = follower.follow(ask_while_stopping)
            stopping.result()
        except KeyboardInterrupt:
            kill([handle])
            row = follower.follow(ask)
    summary(job.run, row)
    print_run(job.run, as_json, row)
    return 0 if row.state in ("done", "stopped") else EXIT_FAILED


def plan(args: list[str]) -> int:
    if _among(args, _PRINTING):
        return _print_by_hydra(args)
    parser = ComposingParser("plan")
    parser.add_json("all of the plan as one object")
    parser.add_argument("--svg", type=file_name, metavar="FILE", help="also draw it")
    flags, overrides = parser.parse(args)
    planned, _ = submission.plan_of(job_without_files(overrides))
    if flags.svg:
        Path(flags.svg).write_text(to_svg(planned))
    if flags.json:
        print_json(json.loads(planned.to_json()))
    else:
        say(render(planned))
    return 0 if planned.fits else EXIT_FAILED


def resume(args: list[str]) -> int:
    parser = ComposingParser("resume")
    parser.add_argument("name", help="of the run, or its handle; then what changes: group=option, key=value")
    parser.add_json()
    folders, rest = split_folders(args, RUNS_DIR)
    flags, changes = parser.parse(rest)
    run = existing_run(flags.name, folders["runs_dir"])
    check_may_act(run)
    submission.check_left(run, changes)
    is_dry = any(compose_job([change]).dry_run for change in changes if key_of(change) == "dry_run")
    if copied := another_runs(run):
        say(f"{copied}: {run.name} gets a job of its own")
    elif not is_dry and (replaced := replace_lost(run.handle)):
        say(replaced)
        print_run(run, flags.json)
        return 0
    return _submit(submission.overrides_again(run, changes), as_json=flags.json, is_resumed=True)


def examine(args: list[str]) -> int:
    from fsdp_jobs.tools.doctor import doctor, show

    what = "write the facts of this site that dry runs elsewhere need; they read cluster.site=FILE"
    parser = ComposingParser("doctor")
    parser.add_argument("--save", type=file_name, metavar="FILE", help=what)
    parser.add_json()
    flags, overrides = parser.parse(args)
    config = job_without_files(overrides)
    if flags.save is not None:
        file, made = Path(flags.save), f"{_SITE_FILE} {' '.join(args)}\n# {time.strftime('%Y-%m-%d %H:%M %z')}\n"
        if file.is_dir() or (file.exists() and not file.read_bytes().startswith(_SITE_FILE.encode())):
            raise BadInput.at(f"--save {file}", "exists and was not written by doctor", "--save site.yaml")
        write_atomic(file, made + launcher_of(config.cluster.launcher).site_file())
        say(f"saved for dry runs elsewhere: cluster.site={flags.save}")
    found = []
    for finding in doctor(config):
        found.append(asdict(finding))
        show(finding)
    has_bad = any(finding["state"] == "bad" for finding in found)
    if flags.json:
        print_json({"ok": not has_bad, "findings": found})
    return EXIT_FAILED if has_bad else 0


def rehearse(args: list[str]) -> int:
    from fsdp_jobs.tools import rehearse as tool

    parser = ComposingParser("rehearse")
    parser.add_argument("fault", nargs="?", help="what the job suffers")
    parser.add_json()
    flags, overrides = parser.parse(args)
    if flags.fault not in tool.FAULTS:
        given = flags.fault or "rehearse"
        faults = "".join(f"\n      {name:<18}  {text}" for name, text in tool.FAULTS.items())
        raise BadInput.at(given, f"name one of these faults{faults}", nearest(given, tool.FAULTS))
    config = compose_job(overrides)
    with exit_on_signals():  # its job ends with this process
        outcome = tool.rehearse(config, flags.fault)
    took = "-" if outcome.recovery_s is None else f"{outcome.recovery_s:.1f} s"
    word = ("PASS", "bold green") if outcome.passed else ("FAIL", "bold red")
    what = f" {flags.fault}: {outcome.why}; next step after {took}, {counted(outcome.lost_steps, 'step')} repeated"
    say(Text.assemble(word, what))
    if flags.json:
        print_json(asdict(outcome))
    return 0 if outcome.passed else EXIT_FAILED


def _among(args: list[str], flags: Sequence[str]) -> list[str]:
    return [a for a in args if a.partition("=")[0] in flags]


def _print_by_hydra(args: list[str]) -> int:
    import hydra

    parser = hydra._internal.utils.get_args_parser()
    parser.error = Parser("--cfg job").error  # type: ignore[method-assign]  # as other bad input
    flags = parser.parse_intermixed_args(args)
    folder = [search_path(flags.config_dir)] if flags.config_dir else []
    compose_job([*folder, *flags.overrides])  # names what does not fit, with the nearest key
    register_schemas()

    @hydra.main(config_path=str(CONF_DIR), config_name="config", version_base="1.3")
    def run(_config: object) -> None:
        raise AssertionError("with these flags Hydra runs nothing")

    own = [a for a in args if a not in flags.overrides]  # Hydra needs the overrides together, after all flags
    sys.argv = [sys.argv[0], *own, *as_hydra_reads(flags.overrides)]
    with redirect_stdout(io.StringIO()) as printed:  # printed at once, because the reader may close the pipe early
        run()
    print(printed.getvalue(), end="", flush=True)
    return 0


def _say_unused(overrides: Sequence[str]) -> None:
    """Name the overrides that only the trainer reads, if the job runs a user's program."""
    is_program = any(key_of(o) in PROGRAM_KEYS for o in overrides)
    if unused := [o for o in overrides if is_program and key_of(o).partition(".")[0] in TRAINERS_KEYS]:
        what = "no effect on your program, unless it reads job.config(); its own arguments go into script_args"
        say(f"{', '.join(unused)}: {what}", "yellow")
