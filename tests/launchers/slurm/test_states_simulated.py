"""Status from simulated answers of squeue and sacct: states, ages and ids that a small cluster does not show."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torchx.specs import make_app_handle

from fsdp_jobs.config.errors import BadInput, JobFailed
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.launchers.base import Description
from fsdp_jobs.launchers.slurm import client, site
from fsdp_jobs.launchers.slurm.companions import Companions
from fsdp_jobs.launchers.slurm.scheduler import SlurmLauncher
from fsdp_jobs.launchers.slurm.script import Script, long_form
from fsdp_jobs.launchers.slurm.steps import Commands
from fsdp_jobs.run import events
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.state import State
from fsdp_jobs.run.verdict import Verdict
from fsdp_jobs.submit import submit as submission
from fsdp_jobs.submit.overview import Overview
from fsdp_jobs.submit.submitted import describe, has_ended
from tests.launchers.slurm import simulated
from tests.recorded import recorded_run

NO_ACCOUNTING = "echo 'Slurm accounting storage is disabled' >&2; exit 1"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands that comes first on PATH; each call of squeue leaves a line in `calls`."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(client, "_answers", {})
    say(tmp_path, "squeue", "")
    say(tmp_path, "sacct", NO_ACCOUNTING)
    simulated.say(tmp_path, "scontrol", "echo 'ClusterName = lab'")
    return tmp_path


def say(folder: Path, command: str, script: str) -> None:
    simulated.say(folder, command, f"echo {command} >> {folder}/calls\n{script}")


def queue(*lines: str) -> str:
    return "cat <<END\n" + "\n".join(lines) + "\nEND"


def known_run(folder: Path, job_id: str, verdict: Verdict | None) -> None:
    """A run of this machine whose newest submission was this job."""
    run = RunDir(folder / "runs" / "a")
    run.attempt(0).mkdir(parents=True)
    run.job.write_text(json.dumps({"first_attempt": 0}))
    if verdict is not None:
        verdict.write(run, 0)
    SlurmLauncher().remember(job_id, run)


def state(job_id: str) -> State | None:
    (description,) = SlurmLauncher().describe([job_id])
    return description.state if description is not None else None


def test_one_squeue_serves_all_jobs_and_no_state_is_a_surprise(slurm: Path) -> None:
    answers = {
        "1": ("PENDING", State.QUEUED),
        "2": ("REQUEUE_HOLD", State.QUEUED),
        "3": ("COMPLETING", State.RUNNING),
        "4": ("A_STATE_OF_2031", State.RUNNING),
        "5_7": ("RUNNING", State.RUNNING),
        "6": ("NODE_FAIL", State.FAILED),
        "7": ("REQUEUE_FED", State.QUEUED),
        "8": ("CONFIGURING", State.QUEUED),
    }
    say(slurm, "squeue", queue(*(f"{i}|{word}|Priority|N/A|node1|node1|{i}" for i, (word, _) in answers.items())))
    assert {i: state(i) for i in answers} == {i: expected for i, (_, expected) in answers.items()}
    assert (slurm / "calls").read_text() == "squeue\n"
    (boots,) = SlurmLauncher().describe(["8"])
    assert boots is not None and boots.message == "SLURM job 8 is CONFIGURING on node1"


def test_a_job_that_another_cluster_of_a_federation_has_is_no_stopped_one(slurm: Path) -> None:
    """Its run may not be resumed beside it; once it has a verdict to stop, that is its end."""
    say(slurm, "squeue", queue("7|REVOKED|None|N/A|||7"))
    known_run(slurm, "7", Verdict("preempted", "requeue", "saved"))
    run = RunDir(slurm / "runs" / "a")
    (described,) = describe(["slurm_fsdp://lab/7"]).values()
    assert str(SlurmLauncher.scheduler("torchx").describe("7").state) == "UNKNOWN"
    assert described.message == "SLURM job 7 is REVOKED" and not has_ended(run, described)
    Verdict("done", "stop", "all 5 steps are done").write(run, 0)
    (described,) = describe(["slurm_fsdp://lab/7"]).values()
    assert has_ended(run, described)


def test_a_job_with_a_verdict_has_ended_while_its_nodes_run_a_long_epilog(slurm: Path) -> None:
    say(slurm, "squeue", queue("7|COMPLETING|None|N/A|node1|node1|7"))
    known_run(slurm, "7", Verdict("preempted", "requeue", "saved"))
    run = RunDir(slurm / "runs" / "a")
    for decision, ended in (("requeue", False), ("stop", True)):
        Verdict("preempted", decision, "saved").write(run, 0)
        (described,) = describe(["slurm_fsdp://lab/7"]).values()
        assert has_ended(run, described) == ended, described
    say(slurm, "scancel", "")
    began = time.monotonic()
    SlurmLauncher().cancel(["7"])
    assert time.monotonic() - began < 5, "it is not waited for"


def test_a_held_job_comes_with_its_cure(slurm: Path) -> None:
    say(slurm, "squeue", queue("12|REQUEUE_HOLD|launch failed requeued held|2026-12-01T09:45:15||n/a|12"))
    (described,) = SlurmLauncher().describe(["12"])
    cure = "(launch failed requeued held: a node could not start it; SLURM starts it again after: scontrol release 12)"
    assert described is not None and described.message == f"SLURM job 12 waits {cure}", "its estimate is of before"
    client.forget()
    say(slurm, "squeue", queue("12|PENDING|BadConstraints|N/A||n/a|12"))  # all nodes are needed, and one is excluded
    (described,) = SlurmLauncher().describe(["12"])
    cure = "it will not start; this allows all: scontrol update JobId=12 ExcNodeList=)"
    assert described is not None and cure in described.message
    client.forget()
    say(slurm, "squeue", queue("12|PENDING|MaxNodePerAccount|N/A||n/a|12"))  # MaxTRESPA of a QOS
    (described,) = SlurmLauncher().describe(["12"])
    assert described is not None and "(MaxNodePerAccount: a limit of its QOS, see" in described.message
    for limit in ("QOSMaxWallDurationPerJobLimit", "AssocMaxWallDurationPerJobLimit", "PartitionTimeLimit"):
        client.forget()
        say(slurm, "squeue", queue(f"12|PENDING|{limit}|N/A||n/a|12"))
        (described,) = SlurmLauncher().describe(["12"])
        cure = f"({limit}: cluster.time is above it: it will not start before scontrol update JobId=12 TimeLimit=LESS)"
        assert described is not None and cure in described.message


def test_a_requeued_job_that_a_node_without_its_file_system_has_failed_says_so(slurm: Path) -> None:
    known_run(slurm, "7", None)
    say(slurm, "squeue", queue("7|FAILED|JobLaunchFailure|N/A|node[1-2]|node1|7"))
    (described,) = describe(["slurm_fsdp://lab/7"]).values()
    why = "(JobLaunchFailure: its batch step was killed, or its first node has not mounted the run directory)"
    assert described.message == f"SLURM job 7 is FAILED on node[1-2] {why}"
    Verdict("preempted", "requeue", "saved at step 5").write(RunDir(slurm / "runs" / "a"), 0)
    (described,) = describe(["slurm_fsdp://lab/7"]).values()
    assert (
        described.message == f"SLURM job 7 is FAILED on node[1-2] {why} before another attempt began; saved at step 5"
    )


def test_a_forgotten_job_is_known_by_accounting_in_its_newest_record(slurm: Path) -> None:
    say(slurm, "sacct", queue("7|REQUEUED|t|node1", "7|CANCELLED by 1000|t|node2", "8|CANCELLED|t|None assigned"))
    assert state("7") is State.STOPPED
    (described,) = SlurmLauncher().describe(["8"])
    assert described is not None and described.message == "SLURM job 8 is CANCELLED"


def test_accounting_that_has_missed_a_jobs_end_does_not_keep_it_alive(slurm: Path) -> None:
    """Of another user's job the queue says nothing, and accounting is believed."""
    say(slurm, "sacct", queue(f"7|RUNNING|t|node1|{os.getuid()}|a|", "8|RUNNING|t|node1|4711|b|"))
    known_run(slurm, "7", Verdict("done", "stop", "all 5 steps are done"))
    assert (state("7"), state("8")) == (State.DONE, State.RUNNING)


