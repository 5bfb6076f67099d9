"""Sites that differ, and their bad days: nodes and controllers away, limits, old configurations, two clusters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.events import AttemptStarted, Checkpoint, read_events, record
from tests.jobs import ROOT, cli, environment, killed_at
from tests.launchers.slurm.lab import CLUSTER, Lab, slurm_job
from tests.launchers.slurm.test_jobs import ENDLESS, ONE_RANK, QUICK

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ONE = ["name=one", "script=sleeps.py", "nodes=1", "nproc_per_node=1", "attach=false"]
ONE += ["cluster=slurm", "cluster.accelerator=cpu", "hardware=cpu"]
DRY = [*ONE, "dry_run=true"]
WITHDRAWN = ["name=withdrawn", *ONE[1:], "cluster.extra=['--hold']"]


@pytest.fixture
def folder(lab: Lab, tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(600)")
    yield tmp_path
    lab.do("run", "login", "scancel", "--user=root", check=False)
    lab.wait_idle()


def queued(lab: Lab) -> list[str]:
    return lab.on_login("squeue", "-h", "-o", "%i", "-t", "PENDING,RUNNING").split()


@pytest.mark.parametrize("count", [4, pytest.param(50, marks=pytest.mark.soak)])
def test_of_many_submissions_of_one_name_at_once_exactly_one_is_taken(lab: Lab, folder: Path, count: int) -> None:
    command = [str(CLUSTER), "run", "login", *killed_at(0), *ONE]
    env = environment(folder, FSDP_JOBS_SLURM=str(lab.folder))
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    commands = [subprocess.Popen(command, cwd=folder, env=env, **piped) for _ in range(count)]  # type: ignore[call-overload]
    said = [process.communicate()[0] for process in commands]
    assert sorted(process.returncode for process in commands) == [0] + [2] * (count - 1), "\n".join(said)
    assert sum("is in use by the live job slurm_fsdp://lab/" in text for text in said) == count - 1, "\n".join(said)
    assert len(queued(lab)) == 1


@pytest.mark.parametrize(("pattern", "number", "jobs"), [(".submission_file", 1, 0), ("job.json", 2, 1)])
def test_a_submission_that_is_killed_beside_sbatch_is_found_again(
    lab: Lab, folder: Path, pattern: str, number: int, jobs: int
) -> None:
    """Once right before sbatch, once after it and before the answer is recorded."""
    env = environment(folder, FSDP_JOBS_SLURM=str(lab.folder))
    command = [str(CLUSTER), "run", "login", *killed_at(number, pattern), *ONE]
    killed = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert killed.returncode not in (0, 2), killed.stdout + killed.stderr
    run = RunDir(folder / "runs" / "one")
    assert run.pending_launcher == "slurm_fsdp" and len(queued(lab)) == jobs
    rows = json.loads(lab.cli(folder, "status", "--json").stdout)
    assert [row["handle"] for row in rows] == [f"slurm_fsdp://lab/{id}" for id in queued(lab)]
    again = lab.cli(folder, *ONE)
    assert again.returncode == (2 if jobs else 0), again.stdout + again.stderr
    assert len(queued(lab)) == 1 and run.read_job()["handle"].endswith(f"/{queued(lab)[0]}")


def test_a_job_whose_submission_is_not_the_runs_leaves_at_once(lab: Lab, folder: Path) -> None:
    later = "cluster.extra=['--hold']"
    assert lab.cli(folder, *ONE, later).returncode == 0
    run, (held,) = RunDir(folder / "runs" / "one"), queued(lab)
    run.job.write_text(json.dumps({**run.read_job(), "submission": "another"}))
    status = lab.cli(folder, "status", "one").stdout
    assert f"SLURM job {held}" not in status, "another job has that id"
    lab.cli(folder, "cancel", "one", "--now")
    assert queued(lab) == [held], "it is not this run's"
    lab.on_login("scontrol", "release", held)
    for _ in range(120):
        if not queued(lab):
            break
        time.sleep(0.5)
    assert not queued(lab) and not [e for e in read_events(run) if isinstance(e, AttemptStarted)]
    assert "was submitted again since: this job leaves" in (run.submit / f"slurm-{held}.out").read_text()


def test_nodes_that_are_away_are_waited_for_and_what_no_node_has_is_refused(lab: Lab, folder: Path) -> None:
    for away, reason in (("node4", "DRAIN"), ("node[1-4]", "DOWN")):
        lab.on_login("scontrol", "update", f"nodename={away}", f"state={reason}", "reason=test")
        try:
            waits = [[*DRY, "nodes=4", f"cluster.partition='{where}'"] for where in ("main", "urgent,main")]
            never = [[*DRY, more] for more in ("nodes=5", "cluster.cpus_per_task=3", "cluster.mem=99G")]
            answers = lab.several(folder, *waits, *never)
            assert [code for code, _ in answers] == [0, 0, 2, 2, 2], answers
            assert all("partition main has 4 nodes" in said for _, said in answers[2:]), answers
        finally:
            lab.do("run", "login", "scontrol", "update", f"nodename={away}", "state=resume", check=False)  # may be back


def test_limits_that_can_never_be_met_are_said_at_submission(lab: Lab, folder: Path) -> None:
    lab.on_login("sacctmgr", "-i", "add", "qos", "tiny", "MaxWall=10", "MaxTRESPerJob=node=1")
    lab.on_login("sacctmgr", "-i", "modify", "user", "where", "name=root", "set", "qos+=tiny")
    never, (allowed, _), (_, unknown) = lab.several(
        folder,
        [*DRY, "nodes=2", "cluster.qos=tiny", "cluster.time=30"],
        [*DRY, "cluster.qos=tiny", "cluster.time=9"],
        [*DRY, "cluster.extra=['--qos=nope']"],
    )
    lab.on_login("sacctmgr", "-i", "delete", "qos", "tiny")  # the user's QOSes are told by other tests
    assert never[0] == 2 and allowed == 0
    assert "cluster.time=30: QOS tiny allows 00:10:00" in never[1]
    assert "QOS tiny allows node=1, the job needs 2" in never[1]
    assert "cluster.extra=[--qos=nope]: SLURM says: Invalid qos" in unknown
    lab.on_login("scontrol", "create", "partitionname=short", "nodes=ALL", "defaulttime=1")
    lab.on_login("scontrol", "create", "partitionname=brief", "nodes=ALL", "maxtime=1")
    lab.on_login("scontrol", "create", "partitionname=endless", "nodes=ALL")
    try:
        short, brief, endless = lab.several(
            folder,
            [*DRY, "cluster.partition=short"],
            [*DRY, "cluster.partition=brief"],
            [*DRY, "cluster.partition=endless", "cluster.time=0"],
        )
        assert short[0] == 2 and "(short's default is 1:00): no time is left to train in" in short[1], short
        assert brief[0] == 2 and "(brief's default is 1:00): no time is left" in brief[1], brief
        assert endless[0] == 0, f"0 is SLURM's word for no limit: {endless}"
    finally:
        for name in ("short", "brief", "endless"):
            lab.on_login("scontrol", "delete", f"partitionname={name}")


def test_a_home_that_lies_elsewhere_on_the_nodes_is_used_by_its_name(lab: Lab, folder: Path) -> None:
    """A link that an automounter has made, differently on each machine; of a job alone and of an array's tasks."""
    home = f"{lab.folder}/scratch/home"
    for machine in ("login", "node1", "node2", "node3", "node4"):
        place = f"{lab.folder}/scratch/real-{machine}"
        made = f"mkdir {place} && mount --bind {folder} {place} && ln -s {place} {home}"
        lab.do("run", machine, "sh", "-c", made)
    (folder / "reads.py").write_text("print(open('words.txt').read())")
    (folder / "words.txt").write_text("as on the login node")
    under = [str(CLUSTER), "run", "login", "sh", "-c", f'cd {home} && exec "$@"', "-"]
    state = {"FSDP_JOBS_SLURM": str(lab.folder), "XDG_STATE_HOME": f"{home}/.state"}
    try:
        job = ["script=reads.py", "attach=true", *(key for key in ONE[2:] if not key.startswith("attach"))]
        done = cli(folder, *job, "name=alone", "nodes=2", under=under, **state)
        assert done.returncode == 0, done.stdout + done.stderr
        sweep = [*job, "--multirun", "name=both", "seed=1,2", "sweep.wait=true", "runs_dir=others"]
        done = cli(folder, *sweep, under=under, **state)
        assert done.returncode == 0, done.stdout + done.stderr
        for run in ("runs/alone", "others/both-000", "others/both-001"):
            assert "as on the login node" in Path(folder, run, "attempts/0/node-0/rank-0.log").read_text()
        link = next(folder.glob(".state/fsdp_jobs/slurm/lab/*"))
        assert str(link.readlink()).startswith(f"{home}/")
        checked = cli(folder, "doctor", *ONE[4:], "cluster.accelerator=cpu", under=under, **state)
        assert checked.returncode == 0 and f"sees {home}/runs" in checked.stdout, checked.stdout
    finally:
        for machine in ("login", "node1", "node2", "node3", "node4"):
            lab.do("run", machine, "sh", "-c", f"umount -l {lab.folder}/scratch/real-*; rm {home}", check=False)


