"""The batch step with simulated commands of SLURM: what it does about an agent that never stays alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_jobs.launchers.base import at_once
from fsdp_jobs.launchers.slurm import client, companions
from fsdp_jobs.launchers.slurm.companions import Companions, fill_in
from fsdp_jobs.launchers.slurm.steps import Commands, srun, start_again
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import ATTEMPT_ENV, COORDINATOR_ENV
from fsdp_jobs.run.threads import in_thread
from fsdp_jobs.run.verdict import Verdict
from tests.jobs import ROOT, Watched
from tests.launchers.slurm.simulated import say
from tests.nfs import away

pytestmark = pytest.mark.integration

JUDGE = """
import sys, time
from pathlib import Path
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.verdict import Verdict
run, file, word, times = sys.argv[1:]
while Path(file).read_text().count(word) < int(times):
    time.sleep(0.05)
Verdict("done", "stop", "as simulated").close(RunDir(run), 0)
"""
SAVED = """
import sys
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.verdict import Verdict
Verdict("preempted", "requeue", "saved").close(RunDir(sys.argv[1]), 0)
"""
ASKED = """
import os, signal, socket, sys, time
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.verdict import Verdict
def save(*_):
    Verdict("preempted", "requeue", "saved").close(RunDir(sys.argv[1]), 0)
    sys.exit()
