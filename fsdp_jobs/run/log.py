"""Configure the logging of processes that outlive a command: one format, on stderr. No torch."""

from __future__ import annotations

import logging


def configure() -> None:
    """Send every logger's messages to stderr with time, level and name. For the main of a daemon."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def take_over(library: str) -> None:
    """Log a library's messages like ours: to show a traceback, torch's own format imports its compiler for seconds."""
    logging.getLogger(library).handlers = logging.getLogger().handlers
