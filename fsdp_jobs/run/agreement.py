"""Share between a node's agent and its ranks whether replicas hold the same bits. No torch.

A rank writes the checksums of its shards to the folder of its node's rank states, and its agent reads and removes them:

    <term>-<step>-<rank>.shards    JSON: name of the tensor -> checksum
"""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fsdp_jobs.run.checksum import checksum
from fsdp_jobs.run.env import RANK_STATE_ENV, TERM_ENV
from fsdp_jobs.run.events import Corruption
from fsdp_jobs.run.files import write_whole
from fsdp_jobs.run.table import listed
from fsdp_jobs.run.term import shared_memory

NO_LIMIT = 1 << 62
_KNOWN = struct.Struct("<qqq?qq")
_NAMED = 8  # ranks in a sentence


class Known(NamedTuple):
    """A node's knowledge of the round's replicas."""

    began: int = NO_LIMIT  # the step of the first comparison
    agreed: int = -1  # the newest step at which they agreed, -1 for none
    compared: int = -1  # the newest compared step; ranks may continue after it
    differ: bool = False  # at step `compared`
    limit: int = NO_LIMIT  # newest step that a restart may use, unless replicas are known to agree at a later one
    replayed: int = -1  # a step at which they differed, repeated to find out why

    def about(self, step: int) -> bool | None:
        """Whether replicas agreed at a step; None if unknown.

        Steps before the round are unknown: one replica's wrong state may have been saved, and then loaded by all.
        """
        if step > self.agreed:
            return False if self.differ else None
        return True if step > self.began else None


class Agreement:
    """A few bytes of shared memory: the agent writes a `Known`, ranks and their save processes read it."""

    def __init__(self, folder: Path | str):
        """`folder` is the folder of the node's rank states."""
        self._map = shared_memory(Path(folder) / "agreement", _KNOWN.size)

    def write(self, known: Known) -> None:
        _KNOWN.pack_into(self._map, 0, *known)

    def read(self) -> Known:
        return Known(*_KNOWN.unpack_from(self._map))


def known_here() -> Known:
    """Return what this rank's agent knows; without an agent, an empty `Known`."""
    folder = os.environ.get(RANK_STATE_ENV)
    return Agreement(folder).read() if folder else Known()


def write_sums(step: int, rank: int, sums: dict[str, str]) -> None:
    """Write checksums of this rank's shards after `step` steps for its agent; only warn if that fails."""
    file = Path(os.environ[RANK_STATE_ENV]) / f"{os.environ[TERM_ENV]}-{step}-{rank}.shards"
    try:
        write_whole(file, json.dumps(sums))
    except OSError as e:
        print(f"WARNING replicas are not compared at step {step}: {file.parent}: {e.strerror}", flush=True)


def take_sums(folder: Path) -> Iterator[tuple[int, int, int, dict[str, str]]]:
    """Yield term, step, rank and checksums that ranks have written, by step, and remove the files."""
    files = {(*map(int, file.stem.split("-")),): file for file in folder.glob("*.shards")}
    for (term, step, rank), file in sorted(files.items()):
        with suppress(FileNotFoundError):  # another thread has just removed it
            sums = json.loads(file.read_text())
            file.unlink()
            yield term, step, rank, sums


def digest(sums: dict[str, str]) -> str:
    """Return one checksum over all."""
    return checksum(json.dumps(sorted(sums.items())).encode())


class Place(NamedTuple):
    """Where a rank runs."""

    node: int
    host: str
    local_rank: int

    def __str__(self) -> str:
        return f"node {self.node} ({self.host}, local rank {self.local_rank})"


def majority(values: Iterable[str]) -> str | None:
    """Return the value of more than half, None if there is none."""
    votes = Counter(values)
    value, most = votes.most_common(1)[0]
    return value if 2 * most > votes.total() else None


def corruption(
    step: int, agreed: int, finding: str, ranks: Mapping[int, Place], tensors: list[str], what: str
) -> Corruption:
    """Return the event of a finding: it names `ranks`, and `what` is the rest of its sentence."""
    nodes, hosts = [p.node for p in ranks.values()], [p.host for p in ranks.values()]
    who = listed([f"rank {rank} on {place}" for rank, place in ranks.items()], _NAMED, of="ranks")
    return Corruption(step, agreed, finding, [*ranks], nodes, hosts, tensors, f"step {step}: {who} {what}")
