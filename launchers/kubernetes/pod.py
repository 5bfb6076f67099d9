"""The program of a job's pods, around the attempts: `coordinator` or `node`. No client, no torch.

The coordinator's pod brings what was submitted into the run directory and hands on a request to stop. A node's pod
waits until the one it replaces has gone. Both say in their logs what the run directory learns, a line of a file as
`@<file>:<offset after the line> <line>`, so that a machine that cannot mount the claim can follow.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fsdp_jobs.launchers import attempts
from fsdp_jobs.launchers.kubernetes.labels import (
    JOB_FILES,
    POD_INFO,
    STOP,
    TERMINATION_LOG,
    TOKEN_FILES,
    begin,
    first_attempt,
    job_files,
)
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir, write_atomic
from fsdp_jobs.run.tail import TIMES, follow_files
from fsdp_jobs.run.verdict import EXIT_DONE, EXIT_REQUEUE, Verdict

_POLL_S = 0.5
_BEAT_S = 2.0  # how often a node's pod says that it is there
_GONE_S = 6.0  # a pod that has not said so for so long has gone


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The program of a job's pods.")
    parser.add_argument("role", choices=("coordinator", "node"))
    parser.add_argument("app", help="name of the submission")
    parser.add_argument("run_dir", help="as it is mounted here")
    parser.add_argument("where", help="port of the coordinator, or its host:port")
    parser.add_argument("command", nargs="+", help="of the role, after --")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_REQUEUE))  # until the attempts take over
    run = RunDir(args.run_dir)
    if args.role == "coordinator":
        return coordinate(run, args.app, args.where, args.command)
    return be_a_node(run, args.app, args.where, args.command)


def coordinate(run: RunDir, app: str, port: str, command: list[str]) -> int:
    """Attempts until the job ends; the verdict goes into the pod's status."""
    if first_attempt(run, app) is None:
        seed(run)
        begin(run, app)
    first = first_attempt(run, app)
    with Teller(run) as teller:
        teller.files("*.jsonl")
        teller.repeat(teller.tell_whole_files)
        teller.repeat(lambda: _hand_on_stop(run))
        code = attempts.main(["coordinator", str(run.path), port, "--first", str(first), "--", *command])
    verdict = Verdict.read(run, run.last_attempt())
    if verdict is not None:
        said = {"verdict": verdict.verdict, "decision": verdict.decision, "reason": verdict.reason[:2000]}
        Path(TERMINATION_LOG).write_text(json.dumps({**said, "attempt": run.last_attempt()}))
    return code


def be_a_node(run: RunDir, app: str, coordinator: str, command: list[str]) -> int:
    """Attempts as this node. Returns 0 when the job has ended, however; anything else asks for another pod."""
    while (first := first_attempt(run, app)) is None:
        time.sleep(_POLL_S)
    node = command[command.index("--node") + 1]
    with Place(run.submit / f"node-{node}"), Teller(run) as teller:
        teller.files(f"attempts/*/node-{node}/rank-*.log", since=run.last_attempt())
        teller.files(f"attempts/*/node-{node}/{TIMES}", since=run.last_attempt())
        code = attempts.main(["node", str(run.path), coordinator, "--first", str(first), "--", *command])
    verdict = Verdict.read(run, run.last_attempt())
    return EXIT_DONE if verdict is not None and verdict.decision == "stop" else code


def seed(run: RunDir) -> None:
    """Bring what was submitted into the run directory, unless submission has written it there itself."""
    token = (Path(TOKEN_FILES) / run.token.name).read_text()
    if run.token.exists() and run.token.read_text() == token:
        return
    for file in job_files(run):
        source = Path(JOB_FILES) / file.name
        if source.exists():
            write_atomic(file, source.read_text())
        else:
            file.unlink(missing_ok=True)  # of an earlier submission
    run.checkpoints.mkdir(exist_ok=True)
    run.stop_request.unlink(missing_ok=True)
    events.record(run, run.last_attempt(), events.Submitted())
    write_atomic(run.token, token, mode=0o600)


class Place:
    """A node's place in the job, held by one pod: its replacement waits until it has been silent.

    A pod that is being evicted saves for a while, and the cluster may start the next one before it has ended.
    """

    def __init__(self, file: Path):
        self.file, self.life, self._left = file, uuid.uuid4().hex, threading.Event()

    def __enter__(self) -> Place:
        heard, since = "", time.monotonic()
        with suppress(FileNotFoundError):  # the other one has left
            while time.monotonic() - since < _GONE_S:
                if (said := self.file.read_text()) != heard:
                    heard, since = said, time.monotonic()
                time.sleep(_POLL_S)
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._beats.start()
        return self

    def _beat(self) -> None:
        while True:
            self.file.write_text(f"{self.life} {time.time()}")
            if self._left.wait(_BEAT_S):
                self.file.unlink(missing_ok=True)
                return

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._beats.join()


class Teller:
    """Says in the pod's log what is new in the run directory, from threads, until it is left."""

    def __init__(self, run: RunDir):
        self.run = run
        self._left = threading.Event()
        self._threads: list[threading.Thread] = []
        self._told: dict[Path, int] = {}

    def __enter__(self) -> Teller:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        for thread in self._threads:
            thread.join()

    def files(self, pattern: str, since: int = -1) -> None:
        """Tell every line of the files that match; of those under `attempts/` from attempt `since` on."""

        def tell() -> None:
            offsets: dict[Path, int] = {}
            for file, line in follow_files(self.run.path, pattern, lambda: not self._left.is_set()):
                offsets[file] = offsets.get(file, 0) + len(line.encode()) + 1
                name = file.relative_to(self.run.path)
                if name.parts[0] != "attempts" or int(name.parts[1]) >= since:
                    tell_line(f"{name}:{offsets[file]}", line)

        self._start(tell)

    def repeat(self, action: Callable[[], None]) -> None:
        """Do something now, every half second, and once more at the end."""

        def run() -> None:
            while not self._left.wait(_POLL_S):
                action()
            action()

        self._start(run)

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()

    def tell_whole_files(self) -> None:
        """Tell the small files that are replaced as a whole, when they have changed, on one line."""
        for file in (*self.run.path.glob("attempts/*/verdict.json"), self.run.excluded):
            changed = file.stat().st_mtime_ns if file.exists() else 0
            if changed > self._told.get(file, 0):
                self._told[file] = changed
                tell_line(f"{file.relative_to(self.run.path)}:{changed}", json.dumps(json.loads(file.read_text())))


def tell_line(tag: str, line: str) -> None:
    os.write(sys.stdout.fileno(), f"@{tag} {line}\n".encode())  # whole, whatever else writes there


def _hand_on_stop(run: RunDir) -> None:
    """The submit machine's request to save and leave, which comes as an annotation of this pod."""
    for line in (Path(POD_INFO) / "annotations").read_text().splitlines():
        key, _, value = line.partition("=")
        if key == STOP and not run.stop_request.exists():
            write_atomic(run.stop_request, json.loads(value))


if __name__ == "__main__":
    sys.exit(main())
