"""Launcher `slurm_fsdp`: one plain SLURM job, an agent on each of its nodes, the coordinator beside its batch step."""
