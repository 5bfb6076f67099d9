"""Test the nodes of an allocation before training, so that a bad node costs a minute and not a day.

Each node runs one task, `python -m fsdp_jobs.launchers.slurm.node_test NPROC cpu|cuda FOLDER HOST...`, which writes its
report to FOLDER in the run directory. `blame` compares all reports to find the bad nodes.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.processes import gloo_interface
from fsdp_jobs.run.record import Record
from fsdp_jobs.run.threads import wait_until

BEGINS_S = 600.0  # for all nodes to begin: an image or Python's packages may come from slow storage
TIMEOUT_S = 120.0  # for the test, once all have begun
NONCE = "nonce"  # file that every node must be able to see, written by the batch step
_COHERENT_S = 10.0  # until a file that one node writes is visible on another
_PAIR_S = 30.0
_FREE_MB = {"run directory": 1000, "/dev/shm": 64, "/tmp": 100}  # at least
_CLOCK_SKEW_S = 2.0
_SLOW = 0.7  # of the median speed
_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # of the all-reduce
_GEMM = {"cpu": 256, "cuda": 8192}  # rows of the square matrices


@dataclass
class Report(Record):
    """The measurements of one node."""

    host: str
    problems: list[str] = field(default_factory=list)  # of the node itself, not of its links
    gemm_tflops: list[float] = field(default_factory=list)  # per GPU
    pairs: dict[str, str] = field(default_factory=dict)  # partner -> error of the all-reduce with it, if any
    gb_s: list[float] = field(default_factory=list)  # of the all-reduces


def late(folder: Path, hosts: Sequence[str]) -> set[str]:
    """Return the nodes that have not begun."""
    there = {*folder.iterdir()}  # a listing of NFS has at once what another node has written
    return {host for host in hosts if folder / f"{host}.begun" not in there}


def blame(
    reports: Sequence[Report], hosts: Sequence[str], late: Collection[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Return bad nodes with the problems of each, and problems of links for which neither node is to blame.

    The others wait for `late` nodes before they test links, so without an answer only these are bad.
    """
    by_host = {r.host: r for r in reports}
    missing = f"did not begin within {BEGINS_S:.0f} s" if late else f"no answer within {TIMEOUT_S:.0f} s"
    bad = {host: missing for host in late or hosts if host not in by_host}
    bad |= {r.host: "; ".join(r.problems) for r in reports if r.problems}
    speeds = [s for r in reports for s in r.gemm_tflops]
    least = _SLOW * statistics.median(speeds) if len(speeds) > 2 else 0.0
    for report in reports:
        slow = [i for i, s in enumerate(report.gemm_tflops) if s < least]
        if slow and report.host not in bad:
            bad[report.host] = f"device {slow[0]} multiplies at less than {_SLOW:.0%} of the median"
    for report in reports:
        partners = [p for p in report.pairs if p not in bad]
        failed = [p for p in partners if report.pairs[p]]
        elsewhere = any(not why for partner in failed for why in by_host[partner].pairs.values())
        if failed and failed == partners and (elsewhere or len(failed) > 1) and report.host not in bad:
            bad[report.host] = f"all-reduce with {' and '.join(failed)} failed: {report.pairs[failed[0]]}"
    between = {
        f"between {' and '.join(sorted((r.host, partner)))}: {why}"
        for r in reports
        for partner, why in r.pairs.items()
        if why and r.host not in bad and partner not in bad
    }
    return bad, sorted(between)


def _names_and_storage(folder: Path, hosts: Sequence[str]) -> Iterator[str]:
    """Yield problems with host names, shared storage and free space."""
    for host in hosts:
        try:
            socket.getaddrinfo(host, None)
        except OSError as e:
            yield f"cannot resolve the name {host}: {e}"
    if not wait_until((folder / NONCE).exists, _COHERENT_S):
        yield f"does not see what {hosts[0]} wrote to {folder}"
    for what, least in _FREE_MB.items():
        free = shutil.disk_usage(folder if what == "run directory" else what).free / 1e6
        if free < least:
            yield f"{what}: {free:.0f} MB free, {least} needed"


def _gpus(nproc: int) -> Iterator[str]:
    """Yield problems with the GPUs according to the driver."""
    import torch

    if torch.cuda.device_count() < nproc:
        yield f"{torch.cuda.device_count()} GPUs, {nproc} needed"
    query = ["nvidia-smi", "--query-gpu=index,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader"]
    with suppress(FileNotFoundError):
        for line in subprocess.run(query, capture_output=True, text=True).stdout.splitlines():
            index, _, errors = line.partition(", ")
            if errors.isdigit() and int(errors):
                yield f"GPU {index} has {errors} uncorrected memory errors"


