"""The launcher `docker_fsdp`: a job is containers on a network of its own. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.schema import load_config
from fsdp_jobs.launchers.base import Job, TorchxScheduler, prepare_each
from fsdp_jobs.launchers.detached import DetachedLauncher, kill_supervisor, start_supervisor, supervisor_of
from fsdp_jobs.launchers.docker import containers, validate
from fsdp_jobs.launchers.docker.containers import DockerRequest
from fsdp_jobs.launchers.queue import queue_of
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.processes import visible_gpus
from fsdp_jobs.run.verdict import Verdict


class DockerLauncher(DetachedLauncher):
    """Runs a job as containers on a network of their own."""

    name = "docker_fsdp"

    def prepare(self, jobs: Sequence[Job]) -> list[DockerRequest]:
        api = containers.connect()
        daemon = api.info()

        def one(job: Job) -> DockerRequest:
            gpus = visible_gpus() if job.plan.backend != "gloo" else []
            if problems := list(validate.problems_of(api, job, daemon, gpus)):
                raise BadInput(problems)
            return containers.translate(job, daemon, gpus)

        return prepare_each(one, jobs)

    def stage(self, request: DockerRequest, app_id: str) -> None:
        run = RunDir(request.run_dir)
        if request.code is not None:
            request.code.write(run.code)
        request.app_id = app_id
        write_atomic(_stage(run), request.to_json())

    def gpus_of(self, run: RunDir) -> list[str]:
        return [gpu for ids in _devices(_staged(run)) for gpu in ids]

    def move(self, run: RunDir, gpus: Mapping[str, str]) -> None:
        request = _staged(run)
        for ids in _devices(request):
            ids[:] = [gpus.get(gpu, gpu) for gpu in ids]
        write_atomic(_stage(run), request.to_json())

    def start(self, run: RunDir, app_id: str) -> None:
        request = _staged(run)
        containers.create(containers.connect(), request)
        start_supervisor(run, "fsdp_jobs.launchers.docker.supervisor")

    def find(self, run: RunDir) -> str | None:
        """Return the app id; start the supervisor of a job whose containers all exist, remove those of another."""
        run = RunDir(run.path.resolve())  # containers are labelled with the whole path
        app_id = super().find(run)
        if app_id is None or supervisor_of(run) or queue_of(run, app_id) or Verdict.final(run):
            return app_id
        api = containers.connect()
        if len(containers.containers_of(api, str(run.path))) == len(_staged(run).containers):
            start_supervisor(run, "fsdp_jobs.launchers.docker.supervisor")
            return app_id
        containers.remove(api, str(run.path))
        return None

    def is_alive(self, run: RunDir, app_id: str) -> bool:
        """Whether this submission is the run's newest, and a container or the supervisor of it runs."""
        if not _is_newest(run, app_id):
            return False
        if supervisor_of(run) is not None:
            return True
        return any(c["State"]["Running"] for c in containers.containers_of(containers.connect(), str(run.path)))

    def kill(self, run: RunDir, app_id: str) -> bool:
        """End a job and remove its containers and network; of one that has ended, what no supervisor has removed."""
        if not _is_newest(run, app_id):
            return False
        was_alive = self.is_alive(run, app_id)
        kill_supervisor(run)
        if was_alive or not containers.cluster_of(load_config(run.config)).keep:
            containers.remove(containers.connect(), str(run.path))
        return was_alive


def create_scheduler(session_name: str, **_kwargs: object) -> TorchxScheduler:
    return TorchxScheduler(DockerLauncher(), session_name)


def _staged(run: RunDir) -> DockerRequest:
    return DockerRequest.from_json(_stage(run).read_text())


def _stage(run: RunDir) -> Path:
    return run.submit / "containers.json"


def _is_newest(run: RunDir, app_id: str) -> bool:
    """Whether a submission was staged last: the run directory and the containers are its own then."""
    return _stage(run).exists() and _staged(run).app_id == app_id


def _devices(request: DockerRequest) -> list[list[str]]:
    """Return the GPUs of each container that has any."""
    devices = [device for c in request.containers for device in c["host_config"].get("device_requests", [])]
    return [device["DeviceIDs"] for device in devices]
