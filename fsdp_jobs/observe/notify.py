"""Telling somebody that an attempt has ended: a command, a webhook. No torch.

It is done beside the process that judged, which does not wait for it but at its own end, and no longer than 10 s.
"""

from __future__ import annotations

import json
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
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.events import Verdict, record_event

_WITHIN_S = 10.0
REQUEUE = "requeue"  # the word of notify.on for verdicts after which the job goes on


def notify(run: RunDir, attempt: int, verdict: Verdict) -> None:
    """Tell of a verdict as the run's configuration says; once an attempt and decision, whoever judged."""
    settings = _settings(run)
    wanted = REQUEUE if verdict.decision == "requeue" else verdict.verdict
    if not (settings.get("command") or settings.get("webhook")) or wanted not in settings["on"]:
        return
    try:
        (run.attempt(attempt) / f"notified-{verdict.decision}").touch(exist_ok=False)
    except OSError:  # it has been told; or nothing can be written, and so nobody knows whether it has
        return
    said = {"run": run.name, "verdict": verdict.verdict, "decision": verdict.decision, "reason": verdict.reason}
    said |= {"attempt": str(attempt)}
    ways: list[tuple[str, Callable[[float], None]]] = []
    if settings["command"]:
        ways.append(("command", lambda until: _command(settings["command"], said, until)))
    if settings["webhook"]:
        ways.append(("webhook", lambda until: _webhook(settings["webhook"], run, said)))
    # No daemon: the interpreter waits for it before it exits, and it gives up by itself.
    threading.Thread(target=_tell, args=(run, attempt, ways), name="notify").start()


def _settings(run: RunDir) -> dict[str, Any]:
    """The values of the group `notify`; empty for a run from before there was one."""
    if not run.config.exists():
        return {}
    settings: dict[str, Any] = plain_values(run.config).get("notify") or {}
    return settings


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
        print(f"WARNING notify.{name}: {why}", file=sys.stderr, flush=True)
        record_event(run, "notify_failed", attempt, way=name, why=why)


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
    variables = {f"FSDP_JOBS_{key.upper()}": value for key, value in said.items()}
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
