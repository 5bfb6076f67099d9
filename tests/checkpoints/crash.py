"""Stop a process at the n-th thing that it does to storage, or have that fail."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

PATCHED = ("fsync", "fdatasync", "rename", "replace", "mkdir", "unlink", "rmdir")


class Points:
    """Counts syncs, renames, writes, removals and requests to S3 of this process, and strikes at one of them."""

    def __init__(self, strike_at: int | None, fault: str):
        """`fault`: kill (before it), half (in the middle of a write), stall, the name of an errno, or expired.

        The last is a credential, for this and all later requests to S3.
        """
        self.strike_at, self.fault, self.seen = strike_at, fault, list[str]()
        self._lock = threading.Lock()

    def arm(self) -> None:
        for name in PATCHED:
            setattr(os, name, self._before(name, getattr(os, name)))
        opened = io.open

        def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            raw = opened(file, mode, *args, **kwargs)
            if "w" in mode or "x" in mode:
                self._hit("create", lambda: None)
                return _Writing(raw, self)
            return raw

        io.open = open_
        try:
            from aiobotocore.client import AioBaseClient
            from botocore.exceptions import ClientError
        except ImportError:
            return
        request = AioBaseClient._make_api_call

        async def requested(client: Any, operation: str, arguments: Any) -> Any:
            self._hit(f"s3 {operation}", lambda: None)
            if self.fault == "expired" and self.strike_at is not None and len(self.seen) > self.strike_at:
                raise ClientError({"Error": {"Code": "ExpiredToken", "Message": "the token has expired"}}, operation)
            return await request(client, operation, arguments)

        AioBaseClient._make_api_call = requested

    def _before(self, name: str, honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._hit(name, lambda: None)
            return honest(*args, **kwargs)

        return call

    def _hit(self, what: str, half: Callable[[], object]) -> None:
        with self._lock:
            number = len(self.seen)
            self.seen.append(what)
        if number != self.strike_at:
            return
        if self.fault == "stall":
            time.sleep(1)
        elif self.fault in ("kill", "half"):
            if self.fault == "half":
                half()
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault != "expired":
            import errno

            code = getattr(errno, self.fault)
            raise OSError(code, os.strerror(code), what)


class _Writing:
    """A file that is open for writing."""

    def __init__(self, raw: Any, points: Points):
        self.raw, self.points = raw, points

    def write(self, data: Any) -> Any:
        def half() -> None:
            self.raw.write(
                data[: len(data) // 2] if isinstance(data, str) else memoryview(data).cast("B")[: len(data) // 2]
            )
            self.raw.flush()

        self.points._hit("write", half)
        return self.raw.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        self.raw.close()
