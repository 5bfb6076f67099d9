"""The program of a job's pods, `coordinator` or `node`, around launchers/attempts.py. No client, no torch.

The coordinator's pod copies the submitted files into the run directory and passes on requests to stop. Both publish
new lines of the run directory's files in their logs, as `@<file>:<offset after the line> <line>`, so that a machine
that cannot mount the claim can mirror it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.launchers import attempts
from fsdp_jobs.launchers.kubernetes.labels import (
    JOB_FILES,
    POD_INFO,
    STOP,
    TERMINATION_LOG,
    TOKEN_FILES,
    ended_early,
    job_files,
    pods_write_here,
)
from fsdp_jobs.launchers.supervisor import patiently
from fsdp_jobs.run import events, log
from fsdp_jobs.run.directory import RunDir, rank_logs
from fsdp_jobs.run.files import write_atomic, write_json
from fsdp_jobs.run.identity import Identity
from fsdp_jobs.run.tail import TIMES, Tail
from fsdp_jobs.run.threads import wait_until
from fsdp_jobs.run.verdict import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, Verdict

_POLL_S = 0.5
_LONGEST_REASON = 2000  # bytes; the kubelet keeps only the last 4,096 of a message
_FILES_S = 3600.0  # how long a node waits for the coordinator's pod to bring the job's files

logger = logging.getLogger(__name__)


def main(role: str, app: str, run_dir: str, *attempts_args: str) -> int:
    """Do the work of a pod and return its exit code.

    Args:
        role: coordinator or node.
        app: name of the submission.
        run_dir: as it is mounted here.
        attempts_args: the rest of the arguments of `launchers.attempts`, which this wraps.
    """
    log.configure()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_REQUEUE))  # until the attempts handle it
    around = coordinate if role == "coordinator" else follow
    return around(RunDir(run_dir), app, [role, run_dir, *attempts_args])


def coordinate(run: RunDir, app: str, argv: Sequence[str]) -> int:
    """Run attempts until the job ends; the verdict goes into the pod's status.

    A job that ends before its files are in the run directory leaves a mark beside it, for the nodes that wait.
    """
    if not patiently(partial(pods_write_here, run, app)):
        if patiently(ended_early(run, app).exists):
            why = f"this pod began so late that the nodes' pods have left: fsdp-jobs resume {run.name}"
            _leave_word(Verdict("infrastructure", "stop", why), -1)
            return EXIT_FAILED
        try:
            patiently(partial(seed, run))
            patiently(partial(write_atomic, run.written_by, app))
        except Exception as e:
            with suppress(OSError):
                ended_early(run, app).touch()
            if not isinstance(e, BadInput):
                raise
            _leave_word(Verdict("user_error", "stop", str(e)), -1)
            return EXIT_FAILED
    with CoordinatorsPublisher(run):
        code = attempts.main(*argv)
    attempt = patiently(run.last_attempt)
    verdict = patiently(partial(Verdict.read, run, attempt))
    if verdict is not None:
        _leave_word(verdict, attempt)
    return code


def _leave_word(verdict: Verdict, attempt: int) -> None:
    """Put a verdict into the pod's status."""
    reason = verdict.reason.encode(errors="ignore")[:_LONGEST_REASON].decode(errors="ignore")
    message = {"verdict": verdict.verdict, "decision": verdict.decision, "reason": reason, "attempt": attempt}
    Path(TERMINATION_LOG).write_text(json.dumps(message, ensure_ascii=False), encoding="utf-8")


def follow(run: RunDir, app: str, argv: Sequence[str]) -> int:
    """Run this node's part of all attempts.

    Returns:
        0 when the job has ended, whatever the verdict, or its files never came; anything else asks Kubernetes for
        another pod.
    """
    if not _files_come(run, app):
        return EXIT_DONE
    node = int(argv[argv.index("--node") + 1])
    since = max(0, run.last_attempt())
    with Publisher(run, [rank_logs(node=node), f"attempts/*/node-{node}/{TIMES}"], since):
        code = attempts.main(*argv)
    verdict = Verdict.read(run, run.last_attempt())
    return EXIT_DONE if verdict is not None and verdict.decision == "stop" else code


