"""Define the group `cluster`: one dataclass per launcher. No torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fsdp_jobs.config.keys import AUTO, key


@dataclass
class ClusterConfig:
    """Where the job runs. A launcher's own keys are in a subclass."""

    launcher: str = key("???", "the TorchX scheduler that submits; set by the option")
    topology: str | None = key(None, "file with the switch of each node")
    accelerator: str = key(AUTO, "auto: cuda if a node has a GPU for each rank", choices=(AUTO, "cpu", "cuda"))
    replaces_nodes: ClassVar[bool] = False  # one at a time: its request to end one node does not concern others
    shares_files: ClassVar[bool] = True  # paths in the configuration name the same files here and on the nodes
    shares_environment: ClassVar[bool] = False  # ranks get the environment of the submitting process

    def runs_program_of_this_machine(self, path: str, shares_files: bool) -> bool:
        """Return whether nodes run this file of the submitting machine, or a copy of it, and not a file of an image."""
        return shares_files

    @property
    def restarts_elsewhere(self) -> bool:
        """Whether a restart gets none of the excluded machines, even in a job of one node."""
        return False


@dataclass
class LocalClusterConfig(ClusterConfig):
    """Agents as processes of this machine: a rehearsal of several nodes, or one real node."""

    launcher: str = "local_fsdp"
    restart_nodes: bool = key(True, "start a node that died again, as a cluster would replace it")
    shares_environment: ClassVar[bool] = True


@dataclass
class DockerClusterConfig(ClusterConfig):
    """Containers of this machine's Docker as nodes. Sizes as Docker takes them: 512m, 4g."""

    launcher: str = "docker_fsdp"
    image: str = key("fsdp_jobs", "image with fsdp_jobs in it, as deploy/Dockerfile builds it")
    cpus: float | None = key(None, "CPUs per node; null: one per rank, at most all there are")
    memory: str | None = key(None, "memory per node, /dev/shm included; null: twice what the plan says it needs")
    shm: str = key("1g", "/dev/shm per node")
    mounts: list[str] = key([], "from:to or from:to:ro; the run directory and the job's inputs are always mounted")
    env: dict[str, str] = key({}, "environment of every container")
    pass_env: list[str] = key([], "variables of your environment that containers get; recorded nowhere")
    snapshot_mb: float = key(100.0, "largest copy of your code in the run directory, MB; 0: the image's code")
    keep: bool = key(False, "leave containers and network after the job, for inspection")

    def runs_program_of_this_machine(self, path: str, shares_files: bool) -> bool:
        return self.snapshot_mb > 0 and not Path(path).is_absolute()


@dataclass
class ComposeClusterConfig(ClusterConfig):
    """The services of deploy/compose.yaml."""

    launcher: str = "compose_fsdp"


@dataclass
class SlurmClusterConfig(ClusterConfig):
    """Nodes of a SLURM cluster. Keys are named after sbatch's options; null leaves one to the cluster."""

    launcher: str = "slurm_fsdp"
    accelerator: str = "cuda"
    partition: str | None = key(None, "")
    account: str | None = key(None, "")
    qos: str | None = key(None, "")
    time: str | None = key(None, "minutes, or days-hours:minutes:seconds; a longer run continues after a requeue")
    gpus_per_node: str | None = key(None, "8 or h100:8; null: one per rank, where SLURM counts GPUs")
    cpus_per_task: int | None = key(None, "CPUs per node; null: all of them with exclusive, else one per rank")
    mem: str | None = key(None, "memory per node: 500G, or 0 for all of it")
    exclusive: bool = key(True, "whole nodes")
    constraint: str | None = key(None, "")
    nodelist: str | None = key(None, "hostlist, in quotes")
    exclude: str | None = key(None, "hostlist, in quotes")
    reservation: str | None = key(None, "")
    switches: str | None = key(None, "count, or count@max-time; null: requested when a shard group spans nodes")
    comment: str | None = key(None, "")
    mail_user: str | None = key(None, "")
    mail_type: str | None = key(None, "")
    extra: list[str] = key([], "any other option, as sbatch takes it: ['--licenses=foo']")
    setup: list[str] = key([], "shell lines before the job on its first node: ['module load cuda']")
    python: str | None = key(None, "interpreter on the nodes; null: the one that submits, python3 in a container")
    container: str | None = key(None, "image with fsdp_jobs that agents run in; `python` is then its interpreter")
    container_runtime: str = key("pyxis", "pyxis runs srun --container-image", choices=("pyxis", "apptainer"))
    container_mounts: list[str] = key([], "from:to; the working and the run directory are always mounted")
    snapshot_mb: float = key(100.0, "largest copy of your code in the run directory, MB; 0: no copy")
    preflight: bool = key(False, "test every node of the allocation before training: names, storage, GPUs, links")
    regrow: bool = key(True, "request a new node when one is lost")
    site: str | None = key(None, "file of `doctor --save`, for plans and dry runs that cannot ask the cluster")

    @property
    def restarts_elsewhere(self) -> bool:
        return self.nodelist is None

    def runs_program_of_this_machine(self, path: str, shares_files: bool) -> bool:
        return (shares_files and self.container is None) or not Path(path).is_absolute()


