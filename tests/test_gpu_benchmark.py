"""benchmarks/gpu.py: what it reads and how it judges; and that one command runs what a CPU can run."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    """The benchmark as a module."""
    spec = importlib.util.spec_from_file_location("gpu_benchmark", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_benchmark"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(0.9, "PASS"), (1.1, "PASS"), (0.45, "50% below"), (1.65, "50% above"), (None, "FAIL"), (math.nan, "FAIL")],
)
def test_a_figure_passes_within_its_range_or_says_how_far_off_it_is(
    gpu: ModuleType, value: float | None, verdict: str
) -> None:
    assert gpu.Row("memory", value, 0.9, 1.1).verdict == verdict


def test_a_bound_of_zero_is_no_division(gpu: ModuleType) -> None:
    assert gpu.Row("exit code", 2, 0, 0).verdict == "2 above"
    assert gpu.Row("seconds", 1e9, 0).verdict == "PASS"  # no upper bound


@pytest.mark.parametrize(
    ("name", "memory_gib", "option"),
    [
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100_40"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100_80"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA B200", 178.4, "b200"),
    ],
)
def test_a_device_is_found_in_conf_hardware(gpu: ModuleType, name: str, memory_gib: float, option: str) -> None:
    options = [f.stem for f in (ROOT / "conf" / "hardware").glob("*.yaml")]
    assert gpu.option_of(name, options, memory_gib) == option


def test_what_was_measured_is_a_table_of_markdown(gpu: ModuleType) -> None:
    rows = [("memory", gpu.Row("1b", 1.034, 0.9, 1.1, note="20 GiB")), ("works", gpu.Row("hf", None, 1, 1, note="no"))]
    *_, first, second = gpu.table(rows)
    assert first == "| memory | 1b | 1.03 | at least 0.9, at most 1.1 | PASS | 20 GiB |"
    assert second == "| works | hf | - | at least 1, at most 1 | FAIL | no |"


def test_a_case_that_raises_is_a_row(gpu: ModuleType) -> None:
    def broken(_bench: object) -> object:
        raise RuntimeError("no step 8")

    (row,) = gpu.measure(gpu.Case("works", "main", "done", broken), None)
    assert row.verdict == "FAIL" and row.note == "RuntimeError: no step 8"


def test_a_dry_run_shows_every_case_and_starts_nothing(gpu: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    facts, *lines = done.stdout.splitlines()
    assert "torch 2." in facts and len(lines) == len(gpu.CASES)
    assert not list(tmp_path.iterdir())


@pytest.mark.integration
def test_the_parts_that_a_cpu_can_run_are_green(tmp_path: Path) -> None:
    """Without a GPU: a preemption, and where the seconds of a recovery go."""
    results = tmp_path / "results.json"
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "faults",
        "recovery",
        "speed",
        "--json",
        str(results),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    rows = {row["name"]: row["verdict"] for row in json.loads(results.read_text())["rows"]}
    assert rows["preemption"] == "PASS", done.stdout
    assert "killed to first step" in rows, done.stdout
    assert "speed 1b: needs a GPU" in done.stdout