def test_a_new_job_that_a_squeue_with_a_cache_does_not_list_yet_has_not_ended(slurm: Path) -> None:
    """Or its command would leave it, and `resume` submit a second one."""
    say(slurm, "sacct", queue(f"7|PENDING|Unknown|None assigned|{os.getuid()}|a|"))
    say(
        slurm,
        "scontrol",
        'case "$*" in "show job 7") echo " JobState=PENDING Reason=Priority";; *) echo "ClusterName = lab"; esac',
    )
    known_run(slurm, "7", None)
    assert state("7") is State.QUEUED


def test_accounting_is_asked_once_for_all_forgotten_jobs(slurm: Path) -> None:
    """It may be slow: with a question for each job, a look at a colleague's 30 jobs took minutes."""
    say(slurm, "sacct", queue("motd: be quick", "7|COMPLETED|t|node1", "9_1|FAILED|t|node2"))
    jobs = SlurmLauncher().describe(["7", "8", "9_0", "9_1"])
    assert [job and job.state for job in jobs] == [State.DONE, None, None, State.FAILED]
    assert (slurm / "calls").read_text().count("sacct") == 1


def test_without_accounting_a_forgotten_job_is_known_by_its_run_directory(slurm: Path) -> None:
    known_run(slurm, "8", Verdict("done", "stop", "all 5 steps are done"))
    assert state("8") is State.DONE


