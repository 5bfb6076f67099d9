"""Run something in a background thread, or poll until a condition holds. No torch."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_SOON_S = 0.02  # others do not notice a wait this short


def wait_until(condition: Callable[[], bool], seconds: float, poll_s: float = 0.2) -> bool:
    """Wait until a condition is met, but no longer than some seconds; return whether it is met."""
    deadline = time.monotonic() + seconds
    while not (is_met := condition()) and time.monotonic() < deadline:
        time.sleep(poll_s)
    return is_met


def start_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread, which ends with its process."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def start_vital_thread(work: Callable[[], object], name: str) -> None:
    """Start a daemon thread that its process cannot do without: an error ends both, and the launcher begins anew."""

    def run() -> None:
        try:
            work()
        except Exception:
            logger.exception("the thread %s has failed", name)
            os._exit(1)

    start_thread(run, name)


def in_thread(ask: Callable[[], _Answer]) -> Future[_Answer]:
    """Call `ask` in a daemon thread: a query to an unreachable cluster may block for half a minute."""
    answer: Future[_Answer] = Future()
    start_thread(partial(_settle, answer, ask), "in_thread")
    return answer


def begin_in(thread: ThreadPoolExecutor, work: Callable[..., _Answer], *args: Any, **details: Any) -> Future[_Answer]:
    """Let a thread do this next; in functions of atexit, where threads begin nothing more, do it now."""
    try:
        return thread.submit(work, *args, **details)
    except RuntimeError as e:
        if not is_refused(e):
            raise
        answer: Future[_Answer] = Future()
        _settle(answer, partial(work, *args, **details))
        return answer


def is_refused(error: RuntimeError) -> bool:
    """Whether a `ThreadPoolExecutor` takes no more work, as in functions of atexit."""
    return "cannot schedule" in str(error)


def _settle(answer: Future[_Answer], ask: Callable[[], _Answer]) -> None:
    try:
        answer.set_result(ask())
    except Exception as e:
        answer.set_exception(e)


class Background:
    """A thread that does one thing after the other for a loop, which must not wait: the file system may hang."""

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(1, name)
        self._newest: Future[Any] | None = None

    def begin(self, work: Callable[..., _Answer], *args: Any, **details: Any) -> Future[_Answer]:
        """Let the thread do this next; short work is done on return, if the thread has nothing else to do."""
        is_free = self._newest is None or self._newest.done()
        self._newest = begun = begin_in(self._thread, work, *args, **details)
        if is_free:
            wait([begun], _SOON_S)
        return begun

    def end(self) -> None:
        """Wait until all of it is done."""
        self._thread.shutdown()
