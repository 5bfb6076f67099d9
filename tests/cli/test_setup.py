"""What sets a user up: completion in real shells, the first files, the schema that checks them."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jsonschema import Draft7Validator

from fsdp_jobs.cli import setup
from fsdp_jobs.config.json_schema import job_schema
from fsdp_jobs.config.schema import plain_values
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.verdict import Verdict
from fsdp_jobs.tools.rehearse import FAULTS
from tests.jobs import called
from tests.recorded import recorded_run

SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source {}"),
    "zsh": (["zsh", "-f", "-i"], "autoload -U compinit; compinit -u -D; source {}"),
    "fish": (["fish", "--no-config", "-i"], "source {}"),
}


class Shell:
    """A shell in a terminal of its own, in a folder, for which there is no fsdp-jobs to ask."""

    def __init__(self, argv: list[str], folder: Path):
        self._terminal, inside = pty.openpty()
        env = {"PATH": "/usr/bin:/bin", "TERM": "dumb", "HOME": str(folder), "LANG": "C.UTF-8", "PS1": "$ "}
        self._process = subprocess.Popen(argv, cwd=folder, env=env, preexec_fn=lambda: os.login_tty(inside))
        os.close(inside)
        self.shown = ""

    def type(self, keys: str, until: str) -> str:
        """Type; return what the pattern's group matches in what is shown then."""
        begin, deadline = len(self.shown), time.monotonic() + 60
        os.write(self._terminal, keys.encode())
        while (found := re.search(until, self.shown[begin:])) is None:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._terminal], [], [], 0.2)[0]:
                self.shown += os.read(self._terminal, 1 << 16).decode(errors="replace")
        return found[1]

    def completed(self, line: str) -> str:
        """Type the beginning of a command and Tab; return its words as the shell would run them, each in <>."""
        os.write(self._terminal, f"{line}\t".encode())
        time.sleep(0.5)  # what is typed while a shell completes, it may throw away
        return self.type("\x01printf '<%s>' \x05 END\r", r"(<fsdp-jobs>.*)<END>").strip()

    def leave(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)


@contextmanager
def shell_with_completion(name: str, folder: Path) -> Iterator[Shell]:
    done = called(folder, "completion", name)
    assert done.returncode == 0, done.stderr
    (folder / "completion").write_text(done.stdout)
    argv, source = SHELLS[name]
    shell = Shell(argv, folder)
    try:
        shell.type(f"{source.format('completion')}; printf '%s' RE; printf '%s' ADY\r", r"(READY)")
        yield shell
    finally:
        shell.leave()


@pytest.mark.integration
@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_completes_commands_without_starting_python(name: str, tmp_path: Path) -> None:
    recorded_run(tmp_path / "runs", "first-try")
    recorded_run(tmp_path / "elsewhere", "second")
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").touch()
    with shell_with_completion(name, tmp_path) as shell:
        for typed, completed in (
            ("stat", "status"),
            ("status fir", "status first-try"),
            ("logs runs_dir=elsewhere sec", "logs runs_dir=elsewhere second"),
            ("logs --err", "logs --errors"),
            ("sweep retr", "sweep retry-failed"),
            ("completion zs", "completion zsh"),
            ("plan hardw", "plan hardware"),
            ("plan fsdp.strat", "plan fsdp.strategy="),
            ("plan nodes=4 fsdp.strategy=hybrid_shard_z", "plan nodes=4 fsdp.strategy=hybrid_shard_zero2"),
            ("cluster=slu", "cluster=slurm"),
            ("checkpoint.mem", "checkpoint.memory."),
            ("--config-dir conf experiment=mi", "--config-dir conf experiment=mine"),
            ("cluster.partit", "cluster.partition="),
            ("data.path=elsew", "data.path=elsewhere"),
            ("nosuchthing", "nosuchthing"),
        ):
            words = "".join(f"<{word}>" for word in ["fsdp-jobs", *completed.split()])
            assert shell.completed(f"fsdp-jobs {typed}").replace("/>", ">") == words  # zsh takes a slash back
        assert not re.search(r"rror:|Traceback|not found", shell.shown), shell.shown