def test_a_forgotten_job_without_a_verdict_has_failed_unless_it_was_asked_to_stop(slurm: Path) -> None:
    known_run(slurm, "9", None)
    assert state("9") is State.FAILED
    run = RunDir(slurm / "runs" / "a")
    events.record(run, 0, events.StopRequested("SIGTERM received"))
    assert state("9") is State.STOPPED
    events.record(run, 1, events.AttemptStarted(1))
    run.attempt(1).mkdir()
    assert state("9") is State.FAILED, "that was an earlier attempt"


def test_a_forgotten_job_that_never_started_was_cancelled(slurm: Path) -> None:
    known_run(slurm, "9", None)
    RunDir(slurm / "runs" / "a").job.write_text(json.dumps({"first_attempt": 1}))
    assert state("9") is State.STOPPED


def test_what_a_job_said_that_failed_before_its_first_line_is_the_reason(slurm: Path) -> None:
    say(slurm, "squeue", queue("9|FAILED|NonZeroExitCode|t|node1|node1|9"))
    known_run(slurm, "9", None)
    run = RunDir(slurm / "runs" / "a")
    run.job.write_text(json.dumps({"first_attempt": 1}))
    write_atomic(run.submit / "slurm-9.out", "loading\nno such module\n")
    (described,) = SlurmLauncher().describe(["9"])
    what = "SLURM job 9 FAILED on node1 before its first line: no such module"
    assert described is not None and described.message == what


def test_equal_ids_on_clusters_that_share_a_home_are_different_jobs(slurm: Path) -> None:
    known_run(slurm, "11", Verdict("done", "stop", "all 5 steps are done"))
    client._answers.clear()
    (slurm / "scontrol").write_text("#!/bin/sh\necho 'ClusterName = other'\n")
    assert state("11") is None, "this cluster has never had it"
    other = RunDir(slurm / "runs" / "b")
    other.path.mkdir()
    SlurmLauncher().remember("11", other)
    found = [SlurmLauncher().run_of("11", cluster) for cluster in ("", "other", "lab")]
    assert [run.name for run in found if run is not None] == ["b", "b", "a"]


def test_a_job_that_nobody_knows_is_none(slurm: Path) -> None:
    assert state("10") is None


