"""Jobs that were submitted: find them again, ask their launchers about them, end them. No torch, no Hydra.

Every function takes many jobs: their launchers are asked once for all of them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar, cast

from fsdp_jobs.config.errors import BadInput, JobFailed, Problem, nearest
from fsdp_jobs.launchers.base import SESSION, Description, Launcher, launcher_of, parse_handle
from fsdp_jobs.launchers.state import State
from fsdp_jobs.run import events
from fsdp_jobs.run.beside import beside
from fsdp_jobs.run.directory import RunDir, find_run, runs_in, write_atomic
from fsdp_jobs.run.identity import owner_of
from fsdp_jobs.run.verdict import Verdict

_Item = TypeVar("_Item")

_ASK_EVERY_S = 2.0  # between two questions to a launcher about the same job


def grouped(items: Iterable[_Item], launcher: Callable[[_Item], str]) -> dict[str, list[_Item]]:
    """Return name of a launcher -> the items that it gives, in order."""
    groups: dict[str, list[_Item]] = {}
    for item in items:
        groups.setdefault(launcher(item), []).append(item)
    return groups


def existing_run(name: str, runs_dir: str) -> RunDir:
    """Find the run of a name, or of the handle that a submission printed.

    Raises:
        BadInput: there is none.
    """
    if "://" in name:
        return _run_of_handle(name)
    run = find_run(runs_dir, name)
    settle([run])
    if run.is_submitted:
        return run
    what = f"there is no such run under {runs_dir}/"
    cure = nearest(name, [r.name for r in runs_in(runs_dir)]) or "fsdp-jobs list"
    if run.pending_launcher is not None:
        what = "is being submitted, or was when that command died, and its launcher does not say whether it has it"
        cure = "try again"
    raise BadInput([Problem(name, what, cure)])


def _run_of_handle(handle: str) -> RunDir:
    launcher, cluster, app = parse_handle(handle)
    run = launcher_of(launcher).run_of(app, cluster)
    if run is None or run.read_job().get("handle") != handle:
        what = "is not the newest submission of a run made on this machine"
        raise BadInput([Problem(handle, what, "name the run: fsdp-jobs list")])
    return run


def settle(runs: Iterable[RunDir]) -> None:
    """Find out what became of submissions whose commands died before they could record it."""
    for run in runs:
        if run.pending_launcher is not None:
            with suppress(BadInput, JobFailed), run.locked(wait_s=0):  # another command is at it, or nobody answers
                adopt(run)


def adopt(run: RunDir) -> None:
    """Record the job that a command left behind when it died, if its launcher has it. The run must be locked.

    Raises:
        BadInput, JobFailed: the launcher does not answer.
    """
    if (name := run.pending_launcher) is not None:
        launcher = launcher_of(name)
        record(run, launcher, launcher.find(run))


def record(run: RunDir, launcher: Launcher, app_id: str | None) -> str:
    """Add the handle of the newest submission to job.json, and return it; None: its launcher has not got the job."""
    job = {key: value for key, value in run.read_job().items() if key != "pending"}
    if app_id is None:
        write_atomic(run.job, json.dumps(job, indent=2))
        return ""
    handle = f"{launcher.name}://{launcher.cluster_of(app_id)}/{app_id}"
    write_atomic(run.job, json.dumps({**job, "handle": handle, "submitted": time.time()}, indent=2))
    events.record(run, run.last_attempt(), events.Submitted(handle))
    return handle


def describe(handles: Sequence[str]) -> list[Description]:
    """Describe jobs, in order, with one question to each launcher.

    The state is UNKNOWN when the launcher has no job of that id, and SILENT when it cannot be asked here and now; the
    message says why. This never fails: what run directories tell is told in any case.
    """
    described: dict[str, Description] = {}
    for name, group in grouped(handles, _launcher_in).items():
        try:
            launcher = launcher_of(name)
            silent = {handle: why for handle in group if (why := _elsewhere(launcher, handle))}
            here = [handle for handle in group if handle not in silent]
            answers = launcher.describe([_app_id_in(handle) for handle in here])
            unknown = "its launcher no longer knows the job: resume it"
            for handle, answer in zip(here, answers, strict=True):
                described[handle] = answer or Description(_app_id_in(handle), State.UNKNOWN, unknown)
        except (BadInput, JobFailed) as e:
            silent = dict.fromkeys(group, f"its launcher does not answer: {' '.join(str(e).split())}")
        described |= {handle: Description(_app_id_in(handle), State.SILENT, why) for handle, why in silent.items()}
    return [described[handle] for handle in handles]


def _elsewhere(launcher: Launcher, handle: str) -> str | None:
    """Return why a job cannot be asked for here: it is on another cluster than a command here reaches."""
    _, session, app_id = parse_handle(handle)
    if session == SESSION or session == (here := launcher.cluster_of(app_id)):
        return None
    return f"{app_id} is on {session}, and this machine asks {here}: ask there"


def _launcher_in(handle: str) -> str:
    return parse_handle(handle)[0]


def _app_id_in(handle: str) -> str:
    return parse_handle(handle)[2]


def another_runs(run: RunDir) -> str:
    """Return whose the job of a run's handle is when it is not this directory's; empty when it is, for all we know.

    A copied directory has the handle of its original, and a cluster that has lost its state gives ids again. One that
    was moved keeps its job.
    """
    launcher, cluster, app_id = parse_handle(str(run.read_job()["handle"]))
    known = None
    with suppress(BadInput):  # it is not installed here, which asking it will say
        launcher_of(launcher).follow(app_id, cluster, run)
        known = launcher_of(launcher).run_of(app_id, cluster)  # None: submitted elsewhere
    if known is None or known.path.samefile(run.path):
        return ""
    if known.submission == run.submission:
        return f"{run.path} is a copy of {known.path}, whose job this is"
    return f"the cluster has given its id {app_id} to a job of {known.path}, and has forgotten this one"


def check_own(run: RunDir) -> None:
    """Check that the job of a run's handle is this directory's, before something is done to it.

    Raises:
        BadInput: it is another run's; names that.
    """
    if why := another_runs(run):
        raise BadInput([Problem(f"run {run.name}", why, "name the run that has the job: fsdp-jobs list")])


def job_of(run: RunDir) -> Description:
    """Describe the job of a run's newest submission; UNKNOWN when the cluster has no such job of this run."""
    handle = str(run.read_job()["handle"])
    if why := another_runs(run):
        return Description(_app_id_in(handle), State.UNKNOWN, why)
    return describe([handle])[0]


