"""Submit jobs: validate, open the run, plan, prepare, submit. No torch, no cluster by name.

Every function takes many jobs and queries each launcher once for all of them.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fsdp_jobs.checkpoints.catalog import find_checkpoints
from fsdp_jobs.config.data import READ_FROM_PATH
from fsdp_jobs.config.errors import BadInput, JobFailed, Problem
from fsdp_jobs.config.hydra import key_of, merge_overrides
from fsdp_jobs.config.program import launcher_in
from fsdp_jobs.config.resolve import most_nodes, ranks_per_node
from fsdp_jobs.config.schema import JobConfig, dump_config, plain_values
from fsdp_jobs.config.terminal import say
from fsdp_jobs.launchers.base import Job, Launcher, at_once, grouped, launcher_of, new_submission
from fsdp_jobs.plan.plan import Plan, make_plan
from fsdp_jobs.plan.shape_client import check_initial_weights, run_probe, shape_of
from fsdp_jobs.plan.shapes import ModelShape
from fsdp_jobs.plan.sources import from_yaml
from fsdp_jobs.plan.topology import Topology
from fsdp_jobs.run.directory import RunDir, checkpoints_of, run_dir_of, runs_in
from fsdp_jobs.run.files import as_written, digest_of, exists, write_atomic
from fsdp_jobs.run.goodput import Failures, costs_of, failures_of
from fsdp_jobs.run.identity import check_may_act, claim, identity_of
from fsdp_jobs.run.processes import exit_on_signals, raise_file_limit
from fsdp_jobs.run.record import JsonObject
from fsdp_jobs.run.state import State
from fsdp_jobs.run.status import RunStatus
from fsdp_jobs.run.table import listed
from fsdp_jobs.run.verdict import Verdict
from fsdp_jobs.submit.submitted import adopt, has_ended, job_of, named, record
from fsdp_jobs.submit.validate import check_existing_run, validate

REHEARSED = "rehearse-"  # prefix of the names of runs with injected failures
_FOR_ONE_SUBMISSION = ("attach", "dry_run", "allow_config_change", "checkpoint.restart_from_zero")
_ENOUGH_NODE_DAYS = 100.0  # enough of them to estimate how often nodes of the cluster fail
_LEAVES_S = 30.0  # within which a launcher notices that a job has ended


@dataclass(kw_only=True)
class Prepared(Job):
    """A job that can be submitted, with its launcher's request. Nothing is written yet."""

    launcher: Launcher
    before: JsonObject  # content of job.json from the previous submission
    request: Any = None  # of the launcher's `prepare`
    sweep: JsonObject | None = None  # the job's sweep, for job.json


def plan_of(config: JobConfig, run: RunDir | None = None) -> tuple[Plan, ModelShape | None]:
    """Plan a configuration; also return the shape of its model, if it is known.

    The predicted goodput includes the costs of checkpoints and restarts on `run`, the run that is continued, and the
    rate of node failures in the newest runs beside it on the same kind of cluster.

    Raises:
        BadInput: the model cannot be built, the topology file is bad, the sharding is impossible, or the
            launcher does not exist.
    """
    shape = shape_of(config)
    topology = _topology(config)
    nodes = None if topology is None else most_nodes(config)
    costs = None if run is None else costs_of(run)
    seen = _seen(config.runs_dir, config.cluster.launcher, config.hardware.name)
    return make_plan(config, topology, nodes, shape, costs=costs, seen=seen), shape


def overrides_again(run: RunDir, changes: Sequence[str]) -> list[str]:
    """Return the overrides that submit a run again: those of its newest submission, with changes.

    Overrides that applied only to that submission are left out, for example the user's permissions.
    """
    before = [o for o in run.read_job()["overrides"] if key_of(o) not in _FOR_ONE_SUBMISSION]
    given = "checkpoint.dir" in map(key_of, before)
    if given and (folder := plain_values(run.config)["checkpoint"]["dir"]):  # absolute
        before = merge_overrides(before, [f"checkpoint.dir={folder}"])
    return merge_overrides(before, [*changes, f"name={run.name}", f"runs_dir={run.path.parent}"])


