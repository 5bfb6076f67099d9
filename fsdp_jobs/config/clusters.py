"""The schema of the group `cluster`: one dataclass a launcher. No torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass
class ClusterConfig:
    """Where the job runs. A launcher's own keys live in a subclass of this."""

    launcher: str = "???"  # TorchX scheduler that submits: local_fsdp, ...
    topology: str | None = None  # file that says which node is under which switch (docs/planning.md)
    accelerator: str = "auto"  # auto | cpu | cuda
    shares_files: ClassVar[bool] = True  # paths in the configuration are the same on the submit machine and the nodes


@dataclass
class LocalClusterConfig(ClusterConfig):
    """Agents as processes of this machine: a rehearsal of several nodes, or one real node."""

    launcher: str = "local_fsdp"
    restart_nodes: bool = True  # start a died node again, as a cluster would replace it


@dataclass
class DockerClusterConfig(ClusterConfig):
    """Containers of this machine's Docker as nodes. Sizes are Docker's: 512m, 4g."""

    launcher: str = "docker_fsdp"
    image: str = "fsdp_jobs"  # has fsdp_jobs in it: deploy/Dockerfile
    cpus: float | None = None  # of a node; null: one a rank, at most all there are
    memory: str | None = None  # of a node, /dev/shm included; null: twice what the plan says it needs
    shm: str = "1g"  # /dev/shm of a node
    mounts: list[str] = field(default_factory=list)  # from:to or from:to:ro; run directory and data.path always are
    env: dict[str, str] = field(default_factory=dict)  # of every container
    pass_env: list[str] = field(default_factory=list)  # variables of yours that containers get; not recorded anywhere
    snapshot_mb: float = 100.0  # most that the copy of your code in the run directory may take; 0: the image's code
    keep: bool = False  # leave containers and network after the job, to look into


@dataclass
class ComposeClusterConfig(ClusterConfig):
    """The services of deploy/compose.yaml."""

    launcher: str = "compose_fsdp"


@dataclass
class SlurmClusterConfig(ClusterConfig):
    """Nodes that SLURM gives. Keys are sbatch's options under sbatch's names; null leaves one to the cluster."""

    launcher: str = "slurm_fsdp"
    accelerator: str = "cuda"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None  # minutes, or days-hours:minutes:seconds; a longer run goes on after a requeue
    gpus_per_node: str | None = None  # 8 or h100:8; null: one a rank, where the cluster counts GPUs
    cpus_per_task: int | None = None  # of a node; null: all of it with exclusive, else one a rank
    mem: str | None = None  # of a node: 500G, or 0 for all of it
    exclusive: bool = True
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    switches: str | None = None  # count, or count@max-time; null: asked for when a shard group spans nodes
    comment: str | None = None
    mail_user: str | None = None
    mail_type: str | None = None
    extra: list[str] = field(default_factory=list)  # any other option, as sbatch takes it: ['--licenses=foo']
    setup: list[str] = field(default_factory=list)  # shell lines before the job on its first node: module load cuda
    python: str | None = None  # interpreter on the nodes; null: the one that submits
    container: str | None = None  # image that agents run in; python is then python3 unless it is given
    container_runtime: str = "pyxis"  # pyxis (srun --container-image) | apptainer
    container_mounts: list[str] = field(default_factory=list)  # from:to; the run directory is always mounted
    snapshot_mb: float = 100.0  # most that the copy of your code in the run directory may take; 0: no copy
    preflight: bool = False  # test every node of the allocation before training: names, storage, GPUs, links
    regrow: bool = True  # ask for a new node when one is lost


@dataclass
class KubernetesClusterConfig(ClusterConfig):
    """Pods of the cluster that the kubeconfig names. Quantities are Kubernetes': 500m, 16Gi."""

    shares_files: ClassVar[bool] = False
    launcher: str = "kubernetes_fsdp"
    accelerator: str = "cuda"
    image: str | None = None  # has fsdp_jobs in it: deploy/Dockerfile
    claim: str | None = None  # PersistentVolumeClaim that holds run directories, mounted by every pod
    mount_path: str = "/runs"  # where pods mount it
    context: str | None = None  # of the kubeconfig; null: the current one
    namespace: str | None = None  # null: the context's
    workload: str = "job"  # job | jobset | volcano: what the cluster has to know
    queue: str | None = None  # Kueue's LocalQueue for job and jobset, Volcano's queue for volcano
    cpus: str | None = None  # of a node, requested and its limit; null: 1 a rank on CPU, 8 a GPU
    memory: str | None = None  # likewise; null: 2Gi a rank on CPU, 32Gi a GPU
    shm: str = "2Gi"  # /dev/shm, counted in memory
    gpu_resource: str = "nvidia.com/gpu"
    resources: dict[str, str] = field(default_factory=dict)  # of a node, besides: {vpc.amazonaws.com/efa: "4"}
    env: dict[str, str] = field(default_factory=dict)  # of a node: NCCL_SOCKET_IFNAME, ...
    secret_env: dict[str, str] = field(default_factory=dict)  # variable: secret/key
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: list[Any] = field(default_factory=list)  # as in a pod's specification
    leaf_label: str | None = None  # label of machines under one switch: the job's nodes are placed together
    priority_class: str | None = None
    service_account: str | None = None
    image_pull_secrets: list[str] = field(default_factory=list)
    run_as_user: int | None = 1000  # null: the image's, or the cluster's choice (OpenShift)
    fs_group: int | None = 1000  # group that owns the claim's files, where the storage knows groups
    labels: dict[str, str] = field(default_factory=dict)  # of everything that is created
    annotations: dict[str, str] = field(default_factory=dict)
    lost_after_s: int = 60  # a machine that does not answer is given up after so long
    keep_hours: float = 24.0  # finished pods and their logs stay so long
    pod_patch: dict[str, Any] = field(default_factory=dict)  # merged into the pods' specification, lists by name


CLUSTERS: dict[str, type[ClusterConfig]] = {
    "local": LocalClusterConfig,
    "docker": DockerClusterConfig,
    "compose": ComposeClusterConfig,
    "slurm": SlurmClusterConfig,
    "kubernetes": KubernetesClusterConfig,
}
