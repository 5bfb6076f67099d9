#!/bin/bash
#SBATCH --job-name=golden
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
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
export PYTHONSAFEPATH=1 PYTHONPATH=/shared/runs/golden/code${PYTHONPATH:+:$PYTHONPATH}
trap '' USR1
exec /env/bin/python -m fsdp_jobs.launchers.slurm.batch /shared/runs/golden $early

# agent: --container-image=/images/torch.sqsh --container-mounts=/shared/me:/shared/me,/shared/runs/golden:/shared/runs/golden,/scratch/saved:/scratch/saved,/data:/data --container-workdir=/shared/me sh -c 'export PYTHONPATH=/shared/runs/golden/code${PYTHONPATH:+:$PYTHONPATH}; exec "$@"' - /opt/conda/bin/python -m fsdp_jobs.node.agent /shared/runs/golden --node '{node}' --nproc 8
