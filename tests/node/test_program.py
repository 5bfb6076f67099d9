"""What is said of a program of the user's before it is submitted, and what is submitted."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from fsdp_jobs.config.arguments import search_path
from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.habits import program_as_overrides
from fsdp_jobs.config.hydra import compose_job, compose_jobs
from fsdp_jobs.config.program import launcher_in
from fsdp_jobs.config.schema import JobConfig, dump_config, load_config
from fsdp_jobs.launchers.base import Job
from fsdp_jobs.launchers.docker import containers
from fsdp_jobs.launchers.slurm.script import Site, script
from fsdp_jobs.node.program import Program
from fsdp_jobs.node.worker import _run
from fsdp_jobs.plan.plan import Plan, make_plan
from fsdp_jobs.plan.svg import to_svg
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.env import LOG_ENV, PROGRAM_ENV, RANK_STATE_ENV, RUN_DIR_ENV, STACKS_ENV
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.run.verdict import Verdict
from fsdp_jobs.submit.validate import check_existing_run, validate
from tests.jobs import cli
from tests.plan.shown import render_text


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a program, a package and a file that is neither."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # `_run` replaces it
    (tmp_path / "pkg").mkdir()
    for file in ("train.py", "pkg/__init__.py", "pkg/deep.py", "train.sh", "notes.txt"):
        (tmp_path / file).write_text("raise SystemExit('looked at, not run')\n")
    (tmp_path / "train.sh").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["script=trian.py"], ("there is no such file", "did you mean train.py?")),
        (["script=pkg"], ("is a folder", "module=pkg")),
        (["script=notes.txt"], ("neither Python (.py) nor executable", "chmod +x notes.txt")),
        (["script=train.py", "module=pkg.deep"], ("script=train.py is given, too", "one of the two")),
        (["module=pkg.deeper"], ("there is no such module here", "as for python -m")),
        (["module=pkg.deep.er"], ("there is no such module here", "")),
        (["script=train.py", "script_args=--name 'half"], ("no closing quotation", "close the quote")),
        (["script_args=--lr 1"], ("the trainer takes no arguments", "script=train.py")),
        (["model=none"], ("the trainer needs a model", "script=train.py")),
        (["script=train.py", "fsdp.shard_group=3"], ("cannot be formed", "")),
    ],
)
def test_bad_input_is_named_before_anything_is_started(overrides: list[str], said: tuple[str, str]) -> None:
    with pytest.raises(BadInput) as found:
        validate(compose_job(overrides))
    assert all(words in str(found.value) for words in said), str(found.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["script=train.py", "steps=0", "data=tokens"],  # the trainer's keys mean nothing to it
        ["script=train.sh"],
        ["module=pkg.deep"],
        ["script=train.py", "model=llama_1b"],
        ["cluster=docker", "script=/in/the/image.py"],
        ["cluster=kubernetes", "script=in/the/image.py", "cluster.image=i"],
    ],
)
def test_what_can_be_run_is_not_refused(overrides: list[str]) -> None:
    validate(compose_job(overrides))


def test_keys_that_only_the_trainer_reads_are_named(folder: Path) -> None:
    given = ("script=train.py", "steps=7", "optim.lr=0.1", "data=tokens", "nodes=1", "checkpoint.every_steps=5")
    said = cli(folder, *given, "dry_run=true").stdout
    assert "steps=7, optim.lr=0.1, data=tokens: no effect on your program" in said, said
    assert "no effect" not in cli(folder, "steps=7", "dry_run=true").stdout


@pytest.mark.parametrize(
    ("line", "nproc", "said"),
    [
        ("srun --label torchrun --nproc-per-node=2 train.py", 2, "torchrun"),
        ("OMP_NUM_THREADS=1 exec python -m torch.distributed.run train.py", 2, "torch.distributed.run"),
        ("torchrun --nproc-per-node=2 train.py", 1, ""),
        ("# was: torchrun train.py\nexec python train.py --deepspeed composer", 2, ""),
    ],
)
def test_a_launcher_in_a_shell_script_is_named(tmp_path: Path, line: str, nproc: int, said: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"#!/bin/sh\n{line}\n")
    assert launcher_in(compose_job([f"script={script}", f"nproc_per_node={nproc}"])) == said


@pytest.mark.parametrize("text", ["--lr=3e-4 --names a,b", "--text 'two words'", "5", "--set {a: 1} [x]", ""])
def test_arguments_stand_as_in_a_shell(text: str) -> None:
    overrides = ["script=train.py", f"script_args={text}"]
    assert compose_job(overrides).script_args == text
    assert compose_jobs([overrides])[0].script_args == text


@pytest.mark.parametrize(
    "own", [["--run-name=my run", "b"], [r"--re=\d+"], ["", "it's", "a\\"], ["lr=${optim.lr}", r"\${x}"]]
)
def test_a_programs_arguments_reach_it_as_they_are(own: list[str]) -> None:
    assert shlex.split(compose_job(program_as_overrides(["train.py", *own])).script_args) == own
    config = compose_job(program_as_overrides(["nodes=3", "-m", "pkg.train", "--", *own]))
    assert (config.nodes, config.module, shlex.split(config.script_args)) == (3, "pkg.train", own)


@pytest.mark.parametrize("script", ["entraîne.py", "rép (x)/t (1).py", "a=b.py"])
def test_a_script_may_have_any_name(folder: Path, script: str) -> None:
    place = folder / script
    place.parent.mkdir(exist_ok=True)
    place.write_text("print('here')")
    config = compose_job([f"script={place}", f"runs_dir={place.parent}/runs", search_path(str(place.parent))])
    assert (config.script, config.runs_dir) == (str(place), f"{place.parent}/runs")


def test_arguments_that_hydra_has_escaped_for_a_sweep_are_read_back() -> None:
    assert compose_jobs([["script=train.py", "script_args=--n\\ 1"]])[0].script_args == "--n 1"


def test_nothing_is_known_of_a_programs_model_unless_one_is_named() -> None:
    config = compose_job(["script=train.py", "nodes=4", "fsdp=hybrid_shard", "nproc_per_node=8"])
    plan = Plan.from_json(make_plan(config).to_json())
    assert plan.memory is None and plan.time is None
    assert (plan.layout.strategy, plan.layout.shard_group, plan.layout.replicas) == ("hybrid_shard", 8, 4)
    assert "memory and speed are not known: the model is the program's" in render_text(plan)
    assert "not known" in to_svg(plan)
    named = make_plan(compose_job(["script=train.py", "model=llama3_8b", "hardware=h100", "nodes=4"]))
    assert named.memory is not None and named.parameters > 8e9


def test_a_run_goes_on_with_the_program_it_began_with(folder: Path) -> None:
    run = RunDir(folder / "runs" / "r")
    write_atomic(run.config, dump_config(compose_job(["script=train.py", "script_args=--lr 1", "steps=7"])))
    run.attempt(0).mkdir(parents=True)
    assert load_config(run.config).model.kind == "none"
    check_existing_run(compose_job(["script=train.py", "script_args=--lr 1", "steps=9", "nodes=4"]), run)
    with pytest.raises(BadInput, match="script_args=--lr 2: run r was trained with --lr 1"):
        check_existing_run(compose_job(["script=train.py", "script_args=--lr 2"]), run)


@pytest.mark.parametrize(
    ("verdict", "metrics", "is_refused"),
    [("user_error", "", False), ("user_error", '{"step": 7}\n', True), ("preempted", "", True)],
)
def test_a_run_that_failed_by_its_own_error_before_any_step_may_be_corrected(
    folder: Path, verdict: str, metrics: str, is_refused: bool
) -> None:
    run = RunDir(folder / "runs" / "r")
    write_atomic(run.config, dump_config(compose_job(["script=train.py", "script_args=--lrr 1"])))
    run.metrics.write_text(metrics)
    Verdict(verdict, "stop", "exit code 2").close(run, 0)
    with pytest.raises(BadInput, match="was trained with") if is_refused else nullcontext():
        check_existing_run(compose_job(["script=train.py", "script_args=--lr 1"]), run)


def test_a_program_that_cannot_be_looked_at_preloads_nothing(folder: Path) -> None:
    assert Program(str(folder / "train.py"), False, str(folder), []).preload == []
    (folder / "train.py").write_text("import torch.distributed.checkpoint as dcp\n")
    assert Program(str(folder / "train.py"), False, str(folder), []).preload == ["torch.distributed.checkpoint"]
    assert Program("m" * 300, True, str(folder), []).preload == []  # to the system no name, as others are no entry


def test_a_script_that_is_a_link_finds_its_neighbours(folder: Path) -> None:
    """As in Python, which looks beside the file that it leads to."""
    (folder / "newest.py").symlink_to("pkg/deep.py")
    assert Program.of(compose_job(["script=newest.py"]), RunDir(folder / "r")).folder == str(folder / "pkg")


def _submitted(folder: Path, *overrides: str) -> tuple[JobConfig, RunDir, Plan]:
    config = compose_job(["name=r", "script=train.py", "nodes=2", "nproc_per_node=2", *overrides])
    return config, RunDir(folder / "runs" / "r"), make_plan(config)


def test_slurm_brings_the_program_as_it_was_at_submission(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, run, plan = _submitted(folder, "cluster=slurm", "cluster.accelerator=cpu")
    text = script(Job(config, run, plan), Site("lab", gpu_option=""), None, 70).of_run(str(run.path), "r", "s")
    assert f"PYTHONPATH={run.path}/code" in text and "--mem" not in text
    assert Program.of(config, run).what == str(folder / "train.py")
    write_atomic(run.path / "code" / "train.py", "")
    monkeypatch.setattr(Path, "exists", lambda _: False)  # as of Python 3.14 where storage does not answer
    assert Program.of(config, run).what == str(run.path / "code" / "train.py")
    assert Program.of(config, run).folder == str(run.path / "code")


def test_containers_of_a_program_have_no_limit_that_nobody_knows(folder: Path) -> None:
    config, run, plan = _submitted(folder, "cluster=docker")
    request = containers.translate(Job(config, run, plan), {"NCPU": 4}, [])
    nodes = [c for c in request.containers if "-node-" in c["name"]]
    assert [n["host_config"]["mem_limit"] for n in nodes] == [None, None]
    given = compose_job([*("name=r", "script=train.py", "cluster=docker", "cluster.memory=2g"), "nproc_per_node=2"])
    request = containers.translate(Job(given, run, plan), {"NCPU": 4}, [])
    assert next(c for c in request.containers if "-node-" in c["name"])["host_config"]["mem_limit"] == 2 * 2**30


def test_a_program_in_containers_works_where_it_can_write_and_how_to_mount_its_folder_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, run, plan = _submitted(folder, "cluster=docker")
    request = containers.translate(Job(config, run, plan), {"NCPU": 4}, [])
    assert {c["working_dir"] for c in request.containers} == {str(run.path)}
    assert f"cluster.mounts=[{folder}:{folder}] mounts it" in caplog.text
    caplog.clear()
    mounted = compose_job(["name=r", "script=train.py", "cluster=docker", f"cluster.mounts=[{folder}:{folder}]"])
    request = containers.translate(Job(mounted, run, plan), {"NCPU": 4}, [])
    assert {c["working_dir"] for c in request.containers} == {str(folder)} and not caplog.text


_RANK = """
import multiprocessing, os, signal, sys
from fsdp_jobs.node.worker import run_program
from fsdp_jobs.run import log
log.configure()
def rank():
    run_program()
    os.kill(os.getpid(), signal.SIGTERM)  # as the agent does when others of its node have not ended
