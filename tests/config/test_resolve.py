"""`auto` has one answer: what the plan is priced for, what is requested and what ranks compute with agree."""

from __future__ import annotations

from itertools import product

import pytest

from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.resolve import accelerator, accelerator_of_node, backend, node_range, param_dtype, ranks_per_node
from fsdp_jobs.config.schema import FsdpConfig, JobConfig
from fsdp_jobs.launchers.base import Job
from fsdp_jobs.launchers.docker import validate
from fsdp_jobs.launchers.kubernetes.pods import node_pod
from fsdp_jobs.launchers.slurm.script import Site, script
from fsdp_jobs.plan.plan import Plan
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.submit.submit import plan_of

RUN = RunDir("/shared/runs/one")
CLUSTERS: dict[str, list[str]] = {
    "local": ["cluster=local"],
    "docker": ["cluster=docker"],
    "slurm": ["cluster=slurm"],
    "kubernetes": ["cluster=kubernetes", "cluster.image=x", "cluster.claim=runs"],
}
HARDWARE = {"cpu": "cpu", "cpu hardware.name=cpu_epyc": "cpu", "cpu hardware.name=xeon": "cpu", "h100": "cuda"}
ACCELERATORS = (None, "auto", "cpu", "cuda")


def gpus_requested(cluster: str, config: JobConfig, plan: Plan) -> int:
    """GPUs per node in what is submitted."""
    job = Job(config, RUN, plan)
    in_app = int(job.app.roles[1].resource.gpu)
    if cluster == "slurm":
        text = script(job, Site("lab"), None, 70).of_run(str(RUN.path), job.app.name, job.submission)
        assert (f"--gpus-per-node={in_app}\n" in text) == ("--gpus-per-node" in text) == bool(in_app)
    elif cluster == "kubernetes":
        spec = node_pod(job, "one", "0")["spec"]
        assert int(spec["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", 0)) == in_app
    elif cluster == "docker":
        assert (plan.backend == "nccl") == bool(in_app), "Docker validates and requests GPUs for nccl"
        assert any(validate._gpus(config, {}, [])) == bool(in_app), "this machine has none"
    return in_app


@pytest.mark.parametrize(("cluster", "hardware", "chosen"), [*product(CLUSTERS, HARDWARE, ACCELERATORS)])
def test_plan_and_request_agree_on_the_accelerator(cluster: str, hardware: str, chosen: str | None) -> None:
    named = [] if chosen is None else [f"cluster.accelerator={chosen}"]
    config = compose_job([*CLUSTERS[cluster], *f"hardware={hardware}".split(), *named])
    device = accelerator(config)
    if chosen in ("cpu", "cuda"):
        assert device == chosen
    elif chosen == "auto" or cluster in ("local", "docker"):
        assert device == HARDWARE[hardware]
    else:
        assert device == "cuda", "clusters whose nodes are rented for their GPUs"
    plan, _ = plan_of(config)
    assert plan.backend == backend(config) == ("nccl" if device == "cuda" else "gloo")
    assert gpus_requested(cluster, config, plan) == (ranks_per_node(config) if device == "cuda" else 0)


def test_a_rank_takes_a_gpu_when_there_is_one_for_each_of_its_node() -> None:
    config = compose_job(["hardware=cpu"])
    assert [accelerator_of_node(config, gpus, ranks=4) for gpus in (0, 3, 4, 8)] == ["cpu", "cpu", "cuda", "cuda"]
    for chosen in ("cpu", "cuda"):
        config = compose_job([f"cluster.accelerator={chosen}"])
        assert {accelerator_of_node(config, gpus, ranks=4) for gpus in (0, 8)} == {chosen}


def test_dtypes() -> None:
    assert [param_dtype(FsdpConfig(), device) for device in ("cpu", "cuda")] == ["fp32", "bf16"]
    assert param_dtype(FsdpConfig(param_dtype="fp16"), "cpu") == "fp16"


def test_a_range_of_nodes() -> None:
    assert [node_range(text) for text in (4, "4", "2:4")] == [(4, 4), (4, 4), (2, 4)]
    for wrong in (0, "x", "1:x", "4:2", ":"):
        with pytest.raises(BadInput, match=f"nodes={wrong}"):
            node_range(wrong)


def test_true_is_one_rank_and_is_written_as_a_number() -> None:
    assert str(ranks_per_node(compose_job(["nproc_per_node=true"]))) == "1"
