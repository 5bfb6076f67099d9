"""Which files nodes send each other, and how much a rank looks at to find out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from fsdp_jobs.checkpoints.exchange import fetch_files
from fsdp_jobs.checkpoints.ranks import Ranks


class Names(frozenset[str]):
    """Names of files that count how often they are searched."""

    searched = 0

    def __contains__(self, name: object) -> bool:
        Names.searched += 1
        return super().__contains__(name)


class Bystander:
    """A rank of many that neither sends nor receives."""

    rank, leader, group = -1, 7, None

    def __init__(self, wanted: dict[int, set[str]]):
        self.wanted, self.asked = wanted, list[Any]()

    def gather(self, own: Any) -> list[Any]:
        self.asked.append(own)
        return [*self.wanted.items()] if isinstance(own, tuple) else []


def test_a_file_is_looked_for_once_however_many_nodes_hold_files(tmp_path: Path) -> None:
    """Each of 4,000 nodes wants 128 files: to look through all nodes for each took every rank minutes."""
    held = {leader: Names({f"{leader}.data"}) for leader in range(100)}
    wanted = {leader: {f"{(leader + at) % 100}.data" for at in range(1, 20)} for leader in range(100)}
    ranks = Bystander(wanted)
    fetch_files(cast(Ranks, ranks), held, {"7.data", "8.data"}, tmp_path, tmp_path)
    assert Names.searched == 0
    assert ranks.asked[0] == (7, {"8.data"}), "a node asks for nothing that it holds"
