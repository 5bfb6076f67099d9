"""Wheels of all but torch that travel with the tree to a machine without a network. For gpu.py; no other imports.

`python benchmarks/gpu.py --pack 3.12` puts into benchmarks/wheels/ what fsdp_jobs needs on that Python. On the other
machine gpu.py installs them into a folder for temporary files when something is missing there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "benchmarks" / "wheels"
THERE = ("torch", "numpy")  # and what they need: a machine with a GPU has them
NEEDED = ("hydra", "omegaconf", "torchx", "yaml", "rich", "psutil", "setproctitle", "safetensors", "xxhash")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def requirements() -> Iterator[str]:
    """Yield the names of all packages that fsdp_jobs needs here, extras and those of `THERE` left out."""
    seen = {*THERE}
    waiting = list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    while waiting:
        match = _NAME.match(line := waiting.pop())
        name = match.group().lower().replace("_", "-") if match else ""
        if "extra ==" not in line and name not in seen:
            seen.add(name)
            with suppress(PackageNotFoundError):  # of another platform or Python
                waiting += requires(name) or ()
                yield name


def pack(python: str) -> None:
    """Put wheels for that Python, on x86-64 Linux, into `WHEELS`."""
    here = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    platforms = [f"--platform=manylinux{name}_x86_64" for name in ("2014", "_2_17", "_2_28", "1")]
    for name in requirements():
        wanted = [f"{name}=={version(name)}", "--no-deps"]
        binary = ["--only-binary=:all:", f"--python-version={python}", *platforms, f"--dest={WHEELS}"]
        if subprocess.run([*here, "download", "-q", *wanted, *binary], stderr=subprocess.DEVNULL).returncode:
            subprocess.run([*here, "wheel", "-q", *wanted, f"--wheel-dir={WHEELS}"], check=True)
    size = sum(wheel.stat().st_size for wheel in WHEELS.iterdir())
    print(f"{len(list(WHEELS.iterdir()))} wheels, {size / 2**20:.1f} MiB, in {WHEELS}")


def missing(names: Sequence[str] = NEEDED) -> list[str]:
    """Return the modules that cannot be imported here."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def _is_installed() -> bool:
    with suppress(PackageNotFoundError):
        return bool(version("fsdp_jobs"))
    return False


def name_launchers(folder: str) -> None:
    """Write the project's entry points as an installation does it: launchers are found by them."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = Path(folder) / "fsdp_jobs-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fsdp_jobs\nVersion: 0\n")
    with (info / "entry_points.txt").open("w") as file:
        for group, entries in groups.items():
            print(f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), sep="\n", file=file)


def settle() -> None:
    """Make everything importable, here and in processes: run this program again with a path that has it.

    Raises:
        SystemExit: something is missing, and no wheels have come along.
    """
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    added = [] if str(ROOT) in path else [str(ROOT)]
    lacking = missing()
    if lacking and (not WHEELS.is_dir() or "FSDP_JOBS_UNPACKED" in os.environ):
        cure = f"or take along what `python {Path(sys.argv[0]).name} --pack 3.12` makes where there is a network"
        sys.exit(f"not installed here: {', '.join(lacking)}. pip install -e {ROOT}, {cure}")
    if lacking or not _is_installed():
        os.environ["FSDP_JOBS_UNPACKED"] = folder = tempfile.mkdtemp(prefix="fsdp-jobs-")
        name_launchers(folder)
        if lacking:
            install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", folder]
            subprocess.run([*install, *map(str, WHEELS.glob("*.whl"))], check=True)
        added += [folder]
    if added:
        os.environ["PYTHONPATH"] = os.pathsep.join([*added, *filter(None, path)])
        os.execv(sys.executable, [sys.executable, *sys.argv])
