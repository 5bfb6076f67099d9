"""Bytes that cross between nodes in an optimizer step, counted on the links, against what the plan predicts.

Run on gloo, whose reduce-scatter costs an all-reduce: twice the bytes of NCCL's. The prediction for gloo says so;
the ratios between strategies are gloo's, too. Counted between two steps of a running job, checkpoints off, so
neither start-up nor saves are in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.traffic import CASES, Result, measure, table
from tests.netns import needs_netns

pytestmark = [pytest.mark.integration, needs_netns]

WITHIN = 0.05


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Each case's bytes, as they come to be asked for."""

    class OnDemand(dict[str, Result]):
        def __missing__(self, key: str) -> Result:
            self[key] = measure(CASES[key], tmp_path_factory.mktemp("traffic"), steps=10)
            return self[key]

    return OnDemand()


def cases(*keys: str, soak: Sequence[str]) -> list[Any]:
    return [*keys, *(pytest.param(key, marks=pytest.mark.soak) for key in soak)]


@pytest.mark.parametrize(
    "key", cases("full 2x2", "hybrid 2x2", "near", soak=("full 4x2", "hybrid 4x2", "full names", "near text"))
)
def test_each_node_sends_what_the_plan_says(measured: dict[str, Result], key: str) -> None:
    result = measured[key]
    print("\n" + "\n".join(table({key: result})))
    assert result.node == pytest.approx(result.planned, rel=WITHIN)
    for node, sent in result.nodes.items():
        assert sent == pytest.approx(result.planned, rel=WITHIN), node


@pytest.mark.parametrize("size", cases("2x2", soak=["4x2"]))
def test_shard_groups_inside_nodes_spare_the_network(measured: dict[str, Result], size: str) -> None:
    full, hybrid = measured[f"full {size}"], measured[f"hybrid {size}"]
    ratio, predicted = full.node / hybrid.node, full.planned / hybrid.planned
    print(f"\n{size}: full_shard sends {ratio:.2f} x what hybrid_shard does, {predicted:.2f} x predicted")
    assert ratio == pytest.approx(predicted, rel=WITHIN)
    assert ratio > 1.5


@pytest.mark.soak
@pytest.mark.parametrize(("names", "plain"), [("full names", "full 4x2"), ("near text", "near")])
def test_host_names_change_nothing(measured: dict[str, Result], names: str, plain: str) -> None:
    """Ranks follow the switches, however the names are ordered: torchrun's order by name would double a leaf's load."""
    assert measured[names].node == pytest.approx(measured[plain].node, rel=WITHIN)
    assert measured[names].uplink == pytest.approx(measured[plain].uplink, rel=WITHIN)


def test_groups_are_inside_a_leaf_switch(measured: dict[str, Result]) -> None:
    near = measured["near"]
    assert near.uplink == pytest.approx(near.uplink_predicted["gloo"], rel=WITHIN)


@pytest.mark.soak  # without a topology the same job sends more between the switches
def test_groups_inside_a_leaf_switch_spare_its_uplink(measured: dict[str, Result]) -> None:
    near, blind = measured["near"], measured["blind"]
    print("\n" + "\n".join(table({"near": near, "blind": blind})))
    assert blind.uplink == pytest.approx(blind.uplink_predicted["gloo"], rel=WITHIN)
    ratio = blind.uplink / near.uplink
    predicted = blind.uplink_predicted["gloo"] / near.uplink_predicted["gloo"]
    print(f"ignoring the topology costs {ratio:.2f} x on the uplink, {predicted:.2f} x predicted")
    assert ratio == pytest.approx(predicted, rel=WITHIN)
    assert ratio > 1.5