process = multiprocessing.get_context("fork").Process(target=rank)
process.start()
process.join()
sys.exit(process.exitcode)
"""


def rank_of(folder: Path, program: str, log: str) -> subprocess.CompletedProcess[str]:
    """Run a program as the only rank of a job runs it."""
    (folder / "program.py").write_text(program)
    here = {RUN_DIR_ENV: folder, RANK_STATE_ENV: folder, LOG_ENV: log, STACKS_ENV: folder / "stacks"}
    rank = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "TORCHELASTIC_ERROR_FILE": folder / "error.json"}
    what = {PROGRAM_ENV: json.dumps({"what": "program.py", "is_module": False, "folder": "", "args": []})}
    env = {**os.environ, **{key: str(value) for key, value in {**here, **rank, **what}.items()}}
    return subprocess.run([sys.executable, "-c", _RANK], env=env, cwd=folder, capture_output=True, text=True)


def test_what_a_rank_prints_is_lost_on_a_full_disk_and_it_goes_on(tmp_path: Path) -> None:
    chatty = "import sys\nfor out in (sys.stdout, sys.stderr): print('a line', file=out, flush=True)\nopen('ran', 'w')"
    done = rank_of(tmp_path, chatty, "/dev/full")
    assert done.returncode == 0 and (tmp_path / "ran").exists(), done.stderr


LATE = """
import atexit, logging, os, pickle, sys, threading, time
logging.basicConfig(level=logging.INFO, format="MINE %(message)s")
class Config:
    pass
