"""The SLURM cluster of deploy/slurm for tests, and jobs on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.processes import all_processes, command_of
from fsdp_jobs.run.verdict import Verdict
from tests.jobs import ROOT, Watched, cli, environment
from tests.world import tiny_for

# Runs several commands in one process, because each would import the same; prints the exit code and output of each.
_SEVERAL = """
import contextlib, io, json, sys
from fsdp_jobs.cli.main import main
for args in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(args)
    print(json.dumps([code, said.getvalue()]))
"""

CLUSTER = ROOT / "deploy" / "slurm" / "cluster"
ON_CPU = ("cluster=slurm", "cluster.accelerator=cpu", "hardware=cpu", "nproc_per_node=2")
_TOOLS = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "ip", "unshare", "nsenter")


@cache
def why_not() -> str:
    """What is missing for a cluster here; empty when nothing is."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=path) is None]
    if missing:
        packages = "slurm-wlm slurmdbd munge mariadb-server iproute2"
        return f"not installed: {', '.join(missing)}; apt-get install {packages}"
    return "" if os.geteuid() == 0 else "needs root, to make namespaces"


class Lab:
    """A running cluster: node1 and node2 under leaf1, node3 and node4 under leaf2, a login node."""

    def __init__(self, folder: Path, profile: str = "default"):
        self.folder, self.profile = folder, profile
        self._env = {**os.environ, "FSDP_JOBS_SLURM": str(folder)}
        self._crashed: set[str] = set()

    def do(self, *verb: str, check: bool = True) -> str:
        done = subprocess.run([CLUSTER, *verb], env=self._env, capture_output=True, text=True, timeout=120)
        assert not check or done.returncode == 0, f"{verb}: {done.stdout}{done.stderr}"
        return done.stdout

    def up(self) -> None:
        self.do("up", self.profile)

    def on_login(self, *command: str) -> str:
        return self.do("run", "login", *command)

    def cli(self, folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """`fsdp-jobs ARGS` on the login node."""
        under = [str(CLUSTER), "run", "login"]
        return cli(folder, *args, under=under, FSDP_JOBS_SLURM=str(self.folder), **env)

    def several(self, folder: Path, *commands: Sequence[str], under: Sequence[str] = ()) -> list[tuple[int, str]]:
        """Exit code and output of each of some commands that one process runs on the login node."""
        start = under or [str(CLUSTER), "run", "login"]
        ran = subprocess.run(
            [*start, sys.executable, "-c", _SEVERAL, json.dumps(commands)],
            cwd=folder,
            env=environment(folder, FSDP_JOBS_SLURM=str(self.folder)),
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return [tuple(json.loads(line)) for line in ran.stdout.splitlines()]

    def crash(self, node: str) -> None:
        self.do("crash", node)
        self._crashed.add(node)

    def boot(self, node: str) -> None:
        self.do("boot", node)
        self._crashed.remove(node)

    def wait_idle(self) -> None:
        """Until all nodes are, those that a test has crashed, too."""
        for node in list(self._crashed):
            self.boot(node)
        for _ in range(240):
            if self.on_login("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D").strip() == "4":
                return
            time.sleep(0.5)
        raise AssertionError(self.on_login("sinfo", "-R"))


def agent_of(run: RunDir, node: int) -> psutil.Process | None:
    """The agent of a node: not the srun that started it."""
    wanted = ["fsdp_jobs.node.agent", str(run.path), "--node", str(node)]
    for process in all_processes():
        words = command_of(process)
        if words and words[0].endswith("python") and words[2:6] == wanted:
            return process
    return None


class Ordinary:
    """A user who is not root, with umask 077 and the account `proj`, on all machines of a cluster."""

    name = "nobody"

    def __init__(self, lab: Lab, folder: Path):
        self.lab, self.folder = lab, folder
        shutil.chown(folder, self.name)
        for machine in ("login", "node1", "node2", "node3", "node4"):
            for closed in self._closed_folders():  # above this Python: opened on this machine, with an overlay
                upper = f"{lab.folder}/scratch/{closed.name}"
                lab.do("run", machine, "mkdir", "-p", f"{upper}/up", f"{upper}/work")
                layers = f"lowerdir={closed},upperdir={upper}/up,workdir={upper}/work"
                lab.do("run", machine, "mount", "-t", "overlay", "-o", layers, "overlay", str(closed))
        lab.on_login("sacctmgr", "-i", "add", "account", "proj")
        lab.on_login("sacctmgr", "-i", "add", "user", self.name, "account=proj")

    @staticmethod
    def _closed_folders() -> list[Path]:
        needed = (ROOT, Path(sys.executable), Path(sys.executable).resolve())
        return [f for f in sorted({f for path in needed for f in path.parents}) if not f.stat().st_mode & 0o001]

    def under(self) -> list[str]:
        """The start of a command of this user on the login node."""
        who = [f"--reuid={self.name}", "--regid=nogroup", "--clear-groups"]
        return [str(CLUSTER), "run", "login", "setpriv", *who, "sh", "-c", 'umask 077; exec "$@"', "-"]

    def cli(self, *args: str) -> subprocess.CompletedProcess[str]:
        home = {"HOME": str(self.folder), "USER": self.name, "FSDP_JOBS_SLURM": str(self.lab.folder)}
        return cli(self.folder, *args, under=self.under(), **home)


class SlurmJob(Watched):
    """A job submitted on the login node."""

    def __init__(self, lab: Lab, folder: Path, name: str, *overrides: str, tiny: bool = True):
        super().__init__(RunDir(folder / "runs" / name))
        self.lab, self.folder, self.name = lab, folder, name
        self.submit(f"name={name}", *ON_CPU, *(tiny_for(overrides) if tiny else ()), *overrides)

    def submit(self, *args: str) -> str:
        done = self.lab.cli(self.folder, *args)
        assert done.returncode == 0, done.stdout + done.stderr
        self.id = done.stdout.partition("submitted slurm_fsdp://")[2].split()[0].partition("/")[2]
        return done.stdout

    def state(self) -> str:
        """SLURM's word for it."""
        return self.lab.on_login("squeue", "-h", "-t", "all", "-j", self.id, "-o", "%T").strip()

    def agent(self, node: int) -> psutil.Process:
        found = agent_of(self.run, node)
        assert found is not None, f"no agent of node {node}\n{self.story()}"
        return found

    def rounds(self) -> list[dict[str, Any]]:
        return self.events("round_started")

    def progress(self, steps: int = 5, seconds: float = 120) -> None:
        """Until the newest round has done some steps."""
        seen = len(self.rounds())
        since = self.rounds()[-1]["time"] if seen else 0.0
        done = lambda: sum(m["time"] > since for m in self.metrics()) >= steps  # noqa: E731
        self.until(done, f"{steps} steps of round {seen}", seconds)

    def until_attempt(self, attempt: int, seconds: float = 150) -> None:
        """Until this attempt trains."""
        self.until(lambda: any(m["attempt"] == attempt for m in self.metrics()), f"attempt {attempt}", seconds)

    def verdict(self, attempt: int) -> Verdict:
        found = Verdict.read(self.run, attempt)
        assert found is not None, self.story()
        return found

    def story(self) -> str:
        outputs = "\n".join(f.read_text()[-3000:] for f in self.run.submit.glob("slurm-*.out"))
        return f"{self.lab.do('run', 'login', 'squeue', check=False)}\n{outputs}\n{super().story()}"


@contextmanager
def slurm_job(lab: Lab, folder: Path, name: str, *overrides: str, tiny: bool = True) -> Iterator[SlurmJob]:
    """A submitted job, tiny unless told otherwise; gone at the end."""
    made = SlurmJob(lab, folder, name, *overrides, tiny=tiny)
    try:
        yield made
    finally:
        lab.do("run", "login", "scancel", "--signal=KILL", "--batch", made.id, check=False)
        lab.do("run", "login", "scancel", "--user=root", check=False)
        lab.wait_idle()
