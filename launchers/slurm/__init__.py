"""Launcher `slurm_fsdp`: a SLURM job with an agent per node, the coordinator beside its batch step."""