def test_a_partition_is_the_sum_of_its_kinds_of_nodes_with_the_sizes_of_the_largest(slurm: Path) -> None:
    lines = [
        "Welcome to our cluster | maintenance on Monday",
        "gpu*|2|96|gpu:8|1000|1-00:00:00|h100|1:00:00|1-infinite|n1",
        "gpu*|3|128|(null)|500|1-00:00:00|h100|1:00:00|1-infinite|n1",
        "cpu|1|4|(null)|8|1:00|x|n/a|1-2|n9",
    ]
    say(slurm, "sinfo", queue(*lines))
    gpu, cpu = client.partitions()
    assert (gpu.name, gpu.nodes, gpu.size) == ("gpu", 5, "128 CPUs, 1000 MB, gpu:8")
    assert (gpu.job_nodes, cpu.job_nodes) == ("1-infinite", "1-2")
    assert (gpu.default_time, cpu.default_time) == ("1:00:00", "")
    assert [client.partitions_of(names)[0] for names in (None, "cpu")] == [gpu, cpu]
    assert not client.partitions_of("nope")[0].nodes


def test_a_job_is_found_by_the_submission_in_its_comment_and_is_nobody_elses(slurm: Path) -> None:
    """Alone, as a task of an array, and as a job of a sweep where there are no arrays."""
    comments = {"4": "new", "5_0": "new.0", "5_1": "new.0", "6": "new.1", "7": "old", "8_1": "old.0"}
    lines = [f"{id}|RUNNING|None|N/A|node1|node1|{id}|1:00|a|by me fsdp_jobs:{tag}" for id, tag in comments.items()]
    say(slurm, "squeue", queue(*lines))
    known_run(slurm, "4", None)
    run = RunDir(slurm / "runs" / "a")
    run.job.write_text(json.dumps({"first_attempt": 1, "submission": "new"}))
    commands = Commands([], [], [], {}, max_nodes=1, regrow=False, exclude=[], submit=[])
    for place, job_id in (("", "4"), ("0_1", "5_1"), ("1_", "6"), ("2_0", None)):
        replace(commands, place=place).write(run)
        assert SlurmLauncher().find([run]) == [job_id]
    assert state("4") is State.RUNNING
    listed, *more = SlurmLauncher.scheduler("torchx").list()
    assert [job.app_id for job in more] == ["5_1", "6"], "the others may be a notebook, or a shell on a node"
    listed.app_handle = make_app_handle("slurm_fsdp", "torchx", listed.app_id)  # as TorchX's runner does
    assert listed.app_handle == "slurm_fsdp://lab/4"
    run.job.write_text(json.dumps({"first_attempt": 0, "submission": "newer"}))
    assert state("4") is State.FAILED, "ids begin again: this job is another run's"


def test_a_submission_that_was_killed_before_it_wrote_its_commands_has_no_job(slurm: Path) -> None:
    run = RunDir(slurm / "runs" / "a")
    write_atomic(run.job, json.dumps({"submission": "260101-aaa", "pending": "slurm_fsdp"}))
    assert SlurmLauncher().find([run]) == [None]


def test_a_job_that_the_site_gives_a_name_and_a_comment_of_its_own_is_known_by_its_script(slurm: Path) -> None:
    """Seen with a job_submit.lua: a running job was shown as failed, and `resume` submitted a second one beside it."""
    known_run(slurm, "4", None)
    run = RunDir(slurm / "runs" / "a")
    run.job.write_text(json.dumps({"first_attempt": 0, "submission": "new"}))
    scripts = {f"{run.submit}/slurm/1.sh": True, "/sweeps/s/slurm/new/1.sh": True, "/mine.sh": False}
    for script, known in scripts.items():
        say(slurm, "squeue", queue(f"4|RUNNING|None|N/A|node1|node1|4|1:00|phys-a|billed to physics|{script}"))
        client.forget()
        assert (state("4") is State.RUNNING) is known, script


