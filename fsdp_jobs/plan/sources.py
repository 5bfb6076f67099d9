"""Read topologies from a YAML file, SLURM's text, or Kubernetes node labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from fsdp_jobs.config.errors import BadInput, Problem, nearest, one_line
from fsdp_jobs.plan.topology import Node, Topology, expand_hostlist, natural_key

FILE_KEYS = ("switches", "gpus_per_node", "nvlink")

# Labels of a node's switches, outermost first; one row per provider. The first row with a label on any node is
# used.
KUBERNETES_LABELS = (
    # NVIDIA topograph
    ("network.topology.nvidia.com/core", "network.topology.nvidia.com/spine", "network.topology.nvidia.com/leaf"),
    # AWS (EKS, EC2 instance topology)
    tuple(f"topology.k8s.aws/network-node-layer-{layer}" for layer in (1, 2, 3)),
    # Google Kubernetes Engine
    ("cloud.google.com/gce-topology-block", "cloud.google.com/gce-topology-subblock"),
    ("topology.kubernetes.io/region", "topology.kubernetes.io/zone"),
)
NVLINK_LABELS = ("nvidia.com/gpu.clique", "network.topology.nvidia.com/accelerator")


def from_yaml(text: str, file: str, gpus: int = 8) -> Topology:
    """Read a topology file: switches as nested mappings, nodes as lists or hostlists.

        gpus_per_node: 8
        switches:
          spine1:
            leaf1: node[1-8]
            leaf2: [node9, node10]

    `nvlink: {rack1: "node[1-18]"}` names NVLink domains that span nodes.

    Args:
        text: the file's content.
        file: its name, for problems.
        gpus: GPUs per node when the file does not say.

    Raises:
        BadInput: the file is not of this form, or names a node twice; every problem with its key.
    """
    try:
        root = yaml.load(text, _Loader)
    except yaml.YAMLError as e:
        raise BadInput.at(file, one_line(e)) from e
    if not isinstance(root, dict):
        raise BadInput.at(file, "is not a mapping", "begin with `switches:`")
    unknown = (key for key in root if key not in FILE_KEYS)
    problems = [Problem(f"{file}, {key}", "there is no such key", nearest(key, FILE_KEYS)) for key in unknown]
    count = root.get("gpus_per_node", str(gpus))
    if not isinstance(count, str) or not count.isdigit() or int(count) < 1:
        problems.append(Problem(f"{file}, gpus_per_node={count}", "is not a number of at least 1"))
    keys: dict[str, tuple[str, ...]] = {}
    for name, above in _nodes(root.get("switches", {}), (f"{file}, switches",), problems):
        if name in keys:
            what = f"{name} is named twice; first under {'.'.join(keys[name])}"
            problems.append(Problem(".".join(above), what, "remove one of them"))
        keys.setdefault(name, above)
    nvlink = {name: above[-1] for name, above in _nodes(root.get("nvlink", {}), (f"{file}, nvlink",), problems)}
    for name in sorted(set(nvlink) - set(keys), key=natural_key):
        problems.append(Problem(f"{file}, nvlink.{nvlink[name]}", f"{name} is under no switch"))
    if problems:
        raise BadInput(problems)
    return Topology.of(Node(name, above[1:], int(count), nvlink.get(name, "")) for name, above in keys.items())


class _Loader(yaml.BaseLoader):
    """Keep scalars as they are written, and refuse a key that occurs twice in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for i, (key, _) in enumerate(node.value):
            if key.value in names[:i]:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} occurs twice", problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


def _nodes(tree: object, above: tuple[str, ...], problems: list[Problem]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name every node under a mapping, with the keys above it; items that name none go to `problems`."""
    if isinstance(tree, dict):
        for key, below in tree.items():
            yield from _nodes(below, (*above, key), problems)
        return
    for item in tree if isinstance(tree, list) else [tree]:
        try:
            if not isinstance(item, str):
                raise ValueError("must be the name of a node or a hostlist")
            yield from ((name, above) for name in expand_hostlist(item))
        except ValueError as e:
            problems.append(Problem(".".join(above), str(e)))


def from_scontrol(text: str, gpus: int = 8, only: Iterable[str] | None = None) -> Topology:
    """Read the output of SLURM's `scontrol show topology`, of the tree and of the block plugin.

    Args:
        text: the output.
        gpus: GPUs per node; SLURM's topology does not say.
        only: names of the nodes of an allocation: others are left out, and each node that the text does not
            name is its own leaf.

    Raises:
        BadInput: a line that is not of SLURM's form, with its number.
    """
    above: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = dict(re.findall(r"(\w+)=(\S+)", line))
        try:
            switch, level = fields.get("SwitchName") or fields.get("BlockName", ""), int(fields.get("Level", "0"))
            if not switch and line.strip():
                raise ValueError(f"has neither SwitchName nor BlockName: {line.strip()[:80]}")
            for name in expand_hostlist(fields.get("Nodes", "")):
                above.setdefault(name, []).append((level, switch))
        except ValueError as e:
            raise BadInput.at(f"scontrol show topology, line {number}", str(e)) from e
    nodes = []
    for name in set(above if only is None else only):
        switches = sorted(above.get(name, []), key=lambda at: -at[0])
        path = tuple(switch for _, switch in switches) or (f"leaf-of-{name}",)
        nodes.append(Node(name, path, gpus))
    return Topology.of(nodes)


def path_from_slurm(address: str, pattern: str) -> tuple[str, ...]:
    """Read one node's switch path from `SLURM_TOPOLOGY_ADDR` and `SLURM_TOPOLOGY_ADDR_PATTERN`.

    `spine.leaf1.node1` under `switch.switch.node` is ("spine", "leaf1"); a node's own name may hold dots.
    A switch that has several names (`s[0-1]`, a node under several) keeps SLURM's compact form.
    """
    kinds = pattern.split(".")
    parts = address.split(".", len(kinds) - 1)
    return tuple(p for p, kind in zip(parts, kinds, strict=False) if kind != "node" and p)


def labels_in_use(labels: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    """Return the labels that `from_kubernetes` reads: the first family that any node has, and those of NVLink."""
    rows = (row for row in KUBERNETES_LABELS if any(label in of for of in labels.values() for label in row))
    return (*next(rows, ()), *NVLINK_LABELS)


def from_kubernetes(labels: Mapping[str, Mapping[str, str]], gpus: int = 8) -> Topology:
    """Read the topology from each node's labels (KUBERNETES_LABELS, NVLINK_LABELS), by node name.

    A node without labels is its own leaf if others have some; if no node has any, all are under one switch.
    """
    family = [label for label in labels_in_use(labels) if label not in NVLINK_LABELS]
    nodes = []
    for name, of in labels.items():
        path = tuple(of[label] for label in family if label in of) or ((f"leaf-of-{name}",) if family else ())
        nvlink = next((of[label] for label in NVLINK_LABELS if label in of), "")
        nodes.append(Node(name, path, gpus, nvlink))
    return Topology.of(nodes)
