"""What benchmarks/gpu.py reads and judges, without a GPU; and that its plan is whole and short enough."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
import time
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import gpu
from benchmarks.gpu import CASES, USUAL
from benchmarks.gpu_parts import faults, memory, rates, saving, speed
from benchmarks.gpu_parts.bench import GIB, HARDWARE, PROGRAMS, Bench, Case, Row, version_of
from benchmarks.gpu_parts.memory import MEMORY
from benchmarks.gpu_programs import travel
from fsdp_jobs.config.schema import RECOMPUTED, STRATEGIES
from tests.jobs import ROOT
from tests.world import TINY

HERE = Bench(Path(), gpus=0)


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        *((0.9, 0.9, 1.1, "PASS"), (1.1, 0.9, 1.1, "PASS"), (0.85, 0.9, 1.1, "6% below")),
        *(
            (1.32, 0.9, 1.1, "20% above"),
            (3.0, 0, 0, "3 above"),
            (None, 0, 1, "FAIL"),
            (math.nan, 0, 1, "FAIL"),
            (7.0, -math.inf, math.inf, "measured"),
            (7.0, 0, math.inf, "measured"),
        ),
    ],
)
def test_a_row_says_how_far_off_it_is(value: float | None, low: float, high: float, verdict: str) -> None:
    assert Row("x", value, low, high).verdict == verdict


def test_the_table_has_the_expected_range() -> None:
    rows = [("speed", Row("1b", 0.97, 0.85, 1.18, note="n")), ("works", Row("main", 1, 1, 1)), ("x", Row("y", None, 0))]
    assert list(gpu.table(rows))[2:] == [
        "| speed | 1b | 0.97 | at least 0.85, at most 1.18 | PASS | n |",
        "| works | main | 1 | 1 | PASS |  |",
        "| x | y | - |  | FAIL |  |",
    ]


@pytest.mark.parametrize(
    ("device", "gib", "option"),
    [
        *(("NVIDIA H200", 139.8, "h200"), ("NVIDIA H100 80GB HBM3", 79.1, "h100"), ("NVIDIA B200", 178, "b200")),
        *(("NVIDIA A100-SXM4-40GB", 39.4, "a100_40"), ("NVIDIA A100-SXM4-80GB", 79.2, "a100_80")),
        *(("NVIDIA L40S", 44.4, "l40s"), ("AMD Instinct MI300X", 191, "mi300x"), ("unheard of", 10, "h100")),
    ],
)
def test_a_device_finds_its_option_of_hardware(device: str, gib: float, option: str) -> None:
    assert gpu.option_of(device, [f.stem for f in HARDWARE.glob("*.yaml")], gib) == option


def test_memory_is_compared_with_the_tensors_and_with_all() -> None:
    measured = {"torch": 50 * GIB, "driver": 54 * GIB, "planned": 53 * GIB, "reserve": 3 * GIB}
    measured |= {"retries": 4, "steps": 3}
    failed, too_large = {"error": "CUDA out of memory"}, {"too large": 130 * GIB}
    answers = [json.dumps(found) for found in (measured, {**measured, "torch": 60 * GIB}, too_large, failed)]
    rows = list(memory.memory_rows(["a", "b", "large", "c", "d"], answers, "Killed"))
    assert [row.name for row in rows] == [
        *(f"{name}, {what}" for name in "ab" for what in ("torch", "driver")),
        "c",
        "d",
    ]
    assert [row.verdict for row in rows] == ["PASS", "PASS", "9% above", "PASS", "FAIL", "FAIL"]
    assert rows[0].note == "50.0 GiB measured, 50.0 planned" and "freed 4 times in 3 steps" in rows[1].note
    assert [row.note for row in rows[-2:]] == ["CUDA out of memory", "Killed"]


@pytest.mark.integration
def test_what_a_configuration_takes_is_measured_in_real_steps() -> None:
    """On the CPU, where no peaks are to be had."""
    tiny = [*TINY, "nodes=1", "nproc_per_node=1", "fsdp=full_shard"]
    command = [sys.executable, str(PROGRAMS / "memory.py"), json.dumps([tiny, [*tiny, "model.dims=65"]])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    good, bad = map(json.loads, memory.answers(done.stdout))
    assert good["planned"] > good["reserve"] > 0, done.stderr
    assert "error" in bad


def test_saves_are_compared_with_those_of_dcp() -> None:
    found = {"state": 48.0 * GIB, "stall": 0.5, "ours_async": 40.0, "dcp_stall": 9.0, "dcp_async": 30.0}
    assert [row.verdict for row in saving.saving_rows("8b", found, "", True)] == ["PASS"] * 3
    slow = {**found, "stall": 10.0, "ours_async": 150.0}
    assert [row.verdict for row in saving.saving_rows("8b", slow, "", True)] == ["33% above", "11% above", "25% above"]
    assert [row.verdict for row in saving.saving_rows("small", {**slow, "ours_async": 40.0}, "", False)] == [
        *("measured", "measured", "PASS")
    ]
    (failed,) = saving.saving_rows("8b", None, "No space left", True)
    assert (failed.verdict, failed.note) == ("FAIL", "No space left")


@pytest.mark.parametrize(
    ("disk", "host", "largest"), [(64e9, 128e9, "8b"), (30e9, 128e9, "3b"), (64e9, 40e9, "1b"), (1e9, 128e9, "160m")]
)
def test_the_largest_model_that_fits_is_saved(disk: float, host: float, largest: str) -> None:
    assert saving.fitting(disk, host) == largest


def test_rates_become_lines_of_the_hardware_file() -> None:
    said = yaml.safe_load((HARDWARE / "h200.yaml").read_text())
    measured = {"bf16_tflops": 790.0, "memory_gb_s": 4300.0, "host_gb_s": 30.0}
    matmul, bandwidth, host = rates.rate_rows(measured, said)
    assert (matmul.verdict, bandwidth.verdict, host.verdict) == ("PASS", "PASS", "29% below")
    assert matmul.note.startswith("matmul_efficiency: 0.799  #") and bandwidth.note.startswith("memory_gb_s: 4300.0  #")


def test_outputs_of_others_are_read() -> None:
    titan = "\n".join(f"\x1b[31mstep: {i:2}  loss: 12.0  \x1b[34mtps: {n}  mfu: 1%" for i, n in enumerate(TPS))
    assert speed.titan_speed(titan) == 30100
    assert speed.titan_speed("Traceback") is None
    assert speed.ratio_of("pair\nmedian ratio 1.011 (goal: at least 1.05)\n") == 1.011
    assert speed.ratio_of("Traceback") is None


TPS = ("1,000", "2,000", "20,000", "29,000", "30,000", "30,100", "30,200")


def test_the_flight_recorder_is_read() -> None:
    entries = [{"profiling_name": "nccl:all_reduce", "state": state} for state in ("completed", "started", "scheduled")]
    assert faults.flight_records(pickle.dumps({"version": "2.10", "entries": entries})) == (3, 2)


def test_what_a_case_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*needs: str, bench: Bench = HERE) -> str:
        return bench.lacks(Case("speed", "x", "", lambda bench: iter(()), needs))

    assert lacks("gpu", "surely-not-there 3") == "no GPU, surely-not-there is not installed"
    assert lacks("psutil") == lacks("gpu", bench=Bench(Path(), 1)) == ""
    assert lacks("torch 1.") == f"torch is {version_of('torch')}, not 1."


def test_no_case_begins_that_would_outlast_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    def quick(bench: Bench) -> Any:
        yield Row("quick", 1, 1, 1)

    def wrong(bench: Bench) -> Any:
        raise RuntimeError("it broke")

    cases = [Case("speed", "a", "", quick, seconds=1), Case("speed", "b", "", quick, seconds=1000)]
    cases += [Case("faults", "c", "", wrong, seconds=1), Case("faults", "d", "", quick, ("gpu",))]
    rows, skipped = gpu.run(cases, HERE, time.monotonic() + 100)
    assert [(part, row.verdict, row.note) for part, row in rows] == [
        ("speed", "PASS", ""),
        ("faults", "FAIL", "RuntimeError: it broke"),
    ]
    assert skipped == {"speed b": "no time left; by itself: name its part", "faults d": "no GPU"}


def test_the_plan_is_whole_and_takes_under_ten_minutes() -> None:
    assert gpu.seconds_of(USUAL, cores=16) < gpu.LIMIT_S
    by_itself = [case for case in CASES if case.part in gpu.BY_NAME]
    assert gpu.seconds_of(by_itself, cores=16) < gpu.LIMIT_S
    works = {case.name for case in CASES if case.part == "works"}
    assert works >= {*STRATEGIES, *(f"recompute-{kind}" for kind in RECOMPUTED), "script-fsdp1", "script-fsdp2"}
    assert len(MEMORY) == 17 and len({f"{case.part} {case.name}" for case in CASES}) == len(CASES)


def test_a_dry_run_shows_every_case_and_why_it_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--dry-run"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert "torch" in first and len(lines) == len(USUAL) + 1
    assert any(line.startswith("speed     torchtitan") and "not installed" in line for line in lines)


def test_all_that_is_needed_can_travel() -> None:
    needed = set(travel.requirements())
    assert needed >= {"hydra-core", "omegaconf", "antlr4-python3-runtime", "torchx", "setproctitle", "xxhash"}
    assert not needed & {"torch", "numpy", "transformers", "pytest"}
    assert travel.missing() == [] and travel.missing(["surely_not_there"]) == ["surely_not_there"]
    assert str(travel.WHEELS.relative_to(ROOT)) == "benchmarks/wheels"


def test_launchers_are_found_in_a_tree_that_is_not_installed(tmp_path: Path) -> None:
    travel.name_launchers(str(tmp_path))
    (found,) = Distribution.discover(name="fsdp_jobs", path=[str(tmp_path)])
    assert {*found.entry_points.select(group="torchx.schedulers").names} >= {"local_fsdp", "slurm_fsdp", "local_cwd"}
