"""Keep the rows of all runs up to date in a thread, so that no browser's request waits for a run or a launcher."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from fsdp_jobs.launchers.base import Description
from fsdp_jobs.observe.answers import row_of
from fsdp_jobs.run.directory import runs_in
from fsdp_jobs.run.record import JsonObject
from fsdp_jobs.run.state import State
from fsdp_jobs.run.table import duration
from fsdp_jobs.run.threads import in_thread, start_thread, wait_until
from fsdp_jobs.submit.overview import Overview, RunSummary
from fsdp_jobs.submit.submitted import by_launcher, describe

_LOOK_EVERY_S = 1.0  # at runs; less often if a look takes longer than a quarter of this
_ASK_EVERY_S = 5.0  # each launcher
_PATIENCE_S = 15.0  # after which rows say that their launcher does not answer
_IDLE_S = 150.0  # after the last browser or Prometheus has asked
_READ_S = 8.0  # how long a request of Prometheus waits for a new reading of the runs; its default timeout is 10 s
_CHUNK = 50  # number of runs read before the first rows are shown

logger = logging.getLogger(__name__)


class LauncherAnswers:
    """The newest answers of launchers. Each is queried in its own thread, so that none waits for another."""

    def __init__(self) -> None:
        self._answers: dict[str, Description] = {}
        self._wanted: dict[str, None] = {}  # handles, in the order of their runs
        self._asking: dict[str, tuple[Future[None], float]] = {}  # launcher -> its query, and the time of it

    def newest(self, handles: Sequence[str]) -> Mapping[str, Description]:
        """Return handle -> its launcher's newest answer, and include these jobs in the next query."""
        self._wanted |= dict.fromkeys(handles)
        return self._answers

    def forget(self) -> None:
        """Drop all answers, because nobody has watched for long."""
        self._answers = {}

    def ask_again(self) -> None:
        """Query every launcher that is due about all jobs requested since the last call, without waiting for it."""
        for launcher, handles in by_launcher(self._wanted).items():
            question, began = self._asking.get(launcher, (None, -math.inf))
            waited_s = time.monotonic() - began
            is_asked = question is not None and not question.done()
            if is_asked and waited_s > _PATIENCE_S:
                silent = Description(State.SILENT, f"its launcher has not answered for {duration(waited_s)}")
                self._answers |= dict.fromkeys(handles, silent)
            elif not is_asked and waited_s > _ASK_EVERY_S:
                self._asking[launcher] = (in_thread(partial(self._ask, handles)), time.monotonic())
        self._wanted = {}

    def _ask(self, handles: Sequence[str]) -> None:
        self._answers |= describe(handles)


class LiveRows:
    """Summaries of the runs under a folder, updated while browsers watch."""

    def __init__(self, folder: str):
        self.folder = folder
        self.rows: dict[str, JsonObject] = {}  # newest run first; replaced as a whole, keeping unchanged rows
        self.summaries: list[RunSummary] | None = None  # of the same runs, while someone watches
        self.is_complete = False  # all runs have been read once
        self.trouble = ""  # why the folder cannot be read
        self.watched_at = time.monotonic()  # when a browser last read the rows
        self._looks = 0  # since someone watches
        self._launchers = LauncherAnswers()
        self._overview = Overview(self._launchers.newest)
        start_thread(self._keep_looking, "live")

    def fresh(self) -> list[RunSummary] | None:
        """Return the summaries once they are up to date; None if the runs are not read in time."""
        self.watched_at = time.monotonic()
        wait_until(lambda: self.summaries is not None, _READ_S)
        return self.summaries

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
            else:
                self.summaries, self._looks = None, 0
                self._launchers.forget()
            time.sleep(max(_LOOK_EVERY_S, 4 * (time.monotonic() - began)))

    def _look(self) -> None:
        runs, found, summaries = runs_in(self.folder)[::-1], dict[str, JsonObject](), list[RunSummary]()
        for first in range(0, len(runs), _CHUNK):
            for summary in self._overview.look(runs[first : first + _CHUNK]).values():
                summaries.append(summary)
                row = row_of(summary)
                before = self.rows.get(summary.run)
                found[summary.run] = before if before == row else row
            if not self.is_complete:
                self.rows = dict(found)
        self.rows, self.is_complete = found, True
        if self._looks:  # the first look asks the launchers
            self.summaries = summaries
        self._looks += 1
        self._launchers.ask_again()
