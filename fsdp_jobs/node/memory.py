"""What this node's kernel tells about memory that runs out. No torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_FILES = {  # the controllers in /proc/self/cgroup, by version -> its limit, its use, and a prefix in memory.stat
    "": ("memory.max", "memory.current", ""),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


def kills_for_memory() -> int:
    """Count the processes that this machine's kernel has killed for lack of memory since it booted."""
    with suppress(OSError):
        for line in (_PROC / "vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def memory_in_use() -> float:
    """Return the share of its memory limit that this process's control group uses, without the files it caches.

    The fullest of the groups above counts; 0 without a limit. At 1 the kernel kills a process of the group, in
    Kubernetes all of them, this one included (https://docs.kernel.org/admin-guide/cgroup-v2.html, memory.oom.group).
    """
    shares = [0.0]
    with suppress(OSError):
        for line in (_PROC / "self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers in _FILES:
                folder = _GROUPS / controllers / group[1:]
                shares += [_share(above, *_FILES[controllers]) for above in (folder, *folder.parents)]
    return max(shares)


def _share(folder: Path, limit: str, use: str, prefix: str) -> float:
    with suppress(OSError, ValueError, LookupError):  # there is no such group here, or its limit is "max"
        most, used = (int((folder / name).read_text()) for name in (limit, use))
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = sum(int(counts[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
        return (used - cached) / max(1, most)
    return 0.0
