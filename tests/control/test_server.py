"""The coordinator's port: who is let in, what strangers cost, and what a closed connection proves."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import dump_config
from fsdp_jobs.control import attempt
from fsdp_jobs.control import server as door
from fsdp_jobs.control.coordinator import Coordinator
from fsdp_jobs.control.server import Server
from fsdp_jobs.node import link as link_module
from fsdp_jobs.node.link import Link
from fsdp_jobs.run import events, messages, threads
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, COORDINATOR_ENV
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.processes import free_port, hold_port, raise_file_limit, wildcards
from fsdp_jobs.run.protocol import AGENT, COORDINATOR, proof
from fsdp_jobs.run.tail import read_json_lines
from fsdp_jobs.run.term import COORDINATOR as COORDINATORS
from fsdp_jobs.run.term import ROUND, claim, newest
from fsdp_jobs.run.verdict import Verdict
from tests.control.cluster import Cluster

AGENT_A = messages.Agent(0, 0, host="here", address="here", nproc=1, switches=(), copies=0, id="a")


def hello(local: tuple[str, int], agent: messages.Agent = AGENT_A) -> messages.Hello:
    return messages.Hello(agent, 0, messages.NO_ROUND, ready=True, ended=False, signal="", local=local, at=0.0)


class Stranger:
    """A connection, before it has proved anything."""

    def __init__(self, port: int, host: str = "127.0.0.1"):
        self.socket = socket.create_connection((host, port), timeout=10)
        self.lines = self.socket.makefile("r")

    def send(self, **message: Any) -> None:
        self.socket.sendall((json.dumps(message) + "\n").encode())

    def receive(self) -> dict[str, Any]:
        return dict(json.loads(self.lines.readline()))

    def enter(self, token: str, agent: str = "a", local: tuple[str, int] | None = None) -> None:
        challenge = self.receive()["nonce"]
        self.send(nonce="n", proof=proof(token, AGENT, challenge, "n"))
        assert self.receive()["proof"] == proof(token, COORDINATOR, challenge, "n")
        self.socket.sendall(hello(local or self.socket.getsockname()[:2], replace(AGENT_A, id=agent)).line())

    def is_closed(self) -> bool:
        try:
            while self.socket.recv(1 << 16):
                pass
            return True
        except TimeoutError:
            return False
        except ConnectionError:
            return True


def listening() -> set[int]:
    """The ports on which this process is listening."""
    connections = psutil.Process().net_connections("tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def serving(folder: Path, talk: Callable[[int, Server], None]) -> None:
    """Serve a coordinator while `talk` is a client of it, in a thread."""

    async def main() -> None:
        run, port = RunDir(folder / "run"), free_port()
        run.attempt(0).mkdir(parents=True)
        config = compose_job(["nodes=1", "nproc_per_node=1"])
        server = Server(Coordinator(config, run, 0, time.monotonic()), "secret")
        serving = asyncio.create_task(server.serve(wildcards(), port))
        while not serving.done() and port not in listening():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(talk, port, server)
        serving.cancel()

    asyncio.run(main())


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def answer(agent: Stranger, at: float) -> dict[str, Any]:
    agent.send(kind="beat", at=at)
    while (received := agent.receive()).get("at") != at:
        pass
    return received


def recorded(server: Server, kind: str) -> list[dict[str, Any]]:
    return [e for e in read_json_lines(server.coordinator.run.events) if e["event"] == kind]


@pytest.mark.skipif("::" not in wildcards(), reason="this machine has no IPv6")
def test_an_agent_with_only_ipv6_is_connected(tmp_path: Path) -> None:
    def talk(port: int, server: Server) -> None:
        stranger = Stranger(port, "::1")
        stranger.enter("secret")
        until(lambda: server.coordinator.agents)

    serving(tmp_path, talk)


def test_only_who_knows_the_token_gets_in_and_it_never_travels(tmp_path: Path) -> None:
    def talk(port: int, server: Server) -> None:
        for answer in ({"nonce": "n", "proof": "secret"}, {"nonce": "n", "proof": proof("x", AGENT, "c", "n")}, {}):
            stranger = Stranger(port)
            stranger.receive()
            stranger.send(**answer)
            assert stranger.is_closed()
        replayed = Stranger(port)  # what another connection has proved
        replayed.receive()
        replayed.send(nonce="n", proof=proof("secret", AGENT, "an older challenge", "n"))
        assert replayed.is_closed() and not server.coordinator.agents
        friend = Stranger(port)
        friend.enter("secret")
        assert friend.receive()["kind"] == "alive"

    serving(tmp_path, talk)


def test_an_agent_does_not_believe_whoever_answers(caplog: pytest.LogCaptureFixture) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    elastic = compose_job(["elastic.heartbeat_interval_s=0.1"]).elastic
    told: list[object] = []
    link = Link(f"127.0.0.1:{listener.getsockname()[1]}", "secret", hello, messages.Beat, told.append, elastic)
    connection, _ = listener.accept()
    with connection, connection.makefile("r") as lines:
        connection.sendall(b'{"nonce": "c"}\n')
        sent = lines.readline()
        connection.sendall(b'{"kind": "welcome", "proof": "trust me"}\n{"kind": "end", "exit_code": 0, "why": "x"}\n')
        assert "secret" not in sent and lines.readline() == ""
    link.close()
    listener.close()
    assert not told and "does not have this job's token" in caplog.text


def test_an_agent_logs_whom_it_cannot_reach(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_LOG_AFTER_S", 0.5)
    port = free_port()
    link = Link(f"127.0.0.1:{port}", "secret", hello, messages.Beat, lambda _: None, compose_job([]).elastic)
    deadline = time.monotonic() + 20
    while f"no connection to the coordinator at 127.0.0.1:{port}" not in caplog.text:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.1)
    time.sleep(1)
    link.close()
    assert caplog.text.count("no connection to the coordinator") == 1 and "refused" in caplog.text


@pytest.mark.parametrize(("beat", "message"), [("1 // 0", "{}"), ("messages.Beat()", "1 // 0")])
def test_an_agent_ends_of_an_error_in_a_thread_that_its_link_needs(beat: str, message: str) -> None:
    """Its launcher starts another; without beats, or without a link, the node would be lost for no known reason."""
    code = f"""
