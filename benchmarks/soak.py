"""Kills at random moments of a job on four nodes, also while it saves and while it recovers.

    python benchmarks/soak.py [--kills 8] [--seed N] [overrides]
    python benchmarks/soak.py --kills 50 checkpoint.async_mode=process checkpoint.local_dir=/dev/shm/fast
    python benchmarks/soak.py --kills 100 checkpoint.memory.every_steps=1 [fsdp=hybrid_shard fsdp.shard_group=2]
    python benchmarks/soak.py --kills 50 --beside checkpoint.memory.every_steps=1

Each kill is of a rank, an agent, a whole node, the coordinator, or of everything on all nodes, after which the next
attempt begins; what died is started again, as a cluster would. With snapshots in memory ranks are killed on all nodes
at once, and nothing is saved on a disk: each resume must be from memory and do at most one step again, which holds
where nothing else runs: while agents get no CPU to seal snapshots, none are taken. Two nodes that hold the same shards
are not killed in one recovery. With --beside a second job runs there, which dies with them.
Each run must end with the losses of an undisturbed one, to the bit, and leave neither a process nor a file in memory on
any node. Exit code 1 when one does not. Nodes are network namespaces with a /dev/shm each: needs root.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))  # for tests.netns

from fsdp_jobs.plan.layout import partners
from tests.netns import CONTROL, PORT, Fabric, NetnsJob, netns_job, why_not

NODES = ["node1", "node2", "node3", "node4"]
EVERY, BATCH, STEPS_A_KILL = 5, 8, 15
WHAT = ("rank", "agent", "node", "node", "rank", "agent", "rank", "coordinator", "all nodes")
WHEN = ("training", "saving", "recovering")
IN_MEMORY = (("node", "node", "agent", "all ranks", "all nodes"), ("training", "training", "training", "recovering"))


def kill(job: NetnsJob, what: str, node: str) -> None:
    """Kill one thing. Processes come back because `keep` says so; a node is replaced here."""
    number = job.fabric.nodes.index(node)
    if what == "all ranks":
        job.until(lambda: any(map(job.ranks, range(len(NODES)))), "a rank", 60)  # not only of the job beside
        ranks = [rank for name in NODES for rank in job.fabric.ranks(name)]
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.kill()
    elif what == "all nodes":  # the machines go on, and with them what is in their memory
        job.kill()
        job.start()
    elif what == "coordinator":
        job.coordinator().kill()
    elif what == "rank" and job.ranks(number):
        job.ranks(number)[0].kill()
    elif what == "node":
        job.crash(node)
        job.replace(node)
    else:
        job.agent(number).kill()


def moment(job: NetnsJob, when: str, step: int, since: float) -> None:
    """Wait until the job does what it is to be killed at: `step` at least, after having recovered from a kill at
    `since`; or, for `recovering`, until the ranks of the round after that kill are being started."""

    def new_round() -> float:
        return max((e["time"] for e in job.events("round_started") if e["time"] > since), default=0.0)

    def at_work() -> bool:
        began = new_round()
        return bool(began and job.metrics() and job.metrics()[-1]["time"] > began and job.step() >= step)

    def over() -> bool:
        return bool(job.events("attempt_ended"))

    if when == "recovering":
        job.until(lambda: new_round() or over(), "the next round", 120)
    else:
        job.until(lambda: at_work() or over(), f"step {step}", 120)
        if when == "saving":
            job.until(lambda: list(job.run.checkpoints.glob("*.tmp")) or over(), "a save", 120)


def not_from_memory(job: NetnsJob) -> list[str]:
    """Name the resumes that did more than one step again, or that read anything but the nodes' memory."""
    wrong, lines = [], job.metrics()
    for resumed in job.events("resumed"):
        done = max((m for m in lines if m["time"] < resumed["time"]), key=lambda m: m["time"])["step"]
        if resumed["place"] != "memory" or resumed["step"] < done - 1:
            wrong.append(f"resumed from step {resumed['step']} of {done}, read from {resumed['place']}")
    return wrong


def wrong_losses(job: NetnsJob, expected: dict[int, float], steps: int) -> list[str]:
    """Compare a run that has ended with an undisturbed one."""
    losses, wrong = job.losses(), []
    differing = [s for s in sorted({*expected, *losses}) if losses.get(s) != expected.get(s)]
    if differing:
        wrong.append(f"{job.name}: {len(differing)} of {steps} losses differ, the first at step {differing[0]}")
    samples = {e["samples"] for e in job.events("done")}  # twice if its last round broke before all ranks had exited
    if samples != {steps * BATCH}:
        wrong.append(f"{job.name}: samples at the end: {samples}, not {steps * BATCH}")
    return wrong


