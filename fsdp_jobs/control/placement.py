"""The connected agents: when they form a round, and which ranks each of them gets. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.resolve import accelerator, most_nodes, ranks_per_node
from fsdp_jobs.config.schema import ElasticConfig, JobConfig
from fsdp_jobs.plan.plan import Plan, make_plan
from fsdp_jobs.plan.remedies import remedies
from fsdp_jobs.plan.shape_client import shape_of
from fsdp_jobs.plan.shapes import ModelShape
from fsdp_jobs.plan.sources import from_kubernetes, from_yaml
from fsdp_jobs.plan.topology import Node, Topology
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.messages import Agent, Beat, Message
from fsdp_jobs.run.rank_state import Phase
from fsdp_jobs.run.threads import Background

_FULL = 0.9  # share of its memory limit
_REJOIN_S = 0.2  # the join window after the first round
_RECONNECT_S = 1.0  # the same after a restart of the coordinator: agents reconnect every 0.2 s
_REPLACEMENT_S = 60.0  # most to wait for nodes if a machine is excluded: the time a replacement takes


@dataclass
class ConnectedAgent(Agent):
    """One connected agent."""

    send: Callable[[Message], None]
    drop: Callable[[], None]
    heard: float  # monotonic time of its last sign of life
    is_away: bool = False  # it announced that it closes this connection without exiting
    is_beside: bool = False  # on the coordinator's machine, where a network cut does not separate them
    is_unreachable: bool = False  # its machine has acknowledged no packets for a while
    is_leaving: bool = False  # it received a stop signal, and another agent will replace it
    ready: bool = False
    in_round: bool = False
    ended: bool = False
    beat: Beat = field(default_factory=Beat)  # the newest; no ranks in it if none run
    step: int = -1  # the lowest of its ranks
    phases: set[int] = field(default_factory=set)  # of its ranks; none before the first beat
    last_step: int | None = None  # the highest of its ranks that no longer train; None: all train

    @property
    def name(self) -> str:
        """Return the name of its node in plans."""
        return f"{self.host}/{self.node}"

    @property
    def memory_note(self) -> str:
        """Return what to add to the reason of its death if its memory limit had almost been reached; else nothing."""
        in_use = self.beat.memory
        return f"; {in_use:.0%} of its memory limit was in use: the kernel has probably killed it" * (in_use > _FULL)

    def take(self, beat: Beat) -> None:
        self.beat = beat
        self.step = min((report.step for report, _ in beat.ranks), default=-1)
        self.phases = {report.phase for report, _ in beat.ranks}
        ending = (Phase.DONE, Phase.ENDING)
        self.last_step = max((report.step for report, _ in beat.ranks if report.phase in ending), default=None)


def known_places(run: RunDir) -> dict[str, Node]:
    """Read machines' locations by name, from the user's topology file or Kubernetes' labels at submission."""
    if run.topology.exists():
        topology = from_yaml(run.topology.read_text(), run.topology.name)
    elif run.node_labels.exists():
        topology = from_kubernetes(json.loads(run.node_labels.read_text()))
    else:
        return {}
    return {node.name: node for node in topology.nodes}


class Agents(dict[int, ConnectedAgent]):
    """The connected agents, by node. Methods do not loop over ranks, and a beat causes no loop over agents."""

    def in_round(self) -> list[ConnectedAgent]:
        return [a for a in self.values() if a.in_round]

    def ready(self) -> list[ConnectedAgent]:
        return [a for a in self.values() if a.ready]

    def send(self, message: Message) -> None:
        """Send one message to every agent of the round."""
        for agent in self.in_round():
            agent.send(message)

    def doubtful(self, silent_since: float, heard_since: float) -> list[tuple[ConnectedAgent, bool]]:
        """Return agents that are silent, or whose machine cannot be reached.

        For each: whether most other machines were heard over the network; if not, the coordinator may be cut off.
        """
        found = [a for a in self.values() if a.is_unreachable or a.heard < silent_since]
        machines, heard = self.machines(heard_since) if found else (set[str](), set[str]())
        return [(a, 2 * (len(heard) - (a.host in heard)) > len(machines) - (a.host in machines)) for a in found]

    def machines(self, heard_since: float) -> tuple[set[str], set[str]]:
        """Return the machines that are reached over the network, and those of them that were heard."""
        others = [a for a in self.values() if not a.is_beside]
        return {a.host for a in others}, {a.host for a in others if a.heard > heard_since and not a.is_unreachable}

    def phases(self) -> set[int]:
        """Return the phases of the round's ranks; none before the first beat."""
        return set().union(*(a.phases for a in self.in_round()))

    def are_parked(self) -> bool:
        return self.phases() == {Phase.PARKED}

    def ahead(self) -> dict[int, int]:
        """Return nodes with ranks that train no more, each with the last step of one, while other ranks do."""
        ended = {a.node: a.last_step for a in self.values() if a.last_step is not None and a.in_round}
        return ended if ended and min(self.phases()) <= Phase.TRAINING else {}

    def have_ended(self) -> bool:
        return all(a.ended for a in self.values() if a.in_round)


