"""What killed agents leave on their machine, and who removes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_jobs.run.tail import read_json_lines
from tests.jobs import Job, cli, environment, family, signal_all
from tests.world import PACED

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


class OwnMemory(Job):
    """A job whose processes have a /dev/shm of their own, and a folder for temporary files."""

    def submit(self, *args: str) -> None:
        own = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "-"]
        done = cli(self.folder, *args, "attach=false", under=own, TMPDIR=str(self.folder / "tmp"))
        assert done.returncode == 0, done.stdout + done.stderr
        supervisor = self.supervisor()
        assert supervisor is not None
        self.memory = os.open(f"/proc/{supervisor.pid}/root/dev/shm", os.O_RDONLY)  # there as long as this is open

    def left(self) -> set[str]:
        """Agents whose folders or semaphores are in memory, and what of multiprocessing is not theirs.

        torch's own files are there for the moment in which a save is handed to its process.
        """
        names = [f.name.removeprefix("sem.").split("-") for f in Path(f"/proc/self/fd/{self.memory}").iterdir()]
        names = [words for words in names if not words[0].startswith("torch_")]
        return {"-".join(words[:4]) for words in names} | {f.name for f in (self.folder / "tmp").glob("pymp-*")}

    def folders(self, name: str) -> list[Path]:
        """An agent's folders of a kind, seen from here."""
        return sorted(Path(f"/proc/self/fd/{self.memory}").glob(f"fsdp_jobs-{os.getuid()}-{name}-*"))

    def kill_agents(self, *others: psutil.Process) -> None:
        """Kill both agents with all that they have started, and `others`; the machine stays."""
        agents = [self.agent(0), self.agent(1), *others]
        killed = family(*agents)
        signal_all(killed)
        psutil.wait_procs(killed, timeout=30)


@pytest.fixture
def with_own_memory() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, for a /dev/shm of its own")


@pytest.fixture
def made(with_own_memory: None, tmp_path: Path) -> Iterator[OwnMemory]:
    (tmp_path / "tmp").mkdir()
    saves = ("checkpoint.every_steps=5", "checkpoint.async_mode=process")  # which has semaphores, and a socket
    job = OwnMemory(tmp_path, "left", *PACED, "steps=100000", *saves, nodes="1")
    yield job
    job.kill()
    os.close(job.memory)


def test_the_next_agent_removes_what_a_killed_one_has_left_and_the_last_leaves_nothing(made: OwnMemory) -> None:
    made.until(lambda: bool(made.events("checkpoint")), "a checkpoint")
    first = made.left()
    assert len(first) == 1, first
    os.close(
        os.open(f"sem.fsdp_jobs-{os.getuid()}-ranks-orphaned-a", os.O_CREAT, dir_fd=made.memory)
    )  # of ranks whose agent has ended
    snapshots = f"fsdp_jobs-{os.getuid()}-memory-{'f' * 16}-another-1234"  # of a job that SLURM killed at once
    os.mkdir(snapshots, dir_fd=made.memory)
    os.close(os.open(f"{snapshots}/lock", os.O_CREAT, dir_fd=made.memory))
    os.utime(snapshots, (1, 1), dir_fd=made.memory)
    agent = made.agent(0)
    signal_all(reversed(family(agent)))  # with the tracker that would remove semaphores
    psutil.wait_procs([agent], timeout=30)
    saved = len(made.events("checkpoint"))
    made.until(lambda: len(made.events("checkpoint")) > saved, "a checkpoint of the next agent")
    second = made.left()
    assert len(second) == 1 and not second & first, second
    assert cli(made.folder, "cancel", "left").returncode == 0
    made.until(lambda: made.supervisor() is None and not made.left(), "an empty machine")


@contextmanager
def with_snapshots(folder: Path, *overrides: str) -> Iterator[OwnMemory]:
    (folder / "tmp").mkdir()
    saves = ("checkpoint.memory.every_steps=1", "integrity.probe_every_steps=0", *overrides)
    job = OwnMemory(folder, "kept", *PACED, "steps=100000", "elastic.join_window_s=0", *saves, nproc=1)
    yield job
    job.kill()
    os.close(job.memory)


