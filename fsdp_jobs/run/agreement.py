"""Whether replicas hold the same bits: what a node knows, shared between its agent and ranks. No torch.

A rank writes the sums of its shards into the folder of its node's rank states, where its agent takes them away:

    <term>-<step>-<rank>.shards    JSON: name of the tensor -> sum
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

import xxhash

from fsdp_jobs.run.env import RANK_STATE_ENV, TERM_ENV
from fsdp_jobs.run.events import Corruption
from fsdp_jobs.run.table import listed
from fsdp_jobs.run.term import shared_memory

NO_LIMIT = 1 << 62
_KNOWN = struct.Struct("<qqq?qq")
_NAMED = 8  # ranks in a sentence


class Known(NamedTuple):
    """What a node knows of the round's replicas."""

    began: int = NO_LIMIT  # the step at which they were compared first
    agreed: int = -1  # the newest step at which they were the same, -1 for none
    compared: int = -1  # the newest at which they were compared, and after which the ranks may go on
    differ: bool = False  # at that step
    limit: int = NO_LIMIT  # newest step that a restart may use, unless replicas are known to agree at a later one
    replayed: int = -1  # a step that was found to differ, and is done again to find out why

    def about(self, step: int) -> bool | None:
        """Whether replicas were the same at a step; None when it is not known.

        Of steps before the round it is not: what was wrong in one replica may have been saved, and read by all.
        """
        if step > self.agreed:
            return False if self.differ else None
        return True if step > self.began else None


class Agreement:
    """A few bytes of a node's memory: the agent writes what is known, ranks and their save processes read it."""

    def __init__(self, folder: Path | str):
        """`folder` is that of the node's rank states."""
        self._map = shared_memory(Path(folder) / "agreement", _KNOWN.size)

    def write(self, known: Known) -> None:
        _KNOWN.pack_into(self._map, 0, *known)

    def read(self) -> Known:
        return Known(*_KNOWN.unpack_from(self._map))


def known_here() -> Known:
    """Return what this rank's agent knows; without an agent, nothing."""
    folder = os.environ.get(RANK_STATE_ENV)
    return Agreement(folder).read() if folder else Known()


def write_sums(step: int, rank: int, sums: dict[str, str]) -> None:
    """Tell this rank's agent the sums of its shards after `step` steps, if there is room: no job ends without."""
    file = Path(os.environ[RANK_STATE_ENV]) / f"{os.environ[TERM_ENV]}-{step}-{rank}.shards"
    part = file.with_suffix(".part")
    try:
        part.write_text(json.dumps(sums))
        part.rename(file)
    except OSError as e:
        print(f"WARNING replicas are not compared at step {step}: {file.parent}: {e.strerror}", flush=True)
        part.unlink(missing_ok=True)


def take_sums(folder: Path) -> Iterator[tuple[int, int, int, dict[str, str]]]:
    """Yield term, step, rank and sums of what ranks have written, in the order of steps, and remove it."""
    files = {(*map(int, file.stem.split("-")),): file for file in folder.glob("*.shards")}
    for (term, step, rank), file in sorted(files.items()):
        with suppress(FileNotFoundError):  # another thread has just taken it
            sums = json.loads(file.read_text())
            file.unlink()
            yield term, step, rank, sums


def digest(sums: dict[str, str]) -> str:
    """Return one sum over all."""
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(sums.items())).encode())


class Place(NamedTuple):
    """Where a rank runs."""

    node: int
    host: str
    local_rank: int

    def __str__(self) -> str:
        return f"node {self.node} ({self.host}, local rank {self.local_rank})"


def majority(values: Iterable[str]) -> str | None:
    """Return the value that more than half of these have; None when none has."""
    votes = Counter(values)
    value, most = votes.most_common(1)[0]
    return value if 2 * most > votes.total() else None


def corruption(
    step: int, agreed: int, finding: str, ranks: Mapping[int, Place], tensors: list[str], what: str
) -> Corruption:
    """Make the event of a finding; `ranks` are those that it names, and `what` says of them what was found."""
    nodes, hosts = [p.node for p in ranks.values()], [p.host for p in ranks.values()]
    who = listed([f"rank {rank} on {place}" for rank, place in ranks.items()], _NAMED, of="ranks")
    return Corruption(step, agreed, finding, [*ranks], nodes, hosts, tensors, f"step {step}: {who} {what}")
