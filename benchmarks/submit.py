"""Submit latency on a real SLURM cluster, side by side: bare sbatch, this project, TorchX, submitit.

    python benchmarks/submit.py [--times 10]

Each side is a fresh process on the login node of deploy/slurm, timed from its start until it has printed a job id;
they take turns. The jobs do nothing and are cancelled. hydra-submitit-launcher is measured when it is installed.
Needs root and what deploy/slurm needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

CLUSTER = Path(__file__).parent.parent / "deploy" / "slurm" / "cluster"
BIN = Path(sys.executable).parent
OURS = ["cluster=slurm", "cluster.accelerator=cpu", "hardware=cpu", "data=synthetic", "nodes=2"]

_SUBMITIT = """
import submitit
executor = submitit.SlurmExecutor(folder="submitit")
executor.update_parameters(nodes=2, ntasks_per_node=1, time=5)
print(executor.submit(print, "hello").job_id)
"""

_HYDRA = """
import hydra
@hydra.main(version_base="1.3", config_path=None)
def app(config):
    pass
app()
"""


def sides() -> dict[str, list[str]]:
    """The command of each side."""
    torchx = [str(BIN / "torchx"), "run", "--workspace", "", "-s", "slurm"]
    found = {
        "sbatch": ["sbatch", "--nodes=2", "--output=/dev/null", "--wrap=true"],
        "fsdp-jobs": [sys.executable, "-m", "fsdp_jobs", *OURS],
        "TorchX": [*torchx, "utils.sh", "--num_replicas", "2", "true"],
        "submitit": [sys.executable, "-c", _SUBMITIT],
    }
    if importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher"):
        found["hydra-submitit"] = [sys.executable, "app.py", "--multirun", "hydra/launcher=submitit_slurm"]
    return found


def submit(command: Sequence[str], folder: str, root: str) -> float:
    """Seconds until the command has submitted."""
    env = {**os.environ, "FSDP_JOBS_SLURM": root, "XDG_STATE_HOME": f"{folder}/state", "PYTHONDONTWRITEBYTECODE": "1"}
    begun = time.perf_counter()
    done = subprocess.run([CLUSTER, "run", "login", *command], cwd=folder, env=env, capture_output=True, text=True)
    took = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    subprocess.run([CLUSTER, "run", "login", "scancel", "--user=root"], env=env, check=True)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    args = parser.parse_args()
    root = f"/tmp/fsdp_jobs-slurm-{os.getpid()}"
    cluster = {**os.environ, "FSDP_JOBS_SLURM": root}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "app.py").write_text(_HYDRA)
        try:
            subprocess.run([CLUSTER, "up"], env=cluster, check=True)
            commands = sides()
            took: dict[str, list[float]] = {name: [] for name in commands}
            for turn in range(args.times + 1):  # the first is for the caches
                for name, command in commands.items():
                    seconds = submit(command, folder, root)
                    took[name] += [seconds] if turn else []
        finally:
            subprocess.run([CLUSTER, "down"], env=cluster, check=True)
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {args.times} submissions of 2 nodes each, seconds")
    print(f"{'':16}{'median':>8}{'least':>8}{'most':>8}")
    for name, times in took.items():
        print(f"{name:16}{statistics.median(times):8.2f}{min(times):8.2f}{max(times):8.2f}")


if __name__ == "__main__":
    main()