@pytest.fixture
def only_snapshots(with_own_memory: None, tmp_path: Path) -> Iterator[OwnMemory]:
    """A job of two nodes that saves nothing but snapshots."""
    with with_snapshots(tmp_path, "checkpoint.every_steps=0") as job:
        yield job


@pytest.fixture
def snapshots_and_saves(with_own_memory: None, tmp_path: Path) -> Iterator[OwnMemory]:
    with with_snapshots(tmp_path, "checkpoint.every_steps=5") as job:
        yield job


def test_agents_that_are_killed_on_a_living_machine_lose_no_snapshot(only_snapshots: OwnMemory) -> None:
    job = only_snapshots
    job.until_step(10)
    own = job.folders("memory")
    others = own[0].with_name(f"fsdp_jobs-{os.getuid()}-memory-{'f' * 16}-another-1234")  # its job waits in a queue
    with suppress(shutil.Error):  # of files that come and go meanwhile
        shutil.copytree(own[0], others)
    (others / "lock").write_text("")
    job.kill_agents()
    done = job.step()
    job.until(lambda: bool(job.events("resumed")), "a restart")
    (resumed,) = job.events("resumed")
    assert resumed["place"] == "memory" and resumed["step"] >= done - 1, job.story()
    assert {*job.folders("memory")} == {*own, others}, "adopted, and another job's is left alone"

    job.until_step(resumed["step"] + 10)
    for folder in own:  # as a site's epilog does: the machines live, and what was in their memory is gone
        folder.rename(folder.with_name(f"gone-{folder.name}"))  # at once: the job writes there
    job.kill_agents()
    assert job.wait().verdict == "user_error", "it had a step that was safe, and does not begin again by itself"
    assert "no node has any of it now" in job.events("checkpoint_failed")[-1]["error"], job.story()


def test_terms_go_on_after_those_of_snapshots_where_markers_and_records_were_purged(
    snapshots_and_saves: OwnMemory, tmp_path: Path
) -> None:
    """A term that began again at 1 would make every later snapshot older than those of the rounds before."""
    job = snapshots_and_saves
    job.until_step(3)
    job.ranks(0)[0].kill()
    job.until_step(8)
    *_, before = (e["term"] for e in job.events("round_started"))
    assert before > 1
    supervisor = job.supervisor()
    assert supervisor is not None
    supervisor.suspend()
    job.kill_agents(job.process("fsdp_jobs.control.server"))
    for own in job.folders("memory"):
        shutil.copytree(own, tmp_path / own.name)
    done = job.step()
    shutil.rmtree(job.run.checkpoints)
    job.run.events.unlink()
    supervisor.resume()

    def records(name: str) -> list[dict[str, Any]]:
        return [e for e in read_json_lines(job.run.events) if e["event"] == name]

    job.until(lambda: job.run.events.exists() and bool(records("resumed")), "a restart")
    resumed, started = records("resumed")[0], records("round_started")[0]
    assert started["term"] > before, job.story()
    assert resumed["place"] == "memory" and resumed["step"] >= done - 1, job.story()

    job.until_step(done + 10)
    job.kill_agents()
    for own in job.folders("memory"):
        shutil.rmtree(own)
        shutil.copytree(tmp_path / own.name, own)
    job.until(lambda: len(records("resumed")) == 2, "another restart")
    assert records("resumed")[1]["step"] >= records("checkpoint")[0]["step"] > done, job.story()

    inside = ["nsenter", f"--mount=/proc/{supervisor.pid}/ns/mnt", f"--wd={job.folder}"]
    killed = cli(job.folder, "cancel", "kept", "--now", under=inside)
    assert killed.returncode == 0, killed.stdout + killed.stderr
    assert job.wait().reason.startswith("killed on request")
    assert not [f.name for f in Path(f"/proc/self/fd/{job.memory}").iterdir()], "a killed job leaves nothing in memory"


def test_a_machine_without_memory_for_its_agents_is_told_where_it_lacks(with_own_memory: None, tmp_path: Path) -> None:
    made = "from fsdp_jobs.run.rank_state import make_folder; make_folder()"
    bare = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev && exec "$@"', "-", sys.executable, "-c", made]
    done = subprocess.run(bare, env=environment(tmp_path), capture_output=True, text=True)
    assert "No such file or directory: '/dev/shm/" in done.stderr