import socket, threading
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import dump_config
from fsdp_jobs.node.link import Link
from fsdp_jobs.run import messages
elastic = compose_job(["elastic.heartbeat_interval_s=0.1"]).elastic
server = socket.create_server(("127.0.0.1", 0))
address = "127.0.0.1:%d" % server.getsockname()[1]
Link._talk = lambda *_: {message}
Link(address, "secret", lambda _: None, lambda: {beat}, print, elastic)
threading.Event().wait(10)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr, done


def test_strangers_fill_neither_descriptors_nor_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(door, "_STRANGERS", 8)
    caplog.set_level(logging.INFO)

    def talk(port: int, server: Server) -> None:
        for reads in (True, False):
            looks = Stranger(port)  # as a guard does, every few seconds
            looks.receive() if reads else looks.socket.recv(1, socket.MSG_PEEK)
            looks.lines.close()
            looks.socket.close()
            until(lambda: not server._strangers)
        assert not server._refused and not caplog.text
        held = [Stranger(port) for _ in range(40)]
        until(lambda: len(server._strangers) == 9)
        friend = Stranger(port)
        friend.enter("secret")
        assert friend.receive()["kind"] == "alive"
        nested = b'{"nonce": "n", "of": ' + b"[" * 50_000 + b"\n"
        for content in (b"GET / HTTP/1.1\n\n", b"\x00\xff\n", b"[]\n", b"7\n", nested, b"x" * 200_000):
            for stranger in [Stranger(port) for _ in range(10)]:
                with suppress(OSError):
                    stranger.socket.sendall(content)
                assert stranger.is_closed()
        assert held and [agent.id for agent in server.coordinator.agents.values()] == ["a"]

    serving(tmp_path, talk)
    lines = [r for r in caplog.records if "refused" in r.getMessage() or r.levelno >= logging.ERROR]
    assert len(lines) == 1, caplog.text


def test_who_proves_nothing_is_closed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_PROVE_S", 0.5)

    def talk(port: int, server: Server) -> None:
        stranger = Stranger(port)
        stranger.receive()
        assert stranger.is_closed()

    serving(tmp_path, talk)