def check_left(run: RunDir, changes: Sequence[str]) -> None:
    """Check that a run to be resumed has something left to do; a program that is done is started once more.

    Raises:
        BadInput: the trainer has done all steps, and the changes name no others.
    """
    steps, status = run.read_job().get("steps"), RunStatus(run)
    status.glance()
    if status.state != "done":
        return
    if steps is None and not changes:
        say(f"{run.name} is done: {status.reason}; its script is started once more", "yellow")
    elif steps is not None and "steps" not in map(key_of, changes):
        train_on = f"fsdp-jobs resume {named(run)} steps={2 * steps}"
        raise BadInput.at(run.name, f"is done: {status.reason}; no step is left to do", train_on)


@cache
def _seen(runs_dir: str, launcher: str, hardware: str) -> Failures:
    """Return the failures of this cluster's nodes, none if there are too few runs; read once for a sweep.

    Rehearsals are left out.
    """
    runs = [run for run in runs_in(runs_dir) if not (run.name.startswith(REHEARSED) or run.is_damaged)]
    here = (run for run in runs if run.handle.startswith(f"{launcher}://"))
    seen = failures_of([run for run in here if (plan := Plan.of(run)) is not None and plan.hardware == hardware])
    return seen if seen.node_days >= _ENOUGH_NODE_DAYS else Failures()


def forget() -> None:
    """Drop what a command shares between its jobs: in a notebook, model and cluster may have changed."""
    run_probe.cache_clear()
    _seen.cache_clear()
    for launcher in Launcher.__subclasses__():  # only those that were imported: others have no answers
        launcher.forget()


def _topology(config: JobConfig) -> Topology | None:
    """Return the topology of the nodes: from the user's file, or else from the launcher, if it knows."""
    path = config.cluster.topology
    if path is None:
        return launcher_of(config.cluster.launcher).topology(config)
    try:
        return from_yaml(Path(path).read_text(), path, ranks_per_node(config))
    except OSError as e:
        raise BadInput.at(f"cluster.topology={path}", str(e.strerror)) from e
    except UnicodeDecodeError as e:
        raise BadInput.at(f"cluster.topology={path}", "is not text in UTF-8") from e


def prepare(configs: Sequence[JobConfig]) -> list[Prepared]:
    """Validate and plan jobs, and let their launchers prepare the requests. Writes and starts nothing; says notes.

    Raises:
        BadInput: all problems of all configurations, names and run directories; each problem once.
    """
    jobs: list[Prepared] = []
    problems: list[Problem] = []
    asked: dict[str, list[str]] = {}
    submission = new_submission()
    for config in configs:
        try:
            launcher = launcher_of(config.cluster.launcher)
            if (cluster := repr((config.cluster, config.dry_run))) not in asked:  # only once: it may not answer
                asked[cluster] = launcher.offline_notes(config) if config.dry_run else []
            notes = asked[cluster]
            validate(config, is_offline=bool(notes))
            if (folder := config.checkpoint.dir) and "://" not in folder:  # so that it is found from other folders, too
                config = replace(config, checkpoint=replace(config.checkpoint, dir=str(as_written(folder))))
            run = _open(config, [job.run for job in jobs], is_offline=bool(notes))
            before = run.read_job()
            if not notes:
                _check_free(run)
            planned = plan_of(config, run)
            jobs.append(Prepared(config, run, *planned, submission, notes, launcher=launcher, before=before))
        except BadInput as e:
            problems += e.problems
    for group in grouped(jobs, lambda job: job.launcher.name).values():
        try:
            for job, request in zip(group, group[0].launcher.prepare(group), strict=True):
                job.request = request
        except BadInput as e:
            problems += e.problems
    if problems:
        raise BadInput(dict.fromkeys(problems))
    offline = [f"rendered without the cluster: {line}" for lines in asked.values() for line in lines]
    for note in dict.fromkeys([*offline, *(note for config in configs for note in _notes(config))]):
        say(note, "yellow")
    return jobs


