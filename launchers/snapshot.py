"""Copy the user's code at submission; a checkpoint in memory is another kind of snapshot. No torch.

A job that waits in a queue, or is requeued, runs the code of its submission, uncommitted changes included.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.launchers.base import at_once

SHARED = ".code-"  # prefix of the name of a copy that several runs share
_PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True, eq=False)  # used as a key: each is equal only to itself
class Snapshot:
    """Files to be copied: path in the copy -> path now."""

    files: dict[Path, Path]

    def write(self, folder: Path) -> None:
        """Copy into `folder`, replacing what is there; links stay links."""
        new = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        try:
            for parent in {(new / target).parent for target in self.files} | {new}:
                parent.mkdir(parents=True, exist_ok=True)
            at_once(lambda target: shutil.copy2(self.files[target], new / target, follow_symlinks=False), self.files)
        except OSError:
            shutil.rmtree(new, ignore_errors=True)  # the disk may be full
            raise
        _remove(folder)
        new.rename(folder)


def link(folder: Path, to: Path) -> None:
    """Replace `folder` by a link to a copy that several runs share."""
    _remove(folder)
    folder.symlink_to(to)


def with_code(folder: Path, command: Sequence[str]) -> list[str]:
    """Return a container's command with `folder`, the copy of the code, before the image's PYTHONPATH."""
    export = f"export PYTHONPATH={shlex.quote(str(folder))}${{PYTHONPATH:+:$PYTHONPATH}}"
    return ["sh", "-c", f'{export}; exec "$@"', "-", *command]


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def take(folder: Path, runs_dir: Path, limit_mb: float) -> Snapshot:
    """List the files of the code in `folder`, and of this package unless it is installed. Earlier copies are left out.

    In a git work tree, that is every file that git does not ignore; elsewhere, Python files outside hidden folders and
    environments.

    Args:
        folder: usually the current one.
        runs_dir: the folder of runs, which are not copied.
        limit_mb: largest size of the copy, in MB.

    Raises:
        BadInput: the copy would be larger; names the largest files.
    """
    runs = {file.parent for file in runs_dir.resolve().glob("*/identity.json")}
    files = {file.relative_to(folder): file for file in _files(folder) if runs.isdisjoint(file.parents)}
    if Path("fsdp_jobs/__init__.py") not in files and "site-packages" not in _PACKAGE.parts:
        files |= {Path("fsdp_jobs") / target: source for target, source in _package()}
    sizes = {target: source.lstat().st_size for target, source in files.items()}
    total = sum(sizes.values()) / 1e6
    if total > limit_mb:
        largest = sorted(sizes, key=lambda target: -sizes[target])[:3]
        named = ", ".join(f"{target} ({sizes[target] / 1e6:.0f} MB)" for target in largest)
        what = f"a copy would take {total:.0f} MB, the limit is {limit_mb:.0f} MB; largest: {named}"
        cure = "name them in .gitignore, or set cluster.snapshot_mb (0: no copy, nodes run the code of this folder)"
        raise BadInput.at(f"code in {folder}", what, cure)
    return Snapshot(files)


def _files(folder: Path) -> Iterator[Path]:
    listing = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listing, capture_output=True) if shutil.which("git") else None
    if done is not None and done.returncode == 0:
        listed = (os.fsdecode(name) for name in done.stdout.split(b"\0") if name)
        found = (folder / name for name in listed if f"/{SHARED}" not in name)
        yield from (f for f in found if f.is_symlink() or f.is_file())  # neither deleted nor a submodule
        return
    for path, folders, names in os.walk(folder):
        here = Path(path)
        folders[:] = [f for f in folders if not f.startswith(".") and not _is_no_code(here / f)]
        yield from (here / name for name in names if name.endswith(".py"))


def _is_no_code(folder: Path) -> bool:
    """Whether a folder is a Python environment, a run, or closed to this user, rather than this user's code."""
    marks = ("pyvenv.cfg", "conda-meta", "identity.json")
    is_closed = not os.access(folder, os.X_OK, effective_ids=True)
    return is_closed or folder.name == "site-packages" or any((folder / mark).exists() for mark in marks)


def _package() -> Iterator[tuple[Path, Path]]:
    """Yield the files of this package: path in it, path now; linked folders become folders."""
    for top in (_PACKAGE, *(p for p in _PACKAGE.iterdir() if p.is_symlink())):
        for file in top.resolve().rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                yield top.relative_to(_PACKAGE) / file.relative_to(top.resolve()), file