def test_what_a_closed_connection_proves(tmp_path: Path) -> None:
    def talk(port: int, server: Server) -> None:
        def enters(agent: str, local: tuple[str, int] | None = None) -> Stranger:
            stranger = Stranger(port)
            stranger.enter("secret", agent, local)
            while stranger.receive()["kind"] != "round":
                pass
            return stranger

        leases = server.coordinator.leases
        dead = enters("dead")
        dead.lines.close()
        dead.socket.close()  # as the kernel does when the process dies
        until(lambda: len(recorded(server, "node_lost")) == 1)
        assert "dead" not in leases
        reset = enters("reset")
        reset.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reset.lines.close()
        reset.socket.close()
        until(lambda: len(recorded(server, "node_lost")) == 2)
        assert "reset" in leases, "it may train on"
        leases.clear()
        behind_proxy = enters("proxied", local=("10.0.0.1", 1))
        behind_proxy.lines.close()
        behind_proxy.socket.close()
        until(lambda: len(recorded(server, "node_lost")) == 3)
        assert "proxied" in leases, "whatever is in between may have closed it"
        leases.clear()
        away = enters("away")
        away.send(kind="away")
        until(lambda: any(agent.is_away for agent in server.coordinator.agents.values()))
        away.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as if we answer it late
        away.lines.close()
        away.socket.close()
        time.sleep(1)
        assert len(recorded(server, "node_lost")) == 3 and "away" in leases, "it said that it would come again"

    serving(tmp_path, talk)


def test_agents_get_answers_while_the_run_directory_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their ranks run on, but look for a newer round before they write: this machine may be the only one cut off."""
    answers, iterdir, last_attempt, locked = threading.Event(), Path.iterdir, RunDir.last_attempt, events._locked
    exclude = RunDir.exclude
    answers.set()

    def slowly(path: Path) -> Iterator[Path]:
        answers.wait(20)
        return iterdir(path)

    def as_slowly(run: RunDir) -> int:
        answers.wait(20)
        return last_attempt(run)

    def as_slowly_locked(path: Path) -> int:
        answers.wait(20)
        return locked(path)

    def as_slowly_excluded(run: RunDir, host: str, for_s: float, why: str) -> None:
        answers.wait(20)
        exclude(run, host, for_s, why)

    monkeypatch.setattr(Path, "iterdir", slowly)
    monkeypatch.setattr(RunDir, "last_attempt", as_slowly)
    monkeypatch.setattr(RunDir, "exclude", as_slowly_excluded)
    monkeypatch.setattr(events, "_locked", as_slowly_locked)
    monkeypatch.setattr(door, "_LOOK_S", 0.1)
    monkeypatch.setattr(door, "CHARGE_S", 0.8)
    monkeypatch.setattr(threads, "_SOON_S", 0.02)

    def talk(port: int, server: Server) -> None:
        agent = Stranger(port)
        agent.enter("secret")
        until(lambda: server.coordinator.round.running)
        assert answer(agent, 4)["is_in_charge"]
        answers.clear()
        time.sleep(1)  # it looks for requests every 0.3 s
        assert not answer(agent, 5)["is_in_charge"]
        asked_at = time.time()
        agent.send(kind="notice", signal="SIGTERM")
        while agent.receive()["kind"] != "request":
            pass
        assert not answer(agent, 6)["is_in_charge"], "its event waits, but no agent"
        server.coordinator.exclude(events.MachineExcluded("slow", "it is slow"), 60)
        assert "slow" in server.coordinator.excluded and not server.coordinator.run.excluded.exists()
        time.sleep(1)
        answers.set()
        until(lambda: answer(agent, 7)["is_in_charge"])
        until(lambda: recorded(server, "stop_requested"))
        until(lambda: recorded(server, "machine_excluded"))
        (asked,) = recorded(server, "stop_requested")
        assert asked_at <= asked["time"] < asked_at + 0.9
        write_atomic(server.coordinator.run.stop_request, "enough")
        until(lambda: server.coordinator.is_cancelled)

    serving(tmp_path, talk)


def test_a_coordinator_steps_back_for_a_newer_one_where_the_markers_were_purged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_LOOK_S", 0.01)
    run = RunDir(tmp_path / "run")
    run.attempt(0).mkdir(parents=True)
    config = compose_job(["nodes=1", "nproc_per_node=1"])

    async def main() -> None:
        old = Coordinator(config, run, 0, time.monotonic())
        charge = asyncio.create_task(Server(old, "secret")._keep_charge())
        while newest(run.attempt(0), COORDINATORS) < 3:
            await asyncio.sleep(0.01)
        term = claim(run.checkpoints, ROUND, "its round", above=old.term_seen)
        events.record(run, 0, events.RoundStarted([0], ["a"], "full_shard", 1, 1, term=term))
        for home in (run.checkpoints, run.attempt(0)):
            shutil.rmtree(home / "terms")
        new = Coordinator(config, run, 0, time.monotonic())
        newer = asyncio.create_task(Server(new, "secret")._keep_charge())
        await asyncio.wait([charge], timeout=30)
        assert old.is_superseded and not new.is_superseded
        newer.cancel()

    for earlier in range(2):
        claim(run.attempt(0), COORDINATORS, f"coordinator {earlier}")
    asyncio.run(main())


def test_a_coordinator_steps_back_for_a_later_attempt_also_after_errors_of_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "_LOOK_S", 0.01)
    run = RunDir(tmp_path / "run")
    run.attempt(0).mkdir(parents=True)
    coordinator = Coordinator(compose_job(["nodes=1", "nproc_per_node=1"]), run, 0, time.monotonic())
    last_attempt, errors = RunDir.last_attempt, [OSError(errno.ESTALE, "Stale file handle")]

    def erring(run: RunDir) -> int:
        if errors:
            raise errors.pop()
        return last_attempt(run)

    monkeypatch.setattr(RunDir, "last_attempt", erring)

    async def main() -> None:
        charge = asyncio.create_task(Server(coordinator, "secret")._keep_charge())
        await asyncio.sleep(0.1)
        assert not coordinator.is_superseded
        run.attempt(1).mkdir()
        await asyncio.wait([charge], timeout=5)
        assert coordinator.is_superseded

    asyncio.run(main())


def test_storage_that_answers_with_an_error_is_not_said_to_be_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard against stalls waits while storage does not answer: a full disk would switch it off."""
    monkeypatch.setattr(door, "_LOOK_S", 0.01)
    monkeypatch.setattr(attempt, "_AWAY_S", 0.2)
    is_full, touch = True, Path.touch

    def fails(file: Path, **how: Any) -> None:
        if is_full and file.parent.name == "terms":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(file))
        touch(file, **how)

    monkeypatch.setattr(Path, "touch", fails)

    def talk(port: int, server: Server) -> None:
        nonlocal is_full
        until(lambda: recorded(server, "waiting"))
        time.sleep(0.5)
        assert not server.coordinator.storage_note(time.monotonic())
        is_full = False
        until(lambda: time.monotonic() < server.coordinator.in_charge_until)
        until(lambda: len(recorded(server, "waiting")) == 2)
        failed, over = (event["why"] for event in recorded(server, "waiting"))
        assert "Disk quota exceeded" in failed and str(server.coordinator.run.path) in failed and not over

    serving(tmp_path, talk)


