"""Describe the end of a rank, as its agent observed it. No torch."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from fsdp_jobs.run.verdict import EXIT_REQUEUE, FINAL_ERRORS

# Errors of a collective that has lost a peer: the rank that raises them is a victim, not the cause.
_PEER_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (was )?(closed|refused|reset)|(?<!DataLoader )timed out|"
    r"before timing out|wait timeout|socket (closed|timeout)|remote error|remote process exited|ncclRemoteError|"
    r"ncclSystemError|unhandled system error|communicator was aborted|no route to host|heartbeat",
    re.IGNORECASE,
)

# Classes of such errors. A program's own requests time out as TimeoutError, and its own pipes break.
_OF_TORCH = re.compile(r"RuntimeError|\bDist\w*Error")

_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|can't allocate memory", re.IGNORECASE)

# A terminal's control sequences: colours, cursor movements, bells.
CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0e-\x1f\x7f]")

# A message with another process's traceback, and the error at its end.
_RAISED_ELSEWHERE = re.compile(
    r"(?s:.*)Traceback \(most recent call last\):\n(?P<inner>[ \t]+).*\n(?:(?P=inner).*\n|\n)*\s*(?P<error>\S.*)"
)
_RULE = re.compile(r"[=-]{9,}")  # a line across the page

# Errors of the machine, not of the program.
_HARDWARE = re.compile(r"CUDA error|uncorrectable|\bECC\b|\bXid\b|cudaError|CUDA driver|no CUDA GPUs", re.IGNORECASE)

# CUDA's errors that a program causes on a sound machine, too.
_OF_PROGRAM = re.compile(
    r"device-side assert|illegal memory access|misaligned address|invalid|no kernel image|not supported",
    re.IGNORECASE,
)

# How long a rank waited in a collective or for a store before that timed out, as Gloo, NCCL and torch's store say it.
_WAITED = re.compile(r"(?:waiting|ran for|after) (\d+) ?(ms|milliseconds|seconds)\b")

# Raised for a checkpoint that only this node cannot read, and for gradients that only this rank computes differently.
_HERE_ALONE = ("CannotReadHere", "ComputesWrong")


def reports_lost_peer(text: str) -> bool:
    """Whether an error message of torch or NCCL reports a lost peer."""
    return bool(_PEER_GONE.search(text))


def waited_s(message: str) -> float:
    """Return the seconds that a rank waited for something that then timed out; 0 if the message does not say."""
    return max((float(n) / (1 if unit == "seconds" else 1000) for n, unit in _WAITED.findall(message)), default=0.0)


def summary(message: str) -> str:
    """Return an error's first line and, if another line says the cause, that line; without control sequences.

    Such a line reports a lost peer, ends the traceback of another process, such as a DataLoader's worker, or follows a
    first line that ends with a colon.
    """
    message = _RULE.sub("", CONTROL.sub("", message))
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    raised = _RAISED_ELSEWHERE.match(message)
    rest = [raised["error"]] if raised else lines[1:2] if lines[0].endswith(":") else []
    rest = [*filter(reports_lost_peer, lines), *rest][:1]
    if not rest or rest[0] == lines[0]:
        return lines[0].removesuffix(":")[:500]
    return f"{lines[0].rstrip('.:')[:250]}: {rest[0][:250]}"


@dataclass(frozen=True)
class Failure:
    """The end of a rank, as its agent observed it."""

    node: int
    rank: int
    exit_code: int  # negative: killed by that signal
    error: str  # "ExceptionClass: message", or empty
    time: float  # seconds since 1970, by the clock of the coordinator
    step: int = -1  # steps it had done
    waited_s: float = 0.0  # in a collective that then timed out
    last_line: str = ""  # of its output, if it exited without an exception

    @property
    def is_request(self) -> bool:
        """Whether the rank saved and exited on request."""
        return self.exit_code == EXIT_REQUEUE

    @property
    def is_victim(self) -> bool:
        return bool(_OF_TORCH.search(self.error)) and reports_lost_peer(self.error)

    @property
    def has_aborted(self) -> bool:
        """Whether it ended by SIGABRT without an exception, as NCCL's watchdog ends ranks on all nodes."""
        return self.exit_code == -signal.SIGABRT and not self.error

    @property
    def is_final(self) -> bool:
        return self.error.startswith(FINAL_ERRORS)

    @property
    def is_out_of_memory(self) -> bool:
        return bool(_OUT_OF_MEMORY.search(self.error))

    @property
    def problem(self) -> str:
        """What several nodes may report alike: the error, or only its class if its message is about one machine."""
        return next((kind for kind in _HERE_ALONE if self.error.startswith(kind)), self.error)

    @property
    def may_be_machine_fault(self) -> bool:
        if self.is_out_of_memory:
            return False
        is_of_hardware = _HARDWARE.search(self.error) is not None and not _OF_PROGRAM.search(self.error)
        return self.exit_code < 0 or is_of_hardware or self.problem in _HERE_ALONE

    @property
    def signature(self) -> tuple[int, int | str]:
        """Return a key that is equal for repetitions of one failure."""
        return self.step, re.sub(r"[0-9]+", "0", self.error) or self.exit_code  # addresses and sizes differ

    def describe(self) -> str:
        rank, reason = f"rank {self.rank} on node {self.node}", self.error or self.last_line
        why = f" ({reason})" if reason else ""
        if self.is_request:
            return f"{rank} left with exit code {self.exit_code}, to be started again{why}"
        if self.exit_code < 0:
            return f"{rank} was killed by {_signal_name(-self.exit_code)}{why}"
        return f"{rank} failed: {self.error or f'exit code {self.exit_code}{why}'}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name of their own
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
