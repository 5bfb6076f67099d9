"""How a rehearsal ends before its time; jobs are stand-ins here, real ones in tests/integration/test_rehearse.py."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_jobs.cli.main import main
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.files import write_atomic
from fsdp_jobs.tools import rehearse as tool


@pytest.mark.parametrize("interrupted", [False, True], ids=["while it diverges", "before it is submitted"])
def test_the_job_that_is_ended_is_the_newest_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    run, killed = RunDir(tmp_path / "r"), list[str]()

    def submit(*_: Any) -> list[str]:
        if interrupted:
            raise KeyboardInterrupt
        write_atomic(run.job, json.dumps({"handle": "first"}))
        return ["first"]

    def diverge(*_: Any) -> str:
        write_atomic(run.job, json.dumps({"handle": "diverging"}))
        raise KeyboardInterrupt

    monkeypatch.setattr(tool.submission, "prepare", lambda _: [SimpleNamespace(run=run)])
    monkeypatch.setattr(tool.submission, "submit", submit)
    monkeypatch.setattr(tool, "_wait_until", lambda *_: None)
    monkeypatch.setitem(tool._WHILE_STOPPED, "nan", diverge)
    monkeypatch.setattr(tool, "kill", killed.extend)
    with pytest.raises(KeyboardInterrupt):
        tool.rehearse(compose_job([]), "nan")
    assert killed == ([] if interrupted else ["diverging"])


def test_a_rehearsal_under_nohup_outlives_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []

    def looked(*_: Any) -> tool.Outcome:
        heard.extend(signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM))
        with pytest.raises(SystemExit):
            heard[1](signal.SIGTERM, None)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # another one
        return tool.Outcome(True, "", None, 0)

    monkeypatch.setattr(tool, "rehearse", looked)
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert main(["rehearse", "kill_rank"]) == 0
        assert heard[0] is signal.SIG_IGN and callable(heard[1])
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
