"""Which nodes the node test finds bad."""

from __future__ import annotations

from fsdp_jobs.launchers.slurm.node_test import Report, blame

HOSTS = ["a", "b", "c", "d"]


def reports(**changes: Report) -> list[Report]:
    """Four good nodes, but for `changes`; neighbours were tested with each other."""
    pairs = {"a": ["b"], "b": ["a", "c"], "c": ["b", "d"], "d": ["c"]}
    good = {h: Report(h, gemm_tflops=[100.0, 101.0], pairs=dict.fromkeys(pairs[h], "")) for h in HOSTS}
    return list((good | changes).values())


def test_good_nodes_are_left_alone() -> None:
    assert blame(reports(), HOSTS) == ({}, [])


def test_a_node_that_says_nothing_is_bad_and_its_neighbours_are_not() -> None:
    partners = Report("b", pairs={"a": "Connection closed", "c": ""})
    bad, between = blame([r for r in reports(b=partners) if r.host != "a"], HOSTS)
    assert list(bad) == ["a"]
    assert between == []


def test_only_a_node_that_has_not_begun_is_bad_where_the_others_wait_for_it() -> None:
    bad, between = blame([], HOSTS, {"c"})
    assert bad == {"c": "did not begin within 600 s"} and between == []


def test_a_node_whose_links_all_fail_is_bad_where_the_others_work() -> None:
    broken = Report("b", pairs={"a": "timed out", "c": "timed out"})
    a, c = Report("a", pairs={"b": "timed out"}), Report("c", pairs={"b": "timed out", "d": ""})
    bad, _ = blame(reports(a=a, b=broken, c=c), HOSTS)
    assert "b" in bad
    assert "c" not in bad
    assert "d" not in bad


def test_a_slow_gpu_and_a_wrong_one_are_named() -> None:
    slow, wrong = Report("c", gemm_tflops=[100.0, 60.0]), Report("d", problems=["cuda:1 multiplies wrongly"])
    bad, _ = blame(reports(c=slow, d=wrong), HOSTS)
    assert bad == {"c": "device 1 multiplies at less than 70% of the median", "d": "cuda:1 multiplies wrongly"}


def test_between_two_nodes_nobody_is_blamed() -> None:
    a, b = Report("a", pairs={"b": "timed out"}), Report("b", pairs={"a": "timed out"})
    bad, between = blame([a, b], ["a", "b"])
    assert bad == {}
    assert between == ["between a and b: timed out"]
