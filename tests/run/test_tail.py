"""Logs of many ranks in one order, however they came about and however long they are."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from fsdp_jobs.node import rank_logs
from fsdp_jobs.node.rank_logs import LogKeeper
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.tail import TIMES, Logs, Tail, follow_files, last_lines, read_json_lines
from fsdp_jobs.run.threads import wait_until
from fsdp_jobs.run.verdict import Verdict
from tests.jobs import cli, environment, job
from tests.nfs import away, nfs_client


def test_lines_of_nodes_come_in_the_order_they_were_written(tmp_path: Path) -> None:
    folders = [tmp_path / f"attempts/{k}/node-{i}" for k, i in ((0, 0), (0, 1), (1, 1))]
    for folder in folders:
        folder.mkdir(parents=True)
    said = ((0, "a"), (1, "b"), (0, "c\nd"), (1, "e"), (2, "f"), (2, "g"))
    for moment, (which, text) in enumerate(said):
        log = folders[which] / f"rank-{which}.log"
        with log.open("a") as f:
            f.write(text + "\n")
        with (folders[which] / TIMES).open("a") as f:
            f.write(json.dumps({which: [log.stat().st_size, 100.0 + moment]}) + "\n")
    with (folders[0] / "rank-0.log").open("a") as f:
        f.write("late, and nobody noted when")
    lines = [line for _, line in follow_files(tmp_path, "attempts/*/node-*/rank-*.log", lambda: False)]
    assert lines == ["a", "b", "c", "d", "e", "f", "g", "late, and nobody noted when"]


def test_a_bar_that_is_drawn_anew_is_not_one_line_with_the_next(tmp_path: Path) -> None:
    """Else the loss of one step was recorded at the next."""
    (tmp_path / "log").write_bytes(b"begin\n 10% 10/100 [loss=2.3]")
    tail = Tail(tmp_path / "log", has_bars=True)
    assert [*tail.lines()] == [b"begin"] and tail.unfinished() == b" 10% 10/100 [loss=2.3]"
    with tail.path.open("ab") as log:
        log.write(b"\r 11% 11/100 [loss=2.2]")
    assert tail.unfinished() == b" 10% 10/100 [loss=2.3]"
    assert [*tail.lines()] == [b" 10% 10/100 [loss=2.3]"] and tail.unfinished() == b" 11% 11/100 [loss=2.2]"


def test_the_agent_notes_sizes_when_they_change(tmp_path: Path) -> None:
    times = LogKeeper(tmp_path)
    log = tmp_path / "rank-3.log"
    log.write_text("one\n")
    first = log.stat().st_mtime
    time.sleep(2.5)
    log.write_text("one\ntwo\n")
    second = log.stat().st_mtime
    times.close()
    noted = [json.loads(line)["3"] for line in (tmp_path / TIMES).read_text().splitlines()]
    assert [size for size, _ in noted] == [4, 8]
    assert all(abs(when - wrote) < 0.1 for (_, when), wrote in zip(noted, (first, second), strict=True))


# Prints lines until its log has begun again, then 300 more.
_SAYS = """
import itertools, pathlib, sys, time
for i in itertools.count():
    print("line", i, flush=True)
    time.sleep(0.001)
    if i % 100 == 0 and pathlib.Path(sys.argv[1]).exists():
        break
for i in range(300):
    print(i, "lines later", flush=True)
    time.sleep(0.001)