@pytest.mark.parametrize("seconds", [30, pytest.param(150, marks=pytest.mark.soak)])
def test_a_controller_that_is_away_silences_nothing_and_harms_nothing(lab: Lab, folder: Path, seconds: int) -> None:
    """Not the job, and not the companion that has taken the place of a lost node, with the site's own options.

    They request the GPUs of all nodes in one number, too, of which a step of one node must know nothing, and of tasks.
    """
    own = "cluster.extra=['--nice=7','--gpus-per-node=8','-G16','--gpus-per-task=8']"
    with slurm_job(lab, folder, "away", "nodes=1:2", ONE_RANK, own, *QUICK, *ENDLESS) as job:
        job.until_attempt(0)
        job.until(lambda: job.rounds()[-1]["world_size"] == 2, "both nodes")
        begun, taken = len(job.rounds()), job.rounds()[-1]["hosts"][1]
        lab.on_login("scontrol", "update", f"nodename={taken}", "state=down", "reason=test")
        job.until(
            lambda: len(job.rounds()) == begun + 2 and job.rounds()[-1]["world_size"] == 2,
            "a companion in its place",
            150,
        )
        job.progress(5)
        lab.do("run", "ctl", "pkill", "slurmctld")
        left_at = time.monotonic()
        try:
            (row,) = json.loads(lab.cli(folder, "status", "--json").stdout)
            assert row["state"] == "running" and row["step"] > 0, row
            assert "its launcher does not answer: " in row["reason"], row
            assert any(words in row["reason"] for words in ("Unable to contact", "did not answer within 10 s")), row
            under = [str(CLUSTER), "run", "login", "env", "PATH=/nowhere"]
            nowhere = cli(folder, "status", "away", under=under, FSDP_JOBS_SLURM=str(lab.folder))
            assert "is not on this machine's PATH" in nowhere.stdout, nowhere.stdout + nowhere.stderr
            refused = lab.cli(folder, "resume", "away")
            assert refused.returncode == 2 and "may be in use by the job" in refused.stderr, refused.stderr
            time.sleep(max(0.0, left_at + seconds - time.monotonic()))  # companions ask every 10 s
        finally:
            lab.do("run", "ctl", "slurmctld")
        job.until(lambda: job.state() == "RUNNING", "the controller's answer")
        job.until_step(job.step() + 20)
        assert len(job.rounds()) == begun + 2 and job.run.last_attempt() == 0, "nothing has ended meanwhile"
        asked = job.events("node_asked_for")
        companion = asked[0]["slurm_job"]
        assert len(asked) == 1 and lab.on_login("squeue", "-h", "-t", "R", "-j", companion, "-o", "%y").strip() == "7"

        lab.do("run", "ctl", "pkill", "slurmctld")
        try:
            time.sleep(6)  # a question to SLURM is on its way, and takes half a minute
            died_at = time.time()
            job.agent(0).send_signal(signal.SIGKILL)
            job.until(lambda: bool(job.events("process_restarted")), "the death of an agent", 60)
            assert job.events("process_restarted")[0]["time"] - died_at < 15
            job.until(lambda: job.rounds()[-1]["world_size"] == 1, "the companion goes on alone")
            job.progress(3)
            cancelled = lab.cli(folder, "cancel", "away")
            assert cancelled.returncode == 0 and "away stopped: cancelled; saved at step" in cancelled.stdout
        finally:
            lab.do("run", "ctl", "slurmctld")
            job.until(lambda: bool(lab.do("run", "login", "squeue", check=False)), "the controller's answer")
            lab.do("run", "login", "scontrol", "update", f"nodename={taken}", "state=resume", check=False)


