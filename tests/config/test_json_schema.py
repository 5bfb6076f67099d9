"""The JSON schema takes what Hydra takes, and refuses what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from fsdp_jobs.config.groups import CONF_DIR, groups
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.json_schema import job_schema
from fsdp_jobs.config.schema import dump_config, plain_values
from tests.jobs import cli

SCHEMA = job_schema()


def problems(values: dict[str, Any]) -> list[str]:
    return [f"{e.json_path}: {e.message}" for e in Draft7Validator(SCHEMA).iter_errors(values)]


def test_it_is_a_schema_and_the_command_prints_it(tmp_path: Path) -> None:
    Draft7Validator.check_schema(SCHEMA)
    assert json.loads(cli(tmp_path, "schema").stdout) == json.loads(json.dumps(SCHEMA))


@pytest.mark.parametrize("file", [f for f in CONF_DIR.rglob("*.yaml") if "@package _global_" in f.read_text()])
def test_shipped_files_are_valid(file: Path) -> None:
    assert problems(plain_values(file)) == []


@pytest.mark.parametrize("group", ["cluster", "model", "data", "hardware", "fsdp", "tracking"])
def test_composed_jobs_are_valid(group: str, tmp_path: Path) -> None:
    needed = {"hf": ["model.name_or_path=x"], "custom": ["model._target_=a.b", "model.kwargs={x: 1}"]}
    for option in groups()[group]:
        job = compose_job([f"{group}={option}", "checkpoint.every_minutes=auto", *needed.get(option, [])])
        (tmp_path / "config.yaml").write_text(dump_config(job))
        assert problems(plain_values(tmp_path / "config.yaml")) == [], option


@pytest.mark.parametrize(
    ("yaml", "where"),
    [
        ("optim: {lrr: 1}", "$.optim"),
        ("optim: {lr: fast}", "$.optim.lr"),
        ("optim: {lr: -1}", "$.optim.lr"),
        ("stepz: 3", "$"),
        ("steps: 1.5", "$.steps"),
        ("steps: 0", "$.steps"),
        ("steps: null", "$.steps"),
        ("attach: 3", "$.attach"),
        ("fsdp: {strategy: zero3}", "$.fsdp.strategy"),
        ("fsdp: {accumulate_unsharded: maybe}", "$.fsdp.accumulate_unsharded"),
        ("checkpoint: {every_minutes: sometimes}", "$.checkpoint.every_minutes"),
        ("checkpoint: {memory: {every_step: 1}}", "$.checkpoint.memory"),
        ("notify: {'on': [never]}", "$.notify.on[0]"),
        ("cluster: {partitoin: gpu}", "$.cluster"),
        ("cluster: {env: [1]}", "$.cluster"),
        ("model: {n_layers: two}", "$.model"),
    ],
)
def test_a_wrong_key_and_a_wrong_value_are_not(yaml: str, where: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml)
    (problem,) = problems(plain_values(tmp_path / "mine.yaml"))
    assert problem.startswith(f"{where}:")


@pytest.mark.parametrize(
    "yaml",
    [
        "cluster: {time: 120, gpus_per_node: 8, partition: null, setup: ['module load cuda']}",
        "cluster: {image: x, claim: runs, secret_env: {A: b/c}, resources: {vpc.amazonaws.com/efa: 4}}",
        "optim: {lr: 3e-4, decay_steps: null}\nnodes: 2:4\nnproc_per_node: auto",
        "defaults:\n- override /model: llama3_8b\nhydra: {sweeper: {params: {seed: '1,2'}}}",
        "checkpoint: {memory: {every_steps: auto}}\nfsdp: {chunked_loss: true, shard_group: 4}",
    ],
)
def test_what_people_write_is_valid(yaml: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(yaml)
    assert problems(plain_values(tmp_path / "mine.yaml")) == []


def test_an_editor_has_meaning_choices_and_default_of_a_key() -> None:
    fsdp = SCHEMA["properties"]["fsdp"]["properties"]
    assert fsdp["strategy"]["description"] == "auto is the plan's choice"
    assert fsdp["strategy"]["default"] == "auto" and "hybrid_shard" in fsdp["strategy"]["enum"]
    assert SCHEMA["properties"]["steps"]["minimum"] == 1
