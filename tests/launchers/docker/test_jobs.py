"""Jobs in containers: whatever happens to one of them, the losses are those of an undisturbed run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsdp_jobs.launchers.detached import supervisor_of
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.verdict import Verdict
from tests.jobs import ROOT, Watched, cli
from tests.launchers.docker.daemon import SECRET, docker
from tests.world import TINY_TASK, tiny_for, undisturbed_losses

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

# A lost node is noticed soon, and one that comes back is not left out.
# A coordinator that is restarted on a busy machine takes seconds: the lease is longer than twice the timeout.
_SOON = (
    "elastic.heartbeat_timeout_s=4",
    "elastic.heartbeat_interval_s=0.5",
    "elastic.lease_s=15",
    "elastic.exclude_after=0",
)


# A job that is only to be kept alive: see tests.world.PACED. Containers see a copy of the folder it is submitted from.
PACED = ("model=custom", "model._target_=own_models.paced", "model.wrap_classes=[Block]")


class DockerJob(Watched):
    """A detached job in containers."""

    def __init__(self, folder: Path, name: str, image: str, *overrides: str, tiny: bool = True):
        super().__init__(RunDir(folder / "runs" / name))
        self.folder, self.name = folder, name
        where = ("cluster=docker", f"cluster.image={image}", f"name={name}", "attach=false")
        shutil.copy(ROOT / "tests" / "models.py", folder / "own_models.py")
        done = cli(folder, *where, *(tiny_for(overrides) if tiny else ()), *overrides)
        assert done.returncode == 0, done.stdout + done.stderr

    def verb(self, *args: str) -> str:
        done = cli(self.folder, *args)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def container(self, hostname: str) -> str:
        return f"fsdp-{self.name}-{hostname}"

    def of_rank_0(self) -> str:
        """The container that the newest round's rank 0 is in."""
        return self.container(self.events("round_started")[-1]["hosts"][0])

    def steps_on(self, steps: int = 10) -> None:
        """Wait until so many more steps are done than now."""
        self.until_step(self.step() + steps)

    def rounds(self) -> int:
        return len(self.events("round_started"))

    def until_round_after(self, rounds: int) -> None:
        """Wait for a round that begins after so many, and for steps in it."""
        self.until(lambda: self.rounds() > rounds, f"round {rounds + 1}", 120)
        begun = self.events("round_started")[-1]["time"]
        self.until(lambda: self.metrics()[-1]["time"] > begun, f"a step of round {rounds + 1}", 120)

    def wait(self) -> Verdict:
        """Until the containers have gone; returns the last verdict."""
        self.until(lambda: bool(self.events("attempt_ended")), "the end of the job", 240)
        self.until(lambda: not self.left(), "the removal of what it had in Docker", 90)
        verdict = Verdict.read(self.run, self.run.last_attempt())
        assert verdict is not None
        return verdict

    def left(self) -> list[str]:
        """Containers and networks of this job."""
        ours = ["--filter", f"name=fsdp-{self.name}"]
        names = docker("ps", "--all", *ours, "--format", "{{.Names}}")
        return [*names.split(), *docker("network", "ls", *ours, "--format", "{{.Name}}").split()]


@contextmanager
def docker_job(folder: Path, name: str, image: str, *overrides: str, tiny: bool = True) -> Iterator[DockerJob]:
    """A job in containers, tiny unless told otherwise; killed at the end if it is still there."""
    job = DockerJob(folder, name, image, *overrides, tiny=tiny)
    try:
        yield job
    finally:
        if job.left():
            job.verb("cancel", name, "--now")
    assert not job.left()


def test_whatever_is_done_to_containers_the_losses_are_the_undisturbed_ones(image: str, tmp_path: Path) -> None:
    task = ("steps=200", "checkpoint.every_steps=10", *PACED)
    fleet = ("nodes=2", "nproc_per_node=2", "cluster.cpus=1", *_SOON)
    with docker_job(tmp_path, "chaos", image, *fleet, *task) as job:
        job.until_step(15)
        rounds = job.rounds()
        docker("kill", job.of_rank_0())
        job.until_round_after(rounds)

        docker("kill", job.container("coordinator"))
        job.until(lambda: bool(job.events("adopted")), "a new coordinator that adopts the running round")
        job.steps_on()

        rounds, lost = job.rounds(), len(job.events("node_lost"))
        docker("pause", job.container("node-1"))
        job.until(lambda: any("node-1" in e["why"] for e in job.events("node_lost")[lost:]), "node-1 is given up")
        docker("unpause", job.container("node-1"))
        job.until_round_after(rounds)

        rounds, lost = job.rounds(), len(job.events("node_lost"))
        docker("network", "disconnect", "fsdp-chaos", job.container("node-0"))
        job.until(lambda: any("node-0" in e["why"] for e in job.events("node_lost")[lost:]), "node-0 is given up")
        docker("network", "connect", "fsdp-chaos", job.container("node-0"))
        job.until_round_after(rounds)

        assert job.step() < 200, "the job was over before everything had been done to it"
        verdict = job.wait()
        assert (verdict.verdict, verdict.decision) == ("done", "stop"), job.story()
        restarted = [e["process"] for e in job.events("process_restarted") if e["exit_code"] == 137]
        assert "coordinator" in restarted and len(restarted) >= 2
        here = [o.replace("own_models.paced", "tests.models.tiny") for o in task]
        assert job.losses() == pytest.approx(undisturbed_losses(tmp_path, 1, 1, *here), rel=1e-5)


