"""What a plan and a script depend on and only the cluster knows."""

from __future__ import annotations

from collections import Counter
from functools import cache

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.resolve import node_range, ranks_per_node
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.base import Job
from fsdp_jobs.launchers.slurm import client
from fsdp_jobs.launchers.slurm.script import Site, cluster_of, margin_s
from fsdp_jobs.launchers.slurm.validate import no_slurm
from fsdp_jobs.plan.sources import from_scontrol
from fsdp_jobs.plan.topology import Topology, expand_hostlist
from fsdp_jobs.run import events
from fsdp_jobs.run.tail import read_json_lines


def cluster_topology(config: JobConfig) -> Topology | None:
    """Return the switches above the partition's nodes; None without SLURM, or where it does not know them.

    For planning only: which of these nodes a job will get is not known before it starts.
    """
    try:
        if client.settings()["TopologyPlugin"] in ("topology/none", "topology/default", "topology/flat"):
            return None
        name = cluster_of(config).partition
        partition = [f"--partition={name}"] if name is not None else []
        hostlist = ",".join(client.recent("sinfo", "--noheader", "--format=%N", *partition).split())
        topology = _topology(hostlist, client.recent("scontrol", "show", "topology"), ranks_per_node(config))
    except client.SlurmError:
        return None
    return topology if len(topology.nodes) >= node_range(config.nodes)[1] else None


@cache
def _topology(hostlist: str, text: str, gpus: int) -> Topology:
    """Parse scontrol's answer about these nodes, once for all jobs that are planned together."""
    return from_scontrol(text, gpus, set(expand_hostlist(hostlist)))


def probe(job: Job) -> Site:
    """Return what the script has to know of this cluster, and of what this run has measured.

    Raises:
        BadInput: there is no SLURM here, or it does not answer.
    """
    try:
        settings = client.settings()
    except client.SlurmError as e:
        raise BadInput([no_slurm(str(e))]) from e
    option = ""
    if "gpu" in settings.get("GresTypes", ""):
        option = "--gpus-per-node={}" if "cons_tres" in settings["SelectType"] else "--gres=gpu:{}"
    topology = cluster_topology(job.config)
    leaves = Counter(node.switch_path for node in topology.nodes) if topology is not None else Counter()
    saves = [e.seconds for e in events.read_events(job.run) if isinstance(e, events.Checkpoint)]
    step_s = max((m["step_s"] for m in read_json_lines(job.run.metrics)), default=0.0)
    margin = margin_s(max(saves, default=0.0), step_s, job.config.elastic.stop_grace_s)
    return Site(option, tuple(sorted(leaves.values(), reverse=True)), margin)