def _files_come(run: RunDir, app: str) -> bool:
    """Wait until the coordinator's pod has brought the job's files; False when it never will."""
    if pods_write_here(run, app):
        return True
    logger.info("waiting for the coordinator's pod to bring the job's files to %s", run.path)
    wait_until(lambda: pods_write_here(run, app) or ended_early(run, app).exists(), _FILES_S, _POLL_S)
    if pods_write_here(run, app):
        return True
    logger.error("the coordinator's pod has not brought the job's files: the nodes' pods end")
    with suppress(OSError):
        ended_early(run, app).touch()
    return False


def seed(run: RunDir) -> None:
    """Copy the submitted files into the run directory, unless submission has written them there itself.

    Raises:
        BadInput: the claim has another run of this name; names its owner.

    The first attempt is numbered after those on the claim: the submitting machine may not know all of them.
    """
    token = (Path(TOKEN_FILES) / run.token.name).read_text()
    if run.token.exists() and run.token.read_text() == token:
        return
    identity = Identity.from_file(Path(JOB_FILES) / run.identity.name)
    if identity is not None:
        identity.check(run.identity)
    for file in job_files(run):
        source = Path(JOB_FILES) / file.name
        if source.exists():
            write_atomic(file, source.read_text())
        else:
            file.unlink(missing_ok=True)  # of an earlier submission
    first = max(run.first_attempt(), run.last_attempt() + 1)
    write_json(run.job, {"first_attempt": first, "submission": run.submission})
    run.checkpoints.mkdir(exist_ok=True)
    run.stop_request.unlink(missing_ok=True)
    events.record(run, run.last_attempt(), events.Submitted())
    write_atomic(run.token, token, mode=0o600)


class Publisher(threading.Thread):
    """Publishes in the pod's log what is new in the run directory, until the block is left."""

    def __init__(self, run: RunDir, patterns: Sequence[str], since: int = 0):
        """Publish each line of the files that match; of those under `attempts/` from attempt `since` on."""
        super().__init__(daemon=True)
        self.run_dir, self.patterns, self.since = run, patterns, since
        self._left = threading.Event()
        self._tails: dict[Path, Tail] = {}

    def __enter__(self) -> Publisher:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self.join()

    def run(self) -> None:
        has_left = False
        while not has_left:
            has_left = self._left.wait(_POLL_S)
            try:
                self.publish()
                for tail in self._tails.values() if has_left else ():
                    if rest := tail.unfinished():
                        self.publish_line(tail.path, tail.offset + len(rest), rest)
            except (OSError, ValueError) as e:  # the claim's storage may not answer for a while
                logger.warning("cannot publish, trying again: %s", e)

    def publish(self) -> None:
        """Publish what is new."""
        for pattern in self.patterns:
            for file in sorted(self.run_dir.path.glob(pattern)):
                folder, *rest = file.relative_to(self.run_dir.path).parts
                if folder != "attempts" or (rest[0].isdecimal() and int(rest[0]) >= self.since):
                    tail = self._tails.setdefault(file, Tail(file))
                    for line in tail.lines():
                        self.publish_line(file, tail.offset, line)

    def publish_line(self, file: Path, position: int, line: bytes) -> None:
        name = str(file.relative_to(self.run_dir.path)).encode()
        os.write(sys.stdout.fileno(), b"@%s:%d %s\n" % (name, position, line))  # one write: nothing else gets between


class CoordinatorsPublisher(Publisher):
    """Publishes the run's records and the small files that are replaced as a whole; passes on requests to stop."""

    def __init__(self, run: RunDir):
        super().__init__(run, [run.events.name, run.metrics.name])
        self._published: dict[Path, int] = {}  # whole file -> its time of modification

    def publish(self) -> None:
        super().publish()
        for file in (*self.run_dir.verdicts(), self.run_dir.excluded):
            changed = file.stat().st_mtime_ns if file.exists() else 0
            if changed > self._published.get(file, 0):
                self._published[file] = changed
                self.publish_line(file, changed, file.read_bytes().replace(b"\n", b" "))  # JSON on one line
        # A request to stop from the submitting machine arrives as an annotation of this pod.
        for line in (Path(POD_INFO) / "annotations").read_text().splitlines():
            key, _, value = line.partition("=")
            if key == STOP and not self.run_dir.stop_request.exists():
                write_atomic(self.run_dir.stop_request, json.loads(value))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
