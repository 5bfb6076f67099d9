"""Launcher `slurm_fsdp`: each job is a SLURM job or a task of an array; app ids are SLURM's job ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from fsdp_jobs.config.errors import BadInput, Problem
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.base import Description, Job, Launcher, at_once, prepare_each, to_yaml
from fsdp_jobs.launchers.slurm import client, container, site, submission, validate
from fsdp_jobs.launchers.slurm.examine import examine
from fsdp_jobs.launchers.slurm.script import Script, cluster_of, commands, margin_s, script
from fsdp_jobs.launchers.slurm.steps import Commands
from fsdp_jobs.launchers.snapshot import SHARED, Snapshot, link, take
from fsdp_jobs.plan.topology import Topology
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import as_written
from fsdp_jobs.run.goodput import slowest_save_s
from fsdp_jobs.run.state import State
from fsdp_jobs.run.tail import last_lines, read_json_lines
from fsdp_jobs.run.threads import wait_until
from fsdp_jobs.run.verdict import KILLED, WITHDRAWN, Verdict, judge

_CANCEL_S = 15.0  # for SLURM to act on scancel
_REASONS = {  # prefixes of squeue's REASON -> explanation; the first counts
    **dict.fromkeys(
        ("QOSMaxWall", "AssocMaxWall", "PartitionTimeLimit"),
        "cluster.time is above it: it will not start before scontrol update JobId={id} TimeLimit=LESS",
    ),
    **dict.fromkeys(
        ("QOS", "MaxNodePer", "MaxCpuPer", "MaxGRESPer", "MaxMemoryPer", "MaxJobsPer"),
        "a limit of its QOS, see sacctmgr show qos; one of each job is never met by waiting",
    ),
    "Assoc": "a limit of your account, see sacctmgr show assoc; one of each job is never met by waiting",
    "PartitionNodeLimit": "it asks for more or fewer nodes than the partition allows: it will not start",
    "PartitionConfig": "the partition does not allow it now: fewer nodes, less time, or wait",
    "launch failed": "a node could not start it; SLURM starts it again after: scontrol release {id}",
    "job requeued in held state": "held; SLURM starts it again after: scontrol release {id}",
    "JobHeldUser": "held; SLURM starts it after: scontrol release {id}",
    "JobHeldAdmin": "held by an administrator, who has to release it",
    "JobHoldMaxRequeue": "SLURM has requeued it too often; it starts it after: scontrol release {id}",
    "BadConstraints": "too few nodes fit: it will not start; this allows all: scontrol update JobId={id} ExcNodeList=",
    "DependencyNeverSatisfied": "the job it depends on has failed: it will not start",
    "ReservationDeleted": "its reservation is gone: it will not start",
    "PartitionDown": "an administrator has stopped the partition",
    "JobLaunchFailure": "its batch step was killed, or its first node has not mounted the run directory",
    "Invalid": "its account or QOS may not be used any more: it will not start",
}


@dataclass
class SlurmRequest:
    """One submission: the script, the commands of its batch step, and a snapshot of the code."""

    job: Job
    script: Script
    commands: Commands
    code: Snapshot | None

    def __str__(self) -> str:
        return f"{self.text}\n# submit/steps.json\n{self.commands.to_json(indent=2)}\n"

    @property
    def text(self) -> str:
        """The script for this job as a plain job, not as a task of an array."""
        return self.script.of_run(self.job.run.path, self.job.app.name, self.job.submission)


class SlurmLauncher(Launcher):
    """Submit scripts with sbatch and read the queue with squeue."""

    name = "slurm_fsdp"
    output = "script"
    forget = staticmethod(client.forget)
    examine = staticmethod(examine)

    def topology(self, config: JobConfig) -> Topology | None:
        return site.topology_of(site.site_of(config), config)

    def site_file(self) -> str:
        return to_yaml(asdict(site.ask()))

    def offline_notes(self, config: JobConfig) -> list[str]:
        if not (why := client.silent()):
            return []
        unchecked = "not checked: partition, account, QOS, limits, sizes of nodes, and files that only the cluster has"
        here, file = site.site_of(config), cluster_of(config).site
        gpus = here.gpu_option.format("<GPUs of a node>")
        facts = f"'{gpus}', {len(here.switches) or 'no'} switches, {here.python} on the nodes"
        source = f"by {file} of cluster {here.cluster}" if file else f"cluster.site=FILE tells: {site.SAVE}"
        return [why, unchecked, f"assumed: {facts}; {source}"]

    def artefact(self, request: SlurmRequest, files: Mapping[Path, str | None]) -> str:
        return request.text

    def prepare(self, jobs: Sequence[Job]) -> list[SlurmRequest]:
        take_once = cache(take)

        def translate(job: Job) -> SlurmRequest:
            limit_mb = cluster_of(job.config).snapshot_mb
            code = take_once(Path.cwd(), job.run.path.parent, limit_mb) if limit_mb else None
            here = site.site_of(job.config)
            save_s = slowest_save_s(job.run)
            step_s = max((line["step_s"] for line in read_json_lines(job.run.metrics)), default=0.0)
            if not job.offline_notes:
                validate.compare_with_kill_wait(job.run.name, save_s, 2 * (save_s + step_s))
            margin = margin_s(save_s, step_s, job.config.elastic.stop_grace_s)
            text = script(job, here, site.topology_of(here, job.config), margin)
            return SlurmRequest(job, text, commands(job, text), code)

        requests = prepare_each(jobs, validate.problems_here, translate)
        if not (checked := [request for request in requests if not request.job.offline_notes]):
            return requests
        validate.check_count(len(checked))
        problems: list[Problem] = []
        for group in submission.group_equal([request.script for request in checked]):
            first = checked[group[0]]
            problems += validate.check_with_slurm(first.job, first.text, first.script.margin_s, len(group))
        if problems:
            raise BadInput(problems)
        return requests

    def submit(self, requests: Sequence[SlurmRequest], parallelism: int, folder: Path | None) -> list[str]:
        self.check_links(requests[0].job.run)
        runs, scripts = [request.job.run for request in requests], [request.script for request in requests]
        groups = submission.group_equal(scripts) if folder is not None else []
        for number, group in enumerate(groups):
            for task, index in enumerate(group):
                requests[index].commands.place = f"{number}_{task if len(group) > 1 else ''}"
        at_once(lambda request: request.commands.write(request.job.run), requests)
        if folder is None:
            _write_code(requests, None)
            ids = [submission.sbatch(request.job.run.submit / "slurm", request.text) for request in requests]
        else:
            own = as_written(folder) / "slurm" / requests[0].job.submission
            _write_code(requests, own)
            ids = submission.submit_arrays(own, folder.name, scripts, runs, groups, parallelism)
        for job_id, run in zip(ids, runs, strict=True):
            self.remember(job_id, run)
        return ids

    def find(self, runs: Sequence[RunDir]) -> list[str | None]:
        queue = client.queue(fresh=True)
        return [self._find(run, queue.values()) for run in runs]

    def _find(self, run: RunDir, queue: Iterable[client.QueuedJob]) -> str | None:
        try:
            array, _, task = Commands.read(run).place.partition("_")
        except FileNotFoundError:  # it is written before anything is submitted
            return None
        tag = f"{run.submission}.{array}" if array else run.submission
        for job in queue:
            if job.tag == tag and (not task or job.id.endswith(f"_{task}")):
                self.remember(job.id, run)
                return job.id
        started = events.newest_of(run, events.AttemptStarted)
        return next((e.slurm_job for e in started if e.attempt >= run.first_attempt()), None)  # SLURM forgot the job

    def cluster_of(self, app_id: str) -> str:
        return client.settings(client.LOOK_S)["ClusterName"]

    def describe(self, app_ids: Sequence[str]) -> list[Description | None]:
        runs = [self.run_of(app_id) for app_id in app_ids]
        jobs = client.jobs([_newest(run, app_id) for run, app_id in zip(runs, app_ids, strict=True)])
        return [_describe(*known) for known in zip(app_ids, jobs, runs, strict=True)]

    def known(self) -> list[str]:
        return [id for id in client.queue(timeout_s=client.LOOK_S) if self.run_of(id) is not None]

    def _link(self, app_id: str, cluster: str = "") -> Path:
        return self.links / (cluster or self.cluster_of(app_id)) / app_id  # clusters sharing a home may share ids

    def cancel(self, app_ids: Sequence[str]) -> None:
        queue = client.queue(fresh=True)
        runs = {_newest(run, id): run for id in app_ids for run in [self.run_of(id)]}
        known = ((queue[id], run) for id, run in runs.items() if id in queue)
        jobs = [job for job, run in known if job.state.is_active and (run is None or job.is_of(run))]
        running = [job for job in jobs if job.is_started]
        if running:  # first, or the batch step would make the ranks save
            client.call("scancel", "--signal=KILL", "--batch", *(job.signal_id for job in running))
            _wait_while(running, lambda job: job.is_started)
        if jobs:
            client.call("scancel", "--quiet", *(job.id for job in jobs))
            _wait_while(jobs, lambda job: job.state.is_active and not job.is_completing)
        for job in jobs:
            if (run := runs[job.id]) is not None:
                judge(run, KILLED if job in running else WITHDRAWN)


create_scheduler = SlurmLauncher.scheduler


def _write_code(requests: Sequence[SlurmRequest], shared: Path | None) -> None:
    """Copy each code snapshot once to `shared` and link to it; without `shared`, or for containers, copy it per run.

    Containers also get the folders that they mount.
    """
    copies: dict[Snapshot, Path] = {}
    for request in requests:
        code, config, run = request.code, request.job.config, request.job.run
        has_container = cluster_of(config).container is not None
        if has_container:
            container.make_folders(config, run)
        if code is None:
            continue
        if shared is None or has_container:  # it sees only its run directory
            code.write(run.code)
            continue
        if code not in copies:
            copies[code] = shared / f"{SHARED}{len(copies)}"
            code.write(copies[code])
        link(run.code, copies[code])


def _newest(run: RunDir | None, app_id: str) -> str:
    """Return the id of the SLURM job that an app is now: where the site forbids requeues, that of the newest job."""
    try:
        return app_id if run is None else Commands.read(run).newest(app_id)
    except (OSError, ValueError, TypeError):  # the submission failed before writing the file, or it is damaged
        return app_id


def _wait_while(jobs: Sequence[client.QueuedJob], unchanged: Callable[[client.QueuedJob], bool]) -> None:
    """Wait until the controller has changed the state of each of these jobs, at most `_CANCEL_S`."""

    def all_changed() -> bool:
        queue = client.queue(fresh=True)
        return not any(job.id in queue and unchanged(queue[job.id]) for job in jobs)

    wait_until(all_changed, _CANCEL_S)


def _describe(app_id: str, job: client.QueuedJob | None, run: RunDir | None) -> Description | None:
    """Combine SLURM's and the run directory's records of a job; ignore SLURM's if it is of another job with this id."""
    if job is not None and run is not None and not job.is_of(run):
        job = None
    told = Description(job.state, _message(job)) if job is not None else None
    if run is None:
        return told
    if job is not None and job.state.is_active and not (job.is_completing and Verdict.final(run) is not None):
        return told
    if run.last_attempt() < run.first_attempt():
        return _before_its_first_line(job, run.submit / f"slurm-{app_id}.out") or told
    verdict = Verdict.read(run, run.last_attempt())
    if verdict is None:
        return told or _forgotten(run)
    if told is not None and told.state in (State.STOPPED, State.SILENT):
        return told
    if told is not None and verdict.decision == "requeue":
        return Description(State.FAILED, f"{told.message} before another attempt began; {verdict.reason}")
    return Description(State.from_verdict(verdict), verdict.reason)  # it knows more than SLURM