def test_a_replaced_coordinator_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """It waited for the newer one's verdict until it was killed."""
    run, port = RunDir(tmp_path / "run"), free_port()
    run.attempt(0).mkdir(parents=True)
    write_atomic(run.token, "secret")
    write_atomic(run.config, dump_config(compose_job(["nodes=1", "nproc_per_node=1"])))
    env = os.environ | {ATTEMPT_ENV: "0", COORDINATOR_ENV: f"127.0.0.1:{port}"}
    process = subprocess.Popen([sys.executable, "-m", "fsdp_jobs.control.server", str(run.path)], env=env)
    try:
        until(lambda: newest(run.attempt(0), COORDINATORS))
        claim(run.attempt(0), COORDINATORS, "a newer one")
        time.sleep(door._LOOK_S + 0.5)
        assert process.poll() is None
        process.terminate()
        assert process.wait(5)
    finally:
        process.kill()
        process.wait()


def test_a_machine_stays_excluded_while_storage_hangs_after_another_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could take part in the next round."""
    monkeypatch.setattr(threads, "_SOON_S", 0.02)
    coordinator, answers = Cluster(tmp_path, "nodes=3").coordinator, [threading.Event() for _ in range(2)]
    for node, answer in enumerate(answers):
        coordinator.records.begin(answer.wait, 20)
        coordinator.exclude(events.MachineExcluded(f"node{node}", "it failed"), 60)
    answers[0].set()
    until(coordinator.run.excluded_hosts)
    time.sleep(0.2)
    assert coordinator.excluded.keys() == {"node0", "node1"}
    answers[1].set()


def test_a_replaced_coordinator_outlives_storage_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher started another one, which took over from the newer one: no agent connected to it."""
    monkeypatch.setattr(door, "_LOOK_S", 0.01)
    read, looks = Verdict.read, list[int]()

    def fails(run: RunDir, attempt: int) -> Verdict | None:
        looks.append(attempt)
        if len(looks) < 3:
            raise OSError(errno.EIO, "Input/output error")
        return read(run, attempt)

    monkeypatch.setattr(Verdict, "read", fails)

    def talk(port: int, server: Server) -> None:
        run = server.coordinator.run
        until(lambda: server.coordinator.terms.number)
        claim(run.attempt(0), COORDINATORS, "a newer one")
        until(lambda: len(looks) > 5)
        assert port in listening()
        Verdict("done", "stop", "all steps are done").write(run, 0)
        until(lambda: port not in listening())

    serving(tmp_path, talk)