def test_a_look_at_a_controller_that_is_away_is_short(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real commands go on asking for 33 s and more."""
    monkeypatch.setattr(client, "LOOK_S", 0.5)
    known_run(slurm, "7", None)
    client._answers.clear()
    say(slurm, "scontrol", "exec sleep 30")
    began = time.monotonic()
    (job,) = describe([make_app_handle("slurm_fsdp", "lab", "7")]).values()
    assert time.monotonic() - began < 10
    assert job.state is State.SILENT
    assert "scontrol did not answer within 0 s: the controller is away, or busy" in job.message
    say(slurm, "scontrol", "echo 'scontrol: cannot stat file /old/slurm.conf, retrying' >&2; exec sleep 30")
    with pytest.raises(client.SlurmError, match=r"busy: scontrol: cannot stat file /old/slurm\.conf"):
        client.call("scontrol", timeout_s=0.5)


def test_a_dry_run_of_many_jobs_asks_a_controller_that_does_not_answer_once(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(slurm, "scontrol", "echo Unable to contact slurm controller >&2; exit 1")
    monkeypatch.chdir(slurm)
    keys = ["cluster=slurm", "cluster.accelerator=cpu", "nproc_per_node=1", "cluster.snapshot_mb=0", "dry_run=true"]
    jobs = submission.prepare([compose_job([*keys, f"name={name}", f"cluster.time={name}0"]) for name in "123"])
    assert [job.offline_notes[0] for job in jobs] == ["Unable to contact slurm controller"] * 3
    assert (slurm / "calls").read_text().splitlines() == ["scontrol"]
    monkeypatch.setattr(client, "_ERROR_AGE_S", 0.0)
    (slurm / "scontrol").write_text("#!/bin/sh\necho 'ClusterName = lab'\n")
    assert client.silent() == "", "it is back"


def test_a_refused_sweep_is_undone_with_one_look_for_all_its_jobs(slurm: Path) -> None:
    """The jobs that reached the cluster are found although an answer of just before lacks them."""

    class Refusing(SlurmLauncher):
        def submit(self, requests: Sequence[Any], parallelism: int, folder: Path | None) -> list[str]:
            assert not client.queue()
            runs = [RunDir(request.run_dir) for request in requests]
            for task, run in enumerate(runs):
                Commands([], [], [], {}, 1, False, [], [], place=f"0_{task}").write(run)
            tag = f"fsdp_jobs:{runs[0].submission}.0"
            taken = queue(*(f"5_{i}|PENDING|None|N/A|||5|1:00|a|{tag}" for i in range(2)))
            say(slurm, "squeue", f"[ -e {slurm}/cancelled ] || {taken}")
            (slurm / "calls").unlink()
            raise JobFailed("no more jobs today")

    say(slurm, "scancel", f"echo $* >> {slurm}/cancelled")
    keys = [f"runs_dir={slurm}", "nodes=1", "nproc_per_node=1"]
    jobs = submission.prepare([compose_job([*keys, f"name=a-{i}"]) for i in range(3)])
    jobs = [replace(job, launcher=Refusing()) for job in jobs]
    with pytest.raises(JobFailed, match="no more jobs today"):
        submission.submit(jobs, [[]] * 3)
    assert (slurm / "cancelled").read_text() == "--quiet 5_0 5_1\n"
    calls = (slurm / "calls").read_text().split()
    assert calls == ["squeue", "squeue", "scancel", "squeue"], "to find them, before they are cancelled, and after"


def test_a_site_file_is_read_where_the_cluster_does_not_answer_as_it_is_now(slurm: Path) -> None:
    file = slurm / "site.yaml"
    config = compose_job(["cluster=slurm", f"cluster.site={file}"])
    (slurm / "scontrol").write_text("#!/bin/sh\necho 'ClusterName = lab'; echo 'TopologyPlugin = topology/none'\n")
    assert site.site_of(config).cluster == "lab", "it is not needed here"
    file.write_text("cluster: other")
    with pytest.raises(BadInput, match="is of the cluster other; commands here reach lab"):
        site.site_of(config)
    client._answers.clear()
    say(slurm, "scontrol", "exit 1")
    assert site.site_of(config).cluster == "other"
    file.write_text("cluster: lab")
    assert site.site_of(config).cluster == "lab"


def test_topology_of_newer_sites_and_greetings_of_wrappers_are_read(slurm: Path) -> None:
    """Aggregated blocks have lines of their own, and `show config` may have no plugin; sbatch may greet first."""
    shown = ("BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2", "AggregatedBlock=a1 BlockIndex=1 Nodes=n[1-2]")
    config = "ClusterName = lab\nSelectType = select/cons_tres"
    say(slurm, "scontrol", f'[ $2 = topology ] && echo "{shown[0]}\n{shown[1]}" || echo "{config}"')
    say(slurm, "sinfo", "echo 'main*|2|8|gpu:8|1|1:00|x|n/a|1-2|n[1-2]'")
    assert site.ask().switches == [shown[0]]
    say(slurm, "sbatch", "echo 'Welcome to the cluster'; echo; echo '77;lab'; echo 'Estimated cost: 3 units'")
    assert client.sbatch("#!/bin/sh", env=dict(os.environ)) == "77"
    say(slurm, "sbatch", "echo 'queued by our wrapper'")
    with pytest.raises(client.SlurmError, match="printed no job id, only 'queued by our wrapper'"):
        client.sbatch("#!/bin/sh", env=dict(os.environ))


def test_no_variable_of_a_user_makes_one_job_several_or_lets_its_submission_wait_for_its_end() -> None:
    """Nor moves what the job's script says out of the file that explains failures, nor limits or feeds its steps."""
    user = {"SBATCH_WAIT": "1", "SBATCH_ARRAY_INX": "0-3", "SBATCH_TIMELIMIT": "60", "SBATCH_PARTITION": "long"}
    user |= {"SBATCH_INPUT": "my.in", "SRUN_CPUS_PER_TASK": "64"}
    user |= {"SBATCH_ERROR": "my.err", "SLURM_TIMELIMIT": "9", "SLURM_EXCLUSIVE": "", "SLURM_CONF": "/etc/slurm.conf"}
    user |= {"SBATCH_CPUS_PER_GPU": "4", "SBATCH_MEM_PER_CPU": "100", "SBATCH_GPUS": "1"}
    kept = client.own_environment(user, "#!/bin/bash\n#SBATCH --time=30\n#SBATCH --cpus-per-task=2\n#SBATCH --mem=0\n")
    assert kept.pop("SBATCH_GPUS") == "1", "nothing in the script asks for GPUs"
    assert kept == {"SBATCH_PARTITION": "long", "SLURM_CONF": "/etc/slurm.conf"}
    assert not client.own_environment({"SBATCH_GRES": "gpu:1"}, "#SBATCH --gpus-per-node=8\n"), "sbatch would take it"


@pytest.mark.parametrize(("state", "runs"), [("RUNNING", True), ("SUSPENDED", True), ("COMPLETING", False)])
def test_a_job_that_another_has_suspended_has_not_ended(slurm: Path, state: str, runs: bool) -> None:
    say(slurm, "squeue", queue(f"7|{state}|None|N/A|node1|node1|7"))
    assert (client.running("7") is not None) == runs


def test_a_suspended_job_is_shown_as_such(slurm: Path) -> None:
    run = recorded_run(slurm / "runs", "a")
    run.events.write_text("".join(line for line in run.events.open() if "attempt_ended" not in line))
    write_atomic(run.job, json.dumps({**run.read_job(), "handle": "slurm_fsdp://lab/7"}))
    SlurmLauncher().remember("7", run)
    for word, reason in (("RUNNING", ""), ("SUSPENDED", "SLURM job 7 is SUSPENDED on node1")):
        client.forget()
        say(slurm, "squeue", queue(f"7|{word}|None|N/A|node1|node1|7|1:00|a|"))
        assert Overview().look([run])[run].reason == reason


def test_a_node_in_place_of_a_lost_one_is_asked_for_where_the_job_runs(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, also if the site renames jobs. The user's variables of sbatch hold, but for those of the whole job."""
    say(slurm, "sbatch", f"env | grep ^SBATCH_ | sort > {slurm}/variables; echo 77")
    user = {"SBATCH_PARTITION": "long", "SBATCH_ACCOUNT": "proj", "SBATCH_GPUS": "16", "SBATCH_SIGNAL": "B:USR2@5"}
    known_run(slurm, "7", None)
    commands = Commands([], [], [], {}, max_nodes=2, regrow=True, exclude=[], submit=[])
    env = {**os.environ, **user, "SBATCH_EXPORT": "NONE"}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    companions = Companions(RunDir(slurm / "runs" / "a"), commands, env, 0)
    companions.request([1])
    assert companions.jobs == {1: "77"}
    assert (slurm / "variables").read_text().split() == ["SBATCH_ACCOUNT=proj", "SBATCH_PARTITION=long"]
    say(slurm, "squeue", queue("77|PENDING|Resources|N/A|||77|1:00|phys-a|"))
    say(slurm, "sbatch", "echo 78")
    client.forget()
    companions.request([1, 2])
    assert companions.jobs == {1: "77", 2: "78"}
    renamed = (f"{number}|PENDING|Resources|N/A|||{number}|1:00|phys|" for number in (77, 78))
    say(slurm, "squeue", queue(*renamed))
    say(slurm, "sbatch", "echo 79")
    client.forget()
    companions.request([1, 2])
    assert companions.jobs == {1: "77", 2: "78"}, "both have the same name now"


def test_a_node_that_starts_no_job_gets_no_other_companion(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without the run directory took all three tries: it is idle, so SLURM chooses it again."""
    say(slurm, "sbatch", f'echo "$@" > {slurm}/options; echo 77')
    known_run(slurm, "7", None)
    run = RunDir(slurm / "runs" / "a")
    commands = Commands([], [], [], {}, max_nodes=2, regrow=True, exclude=["node9"], submit=[])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    companions = Companions(run, commands, {**os.environ}, 0, {1: "76", 2: "75"})
    line = "{0}|FAILED|JobLaunchFailure|t|node{1}|node{1}|{0}|1:00|a-7-node-{2}|"
    say(slurm, "squeue", queue(line.format(76, 3, 1), line.format(75, 4, 2)))
    write_atomic(run.node(0, 2) / "companion-75.out", "killed")
    run.excluded.write_text("{")  # the user edits it; it ended the batch step, and the job
    companions.request([1])
    assert "--exclude=node9" in (slurm / "options").read_text()
    run.excluded.unlink()
    companions.jobs[1] = "76"
    companions.request([1])
    assert "--exclude=node3,node9" in (slurm / "options").read_text()
    assert "SLURM could not start job 76" in run.excluded_hosts()["node3"], "nor does it get the requeued job"
    companions.jobs[1], companions.tries[1] = "76", 3
    companions.request([1])
    run.excluded.unlink()
    companions.request([1])
    assert not run.excluded_hosts(), "a user who has repaired the node may allow it again"


def test_a_job_waits_for_what_both_its_sweep_and_its_user_name() -> None:
    own = Script(("--nodes=1",), (long_form("-dafterok:7"),), (), "python", "/home/me", False, margin_s=10)
    assert "#SBATCH --dependency=afterany:5,afterok:7\n" in own.of_run("/run", "a", "tag", after="5")


@pytest.mark.parametrize("decision", ["stop", "requeue"])
def test_a_forgotten_job_that_saved_when_it_was_asked_to_stop_is_not_said_to_have_ended_before(
    slurm: Path, decision: str
) -> None:
    """After `fsdp-jobs cancel`, or `scancel`, whose requeue SLURM does not do."""
    known_run(slurm, "9", Verdict("preempted", decision, "asked; saved at step 7"))
    events.record(RunDir(slurm / "runs" / "a"), 0, events.StopRequested("asked"))
    (described,) = SlurmLauncher().describe(["9"])
    assert described == Description(State.STOPPED, "asked; saved at step 7")