def test_a_site_that_takes_no_job_in_place_of_a_lost_node_is_named(lab: Lab, folder: Path) -> None:
    with slurm_job(lab, folder, "alone", "nodes=1:2", ONE_RANK, *QUICK, *ENDLESS) as job:
        job.until_attempt(0)
        taken = job.rounds()[0]["hosts"][1]
        lab.on_login("scontrol", "update", "partitionname=main", "state=drain")
        try:
            lab.on_login("scontrol", "update", f"nodename={taken}", "state=down", "reason=test")
            refused = "no node in place of node 1: SLURM says: "
            job.until(lambda: any(refused in e["why"] for e in job.events("waiting")), "the reason", 120)
            job.progress(3)
            (row,) = json.loads(lab.cli(folder, "status", "--json", "alone").stdout)
            assert row["state"] == "running" and refused in row["reason"], row
            assert "partition not available" in row["reason"], row
        finally:
            lab.on_login("scontrol", "update", "partitionname=main", "state=up")
            lab.do("run", "login", "scontrol", "update", f"nodename={taken}", "state=resume", check=False)


def align_ids(*labs: Lab) -> None:
    """Have several clusters give their next jobs the same id."""
    held = ("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true")
    newest = {lab: int(lab.on_login(*held)) for lab in labs}
    for lab, last in newest.items():
        lab.on_login("sh", "-c", f"for i in $(seq {max(newest.values()) - last}); do {' '.join(held)}; done")
        lab.on_login("scancel", "--user=root")


