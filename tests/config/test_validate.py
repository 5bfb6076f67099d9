"""Bounds stand with the keys: every key has a meaning, keeps its bounds through Hydra, and is checked by them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from fsdp_jobs.config.clusters import CLUSTERS
from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.hydra import compose_job, merge_overrides
from fsdp_jobs.config.keys import metadata
from fsdp_jobs.config.schema import SCHEMAS, dump_config, load_config
from fsdp_jobs.config.validate import config_problems

# sbatch's own options mean what they mean to sbatch
SBATCHS = {"partition", "account", "qos", "constraint", "reservation", "comment", "mail_user", "mail_type"}


def wheres(*overrides: str) -> list[str]:
    return [p.where for p in config_problems(compose_job(overrides), files=False)]


def bounded() -> Iterator[tuple[str, dict[str, Any]]]:
    """Keys with bounds that the default configuration has."""
    config = compose_job([])
    for group in [config, *(v for v in vars(config).values() if is_dataclass(v))]:
        prefix = next((f"{name}." for name, value in vars(config).items() if value is group), "")
        for field in fields(group):
            about = dict(metadata(type(group), field.name))
            if about.get("choices") or about.get("at_least") is not None:
                yield prefix + field.name, about


@pytest.mark.parametrize("schema", sorted({node for _, _, node in SCHEMAS}, key=str))
def test_every_key_says_what_it_means(schema: type) -> None:
    for field in fields(schema):
        if not is_dataclass(getattr(schema(), field.name)) and field.name not in SBATCHS:
            assert metadata(schema, field.name)["meaning"], field.name


def test_numbers_that_are_none_and_rates_that_adam_refuses_are_named() -> None:
    given = ("optim.lr=nan", "optim.beta1=1", "optim.eps=-1", "hardware.memory_gib=inf", "hardware.matmul_efficiency=9")
    said = [where.partition("=")[0] for where in wheres(*given)]
    assert sorted(said) == sorted(override.partition("=")[0] for override in given)


@pytest.mark.parametrize("name", ["1e5", "2024_10", "007"])
def test_names_that_look_like_numbers_stay_as_they_are(name: str) -> None:
    assert compose_job([f"name={name}", f"runs_dir={name}"]).name == name


def test_another_option_of_a_group_replaces_the_values_of_the_one_before() -> None:
    before = ["cluster=slurm", "cluster.partition=a", "fsdp.strategy=full_shard", "steps=3"]
    assert merge_overrides(before, ["cluster=docker"]) == ["fsdp.strategy=full_shard", "steps=3", "cluster=docker"]
    assert "cluster.partition=a" in merge_overrides(before, ["cluster=slurm"]), "it is the same one"
    assert compose_job(merge_overrides(before, ["fsdp=hybrid_shard"])).fsdp.strategy == "hybrid_shard"


def test_bounds_are_checked_after_hydra_has_composed() -> None:
    keys = dict(bounded())
    assert len(keys) > 50
    overrides = []
    for key, about in keys.items():
        if key in ("notify.on", "fsdp.accumulate_unsharded"):
            continue
        wrong = "nonsense" if about["choices"] else about["at_least"] - 1
        whole = isinstance(wrong, str) or float(wrong).is_integer()
        overrides.append(f"{key}={int(wrong) if whole and not isinstance(wrong, str) else wrong}")
    said = wheres(*overrides)
    for override in overrides:
        assert any(where.startswith(f"{override.partition('=')[0]}=") for where in said), override


def test_each_item_of_a_list_and_the_nearest_word() -> None:
    problems = list(config_problems(compose_job(["notify.on=[done, stuck, requeu]"]), files=False))
    assert [p.where for p in problems] == ["notify.on=[stuck]", "notify.on=[requeu]"]
    assert problems[1].instead == "did you mean requeue?"
    assert wheres("notify.on=[requeue, user_error]") == []
    assert wheres("fsdp.accumulate_unsharded=true") == wheres("fsdp.accumulate_unsharded=auto") == []
    assert wheres("fsdp.accumulate_unsharded=maybe") == ["fsdp.accumulate_unsharded=maybe"]


@pytest.mark.parametrize("pattern", [r"step (\d+", "step [0-9]+", r"(?P<loss>\d+)", r"(?P<step>\d+) (?P<nll>\d+)"])
def test_a_pattern_that_tells_no_step_is_refused(pattern: str) -> None:
    assert wheres("script=train.py", f"program.metrics={pattern}") == [f"program.metrics={pattern}"]
    assert not wheres("script=train.py", r"program.metrics=step=(?P<step>\d+), loss: ([0-9.]+)")


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_cluster_that_only_changes_a_default_keeps_its_bounds(cluster: str) -> None:
    assert wheres(f"cluster={cluster}", "cluster.accelerator=tpu") == ["cluster.accelerator=tpu"]


def test_what_nothing_reads_is_not_checked() -> None:
    trainers = ("steps=0", "data.seq_len=0", "optim.lr=-1")
    assert wheres(*trainers) == ["steps=0", "data.seq_len=0", "optim.lr=-1.0"]
    assert wheres("script=train.py", *trainers) == []
    assert wheres("script=train.py", "elastic.exclude_after=-1", "seed=-1") == ["seed=-1", "elastic.exclude_after=-1"]


def test_replicas_that_cannot_be_compared_are_refused() -> None:
    assert "integrity.every_steps=10" in wheres("integrity.every_steps=10", "fsdp=full_shard")
    assert "integrity.every_steps=10" not in wheres("integrity.every_steps=10", "fsdp=hybrid_shard")
    assert "integrity.action=restart" in wheres("integrity.action=restart", "integrity.probe_every_steps=0")
    assert "integrity.action=restart" in wheres("integrity.action=restart", "script=train.py")
    for asked in ("integrity.every_steps=10", "checkpoint.memory.every_steps=1"):
        assert "integrity.action=restart" not in wheres("integrity.action=restart", "script=train.py", asked)


@pytest.mark.parametrize(
    ("before", "after", "key", "value"),
    [
        ("lr: 0.001", "lr: 3e-4", "optim.lr", 3e-4),
        ("lr: 0.001", "lr: 1", "optim.lr", 1.0),
        ("steps: 120", "steps: '60'", "steps", 60),
        ("every_minutes: 0.0", "every_minutes: 15e-1", "checkpoint.every_minutes", 1.5),
        ("script_args: ''", "script_args: 3", "script_args", "3"),
    ],
)
def test_a_config_edited_by_hand_has_the_types_of_its_keys(
    tmp_path: Path, before: str, after: str, key: str, value: Any
) -> None:
    config = compose_job(["nodes=2:4"])
    config.notify.command = "echo ${HOME} \\${X}"
    file, text = tmp_path / "config.yaml", dump_config(config)
    assert before in text
    file.write_text(text.replace(before, after))
    loaded = load_config(file)
    found = attrgetter(key)(loaded)
    assert found == value and type(found) is type(value)
    assert loaded.notify.command == "echo ${HOME} \\${X}", "what is right is left as it is"
    file.write_text(text)
    assert load_config(file) == config


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [("lr: 0.001", "lr: fast", "'fast' of type 'str' could not be converted to Float"), ("lr:", "lrr:", "'lrr'")],
)
def test_what_is_wrong_in_a_config_edited_by_hand_is_said(tmp_path: Path, before: str, after: str, said: str) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(compose_job([])).replace(before, after))
    with pytest.raises(BadInput, match=said):
        load_config(tmp_path / "config.yaml")
