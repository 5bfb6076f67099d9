"""The process of a node that ranks are forked from: multiprocessing's fork server, itself a fork of the agent.

A fresh interpreter, as multiprocessing starts it, would import torch a second time on every node, and each rank
would import the agent's module. It also keeps a fork server alive for as long as any process it made lives, so
the ranks of a killed agent would train on: this one dies with the agent.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import resource
import signal
from collections.abc import Sequence
from itertools import pairwise

from fsdp_jobs.run.processes import die_with_parent, set_title

_spawn = multiprocessing.util.spawnv_passfds


def start(preload: list[str]) -> None:
    """Fork the fork server from this process, which has no threads yet, and have it import these modules.

    Environment variables that are set later do not reach the ranks.
    """
    multiprocessing.set_forkserver_preload(preload)
    multiprocessing.resource_tracker.ensure_running()  # an interpreter of its own, which outlives this process
    multiprocessing.util.spawnv_passfds = _fork  # type: ignore[assignment]
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        multiprocessing.util.spawnv_passfds = _spawn


def _fork(_executable: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Do what `multiprocessing.util.spawnv_passfds` does, without a new interpreter."""
    agent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        # Ranks start processes of their own, each by what it calls: as in a fresh interpreter, not as halfway here.
        multiprocessing.util.spawnv_passfds = _spawn
        multiprocessing.forkserver._forkserver.__init__()  # type: ignore[misc]
        set_title("fork server")
        die_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to all processes of a node: a request to save
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what the agent handles is not for its ranks
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        if os.getppid() == agent:  # else it died before the line above
            kept = sorted({0, 1, 2, *descriptors})
            for low, high in pairwise([*kept, resource.getrlimit(resource.RLIMIT_NOFILE)[0]]):
                os.closerange(low + 1, high)
            exec(arguments[-1], {})
    finally:
        os._exit(1)
