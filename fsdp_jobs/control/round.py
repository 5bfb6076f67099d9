"""What the coordinator knows of a round. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_jobs.run.failure import Failure
from fsdp_jobs.run.rank_state import Request

_LONG_ROUND_S = 600.0


def is_progress(began_at: float, failed_at: float, saves: bool) -> bool:
    """Whether a round in which a program saved nothing was so long that it counts as progress."""
    return not saves and failed_at - began_at > _LONG_ROUND_S


@dataclass
class Round:
    """State of the newest round; before the first round, `running` is False."""

    number: int = -1
    term: int = 0  # the number over all attempts of the run
    size: int = 0  # nodes
    shard_group: int = 0  # ranks; 0 before the first round
    hosts: dict[int, str] = field(default_factory=dict)  # node -> machine
    head: str = ""  # id of its first node's agent, which chooses the address where its ranks meet
    began_at: float = 0.0
    first_step: int = 0  # steps done when it began
    running: bool = False
    has_met: bool = False  # its nodes know where its ranks meet
    is_adopted: bool = False  # it began under an earlier coordinator
    has_reports: bool = False  # some rank has reported a step
    has_trained: bool = False  # some rank has completed a step since it was restored
    saves: bool = False  # some rank can save checkpoints
    has_gaps: bool = False  # ranks of some node have ended, so the others cannot complete a step
    has_cuts: bool = False  # a node was lost because its machine could not be reached
    is_in_doubt: bool = False  # a node fell silent, but the coordinator heard no other machine either
    requested: Request = Request.NONE
    parked_for: str = ""  # why it was parked; empty: nodes join or leave
    leaving: set[int] = field(default_factory=set)  # nodes that received a stop signal
    is_over: bool = False  # it ended as planned: all ranks had parked, or none reports steps
    not_needed: set[str] = field(default_factory=set)  # ids of waiting agents that would not add a usable node
    broken_at: float | None = None  # when it broke; None again once it is judged
    failed_at: float = 0.0  # when the failure that broke it happened, or its ranks stopped advancing
    broken_why: str = ""
    failures: list[Failure] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)  # node -> how
    starved: set[int] = field(default_factory=set)  # nodes lost because their memory limit was reached
    ended: dict[int, int] = field(default_factory=dict)  # node -> last step of ranks that ended while others trained
    left: int = 0  # nodes that disconnected after their ranks had ended
    culprit: int | None = None  # node that held up the others, was the only one lost, or has wrong state
    excludes: bool = False  # exclude the culprit's machine at once
    has_stalled: bool = False
    stood_still: bool = False  # the coordinator did not run for longer than a lease, as in a suspended job

    @property
    def was_long(self) -> bool:
        """Whether its length counts as progress."""
        return is_progress(self.began_at, self.failed_at, self.saves)

    @property
    def was_planned(self) -> bool:
        """Whether it broke because it was parked; failures that leaving nodes caused do not count."""
        if self.requested is not Request.PARK or self.has_stalled:
            return False
        failed = [f for f in self.failures if not f.is_request and f.node not in self.leaving]
        if self.leaving:
            failed = [f for f in failed if not (f.is_victim or f.has_aborted)]
        return self.is_over or not (failed or self.lost.keys() - self.leaving)

    @property
    def stops_by_signal(self) -> bool:
        """Whether a requested stop can reach the ranks only as a signal, because none has ever reported."""
        return self.requested is Request.STOP and not self.has_reports
