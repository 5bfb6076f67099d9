"""A process that outlives its terminal is found again, whatever becomes of its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_jobs.run.processes import recorded_process, start_detached

pytestmark = pytest.mark.integration


def test_a_process_is_known_by_its_lock_where_its_record_is_lost_or_of_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    record = tmp_path / "process.json"
    start_detached("sleeps", tmp_path, record, tmp_path / "log")
    process = recorded_process(record)
    assert process is not None and "sleeps" in process.cmdline()
    known = json.loads(record.read_text())
    record.write_text(json.dumps({**known, "started": process.create_time() + 1}))  # as after a step of the clock
    assert recorded_process(record) == process
    record.unlink()
    assert recorded_process(record) == process
    start_detached("sleeps", tmp_path, record, tmp_path / "log")
    assert recorded_process(record) == process, "there is never a second one"
    process.kill()
    process.wait()
    assert recorded_process(record) is None
