"""Submit scripts with sbatch: a single job, or jobs with equal scripts as the tasks of job arrays."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.launchers.base import grouped
from fsdp_jobs.launchers.slurm import client
from fsdp_jobs.launchers.slurm.script import Script
from fsdp_jobs.launchers.slurm.validate import answer
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import as_written


def sbatch(folder: Path, script: str) -> str:
    """Submit a script with submitit, and return SLURM's job id; the script is kept as `folder`/<id>_submission.sh.

    Raises:
        JobFailed: SLURM refuses it; the message has the whole output of sbatch and the site's plugins.
    """
    from submitit.slurm.slurm import SlurmExecutor

    class Executor(SlurmExecutor):
        """Submit a finished script: no function to pickle, and the batch step handles srun and signals."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return command

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            foreign = os.environ.keys() - client.own_environment(os.environ, script).keys()
            return [
                "env",
                *(f"--unset={name}" for name in foreign),
                "sh",
                "-c",
                'exec sbatch --parsable "$0" >"$1" 2>&1',
                str(submission_file_path),
                str(said),
            ]

        @staticmethod
        def _get_job_id_from_submission_command(string: bytes | str) -> str:
            return client.id_in(said.read_text(errors="replace"))

    folder.mkdir(parents=True, exist_ok=True)
    said = folder / ".said"  # a file, because submitit takes only UTF-8, and messages of a site may be in any encoding
    said.touch()
    try:
        return str(Executor(folder)._submit_command(script).job_id)
    except (RuntimeError, OSError) as e:  # of submitit: refused, or there is no srun here
        raise JobFailed(f"sbatch: {answer(said.read_text(errors='replace') or str(e.__cause__ or e))}") from e
    finally:
        said.unlink()


Groups = list[list[int]]  # indices of jobs with equal scripts


def group_equal(scripts: Sequence[Script]) -> Groups:
    """Group the indices of equal scripts, at most as many per group as an array may have tasks.

    Raises:
        SlurmError: there is no SLURM here.
    """
    equal = grouped(range(len(scripts)), scripts.__getitem__)
    settings = client.settings()
    fewer = re.findall(r"max_array_tasks=(\d+)", settings.get("SchedulerParameters", ""))
    most = min(map(int, [settings.get("MaxArraySize", "0"), *fewer])) or 1  # 0: there are no arrays
    return [indices[i : i + most] for indices in equal.values() for i in range(0, len(indices), most)]


def submit_arrays(
    folder: Path, name: str, scripts: Sequence[Script], runs: Sequence[RunDir], groups: Groups, parallelism: int
) -> list[str]:
    """Submit jobs as arrays, all or none; a job whose script equals no other's is submitted as a plain job.

    Args:
        folder: of this submission only, and named by its id; holds an array's links to its run directories.
        name: of the jobs in SLURM.
        scripts: one per job.
        runs: one per job, with all files that a batch step reads.
        groups: of `group_equal`.
        parallelism: maximum number of jobs that run at once, 0 for no limit.

    Returns:
        The id of each job: `<array>_<task>`, or `<job>` for a plain job.

    Raises:
        JobFailed: SLURM refuses one of the arrays.
    """
    ids = [""] * len(runs)
    lanes = min(parallelism, len(groups)) or len(groups)  # arrays that may run at once; the others wait for them
    share, rest = divmod(parallelism, lanes)
    arrays: list[str] = []
    try:
        for number, group in enumerate(groups):
            after = arrays[number - lanes] if number >= lanes else ""
            first = replace(scripts[group[0]], margin_s=max(scripts[job].margin_s for job in group))
            tag = f"{folder.name}.{number}"
            if len(group) == 1:
                text = first.of_run(runs[group[0]].path, name, tag, after)
            else:
                links = folder / str(number)
                links.mkdir(parents=True)
                for task, job in enumerate(group):
                    (links / str(task)).symlink_to(as_written(runs[job].path))
                at_once = share + (number % lanes < rest)
                text = first.of_array(links, name, tag, len(group), at_once, after)
            arrays.append(sbatch(folder, text))
            for task, job in enumerate(group):
                ids[job] = f"{arrays[-1]}_{task}" if len(group) > 1 else arrays[-1]
    except BaseException:
        if arrays:
            client.call("scancel", "--quiet", *arrays)
        raise
    return ids
