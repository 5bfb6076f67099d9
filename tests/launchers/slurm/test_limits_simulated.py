"""What a submission refuses, by simulated answers of SLURM's commands: sites that a small cluster does not show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_jobs import Job as NotebookJob
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.launchers.base import Job
from fsdp_jobs.launchers.slurm import client
from fsdp_jobs.launchers.slurm.examine import examine
from fsdp_jobs.launchers.slurm.scheduler import SlurmLauncher
from fsdp_jobs.launchers.slurm.validate import check_with_slurm, problems_here
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.submit.submit import plan_of
from tests.launchers.slurm.simulated import say

CONFIG = {
    "ClusterName": "site",
    "SLURM_VERSION": "24.11.5",
    "GresTypes": "gpu",
    "SelectType": "select/cons_tres",
    "MaxArraySize": "1001",
    "EnforcePartLimits": "NO",
    "AccountingStorageEnforce": "associations,limits,qos",
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "PreemptType": "preempt/none",
}
# As sinfo prints %P|%D|%c|%G|%m|%l|%f|%L|%s|%N.
SHORT = "short*|4|96|gpu:a100:4(S:0-1)|1000000|1:00:00|a100|1:00|1-2|n[1-4]"
LONG = "long|8|96|gpu:a100:4(S:0-1)|1000000|7-00:00:00|a100|n/a|1-infinite|n[1-8]"
NO_NODES = "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1"


class Site:
    """Commands that answer as those of a site do; they come first on PATH."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config(CONFIG)
        self.sinfo(SHORT, LONG)
        self.partition_qos("N/A")
        self.say("sacctmgr", "exit 0")
        self.say("sbatch", "exit 0")

    def say(self, command: str, script: str) -> None:
        say(self.folder, command, script)

    def config(self, config: dict[str, str]) -> None:
        (self.folder / "config").write_text("".join(f"{key:23} = {value}\n" for key, value in config.items()))

    def partition_qos(self, qos: str) -> None:
        shown = "".join(
            f"PartitionName={name}\n   AllowGroups=staff AllowQos=ALL\n   Default=NO QoS={qos}\n\n"
            for name in ("short", "long")
        )
        self.say("scontrol", f"[ $2 = config ] && cat {self.folder}/config || echo '{shown}'")

    def sinfo(self, *lines: str) -> None:
        self.say("sinfo", "cat <<END\n" + "\n".join(lines) + "\nEND")

    def refuses(self, *overrides: str) -> str:
        """What is said of a job of one node; empty when it may be submitted."""
        client._answers.clear()
        keys = ["cluster=slurm", "model=llama_debug", "nodes=1", "nproc_per_node=4", *overrides]
        config = compose_job(keys)
        job = Job(config, RunDir("/runs/a"), plan_of(config)[0])
        return "\n".join(map(str, check_with_slurm(job, "#!/bin/bash\n", margin_s=70, count=1)))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(client, "_answers", {})
    return Site(tmp_path)


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        *((array, "--multirun makes arrays") for array in ("--array=0-1", "--array 0-1", "-a0-1", "--arr=0-1")),
        ("--signal=USR2@60", "it asks for the last save"),
    ],
)
def test_an_option_that_is_not_for_the_user_is_refused_in_every_form_that_sbatch_takes(given: str, cure: str) -> None:
    """The tasks of an array would all work in one run directory; another signal killed the job before it had saved."""
    config = compose_job(["cluster=slurm", "model=llama_debug", f"cluster.extra=['{given}']"])
    (problem,) = problems_here(Job(config, RunDir("/runs/a"), plan_of(config)[0], offline_notes=["a laptop"]))
    assert problem.instead.startswith(cure)


def test_a_run_directory_with_a_backslash_in_its_path_is_refused() -> None:
    r"""SLURM took `/r\uns/a/submit/slurm-%j.out` for `/runs/a/submit/slurm-%j.out`, and the job failed unseen."""
    config = compose_job(["cluster=slurm", "model=llama_debug"])
    (problem,) = problems_here(Job(config, RunDir(r"/r\uns/a"), plan_of(config)[0], offline_notes=["a laptop"]))
    assert "backslash" in problem.what


