"""Run agents in `cluster.container`: pyxis takes options of srun, Apptainer is a command before theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fsdp_jobs.config.clusters import SlurmClusterConfig
from fsdp_jobs.config.errors import Problem
from fsdp_jobs.config.resolve import accelerator
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.mounts import Mount, mounts_of
from fsdp_jobs.launchers.snapshot import with_code
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import as_written


def python_outside(cluster: SlurmClusterConfig, python: str) -> str:
    """Return the interpreter of what needs srun and scontrol; `python` is the submitting command's."""
    return cluster.python or python if cluster.container is None else python


def python_of_agents(cluster: SlurmClusterConfig, config: JobConfig, run: RunDir, python: str) -> list[str]:
    """Return the agents' interpreter, after the arguments that start it in the container; these follow srun's own."""
    if cluster.container is None:
        return [python_outside(cluster, python)]
    mounts = ",".join([*map(str, _mounts(config, run)), *cluster.container_mounts])
    if cluster.container_runtime == "pyxis":
        image = f"--container-image={cluster.container}"
        enter = [image, f"--container-mounts={mounts}", f"--container-workdir={as_written('.')}"]
    else:
        gpus = ["--nv"] if accelerator(config) == "cuda" else []
        enter = ["apptainer", "exec", *gpus, f"--bind={mounts}", cluster.container]
    agents = [cluster.python or "python3"]
    return [*enter, *(with_code(as_written(run.code), agents) if cluster.snapshot_mb else agents)]


def problems(config: JobConfig, run: RunDir) -> Iterator[Problem]:
    """Yield the paths that cannot be mounted."""
    for mount in _mounts(config, run):
        if {*mount.source} & {*":,"}:
            yield Problem(mount.source, "cannot be mounted in a container: it has a colon or a comma", "another name")


def make_folders(config: JobConfig, run: RunDir) -> None:
    """Make the folders that are to be mounted and not yet there, if this machine can."""
    with suppress(OSError):
        for path in (Path(mount.source) for mount in _mounts(config, run)):
            if not path.exists():
                path.mkdir(parents=True)


def _mounts(config: JobConfig, run: RunDir) -> Iterator[Mount]:
    """Yield the working directory, as outside of containers, and what a job reads and writes."""
    here = str(as_written("."))
    if here != "/":
        yield Mount(here, here)
    yield from mounts_of(config, RunDir(as_written(run.path)))
