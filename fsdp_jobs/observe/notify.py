"""Notify somebody that an attempt has ended, by a command or a webhook: `python -m ... RUN_DIR ATTEMPT`. No torch.

`Verdict.close` starts this process, and waits for it only at its own exit. It gives up after 10 s.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fsdp_jobs.config.schema import plain_values
from fsdp_jobs.run import events, log
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import NOTIFY_PREFIX
from fsdp_jobs.run.verdict import Verdict

_WITHIN_S = 10.0

logger = logging.getLogger(__name__)


def notify(run: RunDir, attempt: int, verdict: Verdict) -> None:
    """Notify of a verdict as the run's configuration says; once per attempt and decision, whoever judged."""
    settings: dict[str, Any] = plain_values(run.config)["notify"]
    try:
        (run.attempt(attempt) / f"notified-{verdict.decision}").touch(exist_ok=False)
    except OSError:  # notified before; or nothing can be written, so nobody knows whether it was
        return
    said = {"run": run.name, "verdict": verdict.verdict, "decision": verdict.decision, "reason": verdict.reason}
    said |= {"attempt": str(attempt)}
    ways: list[tuple[str, Callable[[float], None]]] = []
    if settings["command"]:
        ways.append(("command", lambda until: _command(settings["command"], said, until)))
    if settings["webhook"]:
        ways.append(("webhook", lambda until: _webhook(settings["webhook"], run, said)))
    _tell(run, attempt, ways)


def _tell(run: RunDir, attempt: int, ways: list[tuple[str, Callable[[float], None]]]) -> None:
    until = time.monotonic() + _WITHIN_S
    failures: dict[str, str] = {}

    def try_way(name: str, way: Callable[[float], None]) -> None:
        try:
            way(until)
            failures.pop(name)
        except Exception as e:
            failures[name] = _what_failed(e)

    threads = []
    for name, way in ways:
        failures[name] = f"not done within {_WITHIN_S:.0f} s"
        threads.append(threading.Thread(target=try_way, args=(name, way), name=f"notify-{name}", daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    for name, why in dict(failures).items():
        logger.warning("notify.%s: %s", name, why)
        events.record(run, attempt, events.NotifyFailed(way=name, why=why))


def _what_failed(error: Exception) -> str:
    """In words that do not hold the URL: urllib's do now and then."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError | TimeoutError | ConnectionError):
        return f"the server does not answer: {getattr(error, 'reason', None) or type(error).__name__}"
    return str(error) if isinstance(error, _Failed) else type(error).__name__


class _Failed(Exception):
    """The message is for the user."""


def _command(command: str, said: dict[str, str], until: float) -> None:
    variables = {f"{NOTIFY_PREFIX}{key.upper()}": value for key, value in said.items()}
    process = subprocess.Popen(
        command,
        shell=True,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=sys.stderr,
        start_new_session=True,
    )
    try:
        exit_code = process.wait(max(0.1, until - 0.5 - time.monotonic()))
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise _Failed(f"killed: it had not ended after {_WITHIN_S:.0f} s") from None
    if exit_code:
        raise _Failed(f"ended with {exit_code}")


def _webhook(webhook: str, run: RunDir, said: dict[str, str]) -> None:
    variable = webhook.removeprefix("env:")
    url = os.environ.get(variable)
    if not url:
        raise _Failed(f"{variable} is not in the environment of {os.uname().nodename}, where the verdict was given")
    text = f"{said['run']}: {said['verdict']}, {said['decision']}: {said['reason']} (attempt {said['attempt']})"
    content = {**said, "attempt": int(said["attempt"]), "handle": run.read_job().get("handle", ""), "text": text}
    request = urllib.request.Request(
        url, json.dumps(content).encode(), {"Content-Type": "application/json", "User-Agent": "fsdp_jobs"}
    )
    with urllib.request.urlopen(request, timeout=_WITHIN_S):
        pass


def main(run_dir: str, attempt: str) -> None:
    log.configure()
    run = RunDir(run_dir)
    verdict = Verdict.read(run, int(attempt))
    if verdict is not None:
        notify(run, int(attempt), verdict)


if __name__ == "__main__":
    main(*sys.argv[1:])