class Formation:
    """Decides whether enough nodes are ready to form a round."""

    def __init__(self, elastic: ElasticConfig, min_nodes: int, max_nodes: int, now: float):
        self.elastic, self.min_nodes, self.max_nodes = elastic, min_nodes, max_nodes
        self.since = now
        self._enough_since: float | None = None

    def restart(self, now: float) -> None:
        self.since, self._enough_since = now, None

    def is_complete(self, ready: int, are_all_ready: bool, is_first: bool, is_new: bool, now: float) -> bool:
        """Whether the maximum of nodes is ready, or the minimum for the join window and no agent is late."""
        if ready < self.min_nodes:
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        window_s = self.elastic.join_window_s if is_first else _RECONNECT_S if is_new else _REJOIN_S
        return ready >= self.max_nodes or (are_all_ready and now - self._enough_since >= window_s)

    def waited_in_vain_s(self, ready: int, is_excluding: bool, now: float) -> float | None:
        """Return the wait for the minimum of nodes in seconds if it was too long, else None."""
        wait_s = self.elastic.wait_for_nodes_s
        if is_excluding:
            wait_s = min(wait_s, _REPLACEMENT_S)
        return wait_s if ready < self.min_nodes and now - self.since > wait_s else None


class RoundPlanner:
    """Plans rounds with the connected agents."""

    def __init__(self, config: JobConfig, run: RunDir):
        self.config = config
        self.max_nodes = most_nodes(config)
        self.shape = ModelShape.from_file(run.shape)
        self.places = known_places(run)
        self._thread = Background("plan")
        self._question: object = None  # the arguments of the current plan
        self._answer: Future[Plan] = Future()

    def plan(self, agents: Sequence[ConnectedAgent], shard_group: int) -> Plan | None:
        """Plan in a thread with at most `max_nodes` of these agents. Returns None until done: call again.

        A call with other arguments discards the earlier plan.

        Args:
            shard_group: of the previous round, 0 for the first.

        Raises:
            BadInput: the sharding cannot be formed on these nodes.
        """
        present = tuple(self._place(agent) for agent in sorted(agents, key=lambda a: a.node)[: self.max_nodes])
        if self._question != (present, shard_group):
            self._answer.cancel()
            self._question = present, shard_group
            self._answer = self._thread.begin(self._plan, present, shard_group)
        return self._answer.result() if self._answer.done() else None

    def _plan(self, present: Sequence[Node], shard_group: int) -> Plan:
        topology, before = Topology.of(present), shard_group or None
        return make_plan(self.config, topology, shape=self.shape, seek_remedies=False, previous_group=before)

    def usable_nodes(self, agents: Sequence[ConnectedAgent], shard_group: int) -> int | None:
        """Count the nodes that a round would use; nodes beyond full groups are spares. None: call again."""
        try:
            plan = self.plan(agents, shard_group)
        except BadInput:
            return 0
        return None if plan is None else len(plan.nodes)

    def _place(self, agent: ConnectedAgent) -> Node:
        """Return a node's location, from `known_places` or else from its cluster's environment."""
        known = self.places.get(agent.host) or Node(agent.name, agent.switches)
        return replace(known, name=agent.name, gpus=agent.nproc)

    def what_would_fit(self, nodes: int, by_kernel: bool) -> str:
        """Return a sentence with remedies for ranks that ran out of memory, or that the kernel killed for it."""
        if by_kernel and accelerator(self.config) == "cuda":
            more = [f"cluster.{key}=..." for key in ("mem", "memory") if hasattr(self.config.cluster, key)]
            cures = " or ".join([*more, "fewer workers of data loaders"])
            return f"The node's memory ran out, not a GPU's; what helps: {cures}"
        shape = self.shape or shape_of(self.config)
        if shape is None:
            return "The plan does not know the program's model"
        fitting = remedies(self.config, shape, Topology.flat(nodes, ranks_per_node(self.config)))[:3]
        overrides = " or ".join(" ".join(remedy.overrides) for remedy in fitting)
        return f"The plan says that less memory is taken with {overrides}" if overrides else "No setting takes less"
