"""Find slow nodes by the time of work that ranks do independently of each other. No torch, no network.

Steps take equally long on all ranks, so only work between collectives shows which rank is slow. A window is 20 steps
or more. A node is slow if its slowest rank takes at least 1.07 times the median of the other nodes, costs at least
2 ms and 1% of a step (3% for waits), and exceeds 5 x the spread between nodes and 3 x its own spread over time: in 4
of 5 windows, or in all five with only one or two other nodes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import nlargest
from statistics import median

from fsdp_jobs.run.events import SlowNode, SlowSteps
from fsdp_jobs.run.rank_state import Times

_STEPS = 20  # at least, in a window
_WINDOWS, _OFTEN = 5, 4
_RATIO = 1.07  # a node that is 10% slow is measured at 1.08 to 1.18
_LEAST_S = 0.002  # lost per step, at least, and
_LEAST_PART = {"data": 0.03, "checkpoint": 0.03, "compute": 0.01}  # of the step; on a busy host all ranks wait at times
_SPREADS = 5  # standard deviations between the other nodes
_OWN_SPREADS = 3  # standard deviations of its own windows: three others may agree by chance
_SUSPECTS = 3  # worst nodes to examine: one that varies much must not hide one that is steadily slow
_FORWARD_TO_STEP = 3  # backward does twice the work of forward
_HOST_BOUND = 0.8  # of a GPU's time: the GPU waits for the host to launch kernels
_LONGER = 1.25  # times the step time in earlier windows
_IMBALANCE = 0.1  # of a step
_ALIKE = 0.1  # relative difference of work up to which step times are compared
_HISTORY = 200  # windows

Sums = Mapping[int, Sequence[Times]]  # node -> sums of each of its ranks


@dataclass(frozen=True)
class Window:
    """Average times of a step in a window, in seconds. Only the newest windows keep those of each node."""

    step_s: float
    typical: dict[str, float]  # cause -> median of `by_node`
    by_node: dict[str, dict[int, float]]  # cause -> node -> lower bound for its slowest rank, at the usual work
    at_most: dict[str, dict[int, float]]  # the same, upper bound; infinite if the work is unknown
    is_host_bound: dict[int, bool]  # node -> one of its GPUs waits for the host
    in_turn_s: float  # forward of each step's slowest rank, minus that of the rank that is slowest on average
    work: tuple[float, float]  # the usual work of a rank, (linear, quadratic)

    @classmethod
    def between(cls, before: Sums, after: Sums) -> Window:
        """Make the window between two readings of the same ranks, with times scaled to the same work.

        The time of a pass is partly linear and partly quadratic in the length of its samples. The parts are not known,
        so the time for the usual work has only bounds, which are equal if ranks have the same work.
        """
        ranks = {node: [_per_step(*pair) for pair in zip(before[node], after[node], strict=True)] for node in after}
        every = [rank for of_node in ranks.values() for rank in of_node]
        usual = median(rank.work for rank in every), median(rank.attention for rank in every)

        def slowest(time_of: Callable[[Times], float]) -> dict[int, float]:
            return {node: max(map(time_of, of_node)) for node, of_node in ranks.items()}

        waits = {"data": slowest(lambda rank: rank.data), "checkpoint": slowest(lambda rank: rank.checkpoint)}
        least = waits | {"compute": slowest(lambda rank: _bounds_s(rank, usual)[0])}
        most = waits | {"compute": slowest(lambda rank: _bounds_s(rank, usual)[1])}
        is_host_bound = {
            node: any(_HOST_BOUND * r.compute < r.host != r.compute for r in ranks[node]) for node in ranks
        }
        in_turn_s = every[0].slowest - max(rank.compute for rank in every)
        typical = {cause: median(of.values()) for cause, of in least.items()}
        return cls(every[0].step, typical, least, most, is_host_bound, in_turn_s, usual)

    def has_work_of(self, other: Window) -> bool:
        """Whether a step does about the same work: not after a change of batch or sequence length."""
        return all(math.isclose(*pair, rel_tol=_ALIKE) for pair in zip(self.work, other.work, strict=True))


def _bounds_s(rank: Times, usual: tuple[float, float]) -> tuple[float, float]:
    """Return bounds on the time of a rank's forward passes for the usual work, (linear, quadratic)."""
    if not rank.work:
        return rank.compute, math.inf
    parts = [own / of for own, of in zip((rank.work, rank.attention), usual, strict=True) if of]
    return rank.compute / max(parts), rank.compute / min(parts)


def _per_step(before: Times, after: Times) -> Times:
    steps = after.steps - before.steps
    return Times(*((b - a) / steps for a, b in zip(before, after, strict=True)))


