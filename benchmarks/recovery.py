"""Seconds from a fault to the next optimizer step: this project's agents against stock torchrun's.

    python benchmarks/recovery.py [--trials 2] [--bound 90] [--faults ...] [--systems ...]

Four network namespaces of one rank each, the same tiny model, fully sharded, saved every 50 steps; `nodes=3:4`, and
what is lost is not replaced. Systems in turn, fault by fault:

  ours      the agents and the coordinator of this project, default settings
  stock     torchrun --nnodes=3:4, c10d rendezvous, its defaults
  tuned     the same with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, last_call_timeout=1, keep_alive_interval=1,
            keep_alive_max_attempt=3, and a process-group timeout of 20 s in the script (gloo's default is 30 min)
  snapshots  ours, which saves nothing on a disk, and keeps a snapshot of every step in the nodes' memory
  async     tuned, with a `dcp.async_save` of every step

Faults, on a node that hosts neither rank 0 nor the rendezvous store: `agent` SIGKILLed; `node`, everything on it
SIGKILLed at once; `vanished`, link down, nothing closed; `rank` SIGKILLed. Recovered is the first step that a new
life of the world has done: a world that trains on with a rank whose agent is dead has not noticed, and the table
says so. Behind the seconds: the steps that are done again, and the median step before the fault. Needs root.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # for tests.netns

from fsdp_jobs.run.tail import read_json_lines

NODES = ["node1", "node2", "node3", "node4"]
VICTIM = "node4"
EVERY = 50
FAULTS = ("agent", "node", "vanished", "rank")
SYSTEMS = ("ours", "stock", "tuned", "snapshots", "async")
JOB = ("data.global_batch=12", f"checkpoint.every_steps={EVERY}", "fsdp=full_shard", "nodes=3:4")
SNAPSHOTS = ("checkpoint.every_steps=0", "checkpoint.memory.every_steps=1")
TUNED = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
TUNED_TIMEOUT_S = 20


class Trial:
    """One fault in one system: how long until the next step, and where the time went."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.noticed: float | None = None  # the round was declared broken
        self.formed: float | None = None  # the next one had its places
        self.repeated: int | None = None  # steps that were done again
        self.step_s: float | None = None  # before the fault
        self.note = ""

    def __str__(self) -> str:
        if self.seconds is None:
            return self.note
        return f"{self.seconds:.1f} s ({self.repeated} again; {1000 * (self.step_s or 0):.0f} ms)"

    def steps_were(self, before: list[tuple[int, float]], first_later: int) -> None:
        """Take down what the steps before the fault, with their times, and the first one of the new life tell."""
        between = [then - now for (_, now), (_, then) in itertools.pairwise(before)]
        self.repeated, self.step_s = before[-1][0] + 1 - first_later, statistics.median(between)


def ours(fault: str, bound: float, folder: Path, snapshots: bool) -> Trial:
    from tests.netns import Fabric, netns_job

    trial, overrides = Trial(), SNAPSHOTS if snapshots else ()
    with Fabric(NODES) as fabric, netns_job(fabric, folder, "ours", *JOB, *overrides, "steps=1000000") as job:
        job.until_step(EVERY + 5)
        if not snapshots:
            job.until(lambda: job.events("checkpoint"), "the first checkpoint")
        began = time.time()
        if fault == "agent":
            job.agent(VICTIM).kill()
        elif fault == "node":
            job.crash(VICTIM)
        elif fault == "rank":
            job.ranks(NODES.index(VICTIM))[0].kill()
        else:
            fabric.cut(VICTIM)

        def recovered() -> float | None:
            started = job.events("round_started")
            later = [m["time"] for m in job.metrics()[-20:] if len(started) > 1 and m["time"] > started[1]["time"]]
            return later[0] if later else None

        end = _await(recovered, bound)
        if end is None:
            trial.note = f"not within {bound:.0f} s"
            return trial
        trial.seconds = end - began
        trial.noticed = job.events("round_broken")[0]["time"] - began
        trial.formed = job.events("round_started")[1]["time"] - began
        steps = [(m["step"], m["time"]) for m in job.metrics()]
        trial.steps_were([s for s in steps if s[1] < end], next(step for step, at in steps if at == end))
    return trial


