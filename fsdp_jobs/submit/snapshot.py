"""A copy of the code as it is on disk now, for jobs that start hours later. No torch.

A job that waits in a queue, or is requeued, runs what was there when it was submitted, uncommitted changes included.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdp_jobs.config.errors import BadInput, Problem

_PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Snapshot:
    """Files to be copied: place in the copy -> where it is now."""

    files: dict[Path, Path]

    def write(self, folder: Path) -> None:
        """Copy into `folder`, in place of what is there. Links stay links."""
        new = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        for place, source in self.files.items():
            (new / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, new / place, follow_symlinks=False)
        new.mkdir(parents=True, exist_ok=True)
        _remove(folder)
        new.rename(folder)


def link(folder: Path, to: Path) -> None:
    """Have a copy that others use, too, in place of what is in `folder`."""
    _remove(folder)
    folder.symlink_to(to)


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def take(folder: Path, runs_dir: Path, limit_mb: float) -> Snapshot:
    """The code that Python imports from `folder`, and this package where it is no installed one.

    Of a git work tree: what git tracks or would, so neither ignored files nor git's own. Of another folder: its
    Python files; hidden folders and environments left out.

    Args:
        folder: the current one, as a rule.
        runs_dir: where runs are, which are left out.
        limit_mb: most that the copy may take, in MB.

    Raises:
        BadInput: it would take more; names the largest files.
    """
    runs = {job.parent for job in runs_dir.resolve().glob("*/job.json")}
    files = {file.relative_to(folder): file for file in _files(folder) if runs.isdisjoint(file.parents)}
    if Path("fsdp_jobs/__init__.py") not in files and "site-packages" not in _PACKAGE.parts:
        files |= {Path("fsdp_jobs") / place: source for place, source in _package()}
    sizes = {place: source.lstat().st_size for place, source in files.items()}
    total = sum(sizes.values()) / 1e6
    if total > limit_mb:
        largest = sorted(sizes, key=lambda place: -sizes[place])[:3]
        named = ", ".join(f"{place} ({sizes[place] / 1e6:.0f} MB)" for place in largest)
        what = f"a copy of it would take {total:.0f} MB, the limit is {limit_mb:.0f} MB; largest: {named}"
        instead = "name them in .gitignore, or cluster.snapshot_mb=... (0: no copy, the nodes run what is here then)"
        raise BadInput([Problem(f"code in {folder}", what, instead)])
    return Snapshot(files)


def _files(folder: Path) -> Iterator[Path]:
    listing = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(listing, capture_output=True)
    except FileNotFoundError:
        done = None
    if done is not None and done.returncode == 0:
        names = [n.decode() for n in done.stdout.split(b"\0") if n]
        found = [folder / name for name in names]
        yield from (f for f in found if f.is_symlink() or f.is_file())  # not: deleted, or a submodule
        return
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = [f for f in folders if not f.startswith(".") and not _is_environment(here / f)]
        yield from (here / name for name in names if name.endswith(".py"))


def _is_environment(folder: Path) -> bool:
    """Whether this is an installation of Python's, not somebody's code."""
    return (folder / "pyvenv.cfg").exists() or (folder / "conda-meta").exists() or folder.name == "site-packages"


def _package() -> Iterator[tuple[Path, Path]]:
    """This package's own files, its linked folders as folders."""
    for top in (_PACKAGE, *(p for p in _PACKAGE.iterdir() if p.is_symlink())):
        for file in sorted((top.resolve()).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                yield top.relative_to(_PACKAGE) / file.relative_to(top.resolve()), file