def test_a_verdict_that_waited_for_storage_does_not_end_the_attempt_of_a_newer_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_SOON_S", 0.02)
    cluster = Cluster(tmp_path, "nodes=1", "elastic.join_window_s=0")
    run, coordinator = cluster.run, cluster.coordinator
    coordinator.terms.take_charge(0)
    answers = threading.Event()
    coordinator.records.begin(answers.wait, 20)
    coordinator.close(Verdict("infrastructure", "requeue", "it saw no node"), cluster.now)
    claim(run.attempt(0), COORDINATORS, "a newer one")
    answers.set()
    until(lambda: coordinator.records.begin(int).done())
    cluster.later(0.2)
    assert coordinator.is_superseded and cluster.verdict is None and not cluster.events("attempt_ended")


def test_a_coordinator_that_was_replaced_answers_no_agent_that_connects_again(tmp_path: Path) -> None:
    """Its answer would let ranks of a round run that the newer one takes for ended."""

    def talk(port: int, server: Server) -> None:
        server.coordinator.on_superseded()
        agent = Stranger(port)
        agent.enter("secret")
        assert agent.is_closed() and not server.coordinator.agents

    serving(tmp_path, talk)


def test_checkpoints_that_cannot_be_reached_leave_the_coordinator_in_charge(tmp_path: Path) -> None:
    """Else ranks look for a newer round there before each line, and drop it: they cannot reach them either."""
    run = RunDir(tmp_path / "run")
    run.attempt(0).mkdir(parents=True)
    (tmp_path / "store").write_text("no folder")
    config = compose_job(["nodes=1", "nproc_per_node=1", f"checkpoint.dir={tmp_path}/store"])

    async def main() -> None:
        coordinator = Coordinator(config, run, 0, time.monotonic())
        charge = asyncio.create_task(Server(coordinator, "secret")._keep_charge())
        while not newest(run.attempt(0), COORDINATORS):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert time.monotonic() < coordinator.in_charge_until
        charge.cancel()

    asyncio.run(asyncio.wait_for(main(), 10))


@pytest.mark.parametrize("where", [Coordinator.tick, RunDir.last_attempt])
def test_a_coordinator_ends_of_an_error_although_agents_are_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Callable[..., object]
) -> None:
    """Its launcher starts another. Since Python 3.12 a server that is closed can be waited for until they have left."""

    async def left(_: asyncio.Server) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.Server, "wait_closed", left)
    run = RunDir(tmp_path / "run")
    run.attempt(0).mkdir(parents=True)
    coordinator = Coordinator(compose_job(["nodes=1", "nproc_per_node=1"]), run, 0, time.monotonic())
    monkeypatch.setattr(f"{where.__module__}.{where.__qualname__}", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(asyncio.wait_for(Server(coordinator, "secret").serve(wildcards(), free_port()), 5))


def test_nobody_takes_the_port_of_a_coordinator_that_starts(tmp_path: Path) -> None:
    """An srun of its job listened there first: the coordinator died three times, and with it the job."""
    run = RunDir(tmp_path / "run")
    run.attempt(0).mkdir(parents=True)
    coordinator = Coordinator(compose_job(["nodes=1", "nproc_per_node=1"]), run, 0, time.monotonic())

    async def reach(port: int) -> None:
        serving = asyncio.create_task(Server(coordinator, "secret").serve(wildcards(), port))
        await asyncio.sleep(1)
        (await asyncio.open_connection("127.0.0.1", port))[1].close()
        serving.cancel()

    with hold_port() as held:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("", port))
        asyncio.run(reach(port))


def test_the_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(hard, 1 << 20) or hard == resource.RLIM_INFINITY
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
