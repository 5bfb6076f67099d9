"""Accelerate: its programs see the job's layout, and its configuration files can be read."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.hub.import_accelerate import KNOWN, read
from fsdp_jobs.node.accelerate_env import environment
from fsdp_jobs.plan.plan import make_plan
from tests.jobs import ROOT, Job, cli, job

SCRIPT = ROOT / "examples" / "accelerate_llama.py"


def _lines(run: Job) -> list[dict[str, float]]:
    file = run.run.path / "losses.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _log(run: Job) -> str:
    return "\n".join(f.read_text() for f in sorted(run.run.path.glob("attempts/*/node-*/rank-0.log")))


@pytest.mark.integration
def test_a_program_of_accelerates_is_sharded_as_asked_and_lives_on(tmp_path: Path) -> None:
    program = [f"script={SCRIPT}", "script_args='--steps 30 --every 5'"]
    with job(tmp_path, "hybrid", *program, "fsdp=hybrid_shard", tiny=False) as hybrid:
        hybrid.until(lambda: len(_lines(hybrid)) >= 12, "12 steps")
        hybrid.ranks(1)[0].kill()
        assert hybrid.wait().verdict == "done"
        log = _log(hybrid)
        assert "sharded: (Replicate(), Shard(dim=0)) over DeviceMesh((dp_replicate=2, dp_shard_cp=2)" in log, log
        assert "resumed from step " in log
    by_step = {line["step"]: line["loss"] for line in _lines(hybrid)}
    assert sorted(by_step) == list(range(1, 31)) and by_step[30] < by_step[1]
    again = {line["step"]: line["loss"] for line in reversed(_lines(hybrid))}
    assert again == pytest.approx(by_step, rel=1e-5)  # steps that were done twice
    program[1] = "script_args='--steps 15 --every 0'"
    with job(tmp_path, "full", *program, "fsdp=full_shard", nodes="1", nproc=2, tiny=False) as full:
        assert full.wait().verdict == "done"
        assert "sharded: (Shard(dim=0),) over DeviceMesh((2,)" in _log(full)
    assert [line["loss"] for line in _lines(full)] == pytest.approx([by_step[s] for s in range(1, 16)], rel=1e-4)


def _accelerates_own(config: dict[str, Any]) -> dict[str, str]:
    """What `accelerate launch` puts into the environment of a program for this file."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    with TemporaryDirectory() as folder:
        file = Path(folder, "default_config.yaml")
        file.write_text(yaml.safe_dump(config))
        args = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
        args, _, _ = _validate_launch_command(args)
    return prepare_multi_gpu_env(args)


COMMON = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "machine_rank": 0,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 29500,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 2,
    "num_processes": 16,
    "rdzv_backend": "static",
    "same_network": True,
    "downcast_bf16": "no",
    "use_cpu": False,
    "debug": False,
    "enable_cpu_affinity": False,
}
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_activation_checkpointing": True,
}
HYBRID = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 8}


@pytest.mark.parametrize(
    ("changed", "parallelism", "strategy", "group"),
    [
        ({}, {}, "full_shard", 16),
        ({"fsdp_reshard_after_forward": False, "fsdp_offload_params": True}, {}, "shard_grad_op", 16),
        ({}, HYBRID, "hybrid_shard", 8),
        ({"fsdp_reshard_after_forward": False}, HYBRID, "hybrid_shard_zero2", 8),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000}, {}, "full_shard", 16),
    ],
)
def test_a_file_becomes_overrides_that_say_the_same_to_accelerate(
    tmp_path: Path, changed: dict[str, Any], parallelism: dict[str, Any], strategy: str, group: int
) -> None:
    file = tmp_path / "default_config.yaml"
    content = {**COMMON, "fsdp_config": FSDP2 | changed, "parallelism_config": parallelism}
    file.write_text(yaml.safe_dump(content))
    config = compose_job(["script=train.py", *(o.replace("'", "") for o in read(file).overrides())])
    layout = make_plan(config).layout
    assert (layout.strategy, layout.shard_group, config.nodes, config.nproc_per_node) == (strategy, group, 2, 8)
    ours = environment(config, layout, "cuda")
    theirs = _accelerates_own(content)
    for name, value in ours.items():
        if name == "FSDP_MIN_NUM_PARAMS" and config.fsdp.wrap != "size":
            continue
        assert value == theirs.get(name, "false"), name


