"""Send the notification that an attempt has ended or replicas differ, by a command or a webhook. No torch.

    python -m fsdp_jobs.observe.notify RUN_DIR ATTEMPT [CORRUPTION]

`run/verdict.py` starts this process; the starting process waits for it only at its own exit. It gives up after 10 s.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

from fsdp_jobs.config.schema import plain_values
from fsdp_jobs.run import events, log
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import NOTIFY_PREFIX
from fsdp_jobs.run.record import JsonObject
from fsdp_jobs.run.threads import in_thread
from fsdp_jobs.run.verdict import Verdict

_TIMEOUT_S = 10.0
_COMMAND_TIMEOUT_S = _TIMEOUT_S - 0.5  # leaves time to record its failure

logger = logging.getLogger(__name__)


class NotifyError(Exception):
    """A notification failed; the message is for the user."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Treat a webhook that has moved as a failure: urllib would request the new address without the message."""

    def redirect_request(self, req: Any, fp: Any, code: int, *place: Any) -> urllib.request.Request | None:
        return None if code == HTTPStatus.MOVED_PERMANENTLY else super().redirect_request(req, fp, code, *place)


def notify(run: RunDir, attempt: int, verdict: Verdict) -> None:
    """Send a notification as configured: of a verdict once per attempt and decision, whichever process judged."""
    settings = plain_values(run.config)["notify"]
    if verdict.verdict != "corruption":  # each finding of corruption is notified
        try:
            run.notified(attempt, verdict.decision).touch(exist_ok=False)
        except OSError:  # already notified; or nothing can be written, so that this is unknown
            return
    facts = {
        "run": run.name,
        "attempt": attempt,
        "verdict": verdict.verdict,
        "decision": verdict.decision,
        "reason": verdict.reason,
    }
    tried = {way: in_thread(partial(_WAYS[way], settings[way], run, facts)) for way in _WAYS if settings[way]}
    wait(tried.values(), _TIMEOUT_S)
    for way, outcome in tried.items():
        if why := _failure_of(outcome):
            logger.warning("notify.%s: %s", way, why)
            events.record(run, attempt, events.NotifyFailed(way=way, why=why))


def _failure_of(outcome: Future[None]) -> str:
    """Describe the failure without the URL, a secret that urllib's messages may contain; empty: it succeeded."""
    if not outcome.done():
        return f"not done within {_TIMEOUT_S:.0f} s"
    error = outcome.exception()
    if error is None:
        return ""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError | TimeoutError | ConnectionError):
        return f"the server does not answer: {getattr(error, 'reason', None) or type(error).__name__}"
    return str(error) if isinstance(error, NotifyError) else type(error).__name__


def _run_command(command: str, _: RunDir, facts: JsonObject) -> None:
    variables = {f"{NOTIFY_PREFIX}{key.upper()}": str(value) for key, value in facts.items()}
    process = subprocess.Popen(
        command,
        shell=True,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
    )
    try:
        exit_code = process.wait(_COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise NotifyError(f"killed: it had not ended after {_TIMEOUT_S:.0f} s") from None
    if exit_code:
        raise NotifyError(f"ended with {exit_code}")


def _post(webhook: str, run: RunDir, facts: JsonObject) -> None:
    variable = webhook.removeprefix("env:")
    url = os.environ.get(variable)
    if not url:
        raise NotifyError(f"{variable} is not in the environment of {os.uname().nodename}, which gave the verdict")
    if not url.startswith(("http://", "https://")):
        raise NotifyError(f"{variable} holds no address that begins with https:// or http://")
    text = f"{run.name}: {facts['verdict']}, {facts['decision']}: {facts['reason']} (attempt {facts['attempt']})"
    content = {**facts, "handle": run.handle, "text": text}
    headers = {"Content-Type": "application/json", "User-Agent": "fsdp_jobs"}
    request = urllib.request.Request(url, json.dumps(content).encode(), headers)
    with urllib.request.build_opener(_Redirects).open(request, timeout=_TIMEOUT_S):
        pass


_WAYS: dict[str, Callable[[str, RunDir, JsonObject], None]] = {"command": _run_command, "webhook": _post}


def main(run_dir: str, attempt: str, corruption: str = "") -> None:
    log.configure()
    run = RunDir(run_dir)
    verdict = Verdict("corruption", "report", corruption) if corruption else Verdict.read(run, int(attempt))
    if verdict is not None:
        notify(run, int(attempt), verdict)


if __name__ == "__main__":
    main(*sys.argv[1:])
