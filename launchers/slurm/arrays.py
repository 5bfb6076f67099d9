"""Jobs with equal scripts as the tasks of job arrays: one sbatch for as many as the cluster takes at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from fsdp_jobs.launchers.slurm import client
from fsdp_jobs.launchers.slurm.script import Script
from fsdp_jobs.run.directory import RunDir


def groups(scripts: Sequence[Script]) -> list[list[int]]:
    """Places of equal scripts, no more of them together than an array may have tasks.

    Raises:
        SlurmError: there is no SLURM here.
    """
    equal: dict[Script, list[int]] = {}
    for place, script in enumerate(scripts):
        equal.setdefault(script, []).append(place)
    most = int(client.settings()["MaxArraySize"])  # indices are below it
    return [places[i : i + most] for places in equal.values() for i in range(0, len(places), most)]


def new_folder(parent: Path) -> Path:
    """The first of `parent`/0, `parent`/1, ... that is not there yet, made."""
    for number in itertools.count():
        try:
            (parent / str(number)).mkdir(parents=True)
        except FileExistsError:
            continue
        return parent / str(number)
    raise AssertionError


def submit_arrays(
    place: Path, name: str, scripts: Sequence[Script], runs: Sequence[RunDir], parallelism: int
) -> list[str]:
    """Submit all or none.

    Args:
        place: a folder of this submission's; an array's links to its run directories are in it.
        name: SLURM's for the jobs.
        scripts: one a job.
        runs: likewise, with all that a batch step reads.
        parallelism: most jobs that run at once, 0 for no limit.

    Returns:
        A job id for each, `<array>_<task>`.

    Raises:
        JobFailed: SLURM does not take one of the arrays.
    """
    from fsdp_jobs.launchers.slurm.executor import submit

    ids = [""] * len(runs)
    together = groups(scripts)
    lanes = min(parallelism, len(together)) or len(together)  # arrays that may run at once; others come after them
    share, rest = divmod(parallelism, lanes)
    submitted: list[str] = []
    try:
        for number, group in enumerate(together):
            links = place / str(number)
            links.mkdir()
            for task, job in enumerate(group):
                (links / str(task)).symlink_to(runs[job].path.resolve())
            at_once = share + (number % lanes < rest)
            after = submitted[number - lanes] if number >= lanes else ""
            margin_s = max(scripts[job].margin_s for job in group)
            text = scripts[group[0]].of_array(links, name, len(group), at_once, after, margin_s)
            submitted.append(submit(place, text))
            for task, job in enumerate(group):
                ids[job] = f"{submitted[-1]}_{task}"
    except BaseException:
        if submitted:
            client.call("scancel", "--quiet", *submitted)
        raise
    return ids