def _notes(config: JobConfig) -> Iterator[str]:
    """Yield what a configuration may not do as its user means it."""
    if config.data.path is not None and config.data.kind not in READ_FROM_PATH and not config.is_program:
        yield f"data.path={config.data.path}: no effect with data={config.data.kind}, which reads no path"
    if launcher := launcher_in(config):
        cure = f"nproc_per_node=1, or `exec python` in place of {launcher}"
        yield f"{config.script}: if it starts {launcher}, each rank starts a whole node's ranks: {cure}"


def _open(config: JobConfig, taken: Sequence[RunDir], is_offline: bool) -> RunDir:
    """Return a configuration's run directory; unless offline, validate the run that it continues."""
    run = run_dir_of(config)
    if any(run.path == other.path for other in taken):
        raise BadInput.at(f"name={run.name}", "names two jobs of the same submission")
    check_may_act(run)
    if not is_offline:
        check_existing_run(config, run)
    can_look = config.init_from is not None and config.cluster.shares_files and not is_offline
    if can_look and not find_checkpoints(checkpoints_of(config.checkpoint, run)):
        check_initial_weights(config)
    return run


def _check_free(run: RunDir) -> None:
    """Check that no job uses this run directory; a job with a verdict is given time to exit.

    Raises:
        BadInput: a job uses it, or its launcher does not answer.
    """
    deadline = time.monotonic() + _LEAVES_S
    while run.is_submitted and not has_ended(run, job := job_of(run)):
        if Verdict.final(run) is None or time.monotonic() > deadline:
            what = f"is in use by the live job {run.handle}"
            cure = f"fsdp-jobs cancel {named(run)}, or wait for it: fsdp-jobs logs -f {named(run)}"
            if job.state is State.SILENT:
                what = f"may be in use by the job {run.handle}: {job.message}"
                cure = f"ask there; if that job no longer exists: rm {run.job}, and submit with all overrides"
            raise BadInput.at(f"run directory {run.path}", what, cure)
        time.sleep(0.2)


def submit(
    jobs: Sequence[Prepared], overrides: Sequence[Sequence[str]], parallelism: int = 0, folder: Path | None = None
) -> list[str]:
    """Write run directories and hand the jobs to their launchers, all or none.

    Args:
        jobs: of `prepare`.
        overrides: of each job; `resume` composes them again.
        parallelism: maximum number of jobs that run at once, 0 for no limit.
        folder: of the sweep, for launchers' files; None for a single job.

    Returns:
        Handles, `scheduler://cluster/id`, in order.

    Raises:
        BadInput, JobFailed: another command was faster, or a launcher refuses; then all of these jobs are withdrawn.
        JobFailed: they are submitted, but their handles cannot be recorded.
    """
    with exit_on_signals(), ExitStack() as locks:
        raise_file_limit()  # a sweep holds a lock per run
        for job in sorted(jobs, key=lambda job: job.run.path):  # in a fixed order, so that two commands cannot deadlock
            locks.enter_context(job.run.locked())
            adopt(job.run)
            if (now := job.run.read_job()) != job.before:  # another command was faster
                if not now:
                    what = "another command has just removed it, with its checkpoints"
                    raise BadInput.at(f"run {job.run.name}", what, "submit it with all overrides: it begins anew")
                check_existing_run(job.config, job.run)
                _check_free(job.run)
                job.before = now
        app_ids: dict[RunDir, str] = {}
        files = at_once(_files_of, jobs, overrides)
        before = at_once(lambda paths: {p: p.read_text() if exists(p) else None for p in paths}, files)
        try:
            at_once(_write, jobs, files)
            for group in grouped(jobs, lambda job: job.launcher.name).values():
                ids = group[0].launcher.submit([job.request for job in group], parallelism, folder)
                app_ids |= zip((job.run for job in group), ids, strict=True)
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                say("withdrawing what was submitted; after another Ctrl-C fsdp-jobs list shows what is left", "yellow")
            withdrawn = _withdraw(jobs, app_ids)
            for job, texts in zip(jobs, before, strict=True):
                if job.run in withdrawn:
                    _write_all(job.run, texts)
            raise
        try:
            handles = at_once(lambda job: record(job.run, job.launcher, app_ids[job.run]), jobs)
            for job in jobs:
                job.run.job.touch()  # runs are listed by this time
        except OSError as e:
            what = f"submitted, but this cannot be recorded: {e.filename}: {e.strerror}"
            raise JobFailed(f"{what}. Once it can, fsdp-jobs list finds it.") from e
        return handles


