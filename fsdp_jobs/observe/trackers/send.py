"""Hands a run's metrics.jsonl on to its tracker, from where the last one stopped. No torch.

    python -m fsdp_jobs.observe.trackers.send RUN_DIR

The agent of the node with rank 0 keeps one such process beside it. The file is the queue: whatever the tracker does,
ranks know nothing of it, and what could not be sent is sent later, in the next life or by hand with this command.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from fsdp_jobs.config.schema import plain_values
from fsdp_jobs.observe.trackers.trackers import Tracker, make_tracker
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.tail import Tail
from fsdp_jobs.run.verdict import Verdict

FAREWELL_S = 10.0  # to send the rest once the agent says that it is over
_TURN_S = 1.0
_LONGEST_WAIT_S = 60.0  # between two tries
_AT_ONCE = 500  # lines
_LONGEST_WHY = 300  # characters of an event; the log has the rest


class Sender:
    """A run and its tracker."""

    def __init__(self, run: RunDir, attempt: int):
        self.run, self.attempt = run, attempt
        self.config = plain_values(run.config)
        self.kind = self.config["tracking"]["kind"]
        self.tracker: Tracker = make_tracker(self.kind)
        self.id, self._tail = None, Tail(run.metrics)
        known = json.loads(run.tracking.read_text()) if run.tracking.exists() else {}
        if known.get("kind") == self.kind:  # else it was another tracker's
            self.id, self._tail.offset = known["id"], known["offset"]
        self._is_open = False
        self._complained = False

    def turn(self) -> bool:
        """Send what is new; False when the tracker did not take it."""
        try:
            if not self._is_open:
                self.id = self.tracker.open(self.run, self.config, self.id)
                self._is_open = True
                self._remember()
            while records := self._send_some():
                if len(records) < _AT_ONCE:
                    break
        except ImportError:
            raise
        except Exception as e:  # whatever a client may raise
            self._complain(f"{type(e).__name__}: {e}")
            return False
        self._complained = False
        return True

    def _send_some(self) -> list[dict[str, Any]]:
        before = self._tail.offset
        records = list(islice(self._tail.records(), _AT_ONCE))
        try:
            if records:
                self.tracker.log(records)
        except BaseException:
            self._tail.offset = before
            raise
        if records:
            self._remember()
        return records

    def end(self, verdict: Verdict | None) -> None:
        """Tell the tracker how the attempt ended."""
        state, reason = "waiting", "" if verdict is None else f"{verdict.verdict}: {verdict.reason}"
        if verdict is not None and verdict.decision == "stop":
            state = {"done": "done", "preempted": "stopped"}.get(verdict.verdict, "failed")
        try:
            self.tracker.end(state, reason)
        except Exception as e:
            self._complain(f"{type(e).__name__}: {e}")

    def _remember(self) -> None:
        write_atomic(self.run.tracking, json.dumps({"kind": self.kind, "id": self.id, "offset": self._tail.offset}))

    def _complain(self, why: str) -> None:
        """Once for each time that the tracker stops taking anything."""
        print(f"WARNING {self.kind} does not take the metrics: {why}", flush=True)
        if not self._complained:
            first = why.splitlines()[0][:_LONGEST_WHY]
            events.record(self.run, self.attempt, events.TrackingFailed(self.kind, first))
        self._complained = True


@contextmanager
def _alone(run: RunDir) -> Iterator[None]:
    """Wait until no other process sends for this run."""
    with (run.path / "tracking.lock").open("w") as lock:
        with suppress(OSError):  # some shared file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def send(run: RunDir, attempt: int, over: threading.Event) -> int:
    """Send until `over`, and then what is left; all at once when it is over already.

    Returns:
        The exit code: 1 when the tracker did not take everything.
    """
    by_hand = over.is_set()
    with _alone(run):
        sender, wait_s = Sender(run, attempt), _TURN_S
        try:
            while not over.is_set():
                wait_s = _TURN_S if sender.turn() else min(2 * wait_s, _LONGEST_WAIT_S)
                over.wait(wait_s)
            while not sender.turn():
                if by_hand:
                    return 1
                time.sleep(_TURN_S)
        except ImportError as e:
            why = f"{e}; pip install 'fsdp_jobs[{sender.kind}]' where the job runs"
            events.record(run, attempt, events.TrackingFailed(sender.kind, why))
            return 1
        sender.end(Verdict.read(run, attempt))
    return 0


def _watch_agent(over: threading.Event) -> None:
    """Standard input ends when the agent closes it or dies; then there are some seconds left."""
    while os.read(0, 1024):
        pass
    over.set()
    time.sleep(FAREWELL_S)
    os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Send what the tracker has not got yet.")
    parser.add_argument("run_dir")
    parser.add_argument("--beside-agent", action="store_true", help="go on until standard input ends")
    args = parser.parse_args()
    run, over = RunDir(args.run_dir), threading.Event()
    if args.beside_agent:
        threading.Thread(target=_watch_agent, args=(over,), daemon=True).start()
    else:
        over.set()
    return send(run, run.last_attempt(), over)


if __name__ == "__main__":
    sys.exit(main())
