"""A process that outlives its terminal is found again, whatever becomes of its record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fsdp_jobs.run.processes import all_processes, recorded_process, start_detached

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


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to choose the id of a process")
def test_a_process_whose_id_was_another_ones_can_be_ended() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    for _ in range(50):
        with subprocess.Popen(sleep) as before:
            known = {process.pid for process in psutil.process_iter()}
            before.kill()
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(before.pid - 1))
        with subprocess.Popen(sleep) as now:
            found = [process for process in all_processes() if process.pid == now.pid]
            if now.pid == before.pid and now.pid in known:
                found[0].kill()
                return
            now.kill()
    raise AssertionError("no process got the id of one that had ended")


def test_the_age_of_a_process_is_known_to_a_hundredth_of_a_second() -> None:
    began = time.monotonic()
    command = [sys.executable, "-c", "from fsdp_jobs.run.processes import age_s; print(age_s())"]
    age = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 0.02 < age < time.monotonic() - began + 0.01
