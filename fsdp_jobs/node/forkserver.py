"""Start the process that a node's ranks fork from: multiprocessing's fork server, a fork of the agent.

multiprocessing would start it as a new interpreter, which imports torch a second time on every node, and each rank
would import the agent's module. Its fork server also lives as long as any process it has forked, so ranks would
continue to train after their agent was killed. This one dies with the agent.

Its imports make hundreds of thousands of objects that live as long as the process. They are frozen: Python's garbage
collector skips them in each rank, which would otherwise take half a second at each full collection, and copy the
memory that ranks share.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import pairwise

from fsdp_jobs.run.processes import die_with_parent, set_title

_spawn = multiprocessing.util.spawnv_passfds


def start(preload: list[str]) -> None:
    """Fork the fork server from this process, which must have no threads yet, and import modules in it.

    Ranks do not get environment variables that are set later.
    """
    multiprocessing.resource_tracker.ensure_running()  # a separate interpreter, which outlives this process
    multiprocessing.set_forkserver_preload([])  # else Python 3.14 passes the agent's arguments after the code
    multiprocessing.util.spawnv_passfds = partial(_fork, preload)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        multiprocessing.util.spawnv_passfds = _spawn


def _fork(preload: list[str], _executable: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Replace `multiprocessing.util.spawnv_passfds` by a fork without a new interpreter."""
    agent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        # Ranks start processes of their own: undo the patch and reset the state, as in a new interpreter.
        multiprocessing.util.spawnv_passfds = _spawn
        multiprocessing.forkserver._forkserver.__init__()  # type: ignore[misc]
        # Ranks run these finalizers, too: they would close files of ranks that reuse the numbers of files closed here.
        multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
        set_title("fork server")
        die_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all processes of a node as a request to save
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # pending in a new rank until the rank handles it
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ranks do not inherit the agent's handlers
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        if os.getppid() == agent:  # else the agent died before `die_with_parent`
            kept = sorted({0, 1, 2, *descriptors})
            for low, high in pairwise([*kept, resource.getrlimit(resource.RLIMIT_NOFILE)[0]]):
                os.closerange(low + 1, high)
            gc.disable()
            for name in preload:
                with suppress(ImportError):
                    import_module(name)
            gc.freeze()
            gc.enable()
            exec(arguments[-1], {})
    finally:
        os._exit(1)