def examine(windows: Sequence[Window], node: int, cause: str, ranks: int) -> SlowNode | None:
    """Return the cost of a node if it is slow by this cause, else None. All windows have `ranks` ranks."""
    others = [[s for other, s in w.at_most[cause].items() if other != node] for w in windows]
    middles, owns = [median(of) for of in others], [w.by_node[cause][node] for w in windows]
    often, far_s = _OFTEN, max(_SPREADS * median(map(_between_nodes, others)), _OWN_SPREADS * _over_time(owns))
    if len(others[0]) < 3:  # too few for a spread between nodes: use the spread over time
        often, far_s = len(windows), _SPREADS * max(_over_time(middles), _over_time(owns))
    found: list[SlowNode] = []
    for window, own, of, middle in zip(windows, owns, others, middles, strict=True):
        step_s = window.step_s
        lost_s = min((own - middle) * (_FORWARD_TO_STEP if cause == "compute" else 1), step_s)
        is_far = own - middle > far_s
        if own >= _RATIO * middle and lost_s >= max(_LEAST_S, _LEAST_PART[cause] * step_s) and is_far:
            why = "host" if cause == "compute" and window.is_host_bound[node] else cause
            hours = lost_s / step_s * ranks * 24
            found.append(SlowNode(node, "", why, own, middle, len(of), lost_s, step_s, hours))
    return sorted(found, key=lambda slow: slow.lost_s)[len(found) // 2] if len(found) >= often else None


def _between_nodes(values: Sequence[float]) -> float:
    """Return the standard deviation between nodes, by the median distance, robust against slow nodes."""
    middle = median(values)
    return 1.4826 * median(abs(v - middle) for v in values)


def _over_time(values: Sequence[float]) -> float:
    """Return the standard deviation of a few windows by a quantile that ignores one outlier in five."""
    middle = median(values)
    distances = sorted(abs(v - middle) for v in values)
    return distances[math.ceil(0.8 * len(distances)) - 1] / 1.28


class SlowWatch:
    """Watches one round, and reports each slow node and each other cause once."""

    def __init__(self) -> None:
        self._before: Sums = {}
        self._windows = deque[Window](maxlen=_HISTORY)
        self._reported = set[object]()

    def see(self, sums: Sums) -> SlowNode | SlowSteps | None:
        """Add the ranks' sums until now; return a new finding, if any."""
        if len(sums) < 2 or not all(sums.values()) or min(t.steps for of in sums.values() for t in of) < 1:
            return None
        if self._before.keys() != sums.keys():
            self._before = sums
        done = min(t.steps - b.steps for node in sums for b, t in zip(self._before[node], sums[node], strict=True))
        if done < _STEPS:
            return None
        self._windows.append(Window.between(self._before, sums))
        self._before = sums
        if len(self._windows) < _WINDOWS:
            return None
        if len(self._windows) > _WINDOWS:
            older = self._windows[-_WINDOWS - 1]
            self._windows[-_WINDOWS - 1] = replace(older, by_node={}, at_most={}, is_host_bound={})
        newest, ranks = list(self._windows)[-_WINDOWS:], sum(map(len, sums.values()))
        for cause in newest[0].by_node:
            unreported = [node for node in sums if (node, cause) not in self._reported]
            for node in nlargest(_SUSPECTS, unreported, key=partial(_usual, newest, cause)):
                if (slow := examine(newest, node, cause, ranks)) is not None:
                    self._reported.add((node, cause))
                    return slow
        if sum(_imbalance(w) >= _IMBALANCE for w in newest) >= _OFTEN:
            return self._once("rotating", _ROTATING.format(lost=median(map(_imbalance, newest))))
        return self._look_back(newest)

    def _look_back(self, newest: Sequence[Window]) -> SlowSteps | None:
        """Compare with earlier windows of the same work, in case all nodes became slow together."""
        alike = [w for w in self._windows if w.has_work_of(newest[-1])]
        earlier = alike[:-_WINDOWS]
        if alike[-_WINDOWS:] != newest or len(earlier) < 2 * _WINDOWS:
            return None
        usual_s = median(w.step_s for w in earlier)
        if sum(w.step_s >= _LONGER * usual_s for w in newest) < _OFTEN:
            return None
        now_s = median(w.step_s for w in newest)
        rise = {cause: _typical(newest, cause) - _typical(earlier, cause) for cause in newest[0].by_node}
        rise["compute"] *= _FORWARD_TO_STEP
        cause = max(rise, key=lambda c: rise[c])
        what = _ALL[cause if rise[cause] >= (now_s - usual_s) / 2 else "network"]
        return self._once("all", f"steps take {now_s:.3g} s, {usual_s:.3g} s before, on all nodes: {what}")

    def _once(self, key: str, why: str) -> SlowSteps | None:
        is_new = key not in self._reported
        self._reported.add(key)
        return SlowSteps(why) if is_new else None


def _usual(windows: Sequence[Window], cause: str, node: int) -> float:
    return median(w.by_node[cause][node] for w in windows)


def _typical(windows: Sequence[Window], cause: str) -> float:
    return median(w.typical[cause] for w in windows)


def _imbalance(window: Window) -> float:
    """Return the fraction of a step lost because another rank is the slowest in each step."""
    return min(1.0, _FORWARD_TO_STEP * window.in_turn_s / window.step_s)


_ROTATING = (
    "no node is slow, but another rank is the slowest in each step, which costs about {lost:.0%} of a step: "
    "are samples of unequal length, or the machines busy with other work?"
)
_ALL = {
    "data": "they wait for data, so look at the storage that it comes from",
    "checkpoint": "they wait for checkpoints, so look at the storage that these go to",
    "compute": "every node computes more slowly",
    "network": "they compute as fast as before and do not wait for data, so look at the network, or at new work "
    "between steps, such as an evaluation",
}