def torchrun(fault: str, bound: float, folder: Path, tuned: bool, every: int) -> Trial:
    from tests.jobs import ROOT
    from tests.netns import Fabric

    trial = Trial()
    log = folder / "steps.jsonl"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=3:4", "--nproc-per-node=1", "--rdzv-backend=c10d"]
    argv += ["--rdzv-endpoint=node1:29400", "--rdzv-id=recovery", "--max-restarts=100"]
    if tuned:
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        argv += [f"--rdzv-conf={TUNED}", "--monitor-interval=0.1"]
    with Fabric(NODES) as fabric:
        agents = {}
        for node in NODES:
            local = [f"--local-addr={fabric.addresses[node]}", __file__, "--worker", str(folder)]
            local += [f"--every={every}", *([f"--timeout={TUNED_TIMEOUT_S}"] if tuned else [])]
            agents[node] = fabric.run(node, [*argv, *local], env, folder / f"{node}.log")

        def steps() -> list[dict[str, Any]]:
            return list(read_json_lines(log))

        if _await(lambda: any(s["step"] > EVERY + 5 for s in steps()), 180) is None:
            raise RuntimeError((folder / "node1.log").read_text()[-3000:])
        first_life = steps()[-1]["life"]
        processes = sorted(fabric.processes(VICTIM), key=lambda p: p.create_time())
        agent = next(p for p in processes if "torch.distributed.run" in " ".join(p.cmdline()))
        rank = next(p for p in agent.children() if "--worker" in p.cmdline())
        began = time.time()
        if fault == "agent":
            agent.kill()
        elif fault == "node":
            fabric.crash(VICTIM)
        elif fault == "rank":
            rank.kill()
        else:
            fabric.cut(VICTIM)

        def recovered() -> float | None:
            if all(a.poll() is not None for n, a in agents.items() if n != VICTIM):
                return -1.0
            later = [s["time"] for s in steps()[-200:] if s["life"] != first_life]
            return later[0] if later else None

        end = _await(recovered, bound)
        if end is None:
            trial.note = f"not within {bound:.0f} s"
            newest = steps()[-1]
            if newest["life"] == first_life and newest["time"] > began + bound - 5:
                trial.note = "goes on, the orphaned rank unsupervised" if rank.is_running() else trial.note
        elif end < 0:
            trial.note = f"job failed after {time.time() - began:.0f} s"
        else:
            trial.seconds = end - began
            before = [(s["step"], s["time"]) for s in steps() if s["life"] == first_life]
            trial.steps_were(before, next(s["step"] for s in steps() if s["life"] != first_life))
    return trial


def _await(what: Callable[[], Any], seconds: float) -> Any:
    """What it returns first that is not None or False; None when that takes longer."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = what()
        if found is not None and found is not False:
            return found
        time.sleep(0.02)
    return None


def worker(folder: Path, timeout_s: float | None, every: int) -> None:
    """The script under torchrun: FSDP2, a checkpoint every so many steps, resumed when started again."""
    import shutil

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import torch.nn.functional as F
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    from fsdp_jobs.config.hydra import compose_job
    from fsdp_jobs.models.llama import Llama
    from fsdp_jobs.train.data import Samples
    from fsdp_jobs.train.sources import open_tokens
    from tests.world import TINY

    saving: Any = None
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s) if timeout_s else None)
    own = dist.new_group()  # of saves that run beside the steps
    rank, world = dist.get_rank(), dist.get_world_size()
    config = compose_job([*TINY, *JOB])
    torch.manual_seed(0)
    model = Llama(config.model)  # type: ignore[arg-type]
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = Samples(open_tokens(config.data), config.data.seq_len, seed=0)
    newest = [max((int(f.parent.name) for f in folder.glob("saved/*/.metadata")), default=0)]
    dist.broadcast_object_list(newest)
    step = newest[0]
    if step:
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=folder / "saved" / str(step))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    share = config.data.global_batch // world
    life = f"{step}-{time.time()}"
    while True:
        first = step * config.data.global_batch + rank * share
        tokens, labels = (torch.stack(t) for t in zip(*(samples[first + i] for i in range(share)), strict=True))
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            with (folder / "steps.jsonl").open("a") as f:
                f.write(json.dumps({"step": step, "time": time.time(), "life": life}) + "\n")
        if step % every == 0:
            state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
            if every == 1:
                saving.result() if saving is not None else None
                saving = dcp.async_save(state, checkpoint_id=folder / "saved" / str(step), process_group=own)
            else:
                dcp.save(state, checkpoint_id=folder / "saved" / str(step))
            if rank == 0:
                shutil.rmtree(folder / "saved" / str(step - 2 * every), ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--bound", type=float, default=90, help="seconds after which a trial is given up")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=FAULTS)
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--timeout", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--every", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker, args.timeout, args.every)
    from tests.netns import why_not

    if why_not():
        sys.exit(why_not())
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {len(NODES)} nodes, {args.trials} trials a cell")
    results: dict[tuple[str, str], list[Trial]] = {}
    for _ in range(args.trials):
        for fault in args.faults:
            for system in args.systems:
                with tempfile.TemporaryDirectory() as folder:
                    a = (fault, args.bound, Path(folder))
                    if system in ("ours", "snapshots"):
                        trial = ours(*a, snapshots=system == "snapshots")
                    else:
                        trial = torchrun(*a, tuned=system != "stock", every=1 if system == "async" else EVERY)
                results.setdefault((fault, system), []).append(trial)
                print(f"  {fault:<9} {system:<6} {trial}", flush=True)
    print(f"| fault | {' | '.join(args.systems)} | ours: noticed, new round formed, first step |")
    print("|---|" + "---|" * (len(args.systems) + 1))
    for fault in args.faults:
        cells = [", ".join(str(t) for t in results[fault, s]) for s in args.systems]
        parts = [t for s in ("ours", "snapshots") for t in results.get((fault, s), []) if t.seconds is not None]
        if parts:
            means = [statistics.mean(getattr(t, k) for t in parts) for k in ("noticed", "formed", "seconds")]
            cells.append(", ".join(f"{m:.1f} s" for m in means))
        print(f"| {fault} | {' | '.join(cells)} |")
    return None


if __name__ == "__main__":
    main()