def is_active(handle: str) -> bool:
    """Return whether a job runs or is queued."""
    return describe([handle])[0].state.is_active


def activity_of(run: RunDir, said_at: float = -math.inf) -> Callable[[], bool]:
    """Return a function that says whether a run's job is active, by what its launcher has said last.

    The launcher is asked every 2 seconds, beside: it may be away. Only its first answer is waited for.

    Args:
        run: whose job was active.
        said_at: when its launcher said so, on the monotonic clock.
    """
    active, question = True, cast(Future[bool] | None, None)

    def ask() -> bool:
        nonlocal said_at, active, question
        if active and question is None and time.monotonic() - said_at > _ASK_EVERY_S:
            question = beside(lambda: not has_ended(run, job_of(run)))
        if question is not None and wait([question], None if said_at == -math.inf else 0).done:
            active, question, said_at = question.result(), None, time.monotonic()
        return active

    return ask


def has_ended(run: RunDir, job: Description) -> bool:
    """Whether a run's newest submission has ended: by its launcher's description, else its verdict."""
    if is_silent(run, job):
        return Verdict.final(run) is not None
    return not job.state.is_active


def is_silent(run: RunDir, job: Description) -> bool:
    """Whether a launcher tells nothing of a job: it does not answer, or knows only jobs of this user."""
    return job.state is State.SILENT or (job.state is State.UNKNOWN and owner_of(run) is not None)


def kill(handles: Sequence[str]) -> None:
    """End jobs at once, without checkpoints.

    Raises:
        BadInput: a launcher does not answer, or the job is on another cluster.
        JobFailed: a launcher does not answer, or the ends cannot be written down.
    """
    for name, group in grouped(handles, _launcher_in).items():
        launcher = launcher_of(name)
        if problems := [Problem(handle, why) for handle in group if (why := _elsewhere(launcher, handle))]:
            raise BadInput(problems)
        try:
            launcher.cancel([_app_id_in(handle) for handle in group])
        except OSError as e:
            if e.filename is None:
                raise
            raise JobFailed(f"ended, but this cannot be recorded: {e.filename}: {e.strerror}") from e


def replace_lost(handle: str) -> str:
    """Replace what of a live job is lost and its cluster does not replace; say what. Empty: nothing is."""
    return launcher_of(_launcher_in(handle)).replace_lost(_app_id_in(handle))
