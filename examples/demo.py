"""The main job on this machine, one of its nodes killed half way: `make demo`.

Runs the command line as anyone would, with this terminal, and kills the agent of node 1 with SIGKILL while it
trains. Extra arguments are overrides of the job. Exits with 0 only if the job was done and had really recovered.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from fsdp_jobs.config.schema import load_config
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.tail import read_json_lines
from fsdp_jobs.run.verdict import Verdict

NODE = 1


class Killer(threading.Thread):
    """Waits until the run is past its half, then kills one node of it."""

    def __init__(self, run: RunDir):
        super().__init__(daemon=True)
        self.run_dir = run
        self.killed_at = 0.0  # seconds since 1970; 0.0: not done
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.1):
            if not self.run_dir.metrics.exists():
                continue
            config = load_config(self.run_dir.config)
            # A few steps after the checkpoint, so that there is something to do again.
            at = config.steps // 2 + config.checkpoint.every_steps // 4
            if any(record["step"] >= at for record in read_json_lines(self.run_dir.metrics)):
                agent = self._agent()
                say(f"demo: killing node {NODE} with SIGKILL (its agent, pid {agent.pid})")
                self.killed_at = time.time()
                agent.kill()
                return

    def _agent(self) -> psutil.Process:
        known = json.loads((self.run_dir.submit / "supervisor.json").read_text())
        for child in psutil.Process(known["pid"]).children():
            words = child.cmdline()
            if "fsdp_jobs.node.agent" in words and words[words.index("--node") + 1] == str(NODE):
                return child
        raise RuntimeError(f"the job has no node {NODE}")


def say(line: str) -> None:
    """A line of ours above the job's live line, in one write; the live line draws itself anew."""
    text = f"\r\x1b[2K\x1b[1;31m{line}\x1b[0m\n" if sys.stdout.isatty() else f"{line}\n"
    os.write(sys.stdout.fileno(), text.encode())


def failures(run: RunDir, killed_at: float, exit_code: int) -> list[str]:
    """What there is to say against "the job recovered and was done", from the run directory."""
    verdict = Verdict.read(run, run.last_attempt())
    after = [e.kind for e in events.read_events(run) if e.time > killed_at]
    found = []
    if exit_code:
        found.append(f"the job exited with {exit_code}")
    if not killed_at:
        found.append("no node was killed")
    if verdict is None or verdict.verdict != "done":
        found.append(f"the verdict is {verdict.verdict if verdict else 'missing'}")
    found += [f"no {e} after the kill" for e in ("node_lost", "round_started", "resumed", "done") if e not in after]
    return found


def summary(run: RunDir, killed_at: float) -> str:
    metrics = list(read_json_lines(run.metrics))
    after = [e for e in events.read_events(run) if e.time > killed_at]
    reached = next(e.step for e in after if isinstance(e, events.RoundBroken))
    resumed = next(e for e in after if isinstance(e, events.Resumed))
    trained_at = next(m["time"] for m in metrics if m["time"] > resumed.time)
    command = Path(sys.executable).parent / "fsdp-jobs"
    fsdp_jobs = os.path.relpath(command) if command.exists() else "python -m fsdp_jobs"
    return f"""
demo: node {NODE} was killed at step {reached}, and the job recovered by itself
  loss                    {metrics[0]["loss"]:.3f} -> {metrics[-1]["loss"]:.3f} over {metrics[-1]["step"]} steps
  kill to the next step   {trained_at - killed_at:.1f} s, from the checkpoint of step {resumed.step}
  steps done again        {reached - resumed.step}
type next
  {fsdp_jobs} resume {run.name} steps={2 * metrics[-1]["step"]}
  {fsdp_jobs} export {run.name}
  {fsdp_jobs} plan model=llama3_8b cluster=slurm nodes=4
  {fsdp_jobs} --help"""


def main() -> int:
    run = RunDir(Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S"))
    # hybrid_shard, because the plan would not shard so small a model at all.
    command = ["-m", "fsdp_jobs", f"name={run.name}", "fsdp=hybrid_shard", *sys.argv[1:]]
    print(f"$ python {' '.join(command)}", flush=True)
    killer = Killer(run)
    killer.start()
    job = subprocess.Popen([sys.executable, *command])
    while True:
        try:
            exit_code = job.wait()
            break
        except KeyboardInterrupt:  # the job got it, too, and is saving
            continue
    killer.stop.set()
    killer.join()
    faults = failures(run, killer.killed_at, exit_code)
    if faults:
        print(f"demo: not as expected: {'; '.join(faults)}", flush=True)
        return 1
    print(summary(run, killer.killed_at))
    return 0


if __name__ == "__main__":
    sys.exit(main())
