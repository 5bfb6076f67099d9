"""The wheel, as somebody gets it who has no checkout: what is in it, and that it runs a job by itself."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.tail import read_json_lines
from fsdp_jobs.run.verdict import Verdict

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the checkout, in an isolated build environment."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(command, check=True, timeout=240)
    (built,) = folder.glob("*.whl")
    return built


def required(wheel: Path) -> Iterator[importlib.metadata.Distribution]:
    """What the wheel requires, without extras, and what those require; as installed beside this test."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    waiting = [(x.removeprefix("Requires-Dist: "), "") for x in lines if x.startswith("Requires-Dist: ")]
    seen = set()
    while waiting:
        text, extra = waiting.pop()
        requirement = Requirement(text)
        is_wanted = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if not is_wanted or text in seen:
            continue
        seen.add(text)
        distribution = importlib.metadata.distribution(requirement.name)
        yield distribution
        waiting += [(r, e) for r in distribution.requires or [] for e in ("", *requirement.extras)]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment with the wheel and what it declares to need, and nothing else.

    The dependencies are links to those installed here: to install torch again would take a minute.
    Not among them are the test tools and our editable install, so a forgotten dependency or file is missed.
    """
    environment = tmp_path_factory.mktemp("installed")
    venv.create(environment, symlinks=True, with_pip=False)
    (packages,) = environment.glob("lib/python*/site-packages")
    for distribution in required(wheel):
        tops = {Path(str(file)).parts[0] for file in distribution.files or []}
        for top in tops - {"..", "__pycache__", "bin"}:
            link, target = packages / top, Path(str(distribution.locate_file(top)))
            if not link.exists() and target.exists():
                link.symlink_to(target)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, timeout=120)
    return environment / "bin"


def test_the_wheel_holds_one_package_with_conf_and_launchers_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {n.partition("/")[0] for n in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"fsdp_jobs"}
    for folder in ("conf", "launchers"):
        files = [f for f in (ROOT / folder).rglob("*") if f.suffix in (".py", ".yaml")]
        assert files
        missing = [f for f in files if f"fsdp_jobs/{f.relative_to(ROOT)}" not in names]
        assert not missing
    assert "fsdp_jobs/py.typed" in names
    for file in (
        "index.html",
        "app.js",
        "sweep.js",
        "style.css",
        "uPlot.iife.min.js",
        "uPlot.min.css",
        "uPlot.LICENSE",
    ):
        assert f"fsdp_jobs/observe/dashboard/static/{file}" in names
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in names)


def test_a_tree_without_git_and_a_tag_build_and_a_clone_without_tags_has_a_version(tmp_path: Path) -> None:
    """The same version is in sdist and wheel, and twine finds nothing wrong with them."""
    tree, dist = tmp_path / "fsdp_jobs", tmp_path / "dist"
    unwanted = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__", "runs", "sweeps", "site", "dist")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=unwanted)
    me = ("-c", "user.name=me", "-c", "user.email=me@example.org")

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def built() -> str:
        shutil.rmtree(dist, ignore_errors=True)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist)
        files = sorted(f.name for f in dist.iterdir())
        version = files[0].removeprefix("fsdp_jobs-").partition("-py3")[0]
        assert files == [f"fsdp_jobs-{version}-py3-none-any.whl", f"fsdp_jobs-{version}.tar.gz"]
        run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())
        return version

    assert built() == "0.2.0.dev0"  # what pyproject.toml falls back to
    run("git", "init", "--quiet")
    run("git", "add", ".")
    run("git", *me, "commit", "--quiet", "--message", "All of it")
    assert ".dev1+g" in run(sys.executable, "-m", "hatchling", "version")
    run("git", "tag", "v9.8.7")
    assert built() == "9.8.7"


def test_the_installed_wheel_runs_a_job_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment |= {"XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    empty = tmp_path / "empty"
    empty.mkdir()

    def run(program: str, *args: str) -> str:
        command = [installed / program, *args]
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = Path(run("python", "-c", "import fsdp_jobs; print(fsdp_jobs.__file__)").strip()).parent
    version = run("python", "-c", "import fsdp_jobs; print(fsdp_jobs.__version__)").strip()
    assert version == next(installed.parent.rglob("fsdp_jobs-*.dist-info")).name.split("-")[1].removesuffix(".dist")
    assert where.is_relative_to(installed.parent) and not where.is_symlink()
    assert (where / "py.typed").is_file() and not (where / "conf").is_symlink()
    assert "cluster=local" in run("python", "-m", "fsdp_jobs", "help", "cluster")
    assert "complete -o default" in run("fsdp-jobs", "completion", "bash")
    small = ("model.dim=64", "model.n_layers=2", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=96")
    data = ("data.global_batch=4", "data.seq_len=32", "data.workers=0")
    output = run("fsdp-jobs", "name=wheel", "steps=3", "nodes=1", "nproc_per_node=1", *small, *data)
    assert "wheel: done" in output
    job = RunDir(empty / "runs" / "wheel")
    verdict = Verdict.read(job, 0)
    assert verdict is not None and verdict.verdict == "done"
    assert [m["step"] for m in read_json_lines(job.metrics)] == [1, 2, 3]
    assert sorted(f.name for f in empty.iterdir()) == ["runs"]
    run("fsdp-jobs", "init", "cluster=slurm")
    assert sorted(f.name for f in empty.iterdir()) == ["conf", "runs", "train.py"]