def _withdraw(jobs: Sequence[Prepared], app_ids: Mapping[RunDir, str]) -> set[RunDir]:
    """Cancel the jobs that reached their launchers; return the runs of all launchers that answer.

    Jobs of other launchers may run, now or later, so their runs stay pending. `app_ids` has the ids of all jobs of each
    launcher whose `submit` has returned.
    """
    withdrawn = set[RunDir]()
    for group in grouped(jobs, lambda job: job.launcher.name).values():
        launcher, runs = group[0].launcher, [job.run for job in group]
        try:
            with suppress(OSError):  # the launcher's own file is missing, so it was not asked to submit
                found = [app_ids[run] for run in runs] if runs[0] in app_ids else launcher.find(runs)
                if there := [*filter(None, found)]:
                    launcher.cancel(there)
            withdrawn |= {*runs}
        except (BadInput, JobFailed):
            names = listed([run.name for run in runs], 4)
            say(f"{names}: may have been submitted: fsdp-jobs list shows it once the cluster answers", "yellow")
    return withdrawn


def _write(job: Prepared, files: Mapping[Path, str | None]) -> None:
    """Write the job's files into its run directory; `record` adds the handle of this submission to job.json later."""
    run, identity = job.run, identity_of(job.run, job.config)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    run.stop_request.unlink(missing_ok=True)
    claim(run.identity, identity)
    if (elsewhere := job.config.checkpoint.dir) is not None and ("://" in elsewhere or Path(elsewhere).is_dir()):
        with suppress(OSError):  # only the nodes may be able to write there: then rank 0 does it
            claim(checkpoints_of(job.config.checkpoint, run) / run.identity.name, identity)
    _write_all(run, files)


def _files_of(job: Prepared, overrides: Sequence[str]) -> dict[Path, str | None]:
    """Return path -> text of the job's files in its run directory, job.json last; None: it has no such file."""
    run, config = job.run, job.config
    topology = config.cluster.topology
    config.name = run.name
    steps = None if config.is_program else config.steps  # only the program knows how many steps it will do
    about = {
        **run.read_job(),
        "overrides": list(overrides),
        "first_attempt": run.last_attempt() + 1,
        "nodes": str(config.nodes),
        "steps": steps,
        "script_sha256": digest_of(config.script),
        "submission": job.submission,
        "pending": job.launcher.name,  # until `record`
        **({"sweep": job.sweep} if job.sweep else {}),
    }
    return {
        run.config: dump_config(config),
        run.plan: job.plan.to_json(indent=1),
        run.topology: None if topology is None else Path(topology).read_text(),
        run.shape: None if job.shape is None else job.shape.to_json(),
        run.token: secrets.token_hex(16),
        run.request: f"{job.request}\n",
        run.job: json.dumps(about, indent=2),
    }


def artefact_of(job: Prepared, overrides: Sequence[str]) -> str:
    """Return only what the cluster would get from the job of a dry run."""
    job = replace(job, config=replace(job.config, dry_run=False))
    files = _files_of(job, [o for o in overrides if not o.startswith("dry_run=")])
    return job.launcher.artefact(
        job.request, {job.run.identity: identity_of(job.run, job.config).to_json(indent=2), **files}
    )


def _write_all(run: RunDir, texts: Mapping[Path, str | None]) -> None:
    """Write files of a run directory; for None, remove the file of an earlier submission."""
    for path, text in texts.items():
        if text is None:
            path.unlink(missing_ok=True)
        else:
            write_atomic(path, text, 0o600 if path == run.token else 0o644)
