#!/bin/bash
#SBATCH --job-name=golden
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=/shared/runs/golden/submit/slurm-%j.out
#SBATCH --chdir=/shared/me
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=B:USR1@70
#SBATCH --comment=fsdp_jobs:250101120000-0a1b2c
set -e
early=
trap early=SIGUSR1 USR1
export FSDP_JOBS_SUBMISSION=250101120000-0a1b2c
trap '' USR1
exec /env/bin/python -m fsdp_jobs.launchers.slurm.batch /shared/runs/golden $early

# agent: apptainer exec --bind=/shared/me:/shared/me,/shared/runs/golden:/shared/runs/golden torch.sif python3 -m fsdp_jobs.node.agent /shared/runs/golden --node '{node}' --nproc 2
