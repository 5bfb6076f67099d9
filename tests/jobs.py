"""Whole jobs through the command line, for tests: submit, watch, kill, resume."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import psutil

from fsdp_jobs.cli.main import main
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.processes import recorded_process
from fsdp_jobs.run.tail import Tail
from fsdp_jobs.run.verdict import Verdict
from tests.world import tiny_for

ROOT = Path(__file__).parent.parent


def fill(disk: Path) -> None:
    """Leave a file system without a free byte."""
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as f:
        while True:
            f.write(b"x" * 4096)


def family(*processes: psutil.Process) -> list[psutil.Process]:
    """Processes and all that they have started."""
    found = list(processes)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found += process.children(recursive=True)
    return found


def signal_all(processes: Iterable[psutil.Process], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to those that are still there: some end because others do."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


class Nobody:
    """In a launcher's place when a test starts the processes itself."""

    name = "nobody"

    def submit(self, requests: Sequence[Any], parallelism: int, folder: Path | None) -> list[str]:
        return ["by-hand"]

    def cluster_of(self, app_id: str) -> str:
        return "here"


def cli(
    folder: Path, *args: str, timeout: float = 240, under: Sequence[str] = (), **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m fsdp_jobs ARGS` in a folder, `under` another command if there is one."""
    return subprocess.run(
        [*under, sys.executable, "-m", "fsdp_jobs", *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(folder, **env),
    )


def called(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """What `cli` returns, without a process of its own: it would compose and import everything once more."""
    printed, complained, before, place = io.StringIO(), io.StringIO(), dict(os.environ), Path.cwd()
    os.environ |= environment(folder, **env)
    os.chdir(folder)
    try:
        with redirect_stdout(printed), redirect_stderr(complained):
            code = main(args)
    except SystemExit as e:
        code = int(e.code or 0)
    finally:
        os.chdir(place)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ |= before  # never empty: threads of a test may start processes meanwhile
    return subprocess.CompletedProcess(args, code, printed.getvalue(), complained.getvalue())


def environment(folder: Path, **env: str) -> dict[str, str]:
    return {
        **os.environ,
        "COLUMNS": "200",
        "PYTHONPATH": str(ROOT),  # for model._target_=tests.models...
        "XDG_STATE_HOME": str(folder / ".state"),
        **env,
    }


def hear_ctrl_c() -> None:
    """Undo, in a child before it becomes a command, what a shell does to its background jobs: they ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


# Sends itself a signal before its n-th change of files that the pattern names, or start of such a process.
_KILLER = """
import os, signal, sys
left, pattern, name = int(sys.argv[1]), *sys.argv[2:4]
def watch(event, args):
    global left
    changes = event in ("os.rename", "os.remove", "os.symlink", "subprocess.Popen", "fcntl.flock")
    what = str(args[:3])  # of a process: not its environment, in which pytest names the test
    if changes and pattern in what and ".pyc" not in what:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.Signals[name])
from fsdp_jobs.cli.main import main
sys.addaudithook(watch)
sys.exit(main(sys.argv[4:]))
"""


def killed_at(number: int, pattern: str = "", by: str = "SIGKILL") -> list[str]:
    """The start of a `fsdp-jobs` command that is killed at its n-th change of files, or start of a process."""
    return [sys.executable, "-c", _KILLER, str(number), pattern, by]


def _all_records(tail: Tail, read: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add what is new in a file to what was read of it: a waiting test looks 50 times a second."""
    read += tail.records()
    return read


class Watched:
    """A run seen from its directory, by a test."""

    def __init__(self, run: RunDir):
        self.run = run
        self._events: tuple[Tail, list[dict[str, Any]]] = (Tail(run.events), [])
        self._metrics: tuple[Tail, list[dict[str, Any]]] = (Tail(run.metrics), [])

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in _all_records(*self._events) if e["event"] == name]

    def metrics(self) -> list[dict[str, Any]]:
        return list(_all_records(*self._metrics))

    def losses(self) -> dict[int, float]:
        """Step -> loss, the newest where a step was done again."""
        return {m["step"]: m["loss"] for m in self.metrics()}

    def step(self) -> int:
        metrics = self.metrics()
        return int(metrics[-1]["step"]) if metrics else 0

    def until(self, true: Callable[[], bool], what: str, seconds: float = 180) -> None:
        """Look again and again; no more than a fifth of the time is spent on looking, which others may need."""
        now = time.monotonic()
        deadline = now + seconds
        while not true():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.story()}"
            time.sleep(min(max(0.02, 4 * (time.monotonic() - now)), 4.0))
            now = time.monotonic()

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step() >= step, f"step {step}")

    def story(self) -> str:
        """The run's events and the ends of its logs, for a failing test's message."""
        logs = [f"{f}:\n{f.read_text()[-1500:]}" for f in sorted(self.run.path.glob("attempts/*/**/*.log"))]
        return "\n".join([self.run.events.read_text() if self.run.events.exists() else "", *logs])


class Job(Watched):
    """A detached job of a test, which does not outlive it."""

    def __init__(
        self, folder: Path, name: str, *overrides: str, nodes: str = "2", nproc: int = 2, tiny: bool = True, **env: str
    ):
        super().__init__(RunDir(folder / "runs" / name))
        self.folder, self.name, self.env = folder, name, env
        self.overrides = [f"nodes={nodes}", f"nproc_per_node={nproc}", *overrides]
        self.submit(f"name={name}", *(tiny_for(overrides) if tiny else ()), *self.overrides)

    def submit(self, *args: str) -> None:
        done = cli(self.folder, *args, "attach=false", **self.env)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "local_fsdp://" in done.stdout

    def resume(self, *overrides: str) -> None:
        self.submit("resume", self.name, *overrides)

    def wait(self, seconds: float = 240) -> Verdict:
        """Until the supervisor has gone; returns the last verdict."""
        self.until(lambda: self.supervisor() is None, "the end of the job", seconds)
        verdict = Verdict.read(self.run, self.run.last_attempt())
        assert verdict is not None, self.story()
        return verdict

    def supervisor(self) -> psutil.Process | None:
        return recorded_process(self.run.submit / "supervisor.json")

    def process(self, *words: str) -> psutil.Process:
        """The child of the supervisor whose command line has these words."""
        supervisor = self.supervisor()
        assert supervisor is not None, self.story()
        for child in supervisor.children():
            with suppress(psutil.NoSuchProcess):
                command = " ".join(child.cmdline())
                if all(w in command for w in words):
                    return child
        raise AssertionError(f"no process {words}")

    def agent(self, node: int) -> psutil.Process:
        return self.process("fsdp_jobs.node.agent", f"--node {node} ")

    def ranks(self, node: int) -> list[psutil.Process]:
        """The ranks that a node's fork server has made."""
        servers = [c for c in self.agent(node).children() if "fork server" in " ".join(c.cmdline())]
        return [rank for server in servers for rank in server.children()]

    def kill(self) -> None:
        supervisor = self.supervisor()
        if supervisor is not None:
            killed = family(supervisor)
            signal_all(killed)
            psutil.wait_procs(killed, timeout=10)


@contextmanager
def job(
    folder: Path, name: str, *overrides: str, nodes: str = "2", nproc: int = 2, tiny: bool = True, **env: str
) -> Iterator[Job]:
    """A detached job, tiny unless told otherwise; killed at the end if it is still there."""
    made = Job(folder, name, *overrides, nodes=nodes, nproc=nproc, tiny=tiny, **env)
    try:
        yield made
    finally:
        made.kill()
