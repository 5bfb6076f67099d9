"""Send a run's metrics.jsonl to its tracker, starting where the last sender stopped. No torch.

    python -m fsdp_jobs.observe.trackers.send RUN_DIR

The agent of the node with rank 0 runs one such process. The file is the queue: training never waits for the tracker,
and lines that could not be sent are sent later, after a restart or by this command.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from itertools import islice

from fsdp_jobs.config.schema import plain_values
from fsdp_jobs.node.tracker import FLUSH_S
from fsdp_jobs.observe.trackers.trackers import TRACKERS
from fsdp_jobs.run import events, log
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import lock, read_json, write_json
from fsdp_jobs.run.state import State
from fsdp_jobs.run.tail import Tail
from fsdp_jobs.run.verdict import Verdict

_EVERY_S = 1.0
_MAX_BACKOFF_S = 60.0
_BATCH = 500  # lines
_MAX_REASON = 300  # characters of an event; the log has the rest

logger = logging.getLogger(__name__)


class Sender:
    """A run and its tracker."""

    def __init__(self, run: RunDir, attempt: int):
        self.run, self.attempt = run, attempt
        self.config = plain_values(run.config)
        self.kind = self.config["tracking"]["kind"]
        self._tracker = TRACKERS[self.kind]()
        known = read_json(run.tracking)
        if known.get("kind") != self.kind:  # of another tracker
            known = {}
        self._id: str | None = known.get("id")
        self._offset: int = known.get("offset", 0)  # bytes of metrics.jsonl already sent
        self._ends = [self._offset]  # of batches, from the last that the client has surely written
        self._is_open = self._has_complained = False

    def flush(self) -> bool:
        """Send new lines; return False if the tracker does not accept them.

        Raises:
            ImportError: the tracker's client is not installed.
        """
        try:
            if not self._is_open:
                self._id = self._tracker.open(self.run, self.config, self._id)
                self._save()  # first, so that the next try continues this run whatever fails now
                self._tracker.describe(self.config)
                self._is_open = True
            tail = Tail(self.run.metrics, self._offset)
            while records := list(islice(tail.records(), _BATCH)):
                self._tracker.log(records)
                self._offset = tail.offset
                self._ends.append(tail.offset)
                while len(self._ends) > 1 and self._ends[1] <= tail.offset - self._tracker.unwritten:
                    del self._ends[0]
                self._save()
        except ImportError:
            raise
        except Exception as e:  # clients of trackers raise any exception
            self._complain(e)
            return False
        self._has_complained = False
        return True

    def end(self, verdict: Verdict | None) -> None:
        """Report to the tracker how the attempt ended."""
        has_ended = verdict is not None and verdict.decision == "stop"
        reason = "" if verdict is None else f"{verdict.verdict}: {verdict.reason}"
        try:
            self._tracker.end(State.from_verdict(verdict) if has_ended else "waiting", reason)
            self._ends = [self._offset]
            self._save()
        except Exception as e:
            self._complain(e)

    def _save(self) -> None:
        write_json(self.run.tracking, {"kind": self.kind, "id": self._id, "offset": self._ends[0]})

    def _complain(self, error: Exception) -> None:
        """Log every failure; record the first one since the last success."""
        why = f"{type(error).__name__}: {error}"
        logger.warning("%s does not take the metrics: %s", self.kind, why)
        if not self._has_complained:
            first = why.splitlines()[0][:_MAX_REASON]
            events.record(self.run, self.attempt, events.TrackingFailed(self.kind, first))
        self._has_complained = True


def send(run: RunDir, attempt: int, over: threading.Event) -> int:
    """Send until `over` is set, then send the rest; if it is set from the start, stop at the first failure.

    Returns:
        The exit code: 1 if the tracker did not accept everything.
    """
    is_by_hand = over.is_set()
    with run.tracking_lock.open("w") as file:
        lock(file)  # one sender per run
        sender, wait_s = Sender(run, attempt), _EVERY_S
        try:
            while not over.is_set():
                wait_s = _EVERY_S if sender.flush() else min(2 * wait_s, _MAX_BACKOFF_S)
                over.wait(wait_s)
            while not sender.flush():
                if is_by_hand:
                    return 1
                time.sleep(_EVERY_S)
        except ImportError as e:
            why = f"{e}; pip install 'fsdp_jobs[{sender.kind}]' where the job runs"
            events.record(run, attempt, events.TrackingFailed(sender.kind, why))
            return 1
        sender.end(Verdict.read(run, attempt))
    return 0


def _watch_agent(over: threading.Event) -> None:
    """Set `over` when standard input ends, because the agent has closed it or died; exit some seconds later."""
    while os.read(0, 1024):
        pass
    over.set()
    time.sleep(FLUSH_S)
    os._exit(1)


def main() -> int:
    log.configure()
    parser = argparse.ArgumentParser(description="Send what the tracker does not have yet.")
    parser.add_argument("run_dir")
    parser.add_argument("--beside-agent", action="store_true", help="go on until standard input ends")
    args = parser.parse_args()
    run, over = RunDir(args.run_dir), threading.Event()
    if not run.config.exists() or plain_values(run.config)["tracking"]["kind"] not in TRACKERS:
        parser.error(f"{run.path}: no run with tracking=mlflow or tracking=wandb is there")
    if args.beside_agent:
        threading.Thread(target=_watch_agent, args=(over,), daemon=True).start()
    else:
        over.set()
    return send(run, run.last_attempt(), over)


if __name__ == "__main__":
    sys.exit(main())
