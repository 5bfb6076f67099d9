#!/bin/bash
#SBATCH --job-name=golden
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --partition=gpu
#SBATCH --account=llm
#SBATCH --qos=high
#SBATCH --time=2-00:00:00
#SBATCH --mem=0
#SBATCH --constraint='h100&ib'
#SBATCH --nodelist='node[1-8]'
#SBATCH --exclude=node7
#SBATCH --reservation=maint
#SBATCH --comment='it is ours; $HOME'
#SBATCH --mail-user=me@example.org
#SBATCH --mail-type=END
#SBATCH --gpus-per-node=h100:8
#SBATCH --exclusive
#SBATCH --switches=1@2:00:00
#SBATCH --output=/shared/runs/golden/submit/slurm-%j.out
#SBATCH --chdir=/shared/me
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=B:USR1@70
#SBATCH --licenses=foo
#SBATCH --nice=100
#SBATCH --comment='it is ours; $HOME fsdp_jobs:250101120000-0a1b2c'
set -e
early=
trap early=SIGUSR1 USR1
module load cuda/12.4
source ~/env.sh
export FSDP_JOBS_SUBMISSION=250101120000-0a1b2c
export PYTHONSAFEPATH=1 PYTHONPATH=/shared/runs/golden/code${PYTHONPATH:+:$PYTHONPATH}
trap '' USR1
exec /sw/python -m fsdp_jobs.launchers.slurm.batch /shared/runs/golden $early

# agent: /sw/python -m fsdp_jobs.node.agent /shared/runs/golden --node '{node}' --nproc 8