@dataclass
class KubernetesClusterConfig(ClusterConfig):
    """Pods of the cluster that the kubeconfig names. Quantities as Kubernetes takes them: 500m, 16Gi."""

    replaces_nodes: ClassVar[bool] = True
    shares_files: ClassVar[bool] = False
    launcher: str = "kubernetes_fsdp"
    accelerator: str = "cuda"
    image: str | None = key(None, "image with fsdp_jobs in it, as deploy/Dockerfile builds it; has to be given")
    claim: str | None = key(None, "PersistentVolumeClaim with the run directories, in every pod; has to be given")
    mount_path: str = key("/runs", "where pods mount it")
    context: str | None = key(None, "of the kubeconfig; null: the current one")
    namespace: str | None = key(None, "null: the context's")
    workload: str = key("job", "kind of object; the cluster must know it", choices=("job", "jobset", "volcano"))
    queue: str | None = key(None, "Kueue's LocalQueue for job and jobset, Volcano's queue for volcano")
    cpus: str | None = key(None, "CPUs per node, request and limit; null: 1 per rank on CPU, 8 per GPU")
    memory: str | None = key(None, "memory per node, request and limit; null: 2Gi per rank on CPU, 32Gi per GPU")
    shm: str = key("2Gi", "/dev/shm, counted in memory")
    gpu_resource: str = key("nvidia.com/gpu", "resource that a node requests once per rank")
    resources: dict[str, str] = key({}, 'further resources per node: {vpc.amazonaws.com/efa: "4"}')
    env: dict[str, str] = key({}, "environment of every pod: NCCL_SOCKET_IFNAME, ...")
    secret_env: dict[str, str] = key({}, "environment of a node from secrets, variable: secret/key")
    node_selector: dict[str, str] = key({}, "of the nodes' pods")
    tolerations: list[Any] = key([], "of every pod, as in a pod's specification")
    leaf_label: str | None = key(None, "label of machines under one switch: the job's nodes are placed together")
    priority_class: str | None = key(None, "of every pod")
    service_account: str | None = key(None, "of every pod")
    image_pull_secrets: list[str] = key([], "names")
    run_as_user: int | None = key(1000, "null: the image's, or the cluster's choice (OpenShift)")
    fs_group: int | None = key(1000, "group that owns the claim's files, where the storage supports groups")
    labels: dict[str, str] = key({}, "of everything that is created")
    annotations: dict[str, str] = key({}, "of everything that is created")
    lost_after_s: int = key(60, "seconds after which a machine that does not answer is given up")
    keep_hours: float = key(168.0, "hours for which finished pods and their logs stay")
    pod_patch: dict[str, Any] = key({}, "merged into the pods' specification, lists by name")


CLUSTERS: dict[str, type[ClusterConfig]] = {
    "local": LocalClusterConfig,
    "docker": DockerClusterConfig,
    "compose": ComposeClusterConfig,
    "slurm": SlurmClusterConfig,
    "kubernetes": KubernetesClusterConfig,
}
