"""Find submitted jobs, query their launchers about them, and end them. No torch, no Hydra.

Functions that take many jobs query each launcher once for all of them.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from fsdp_jobs.config.errors import BadInput, Damaged, JobFailed, Problem, nearest, one_line
from fsdp_jobs.config.terminal import complain
from fsdp_jobs.launchers.base import SESSION, Description, Launcher, grouped, launcher_of, parse_handle
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir, find_run, runs_in
from fsdp_jobs.run.files import write_json
from fsdp_jobs.run.identity import check_may_act, owner_of
from fsdp_jobs.run.state import State
from fsdp_jobs.run.threads import in_thread
from fsdp_jobs.run.verdict import Verdict

_Item = TypeVar("_Item")

_ASK_EVERY_S = 2.0  # between queries to a launcher about the same job


def by_launcher(handles: Iterable[str]) -> dict[str, list[str]]:
    """Return name of a launcher -> its handles among these."""
    return grouped(handles, lambda handle: parse_handle(handle).launcher)


def named(run: RunDir) -> str:
    """Return the words that name a run in a command."""
    return in_folder(run.name, str(run.path.parent))


def in_folder(name: str, runs_dir: str) -> str:
    """Return the words that name a run, or a sweep of such runs, in a command."""
    return name if runs_dir == "runs" else f"{name} {shlex.quote(f'runs_dir={runs_dir}')}"


def existing_run(name: str, runs_dir: str) -> RunDir:
    """Find a run by its name or by the handle that a submission printed.

    Raises:
        BadInput: there is no such run.
    """
    if "://" in name:
        launcher, cluster, app = parse_handle(name)
        known = launcher_of(launcher).run_of(app, cluster)
        if known is None or known.handle != name:
            what = "is not the newest submission of a run made on this machine"
            raise BadInput.at(name, what, "name the run: fsdp-jobs list")
        return known
    run = find_run(runs_dir, name)
    settle([run])
    if run.is_submitted:
        return run
    what = f"there is no such run under {runs_dir}/"
    cure = nearest(name, [r.name for r in runs_in(runs_dir)]) or "fsdp-jobs list"
    if run.pending_launcher is not None:
        what = "is being submitted, or was when that command died, and its launcher does not say whether it has it"
        cure = "try again"
    raise BadInput.at(name, what, cure)


def settle(runs: Iterable[RunDir]) -> None:
    """Record the outcome of this user's submissions whose commands died before recording it."""
    for run in runs:
        if run.pending_launcher is not None:
            # Another command may hold the lock, or the launcher not answer. Launchers answer only the owner.
            with suppress(BadInput, JobFailed, OSError), run.locked(wait_s=0):
                if owner_of(run) is None:
                    adopt(run)


def adopt(run: RunDir) -> None:
    """Record the job of a submission whose command died, if its launcher has it. The run must be locked.

    Raises:
        BadInput, JobFailed: the launcher does not answer.
    """
    if (name := run.pending_launcher) is not None:
        launcher = launcher_of(name)
        (app_id,) = launcher.find([run])
        record(run, launcher, app_id)


def record(run: RunDir, launcher: Launcher, app_id: str | None) -> str:
    """Add the handle of the newest submission to job.json and return it; `app_id` None: its launcher lacks the job."""
    job = {key: value for key, value in run.read_job().items() if key != "pending"}
    if app_id is None:
        write_json(run.job, job)
        return ""
    handle = f"{launcher.name}://{launcher.cluster_of(app_id)}/{app_id}"
    # When the launcher got the job, whose records may be older than this one; the file server's clock may be ahead.
    at = min(time.time(), run.job.stat().st_mtime)
    first, event = run.first_attempt(), events.Submitted(handle, time=at)
    events.record(run, first - 1, event, lambda: run.last_attempt() < first)  # else the attempt records it
    write_json(run.job, {**job, "handle": handle, "submitted": at})
    return handle


def describe(handles: Iterable[str]) -> dict[str, Description]:
    """Return handle -> description of jobs, with one query to each launcher.

    The state is UNKNOWN if the launcher has no job of that id, and SILENT if it cannot be queried here and now; the
    message has the reason. This never raises, so that callers can always show the run directories' records.
    """
    described: dict[str, Description] = {}
    for name, group in by_launcher(handles).items():
        described |= _described(name, group)
    return described


def _described(name: str, handles: list[str]) -> dict[str, Description]:
    """Return handle -> description of a launcher's jobs. A record that cannot be read hides only its own job."""
    try:
        launcher = launcher_of(name)
        silent = {handle: Description(State.SILENT, why) for handle in handles if (why := _elsewhere(launcher, handle))}
        here = [handle for handle in handles if handle not in silent]
        answers = launcher.describe([parse_handle(handle).app_id for handle in here])
    except (Damaged, OSError, ValueError, TypeError, LookupError) as e:
        if middle := len(handles) // 2:
            return _described(name, handles[:middle]) | _described(name, handles[middle:])
        return dict.fromkeys(handles, Description(State.SILENT, f"its records cannot be read: {one_line(e)}"))
    except Exception as e:  # BadInput, JobFailed, and whatever clients of clusters raise
        return dict.fromkeys(handles, Description(State.SILENT, f"its launcher does not answer: {one_line(e)}"))
    unknown = Description(State.UNKNOWN, "its launcher has no such job any more: resume it")
    found = {handle: answer or unknown for handle, answer in zip(here, answers, strict=True)}
    return found | silent