signal.signal(signal.SIGUSR1, save)
port = int(os.environ["FSDP_JOBS_COORDINATOR"].rpartition(":")[2])
listening = socket.create_server(("", port), reuse_port=True)
time.sleep(60)
"""
OWN = ("SLURM_GPUS", "SLURM_TRES_PER_TASK")
AGENT = "import sys, time; time.sleep(4) if sys.argv[1] == '0' else sys.exit(3)"


def batch(commands: Path, run: RunDir, allocation: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    """The batch step of job 7, with these commands in place of SLURM's."""
    path = {"PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "7"}
    argv = [sys.executable, "-m", "fsdp_jobs.launchers.slurm.batch", str(run.path), *args]
    return subprocess.run(argv, env={**os.environ, **path, **allocation}, capture_output=True, text=True, timeout=60)


def test_an_agent_that_dies_early_three_times_is_given_up_and_a_companion_requested(tmp_path: Path) -> None:
    for command, script in {
        "srun": f"env | grep -E '{'|'.join(OWN)}' >> {tmp_path}/told\n"
        'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        "squeue": "echo '7|RUNNING|None|N/A|node[1-2]|node1|7'",
        "sbatch": f'echo "$@" > {tmp_path}/submitted; echo 8',
        "scancel": f'echo "$@" > {tmp_path}/cancelled',
    }.items():
        say(tmp_path, command, script)
    job = Watched(RunDir(tmp_path / "runs" / "a"))
    judge = [sys.executable, "-c", JUDGE, str(job.run.path), str(job.run.events), '"given_up"', "1"]
    agent = [sys.executable, "-c", AGENT, "{node}"]
    Commands(judge, agent, [], {}, max_nodes=3, regrow=True, exclude=["node9"], submit=["--partition=p"]).write(job.run)
    allocation = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"}
    done = batch(tmp_path, job.run, {**allocation, **dict.fromkeys(OWN, "cpu=1")})
    assert (tmp_path / "told").read_text() == "", "a step takes nothing for its own that is of the whole job"

    assert done.returncode == 0, done.stderr
    assert "attempt 0: done, as simulated" in done.stderr
    assert [e["process"] for e in job.events("process_restarted")] == ["node-1", "node-1"]
    assert [e["process"] for e in job.events("given_up")] == ["node-1"]
    assert [e["node"] for e in job.events("node_asked_for")][:1] == [2], done.stderr
    assert "--exclude=node9 --partition=p" in (tmp_path / "submitted").read_text()
    assert (tmp_path / "cancelled").read_text().startswith("--quiet 8")


def test_a_job_whose_agents_live_nowhere_ends(tmp_path: Path) -> None:
    """As with an image that does not exist: it waited ten minutes for nodes, and was then requeued to do the same."""
    for command, script in {
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        "squeue": "echo '7|RUNNING|None|N/A|node[1-2]|node1|7'",
    }.items():
        say(tmp_path, command, script)
    job = Watched(RunDir(tmp_path / "runs" / "a"))
    waits = ["sh", "-c", f"until [ -e {job.run.verdict(0)} ]; do sleep 0.2; done"]
    agent = ["sh", "-c", "echo no such image; exit 1"]
    Commands(waits, agent, [], {}, max_nodes=2, regrow=False, exclude=[], submit=[]).write(job.run)
    done = batch(tmp_path, job.run, {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"})
    assert done.returncode == 1, done.stderr
    verdict = Verdict.read(job.run, 0)
    assert verdict is not None and verdict.decision == "stop", done.stderr
    assert verdict.reason.startswith("no node's agent stays alive; node-"), verdict.reason
    assert "no such image" in verdict.last_lines


def test_steps_that_fail_while_the_controller_is_away_begin_when_it_answers(tmp_path: Path) -> None:
    """It restarts as the job starts: srun fails without it, and also until the controller knows its nodes again."""
    away, early, trained = tmp_path / "away", tmp_path / "early", tmp_path / "trained"
    silent = f"if [ -e {away} ]; then echo 'Unable to contact slurm controller' >&2; exit 1; fi"
    refuses = f"if [ -e {early} ]; then echo 'Memory required by task is not available' >&2; exit 1; fi"
    for command, script in {
        "srun": f'{silent}; {refuses}; while [ "${{1#--}}" != "$1" ]; do shift; done; exec "$@"',
        "squeue": f"{silent}; echo '7|RUNNING|None|N/A|node[1-2]|node1|7'",
    }.items():
        say(tmp_path, command, script)
    job = Watched(RunDir(tmp_path / "runs" / "a"))
    judge = [sys.executable, "-c", JUDGE, str(job.run.path), str(trained), "\n", "2"]
    agent = ["sh", "-c", f"echo {{node}} >> {trained}"]
    Commands(judge, agent, [], {}, max_nodes=2, regrow=False, exclude=[], submit=[]).write(job.run)
    for file in (away, early, trained):
        file.touch()
    subprocess.Popen(["sh", "-c", f"sleep 8; rm {away}; sleep 6; rm {early}"])
    done = batch(tmp_path, job.run, {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"})
    assert done.returncode == 0 and not job.events("given_up"), done.stderr
    assert sorted(trained.read_text().split()) == ["0", "1"]
    (told,) = job.events("waiting")  # status shows it, until the round that the agents form
    where = "SLURM does not answer node1, which cannot start processes"
    assert told["why"] == f"{where}: Unable to contact slurm controller", told


@pytest.mark.parametrize(("away", "requeues"), [(3, "true"), (0, "false")])
def test_a_requeue_waits_for_a_controller_or_munge_that_is_away_and_not_for_one_that_refuses(
    tmp_path: Path, away: int, requeues: str
) -> None:
    munge = "Munge encode failed: No such file or directory; Protocol authentication error"  # as SLURM 22.05 says it
    calls, ends = tmp_path / "calls", "(sleep 2; kill -TERM $PPID) >/dev/null 2>&1"
    answers = f"echo squeue >> {calls}; [ $(grep -c squeue {calls}) -gt {away} ]"
    for command, script in {
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        "squeue": f"{answers} || {{ echo '{munge}' >&2; exit 1; }}\necho '7|RUNNING|None|N/A|node1|node1|7'",
        "sbatch": "echo 'no jobs today' >&2; exit 1",
        "scontrol": f'[ $1 = write ] && exit; echo scontrol "$@" >> {calls}; [ $1 = requeue ] && {ends} & {requeues}',
    }.items():
        say(tmp_path, command, script)
    job = Watched(RunDir(tmp_path / "runs" / "a"))
    judge = [sys.executable, "-c", SAVED, str(job.run.path)]
    Commands(judge, ["true"], [], {}, max_nodes=1, regrow=False, exclude=[], submit=[]).write(job.run)
    done = batch(tmp_path, job.run, {"SLURM_JOB_NODELIST": "node1", "SLURM_JOB_CPUS_PER_NODE": "2"})
    assert done.returncode == (75 if away else 1), done.stderr
    assert ("requeued; excluded nodes: none" in done.stderr) is bool(away), done.stderr
    if not away:
        why = "saved; not started again: no requeue: scontrol ended with 1; no new job: no jobs today"
        assert job.events("attempt_ended")[-1]["reason"] == why, job.events("attempt_ended")
    assert calls.read_text().count("scontrol requeue 7") == (1 if away else 3), calls.read_text()
    assert (munge in done.stderr) is bool(away)
    begun = "squeue\n" * (away + 1) + "scontrol requeue 7\n"
    assert calls.read_text().startswith(begun), "the hundred jobs of one node of a sweep do not ask SLURM as they train"


@pytest.mark.parametrize("limit", ["1:30", "1:29"])
def test_a_signal_that_came_before_the_batch_step_requeues_the_job_unless_its_limit_is_too_short(
    tmp_path: Path, limit: str
) -> None:
    """A site, or scontrol, may shorten it: SLURM would signal each attempt at its start, for ever."""
    for command, script in {
        "srun": "exec sleep 60",
        "squeue": f"echo '7|RUNNING|None|N/A|node1|node1|7|{limit}'",
        "scontrol": "[ $1 = requeue ] && (sleep 2; kill -TERM $PPID) >/dev/null 2>&1 &",
    }.items():
        say(tmp_path, command, script)
    job = Watched(RunDir(tmp_path / "runs" / "a"))
    Commands([], [], ["test"], {}, max_nodes=1, regrow=False, exclude=[], submit=[], margin_s=60).write(job.run)
    done = batch(tmp_path, job.run, {"SLURM_JOB_NODELIST": "node1", "SLURM_JOB_CPUS_PER_NODE": "2"}, "SIGUSR1")
    requeues, ended = limit == "1:30", job.events("attempt_ended")
    assert done.returncode == (75 if requeues else 1), done.stderr
    assert ("requeued; excluded nodes: none" in done.stderr) is requeues, done.stderr
    assert ended[0]["reason"] == "SIGUSR1 during the node test"
    if not requeues:
        why = "not started again: its time limit is 1:29, and the last save is requested 60 s before it: resume it with"
        assert ended[1]["decision"] == "stop" and why in ended[1]["reason"], ended


def test_of_two_guards_one_submits_the_job_that_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both see at the same moment that the first node is lost, and that SLURM does not requeue the job."""
    for command, script in {
        "scontrol": "[ $1 = write ] || { echo 'Requested operation is presently disabled' >&2; exit 1; }",
        "squeue": "echo '7|RUNNING|None|N/A|node2|node1|7'",
        "sbatch": f"echo $* >> {tmp_path}/submitted; sleep 0.3; echo 8",
    }.items():
        say(tmp_path, command, script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = RunDir(tmp_path / "runs" / "a")
    Commands([], [], [], {}, max_nodes=2, regrow=False, exclude=[], submit=[]).write(run)
    assert at_once(lambda excluded: start_again(run, 0, "7", excluded), [["node1"], ["node1"]]) == [True, True]
    assert (tmp_path / "submitted").read_text() == "--parsable --dependency=afterany:7 --begin=now --exclude=node1\n"
    assert Commands.read(run).newest("7") == "8"


def test_a_submission_that_was_taken_and_not_answered_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy controller may take a job and let the command time out. Other jobs may have the same name."""
    run = RunDir(tmp_path / "runs" / "a")
    line = "{}|{}|None|N/A|node2|node1|{}|1:00:00|{}|fsdp_jobs:tag"
    of_another_job = line.format(10, "RUNNING", 10, "a-6-node-1").replace("tag", "another")
    waiting = {"again": line.format(8, "PENDING", 8, "a"), "node": line.format(9, "PENDING", 9, "a-7-node-1")}
    for command, script in {
        "scontrol": "[ $1 = write ] || { echo 'Requested operation is presently disabled' >&2; exit 1; }",
        "squeue": f"echo '{line.format(7, 'RUNNING', 7, 'a')}'; cat {tmp_path}/queue; echo '{of_another_job}'",
        "sbatch": f"echo sbatch >> {tmp_path}/calls; cat {tmp_path}/next >> {tmp_path}/queue; "
        "echo 'Socket timed out on send/recv operation' >&2; exit 1",
    }.items():
        say(tmp_path, command, script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NAME", "sweep")
    Commands([], [], [], {}, max_nodes=2, regrow=True, exclude=[], submit=[]).write(run)
    (tmp_path / "next").write_text(waiting["again"] + "\n")
    with pytest.raises(client.SlurmError, match="Socket timed out"):
        start_again(run, 0, "7", [])
    assert start_again(run, 0, "7", []) and Commands.read(run).newest("7") == "8"
    companions = Companions(run, Commands.read(run), {**os.environ}, 0)
    (tmp_path / "next").write_text(waiting["node"] + "\n")
    with pytest.raises(client.SlurmError, match="Socket timed out"):
        companions.request([1])
    client._answers.clear()
    companions.request([1])
    assert companions.jobs == {1: "9"}
    assert (tmp_path / "calls").read_text().count("sbatch") == 2


def test_steps_get_the_whole_environment_whatever_sbatch_exported() -> None:
    assert "--export=ALL" in srun(["node1"])


@pytest.mark.parametrize("answers_again", [True, False])
def test_a_node_test_that_slurm_does_not_start_blames_no_node(tmp_path: Path, answers_again: bool) -> None:
    """The controller, or munge on this host, is away; or it answers, and the step fails on every node."""
    away, calls = tmp_path / "away", tmp_path / "calls"
    silent = f"if [ -e {away} ]; then rm {away}; echo 'Munge encode failed' >&2; exit 1; fi"
    fails = "" if answers_again else "echo 'pyxis: no such image' >&2; exit 1"
    for command, script in {
        "srun": f'echo srun >> {calls}; {silent}; {fails}\nwhile [ "${{1#--}}" != "$1" ]; do shift; done; exec "$@"',
        "squeue": "echo 'Munge encode failed' >&2; exit 1" if answers_again else "echo '7|RUNNING|None|N/A|n|n|7'",
    }.items():
        say(tmp_path, command, script)
    job = Watched(RunDir(tmp_path / "runs" / "a"))
    saved = [sys.executable, "-c", SAVED.replace('"requeue", "saved"', '"stop", "saved"'), str(job.run.path)]
    report = 'for h in node1 node2; do touch "$0/$h.begun"; echo "{\\"host\\": \\"$h\\"}" > "$0/$h.json"; done'
    Commands(saved, ["true"], ["sh", "-c", report], {}, max_nodes=2, regrow=False, exclude=[], submit=[]).write(job.run)
    away.touch()
    allocation = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"}
    done = batch(tmp_path, job.run, allocation)
    (ended,) = job.events("attempt_ended")
    if answers_again:
        assert [e["why"].rpartition(": ")[2] for e in job.events("waiting")] == ["Munge encode failed"]
        assert ended["reason"] == "saved", done.stderr
    else:
        assert (ended["decision"], ended["reason"]) == ("stop", "the node test began on no node: pyxis: no such image")
        assert calls.read_text() == 3 * "srun\n"
    assert not job.run.excluded_hosts()


@pytest.mark.parametrize(("tests", "number"), [(True, signal.SIGTERM), (False, signal.SIGUSR1)])
def test_steps_that_a_signal_ends_as_they_start_requeue_the_job_and_blame_no_node(
    tmp_path: Path, tests: bool, number: int
) -> None:
    """GraceTime and `scancel --signal` signal only steps, where a Python that is starting dies of it."""
    for command, script in {
        "srun": f'while [ "${{1#--}}" != "$1" ]; do shift; done; "$@"; sleep 1; exit {128 + number}',
        "squeue": "echo '7|RUNNING|None|N/A|node[1-2]|node1|7'",
        "scontrol": "[ $1 = requeue ] && (sleep 2; kill -TERM $PPID) >/dev/null 2>&1 &",
    }.items():
        say(tmp_path, command, script)
    job = Watched(RunDir(tmp_path / "runs" / "a"))
    begins = ["sh", "-c", 'touch "$0/node1.begun"'] if tests else []
    asked = [sys.executable, "-c", ASKED, str(job.run.path)]
    Commands(asked, ["true"], begins, {}, max_nodes=2, regrow=False, exclude=[], submit=[]).write(job.run)
    done = batch(tmp_path, job.run, {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"})
    (ended,) = job.events("attempt_ended")
    assert (ended["verdict"], ended["decision"]) == ("preempted", "requeue"), done.stderr
    assert "requeued; excluded nodes: none" in done.stderr and not job.run.excluded_hosts()


def test_a_companion_that_ends_with_its_job_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM would mail its user of a failure at each requeue of the job."""
    say(tmp_path, "srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')
    say(tmp_path, "squeue", "echo '7|RUNNING|None|N/A|node1|node1|7'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, value in {ATTEMPT_ENV: "0", "SLURMD_NODENAME": "node2", "SLURM_CPUS_ON_NODE": "2"}.items():
        monkeypatch.setenv(name, value)
    run = RunDir(tmp_path / "runs" / "a")
    run.attempt(0).mkdir(parents=True)
    agent = [sys.executable, "-c", SAVED + "sys.exit(75)", str(run.path)]
    Commands([], agent, [], {}, max_nodes=2, regrow=True, exclude=[], submit=[]).write(run)
    assert fill_in(run, 1, "7") == 0


@pytest.mark.parametrize("role", ["companion", "guard"])
def test_helpers_of_a_job_stay_while_its_run_directory_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """A companion took its node with it, and a lost first node without guards leaves the job running, and empty."""
    say(tmp_path, "srun", "exec sleep 60")
    say(tmp_path, "squeue", "echo '7|RUNNING|None|N/A|node1|node1|7'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    names = {ATTEMPT_ENV: "0", COORDINATOR_ENV: "localhost:1", "SLURMD_NODENAME": "node2", "SLURM_CPUS_ON_NODE": "2"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    for name in ("_GUARD_S", "_POLL_S", "_LEAVE_S"):
        monkeypatch.setattr(companions, name, 0.1)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its own
    run = RunDir(tmp_path / "runs" / "a")
    run.attempt(0).mkdir(parents=True)
    Commands([], [], [], {}, max_nodes=2, regrow=True, exclude=[], submit=[]).write(run)
    helper = in_thread(lambda: fill_in(run, 1, "7") if role == "companion" else companions.guard(run))
    time.sleep(1)
    with away(run.path):
        time.sleep(1)
        assert not helper.done(), helper.exception()
    Verdict("done", "stop", "as simulated").write(run, 0)
    assert not helper.result(20)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_that_slurm_ends_as_it_saves_has_stopped_unless_slurm_starts_it_again(
    tmp_path: Path, restarts: int
) -> None:
    """Preemption with PreemptMode=CANCEL, and `scancel`: no notification said so."""
    say(tmp_path, "srun", "exec sleep 1")
    say(tmp_path, "squeue", "echo '7|COMPLETING|None|N/A|node1|node1|7'")
    say(tmp_path, "scontrol", f'[ "$*" = "show job 7" ] && echo "   Requeue=1 Restarts={restarts} BatchFlag=1"')
    job = Watched(RunDir(tmp_path / "runs" / "a"))
    judge = [sys.executable, "-c", SAVED, str(job.run.path)]
    Commands(judge, ["true"], [], {}, max_nodes=1, regrow=False, exclude=[], submit=[]).write(job.run)
    done = batch(tmp_path, job.run, {"SLURM_JOB_NODELIST": "node1", "SLURM_JOB_CPUS_PER_NODE": "2"})
    ends = [(e["verdict"], e["decision"], e["reason"]) for e in job.events("attempt_ended")]
    ended = ("preempted", "stop", "saved; SLURM ends the job: fsdp-jobs resume a continues it")
    assert ends == [("preempted", "requeue", "saved"), *([] if restarts else [ended])], done.stderr
