"""File systems on other machines, simulated: the kernel of a test machine has no NFS."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


@contextmanager
def nfs_client() -> Iterator[None]:
    """Have this process go on not to see what it once did not find, until it opens the folder that has it.

    Linux does so for as long as it holds a folder's attributes, up to a minute, and asks the server about a folder that
    is opened. Other processes are other clients.
    """
    absent: set[Path] = set()
    stat, opened = os.stat, os.open

    def is_missing(path: Path) -> bool:
        try:
            stat(path)
        except FileNotFoundError:
            return True
        return False

    def looks(do: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **keys: Any) -> Any:
            if isinstance(path, int):
                return do(path, *args, **keys)
            whole = Path(path).absolute()
            creates = bool(args) and (args[0] in ("w", "wb") or (do is opened and args[0] & os.O_CREAT))
            if not absent.isdisjoint([*whole.parents] if creates else [whole, *whole.parents]):
                raise FileNotFoundError(2, "No such file or directory, says the cache", str(whole))
            try:
                done = do(path, *args, **keys)
            except FileNotFoundError:
                absent.update(filter(is_missing, [whole, *whole.parents]))
                raise
            if do is not stat:
                absent.difference_update([known for known in absent if known.parent == whole])
            return done

        return call

    ways = {name: looks(getattr(os, name)) for name in ("stat", "open", "scandir", "listdir")}
    with mock.patch.multiple(os, **ways), mock.patch.object(io, "open", looks(io.open)):
        yield


@contextmanager
def away(folder: Path) -> Iterator[None]:
    """Have every access of this process to a folder fail, as on a FUSE mount whose server has gone."""

    def looks(do: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **keys: Any) -> Any:
            if not isinstance(path, int) and Path(path).absolute().is_relative_to(folder):
                raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(path))
            return do(path, *args, **keys)

        return call

    names = ("stat", "open", "scandir", "listdir", "mkdir", "replace", "unlink")
    ways = {name: looks(getattr(os, name)) for name in names}
    with mock.patch.multiple(os, **ways), mock.patch.object(io, "open", looks(io.open)):
        yield
