"""Time of a collective: the fastest of the algorithms and protocols that NCCL chooses among.

Latencies, shares of bandwidth and the conditions are those of NCCL's own model, src/graph/tuning.cc (2.29):
rings, trees, NVLS inside a node and across nodes, and PAT if a group has one rank per node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2

from fsdp_jobs.config.resolve import seconds_per_byte
from fsdp_jobs.config.schema import HardwareConfig

_NVLS_US, _NVLS_TREE_US = 25.0, 20.9  # inside a node; each step of the tree between nodes
_NVLS_RANKS = 5  # NCCL uses NVLS from 5 GPUs on (H200; ML Engineering, network, SHARP)
_PAT_SHARE, _PAT_US, _PAT_RANK_US = 0.75, 8.0, 2.8
_LL_BYTES_PER_S = 20e9  # LL's ceiling between nodes


@dataclass(frozen=True)
class _Protocol:
    """One of NCCL's protocols: shares of the bandwidth, and latencies relative to Simple's ring steps."""

    ring_share: float
    tree_share: float
    base_us: float
    ring_intra: float  # of the latency of a Simple ring step inside a node
    ring_inter: float  # of that between nodes
    tree_intra: float
    tree_inter: float
    overhead_us: float  # least time of a step inside a node, in a ring that spans nodes
    ceiling: float = float("inf")  # bytes/s between nodes


_PROTOCOLS = (
    _Protocol(1.0, 0.92, 8.4, 1.0, 1.0, 4.0 / 3.4, 1.0, 3.0),  # Simple
    _Protocol(0.92, 0.86, 14.0, 1.9 / 3.4, 4.0 / 14, 1.25 / 3.4, 8.5 / 14, 1.0),  # LL128
    _Protocol(0.5, 0.24, 6.6, 0.6 / 3.4, 2.7 / 14, 0.6 / 3.4, 5.0 / 14, 1.0, _LL_BYTES_PER_S),  # LL
)


@dataclass(frozen=True)
class Group:
    """The ranks of a collective, and the links between them."""

    hardware: HardwareConfig
    ranks: int
    nodes: int  # that the group spans; 1 if NVLink connects all of it
    seconds_per_byte: float  # that a rank sends around the ring
    is_nccl: bool  # gloo runs plain rings

    def gather(self, sent: float) -> float:
        """Return seconds of an all-gather or reduce-scatter in which each rank of a ring sends `sent` bytes."""
        if not sent:
            return 0.0
        times = list(self._rings(sent, 1))
        if self.is_nccl and self.nodes == self.ranks > 2:
            network_us = log2(self.nodes) * self.hardware.inter_node_latency_us / 3.5
            latency = _PAT_US + network_us + self.ranks * _PAT_RANK_US
            times.append(latency * 1e-6 + sent * self.seconds_per_byte / _PAT_SHARE)
        return min(times)

    def all_reduce(self, sent: float) -> float:
        """Return seconds of an all-reduce in which each rank of a ring would send `sent` bytes."""
        if not sent:
            return 0.0
        times = list(self._rings(sent, 2))
        if not self.is_nccl:
            return min(times)
        per_node, hardware = self.ranks / self.nodes, self.hardware
        for p in _PROTOCOLS if self.nodes > 1 else ():
            hops = (per_node - 1) * p.tree_intra * hardware.intra_node_latency_us
            hops += log2(self.nodes) * p.tree_inter * hardware.inter_node_latency_us
            times.append((p.base_us + 2 * hops) * 1e-6 + self._transfer(sent, p.tree_share, p))
        if hardware.nvls_gb_s and per_node >= _NVLS_RANKS:
            latency = _NVLS_US + 2 * log2(self.nodes) * _NVLS_TREE_US
            slower = max(seconds_per_byte(hardware.nvls_gb_s), self.seconds_per_byte if self.nodes > 1 else 0.0)
            times.append(latency * 1e-6 + sent * slower)
        return min(times)

    def _rings(self, sent: float, passes: int) -> Iterator[float]:
        """Yield the seconds of a ring by protocol."""
        steps, inter_steps, hardware = passes * (self.ranks - 1), passes * (self.nodes - 1), self.hardware
        for p in _PROTOCOLS if self.is_nccl else _PROTOCOLS[:1]:
            intra_us = max(p.ring_intra * hardware.intra_node_latency_us, p.overhead_us if self.nodes > 1 else 0.0)
            inter = p.tree_inter if self.nodes == self.ranks else p.ring_inter
            latency = (
                p.base_us + (steps - inter_steps) * intra_us + inter_steps * inter * hardware.inter_node_latency_us
            )
            yield latency * 1e-6 + self._transfer(sent, p.ring_share, p)

    def _transfer(self, sent: float, share: float, protocol: _Protocol) -> float:
        least = 1 / protocol.ceiling if self.nodes > 1 else 0.0
        return sent * max(self.seconds_per_byte / share, least)