def test_every_key_of_accelerates_is_known() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    names = [a.dest for a in launch_command_parser()._actions]
    keys = [f.name for f in fields(ClusterConfig)] + [
        n for n in names if n.startswith(("fsdp_", "parallelism_config_"))
    ]
    assert {key for key in keys if not key.endswith("_config")} <= KNOWN


def test_what_cannot_be_had_is_named_and_the_rest_spoken_of(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    old = {
        "fsdp_sharding_strategy": "HYBRID_SHARD",
        "fsdp_backward_prefetch": "BACKWARD_POST",
        "fsdp_use_orig_params": 1,
    }
    file.write_text(yaml.safe_dump({**COMMON, "mixed_precision": "no", "fsdp_config": old}))
    done = cli(tmp_path, "import-accelerate", str(file))
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    for word in ("nodes=2", "nproc_per_node=8", "fsdp.strategy=hybrid_shard", "fsdp.shard_group=8"):
        assert word in words
    assert "fsdp_backward_prefetch: FSDP2 gathers" in done.stderr and "main_process_port: the job's" in done.stderr
    done = cli(tmp_path, "import-accelerate", str(file), "--experiment", "old", "--config-dir", "mine")
    assert done.returncode == 0, done.stderr
    assert compose_job([f"hydra.searchpath=[file://{tmp_path / 'mine'}]", "experiment=old"]).fsdp.shard_group == 8
    again = cli(tmp_path, "import-accelerate", str(file), "--experiment", "old", "--config-dir", "mine")
    assert again.returncode == 2 and "is there already, and is not overwritten" in again.stderr
    bad = {"distributed_type": "DEEPSPEED", "mixed_precision": "fp8", "fsdp_config": {"fsdp_ofload_params": True, 1: 2}}
    file.write_text(yaml.safe_dump({**COMMON, **bad, "num_processes": 15}))
    done = cli(tmp_path, "import-accelerate", str(file))
    assert done.returncode == 2
    near = "did you mean fsdp_offload_params?"
    for said in ("distributed_type: DEEPSPEED", "mixed_precision: fp8", near, "fsdp_1: 2: is not a known key", "16"):
        assert said in done.stderr


OF_ITS_DOCUMENTATION = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def test_the_file_of_accelerates_documentation_is_taken_and_numbers_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "documented.yaml"
    file.write_text(OF_ITS_DOCUMENTATION)
    done = cli(tmp_path, "import-accelerate", str(file))
    assert done.returncode == 0 and "fsdp.strategy=full_shard" in done.stdout, done.stderr
    assert "fsdp_backward_prefetch_policy: FSDP2 gathers" in done.stderr
    wrong = OF_ITS_DOCUMENTATION.replace("num_machines: 1", "num_machines: two")
    file.write_text(wrong.replace("num_processes: 2", "num_processes: many"))
    done = cli(tmp_path, "import-accelerate", str(file))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "num_machines: two: is not a number" in done.stderr and "num_processes: many: is not" in done.stderr
    file.write_text("distributed_type: FSDP\nnum_machines: 0\nnum_processes:\nfsdp_config:\n  fsdp_version:\n")
    assert read(file).values == {"fsdp.strategy": "full_shard"}, "null and 0 are no numbers"


@pytest.mark.soak  # what benchmarks/against_accelerate.py checks, too
@pytest.mark.integration
def test_our_trainer_and_accelerate_launch_train_the_same(tmp_path: Path) -> None:
    from benchmarks.against_accelerate import furthest, ours, prepare, theirs

    prepare(tmp_path, steps=6, width=64)
    assert furthest(ours(tmp_path, "ours", 6)[0], theirs(tmp_path, "theirs", 6)[0]) < 1e-4


def test_a_file_for_tpus_becomes_a_job_of_torch_xla(tmp_path: Path) -> None:
    file = tmp_path / "tpu.yaml"
    of_tpus = {"distributed_type": "XLA", "downcast_bf16": "yes", "num_machines": 2, "num_processes": 8}
    gcloud = {"tpu_name": "mine", "tpu_zone": "us-central1-b", "tpu_use_cluster": False, "tpu_env": []}
    file.write_text(yaml.safe_dump({**COMMON, **of_tpus, **gcloud}))
    imported = read(file)
    config = compose_job(["script=train.py", "cluster=kubernetes_tpu", *imported.overrides()])
    assert (config.nodes, config.nproc_per_node) == (2, 4)
    assert config.cluster.env == {"PJRT_DEVICE": "TPU", "XLA_DOWNCAST_BF16": "1"}
    assert "cluster=kubernetes_tpu" in imported.notes["tpu_name"]
