"""fsdp_jobs: plan, launch and keep alive multi-node FSDP training."""

__version__ = "0.1.0"