def _elsewhere(launcher: Launcher, handle: str) -> str | None:
    """Return why a job cannot be queried here, if it is on another cluster than commands here reach."""
    _, session, app_id = parse_handle(handle)
    if session == SESSION or session == (here := launcher.cluster_of(app_id)):
        return None
    return f"{app_id} is on {session}, and this machine asks {here}: ask there"


def another_runs(run: RunDir) -> str:
    """Return which other run the job of a run's handle belongs to; empty if it belongs to this run, or is not known.

    A copied run directory has the handle of its original, and a cluster that has lost its state reuses ids. A run
    directory that was moved keeps its job.
    """
    launcher, cluster, app_id = parse_handle(run.handle)
    known = None
    with suppress(BadInput):  # another user's, or the launcher is not installed here; querying it reports that
        check_may_act(run)
        launcher_of(launcher).relink(app_id, cluster, run)
        known = launcher_of(launcher).run_of(app_id, cluster)  # None: submitted elsewhere
    if known is None or known.path.samefile(run.path):
        return ""
    if known.submission == run.submission:
        return f"{run.path} is a copy of {known.path}, whose job this is"
    return f"the cluster has given its id {app_id} to a job of {known.path}, and has forgotten this one"


def check_own(run: RunDir) -> None:
    """Check, before acting on a run, that this user may act on it and that its job belongs to it.

    Raises:
        BadInput: the run belongs to another user, or the job to another run; names it.
    """
    check_may_act(run)
    if why := another_runs(run):
        raise BadInput.at(f"run {run.name}", why, "name the run that has the job: fsdp-jobs list")


def job_of(run: RunDir) -> Description:
    """Describe the job of a run's newest submission; UNKNOWN if the cluster has no such job of this run."""
    if why := another_runs(run):
        return Description(State.UNKNOWN, why)
    (job,) = describe([run.handle]).values()
    return job


def answers_of(run: RunDir) -> Callable[[Sequence[str]], dict[str, Description]]:
    """Return a function that returns a run's handle -> its launcher's newest answer, as `Overview` asks for it.

    A thread queries the launcher every 2 seconds, because it may be unreachable. Only its first answer is awaited.
    If the launcher does not answer, the reason is printed.
    """
    question, asked_at = in_thread(lambda: job_of(run)), time.monotonic()
    job, silence = question.result(), ""

    def newest(handles: Sequence[str]) -> dict[str, Description]:
        nonlocal question, asked_at, job, silence
        if question.done():
            with suppress(OSError):  # until the run directory can be read, the answer before counts
                before, job = silence, question.result()
                silence = job.message if job.state is State.SILENT else ""
                if silence not in ("", before) and not has_ended(run, job):
                    complain(f"{run.name}: {silence}", "yellow")
            if time.monotonic() - asked_at > _ASK_EVERY_S:
                question, asked_at = in_thread(lambda: job_of(run)), time.monotonic()
        return dict.fromkeys(handles, job)

    return newest


def has_ended(run: RunDir, job: Description) -> bool:
    """Whether a run's newest submission has ended, by its launcher's description or else by its verdict."""
    if is_silent(run, job):
        return Verdict.final(run) is not None
    return not job.state.is_active


def job_has_ended(run: RunDir) -> bool:
    """Whether a run's newest submission has ended, by what its launcher says now or else by its verdict."""
    return has_ended(run, job_of(run))


def is_silent(run: RunDir, job: Description) -> bool:
    """Whether a launcher has no information on a job: it does not answer, or lists only this user's jobs."""
    return job.state is State.SILENT or (job.state is State.UNKNOWN and owner_of(run) is not None)


def kill(handles: Sequence[str]) -> None:
    """End jobs at once, without checkpoints.

    Raises:
        BadInput: a launcher does not answer, or the job is on another cluster.
        JobFailed: a launcher does not answer, or the verdicts cannot be written.
    """
    for name, group in by_launcher(handles).items():
        launcher = launcher_of(name)
        if problems := [Problem(handle, why) for handle in group if (why := _elsewhere(launcher, handle))]:
            raise BadInput(problems)
        try:
            launcher.cancel([parse_handle(handle).app_id for handle in group])
        except OSError as e:
            if e.filename is None:
                raise
            raise JobFailed(f"ended, but this cannot be recorded: {e.filename}: {e.strerror}") from e


def replace_lost(handle: str) -> str:
    """Replace lost parts of a live job that its cluster does not replace; return what was replaced, or empty."""
    launcher, _, app_id = parse_handle(handle)
    return launcher_of(launcher).replace_lost(app_id)
