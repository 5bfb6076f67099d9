"""The schema of the group `cluster`: one dataclass a launcher. No torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ClusterConfig:
    """Where the job runs. A launcher's own keys live in a subclass of this."""

    launcher: str = "???"  # TorchX scheduler that submits: local_fsdp, ...
    topology: str | None = None  # file that says which node is under which switch (docs/planning.md)
    accelerator: str = "auto"  # auto | cpu | cuda


@dataclass
class LocalClusterConfig(ClusterConfig):
    """Agents as processes of this machine: a rehearsal of several nodes, or one real node."""

    launcher: str = "local_fsdp"
    restart_nodes: bool = True  # start a died node again, as a cluster would replace it


@dataclass
class SlurmClusterConfig(ClusterConfig):
    """Nodes that SLURM gives."""

    launcher: str = "slurm_fsdp"
    accelerator: str = "cuda"


CLUSTERS: dict[str, type[ClusterConfig]] = {"local": LocalClusterConfig, "slurm": SlurmClusterConfig}
