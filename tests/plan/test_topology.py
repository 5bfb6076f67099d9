"""Topologies from files, SLURM and Kubernetes; and what is wrong with bad ones."""

from __future__ import annotations

import pytest

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.plan.sources import from_kubernetes, from_scontrol, from_yaml, path_from_slurm
from fsdp_jobs.plan.topology import Node, Topology, expand_hostlist, to_hostlist

FILE = """\
gpus_per_node: 4
switches:
  spine1:
    leaf1: node[1-2]
    leaf2: [node10, node3]
  spine2:
    leaf3: "node[4-5]"
"""


def names(topology: Topology) -> tuple[str, ...]:
    return tuple(node.name for node in topology.nodes)


def paths(topology: Topology) -> dict[str, tuple[str, ...]]:
    return {n.name: n.switch_path for n in topology.nodes}


def test_names_sort_as_people_count() -> None:
    assert names(Topology.of(map(Node, ["node10", "node2", "node1"]))) == ("node1", "node2", "node10")


def test_two_nodes_of_one_name() -> None:
    with pytest.raises(ValueError, match="node1 is named twice"):
        Topology.of([Node("node1"), Node("node1", ("leaf",))])


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("node1", ["node1"]),
        ("node[1-3,07],login", ["node1", "node2", "node3", "node07", "login"]),
        ("a[08-10]b", ["a08b", "a09b", "a10b"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_hostlists(text: str, expanded: list[str]) -> None:
    assert expand_hostlist(text) == expanded


@pytest.mark.parametrize(
    "text",
    [
        "",
        "login",
        "node[1-3],node[07-11],node2",
        "n[9-12],n[099-101],n3,n2,a,a1,a,b-[1-2],7,[9-10]",
    ],
)
def test_names_are_compact_in_their_order(text: str) -> None:
    assert to_hostlist(expand_hostlist(text)) == text


@pytest.mark.parametrize("text", ["node[3-1]", "node[1-", "node[x]"])
def test_bad_hostlists(text: str) -> None:
    with pytest.raises(ValueError, match="hostlist"):
        expand_hostlist(text)


def test_a_file() -> None:
    topology = from_yaml(FILE, "racks.yaml")
    assert names(topology) == ("node1", "node2", "node3", "node10", "node4", "node5")
    assert topology.nodes[0] == Node("node1", ("spine1", "leaf1"), 4)
    assert topology.units() == {"leaf": [2, 2, 2], "switch-1": [4, 2], "all": [6]}
    assert list(topology.units()) == ["leaf", "switch-1", "all"], "innermost first"


def test_a_file_that_names_a_node_twice() -> None:
    with pytest.raises(BadInput) as e:
        from_yaml(FILE.replace("node[4-5]", "node[4-5],node2"), "racks.yaml")
    said = "racks.yaml, switches.spine2.leaf3: node2 is named twice; first under racks.yaml, switches.spine1.leaf1"
    assert said in str(e.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("- node1", "racks.yaml: is not a mapping"),
        ("switches:\n  leaf: node[2-1]", "switches.leaf: hostlist node[2-1]: 2-1 runs backwards"),
        ("switchs:\n  leaf: node1", "racks.yaml, switchs: there is no such key\n      -> did you mean switches?"),
        ("gpus_per_node: many\nswitches:\n  leaf: n1", "racks.yaml, gpus_per_node=many: is not a number"),
        ("switches:\n  leaf: [{a: b}]", "switches.leaf: must be the name of a node or a hostlist"),
        ("switches:\n  leaf: n1\nnvlink:\n  rack: n2", "nvlink.rack: n2 is under no switch"),
        ("switches:\n  leaf: n1\n  leaf: n2", "the key leaf occurs twice"),
        ("a: [", "racks.yaml: "),
    ],
)
def test_bad_files(text: str, what: str) -> None:
    with pytest.raises(BadInput) as e:
        from_yaml(text, "racks.yaml")
    assert what in str(e.value)


SCONTROL = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=node[3-4]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=node[1-4] Switches=leaf[1-2]
"""


def test_scontrol_tree() -> None:
    topology = from_scontrol(SCONTROL, gpus=2)
    assert paths(topology)["node3"] == ("spine", "leaf2")
    assert topology.units()["leaf"] == [2, 2]
    assert topology.nodes[0].gpus == 2


def test_scontrol_of_an_allocation_with_an_unknown_node() -> None:
    topology = from_scontrol(SCONTROL, only=["node2", "stranger"])
    assert paths(topology) == {"node2": ("spine", "leaf1"), "stranger": ("leaf-of-stranger",)}


def test_scontrol_blocks() -> None:
    text = "BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2\nBlockName=b2 BlockIndex=1 Nodes=n[3-4] BlockSize=2\n"
    assert paths(from_scontrol(text))["n4"] == ("b2",)


def test_scontrol_of_another_form() -> None:
    with pytest.raises(BadInput, match="line 1"):
        from_scontrol("slurm_load_topo error: unable to contact controller")


@pytest.mark.parametrize(
    ("address", "pattern", "path"),
    [
        ("spine.leaf1.node1", "switch.switch.node", ("spine", "leaf1")),
        ("b1.node1.example.org", "block.node", ("b1",)),
        ("node1", "node", ()),
        ("s0.s[1-2].n1", "switch.switch.node", ("s0", "s[1-2]")),
    ],
)
def test_one_nodes_path_inside_a_job(address: str, pattern: str, path: tuple[str, ...]) -> None:
    assert path_from_slurm(address, pattern) == path


def test_kubernetes_labels() -> None:
    leaf, spine = "network.topology.nvidia.com/leaf", "network.topology.nvidia.com/spine"
    topology = from_kubernetes(
        {
            "a": {leaf: "l2", spine: "s1", "nvidia.com/gpu.clique": "c0.1"},
            "b": {leaf: "l1", spine: "s1", "topology.kubernetes.io/zone": "z"},
            "c": {},
        }
    )
    assert paths(topology) == {"b": ("s1", "l1"), "a": ("s1", "l2"), "c": ("leaf-of-c",)}
    assert {n.name: n.nvlink for n in topology.nodes} == {"a": "c0.1", "b": "", "c": ""}


def test_kubernetes_without_labels_is_flat() -> None:
    assert from_kubernetes({"a": {}, "b": {}}).units() == {"all": [2]}


def test_names_of_digits_stay_as_they_are_written() -> None:
    assert names(from_yaml("switches:\n  1: [007, 010]", "racks.yaml")) == ("007", "010")


def test_nvlink_domains_that_span_nodes() -> None:
    named = from_yaml("switches:\n  leaf: n[1-4]\nnvlink:\n  rack1: n[1-2]\n  rack2: n[3-4]", "racks.yaml")
    assert named.units()["domain"] == [2, 2]
    assert Topology.flat(40).units(18)["domain"] == [18, 18, 4]
