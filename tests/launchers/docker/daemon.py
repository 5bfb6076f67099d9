"""A Docker daemon for tests, and the image of deploy/Dockerfile in it: no registry is asked for anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

from tests.jobs import ROOT

IMAGE = "fsdp_jobs-test"
_BASE = "fsdp_jobs-test-base"
_EXTRAS = ("slurm", "dashboard")
SECRET = {"FSDP_JOBS_TEST_SECRET": "hush-4b1d9e"}  # in the environment of all that is built and run here


def docker(*args: str, check: bool = True, timeout: float = 120) -> str:
    """What a docker command prints."""
    done = subprocess.run(["docker", *args], capture_output=True, text=True, timeout=timeout)
    assert not check or done.returncode == 0, f"docker {' '.join(args)}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


def why_not() -> str:
    """What is missing for these tests; empty when nothing is."""
    tools = ("docker", "docker-compose", "mmdebstrap") + (() if _answers() else ("dockerd", "containerd"))
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}. On Debian: apt install docker.io docker-compose mmdebstrap"
    return "" if os.geteuid() == 0 else "needs root, to make a base image and to start a Docker daemon"


def _answers() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "version"], capture_output=True, timeout=60).returncode == 0


@contextmanager
def daemon() -> Iterator[None]:
    """The daemon that answers, or one of our own while this lasts, found by DOCKER_HOST."""
    if _answers():
        yield
        return
    before = os.environ.get("DOCKER_HOST")
    with tempfile.TemporaryDirectory(prefix="fsdp-docker-", dir="/var/tmp") as folder:  # no tmpfs: overlay2 lies on it
        os.environ["DOCKER_HOST"] = f"unix://{folder}/socket"
        command = ["dockerd", "--host", os.environ["DOCKER_HOST"], "--bridge", "none"]
        command += ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
        with Path(folder, "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 60
            while not _answers():
                assert process.poll() is None and time.monotonic() < deadline, Path(folder, "log").read_text()[-3000:]
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(60)
            for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
                if line.split()[1].startswith(f"{folder}/"):  # the daemon leaves its network namespace mounted
                    subprocess.run(["umount", line.split()[1]], check=True)
            if before is None:
                del os.environ["DOCKER_HOST"]
            else:
                os.environ["DOCKER_HOST"] = before


def build_image(*more_extras: str) -> None:
    """The real Dockerfile on a small Debian, wheels from a folder that is served to the build alone."""
    extras = [*_EXTRAS, *more_extras]
    with tempfile.TemporaryDirectory(prefix="fsdp-image-") as made, ThreadPoolExecutor(1) as beside:
        folder = Path(made)
        debian = beside.submit(_make_debian, folder)
        with _wheels(folder, extras) as url:
            debian.result()
            _make_base(folder, url)
            _build(extras)


def _build(extras: Sequence[str]) -> None:
    arguments = [
        f"--build-arg=BASE_IMAGE={_BASE}",
        f"--build-arg=TORCH={_torch()}",
        f"--build-arg=EXTRAS={','.join(extras)}",
    ]
    command = ["docker", "build", "--network=host", *arguments, "--tag", IMAGE, "--file", "deploy/Dockerfile", "."]
    environment = {**os.environ, **SECRET, "DOCKER_BUILDKIT": "0"}  # BuildKit is a plug-in that Debian 12 lacks
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def _torch() -> str:
    """The torch that is installed here; a CPU wheel, where pip was told to find one."""
    return f"torch=={version('torch').partition('+')[0]}"


@contextmanager
def _wheels(folder: Path, extras: Sequence[str]) -> Iterator[str]:
    """All that the image takes from pip, served on this machine; yields the URL."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = declared["project"]
    needed = [_torch(), "dumb-init", *declared["build-system"]["requires"], *project["dependencies"]]
    needed += [wheel for extra in extras for wheel in project["optional-dependencies"][extra]]
    wheels = folder / "wheels"
    command = [
        "pip",
        "wheel",
        "--quiet",
        "--constraint",
        str(ROOT / "deploy/constraints.txt"),
        "--wheel-dir",
        str(wheels),
    ]
    done = subprocess.run([sys.executable, "-m", *command, *needed], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(wheels)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_args: object) -> None:
        pass


def _make_debian(folder: Path) -> None:
    """A small Debian with Python, as an image."""
    if not docker("images", "--quiet", f"{_BASE}:debian"):
        tar = str(folder / "base.tar")
        debian = ["bookworm", tar, "http://deb.debian.org/debian"]
        command = ["mmdebstrap", "--quiet", "--variant=apt", "--include=python3,python3-venv", *debian]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        docker("import", tar, f"{_BASE}:debian")
        Path(tar).unlink()


def _make_base(folder: Path, url: str) -> None:
    """That Debian with a pip that finds the wheels and nothing else."""
    context = folder / "base"
    context.mkdir()
    (context / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {url}\n")
    (context / "Dockerfile").write_text(f"FROM {_BASE}:debian\nCOPY pip.conf /etc/pip.conf\n")
    docker("build", "--quiet", "--tag", _BASE, str(context))
