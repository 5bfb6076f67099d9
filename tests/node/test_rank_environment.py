"""What ranks find in their environment beside torchrun's variables."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.node.rank_logs import RankLogs
from fsdp_jobs.plan.layout import Layout
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.messages import Round

RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # torch reads the first, older versions the second
SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@pytest.fixture(autouse=True)
def no_names_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def found_by_a_rank(folder: Path, *overrides: str) -> dict[str, str]:
    """The variables of rank 0 in the first round of a job."""
    layout = Layout("full_shard", 2, 2).to_json()
    round_ = Round(0, 1, size=1, shard_group=2, rank=0, layout=layout, last=0, partner=None, hosts="n[2,1]")
    place = {"run": RunDir(folder), "folder": folder, "agent": SimpleNamespace(attempt=0, node=0)}
    handler: Any = SimpleNamespace(config=compose_job(list(overrides)), round=round_, **place)
    env = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "4"}
    env |= {"LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}  # of this node, and of the first
    RankLogs(handler).reify({0: env})
    assert json.loads(env["FSDP_JOBS_LAYOUT"])["strategy"] == "full_shard"
    return env


def test_the_trainers_memory_is_in_segments_that_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert found_by_a_rank(tmp_path)[SETTINGS[0]] == "expandable_segments:True"
    script = tmp_path / "train.py"
    script.touch()
    assert not {*SETTINGS} & {*found_by_a_rank(tmp_path, "model=none", f"script={script}")}  # its author knows
    monkeypatch.setenv(SETTINGS[1], "max_split_size_mb:512")
    assert not {*SETTINGS} & {*found_by_a_rank(tmp_path)}  # inherited as the user has it


@pytest.mark.parametrize("users", RECORDER)
def test_the_users_size_of_nccls_record_holds_by_either_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: str
) -> None:
    for name in RECORDER:
        monkeypatch.delenv(name, raising=False)
    assert [found_by_a_rank(tmp_path)[name] for name in RECORDER] == ["2000", "2000"]
    monkeypatch.setenv(users, "50000")
    found = found_by_a_rank(tmp_path)
    assert [found[name] for name in RECORDER] == ["50000", "50000"]


def test_a_rank_finds_the_number_of_its_node_by_composers_name(tmp_path: Path) -> None:
    """Composer refuses to start without it: `environment variable NODE_RANK is not set`."""
    assert found_by_a_rank(tmp_path)["NODE_RANK"] == "2"


def test_a_torchrun_in_a_rank_numbers_its_ranks_as_it_does_elsewhere(tmp_path: Path) -> None:
    """With the agent's setting, nodes of 1 and 2 ranks had worlds of 2 and 4."""
    assert found_by_a_rank(tmp_path)["TORCH_ELASTIC_WORKER_IDENTICAL"] == "0"


def test_a_program_that_takes_its_rank_from_slurm_finds_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM knows one task a node, its agent: each rank would be number 0 of 1."""
    words = "PROCID LOCALID NTASKS NODEID NNODES NPROCS NTASKS_PER_NODE"
    names = [f"SLURM_{word}" for word in words.split()]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert not {*names} & {*found_by_a_rank(tmp_path)}
    for name, of_agent in zip(names, "0010111", strict=True):
        monkeypatch.setenv(name, of_agent)
    assert [found_by_a_rank(tmp_path)[name] for name in names] == ["5", "1", "8", "2", "4", "8", "3"]


def test_a_program_that_chooses_its_first_node_from_slurms_list_finds_those_of_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's list has lost nodes, lacks those in their place, and may begin with another node than rank 0's."""
    lists = [f"SLURM_{word}NODELIST" for word in ("", "JOB_", "STEP_")]
    numbers = ["SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"]
    for name in (*lists, *numbers):
        monkeypatch.delenv(name, raising=False)
    assert not {*lists, *numbers} & {*found_by_a_rank(tmp_path)}
    for name in (*lists, *numbers):
        monkeypatch.setenv(name, "1")
    found = found_by_a_rank(tmp_path)
    assert [found[name] for name in lists] == 3 * ["n[2,1]"]
    assert [found[name] for name in numbers] == ["4", "4", "8"]