def test_limits_are_those_of_the_partition_and_the_time_that_sbatch_will_take(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of: a variable of sbatch, a key, an option in `cluster.extra`."""
    assert "short allows 1:00:00" in site.refuses("cluster.time=2-00:00:00")
    assert "(short's default is 1:00)" in site.refuses()
    assert site.refuses("cluster.partition=long", "cluster.time=2-00:00:00") == ""
    for partition in ("-p long", "-plong", "--partition=long"):
        assert site.refuses("cluster.time=2-00:00:00", "nodes=4", f"cluster.extra=['{partition}']") == ""
    assert "cluster.extra=[--time=300]" in site.refuses("cluster.extra=['-t 300']")
    for given in ("-t 30", "-t30", "--time=30", "--time 30"):
        assert site.refuses("cluster.time=300", f"cluster.extra=['{given}']") == "", given
    monkeypatch.setenv("SBATCH_PARTITION", "long")
    assert site.refuses("cluster.time=2-00:00:00", "nodes=4") == ""
    assert "short allows" in site.refuses("cluster.time=2-00:00:00", "cluster.partition=short")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    assert "SBATCH_TIMELIMIT=1: the last save is requested 70 s before" in site.refuses()


def test_a_share_of_a_nodes_memory_that_is_too_small_is_warned_of(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM gives whole nodes without their memory, unless a job asks for it."""
    job = ["cluster.time=30", "hardware=cpu"]
    site.config({**CONFIG, "DefMemPerCPU": "4000", "DefMemPerNode": "UNLIMITED"})
    assert site.refuses(*job) == "" and not caplog.text
    site.config({**CONFIG, "DefMemPerNode": "1000"})
    assert site.refuses(*job) == "" and "1000.0 MiB of its memory (DefMemPerNode), and the plan needs" in caplog.text
    caplog.clear()
    for own in ("cluster.mem=0", "cluster.extra=['--mem-per-cpu=4G']"):
        site.refuses(*job, own)
    monkeypatch.setenv("SBATCH_MEM_PER_NODE", "0")
    site.refuses(*job)
    assert not caplog.text


def qos_answers(site: Site, limits: str = "|||||", flags: str = "") -> None:
    """What sacctmgr shows: of a QOS MaxWall|MinTRES|MaxTRES|MaxTRESPU|MaxTRESPA|GrpTRES; of all QOS their flags."""
    rows = f'*Flags) echo "{flags}";; *) echo "{limits}";;'
    site.say("sacctmgr", f'case "$*" in {rows} esac')


def test_a_qos_limits_what_it_really_limits(site: Site) -> None:
    """Not a time that nobody has named, nor where limits are not enforced or the partition has a QOS of its own."""
    qos_answers(site, "04:00:00||cpu=96,gres/gpu=8,node=1|||")
    job = ["cluster.partition=long", "cluster.qos=a"]
    assert "cluster.time=5-0: QOS a allows 04:00:00" in site.refuses(*job, "cluster.time=5-0")
    assert "QOS a allows node=1, the job needs 2" in site.refuses(*job, "nodes=2")
    assert "QOS a allows node=1" in site.refuses(job[0], "nodes=2", "cluster.extra=['-q a']")
    assert site.refuses(*job) == "", "the partition has no default: SLURM gives it the QOS's limit"
    site.sinfo(LONG.replace("n/a", "5:00:00"))
    assert "cluster.time=None: QOS a allows 04:00:00" in site.refuses(*job)
    site.sinfo(LONG)
    assert site.refuses(*job, "cluster.extra=['--time=3:00:00']") == ""
    assert site.refuses(job[0], "cluster.qos='a,b'", "nodes=2") == "", "it may run under the other one"
    site.partition_qos("own")
    assert site.refuses(*job, "nodes=2") == ""
    site.partition_qos("N/A")
    site.config({**CONFIG, "AccountingStorageEnforce": "associations"})
    assert site.refuses(*job, "nodes=2", "cluster.time=5-0") == ""


def test_a_qos_may_lift_a_partitions_limits(site: Site) -> None:
    too_much = ("nodes=4", "cluster.time=2-00:00:00")
    assert site.refuses(*too_much).count("wait for ever (EnforcePartLimits=NO)") == 2
    qos_answers(site, flags="DenyOnLimit,PartitionTimeLimit")
    assert site.refuses(*too_much) == ""
    site.say("sacctmgr", "exit 1")
    assert site.refuses(*too_much) == "", "nobody knows"
    (site.folder / "sacctmgr").chmod(0o644)
    assert site.refuses(*too_much) == ""
    site.config({**CONFIG, "AccountingStorageType": "(null)"})
    assert "short allows 1:00:00" in site.refuses(*too_much), "there are no QOS"


def test_what_the_sites_own_checks_may_choose_is_not_judged(site: Site) -> None:
    """job_submit.lua sends jobs to partitions, and sets their time limits."""
    too_long = "cluster.time=2-00:00:00"
    site.config({**CONFIG, "JobSubmitPlugins": "(null)", "AccountingStorageEnforce": "none"})
    assert site.refuses() and site.refuses(too_long, "nodes=4")
    site.config({**CONFIG, "JobSubmitPlugins": "lua", "AccountingStorageEnforce": "none"})
    assert not site.refuses() and not site.refuses(too_long, "nodes=4")
    assert "short allows" in site.refuses(too_long, "cluster.partition=short")
    site.say("sbatch", NO_NODES)
    assert site.refuses(too_long, "nodes=8") == "", "there are as many in partition long"


def test_a_job_that_only_has_to_wait_is_no_bad_job(site: Site) -> None:
    """sbatch --test-only gives up after two seconds of looking at running jobs, with the words for a job too large."""
    site.say("sbatch", NO_NODES)
    job = ["cluster.time=30", "nodes=2"]
    assert site.refuses(*job) == ""
    too_many = "partition short has 4 nodes with up to 96 CPUs, 1000000 MB, gpu:a100:4"
    assert too_many in site.refuses(*job, "nproc_per_node=5", "hardware.gpus_per_node=5")
    assert too_many in site.refuses(*job, "cluster.gpus_per_node='a100:5'")
    assert "nodes=5" in site.refuses("nodes=5", job[0]) and not site.refuses(
        "nodes=5", job[0], "cluster.partition='short,long'"
    )
    site.say("sbatch", "echo 'allocation failure: Invalid time specified' >&2; exit 1")
    assert site.refuses(*job, "cluster.reservation=next_week") == "", "it begins later"


def test_nodes_of_a_cloud_that_are_powered_down_are_counted(site: Site) -> None:
    """Unless PrivateData names `cloud`, sinfo hides them, and a partition without others has none."""
    shown = "PartitionName=short\n   MaxNodes=2\n   State=UP TotalCPUs=16 TotalNodes=4\n"
    site.say("scontrol", f"[ $2 = config ] && cat {site.folder}/config || echo '{shown}'")
    site.sinfo("short*|0|0|(null)|0|1:00:00||30:00|1-infinite|")
    site.say("sbatch", NO_NODES)
    assert not site.refuses("nodes=4") and "partition short has 4 nodes" in site.refuses("nodes=5")
    site.say("sacct", "exit 1")
    site.config({**CONFIG, "PreemptType": "preempt/qos"})
    partition = list(examine(compose_job(["cluster=slurm"])))[1]
    assert partition.state == "ok" and partition.fact.startswith("short: 4 nodes"), partition


def test_partitions_of_large_and_mixed_nodes_are_read(site: Site) -> None:
    """Unless told, sinfo calls 1536 CPUs 1.50K, and nodes of 16 and of 64 together 16+. Some have GPUs of two types."""
    flags = "case \"$*\" in *--all*--exact*--noconvert*) echo '{}';; *) echo '{}';; esac"
    plain = "huge*|1|1536|gpu:2g.10gb:2(S:0),gpu:3g.20gb:2(S:1)|1|infinite|x|n/a|1-1024|n1"
    site.say("sinfo", flags.format(plain, plain.replace("1536", "1.50K").replace("1024", "1K")))
    (huge,) = client.partitions()
    assert (huge.cpus, huge.job_nodes, client.gpus_in(huge.kinds[0].gres)) == (1536, "1-1024", 4)
    client.forget()
    site.sinfo(
        "p*|2|64|gpu:h100:8(S:0-1),nvme:1|9000|1:00:00|x|n/a|1-4|n[1-2]",
        "p*|1|16|gpu:h100:8(S:0-1),nvme:1|4000|1:00:00|x|n/a|1-4|n3",
        "p*|1|16|gpu:t4:1,gpu:a100:3|9000|1:00:00|x|n/a|1-4|n4",
    )
    site.say("sbatch", NO_NODES)

    def refused(asked: str) -> str:
        keys = ("nodes", "cluster.gpus_per_node", "cluster.cpus_per_task", "cluster.mem")
        job = [f"{key}={value!r}" for key, value in zip(keys, asked.split(), strict=False)]
        return site.refuses("cluster.time=30", "nproc_per_node=1", *job)

    for may_wait in ("3:4 h100:8", "1 a100:3,t4:1", "4 3", "2 8 64", "3 1 16 8G"):
        assert not refused(may_wait), may_wait
    for never in ("4 h100:8", "2 a100:3", "1 b200:1", "4 3 17", "3 8 64", "4 1 16 8G"):
        assert "MB, gpu:h100:8(S:0-1),nvme:1 or gpu:t4:1,gpu:a100:3" in refused(never), never


@pytest.mark.parametrize(
    ("said", "where", "cure"),
    [
        ("Invalid generic resource (gres) specification", "cluster.gpus_per_node=b200:4", "gpu:a100:4"),
        ("Invalid Trackable RESource (TRES) specification", "cluster.gpus_per_node=b200:4", "gpu:a100:4"),
        ("Job violates accounting/QOS policy (job submit limit, ...)", "nodes=1", "sacctmgr show qos list the limits"),
        (
            "Invalid account or account/partition combination specified",
            "cluster.account=None",
            "your accounts: proj (QOS a,b)",
        ),
        ("invalid number of nodes (-N 3-2)", "cluster.nodelist=None", "not more hosts than nodes"),
        ("User's group not permitted to use this partition", "cluster.partition=None", "short has AllowGroups=staff"),
    ],
)
def test_a_refusal_is_put_at_the_key_it_is_about(site: Site, said: str, where: str, cure: str) -> None:
    site.say("sbatch", f'echo "allocation failure: {said}" >&2; exit 1')
    site.say("sacctmgr", '[ "$3" = assoc ] && echo "proj|a,b"')
    refused = site.refuses("cluster.time=30", "cluster.gpus_per_node='b200:4'")
    assert refused.startswith(where) and f"SLURM says: {said}" in refused and cure in refused, refused
    if "gres" in said:
        refused = site.refuses("cluster.time=30", "cluster.extra=['--gpus-per-node=b200:4']")
        assert refused.startswith("cluster.extra=[--gpus-per-node=b200:4]: SLURM says"), refused


def test_what_commands_say_is_read_in_any_encoding_and_a_command_that_is_closed_to_users_is_named(site: Site) -> None:
    r"""A job of the same user may be called `gr\xf6\xdfe`."""
    site.say("squeue", r"printf '1|RUNNING|None|N/A|n1|n1|1|1:00|gr\366\337e|\n2|RUNNING|None|N/A|n1|n1|2|1:00|a|\n'")
    assert list(client.queue(fresh=True)) == ["1", "2"]
    (site.folder / "sacctmgr").chmod(0o644)
    with pytest.raises(client.SlurmError, match="sacctmgr may not be used here: Permission denied"):
        client.call(f"{site.folder}/sacctmgr")


def test_doctor_names_an_old_slurm_and_knows_nothing_of_a_partition_that_does_not_exist(site: Site) -> None:
    site.say("sacct", "exit 0")
    site.config({**CONFIG, "PreemptType": "preempt/partition_prio", "SLURM_VERSION": "20.11.9"})
    found = list(examine(compose_job(["cluster=slurm", "cluster.partition=gpus"])))
    assert found[0].state == "warning" and "22.05 or newer" in found[0].cure, found
    assert [f.what for f in found if f.state == "bad"] == ["partition"], found
    assert not {"preemption", "node"} & {f.what for f in found}, found


def test_doctor_asks_for_a_node_as_the_job_will(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where partitions of GPUs take no job without one, and with the account that stands in `cluster.extra`.

    Also with the comment, wckey and memory that a site may demand. A refusal is not mistaken for a busy cluster.
    """
    site.say("sacct", "exit 0")
    site.say("sbatch", "echo 77")
    site.say("scancel", "exit 0")
    site.config({**CONFIG, "PreemptType": "preempt/qos"})
    answer = "echo Welcome to n1; for note; do :; done; echo $(cat $note) n1 $(date +%s) 1.0 2.13.0 1; echo Bye, bye"
    site.say(
        "srun",
        f'case "$*" in *--account=proj*--comment=c*--wckey=w*$MEM*--gpus-per-node=a100:1*) {answer};; *) exit 1;; esac',
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SBATCH_COMMENT", "c")
    keys = ["cluster=slurm", "cluster.gpus_per_node='a100:4'", "cluster.extra=['-A proj','--wckey=w'{}]"]
    for more, key, mem in (("", "cluster.mem=0", "--mem=2G"), (",'--mem-per-cpu=1G'", "seed=1", "--mem-per-cpu=1G")):
        monkeypatch.setenv("MEM", mem)
        config = compose_job([*keys[:2], keys[2].format(more), key])
        found = {finding.what: finding.fact for finding in examine(config)}
        assert found["runs_dir"].startswith("n1 sees ") and found["python"].endswith("torch 2.13.0, 1 GPUs"), found
    assert "preempted by QOS" in found["preemption"], found
    site.say("sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid wckey specification' >&2; exit 1")
    *_, refused = examine(config)
    assert (refused.state, refused.fact) == ("bad", "sbatch: Invalid wckey specification"), refused
    assert refused.cure.startswith("cluster.extra="), refused


def test_a_site_that_hides_its_nodes_from_users_takes_their_jobs(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Seen on SLURM 22.05 with PrivateData=nodes: every submission ended with sinfo's refusal."""
    site.say("sinfo", "echo 'slurm_load_node: Access/permission denied' >&2; exit 1")
    shown = "PartitionName=%s\n   AllocNodes=ALL Default=%s QoS=N/A\n   DefaultTime=%s DisableRootJobs=NO\n"
    shown += "   MaxNodes=%s MaxTime=1:00:00 MinNodes=0\n   Nodes=n[%s]\n   TotalNodes=%s\n   DefMemPerCPU=1\n\n"
    values = "short YES 30:00 UNLIMITED 1-4 4 long NO NONE 4 1-8 8"
    site.say("scontrol", f"[ $2 = config ] && cat {site.folder}/config || printf '{shown}' {values}")
    known = [(p.name, p.default, p.nodes, p.default_time, p.job_nodes, p.hosts) for p in client.partitions()]
    assert known == [
        ("short", True, 4, "30:00", "0-infinite", ["n[1-4]"]),
        ("long", False, 8, "", "0-4", ["n[1-8]"]),
    ]
    assert site.refuses("nodes=4") == "" and not caplog.records, "the sizes of nodes are not known"
    assert "short allows 1:00:00" in site.refuses("cluster.time=2-00:00:00")
    site.say("sbatch", NO_NODES)
    assert site.refuses("nodes=4") == "" and "short has 4 nodes" in site.refuses("nodes=5")


def test_a_notebook_plans_with_the_switches_that_slurm_names_now(site: Site) -> None:
    site.config({**CONFIG, "TopologyPlugin": "topology/tree"})
    site.say("sinfo", "echo 'long*|2|8|gpu:8|1|1:00|x|n/a|1-2|n[1-2]'")
    for switch in ("before", "now"):
        shown = f"SwitchName={switch} Level=0 Nodes=n[1-2]"
        site.say("scontrol", f"[ $2 = config ] && cat {site.folder}/config || echo '{shown}'")
        plan = NotebookJob("cluster=slurm", "model=llama_debug", "nodes=2", "hardware=h100").plan()
        assert plan.leaves == (switch, switch)


def test_a_partition_has_the_topology_that_the_site_gives_it(site: Site) -> None:
    """By topology.yaml, which SLURM has from 25.05; TopologyPlugin is flat beside it."""
    site.config({**CONFIG, "TopologyPlugin": "topology/flat"})
    site.say(
        "scontrol",
        f"""case "$*" in
        "show config") cat {site.folder}/config;;
        "show topology") echo 'SwitchName=leaf Level=0 LinkSpeed=0 Nodes=n[1-8]';;
        "show topology blocks") echo 'BlockName=b1 BlockIndex=0 Nodes=n[1-4] BlockSize=4'
                                echo 'BlockName=b2 BlockIndex=1 Nodes=n[5-8] BlockSize=4'
                                echo 'AggregatedBlock=b[1-2] BlockIndex=2 Nodes=n[1-8] BlockSize=8';;
        *) printf 'PartitionName=short\n   QoS=N/A\n\nPartitionName=long\n   QoS=N/A\n   Topology=blocks\n';;
        esac""",
    )
    for partition, leaves in {"short": {"leaf"}, "long": {"b1", "b2"}}.items():
        job = ("cluster=slurm", f"cluster.partition={partition}", "model=llama_debug", "hardware=h100")
        nodes = 4 if partition == "short" else 8
        assert {*NotebookJob(*job, f"nodes={nodes}").plan().leaves} == leaves
    saved = site.folder / "site.yaml"
    saved.write_text(SlurmLauncher().site_file())
    site.say("scontrol", "exit 1")
    client._answers.clear()
    assert {*NotebookJob(*job, "nodes=8", f"cluster.site={saved}", "dry_run=true").plan().leaves} == leaves


def test_a_size_or_number_of_jobs_that_is_never_allowed_is_refused(site: Site) -> None:
    """Seen on SLURM 22.05: the job waits with QOSMinNode, MaxNodePerAccount or PartitionNodeLimit."""
    job = ["cluster.partition=long", "cluster.qos=a"]
    qos_answers(site, "|cpu=8,node=3||||")
    assert "QOS a is for 3 nodes or more" in site.refuses(*job, "nodes=2")
    assert site.refuses(*job, "nodes=2:3") == ""
    qos_answers(site, "||||node=1|")
    assert "QOS a allows node=1, the job needs 2" in site.refuses(*job, "nodes=2")
    site.sinfo(LONG.replace("1-infinite", "2-3"))
    for nodes, waits in {"1": True, "1:2": False, "3": False, "2:4": True}.items():
        assert ("a job of partition long has 2-3 nodes" in site.refuses(job[0], f"nodes={nodes}")) is waits, nodes
    site.say("sbatch", "echo 'allocation failure: QOSGrpSubmitJobsLimit' >&2; exit 1")
    assert "this job: more than SLURM takes: QOSGrpSubmitJobsLimit" in site.refuses(job[0], "nodes=2")
    site.config({**CONFIG, "MaxJobCount": "10000"})
    site.say("sbatch", "echo 'allocation failure: Resource temporarily unavailable' >&2; exit 1")
    said = "this job: more than SLURM takes: Resource temporarily unavailable, it holds 10000 jobs of all users"
    assert said in site.refuses(job[0], "nodes=2")
