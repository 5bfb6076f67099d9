"""Restart a running job: SLURM requeues it or, where the site forbids requeues, a new job continues it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from fsdp_jobs.config.errors import one_line
from fsdp_jobs.launchers.slurm import client
from fsdp_jobs.launchers.slurm.steps import Commands
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir


def start_again(run: RunDir, attempt: int, job_id: str, excluded: Sequence[str]) -> bool:
    """Requeue this job, or submit its script again to start when it ends; return True if it was submitted.

    Raises:
        SlurmError: SLURM does not answer, or refuses both.
        BadInput: another command is submitting the run.
    """
    try:
        client.call("scontrol", "requeue", job_id)
        return False
    except client.SlurmError as e:
        if client.running(job_id) is None:  # it was requeued despite the error, or has ended
            raise
        why = one_line(e)
    with run.locked():  # two guards may get here at the same time
        commands = Commands.read(run)
        if job_id in commands.continued:
            return True
        try:
            commands.continued[job_id] = new = _submitted_before(job_id) or _submit(job_id, excluded)
        except client.SlurmError as e:
            raise client.SlurmError(f"no requeue: {why}; no new job: {one_line(e)}") from e
        commands.write(run)
        events.record(run, attempt, events.Continued(new, why))
    return True


def _submitted_before(job_id: str) -> str:
    """Return the job that already continues this one, of a submission that was taken and not answered; else empty."""
    jobs, (_, _, task) = client.queue(fresh=True), job_id.partition("_")
    own = jobs[job_id].tag if job_id in jobs else ""
    others = (job for job in jobs.values() if own and job.tag == own and job.id != job_id and job.state.is_active)
    return next((job.id for job in others if not task or job.id.endswith(f"_{task}")), "")


def _submit(job_id: str, excluded: Sequence[str]) -> str:
    """Submit this job's script again with its environment; for a task of an array, only that task."""
    _, _, task = job_id.partition("_")
    script = client.call("scontrol", "write", "batch_script", os.environ["SLURM_JOB_ID"], "-")
    script = re.sub(r"^#SBATCH '?(--hold|-H)\b.*\n", "", script, flags=re.MULTILINE)  # it has been released
    options = [f"--dependency=afterany:{job_id}", "--begin=now", *([f"--array={task}"] if task else [])]
    options += [f"--exclude={','.join(excluded)}"] if excluded else []
    new = client.sbatch(script, *options, env=os.environ)
    return f"{new}_{task}" if task else new
