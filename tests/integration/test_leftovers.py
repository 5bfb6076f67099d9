"""What killed agents leave on their machine, and who removes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.jobs import Job, cli

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
        """Agents whose folders or semaphores are in memory, and what of multiprocessing is not theirs."""
        names = [f.name.removeprefix("sem.").split("-") for f in Path(f"/proc/self/fd/{self.memory}").iterdir()]
        return {"-".join(words[:2]) for words in names} | {f.name for f in (self.folder / "tmp").glob("pymp-*")}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[OwnMemory]:
    if os.geteuid() != 0:
        pytest.skip("needs root, for a /dev/shm of its own")
    (tmp_path / "tmp").mkdir()
    saves = ("checkpoint.every_steps=5", "checkpoint.async_mode=process")  # which has semaphores, and a socket
    job = OwnMemory(tmp_path, "left", "steps=100000", *saves, nodes="1")
    yield job
    job.kill()
    os.close(job.memory)


def test_the_next_agent_removes_what_a_killed_one_has_left_and_the_last_leaves_nothing(made: OwnMemory) -> None:
    made.until(lambda: bool(made.events("checkpoint")), "a checkpoint")
    first = made.left()
    assert len(first) == 1, first
    os.close(os.open("sem.fsdp_jobs-orphaned-a", os.O_CREAT, dir_fd=made.memory))  # of ranks whose agent has ended
    agent = made.agent(0)
    for process in [*agent.children(recursive=True), agent]:  # with the tracker that would remove semaphores
        process.kill()
    psutil.wait_procs([agent], timeout=30)
    saved = len(made.events("checkpoint"))
    made.until(lambda: len(made.events("checkpoint")) > saved, "a checkpoint of the next agent")
    second = made.left()
    assert len(second) == 1 and not second & first, second
    assert cli(made.folder, "cancel", "left").returncode == 0
    made.until(lambda: made.supervisor() is None and not made.left(), "an empty machine")
