"""Bad input: one screen that says what to change, exit code 2, nothing started, nothing written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fsdp_jobs.cli.main import main
from fsdp_jobs.config.arguments import overrides_in, search_path
from fsdp_jobs.config.errors import BadInput, nearest
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.run.files import write_json
from tests.jobs import called, cli, environment
from tests.recorded import recorded_run

CASES = [
    (["optim.lrr=1"], "did you mean optim.lr?"),
    (["modell=llama_1b"], "did you mean model?"),
    (["model=lama_1b"], "did you mean llama_1b?"),
    (["hardware=a100"], "did you mean a100_40 or a100_80?"),
    (["fsdp=HYBRID_SHARD"], "did you mean hybrid_shard?"),
    (["fsdp=zero3"], "-> fsdp=full_shard"),
    (["model=meta-llama/Llama-3.1-8B"], "-> model=hf model.name_or_path=meta-llama/Llama-3.1-8B"),
    (["batch_size=32"], "-> data.global_batch=32"),
    (["precision=bf16-mixed"], "-> fsdp.param_dtype=bf16\n"),
    (["dtype=float16"], "-> fsdp.param_dtype=fp16\n"),
    (["precision=fp8"], "-> fsdp.param_dtype=auto, fp32, bf16 or fp16\n"),
    (["epochs=3"], "-> steps=...: optimizer steps in all"),
    (["-N", "2", "-p", "gpu"], "-> cluster.partition=..."),
    (["cluster=k8s"], "-> cluster=kubernetes\n"),
    (["cluster.partition=gpu"], "-> a key of cluster=slurm\n"),
    (["cluster=slurm", "cluster.image=x"], "-> a key of cluster=docker, cluster=kubernetes\n"),
    (["cluster=slurm", "cluster.secret_env.KEY=x"], "-> a key of cluster=kubernetes\n"),
    (["model.name_or_path=x"], "-> a key of model=hf\n"),
    (["checkpoint.memory.every_step=1"], "did you mean checkpoint.memory.every_steps?"),
    (["cluster.env.A"], "-> cluster.env.A=VALUE"),
    (["rm", "first"], "-> fsdp-jobs prune --older-than 30d"),
    (["name=été"], "name=été: not a valid run name"),
    (["data.tokenizer=été"], "-> \"data.tokenizer='été'\""),
    (["steps=1e3"], "-> steps=1000\n"),
    (["status", "--state", "runing"], "did you mean running?"),
    (["lr=1"], "optim.lr"),
    (["optim.lr=fast"], "optim.lr=fast: is not a number"),
    (["data.seq_len=8k"], "data.seq_len=8k: is not a whole number\n      -> data.seq_len=8192, or 8000"),
    (["steps=1e3"], "steps=1e3: is not written as a whole number\n      -> steps=1000"),
    (["steps=1.5"], "steps=1.5: is not a whole number\n      -> digits only"),
    (["dry_run=maybe"], "dry_run=maybe: is neither true nor false"),
    (["optim.lr=null"], "optim.lr=null: needs a value"),
    (["optim.lr=1,2"], "--multirun"),
    (["nodes=0"], "at least 1 node"),
    (["nodes=4:2"], "did you mean 2:4?"),
    (["nodes=many"], "neither a number nor min:max"),
    (["nproc_per_node=0"], "at least 1"),
    (["fsdp=hybrid_shard", "nodes=1", "nproc_per_node=1"], "at least 2 ranks"),
    (["fsdp=hybrid_shard", "fsdp.shard_group=3"], "cannot be formed on 2 nodes x 2 ranks"),
    (["fsdp.strategy=zero3"], "allowed: auto, full_shard"),
    (["fsdp.strategy=hybrid_shart"], "did you mean hybrid_shard?"),
    (["fsdp.param_dtype=int8"], "allowed: auto, fp32, bf16, fp16"),
    (["data=tokens"], "data.path"),
    (["data=tokens", "data.path=/nowhere.bin"], "there is no such file"),
    (["name=a/b"], "no '/'"),
    (["name=.."], "no '..'"),
    (["name=a..b"], "no '..'"),
    (["steps=0"], "at least 1"),
    (["cluster.launcher=slrum"], "not an installed launcher"),
    (["model.n_kv_heads=3"], "must divide"),
    (["--no-such-flag"], "there is no such flag"),
    (["plan", "--multirun", "seed=1,2"], "there is no such flag"),
    (["plan", "torchrun", "-m", "pkg.train"], "-> leave it out"),
    (["torchrun", "train.py"], "-> leave it out"),
    (["bash", "train.sh"], "-> leave it out"),
    (["uv", "run", "train.py"], "-> leave it out"),
    (["nodes=1", "accelerate", "launch", "train.py"], "launch: is not of the form key=value\n      -> leave it out"),
    (["-m", "torch.distributed.run", "train.py"], "torch.distributed.run: starts a node's ranks itself"),
    (["script=/opt/bin/composer", "script_args=train.py"], "-> leave it out: the launcher starts the program; or"),
    (["script=/opt/bin/trl", "script_args=sft --model x"], "trl.scripts, and its arguments; or nproc_per_node=1"),
    (["trl", "sft", "--model", "x"], "-> -m trl.scripts.sft"),
    (["nodes=1", "llamafactory-cli", "train", "x.yaml"], "-> -m llamafactory.launcher X.yaml"),
    (["nodes=1", "tune", "run", "recipe", "--config", "x.yaml"], "if it is a program's: script_args='...'"),
    (["script=sh", "script_args=run.sh"], f"      -> script={shutil.which('sh')}\n"),
    (["module=pkg.train", "--x", "3"], "if it is a program's: script_args='...'"),
    (["--multirun", "--cfg", "job", "seed=1,2"], "submits jobs, but --cfg only prints"),
    (["--cfg", "job", "optim.lrr=1"], "did you mean optim.lr?"),
    (["--info", "config", "-cd", ".", "fsdp=hybrid"], "did you mean hybrid_shard or hybrid_shard_zero2?"),
    (["~optim"], "~optim: every job has this key\n      -> optim=VALUE"),
    (["name=${oc.env:NO_SUCH}"], "name: KeyError raised while resolving interpolation"),
    (["submitt"], "did you mean submit?"),
    (["-c"], "argument --cfg/-c: expected one argument\n      -> fsdp-jobs --cfg job"),
    (["-c", "jobs"], "invalid choice: 'jobs'"),
    (["cluster=docker", "cluster.env=A"], "is not a mapping\n      -> one at a time, KEY.NAME=VALUE"),
    (["tracking=mlflow", "tracking.uri=mlflow:5000"], "has no scheme\n      -> http://mlflow:5000, or https"),
    (["runs_dir=", "checkpoint.dir="], "2. checkpoint.dir=: names no folder\n      -> is a variable"),
    (["help", "statu"], "did you mean status?"),
    (["model=custom", "model.wrap_classes=Block"], "Block: is not a list\n      -> \"model.wrap_classes=['Block']\"\n"),
    (["resume"], "are required: name\n"),
    (["doctor", "--save", "site.yaml"], "dry runs of local_fsdp need no facts of a cluster"),
    (["--output", "yaml"], "--output yaml: a dry run with local_fsdp shows text"),
    (["dry_run=true", "--output", "script"], "-> dry_run=true --output text"),
    (["cluster=slurm", "dry_run=true", "data=tokens"], "data.path"),
    (["cluster=slurm", "dry_run=true", "script=trian.py"], "there is no such file in"),
    (["cluster=slurm", "dry_run=true", "cluster.site=no.yaml"], "cluster.site=no.yaml: not a site file: No such file"),
    (["resume", "nothing"], "no such run"),
    (["logs", "nothing"], "no such run"),
    (["resume", "../x"], "no '/'"),
    (["import-accelerate", "no.yaml"], "no.yaml: No such file or directory\n"),
    (["plan", "--svg", "nodes=4"], "argument --svg: nodes=4 is an override, not a file"),
    (["doctor", "--save", "cluster=slurm"], "argument --save: cluster=slurm is an override, not a file"),
    (["plan", "--svg", "no/folder/plan.svg"], "no/folder/plan.svg: No such file or directory"),
    (["dashboard", "--port", "70000"], "a port is a number from 0 to 65535"),
    (["nodes", "4"], "nodes: not a verb\n      -> nodes=...\n"),
    (["plan", "cluster", "slurm"], "cluster: is not of the form key=value\n      -> cluster=...\n"),
    (["name=my run"], "-> my-run; runs_dir="),
    (["plan", "nodes", "=", "4"], "nodes = 4: is more than one word\n      -> one value: nodes=4\n"),
    (["fsdp.wrap_classes=[A,", "B]"], "is more than one word\n      -> one value: 'fsdp.wrap_classes=[A, B]'\n"),
    (["script=a.py", "script_args=--lr", "1"], "-> one value: 'script_args=--lr 1'; or a program: script=1\n"),
    (["--multirun", "seed=1,", "2"], "seed=1, 2: is more than one word\n"),
    (["doctor", "slurm"], "slurm: is not of the form key=value\n      -> cluster=slurm\n"),
    (["llama3_8b"], "llama3_8b: not a verb\n      -> model=llama3_8b\n"),
    (["cluster=slurm", "cluster.extra=[--gres=gpu:8,--x]"], "-> \"cluster.extra=['--gres=gpu:8','--x']\"\n"),
    (["cluster=slurm", "cluster.partition=a,b"], "if it is one: \"cluster.partition='a,b'\"\n"),
    (["checkpoint.dir=~/saves"], "saves: a shell does not replace ~ behind a key\n      -> checkpoint.dir=$HOME/saves"),
    (["experiment=mine"], "-> one of your own: --config-dir FOLDER, "),
    (["batch=32"], "-> did you mean data.global_batch or data.micro_batch?\n"),
    (["bf16=true"], "-> fsdp.param_dtype=bf16\n"),
    (["data=train.bin"], "-> token ids: data=tokens data.path=FILE; "),
    (["nproc_per_node=gpu"], "-> nproc_per_node=8\n"),
    (["sh", "run.sh"], f"sh: not a verb\n      -> a program: script={shutil.which('sh')}\n"),
    (["status", "runs/first_1"], "-> first_1; runs_dir="),
    (["data.vocab_size=32000"], "-> a larger model.vocab_size, or other data\n"),
    (["checkpoint.dir=s3://nobodys/runs"], "checkpoint.dir=s3://nobodys/runs: cannot be read: NoCredentialsError"),
]


@pytest.mark.parametrize(("args", "said"), CASES, ids=[" ".join(args) for args, _ in CASES])
def test_bad_input_is_explained_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    code = main(args)
    output = "".join(capsys.readouterr())
    assert code == 2, output
    assert said in output
    assert "Traceback" not in output
    assert len(output.splitlines()) < 25
    assert [p for p in tmp_path.rglob("*") if not p.name.startswith(".")] == []


@pytest.mark.parametrize(
    "override",
    ["+optim.foo=3", "++optim.foo=3", "+foo=1", "=3", "", "+optim.lr=3", "~optim.lr", "~foo", "cluster.env.X=1"],
)
def test_no_key_can_be_smuggled_in(override: str) -> None:
    with pytest.raises(BadInput):
        compose_job([override])


def test_nothing_else_is_offered_for_a_word_with_another_first_letter() -> None:
    known = ["cpu", "h100", "attach", "data.micro_batch"]
    assert [nearest(word, known) for word in ("gpu", "v100")] == ["", ""]
    assert nearest("batch", known) == "did you mean data.micro_batch?"


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    done = called(tmp_path, "optim.lrr=1", "model=x", "steps=a", "nodez=3")
    assert all(f"\n  {i}. " in f"\n{done.stderr}" for i in (1, 2, 3, 4))
    done = called(tmp_path, "steps=0", "nodes=0", "fsdp.wrap=x", "model.dim=7", "data=tokens")
    assert "5 problems" in done.stderr or "6 problems" in done.stderr


def test_a_file_too_short_or_unreadable_is_named_before_anything_starts(tmp_path: Path) -> None:
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "short.bin")
    done = called(tmp_path, "data=tokens", f"data.path={tmp_path}/short.bin", "data.vocab_size=20")
    assert done.returncode == 2
    assert "short.bin" in done.stderr and "holds 20 tokens" in done.stderr and "129" in done.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe", "racks.yaml: is not text in UTF-8"),
        (b"switches: {a: n1, b: n1}", "racks.yaml, switches.b: n1 is named twice; first under racks.yaml, switches.a"),
    ],
)
def test_a_bad_topology_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: bytes, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("racks.yaml").write_bytes(content)
    assert main(["plan", "cluster=slurm", "cluster.topology=racks.yaml"]) == 2
    assert said in capsys.readouterr().err


def test_a_wrap_class_that_matches_nothing_names_those_there_are(tmp_path: Path) -> None:
    done = called(tmp_path, "model=custom", "model._target_=tests.models.tiny", "model.wrap_classes=[Blok]")
    assert done.returncode == 2, done.stdout
    assert "wrap_classes" in done.stderr and "Block" in done.stderr


def test_another_training_configuration_under_the_same_name_is_refused(tmp_path: Path) -> None:
    from fsdp_jobs.config.schema import dump_config
    from fsdp_jobs.run.directory import RunDir
    from fsdp_jobs.run.files import write_atomic

    run = RunDir(tmp_path / "runs" / "mine")
    write_atomic(run.config, dump_config(compose_job(["name=mine"])))
    run.attempt(0).mkdir(parents=True)
    done = called(tmp_path, "name=mine", "optim.lr=0.5", "seed=3", "dry_run=true")
    assert done.returncode == 2
    assert "optim.lr=0.5: run mine was trained with 0.001" in done.stderr and "seed=3" in done.stderr
    assert "2 problems" in done.stderr and done.stderr.count("allow_config_change=true") == 1, "only what differs"
    (tmp_path / "train.py").touch()
    done = called(tmp_path, "name=mine", "dry_run=true", "train.py")
    assert "1 problem" in done.stderr and "name=mine: names another job: " in done.stderr, "one screen"
    assert "more settings differ\n      -> another name=" in done.stderr
    for allowed in (["steps=999"], ["nodes=4"], ["fsdp=full_shard"], ["optim.lr=0.5", "allow_config_change=true"]):
        assert called(tmp_path, "name=mine", "dry_run=true", *allowed).returncode == 0, allowed


def test_a_config_dir_or_package_of_the_users_own_adds_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine" / "optim").mkdir(parents=True)
    (tmp_path / "mine" / "optim" / "slow.yaml").write_text("defaults:\n  - optim_schema\nlr: 1.0e-6\n")
    for package in ("mine", "mine/optim"):
        (tmp_path / package / "__init__.py").touch()
    mine = search_path(str(tmp_path / "mine"))
    assert compose_job([mine, "optim=slow"]).optim.lr == 1e-6
    with pytest.raises(BadInput, match="did you mean slow"):
        compose_job([mine, "optim=slo"])
    assert compose_job(["hydra.searchpath=[pkg://mine]", "optim=slow"]).optim.lr == 1e-6
    with pytest.raises(BadInput, match="is not a folder"):
        search_path(str(tmp_path / "other"))


def test_open_keys_take_whatever_the_users_factory_takes() -> None:
    custom = compose_job(["model=custom", "model._target_=a.b", "model.kwargs={x: 1}", "model.kwargs.y=2"]).model
    assert custom.kwargs == {"x": 1, "y": 2}  # type: ignore[attr-defined]
    efa = ["cluster=kubernetes_efa", "+cluster.env.A=1", "++cluster.env.B=2", "~cluster.env.FI_PROVIDER"]
    env = compose_job(efa).cluster.env  # type: ignore[attr-defined]
    assert "FI_PROVIDER" not in env and (env["A"], env["B"], env["NCCL_SOCKET_IFNAME"]) == ("1", "2", "^docker,lo,veth")


def test_a_key_is_deleted_behind_others() -> None:
    assert overrides_in(given := ["cluster=kubernetes_efa", "~cluster.env.FI_PROVIDER", "nodes=2"]) == given


_SMALL = ["nodes=1", "nproc_per_node=1", "name=a"]


@pytest.mark.parametrize(
    "args",
    [
        [*_SMALL, "runs_dir=/proc/own"],
        ["--multirun", "seed=1,2", *_SMALL, "runs_dir=/proc/own"],
        ["--multirun", "seed=1,2", *_SMALL, "sweep.dir=/proc/own"],
        ["report", "recorded", "--out", "/proc/own"],
    ],
)
def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded_run(tmp_path / "runs")
    assert main(args) == 2
    assert "  1. /proc/own: No such file or directory\n      -> choose a folder" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["plan"], ["init"], ["status"]])
def test_a_command_in_a_folder_that_was_removed_says_so(
    tmp_path: Path, args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(args) == 2
    assert "  1. the current folder: No such file or directory\n      -> choose" in capsys.readouterr().err


def test_a_file_without_permission(tmp_path: Path) -> None:
    file = tmp_path / "secret.bin"
    np.arange(20000, dtype=np.uint16).tofile(file)
    file.chmod(0)
    may_read_all = os.geteuid() == 0
    as_others = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if may_read_all else []
    done = cli(tmp_path, "data=tokens", f"data.path={file}", "data.vocab_size=20000", under=as_others)
    assert done.returncode == 2 and "is not readable by your user" in done.stderr


@pytest.mark.integration
def test_a_reader_that_leaves_neither_fails_nor_ends_a_submission(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("print('hello')")
    command = f"{sys.executable} -m fsdp_jobs name=unread nodes=1 nproc_per_node=1 hello.py; echo $? > code"
    subprocess.run(["bash", "-c", f"({command}) 2>&1 | true"], cwd=tmp_path, env=environment(tmp_path), timeout=120)
    assert (tmp_path / "code").read_text() == "0\n"
    assert "unread  done" in called(tmp_path, "status", "unread").stdout
    shown = f"({sys.executable} -m fsdp_jobs list; echo $? > code) | true"
    subprocess.run(["bash", "-c", shown], cwd=tmp_path, env=environment(tmp_path), timeout=60)
    assert (tmp_path / "code").read_text() == "0\n"


def test_problems_of_good_and_bad_overrides_are_reported_together(tmp_path: Path) -> None:
    done = called(tmp_path, "optim.lrr=1", "nodes=0", "fsdp.strategy=fulls")
    assert done.returncode == 2 and "3 problems" in done.stderr
    for word in ("did you mean optim.lr?", "at least 1 node", "did you mean full_shard?"):
        assert word in done.stderr


def test_a_bad_sweep_starts_nothing_and_a_bad_job_of_it_fails_it(tmp_path: Path) -> None:
    done = called(tmp_path, "--multirun", "seed=1,2", "optim.lrr=3")
    assert done.returncode == 2 and "did you mean optim.lr?" in done.stderr and "Traceback" not in done.stderr
    done = called(tmp_path, "--multirun", "nodes=0,-1", "steps=1")
    assert done.returncode == 2 and done.stderr.count("at least 1 node") == 2 and "Traceback" not in done.stderr


def test_tokens_beyond_the_vocabulary_and_half_tokens_are_found_before_anything_starts(tmp_path: Path) -> None:
    tokens = np.zeros(50_000, dtype=np.uint16)
    tokens[-1] = 300
    tokens.tofile(tmp_path / "t.bin")
    done = called(tmp_path, "data=tokens", f"data.path={tmp_path}/t.bin", "data.vocab_size=256")
    assert done.returncode == 2 and "holds token id 300" in done.stderr
    (tmp_path / "odd.bin").write_bytes(bytes(1001))
    done = called(tmp_path, "data=tokens", f"data.path={tmp_path}/odd.bin", "data.vocab_size=256")
    assert done.returncode == 2 and "not a whole number of uint16" in done.stderr


@pytest.mark.parametrize(("data", "is_said"), [("python_stdlib", True), ("text", False)])
@pytest.mark.parametrize("swept", [[], ["--multirun", "seed=1,2"]])
def test_a_path_that_nothing_reads_is_said_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: str,
    is_said: bool,
    swept: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("text")
    assert main(["dry_run=true", f"data={data}", "data.path=mine.txt", *swept]) == 0
    assert capsys.readouterr().out.count("data.path=mine.txt: no effect with data=python_stdlib") == is_said


def test_a_run_that_is_done_is_not_submitted_to_do_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = recorded_run(tmp_path / "runs", "mine")
    write_json(run.job, run.read_job() | {"handle": "local_fsdp://fsdp_jobs/gone"})
    same = ["dry_run=true", "name=mine", "nodes=2", "nproc_per_node=2", "fsdp=hybrid_shard"]
    assert main([*same, "steps=20"]) == 2
    assert "no step is left to do -> fsdp-jobs resume mine steps=40" in " ".join(capsys.readouterr().err.split())
    for more in (["steps=21"], ["steps=20", "checkpoint.restart_from_zero=true"]):
        assert main([*same, *more, "allow_config_change=true"]) == 0, capsys.readouterr().err


def test_a_plan_needs_no_data(tmp_path: Path) -> None:
    done = called(
        tmp_path, "plan", "experiment=llama3_8b_pretrain", "cluster=slurm", "nodes=8", "data.path=/not/here.bin"
    )
    assert done.returncode == 0 and done.stdout.startswith("FITS"), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("own", "is_said"), [("--out runs/mine", True), ("--out=./runs/mine/", True), ("--out runs/mine/out", False)]
)
def test_a_program_that_is_given_the_runs_own_directory_is_told(
    tmp_path: Path, own: str, is_said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its `config.yaml` would replace the job's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["name=mine", "dry_run=true", "train.py", *own.split()]) == 0
    assert ("runs/mine has the job's own config.yaml" in capsys.readouterr().out) == is_said
