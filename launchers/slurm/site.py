"""Get the properties of a cluster that plans and scripts need: from the cluster, from a file, or by assumption."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fsdp_jobs.config.errors import BadInput, one_line
from fsdp_jobs.config.resolve import most_nodes, ranks_per_node
from fsdp_jobs.config.schema import JobConfig
from fsdp_jobs.launchers.slurm import client
from fsdp_jobs.launchers.slurm.script import Site, asked, cluster_of
from fsdp_jobs.plan.sources import from_scontrol
from fsdp_jobs.plan.topology import Topology, expand_hostlist

SAVE = "fsdp-jobs doctor cluster=slurm --save FILE, on a login node of the cluster"
_LEVELS = ("SwitchName=", "BlockName=")  # other lines describe groups of blocks, or state that there is no topology


def ask() -> Site:
    """Query the cluster that commands on this machine reach.

    Raises:
        SlurmError: there is no SLURM here, or it does not answer.
    """
    settings = client.settings()
    site = Site(settings["ClusterName"], "")
    if "gpu" in settings.get("GresTypes", ""):
        site.gpu_option = "--gpus-per-node={}" if "cons_tres" in settings["SelectType"] else "--gres=gpu:{}"
    with suppress(client.SlurmError):  # the site may not show it to users
        site.switches = _switches()
        for p in client.partitions():
            site.partitions[p.name + "*" * p.default] = ",".join(p.hosts)
            if own := re.search(r"\bTopology=(\w\S*)", client.shown(p)):  # of several in topology.yaml
                site.own_switches[p.name] = _switches(own[1])
    return site


def _switches(*topology: str) -> list[str]:
    lines = client.recent("scontrol", "show", "topology", *topology).splitlines()
    return [line for line in lines if line.startswith(_LEVELS)]


def load(file: str) -> Site:
    """Read a site file.

    Raises:
        BadInput: the file does not exist, is not YAML, or is not a site file.
    """
    try:
        return _parsed(Path(file).read_text())
    except (OSError, TypeError, ValueError, BadInput, yaml.YAMLError, OmegaConfBaseException) as e:
        why = getattr(e, "strerror", None) or one_line(e)
        raise BadInput.at(f"cluster.site={file}", f"not a site file: {why}", SAVE) from e


@cache
def _parsed(text: str) -> Site:
    site = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Site), OmegaConf.create(text)))
    assert isinstance(site, Site)
    for lines in (site.switches, *site.own_switches.values()):
        from_scontrol("\n".join(lines), only=expand_hostlist(",".join(site.partitions.values())))
    return site


def site_of(config: JobConfig) -> Site:
    """Query the cluster; if it cannot be reached, use `cluster.site`, or else the defaults of most sites.

    Raises:
        BadInput: `cluster.site` is needed but missing, is not a site file, or describes another cluster than this one.
    """
    file = cluster_of(config).site
    try:
        here = ask()
    except client.SlurmError:
        return Site("") if file is None else load(file)
    if file is not None and Path(file).exists() and (cluster := load(file).cluster) != here.cluster:
        what = f"is of the cluster {cluster}; commands here reach {here.cluster}"
        raise BadInput.at(f"cluster.site={file}", what, f"leave it out here, or make one: {SAVE}")
    return here


def topology_of(site: Site, config: JobConfig) -> Topology | None:
    """Return the switches above the partition's nodes; None if the site does not know them.

    Only for planning: SLURM chooses the job's nodes when it starts.
    """
    wanted, _ = asked(cluster_of(config), "partition")
    chosen = {
        name.rstrip("*"): hosts
        for name, hosts in site.partitions.items()
        if (name.endswith("*") if wanted is None else name.rstrip("*") in wanted.split(","))
    }
    switches = next((site.own_switches[name] for name in chosen if name in site.own_switches), site.switches)
    if not switches:
        return None
    topology = _topology(",".join(chosen.values()), "\n".join(switches), ranks_per_node(config))
    return topology if len(topology.nodes) >= most_nodes(config) else None


@cache
def _topology(hostlist: str, text: str, gpus: int) -> Topology:
    """Parse scontrol's output for these nodes, once for all jobs that are planned together."""
    return from_scontrol(text, gpus, set(expand_hostlist(hostlist)))
