"""submitit's way to sbatch, with our script: it keeps each job's script under its id, and reads the id."""

from __future__ import annotations

from pathlib import Path

from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import SlurmExecutor

from fsdp_jobs.config.errors import JobFailed


class _Executor(SlurmExecutor):
    """Submits a finished script: there is no function to pickle, srun and signals are the batch step's."""

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return command


def submit(folder: Path, script: str) -> str:
    """Submit; the script stays in `folder`/<id>_submission.sh. Returns SLURM's job id.

    Raises:
        JobFailed: SLURM does not take it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return str(_Executor(folder)._submit_command(script).job_id)
    except FailedJobError as e:
        raise JobFailed(f"sbatch: {e}") from e
