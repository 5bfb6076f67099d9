"""Send whole files from the nodes that hold them to the nodes that need them, over the ranks' process group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_jobs.checkpoints.ranks import Ranks

_BLOCK = 1 << 24  # bytes sent at once


class CannotLoad(Exception):
    """A file that is needed is on no node, cannot be read, has no room where it must go, or is damaged."""


def fetch_files(ranks: Ranks, held: Mapping[int, Set[str]], wanted: Set[str], folder: Path, into: Path) -> int:
    """All ranks: fetch the files that this rank's node needs and lacks. Returns the bytes from other nodes.

    Args:
        held: a node's leader, which sends and receives -> names of the files in its `folder`; the same on every rank.
        wanted: names of the files that this rank needs, each held by some node.
        into: the folder for files from other nodes.

    Raises:
        CannotLoad: on all ranks, if one of them cannot read a file it holds, or write one it received.
    """
    came, wrong = 0, ""
    source_of = {name: rank for rank in sorted(held, reverse=True) for name in held[rank]}
    by_rank = ranks.gather((ranks.leader, wanted - held.get(ranks.leader, set())))
    for name, target in sorted({(name, leader) for leader, names in by_rank for name in names}):
        source = source_of[name]
        if ranks.rank == source:
            try:
                _send(folder / name, target, ranks.group)
            except OSError as e:
                wrong = f"{folder / name} cannot be read: {e.strerror}"
        elif ranks.rank == target:
            blocks, file = _blocks(source, ranks.group), into / name
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("wb") as f:
                    came += sum(f.write(block.numpy().data) for block in blocks)
            except OSError as e:
                wrong = f"rank {ranks.rank} cannot keep {file}: {e.strerror}"
                for _ in blocks:  # the sender sends it anyway
                    pass
    if faults := [fault for fault in ranks.gather(wrong) if fault]:
        raise CannotLoad(faults[0])
    return came


def _send(file: Path, to: int, group: dist.ProcessGroup | None) -> None:
    """Send a file in blocks, each after its size. A size of 0 ends it, also if it cannot be read.

    Raises:
        OSError: it cannot be read.
    """
    block = torch.empty(_BLOCK, dtype=torch.uint8, device="cpu")
    try:
        with file.open("rb") as f:
            while size := f.readinto(block.numpy().data):
                dist.send(torch.tensor([size], device="cpu"), to, group=group)
                dist.send(block[:size], to, group=group)
    finally:
        dist.send(torch.tensor([0], device="cpu"), to, group=group)


def _blocks(source: int, group: dist.ProcessGroup | None) -> Iterator[torch.Tensor]:
    """Receive a file from `_send`."""
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    while True:
        dist.recv(size, source, group=group)
        if not size:
            return
        block = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        dist.recv(block, source, group=group)
        yield block
