"""The copy of the code that a queued job runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.launchers.snapshot import take


def project(folder: Path) -> Path:
    """A git work tree with a committed, a changed, a new, an ignored and a deleted file, a run and a sweep.

    The run was refused by its cluster, so there is no record of a submission.
    """
    files = {".gitignore": "*.bin\n", "train.py": "old", "gone.py": "", "weights.bin": "x" * 1000}
    for name, text in files.items():
        (folder / name).write_text(text)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    (folder / "train.py").write_text("changed, not committed")
    (folder / "new.py").write_text("not added")
    (folder / "gone.py").unlink()
    (folder / "link.py").symlink_to("train.py")
    (folder / "runs" / "a").mkdir(parents=True)
    (folder / "runs" / "a" / "identity.json").write_text("{}")
    (folder / "runs" / "a" / "log.txt").write_text("a run")
    (folder / "sweeps" / "s" / ".code-0").mkdir(parents=True)
    (folder / "sweeps" / "s" / ".code-0" / "train.py").write_text("as it was then")
    return folder


def names(folder: Path) -> set[str]:
    found = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    return {str(p) for p in found if p.parts[0] != "fsdp_jobs"}


def test_copies_what_is_on_disk_and_not_what_git_ignores(tmp_path: Path) -> None:
    work, copy = tmp_path / "work", tmp_path / "copy"
    work.mkdir()
    taken = take(project(work), work / "runs", limit_mb=100)
    taken.write(copy)
    (work / "train.py").write_text("changed later")
    assert names(copy) == {".gitignore", "train.py", "new.py", "link.py"}
    assert (copy / "train.py").read_text() == (copy / "link.py").read_text() == "changed, not committed"
    taken = take(work, work / "runs", limit_mb=100)
    taken.write(copy)
    assert (copy / "train.py").read_text() == "changed later", "the next submission takes the place of the last one's"


def test_takes_a_file_whose_name_is_not_text(tmp_path: Path) -> None:
    """As one that was unpacked on a machine with another encoding: it refused every submission with a traceback."""
    name = os.fsdecode(b"M\xfcller.py")
    (project(tmp_path) / name).touch()
    assert Path(name) in take(tmp_path, tmp_path / "runs", limit_mb=100).files


def test_without_git_a_folder_closed_to_this_user_is_no_code() -> None:
    """A colleague's in a folder that both share, or `lost+found` of a disk."""
    with TemporaryDirectory() as name:  # pytest's own folders are closed to others
        work, user = Path(name), os.geteuid()
        work.chmod(0o755)
        for file in ("train.py", "fsdp_jobs/__init__.py", "closed/theirs.py"):
            (work / file).parent.mkdir(exist_ok=True)
            (work / file).touch()
        (work / "closed").chmod(0)
        os.seteuid(user or 65534)  # root may look into every folder
        try:
            files = take(work, work / "runs", limit_mb=100).files
        finally:
            os.seteuid(user)
        assert set(map(str, files)) == {"train.py", "fsdp_jobs/__init__.py"}


def test_without_git_earlier_runs_and_sweeps_are_no_code(tmp_path: Path) -> None:
    work, copy = tmp_path / "work", tmp_path / "copy"
    runs = [f"{run}/{file}" for run in ("runs/a", "old/b") for file in ("identity.json", "code/train.py")]
    for name in ("train.py", *runs):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("{}")
    (work / "sweeps/s/slurm/1f/.code-0").mkdir(parents=True)
    (work / "sweeps/s/slurm/1f/.code-0/train.py").write_text("")
    take(work, work / "runs", limit_mb=100).write(copy)
    assert names(copy) == {"train.py"}


def test_brings_this_package_along_so_that_the_copy_runs(tmp_path: Path) -> None:
    work, copy = tmp_path / "work", tmp_path / "copy"
    work.mkdir()
    (work / "mine.py").write_text("")
    take(work, work / "runs", limit_mb=100).write(copy)
    code = "import fsdp_jobs.launchers.local, mine; print(fsdp_jobs.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={"PYTHONPATH": str(copy)}, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.strip() == str(copy / "fsdp_jobs" / "__init__.py"), done.stderr
    assert (copy / "fsdp_jobs" / "conf" / "config.yaml").exists()


def test_outside_of_git_takes_python_files_but_no_environment(tmp_path: Path) -> None:
    for name in ("train.py", "pkg/a.py", "notes.txt", ".hidden/b.py", "env/pyvenv.cfg", "env/lib/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    take(tmp_path, tmp_path, limit_mb=100).write(tmp_path / "copy")
    assert names(tmp_path / "copy") == {"train.py", "pkg/a.py"}


def test_too_large_a_folder_names_its_largest_files(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text("1")
    (tmp_path / "data.py").write_text("#" * 3_000_000)
    with pytest.raises(BadInput, match=r"limit is 2 MB; largest: data\.py \(3 MB\)"):
        take(tmp_path, tmp_path / "runs", limit_mb=2)
