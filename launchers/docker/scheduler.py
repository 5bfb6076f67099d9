"""The launcher `docker_fsdp`: a job is a set of containers on a network of its own. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.schema import JobConfig, load_config
from fsdp_jobs.launchers.base import Finding, Job, prepare_each
from fsdp_jobs.launchers.detached import DetachedLauncher
from fsdp_jobs.launchers.docker import containers, validate
from fsdp_jobs.launchers.docker.containers import DockerRequest
from fsdp_jobs.launchers.supervisor import staged
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.processes import visible_gpus


class DockerLauncher(DetachedLauncher):
    """Runs a job as containers on a network of their own."""

    name = "docker_fsdp"
    supervisor = "fsdp_jobs.launchers.docker.supervisor"
    output = "yaml"

    def examine(self, config: JobConfig) -> Iterator[Finding]:
        with containers.connected() as api:
            yield from validate.examine(api, config)

    def offline_notes(self, config: JobConfig) -> list[str]:
        try:
            with containers.connected():
                return []
        except containers.NoDaemon as e:
            unchecked = "not checked: the image, memory, GPUs and their runtime, data, names that are taken"
            assumed = f"assumed: a daemon that runs as root, {validate.ASSUMED['NCPU']} CPUs"
            return [e.problems[0].what, unchecked, assumed]

    def prepare(self, jobs: Sequence[Job]) -> list[DockerRequest]:
        with nullcontext() if all(job.offline_notes for job in jobs) else containers.connected() as api:
            daemon = validate.ASSUMED if api is None else api.info()
            return prepare_each(
                jobs,
                lambda job: validate.problems_of(api, job, daemon),
                lambda job: containers.translate(job, daemon, visible_gpus() if job.plan.backend != "gloo" else []),
            )

    def stage(self, request: DockerRequest) -> None:
        if request.code is not None:
            request.code.write(RunDir(request.run_dir).code)
        super().stage(replace(request, code=None))

    def start(self, run: RunDir) -> None:
        with containers.connected() as api:
            containers.create(api, DockerRequest(**staged(run)))
        super().start(run)

    def revive(self, run: RunDir) -> bool:
        """Start the supervisor of a job whose containers all exist; remove those of an incomplete job."""
        if not super().revive(run) and not self.is_alive(run):
            return False
        with containers.connected() as api:
            if len(containers.containers_of(api, run)) == len(staged(run)["containers"]):
                super().start(run)
                return True
            containers.remove(api, run)
            return False

    def is_alive(self, run: RunDir) -> bool:
        """Whether a container or the supervisor of a run's newest job is alive."""
        if super().is_alive(run):
            return True
        with containers.connected() as api:
            return any(map(containers.is_running, containers.containers_of(api, run).values()))

    def kill(self, run: RunDir) -> bool:
        """End a job and remove its containers and network; of an ended job, remove what its supervisor has left.

        Raises:
            BadInput: no daemon answers, or it is not the one that has the job's containers.
        """
        with containers.connected() as api:
            found = containers.containers_of(api, run)
            if super().is_alive(run) and not found:
                what = f"has no container of {run.name}, which another Docker of this machine runs"
                raise BadInput.at("Docker", what, "set DOCKER_HOST or DOCKER_CONTEXT as at its submission")
            was_alive = super().kill(run) or any(map(containers.is_running, found.values()))
            if was_alive or not containers.cluster_of(load_config(run.config)).keep:
                containers.remove(api, run)
        return was_alive


create_scheduler = DockerLauncher.scheduler