def left(fabric: Fabric) -> list[str]:
    """Name what ended jobs have left on the machines."""
    wrong = []
    for name in [CONTROL, *NODES]:
        wrong += [f"{process.cmdline()} runs on {name}" for process in fabric.processes(name)]
        wrong += [f"{file} is in the memory of {name}" for file in fabric.memory(name)]
    return wrong


def soak(fabric: Fabric, folder: Path, kills: int, seed: int, has_neighbour: bool, changes: list[str]) -> list[str]:
    """Run undisturbed, then with kills; returns what is wrong with the second run's end."""
    in_memory = any(change.startswith("checkpoint.memory.every_steps=") for change in changes)
    kinds, moments = IN_MEMORY if in_memory else (WHAT, WHEN)
    steps = STEPS_A_KILL * (kills + 1)
    overrides = [
        f"steps={steps}",
        f"checkpoint.every_steps={0 if in_memory else EVERY}",
        f"data.global_batch={BATCH}",
        "fsdp=full_shard",
        "elastic.exclude_after=0",
        "elastic.heartbeat_timeout_s=5",
        *changes,
    ]
    with netns_job(fabric, folder, "undisturbed", *overrides) as calm:
        calm.wait(120 + steps)
        expected = calm.losses()
    dice = random.Random(seed)
    with ExitStack() as both:
        job = both.enter_context(netns_job(fabric, folder, "soak", *overrides))
        if has_neighbour:
            job.beside = [both.enter_context(netns_job(fabric, folder, "beside", *overrides, port=PORT + 1))]
        for one in (job, *job.beside):
            one.keep = {CONTROL, *NODES}
        before, since, node = "recovering", 0.0, NODES[0]  # a first kill has nothing to recover from
        for number in range(kills):
            # Two kills in one recovery are allowed, three in a row would rightly look like a job that cannot work.
            when = dice.choice([w for w in moments if w != "recovering"] if before == "recovering" else moments)
            spared = [partners(len(NODES))[NODES.index(node)]] if in_memory and when == "recovering" else []
            what, node = dice.choice(kinds), dice.choice([n for i, n in enumerate(NODES) if i not in spared])
            if when == "recovering" and what == "coordinator":
                what = "agent"
            moment(job, when, STEPS_A_KILL * number + dice.randint(1, STEPS_A_KILL), since)
            if job.events("attempt_ended"):
                break  # and it is judged below
            if when == "training":
                time.sleep(dice.uniform(0, 0.3))  # also within a step
            at, now = job.step(), time.time()
            kill(job, what, node)
            where = "" if what in ("coordinator", "all ranks", "all nodes") else node
            print(f"{number + 1:>3}  at step {at:>4}, {when:<10}  {what:<11} {where}", flush=True)
            if what != "coordinator":  # without it the ranks go on, and there is no new round to wait for
                before, since = when, now
        verdict = job.wait(120 + steps)
        wrong = [] if verdict.verdict == "done" else [f"verdict {verdict.verdict}: {verdict.reason}"]
        if number + 1 < kills:
            wrong.append(f"it ended before kill {number + 1}")
        wrong += wrong_losses(job, expected, steps)
        for other in job.beside:
            other.wait(120 + 2 * steps)
            wrong += wrong_losses(other, expected, steps)
        wrong += left(fabric)
        if in_memory:
            wrong += not_from_memory(job)
        redone = sum(n - 1 for n in Counter(m["step"] for m in job.metrics()).values())
        rounds = len(job.events("round_started"))
        print(f"{kills} kills, {rounds} rounds, {steps} steps, {redone} done again", flush=True)
        if wrong:
            print(job.run.events.read_text())
        return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one each time, printed")
    parser.add_argument("--beside", action="store_true", help="a second job on the same nodes")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if why_not():
        sys.exit(why_not())
    seed = args.seed if args.seed is not None else random.randrange(10_000)
    print(f"{time.strftime('%Y-%m-%d')}, {len(NODES)} nodes of one rank, seed {seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Fabric(NODES) as fabric:
        wrong = soak(fabric, Path(folder), args.kills, seed, args.beside, args.overrides)
    print(f"{time.monotonic() - began:.0f} s: {'; '.join(wrong) or 'the losses are the undisturbed ones, to the bit'}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
