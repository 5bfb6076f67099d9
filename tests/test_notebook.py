"""`Job` in a notebook: in IPython's shell, with real jobs of this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from fsdp_jobs import Job
from fsdp_jobs.config.errors import BadInput
from tests.jobs import cli, environment
from tests.recorded import recorded_run
from tests.world import PACED, TINY_TASK


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InteractiveShell:
    """A notebook's shell, whose user is in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ".state"))
    shell = InteractiveShell()
    shell.run_cell("from fsdp_jobs import Job")
    return shell


def shown(shell: InteractiveShell, cell: str) -> dict[str, str]:
    """What a cell's last line shows: MIME type -> text."""
    with capture_output() as captured:
        done = shell.run_cell(cell)
    assert done.success, captured.stdout + captured.stderr
    data: dict[str, str] = shell.display_formatter.format(done.result)[0]
    return data


def test_a_plan_is_shown_as_tables_and_a_picture(shell: InteractiveShell, tmp_path: Path) -> None:
    plan = shown(shell, "Job('model=llama3_8b', 'hardware=h100', 'nodes=4').plan()")
    assert plan["text/html"].count("<svg ") == 1 and plan["text/html"].count("<pre ") == 1
    for words in ("FITS", "full_shard", "Peak memory per GPU", "ranks in shard groups"):
        assert words in plan["text/html"]
        assert words in plan["text/plain"]
    assert shown(shell, "p = Job('nodes=4').plan(); p.fits, p.layout.shard_group, len(p.nodes)")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.integration
def test_a_model_that_was_edited_is_planned_anew(shell: InteractiveShell, tmp_path: Path) -> None:
    model, job = tmp_path / "mine.py", "Job('model=custom', 'model._target_=mine.model', 'fsdp.wrap=size')"
    counts = []
    for width in (8, 16):
        layers = f"torch.nn.Embedding(256, {width}), torch.nn.Linear({width}, 256)"
        model.write_text(f"import torch\n\ndef model():\n    return torch.nn.Sequential({layers})\n")
        counts.append(shell.run_cell(f"{job}.plan().memory.parameters").result)
    assert 0 < counts[0] < counts[1]


def test_a_mistake_is_told_as_at_the_prompt_and_without_a_traceback(shell: InteractiveShell, tmp_path: Path) -> None:
    for verb, overrides in (("plan", ["optim.lrr=1", "nodes=0"]), ("submit", ["steps=0", "data=tokens"])):
        said = cli(tmp_path, verb, *overrides).stderr
        with capture_output() as captured:
            done = shell.run_cell(f"Job(*{overrides}).{verb}()")
        assert isinstance(done.error_in_exec, BadInput)
        assert str(done.error_in_exec) == said.partition("\n")[2].rstrip("\n")
        assert captured.stdout.rstrip("\n") == f"BadInput:\n{done.error_in_exec}"
    with pytest.raises(BadInput, match="there is no such flag"):
        Job("--watch")
    with pytest.raises(BadInput, match=r"Job\('nodes=4'\): has no run: .*\n.*Job\.of\(NAME\)"):
        Job("nodes=4").status()
    with pytest.raises(BadInput, match="there is no such run"):
        Job.of("never")


def test_what_a_run_has_written_is_escaped(shell: InteractiveShell, tmp_path: Path) -> None:
    recorded_run(tmp_path / "runs", "first")
    status = shown(shell, "Job.of('first').status()")
    assert "<script>" not in status["text/html"] and "&lt;script&gt;" in status["text/html"]
    assert "<th>step</th><td>20/20</td>" in status["text/html"]
    table = pd.DataFrame(Job.of("first").metrics())
    assert list(table["step"]) == list(range(1, 21))
    assert table["time"][11] == 106.0 + 12  # of two lines for a step the newest


def test_what_would_be_submitted_is_not(shell: InteractiveShell, tmp_path: Path) -> None:
    request = shown(shell, "Job('dry_run=true').submit()")["text/plain"]
    assert "fsdp_jobs.node.agent" in request or "fsdp_jobs.launchers" in request
    assert list(tmp_path.iterdir()) == []


def test_a_notebook_that_uses_hydra_itself_keeps_its_own(shell: InteractiveShell, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.yaml").write_text("x: 7\n")
    own = f"hydra.initialize_config_dir('{tmp_path}/mine', version_base='1.3')"
    assert shown(shell, f"import hydra; {own}; Job('nodes=2').plan(); hydra.compose('own').x")["text/plain"] == "7"
    shown(shell, "hydra.core.global_hydra.GlobalHydra.instance().clear()")


def test_a_run_that_is_done_is_not_submitted_to_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorded_run(tmp_path / "runs", "first")
    with pytest.raises(BadInput, match="no step is left to do"):
        Job.of("first").submit()


def test_no_torch_in_a_notebook(tmp_path: Path) -> None:
    code = "from fsdp_jobs import Job; Job('nodes=2').plan(); Job('dry_run=true').submit(); import sys"
    heavy = "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'transformers', 'matplotlib'}))"
    command = [sys.executable, "-c", f"{code}; {heavy}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stdout + done.stderr
    asked = "import fsdp_jobs, sys; print(fsdp_jobs.__version__, 'fsdp_jobs.notebook' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], cwd=tmp_path, env=environment(tmp_path), capture_output=True)
    assert done.stdout.endswith(b" False\n"), done.stderr


@pytest.mark.integration
def test_a_job_is_submitted_found_again_stopped_and_continued(shell: InteractiveShell, tmp_path: Path) -> None:
    overrides = [*TINY_TASK, *PACED, "name=first", "nodes=1", "nproc_per_node=1", "steps=100000"]
    assert "local_fsdp://" in shown(shell, f"job = Job(*{overrides}); job.submit()")["text/plain"]
    with pytest.raises(BadInput, match="is in use by the live job"):
        Job(*overrides).submit()
    again = InteractiveShell()  # another kernel
    again.run_cell("from fsdp_jobs import Job; job = Job.of('first')")
    wait = "import time\nwhile len(job.metrics()) < 3 and job.status().state not in ('failed', 'done'): time.sleep(1)\n"
    state: Any = shown(again, f"{wait}job.status().state")["text/plain"]
    assert state == "'running'", Job.of("first").logs()
    assert "<td>running</td>" in shown(again, "job.status()")["text/html"]
    assert "<td>stopped</td>" in shown(again, "job.cancel()")["text/html"]
    assert "<td>stopped</td>" in shown(again, "job.cancel()")["text/html"]  # nothing is left to do
    steps = len(Job.of("first").metrics())
    assert "node-0/rank-0" in Job.of("first").logs()
    shown(again, f"job = Job.of('first', 'steps={steps + 5}'); job.submit()")
    until_it_has_ended = "while job.status().state not in ('failed', 'done'): time.sleep(1)\n"
    assert shown(again, f"{until_it_has_ended}len(job.metrics())")["text/plain"] == f"{steps + 5}"
    with pytest.raises(BadInput, match=f"run first is at step {steps + 5} already"):
        Job.of("first", "steps=3").submit()
