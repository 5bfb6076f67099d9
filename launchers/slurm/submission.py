"""Jobs with equal scripts as the tasks of job arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdp_jobs.launchers.slurm import client
from fsdp_jobs.launchers.slurm.script import Script
from fsdp_jobs.run.directory import RunDir

Groups = list[list[int]]  # indices of jobs with equal scripts


def group_equal(scripts: Sequence[Script]) -> Groups:
    """Group the indices of equal scripts, no more of them together than an array may have tasks.

    Raises:
        SlurmError: there is no SLURM here.
    """
    equal: dict[Script, list[int]] = {}
    for index, script in enumerate(scripts):
        equal.setdefault(script, []).append(index)
    most = int(client.settings().get("MaxArraySize", "0")) or 1  # task ids are below it; 0: there are no arrays
    return [indices[i : i + most] for indices in equal.values() for i in range(0, len(indices), most)]


def submit_arrays(
    folder: Path, name: str, scripts: Sequence[Script], runs: Sequence[RunDir], groups: Groups, parallelism: int
) -> list[str]:
    """Submit jobs as arrays, all or none; a job without an equal is submitted as a plain job.

    Args:
        folder: of this submission alone, and named by its id; an array's links to its run directories are in it.
        name: SLURM's for the jobs.
        scripts: one per job.
        runs: one per job, with all that a batch step reads.
        groups: of `group_equal`.
        parallelism: most jobs that run at once, 0 for no limit.

    Returns:
        A job id for each, `<array>_<task>`; `<job>` for one that is no array.

    Raises:
        SlurmError: SLURM does not take one of the arrays.
    """
    ids = [""] * len(runs)
    lanes = min(parallelism, len(groups)) or len(groups)  # arrays that may run at once; others come after them
    share, rest = divmod(parallelism, lanes)
    arrays: list[str] = []
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for number, group in enumerate(groups):
            after = arrays[number - lanes] if number >= lanes else ""
            first, tag = scripts[group[0]], f"{folder.name}.{number}"
            if len(group) == 1:
                text = first.of_run(str(runs[group[0]].path.resolve()), name, tag, after)
            else:
                links = folder / str(number)
                links.mkdir()
                for task, job in enumerate(group):
                    (links / str(task)).symlink_to(runs[job].path.resolve())
                at_once = share + (number % lanes < rest)
                margin_s = max(scripts[job].margin_s for job in group)
                text = first.of_array(links, name, tag, len(group), at_once, after, margin_s)
            (folder / f"{number}.sh").write_text(text)
            arrays.append(client.submit(text))
            for task, job in enumerate(group):
                ids[job] = f"{arrays[-1]}_{task}" if len(group) > 1 else arrays[-1]
    except BaseException:
        if arrays:
            client.call("scancel", "--quiet", *arrays)
        raise
    return ids
