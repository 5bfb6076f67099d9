"""Query something in a background thread. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Answer = TypeVar("_Answer")


def beside(ask: Callable[[], _Answer]) -> Future[_Answer]:
    """Call `ask` in a daemon thread: a query to an unreachable cluster may block for half a minute."""
    answer: Future[_Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as e:
            answer.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return answer