def _gemm(device: Any, size: int) -> tuple[float, bool]:
    """Return TFLOP/s of a matrix product on a device, and whether the result is right."""
    import torch

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = torch.ones(size, size, dtype=dtype, device=device), torch.full((size, size), 0.5, dtype=dtype, device=device)
    right = bool(((a @ b) == size / 2).all())
    started, times = time.perf_counter(), 5
    for _ in range(times):
        c = a @ b
    right = right and bool((c == size / 2).all())  # also waits for the device
    return times * 2 * size**3 / (time.perf_counter() - started) / 1e12, right


def _all_reduce(store: Any, device: Any, rank: int, partner: int, turn: int) -> float:
    """Return GB/s of an all-reduce with another node.

    Raises:
        RuntimeError: it failed, or the clocks differ.
    """
    import torch
    import torch.distributed as dist

    backend = "nccl" if device.type == "cuda" else "gloo"
    prefix = dist.PrefixStore(f"{turn}-{min(rank, partner)}", store)
    side = int(rank > partner)
    dist.init_process_group(backend, store=prefix, rank=side, world_size=2, timeout=timedelta(seconds=_PAIR_S))
    try:
        data = torch.ones(_BYTES[device.type] // 4, device=device)
        dist.all_reduce(data)  # connects
        started = time.perf_counter()
        dist.all_reduce(data)
        right = bool((data == 4).all())
        seconds, now = time.perf_counter() - started, time.time()
        prefix.set(f"clock-{side}", repr(now))
        skew = abs(now - float(prefix.get(f"clock-{1 - side}")))
    finally:
        dist.destroy_process_group()
    if not right:
        raise RuntimeError("the sum is wrong")
    if skew > _CLOCK_SKEW_S:
        raise RuntimeError(f"the clocks are {skew:.0f} s apart")
    return _BYTES[device.type] / seconds / 1e9


def examine(folder: Path, nproc: int, hosts: Sequence[str], rank: int, cuda: bool) -> Report:
    """Test this node and its links to its two neighbours."""
    report = Report(hosts[rank], list(_names_and_storage(folder, hosts)))
    import torch
    import torch.distributed as dist

    if cuda:
        report.problems += _gpus(nproc)
    devices = [torch.device("cuda", i) for i in range(min(nproc, torch.cuda.device_count()))] if cuda else []
    devices = devices or [torch.device("cpu")]
    for device in devices:
        try:
            speed, right = _gemm(device, _GEMM[device.type])
            report.gemm_tflops += [speed] if cuda else []  # a CPU may be busy with other jobs
            if not right:
                report.problems.append(f"{device} multiplies wrongly")
        except RuntimeError as e:
            report.problems.append(f"{device}: {str(e).splitlines()[0]}")
    port, within = 0, timedelta(seconds=_PAIR_S)
    if rank == 0:  # it takes a port at once: another program may take one that is chosen before
        store = dist.TCPStore("127.0.0.1", port, is_master=True, timeout=within)
        port = store.port
    write_atomic(folder / f"{hosts[rank]}.begun", str(port))
    wait_until(lambda: not late(folder, hosts), BEGINS_S)
    if rank > 0:
        port = int((folder / f"{hosts[0]}.begun").read_text())
        try:
            store = dist.TCPStore(hosts[0], port, timeout=within)
        except RuntimeError as e:  # DistError is one
            report.problems.append(f"cannot reach {hosts[0]}:{port}: {str(e).splitlines()[0]}")
            return report
    os.environ |= gloo_interface(hosts[:2])
    for turn in (0, 1):
        partner = rank + (1 if rank % 2 == turn else -1)  # the neighbour on one side, then the one on the other
        if not 0 <= partner < len(hosts):
            continue
        report.pairs[hosts[partner]] = ""
        try:
            report.gb_s.append(_all_reduce(store, devices[0], rank, partner, turn))
        except RuntimeError as e:
            report.pairs[hosts[partner]] = str(e).splitlines()[0]
    store.set(f"done-{rank}", "")
    if rank == 0:  # the store lives here
        with suppress(RuntimeError):
            store.wait([f"done-{r}" for r in range(len(hosts))], timedelta(seconds=2 * _PAIR_S))
    return report


if __name__ == "__main__":
    nproc, kind, folder, *hosts = sys.argv[1:]
    report = examine(Path(folder), int(nproc), hosts, int(os.environ["SLURM_PROCID"]), kind == "cuda")
    write_atomic(Path(folder) / f"{report.host}.json", report.to_json(indent=2))