def candidates(folder: Path, line: str) -> list[str]:
    """What bash would offer for a line."""
    script = called(folder, "completion", "bash").stdout
    ask = '\nsh -c "$_fsdp_jobs_candidates" sh "$1"'
    return subprocess.run(
        ["bash", "-c", script + ask, "bash", line], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_what_is_offered_is_short_and_whole(tmp_path: Path) -> None:
    for verb in ("status", "list"):
        assert candidates(tmp_path, f"fsdp-jobs {verb} ") == ["--json", "--last", "--state", "--watch", "runs_dir="]
    assert candidates(tmp_path, "fsdp-jobs plan fsdp") == ["fsdp.", "fsdp="]
    assert candidates(tmp_path, "fsdp-jobs plan attach=") == ["attach=false", "attach=true"]
    assert candidates(tmp_path, "fsdp-jobs plan tracking.k") == ["tracking.kind="]
    assert candidates(tmp_path, "fsdp-jobs plan optim.lr=") == []
    assert candidates(tmp_path, "fsdp-jobs init ") == ["cluster="]
    clusters = sorted(file.stem for file in (Path(setup.__file__).parent / "starter").glob("*.yaml"))
    assert candidates(tmp_path, "fsdp-jobs init cluster=") == [f"cluster={cluster}" for cluster in clusters]
    assert {"kill_rank", "preempt"} < set(candidates(tmp_path, "fsdp-jobs rehearse ")) == set(FAULTS)
    assert candidates(tmp_path, "fsdp-jobs rehearse preempt fsdp.strat") == ["fsdp.strategy="]
    first = candidates(tmp_path, "fsdp-jobs ")
    assert {"plan", "status", "nodes=", "optim.", "optim=", "--multirun"} <= set(first) and len(first) < 80


def test_what_a_shell_would_execute_is_not_offered(tmp_path: Path) -> None:
    for name in ("a$(touch PWNED)b", "a`touch PWNED`", "a;touch PWNED", "a b", "a\nb", "a-sound_1.0"):
        for file in (tmp_path / "runs" / name / "job.json", tmp_path / "conf" / "group" / f"{name}.yaml"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    assert candidates(tmp_path, "fsdp-jobs logs a") == ["a-sound_1.0"]
    assert candidates(tmp_path, "fsdp-jobs --config-dir=conf group=") == ["group=a-sound_1.0"]


@pytest.mark.parametrize("args", [[], ["csh"]])
def test_completion_of_no_shell(tmp_path: Path, args: list[str]) -> None:
    done = called(tmp_path, "completion", *args)
    assert done.returncode == 2 and "{bash,zsh,fish}" in done.stderr
    assert not done.stdout


@pytest.mark.parametrize("cluster", ["docker", "kubernetes", "local", "slurm"])
def test_the_first_files_can_be_planned_and_are_never_overwritten(tmp_path: Path, cluster: str) -> None:
    done = called(tmp_path, "init", f"cluster={cluster}")
    assert done.returncode == 0, done.stderr
    written = {file: file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
    names = sorted(str(file.relative_to(tmp_path)) for file in written)
    assert names == ["conf/experiment/mine.yaml", "conf/job.schema.json", "train.py"]
    assert all(name in done.stdout for name in names)
    mine = tmp_path / "conf" / "experiment" / "mine.yaml"
    assert list(Draft7Validator(job_schema()).iter_errors(plain_values(mine))) == []
    (command,) = re.findall(r"fsdp-jobs (plan .*)", done.stdout)
    planned = called(tmp_path, *command.split())
    assert planned.returncode == 0 and "2 nodes" in planned.stdout, planned.stdout + planned.stderr
    again = called(tmp_path, "init", "cluster=local")
    assert again.returncode == 2 and again.stderr.count("is there already, and is not overwritten") == 2
    assert {file: file.read_text() for file in tmp_path.rglob("*") if file.is_file()} == written


def test_a_script_that_is_there_is_the_one_that_the_first_files_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('mine')\n")
    done = called(tmp_path, "init")
    assert done.returncode == 0 and "train.py is there already: the job runs it" in done.stdout, done.stderr
    assert (tmp_path / "train.py").read_text() == "print('mine')\n"
    assert "script: train.py" in (tmp_path / "conf" / "experiment" / "mine.yaml").read_text()


def test_first_files_for_a_cluster_that_there_is_not(tmp_path: Path) -> None:
    done = called(tmp_path, "init", "cluster=slrum")
    assert done.returncode == 2 and "did you mean slurm?" in done.stderr
    assert called(tmp_path, "init", "nodes=4").returncode == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("blocked", ["conf", "conf/experiment"])
def test_where_a_file_is_in_the_way_nothing_is_written(tmp_path: Path, blocked: str) -> None:
    file = tmp_path / blocked
    file.parent.mkdir(exist_ok=True)
    file.touch()
    done = called(tmp_path, "init")
    assert done.returncode == 2 and "-> move it away, or give another name" in done.stderr, done.stderr
    assert [f for f in tmp_path.rglob("*") if f.is_file()] == [file]
    file.unlink()
    assert called(tmp_path, "init").returncode == 0


@pytest.mark.integration
def test_the_first_job_runs(tmp_path: Path) -> None:
    assert called(tmp_path, "init").returncode == 0
    few = ["script_args=--steps 60", "hardware=cpu", "nproc_per_node=1", "name=mine"]
    done = called(tmp_path, "--config-dir", "conf", "experiment=mine", *few)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(tmp_path / "runs" / "mine")
    verdict = Verdict.read(run, 0)
    assert verdict is not None and verdict.verdict == "done"
    assert (run.checkpoints / "step-00000050").is_dir()
