"""Seconds and memory of the commands that show a run of many nodes, also beside another version of this package.

    python benchmarks/large.py [--nodes 10000] [--ranks 8] [--lines 5] [--turns 3] [--against FOLDER]

The run is made up, as those of benchmarks/status.py: it failed and continued, and each rank has printed some lines.
`--against` names a folder with another `fsdp_jobs/`; both take turns, and a process is a new one each time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from status import make_runs

from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.tail import TIMES

_NAME = "run-000"
_COMMANDS = (
    ("status", "status", _NAME),
    ("logs", "logs", _NAME),
    ("logs of one node", "logs", _NAME, "--node", "7"),
    ("logs of one rank", "logs", _NAME, "--rank", "7"),
    ("logs --errors", "logs", _NAME, "--errors"),
    ("report", "report", _NAME),
    ("prune", "prune", "--older-than", "30d"),
)
_FOLDER = Path(__file__).parents[1]


def print_ranks(run: RunDir, nodes: int, ranks: int, lines: int) -> None:
    """Write the logs of an attempt, and the notes of their sizes, one each second."""
    for node in range(nodes):
        folder = run.node(0, node)
        folder.mkdir(parents=True)
        printed = [f"step {line}: rank of node {node} has read its data\n" for line in range(lines)]
        for rank in range(node * ranks, (node + 1) * ranks):
            run.rank_log(0, node, rank).write_text("".join(printed))
        sizes = [sum(map(len, printed[: line + 1])) for line in range(lines)]
        noted = (
            dict.fromkeys(range(node * ranks, (node + 1) * ranks), (size, 1700000000.0 + i))
            for i, size in enumerate(sizes)
        )
        (folder / TIMES).write_text("".join(json.dumps(note) + "\n" for note in noted))


def measured(package: Path, folder: Path, verb: str, *args: str) -> tuple[float, float, float]:
    """Seconds on the clock and of the processor, and the most memory in MB."""
    env = {**os.environ, "XDG_STATE_HOME": str(folder / ".state"), "PYTHONPATH": str(package)}
    began = time.perf_counter()
    argv = [sys.executable, "-m", "fsdp_jobs", verb, *args]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(argv, cwd=folder, env=env, stdout=output, stderr=output)
        _, code, usage = os.wait4(process.pid, 0)
    took = time.perf_counter() - began
    assert code == 0, (folder / "output").read_text()[-2000:]
    return took, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3


def main() -> None:
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (("nodes", 10_000), ("ranks", 8), ("lines", 5), ("steps", 10_000), ("turns", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--against", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    packages = [_FOLDER] if args.against is None else [args.against.resolve(), _FOLDER]
    found: dict[tuple[str, Path], list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with ProcessPoolExecutor(1) as other:  # else memory that this process has used counts as that of its children
            other.submit(make_runs, folder, 1, args.steps, live=0).result()
            other.submit(print_ranks, RunDir(folder / "runs" / _NAME), args.nodes, args.ranks, args.lines).result()
        print(f"a run of {args.nodes:,} nodes with {args.ranks} ranks of {args.lines} lines, and {args.steps:,} steps")
        for _ in range(args.turns):
            for name, *argv in _COMMANDS:
                for package in packages:
                    found.setdefault((name, package), []).append(measured(package, folder, *argv))
    print("| command | package | seconds | CPU seconds | MB |\n|---|---|---:|---:|---:|")
    for (name, package), all_ in found.items():
        ranges = (f"{min(column):.1f} to {max(column):.1f}" for column in zip(*all_, strict=True))
        print(f"| {name} | {'this' if package == _FOLDER else 'the other'} | {' | '.join(ranges)} |")


if __name__ == "__main__":
    main()