def _before_its_first_line(job: client.QueuedJob | None, output: Path) -> Description | None:
    """Describe a job that has failed, or that SLURM has forgotten, before its first attempt."""
    if job is None:
        if output.exists():
            why = f"SLURM has forgotten the job, which failed before its first line: {_said(output)}"
            return Description(State.FAILED, why)
        why = f"it was cancelled, or its node could not write {output}"
        return Description(State.STOPPED, f"SLURM has forgotten the job, which never started: {why}")
    if job.state is not State.FAILED:
        return None
    why = f": {_said(output)}" if job.slurm_state == "FAILED" else ""
    where = f" on {job.batch_host or job.nodes}" if job.nodes else ""
    return Description(job.state, f"SLURM job {job.id} {job.slurm_state}{where} before its first line{why}")


def _forgotten(run: RunDir) -> Description:
    """Describe a job without a verdict that neither the controller nor accounting lists."""
    requests = events.newest_of(run, events.StopRequested)
    asked = next((e.why for e in requests if e.attempt == run.last_attempt()), None)
    if asked is not None:
        return Description(State.STOPPED, f"SLURM has forgotten the job, which ended before it had saved: {asked}")
    return Description(State.FAILED, "SLURM has forgotten the job")


def _said(output: Path) -> str:
    """Return the last line of a job's output; for a job that printed nothing, what may be the cause."""
    return last_lines(output, 1).strip() or f"do the nodes see {output.parent}, and has it room?"


def _message(job: client.QueuedJob) -> str:
    """Return what the user may not expect of a job in its state."""
    if job.slurm_state == "RUNNING":
        return ""
    told = next((meaning for word, meaning in _REASONS.items() if job.reason.startswith(word)), "")
    meaning = f": {told.format(id=job.id)}" if told else ""
    why = f" ({job.reason}{meaning})" if job.reason not in ("", "None") else ""  # None: SLURM has not looked at it yet
    if job.state is State.QUEUED and job.slurm_state != "CONFIGURING":
        when = f"starts about {job.start.replace('T', ' ')}" if job.start not in ("", "N/A") else "start not known yet"
        return f"SLURM job {job.id} waits{why}" + ("" if told else f"; {when}")  # SLURM keeps an estimate of before
    where = f" on {job.nodes}" if job.nodes else ""
    return f"SLURM job {job.id} is {job.slurm_state}{where}{'' if job.state.is_active else why}"