def test_an_old_site_trains_saves_sweeps_and_forgets(lab: Lab, old: Lab, folder: Path) -> None:
    """Nothing of a user's environment is exported, scancel signals every process, and two clusters have one home.

    Both have a job of the same id, and each of them is told, resumed and cancelled for itself.
    """
    os.environ["SBATCH_EXPORT"] = "NONE"
    try:
        assert (
            old.cli(folder, "name=unready", *ONE[1:], "cluster.setup=['echo no such module', 'exit 3']").returncode == 0
        )
        assert "before its first line: no such module" in old.cli(folder, "wait", "unready").stdout
        assert old.cli(folder, *WITHDRAWN).returncode == 0
        assert "(JobHeldUser: held; SLURM starts it after: scontrol release" in old.cli(folder, "status").stdout
        old.on_login("scancel", "--user=root")
        old.on_login("scontrol", "update", "partitionname=main", "maxnodes=2")
        done = old.cli(folder, *DRY, "cluster.time=2-00:00:00", "nodes=3")
        old.on_login("scontrol", "update", "partitionname=main", "maxnodes=UNLIMITED")
        assert (
            done.returncode == 2 and "cluster.time=2-00:00:00: partition main allows 1-00:00:00: SLURM" in done.stderr
        )
        assert "nodes=3: a job of partition main has 1-2 nodes: SLURM would let the job wait for ever" in done.stderr
        align_ids(lab, old)
        assert lab.cli(folder, *ONE).returncode == 0
        shutil.copy(ROOT / "tests" / "models.py", folder / "own_models.py")  # nodes may not know this folder's
        own = [override.replace("tests.models", "own_models") for override in ENDLESS]
        with slurm_job(old, folder, "aged", "nodes=2", *own) as job:
            job.until_attempt(0)
            job.progress(5)
            assert job.run.read_job()["handle"] == f"slurm_fsdp://old/{job.id}"
            one = RunDir(folder / "runs" / "one")
            assert one.read_job()["handle"] == f"slurm_fsdp://lab/{job.id}"
            for handle in ("one", f"slurm_fsdp://lab/{job.id}"):
                (row,) = json.loads(lab.cli(folder, "status", handle, "--json").stdout)
                assert (row["run"], row["state"]) == ("one", "running"), row
            refused = lab.cli(folder, "resume", "one")
            assert refused.returncode == 2 and "in use by the live job" in refused.stderr, refused.stdout
            assert "killed on request" in lab.cli(folder, "cancel", "one", "--now").stdout
            assert not queued(lab) and job.id in queued(old)
            elsewhere = lab.cli(folder, "status", "aged").stdout
            assert f"{job.id} is on old, and this machine asks lab: ask there" in elsewhere
            for verb in (["cancel", "aged", "--now"], ["resume", "aged"]):
                refused = lab.cli(folder, *verb)
                assert refused.returncode == 2 and "is on old" in refused.stderr, refused.stdout + refused.stderr
            assert job.state() == "RUNNING" and not job.run.stop_request.exists()
            old.on_login("scancel", job.id)
            job.until(lambda: bool(job.events("attempt_ended")), "the end of the attempt")
            (ended,) = job.events("attempt_ended")
            assert ended["verdict"] == "preempted" and ended["committed"] == ended["step"] > 0, job.story()
            job.until(lambda: "aged  stopped" in old.cli(folder, "status", "aged").stdout, "the end of the job")
            record(job.run, 0, Checkpoint(step=ended["step"], seconds=8.0))
            again = old.cli(folder, "resume", "aged", "dry_run=true").stderr
            assert "aged: scancel would end it 10 s later (KillWait), maybe before it has saved" in again, again
        sweep = ["--multirun", "name=grid", "cluster=slurm", "cluster.accelerator=cpu", "hardware=cpu", "nodes=1"]
        (folder / "quick.py").write_text("print('done')")
        sweep += ["script=quick.py", "nproc_per_node=1", "seed=1,2", "sweep.parallelism=1"]
        gate = old.on_login("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true").strip()
        done = old.cli(folder, *sweep, f"cluster.extra=['--dependency=afterok:{gate}']")
        assert done.returncode == 0, done.stdout + done.stderr
        first, second = (RunDir(folder / f"runs/grid-00{n}").read_job()["handle"].rpartition("/")[2] for n in (0, 1))
        waits = dict(line.split() for line in old.on_login("squeue", "-h", "-o", "%i %E").splitlines())
        assert waits[first] == f"afterok:{gate}(unfulfilled)"
        assert waits[second] == f"afterany:{first}(unfulfilled),afterok:{gate}(unfulfilled)"
        old.on_login("scontrol", "release", gate)
        done = old.cli(folder, "wait", "grid-000", "grid-001")
        assert done.returncode == 0, done.stdout + done.stderr
        for _ in range(60):  # the controller clears its records once a minute
            if not old.on_login("squeue", "-h", "-t", "all", "-n", "withdrawn,unready"):
                break
            time.sleep(2)
        status = old.cli(folder, "status", "withdrawn").stdout
        assert "stopped" in status and "SLURM has forgotten the job, which never started" in status, status
        status = old.cli(folder, "status", "unready").stdout
        assert "unready  failed" in status and "which failed before its first line: no such module" in status, status
    finally:
        del os.environ["SBATCH_EXPORT"]
