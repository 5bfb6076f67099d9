"""Who may write for a run: numbers that only grow, on file systems and in a simulated store; leases."""

from __future__ import annotations

import errno
import multiprocessing
import pickle
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from fsdp_jobs.run import folders
from fsdp_jobs.run import term as term
from fsdp_jobs.run.env import RANK_STATE_ENV, TERM_ENV
from fsdp_jobs.run.events import append_lines
from fsdp_jobs.run.files import lock
from fsdp_jobs.run.tail import read_json_lines
from fsdp_jobs.run.term import COORDINATOR, ROUND, Fenced, Lease, Term, claim, newest
from fsdp_jobs.run.threads import start_thread
from tests.jobs import fill
from tests.store import simulated_store


@pytest.fixture(params=["folder", "simulated store"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "folder":
        yield tmp_path / "not yet there"
        return
    from upath import UPath

    with simulated_store() as bucket:
        yield cast(Path, UPath(f"s3://{bucket}/mine", use_listings_cache=False))


def test_numbers_grow_and_an_older_round_may_not_write(home: Path) -> None:
    assert newest(home, ROUND) == 0
    first = Term(home, claim(home, ROUND, "attempt 0, round 0"))
    first.check()
    claim(home, COORDINATOR, "a coordinator fences no round")
    first.check()
    second = pickle.loads(pickle.dumps(Term(home, claim(home, ROUND, "attempt 0, round 1", last=1))))
    second.check()
    with pytest.raises(Fenced, match="round 2 of this run has begun elsewhere"):
        first.check()
    with pytest.raises(Fenced, match="round 2 of this run has begun elsewhere, after 1"):
        claim(home, ROUND, "cut off since", last=1)
    assert second.number == newest(home, ROUND) == 2
    markers = list((home / "terms").iterdir())
    assert len(markers) == 2, "markers that nobody needs are left"
    for marker in markers:  # as the purge of a scratch file system does
        marker.unlink()
    assert claim(home, ROUND, "attempt 0, round 2", last=2) == 3
    with pytest.raises(Fenced, match="round 3 of this run has begun elsewhere"):
        second.check()


def test_what_others_leave_among_the_numbers_is_none(home: Path) -> None:
    claim(home, ROUND, "attempt 0, round 0")
    for name in ("round-x", "round-00000009~", ".nfs0000000000000009", "old-round-00000009"):
        (home / "terms" / name).write_text("")
    assert newest(home, ROUND) == 1 and claim(home, ROUND, "attempt 0, round 1", last=1) == 2


def _claim_many(home: Path, name: str, count: int) -> list[int]:
    return [claim(home, ROUND, f"{name} {i}") for i in range(count)]


@pytest.mark.integration
def test_no_two_get_the_same_number(home: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        claimed = pool.starmap(_claim_many, [(home, f"claimant {i}", 6) for i in range(4)])
    numbers = [number for numbers in claimed for number in numbers]
    assert len(set(numbers)) == len(numbers) == 24
    assert all(own == sorted(own) for own in claimed)
    assert newest(home, ROUND) == max(numbers)


def test_a_claim_that_is_lost_to_one_who_has_a_newer_one_is_no_error(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = home / "terms" / "round-00000001"
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.write_text("another's")
    read = type(marker).read_text

    def removed_before_it_is_read(path: Path) -> str:
        marker.unlink()
        return read(path)

    monkeypatch.setattr(type(marker), "read_text", removed_before_it_is_read)
    assert not term._create(marker, "mine")


def test_a_claim_whose_answer_was_lost_is_ones_own(home: Path) -> None:
    claim(home, ROUND, "before")
    marker = home / "terms" / "round-00000002"
    marker.write_text("mine")
    assert term._create(marker, "mine")
    assert not term._create(marker, "another's")


def test_a_full_disk_has_room_for_a_claim(small_disk: Path) -> None:
    """A marker whose line did not fit was taken for another coordinator's, and the job waited for ever."""
    claim(small_disk, ROUND, "before")
    fill(small_disk)
    assert claim(small_disk, ROUND, "attempt 0 and forty letters that do not fit", last=1) == 2


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "terms").write_text("a file")
    with pytest.raises(OSError):
        claim(tmp_path, ROUND, "anyone")


def test_a_node_whose_lease_ran_out_may_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANK_STATE_ENV, str(tmp_path))
    monkeypatch.setenv(TERM_ENV, "1")
    term._lease_of_node.cache_clear()
    mine, lease = Term.of_rank(tmp_path), Lease(tmp_path)
    lease.renew(Lease.now() + 60, Lease.now() + 60)
    mine.check()
    assert 59 < lease.left_s() <= 60
    lease.renew(Lease.now() - 1, Lease.now() - 1)
    with pytest.raises(Fenced, match="no answer from the coordinator"):
        mine.check()
    term._lease_of_node.cache_clear()


def test_a_program_without_a_launcher_is_never_fenced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RANK_STATE_ENV, raising=False)
    monkeypatch.delenv(TERM_ENV, raising=False)
    term._lease_of_node.cache_clear()
    claim(tmp_path, ROUND, "another run")
    Term.of_rank(tmp_path).check()


def test_a_rank_looks_for_a_newer_round_before_it_records_once_its_nodes_answer_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RANK_STATE_ENV, str(tmp_path))
    monkeypatch.setenv(TERM_ENV, str(claim(tmp_path, ROUND, "mine")))
    term._lease_of_node.cache_clear()
    Term.of_rank(tmp_path)
    now, lease, lines = Lease.now(), Lease(tmp_path), tmp_path / "lines.jsonl"
    lease.renew(now + 60, now - 1)
    append_lines(lines, {"step": 1})
    claim(tmp_path, ROUND, "other")
    append_lines(lines, {"step": 2})
    lease.renew(now + 60, now + 60)  # the coordinator answers: what was begun elsewhere is no newer round of it
    append_lines(lines, {"step": 3})
    lease.renew(now + 60, now - 1)
    monkeypatch.setenv(TERM_ENV, str(claim(tmp_path, ROUND, "mine again")))
    Term.of_rank(tmp_path)
    for step in (4, 5):
        with lines.open() as busy:
            lock(busy)
            waiting = start_thread(partial(append_lines, lines, {"step": step}), "waits for the file")
            time.sleep(0.3)
            if step == 5:
                claim(tmp_path, ROUND, "another, meanwhile")
        waiting.join()
    assert [line["step"] for line in read_json_lines(lines)] == [1, 3, 4]
    term._lease_of_node.cache_clear()
    monkeypatch.setattr(term, "_term_of_rank", Term(tmp_path, 0))


