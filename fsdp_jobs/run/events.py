"""What happens to a run, as append-only JSON lines. No torch.

Events: submitted, attempt_started, round_started, round_broken, resumed, checkpoint, checkpoint_failed,
checkpoint_skipped, stop_requested, node_lost, machine_excluded, stalled, adopted, process_restarted,
attempt_ended, done, notify_failed, tracking_failed; waiting, which launchers add.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdp_jobs.run.directory import RunDir, read_json_lines

logger = logging.getLogger(__name__)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON line, whole, among writers on several nodes: under a lock where the file system has them.

    A record that the disk has no room for is dropped with a warning: a job must not fail because of its own log.
    """
    line = (json.dumps(record) + "\n").encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            with suppress(OSError):  # some shared file systems have no locks; O_APPEND alone has to do there
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            before = os.fstat(descriptor).st_size
            if os.write(descriptor, line) < len(line):
                os.ftruncate(descriptor, before)  # never half a line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
    except OSError as e:
        logger.warning("not recorded in %s: %s", path, e.strerror)


def record_event(run: RunDir, event: str, attempt: int, **details: Any) -> None:
    """Append an event with the time and whatever else it needs."""
    append_line(run.events, {"time": time.time(), "event": event, "attempt": attempt, **details})


def read_events(run: RunDir) -> Iterator[dict[str, Any]]:
    return read_json_lines(run.events)
