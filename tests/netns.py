"""A cluster on one machine, for tests and benchmarks: each node is a set of Linux namespaces, joined by leaf switches.

Nothing here has a name outside: the namespaces are held by processes that die with this one, so a run that is
killed leaves nothing behind, and two runs do not meet. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pytest
from torchx.specs import macros

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.resolve import ranks_per_node
from fsdp_jobs.launchers.app import to_app
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ADDRESS_ENV, ATTEMPT_ENV, COORDINATOR_ENV
from fsdp_jobs.run.processes import all_processes, die_with_parent
from fsdp_jobs.run.verdict import Verdict
from fsdp_jobs.submit import submit as submission
from tests.jobs import ROOT, Job, Nobody, Watched, signal_all
from tests.world import tiny_for

CONTROL = "control"  # the machine beside the nodes, on the spine: the coordinator runs there
PORT = 29400

# PID 1 of a machine: its own host name, /proc and /dev/shm; reaps orphans until it is killed.
_INIT = """
hostname "$1"
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
printf '%s' "$2" > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
echo ready
trap : TERM INT HUP
while :; do sleep 1000000 & wait $!; done
"""


@cache
def why_not() -> str:
    """What is missing for namespaces as nodes; empty when nothing is."""
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter", "bash") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    probe = "mount -t proc proc /proc && ip link add one type veth peer name two && ip link add leaf type bridge"
    command = ["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "sh", "-c", probe]
    done = subprocess.run(command, capture_output=True, text=True)
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else ""


needs_netns = pytest.mark.skipif(bool(why_not()), reason=why_not())


@dataclass
class Machine:
    """A booted machine."""

    holder: subprocess.Popen[str]
    pid: int  # of its PID 1, as the host counts


class Fabric:
    """Machines joined by one bridge a leaf switch, the leaves by a spine; with byte counters on every link."""

    def __init__(self, nodes: Sequence[str], leaves: Sequence[str] | None = None, rate: str | None = None):
        """`leaves`: each node's leaf switch, by default one for all. `rate` limits what a node sends (`40mbit`)."""
        self.nodes = list(nodes)
        self.leaf_of = dict(zip(nodes, leaves or ["leaf1"] * len(nodes), strict=True))
        self.rate = rate
        self.addresses = {name: f"10.77.0.{i + 1}" for i, name in enumerate([*nodes, CONTROL])}
        self.machines: dict[str, Machine] = {}
        self._switches: subprocess.Popen[str] | None = None  # holds the namespace that the bridges are in

    def __enter__(self) -> Fabric:
        self._switches = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", "echo ready; exec sleep infinity"],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            preexec_fn=die_with_parent,
        )
        assert self._switches.stdout is not None and self._switches.stdout.readline() == "ready\n"
        try:
            lines = ["link add spine type bridge", "link set spine up"]
            for leaf in sorted(set(self.leaf_of.values())):
                lines += [
                    f"link add {leaf} type bridge",
                    f"link set {leaf} up",
                    f"link add up-{leaf} type veth peer name down-{leaf}",
                    f"link set up-{leaf} master {leaf} up",
                    f"link set down-{leaf} master spine up",
                ]
            self._ip(*lines)
            for name in [CONTROL, *self.nodes]:
                self.boot(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for name in list(self.machines):
            self.crash(name)
        if self._switches is not None:
            self._switches.kill()
            self._switches.wait()

    def boot(self, name: str) -> None:
        """Start a machine: at first, or as the replacement of one that crashed."""
        assert self._switches is not None and name not in self.machines
        hosts = "127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in self.addresses.items())
        spaces = ["--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child"]
        holder = subprocess.Popen(
            [
                "nsenter",
                "-t",
                str(self._switches.pid),
                "--mount",
                "unshare",
                *spaces,
                "bash",
                "-c",
                _INIT,
                "init",
                name,
                hosts,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            raise OSError(f"{name} does not boot: {holder.stderr.read()}")
        (pid,) = _children(holder.pid)
        self.machines[name] = Machine(holder, pid)
        bridge = self.leaf_of.get(name, "spine")
        with suppress(subprocess.CalledProcessError):  # of a crashed one the kernel may not have taken it away yet
            self._ip(f"link del {_port(name)}", quiet=True)
        self._ip(
            f"link add {_port(name)} type veth peer name eth0 netns {pid}", f"link set {_port(name)} master {bridge} up"
        )
        inside = [f"addr add {self.addresses[name]}/16 dev eth0", "link set lo up", "link set eth0 up"]
        self._ip(*inside, at=pid)
        if self.rate and name in self.nodes:
            shape = [
                "tc",
                "qdisc",
                "add",
                "dev",
                "eth0",
                "root",
                "tbf",
                "rate",
                self.rate,
                "burst",
                "256kb",
                "latency",
                "50ms",
            ]
            subprocess.run(["nsenter", "-t", str(pid), "--net", *shape], check=True)

    def crash(self, name: str) -> None:
        """Kill everything on a machine at once, and the machine. Its peers see their connections closed."""
        machine = self.machines.pop(name)
        with suppress(ProcessLookupError):
            os.kill(machine.pid, signal.SIGKILL)
        machine.holder.wait()

    def cut(self, name: str) -> None:
        """Take a machine's link down: packets simply stop, no connection is closed."""
        self._ip(f"link set {_port(name)} down")

    def heal(self, name: str) -> None:
        self._ip(f"link set {_port(name)} up")

    def bytes_sent(self, node: str) -> int:
        """Bytes this node has put on its link since it was booted."""
        return self._received_on(_port(node))

    def uplink_bytes(self, leaf: str) -> int:
        """Bytes that have left this leaf switch for the spine."""
        return self._received_on(f"down-{leaf}")

    def run(self, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command on a machine. What is returned is nsenter, its parent, and ends as it does."""
        pid = self.machines[name].pid
        log.parent.mkdir(parents=True, exist_ok=True)
        enter = ["nsenter", "-t", str(pid), "--net", "--uts", "--ipc", "--pid", "--mount", f"--wd={Path.cwd()}", "--"]
        with log.open("ab") as out:
            return subprocess.Popen(
                [*enter, *argv],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def processes(self, name: str) -> list[psutil.Process]:
        """Everything that runs on a machine but its PID 1 and what that sleeps with."""
        machine = self.machines[name]
        space = Path(f"/proc/{machine.pid}/ns/pid").readlink()
        own = {machine.pid, *_children(machine.pid)}
        found = []
        for process in all_processes():
            with suppress(OSError, psutil.NoSuchProcess):
                if Path(f"/proc/{process.pid}/ns/pid").readlink() == space and process.pid not in own:
                    found.append(process)
        return found

    def memory(self, name: str) -> list[str]:
        """The names of what is in a machine's /dev/shm."""
        found = Path(f"/proc/{self.machines[name].pid}/root/dev/shm").iterdir()
        return sorted(file.name for file in found if file.name != "hosts")

    def ranks(self, name: str) -> list[psutil.Process]:
        """The ranks that run on a machine."""
        found = []
        for process in self.processes(name):
            with suppress(psutil.Error):  # it has ended
                if any(" rank " in word for word in process.cmdline()):
                    found.append(process)
        return found

    def signal_all(self, name: str, number: signal.Signals) -> None:
        """Send a signal to everything on a machine, older processes first."""
        signal_all(sorted(self.processes(name), key=lambda p: p.pid), number)

    def _ip(self, *lines: str, at: int | None = None, quiet: bool = False) -> None:
        assert self._switches is not None
        enter = ["nsenter", "-t", str(at or self._switches.pid), "--net", "ip", "-batch", "-"]
        stderr = subprocess.DEVNULL if quiet else None
        subprocess.run(enter, input="\n".join(lines) + "\n", text=True, check=True, stderr=stderr)

    def _received_on(self, link: str) -> int:
        assert self._switches is not None
        for line in Path(f"/proc/{self._switches.pid}/net/dev").read_text().splitlines():
            name, colon, counters = line.partition(":")
            if colon and name.strip() == link:
                return int(counters.split()[0])
        raise KeyError(link)


def _port(name: str) -> str:
    return f"p-{name}"


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class NetnsJob(Job):
    """A job whose nodes are a fabric's, submitted by the project's own functions and started by the test.

    `keep` names the processes that are started again when they die, as a cluster would: `coordinator`, and nodes.
    """

    def __init__(
        self,
        fabric: Fabric,
        folder: Path,
        name: str,
        *overrides: str,
        switches: bool = False,
        port: int = PORT,
        **env: str,
    ):
        """`switches`: tell the agents where on the fabric they are, in SLURM's words. `port`: of the coordinator."""
        self.fabric, self.folder, self.name, self.switches, self.port = fabric, folder, name, switches, port
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
        given = [f"name={name}", f"runs_dir={folder / 'runs'}", f"nodes={len(fabric.nodes)}", "nproc_per_node=1"]
        given += tiny_for(overrides)
        keys = {o.partition("=")[0] for o in overrides}
        self.overrides = [o for o in given if o.partition("=")[0] not in keys] + list(overrides)
        config = compose_job(self.overrides)
        (prepared,) = submission.prepare([config])
        submission.submit([replace(prepared, launcher=Nobody())], [self.overrides])  # type: ignore[arg-type]
        Watched.__init__(self, RunDir(prepared.run.path.resolve()))
        self.config, self.plan = config, prepared.plan
        self.roles = {r.name: r for r in to_app(config, self.run, ranks_per_node(config), "").roles}
        self.attempt = -1
        self.started: dict[str, subprocess.Popen[bytes]] = {}  # by machine
        self.keep: set[str] = set()
        self.beside: list[NetnsJob] = []  # jobs that are tended with this one
        self.clocks: dict[str, float] = {}  # by machine, by how many seconds Python's clock is off there

    def start(self, *nodes: str) -> None:
        """Begin the next attempt, on these nodes or all."""
        self.attempt = self.run.last_attempt() + 1
        self.run.attempt(self.attempt).mkdir(parents=True)
        events.record(self.run, self.attempt, events.AttemptStarted(len(nodes or self.fabric.nodes)))
        self.started = {}
        for name in [CONTROL, *(nodes or self.fabric.nodes)]:
            self.start_process(name)

    def start_process(self, name: str, number: int | None = None) -> None:
        """Start the coordinator (on `control`) or a node's agent, as node `number`; by default, the machine's."""
        is_node = name != CONTROL
        if number is None:
            number = self.fabric.nodes.index(name) if is_node else 0
        role = macros.Values(img_root="", app_id=self.name, replica_id=str(number), rank0_env="").apply(
            self.roles["trainer" if is_node else "coordinator"]
        )
        env = {
            **self.env,
            **role.env,
            ATTEMPT_ENV: str(self.attempt),
            COORDINATOR_ENV: f"{self.fabric.addresses[CONTROL]}:{self.port}",
            ADDRESS_ENV: self.fabric.addresses[name],
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        if name in self.clocks:
            env |= {"PYTHONPATH": f"{self._shifted_clock()}:{ROOT}", "CLOCK_IS_OFF_S": str(self.clocks[name])}
        if is_node and self.switches:
            env["SLURM_TOPOLOGY_ADDR"] = f"spine.{self.fabric.leaf_of[name]}.{name}"
        folder = self.run.attempt(self.attempt)
        log = folder / (f"node-{number}/agent.log" if is_node else "coordinator.log")
        self.started[name] = self.fabric.run(name, [role.entrypoint, *role.args], env, log)

    def _shifted_clock(self) -> Path:
        """A folder that shifts `time.time` in Python that is started with it: Linux has one for all namespaces."""
        folder = self.folder / "clock"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(
            "import os, time\n"
            "right, off_s = time.time, float(os.environ['CLOCK_IS_OFF_S'])\n"
            "time.time = lambda: right() + off_s\n"
        )
        return folder

    def tend(self) -> None:
        """Start again what died and is to be kept, while the attempt is not over."""
        if Verdict.read(self.run, self.attempt) is None:
            for name in self.keep & set(self.fabric.machines):
                process = self.started.get(name)
                if process is None or process.poll() is not None:
                    self.start_process(name)
        for other in self.beside:
            other.tend()

    def until(self, true: Any, what: str, seconds: float = 180) -> None:
        def tended() -> bool:
            self.tend()
            return bool(true())

        super().until(tended, what, seconds)

    def wait(self, seconds: float = 240) -> Verdict:
        """Until the attempt is judged and its processes have gone; returns the verdict."""

        def over() -> bool:
            alive = [n for n, p in self.started.items() if p.poll() is None and n in self.fabric.machines]
            return Verdict.read(self.run, self.attempt) is not None and not alive

        self.until(over, "the end of the attempt", seconds)
        verdict = Verdict.read(self.run, self.attempt)
        assert verdict is not None
        return verdict

    def coordinator(self) -> psutil.Process:
        return self._child(CONTROL)

    def agent(self, node: int | str) -> psutil.Process:
        return self._child(self.fabric.nodes[node] if isinstance(node, int) else node)

    def _child(self, name: str) -> psutil.Process:
        (pid,) = _children(self.started[name].pid)
        return psutil.Process(pid)

    def crash(self, node: str, silently: bool = False) -> None:
        """The whole machine goes: powered off (`silently`: nobody is told), or killed with its connections closed."""
        if silently:
            self.fabric.cut(node)
        self.fabric.crash(node)
        self._reap(node)

    def hang(self, node: str) -> None:
        """Everything on a node stands still; its kernel goes on acknowledging packets."""
        self.fabric.signal_all(node, signal.SIGSTOP)

    def wake(self, node: str) -> None:
        self.fabric.signal_all(node, signal.SIGCONT)
        self.started[node].send_signal(signal.SIGCONT)  # nsenter stops when its child does

    def replace(self, node: str) -> None:
        """A new machine under the same name, with a new agent."""
        self.fabric.boot(node)
        self.start_process(node)

    def kill(self) -> None:
        for name in list(self.started):
            if name in self.fabric.machines:
                self.fabric.signal_all(name, signal.SIGKILL)
            self._reap(name)

    def _reap(self, name: str) -> None:
        process = self.started.pop(name)
        process.send_signal(signal.SIGCONT)
        process.wait()

    def supervisor(self) -> psutil.Process | None:
        return None


@contextmanager
def netns_job(
    fabric: Fabric, folder: Path, name: str, *overrides: str, on: Sequence[str] = (), **kwargs: Any
) -> Iterator[NetnsJob]:
    """A job started on all machines of a fabric, or some.

    At the end it is killed if it is still there, and crashed nodes are booted for the next one.
    """
    made = NetnsJob(fabric, folder, name, *overrides, **kwargs)
    try:
        made.start(*on)
        yield made
    finally:
        made.kill()
        for node in fabric.nodes:
            if node not in fabric.machines:
                fabric.boot(node)
            fabric.heal(node)
