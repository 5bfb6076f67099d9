"""Do something in a background thread. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Answer = TypeVar("_Answer")


def start_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread, which ends with its process."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def beside(ask: Callable[[], _Answer]) -> Future[_Answer]:
    """Call `ask` in a daemon thread: a query to an unreachable cluster may block for half a minute."""
    answer: Future[_Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as e:
            answer.set_exception(e)

    start_thread(run, "beside")
    return answer