def test_verbs_and_what_a_job_leaves(image: str, tmp_path: Path) -> None:
    (name, secret) = next(iter(SECRET.items()))
    task = ("nodes=2", "nproc_per_node=1", "steps=100000", f"cluster.pass_env=[{name}]", *PACED)
    with docker_job(tmp_path, "verbs", image, *task) as job:
        job.until_step(5)
        table = job.verb("status", "verbs")
        assert "running" in table and "2/2" in table
        assert "resumed" not in job.verb("logs", "verbs")
        again = cli(tmp_path, "cluster=docker", f"cluster.image={image}", "name=verbs", *TINY_TASK, *task)
        assert again.returncode == 2 and "in use by the live job docker_fsdp://" in again.stderr + again.stdout

        seen = json.loads(docker("inspect", job.container("node-0")))[0]
        assert f"{name}={secret}" in seen["Config"]["Env"]
        assert seen["HostConfig"]["ReadonlyRootfs"] and seen["HostConfig"]["CapDrop"] == ["ALL"]
        assert not seen["HostConfig"]["Privileged"] and not seen["HostConfig"]["CapAdd"]
        compiled = "import _ctypes, ctypes, shutil; ctypes.CDLL(shutil.copy(_ctypes.__file__, '/tmp'))"
        docker("exec", job.container("node-0"), "python", "-c", compiled)  # as torch.compile and Triton do

        assert "stopped: cancelled; saved at step" in job.verb("cancel", "verbs")
        assert job.left() == []
        saved = job.step()
        job.verb("resume", "verbs", "nodes=1", f"steps={saved + 20}", "attach=false", "cluster.keep=true")
        job.until(lambda: len(job.events("attempt_ended")) == 2, "the end of the resumed job", 120)
        assert job.events("resumed")[-1]["step"] == saved
        assert sorted(job.losses())[-1] == saved + 20
        job.until(lambda: supervisor_of(job.run) is None, "the end of its supervisor")
        assert job.container("node-0") in job.left(), "keep=true left nothing to look into"
        job.verb("resume", "verbs", f"steps={saved + 21}", "attach=false", "cluster.keep=false")
        assert job.wait().verdict == "done"
        files = [f for f in job.run.path.rglob("*") if f.is_file() and not f.is_relative_to(job.run.path / "code")]
        assert files and not [f for f in files if secret.encode() in f.read_bytes()]


def test_a_stopped_node_stays_away_until_it_is_started_and_a_stopped_coordinator_ends_the_job(
    image: str, tmp_path: Path
) -> None:
    elastic = ("nodes=1:2", "nproc_per_node=1", "steps=100000", "elastic.join_window_s=3", *PACED)
    with docker_job(tmp_path, "stops", image, *elastic) as job:
        job.until_step(5)
        rounds = job.rounds()
        docker("stop", job.container("node-1"))
        job.until_round_after(rounds)
        assert job.run.last_attempt() == 1
        assert job.events("round_started")[-1]["nodes"] == [0]
        rounds = job.rounds()
        docker("start", job.container("node-1"))
        job.until_round_after(rounds)
        assert job.events("round_started")[-1]["nodes"] == [0, 1]
        docker("stop", job.container("coordinator"))
        verdict = job.wait()
        assert (verdict.verdict, verdict.decision) == ("preempted", "stop")
        assert job.run.last_attempt() == 1
        saved = job.events("checkpoint")[-1]["step"]
        assert f"saved at step {saved}" in verdict.reason and saved == job.step()


def test_what_nobody_restarts_is_named_and_cancel_leaves_nothing_even_without_a_supervisor(
    image: str, tmp_path: Path
) -> None:
    task = ("nodes=2", "nproc_per_node=1", "steps=100000", *_SOON, *PACED)
    with docker_job(tmp_path, "alone", image, *task) as job:
        job.until_step(5)
        docker("rm", "--force", job.container("node-1"))
        removed = "the container of node-1 was removed"
        job.until(lambda: any(removed in e["why"] for e in job.events("waiting")), "the missing container is named")
        assert removed in job.verb("status", "alone")
        supervisor = supervisor_of(job.run)
        assert supervisor is not None
        supervisor.kill()
        assert "alone stopped: cancelled" in job.verb("cancel", "alone")
        assert job.left() == []
    with docker_job(tmp_path, "twice", image, *task, "nodes=1", "elastic.stop_grace_s=10") as job:
        job.until_step(5)
        supervisor = supervisor_of(job.run)
        assert supervisor is not None
        supervisor.kill()
        docker("stop", job.container("coordinator"))
        job.until(lambda: bool(job.events("attempt_ended")), "the end of the job")
        job.until(lambda: "is not running" in job.verb("cancel", "twice"), "that all have ended")
        assert job.left() == [], "a cancel of what has ended removes what it has left"


def test_a_container_that_cannot_start_says_why(image: str, tmp_path: Path) -> None:
    """An image in which Python does not work: no attempt begins, and the verdict has the container's words."""
    broken = "cluster.env={PYTHONPATH: /nowhere, PYTHONHOME: /nowhere}"
    with docker_job(tmp_path, "broken", image, "nodes=1", "nproc_per_node=1", "cluster.snapshot_mb=0", broken) as job:
        verdict = job.wait()
        assert verdict.verdict == "infrastructure"
        assert "encodings" in verdict.last_lines, verdict
        assert "failed" in job.verb("status", "broken")