"""


def test_a_log_that_becomes_too_long_begins_again_and_is_followed(tmp_path: Path) -> None:
    other, log = tmp_path / "rank-0.log.1", tmp_path / "rank-0.log"
    keeper = LogKeeper(tmp_path, longest=10_000)
    with log.open("a") as f:
        says = subprocess.Popen([sys.executable, "-c", _SAYS, str(other)], stdout=f)
    told = [line for _, line in follow_files(tmp_path, "rank-*.log", lambda: says.poll() is None)]
    keeper.close()
    assert other.stat().st_size > 10_000 and log.read_text().endswith("299 lines later\n")
    assert told[-1] == "299 lines later", "a follower loses only what it had not read"
    assert len(set(told)) == len(told) > 1000
    backlog = [line for _, line in follow_files(tmp_path, "rank-*.log", lambda: False)]
    assert backlog == log.read_text().splitlines() and [*tmp_path.glob(".*")] == []


def test_a_log_of_any_length_is_read_in_pieces(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    with log.open("w") as f:
        for i in range(300_000):
            f.write(f"line {i} of a program that says too much, again and again\n")
        f.write("without an end" * 200_000)  # a progress bar that never ends its line
    tracemalloc.start()
    assert last_lines(log, 3).endswith("without an end")
    count = sum(1 for _ in follow_files(tmp_path, "*.log", lambda: False))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 300_000 < count < 300_010
    assert most < 16e6


def test_of_long_logs_the_end_is_ordered_without_reading_all_times(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What comes first in the record of times is no record here: who reads it complains."""
    times = ["no record"] * 20_000
    for rank in (0, 1):
        log = tmp_path / f"rank-{rank}.log"
        log.write_text("".join(f"{i:3} of {rank}\n" for i in range(1000)))
    times += [json.dumps({str(i % 2): [9 * (i // 2 + 1), float(i)]}) for i in range(2000)]
    (tmp_path / TIMES).write_text("\n".join(times) + "\n")
    logs = Logs(tmp_path, "rank-*.log")
    logs.skip(but=100)
    told = [line for _, line in logs.backlog()]
    assert told[-4:] == ["998 of 0", "998 of 1", "999 of 0", "999 of 1"] and len(told) < 20
    assert not caplog.records


def test_of_a_log_that_grows_faster_than_it_is_shown_the_newest_lines_are_new(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a line\n" * 500_000 + "the last\n")
    left_out, *lines = (line for _, line in Logs(tmp_path, "log").new(most=1e6))
    assert left_out == "... 3 MB left out" and lines[-1] == "the last" and 100_000 < len(lines) < 150_000


def test_nothing_is_left_out_of_a_bar_that_is_one_long_line(tmp_path: Path) -> None:
    log, logs = tmp_path / "log", Logs(tmp_path, "log")
    log.write_text("a line\n")
    assert [line for _, line in logs.new(most=1e6)] == ["a line"]
    with log.open("a") as file:
        file.write("\r 5%|#   | 5/100 [00:10<03:10]" * 34_000)
        file.flush()
        assert [*logs.new(most=1e6), *logs.new(most=1e6)] == []
        file.write("\r the end\n")
    assert [line for _, line in logs.new(most=1e6)] == [" the end"]


def test_of_a_progress_bar_only_its_newest_state_is_shown(tmp_path: Path) -> None:
    bar = " 1%|  | 1/99 [00:01]\r 2%|  | 2/99 [00:02]\r"
    (tmp_path / "log").write_text(f"begins\r\n{bar} 3%|  | 3/99 [00:03]ValueError: no data\n", newline="")
    newest = ["begins", " 3%|  | 3/99 [00:03]ValueError: no data"]
    assert last_lines(tmp_path / "log", 2).split("\n") == newest
    assert [line for _, line in Logs(tmp_path, "log").backlog()] == newest


def test_the_tail_of_a_short_file(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("first\nsecond\n\nlast, without an end")
    assert last_lines(tmp_path / "log", 2) == "second\nlast, without an end"
    assert last_lines(tmp_path / "none", 2) == ""


@pytest.mark.integration
def test_logs_follow_across_a_requeue_and_stay_in_order(tmp_path: Path) -> None:
    """Two nodes that take turns; the job is told to leave in between, and is started again."""
    (tmp_path / "turns.py").write_text(
        "import os, pathlib, time\n"
        "attempt, rank = os.environ['FSDP_JOBS_ATTEMPT'], int(os.environ['RANK'])\n"
        "for turn in range(4):\n"
        "    while len(list(pathlib.Path().glob(f'{attempt}-*'))) != 2 * turn + rank:\n"
        "        time.sleep(0.05)\n"
        "    time.sleep(1.2)\n"
        "    print('attempt', attempt, 'turn', turn, 'rank', rank, flush=True)\n"
        "    pathlib.Path(f'{attempt}-{turn}-{rank}').touch()\n"
        "print('ZeroDivisionError: said, not raised')\n"
    )
    follow = [sys.executable, "-m", "fsdp_jobs", "logs", "-f", "turns"]
    with job(tmp_path, "turns", "script=turns.py", nodes="2", nproc=1, tiny=False) as turns:
        following = subprocess.Popen(follow, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
        first = turns.run.rank_log(0, 1, 1)
        turns.until(lambda: first.exists() and "turn 0" in first.read_text(), "a first turn")
        turns.agent(0).terminate()
        verdict = turns.wait()
        followed = following.communicate(timeout=30)[0].splitlines()
    assert verdict.verdict == "done" and turns.run.last_attempt() == 1, turns.story()
    afterwards = cli(tmp_path, "logs", "turns").stdout.splitlines()
    said = [line.partition("] ")[2] for line in afterwards if "turn " in line]
    assert said[:2] == ["attempt 0 turn 0 rank 0", "attempt 0 turn 0 rank 1"]
    assert said[-8:] == [f"attempt 1 turn {t} rank {r}" for t in range(4) for r in range(2)]
    assert sorted(followed) == sorted(afterwards)
    errors = cli(tmp_path, "logs", "turns", "--errors", "--node", "1", "--attempt", "1").stdout
    assert errors == "[node-1/rank-1] ZeroDivisionError: said, not raised\n"


def test_of_many_ranks_each_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of 10,000 nodes has 80,000 logs on a shared file system."""
    for rank in range(8):
        (tmp_path / f"rank-{rank}.log").write_text("".join(f"{i} of {rank}\n" for i in range(3)))
    sizes = ({rank: [7 * (i + 1), 8.0 * i + rank] for rank in range(8)} for i in range(3))
    (tmp_path / TIMES).write_text("".join(json.dumps(line) + "\n" for line in sizes))
    opened: list[str] = []
    as_before = Path.open

    def note(path: Path, *args: Any, **kwargs: Any) -> Any:
        opened.append(path.name)
        return as_before(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", note)
    told = [line for _, line in follow_files(tmp_path, "rank-*.log", lambda: False)]
    assert told == [f"{i} of {rank}" for i in range(3) for rank in range(8)]
    assert sorted(set(opened)) == sorted([TIMES, *(f"rank-{rank}.log" for rank in range(8))])
    assert opened.count(TIMES) == 1
    assert all(opened.count(f"rank-{rank}.log") == 2 for rank in range(8)), "and once for an unfinished last line"


def test_numbers_that_only_pythons_json_has_are_read_and_torn_lines_are_not(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"loss": NaN}\n{"loss": -Infinity}\n{"loss": 1e400}\n{"loss": 2.\n{"loss": 3}\n')
    assert [str(line["loss"]) for line in read_json_lines(file)] == ["nan", "-inf", "inf", "3"]


def test_what_another_machine_begins_to_write_is_seen_at_once_simulated_nfs(tmp_path: Path) -> None:
    run, verdict = RunDir(tmp_path / "run"), Verdict("done", "stop", "all steps are done")
    run.attempt(0).mkdir(parents=True)
    with nfs_client():
        metrics = Tail(run.metrics)
        assert Verdict.final(run) is None and [*metrics.records()] == []
        for file, text in ((run.verdict(0), verdict.to_json()), (run.metrics, '{"step": 1}')):
            subprocess.run(["sh", "-c", 'echo "$1" > "$0"', file, text], check=True)
        assert Verdict.final(run) == verdict
        assert [*metrics.records()] == [{"step": 1}]


def test_a_log_is_shortened_after_its_folder_was_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file server, simulated: the thread ended, and logs grew without bound."""
    monkeypatch.setattr(rank_logs, "_EVERY_S", 0.05)
    log = tmp_path / "rank-0.log"
    with away(tmp_path):
        keeper = LogKeeper(tmp_path, longest=10)
        time.sleep(0.5)
    log.write_text("a long line of a rank\n")
    assert wait_until(log.with_name("rank-0.log.1").exists, 10, 0.05)
    keeper.close()