def late():
    time.sleep(0.5)
    logging.info("thread %d", len(pickle.dumps(Config())) > 0)
atexit.register(lambda: logging.info("atexit %d", len(pickle.dumps(Config())) > 0))
threading.Thread(target=late).start()
for how in ("raise RuntimeError('of a child')", "sys.exit(7)", "pass"):
    if (child := os.fork()) == 0:
        atexit._clear()
        exec(how)
        sys.exit(0)
    logging.info("child %d", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_program_ends_as_in_an_interpreter_and_its_children_are_no_ranks(tmp_path: Path) -> None:
    """Threads and functions of atexit find its classes; a forked child's exception is no failure of the rank."""
    done = rank_of(tmp_path, LATE, str(tmp_path / "log"))
    said = (tmp_path / "log").read_text()
    assert done.returncode == 0, done.stderr + said
    logged = sorted(line for line in said.splitlines() if line.startswith("MINE"))
    assert logged == ["MINE atexit 1", "MINE child 0", "MINE child 1", "MINE child 7", "MINE thread 1"], said
    assert "RuntimeError: of a child" in said and not (tmp_path / "error.json").exists(), said


_ENDLESS = """
import atexit, multiprocessing, threading, time
from fsdp_jobs.node import worker
worker._ENDS_S = 0.5
wait = {"target": time.sleep, "args": [100]}
"""


@pytest.mark.parametrize(
    "more",
    [
        "import sys; sys.stderr.close(); threading.Thread(**wait).start()",
        "multiprocessing.Process(**wait).start()",
        "atexit.register(time.sleep, 100)",
    ],
)
def test_a_failed_rank_ends_though_a_part_of_its_program_does_not(tmp_path: Path, more: str) -> None:
    failing = f"{_ENDLESS}\n{more}\nraise FileNotFoundError('shard-7.bin')"
    done = rank_of(tmp_path, failing, str(tmp_path / "log"))
    assert done.returncode == 1 and "FileNotFoundError: shard-7.bin" in (tmp_path / "error.json").read_text()
    assert (tmp_path / "log").read_text().endswith("still runs 0 s after its failure: it ends now\n")


@pytest.mark.integration
def test_a_program_that_leaves_out_the_end_of_its_training_is_told(tmp_path: Path) -> None:
    steps = f"from fsdp_jobs.run.rank_state import *\nRankState({str(tmp_path)!r}, 0).report(5, 0, Phase.{{}})"
    for phase, told in (("TRAINING", 1), ("DONE", 0), ("LEAVING", 0)):
        done = rank_of(tmp_path, steps.format(phase), str(tmp_path / phase))
        assert done.returncode == 0 and (tmp_path / phase).read_text().count("job.finish()") == told, done.stderr


ENDS = """
import gc, gzip, multiprocessing, os, signal, threading
class Last:
    def __del__(self):
        open("deleted", "w").close()
last = Last()
whole = gzip.open("whole.gz", "wt")
whole.write("all of it")
frozen = open("frozen.csv", "w")
frozen.write("step,loss")
print([thread.name for thread in threading.enumerate()], multiprocessing.Process(target=print).name)
signal.signal(signal.SIGTERM, lambda *_: open("handled", "w").close())
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
    del os.environ[name]
gc.freeze()
"""


def test_the_objects_of_a_program_end_with_it(tmp_path: Path) -> None:
    """Files are closed as they are by an interpreter, and a signal to a rank that is done starts nothing."""
    done = rank_of(tmp_path, ENDS, str(tmp_path / "log"))
    said = (tmp_path / "log").read_text()
    assert done.returncode == 0 and not (tmp_path / "handled").exists(), done.stderr + said
    assert said == "['MainThread'] Process-1\n", "threads and numbers as in an interpreter"
    assert gzip.decompress((tmp_path / "whole.gz").read_bytes()) == b"all of it"
    assert (tmp_path / "frozen.csv").read_text() == "step,loss" and (tmp_path / "deleted").exists()


@pytest.mark.parametrize("wrapped", ["ValueError('in epoch 3') from e", "ExceptionGroup('tasks', [e])"])
def test_a_lost_peer_is_the_reason_however_the_program_wraps_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wrapped: str
) -> None:
    lost = "try:\n    raise RuntimeError('Connection closed by peer')\nexcept RuntimeError as e:\n    raise "
    (folder / "train.py").write_text(f"{lost}{wrapped}\n")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    assert _run(Program("train.py", False, "", [])) == 1
    message = json.loads((folder / "error.json").read_text())["message"]["message"]
    assert message == "RuntimeError: Connection closed by peer"


