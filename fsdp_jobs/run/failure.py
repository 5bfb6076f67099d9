"""One rank's end, as its agent saw it. No torch."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from fsdp_jobs.run.verdict import EXIT_REQUEUE, FINAL_ERRORS

# Errors of a collective whose peer has gone: the rank that raises them is a victim, not the cause.
_PEER_GONE = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (was )?(closed|refused|reset)|timed out|"
    r"socket (closed|timeout)|remote error|ncclRemoteError|ncclSystemError|no route to host|heartbeat",
    re.IGNORECASE,
)

_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|can't allocate memory", re.IGNORECASE)

# Errors of the machine and not of the program.
_HARDWARE = re.compile(r"CUDA error|uncorrectable|\bECC\b|\bXid\b|cudaError|CUDA driver|no CUDA GPUs", re.IGNORECASE)

# Of a checkpoint that other nodes can read, and of gradients that other ranks compute otherwise.
_HERE_ALONE = ("CannotReadHere", "ComputesWrong")


def speaks_of_lost_peer(text: str) -> bool:
    """Whether an error, in torch's and NCCL's words, is about a peer that has gone."""
    return bool(_PEER_GONE.search(text))


@dataclass(frozen=True)
class Failure:
    """One rank's end, as its agent saw it."""

    node: int
    rank: int
    exit_code: int  # negative: killed by that signal
    error: str  # "ExceptionClass: message", or empty
    time: float  # seconds since 1970, by the clock of the coordinator
    step: int = -1  # steps it had done

    @property
    def is_request(self) -> bool:
        """Whether the rank saved and left on request."""
        return self.exit_code == EXIT_REQUEUE

    @property
    def is_victim(self) -> bool:
        return speaks_of_lost_peer(self.error)

    @property
    def is_final(self) -> bool:
        return self.error.startswith(FINAL_ERRORS)

    @property
    def is_out_of_memory(self) -> bool:
        return bool(_OUT_OF_MEMORY.search(self.error))

    @property
    def may_be_the_machines(self) -> bool:
        return self.exit_code < 0 or bool(_HARDWARE.search(self.error)) or self.error.startswith(_HERE_ALONE)

    @property
    def signature(self) -> tuple[int, int, str] | None:
        """Return what is equal for the same failure of the user's code; None for one that is not its own.

        Its own: the rank raised, or ended with an exit code, and not because a peer had gone.
        """
        if not (self.error or self.exit_code > 0) or self.is_victim or self.error.startswith(_HERE_ALONE):
            return None
        return self.step, self.exit_code, re.sub(r"[0-9]+", "0", self.error)  # addresses and sizes differ

    def describe(self) -> str:
        if self.exit_code < 0:
            why = f" ({self.error})" if self.error else ""
            return f"rank {self.rank} on node {self.node} was killed by {_signal_name(-self.exit_code)}{why}"
        return f"rank {self.rank} on node {self.node} failed: {self.error or f'exit code {self.exit_code}'}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name of their own
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
