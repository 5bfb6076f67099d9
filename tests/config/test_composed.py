"""What Hydra has composed is kept, and never taken for what it would compose now."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_jobs.config import composed as kept
from fsdp_jobs.config import hydra
from fsdp_jobs.config.hydra import compose_job


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `conf/` that may be changed, and nothing kept of it yet."""
    copy = Path(shutil.copytree(kept.CONF_DIR, tmp_path / "conf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in (kept, hydra):
        monkeypatch.setattr(module, "CONF_DIR", copy)
    return copy


@pytest.fixture
def composed(conf: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[object]]:
    """What has been composed by Hydra since the last call."""
    calls: list[object] = []
    by_hydra = hydra.hydra_compose
    monkeypatch.setattr(hydra, "hydra_compose", lambda *a, **k: calls.append(k["overrides"]) or by_hydra(*a, **k))

    def taken() -> list[object]:
        new = calls[:]
        calls.clear()
        return new

    return taken


def test_a_choice_is_composed_once_and_each_job_has_its_own_copy(composed: Callable[[], list[object]]) -> None:
    first = compose_job(["optim.lr=0.5", "model=llama_1b"])
    again = compose_job(["model=llama_1b"])
    assert composed() == [["model=llama_1b"]]
    assert first.optim.lr == 0.5 and again.optim.lr == 1e-3 and again.model == first.model
    compose_job(["model=llama_debug"])
    assert composed() == [["model=llama_debug"]]


def test_what_it_depends_on_has_changed(
    conf: Path, composed: Callable[[], list[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compose_job([])
    file = conf / "optim" / "adamw.yaml"
    times = file.stat().st_mtime_ns
    file.write_text(file.read_text() + "lr: 0.25\n")
    assert compose_job([]).optim.lr == 0.25, times
    (conf / "model" / "another.yaml").write_text("defaults:\n  - llama_schema\ndim: 512\n")
    assert compose_job(["model=llama_debug"]).model and len(composed()) == 3
    monkeypatch.setattr(kept.sys, "version", "another")
    compose_job([])
    assert len(composed()) == 1


def test_what_no_file_says_is_never_kept(conf: Path, composed: Callable[[], list[object]], tmp_path: Path) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "own.yaml").write_text("defaults:\n  - llama_schema\ndim: 512\n")
    for _ in range(2):
        compose_job([f"hydra.searchpath=[file://{tmp_path}/mine]", "model=own"])
    assert len(composed()) == 2
    file = conf / "config.yaml"
    file.write_text(file.read_text() + "\nname: ${oc.env:HOME}\n")
    for _ in range(2):
        compose_job([])
    assert len(composed()) == 2


def test_a_torn_file_and_a_folder_of_others_are_not_read(tmp_path: Path, composed: Callable[[], list[object]]) -> None:
    compose_job([])
    folder = tmp_path / "cache" / "fsdp_jobs" / "composed"
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert compose_job([]).steps == 120 and len(composed()) == 2
    folder.chmod(0o777)
    assert compose_job([]).steps == 120 and len(composed()) == 1