def test_the_exception_of_a_task_is_the_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own group of them says how many there are, and names none."""
    task = "async def task(): raise KeyError('no reward')\n"
    main = "async def main():\n  async with asyncio.TaskGroup() as tasks: tasks.create_task(task())\n"
    (folder / "train.py").write_text(f"import asyncio\n{task}{main}asyncio.run(main())\n")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    assert _run(Program("train.py", False, "", [])) == 1
    assert json.loads((folder / "error.json").read_text())["message"]["message"] == "KeyError: 'no reward'"


WORKER = """
import os, signal, torch
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, i):
        if i in (20, 23):
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(1)

for batch in DataLoader(Samples(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
    pass
"""


def test_a_data_loaders_worker_that_is_killed_is_the_reason(tmp_path: Path) -> None:
    """Its end breaks a pipe, and torch raises its own error once more for each worker that ends."""
    done = rank_of(tmp_path, WORKER, str(tmp_path / "log"))
    assert done.returncode == 1, done.stderr
    error = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert error.startswith("RuntimeError: DataLoader worker (pid"), error


def test_a_data_loaders_workers_that_outlive_the_program_are_no_error(tmp_path: Path) -> None:
    """As at `max_steps`, within an epoch."""
    program = WORKER.replace("for batch in", "batches = iter(").replace(":\n    pass", ")\nnext(batches)")
    done = rank_of(tmp_path, program, str(tmp_path / "log"))
    assert (done.returncode, (tmp_path / "log").read_text()) == (0, ""), done.stderr


def test_an_exception_that_the_programs_own_hook_cannot_show_is_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text("raise KeyError('the cause')\n")
    monkeypatch.setattr(sys, "excepthook", lambda *_: 1 / 0)
    assert _run(Program("train.py", False, "", [])) == 1
    assert "KeyError: 'the cause'" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "is_failure"), [(1, True), (75, False), (0, False)])
def test_an_exception_whose_handler_exits_is_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_failure: bool
) -> None:
    """Without it a lost peer would count as a failure of the program."""
    (folder / "train.py").write_text(f"try:\n    1 / 0\nexcept Exception:\n    raise SystemExit({code})\n")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    assert _run(Program("train.py", False, "", [])) == code
    assert (folder / "error.json").exists() == is_failure
    assert not is_failure or "ZeroDivisionError: division by zero" in (folder / "error.json").read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # Python ignores SIGPIPE, and a program that it becomes would: this `yes` would never learn of its end.
        ("#!/bin/bash\nyes | head -n 1\nexit ${PIPESTATUS[0]}\n", (128 + signal.SIGPIPE, "y\n")),
        ("echo $1\nexit 3\n", (3, "--lr\n")),  # no interpreter is named
    ],
)
def test_an_executable_runs_as_from_a_shell(tmp_path: Path, text: str, said: tuple[int, str]) -> None:
    (tmp_path / "train.sh").write_text(text)
    (tmp_path / "train.sh").chmod(0o755)
    what = {"what": str(tmp_path / "train.sh"), "is_module": False, "folder": "", "args": ["--lr", "3e-4"]}
    env = {**os.environ, LOG_ENV: str(tmp_path / "log"), PROGRAM_ENV: json.dumps(what)}
    done = subprocess.run([sys.executable, "-m", "fsdp_jobs.node.worker"], env=env)
    assert (done.returncode, (tmp_path / "log").read_text()) == said
