"""What an agent does with a snapshot whose copy the partner does not take."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.messages import Round
from fsdp_jobs.tiers.memory.node import Tier
from fsdp_jobs.tiers.memory.slots import Entry, Slot, Snapshot


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Tier, Tier]]:
    """A node that sends copies of its snapshots, and one that receives them."""
    run = RunDir(tmp_path / "run")
    run.token.parent.mkdir(parents=True)
    run.token.write_text("secret")
    made = []
    for name in ("sender", "partner"):
        (tmp_path / name).mkdir()
        made.append(Tier(tmp_path / name, run, 0, 0))
        made[-1].start([])
    yield made[0], made[1]
    for node in made:
        node.close(is_over=True)


def _round(term: int, partner: tuple[str, int]) -> Round:
    return Round(number=term, term=term, size=2, shard_group=2, rank=0, layout="", last=1, partner=partner)


def _snapshot(folder: Path, term: int) -> Slot:
    entry = Entry("weight", "float32", [4], [0], [4], 16, is_alone=True)
    snapshot = Snapshot(term, 0, 0, 7, 56, 2, 2, [entry]).placed()
    slot = Slot(folder / snapshot.name)
    slot.map(snapshot.size)[:16] = b"0123456789abcdef"
    slot.publish(snapshot)
    return slot


def _until(what: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.integration
def test_the_partner_of_a_new_round_gets_a_snapshot_however_often_the_one_before_has_failed(
    nodes: tuple[Tier, Tier],
) -> None:
    """A lost node's place is taken within seconds; each step that passes without a copy could be lost."""
    sender, partner = nodes
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        sender.begin_round(_round(1, partner=("127.0.0.1", nobody.getsockname()[1])))
        _snapshot(sender.folder, 1)
        events = sender.run.events
        _until(lambda: events.exists() and "is not with" in events.read_text(), 30)  # it has failed for so long
    sender.begin_round(_round(2, partner=("127.0.0.1", partner.port)))
    slot = _snapshot(sender.folder, 2)
    _until(slot.copied.exists, 4)  # the wait between two tries is 5 s by now
    assert [*(partner.folder / "copies").glob("2-0-0.data")]


@pytest.mark.integration
def test_a_partner_whose_machine_no_longer_answers_holds_up_no_copy_of_the_next_round(nodes: tuple[Tier, Tier]) -> None:
    sender, partner = nodes
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, socket.create_connection(silent.getsockname()):
        sender.begin_round(_round(1, partner=silent.getsockname()))  # its queue is full: nothing is answered
        _snapshot(sender.folder, 1)
        time.sleep(0.5)
        sender.begin_round(_round(2, partner=("127.0.0.1", partner.port)))
        slot = _snapshot(sender.folder, 2)
        _until(slot.copied.exists, 6)
