"""Rows of all runs, kept up to date by a thread, so that no request of a browser waits for a run or a launcher."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_jobs.launchers.base import Description, parse_handle
from fsdp_jobs.launchers.state import State
from fsdp_jobs.observe.answers import row_of
from fsdp_jobs.run.directory import runs_in
from fsdp_jobs.run.table import duration
from fsdp_jobs.submit.overview import Overview, RunSummary, ask_launchers
from fsdp_jobs.submit.submitted import grouped

_LOOK_EVERY_S = 1.0  # at runs; less often where a look takes longer than a quarter of it
_ASK_EVERY_S = 5.0  # each launcher
_PATIENCE_S = 15.0  # after which rows say that their launcher does not answer
_IDLE_S = 30.0  # after the last browser has gone
_CHUNK = 50  # runs that are read before the first rows are shown

logger = logging.getLogger(__name__)


class LauncherAnswers:
    """What launchers said last. Each is asked in a thread of its own, so that none has to wait for another."""

    def __init__(self) -> None:
        self._answers: dict[str, Description] = {}
        self._wanted: dict[str, None] = {}  # handles, in the order of their runs
        self._asking: dict[str, tuple[threading.Thread, float]] = {}  # launcher -> thread, and when it began

    def newest(self, handles: Sequence[str]) -> Mapping[str, Description]:
        """Return handle -> what its launcher said last, and have it asked about these jobs next time."""
        self._wanted |= dict.fromkeys(handles)
        return self._answers

    def ask_again(self) -> None:
        """Ask every launcher whose turn it is about all jobs wanted since the last call; wait for none."""
        for launcher, handles in grouped(self._wanted, lambda handle: parse_handle(handle)[0]).items():
            thread, began = self._asking.get(launcher, (threading.Thread(), -math.inf))
            waited_s = time.monotonic() - began
            if thread.is_alive() and waited_s > _PATIENCE_S:
                self._note_silence(handles, f"has not answered for {duration(waited_s)}")
            elif not thread.is_alive() and waited_s > _ASK_EVERY_S:
                thread = threading.Thread(target=self._ask, args=(handles,), daemon=True)
                self._asking[launcher] = (thread, time.monotonic())
                thread.start()
        self._wanted = {}

    def _ask(self, handles: Sequence[str]) -> None:
        try:
            self._answers |= ask_launchers(handles)
        except Exception as e:  # whatever a cluster's client raises
            logger.warning("a launcher does not answer: %s", e)
            self._note_silence(handles, f"does not answer: {' '.join(str(e).split())}")

    def _note_silence(self, handles: Sequence[str], why: str) -> None:
        self._answers |= {h: Description(parse_handle(h)[2], State.SILENT, f"its launcher {why}") for h in handles}


class LiveRows:
    """The runs under a folder, summed up again and again while browsers watch."""

    def __init__(self, folder: str):
        self.folder = folder
        self.rows: dict[str, dict[str, Any]] = {}  # newest run first; replaced as a whole, with unchanged rows kept
        self.summaries: list[RunSummary] = []  # the same, as of the newest look
        self.is_complete = False  # all runs have been read once
        self.trouble = ""  # why the folder cannot be read
        self.watched_at = time.monotonic()  # a browser has read the rows
        self._launchers = LauncherAnswers()
        self._overview = Overview(self._launchers.newest)
        threading.Thread(target=self._keep_looking, daemon=True).start()

    def _keep_looking(self) -> None:
        while True:
            began = time.monotonic()
            if began - self.watched_at < _IDLE_S:
                try:
                    self._look()
                    self.trouble = ""
                except Exception as e:  # the next look may succeed
                    logger.warning("%s: %s", self.folder, e)
                    self.trouble = str(e)
            time.sleep(max(_LOOK_EVERY_S, 4 * (time.monotonic() - began)))

    def _look(self) -> None:
        runs, found, summaries = runs_in(self.folder)[::-1], dict[str, dict[str, Any]](), list[RunSummary]()
        for first in range(0, len(runs), _CHUNK):
            for summary in self._overview.look(runs[first : first + _CHUNK]):
                summaries.append(summary)
                row = row_of(summary)
                before = self.rows.get(summary.run)
                found[summary.run] = before if before == row else row
            if not self.is_complete:
                self.rows = dict(found)
        self.rows, self.summaries, self.is_complete = found, summaries, True
        self._launchers.ask_again()
