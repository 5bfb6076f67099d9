"""What this project does on a GPU, in under ten minutes: a table, PASS or how far off, and JSON.

    python benchmarks/gpu.py [PART ...] [--json FILE] [--dry-run] [--limit SECONDS]
    python benchmarks/gpu.py --pack 3.12      # before: wheels for a machine without a network, into benchmarks/wheels/

Parts: `works`, `faults`, `memory`, `rates`, `recovery`, `speed`, `saving`, all of them when none is named; and `size`,
with 15 GB of state, in a call of its own. Most cases are real jobs (`python -m fsdp_jobs`) on one GPU of this machine.
Without a GPU those that a CPU can run do so on the CPU. What is skipped is named, with the reason: no GPU, a package
that is not installed, or no time left of `--limit` (600 s with a GPU). `--dry-run` shows every case, what is expected
of it and how long it takes, and starts nothing. Exit code 1: something was out of its range.

Expected are: the verdict `done` and finite losses; memory within 10% and speed within 15% of the plan; at least 0.98
of the tokens/s of a hand-written loop, of Accelerate and of torchtitan; saves that wait at most 5% of their time and
no longer than `dcp.async_save`; what conf/hardware says of the device.
"""

# ruff: noqa: E402
from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_programs import travel

if __name__ == "__main__" and "--pack" not in sys.argv:
    travel.settle()

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import psutil

from benchmarks.gpu_parts import faults, memory, rates, recovery, saving, size, speed, works
from benchmarks.gpu_parts.bench import GIB, HARDWARE, Bench, Case, Row, version_of
from fsdp_jobs.config.errors import BadInput

LIMIT_S = 600.0  # of a run on a GPU
CASES = tuple(case for part in (works, faults, memory, rates, recovery, speed, saving, size) for case in part.CASES)
BY_NAME = ("size",)  # parts that run when they are named
USUAL = tuple(case for case in CASES if case.part not in BY_NAME)
TOGETHER = ("works",)  # parts whose cases run at the same time: nothing is timed


def at_once(part: str, cores: int) -> int:
    """Return how many cases of a part run at the same time."""
    return max(1, cores // 3) if part in TOGETHER else 1


def seconds_of(cases: Sequence[Case], cores: int) -> float:
    """Return about how long cases take on a GPU."""
    return sum(case.seconds / at_once(case.part, cores) for case in cases)


def machine() -> Bench:
    """Find out what is here."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    memory, disk = psutil.virtual_memory().total / GIB, shutil.disk_usage(tempfile.gettempdir()).free / GIB
    facts = {"python": platform.python_version(), "torch": torch.__version__, "cores": str(os.cpu_count())}
    facts |= {"load": f"{os.getloadavg()[0]:.1f}", "memory": f"{memory:.0f} GiB", "free disk": f"{disk:.0f} GiB"}
    facts |= {name: version_of(name) or "missing" for name in ("transformers", "accelerate", "torchtitan")}
    hardware = "cpu"
    if gpus:
        name = torch.cuda.get_device_name(0)
        known = [f.stem for f in HARDWARE.glob("*.yaml")]
        hardware = option_of(name, known, torch.cuda.get_device_properties(0).total_memory / GIB)
        facts |= {"GPU": f"{gpus} x {name}", "CUDA": str(torch.version.cuda), "hardware": hardware}
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        if nvidia_smi := shutil.which("nvidia-smi"):
            query = [nvidia_smi, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
            facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return Bench(Path(), gpus, hardware, facts)


def option_of(name: str, options: Sequence[str], memory_gib: float) -> str:
    """Return the option of conf/hardware for a device: `h200` of `NVIDIA H200`, `a100_40` by its memory."""
    word = name.lower()
    fitting = [o for o in options if o.partition("_")[0] in word]
    sized = [o for o in fitting if o.endswith(f"_{round(memory_gib)}") or f"{o.partition('_')[2]}gb" in word]
    return (sized or sorted(fitting) or ["h100"])[0]


def table(rows: Sequence[tuple[str, Row]]) -> Iterator[str]:
    """Yield the lines of the table of docs/benchmarks.md."""
    yield "| part | case | value | expected | verdict | |"
    yield "|---|---|---|---|---|---|"
    for part, row in rows:
        value = "-" if row.value is None else f"{row.value:.3g} {row.unit}".strip()
        yield f"| {part} | {row.name} | {value} | {row.expected} | {row.verdict} | {row.note} |"


def measure(case: Case, bench: Bench) -> list[Row]:
    """Run a case; what goes wrong in it is its row."""
    try:
        return list(case.run(bench))
    except (Exception, BadInput) as e:
        return [Row(case.name, None, note=f"{type(e).__name__}: {e}"[:200])]


def run(chosen: Sequence[Case], bench: Bench, deadline: float) -> tuple[list[tuple[str, Row]], dict[str, str]]:
    """Run cases, part by part; return their rows, and what was skipped with the reason."""
    rows: list[tuple[str, Row]] = []
    skipped = {f"{case.part} {case.name}": why for case in chosen if (why := bench.lacks(case))}
    possible = [case for case in chosen if f"{case.part} {case.name}" not in skipped]

    def tried(case: Case) -> list[Row] | None:
        return measure(case, bench) if time.monotonic() + case.seconds < deadline else None

    for part in dict.fromkeys(case.part for case in possible):
        cases = [case for case in possible if case.part == part]
        with ThreadPoolExecutor(at_once(part, os.cpu_count() or 1)) as pool:
            for case, found in zip(cases, pool.map(tried, cases), strict=True):
                if found is None:
                    skipped[f"{case.part} {case.name}"] = "no time left; by itself: name its part"
                for row in found or ():
                    rows.append((part, row))
                    print(f"{part:<9} {case.name:<26} {row.name:<40} {row.verdict:<10} {row.note}", flush=True)
    return rows, skipped


def main(argv: Sequence[str] | None = None) -> int:
    parts = tuple(dict.fromkeys(case.part for case in CASES))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[*parts, []], help=", ".join(parts))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="default: 600 with a GPU, none without")
    parser.add_argument("--pack", metavar="PYTHON", help="collect wheels for a machine with that version of Python")
    args = parser.parse_args(argv)
    if args.pack:
        travel.pack(args.pack)
        return 0
    bench = machine()
    print(time.strftime("%Y-%m-%d"), *(f"{k} {v}" for k, v in bench.facts.items()), sep=", ", flush=True)
    chosen = [case for case in CASES if case.part in args.parts] if args.parts else USUAL
    if args.dry_run:
        for case in chosen:
            why = bench.lacks(case)
            here = f"skipped here: {why}" if why else f"about {case.seconds} s"
            print(f"{case.part:<9} {case.name:<26} {case.expected:<42} {here}")
        print(f"about {seconds_of(chosen, os.cpu_count() or 1):.0f} s on a GPU and the cores of this machine")
        return 0
    limit = args.limit or (LIMIT_S if bench.gpus else math.inf)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # processes may still end
        bench.folder = Path(folder)
        rows, skipped = run(chosen, bench, began + limit)
    print(f"{time.monotonic() - began:.0f} s\n", *table(rows), sep="\n")
    if skipped:
        print("\nskipped:", *(f"- {name}: {why}" for name, why in skipped.items()), sep="\n")
    if args.json is not None:
        content = {"facts": bench.facts, "rows": [{"part": p, **asdict(r), "verdict": r.verdict} for p, r in rows]}
        args.json.write_text(json.dumps({**content, "skipped": skipped}, indent=1))
    return int(any(row.verdict not in ("PASS", "measured") for _, row in rows))


if __name__ == "__main__":
    sys.exit(main())
