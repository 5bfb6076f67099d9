"""Questions that nobody has to wait for. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Answer = TypeVar("_Answer")


def beside(ask: Callable[[], _Answer]) -> Future[_Answer]:
    """Ask in a thread, which this process may end without: a cluster that is away can take half a minute to say so."""
    answer: Future[_Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as e:
            answer.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return answer