def test_on_a_full_disk_an_agent_is_told_so_and_is_not_killed_by_a_bus_error(small_disk: Path) -> None:
    """In /dev/shm a page that was not there before has no room."""
    fill(small_disk)
    with pytest.raises(OSError, match=f"No space left on device: '{small_disk}/lease'"):
        Lease(small_disk)
    with pytest.raises(OSError, match=f"No space left on device: '{small_disk}"):
        folders.make(small_disk, folders.RANKS)
    assert {file.name for file in small_disk.iterdir()} == {"filler", "lease"}


@pytest.mark.parametrize("last", [0, 5])
def test_a_claim_whose_answer_was_lost_does_not_fence_its_own_claimant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """Its coordinator took it for another's, and decided nothing more: the job stood still for ever."""
    claim(tmp_path, ROUND, "before", above=4)
    errors, touch = [OSError(errno.EIO, "Input/output error")], Path.touch

    def fails(file: Path, **how: bool) -> None:
        touch(file, **how)
        if errors:
            raise errors.pop()

    monkeypatch.setattr(Path, "touch", fails)
    assert claim(tmp_path, ROUND, "this", last) == newest(tmp_path, ROUND) == 7
    claim(tmp_path, ROUND, "another's")
    with pytest.raises(Fenced):
        claim(tmp_path, ROUND, "this", 7)
