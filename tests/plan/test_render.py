"""The plan as people see it: every part is there, nothing is wider than the terminal, the SVG is whole."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.plan.plan import Plan, make_plan
from fsdp_jobs.plan.svg import to_svg
from fsdp_jobs.plan.topology import Node, Topology
from fsdp_jobs.run.table import size
from tests.plan.groups import groups_of
from tests.plan.shown import render_text

BASE = ["hardware=h100", "data=synthetic", "data.seq_len=4096", "data.micro_batch=1", "data.global_batch=2048"]


@cache
def plan(nodes: int, *overrides: str) -> Plan:
    places = (Node(f"node{i + 1}", (f"spine{i // 32}", f"leaf{i // 8 + 1}")) for i in range(nodes))
    return make_plan(compose_job([*BASE, *overrides]), Topology.of(places), nodes)


FITTING = ("model=llama3_70b", "fsdp.activation_checkpointing=full", "fsdp.accumulate_unsharded=false")


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("nodes", [1, 16, 256])
def test_it_keeps_to_the_width(nodes: int, width: int) -> None:
    text = render_text(plan(nodes, *FITTING), width)
    assert max(map(len, text.splitlines())) <= width


def test_no_number_is_cut_in_a_narrow_terminal() -> None:
    made = plan(16, *FITTING)
    text = render_text(made, 60)
    assert "…" not in text
    for option in [o for o in made.considered if o.fits]:
        assert f"{option.tokens_per_s:,.0f}" in text and size(option.memory_bytes) in text


def test_options_that_are_not_shown_are_counted() -> None:
    made = plan(16, *FITTING)
    assert f"and {len(made.considered) - 10} more" in render_text(made, 120)
    assert "more" not in render_text(plan(1, *FITTING), 120)


def test_all_parts_are_there() -> None:
    made = plan(16, *FITTING)
    text = render_text(made, 120)
    assert text.startswith("FITS  hybrid_shard: 4 replicas x shard group of 32, 16 nodes x 8 ranks")
    for part in ("leaf2", "node16", "[3: 120-127]", "optimizer", "activations", "tokens/s", "full_shard over 128"):
        assert part in text
    for reason in made.reasons:
        assert reason in " ".join(text.split())


def test_a_step_is_named_by_its_tokens() -> None:
    assert f"a step of {2048 * 4096:,} tokens takes " in render_text(plan(16, *FITTING), 200)


@pytest.mark.parametrize(
    ("parameters", "step", "shown"),
    [
        (999_885_952, 0.99961, ("1 B parameters", "takes 1 s:")),
        (999_499_999, 0.5, ("999 M parameters", "takes 500 ms:")),
        (1_041_000_000_000, 999.7, ("1,040 B parameters", "takes 16m40s:")),
    ],
)
def test_no_number_is_a_power_of_ten(parameters: int, step: float, shown: tuple[str, str]) -> None:
    made = plan(16, *FITTING)
    assert made.time is not None
    text = render_text(replace(made, parameters=parameters, time=replace(made.time, step=step)), 200)
    assert all(part in text for part in shown) and "e+" not in text


@pytest.mark.parametrize("overrides", [("model=llama_debug", "hardware=cpu"), ("model=llama2_7b", "hardware=b200")])
def test_a_table_narrower_than_its_title_does_not_break_it(overrides: tuple[str, str]) -> None:
    made = plan(1, *overrides)
    assert made.memory is not None
    lines = [line.rstrip() for line in render_text(made, 80).splitlines()]
    assert any(line.endswith(f"during: {made.memory.moment}") for line in lines)
    assert f"Options considered ({len(made.considered)}); bytes that a node sends per step over {made.backend}" in lines


def test_a_plan_in_brief_has_its_verdict_reasons_and_remedies() -> None:
    made = plan(1, "model=llama3_8b", "fsdp.accumulate_unsharded=true", "fsdp.chunked_loss=false")
    whole, text = render_text(made, 120), render_text(made, 120, in_brief=True)
    assert set(text.splitlines()) < set(whole.splitlines())
    assert text.startswith("DOES NOT FIT") and "What would make it fit" in text and "Peak memory" not in text


def test_many_nodes_are_condensed() -> None:
    text = render_text(plan(256, *FITTING), 120)
    assert "more leaves" in text
    assert "node1 .. node8 (8)" in text
    assert len(text.splitlines()) < 80


def test_what_does_not_fit_says_what_would() -> None:
    made = plan(1, "model=llama3_8b", "fsdp.accumulate_unsharded=true", "fsdp.chunked_loss=false")
    text = render_text(made, 120)
    assert text.startswith("DOES NOT FIT")
    assert "What would make it fit" in text
    assert made.remedies[0].overrides[0] in text


def ranks_drawn(svg: str) -> dict[int, str]:
    """Colour of each rank's square."""
    root = ET.fromstring(svg)
    space = {"s": "http://www.w3.org/2000/svg"}
    squares = [r.get("fill", "") for r in root.findall("s:rect[@rx]", space)]
    numbers = [int(t.text or "") for t in root.findall("s:text[@text-anchor]", space)]
    return dict(zip(numbers, squares, strict=True))


def test_the_picture_colours_ranks_by_group() -> None:
    made = plan(16, *FITTING)
    colours = ranks_drawn(to_svg(made))
    assert sorted(colours) == list(range(128))
    groups = groups_of(made)
    for g in groups:
        assert len({colours[r] for r in range(g.first_rank, g.last_rank + 1)}) == 1
    assert all(colours[a.first_rank] != colours[b.first_rank] for a, b in pairwise(groups))


def test_no_line_of_the_picture_is_cut() -> None:
    root = ET.fromstring(to_svg(plan(16, *FITTING)))
    lines = [t.text or "" for t in root.findall("{*}text[@x='12']")]
    assert max(map(len, lines)) > 140  # the summary
    assert 12 + 6.5 * max(map(len, lines)) < float(root.get("width", "0"))


def test_the_picture_needs_nothing_else() -> None:
    for nodes in (1, 16, 256):
        svg = to_svg(plan(nodes, *FITTING))
        ET.fromstring(svg)
        assert svg.count("http") == 1  # the name space
        assert "href" not in svg


@pytest.mark.parametrize(("n", "text"), [(0, "0 B"), (1023, "1023 B"), (2048, "2.0 KiB"), (15.2 * 2**30, "15.2 GiB")])
def test_sizes(n: float, text: str) -> None:
    assert size(n) == text
