"""Topologies from what clusters say about themselves: a YAML file, SLURM's text, Kubernetes node labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import yaml

from fsdp_jobs.config.errors import BadInput, Problem, nearest
from fsdp_jobs.plan.topology import Node, Topology, expand_hostlist, natural_key

# Labels that name a node's place, outermost first; one row a provider. The first row of which some node
# has a label counts.
KUBERNETES_LABELS = (
    # NVIDIA topograph
    (
        "network.topology.nvidia.com/core",
        "network.topology.nvidia.com/spine",
        "network.topology.nvidia.com/leaf",
    ),
    # AWS (EKS, EC2 instance topology)
    (
        "topology.k8s.aws/network-node-layer-1",
        "topology.k8s.aws/network-node-layer-2",
        "topology.k8s.aws/network-node-layer-3",
    ),
    # Google Kubernetes Engine
    ("cloud.google.com/gce-topology-block", "cloud.google.com/gce-topology-subblock"),
    ("topology.kubernetes.io/region", "topology.kubernetes.io/zone"),
)
NVLINK_LABELS = ("nvidia.com/gpu.clique", "network.topology.nvidia.com/accelerator")
GPU_COUNT_LABEL = "nvidia.com/gpu.count"


def from_yaml(text: str, expected: Iterable[str] = (), gpus: int = 8) -> Topology:
    """A topology file: switches as nested mappings, nodes as lists or hostlists.

        gpus_per_node: 8
        switches:
          spine1:
            leaf1: node[1-8]
            leaf2: [node9, node10]

    `nvlink: {rack1: "node[1-18]"}` names NVLink domains that span nodes.

    Args:
        text: the file's content.
        expected: names of nodes that the job will use; each must be in the file.
        gpus: GPUs a node when the file does not say.

    Raises:
        BadInput: not of this form, a node named twice, or an expected node missing; each with its line.
    """
    reader = _YamlReader()
    try:
        root = yaml.compose(text)
    except yaml.YAMLError as e:
        raise BadInput([Problem("topology file", " ".join(str(e).split()))]) from e
    if not isinstance(root, yaml.MappingNode):
        raise BadInput([Problem("topology file, line 1", "is not a mapping", "begin with `switches:`")])
    nvlink: dict[str, str] = {}
    for key, value in root.value:
        if key.value == "gpus_per_node":
            gpus = reader.number(value)
        elif key.value == "switches":
            reader.switches(value, ())
        elif key.value == "nvlink":
            nvlink = {name: domain.value for domain, names in value.value for name, _ in reader.names(names)}
        else:
            hint = nearest(key.value, ("switches", "gpus_per_node", "nvlink"))
            reader.problem(key, f"there is no such key: {key.value}", hint)
    for name in sorted(set(nvlink) - set(reader.lines), key=natural_key):
        reader.problems.append(Problem(f"topology file, nvlink: {name}", "is under no switch"))
    for name in expected:
        if name not in reader.lines:
            reader.missing(name)
    if reader.problems:
        raise BadInput(reader.problems)
    return Topology.of(Node(n, path, gpus, nvlink.get(n, "")) for n, path in reader.paths.items())


class _YamlReader:
    """Walks the composed file, keeping each node's path and line, and every problem met."""

    def __init__(self) -> None:
        self.paths: dict[str, tuple[str, ...]] = {}
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []

    def problem(self, at: yaml.Node, what: str, instead: str = "") -> None:
        self.problems.append(Problem(f"topology file, line {at.start_mark.line + 1}", what, instead))

    def missing(self, name: str) -> None:
        near = nearest(name, self.lines)
        if self.lines:
            last = min(self.lines, key=lambda known: (_distance(known, name), natural_key(known)))
            where = f"topology file, line {self.lines[last]}"
            self.problems.append(Problem(where, f"{name} is missing here or elsewhere; this line has {last}", near))
        else:
            self.problems.append(Problem("topology file", f"{name} is missing", near))

    def number(self, node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode) and node.value.isdigit() and int(node.value) > 0:
            return int(node.value)
        self.problem(node, f"gpus_per_node is {node.value}, not a number of at least 1")
        return 1

    def names(self, node: yaml.Node) -> list[tuple[str, yaml.Node]]:
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        found: list[tuple[str, yaml.Node]] = []
        for item in items:
            if not isinstance(item, yaml.ScalarNode):
                self.problem(item, "a node's name or a hostlist is wanted here")
                continue
            try:
                found += [(name, item) for name in expand_hostlist(item.value)]
            except ValueError as e:
                self.problem(item, str(e))
        return found

    def switches(self, node: yaml.Node, path: tuple[str, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                self.switches(value, (*path, key.value))
            return
        for name, at in self.names(node):
            if name in self.lines:
                self.problem(at, f"{name} is named twice; first on line {self.lines[name]}", "remove one of them")
                continue
            self.lines[name] = at.start_mark.line + 1
            self.paths[name] = path


def _distance(known: str, name: str) -> int:
    """Difference of the trailing numbers of two names of one stem; large for different stems."""
    a, b = re.match(r"(.*?)(\d*)$", known), re.match(r"(.*?)(\d*)$", name)
    if a is None or b is None or a[1] != b[1] or not a[2] or not b[2]:
        return 10**9
    return abs(int(a[2]) - int(b[2]))


def from_scontrol(text: str, gpus: int = 8, only: Iterable[str] | None = None) -> Topology:
    """SLURM's `scontrol show topology`, of the tree and of the block plugin.

    Args:
        text: its output.
        gpus: GPUs a node; SLURM's topology does not say.
        only: names of the nodes of an allocation; others are left out, and nodes the text
            does not know join as their own leaf.

    Raises:
        BadInput: a line that is not of SLURM's form, with its number.
    """
    above: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = dict(re.findall(r"(\w+)=(\S+)", line))
        switch = fields.get("SwitchName") or fields.get("BlockName")
        if switch is None:
            if line.strip():
                what = "has neither SwitchName nor BlockName"
                raise BadInput([Problem(f"scontrol show topology, line {number}", what, line.strip()[:80])])
            continue
        try:
            level = int(fields.get("Level", "0"))
            names = expand_hostlist(fields.get("Nodes", ""))
        except ValueError as e:
            raise BadInput([Problem(f"scontrol show topology, line {number}", str(e))]) from e
        for name in names:
            above.setdefault(name, []).append((level, switch))
    wanted = list(above) if only is None else list(only)
    paths = {n: tuple(s for _, s in sorted(above.get(n, []), key=lambda x: -x[0])) or (f"leaf-of-{n}",) for n in wanted}
    return Topology.of(Node(n, p, gpus) for n, p in paths.items())


def path_from_slurm(address: str, pattern: str) -> tuple[str, ...]:
    """One node's switch path from `SLURM_TOPOLOGY_ADDR` and `SLURM_TOPOLOGY_ADDR_PATTERN`.

    `spine.leaf1.node1` under `switch.switch.node` is ("spine", "leaf1"); a node's own name may hold dots.
    A switch that has several names (`s[0-1]`, a node under several) keeps SLURM's compact form.
    """
    kinds = pattern.split(".")
    parts = address.split(".", len(kinds) - 1)
    return tuple(p for p, kind in zip(parts, kinds, strict=False) if kind != "node" and p)


def from_kubernetes(labels: Mapping[str, Mapping[str, str]], gpus: int = 8) -> Topology:
    """Topology from the labels of each node, by node name: see KUBERNETES_LABELS and NVLINK_LABELS.

    Nodes with none of the labels are under one unnamed switch when no node has any, else their own leaf.
    """
    family = next((row for row in KUBERNETES_LABELS if any(label in of for of in labels.values() for label in row)), ())
    nodes = []
    for name, of in labels.items():
        path = tuple(of[label] for label in family if label in of)
        if family and not path:
            path = (f"leaf-of-{name}",)
        nvlink = next((of[label] for label in NVLINK_LABELS if label in of), "")
        count = of.get(GPU_COUNT_LABEL, "")
        nodes.append(Node(name, path, int(count) if count.isdigit() else gpus, nvlink))
    return Topology.of(nodes)
