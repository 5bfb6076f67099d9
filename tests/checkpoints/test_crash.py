"""Killed at any point of a save, commit, prune, upload or resume: nothing is lost, and nothing half is trusted.

python -m pytest -n0 -s -m "soak" tests/checkpoints/test_crash.py    # every point; the other tests take a sample
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fsdp_jobs.checkpoints import catalog
from tests.checkpoints.crash import Points
from tests.checkpoints.saving import run_to_the_end, save_steps, trained, value_of
from tests.store import simulated_store
from tests.world import flip_byte

pytestmark = pytest.mark.integration

KEEP = 2
PLACES = ("disk", "local_dir", "s3")
ACTIONS = ("save", "replace", "resume")
FAULTS = ("kill", "half", "ENOSPC", "EIO", "stall")
FAULTS_IN_STORE = ("kill", "EIO", "expired", "stall")  # of a request, which is taken whole or not


def _keys(folder: Path, place: str) -> dict[str, Any]:
    if place == "local_dir":
        return {"local_dir": str(folder / "local"), "keep": KEEP}
    return {"keep": KEEP, **({"dir": f"s3://{folder.parent.name}"} if place == "s3" else {})}


def _folder(tmp_path: Path, name: str, place: str) -> Path:
    """Make a folder for one run, and its own bucket: the simulated store looks at a bucket's every object."""
    if place == "s3":
        import s3fs

        s3fs.S3FileSystem().mkdir(name)
    folder = tmp_path / name / "run"
    folder.mkdir(parents=True)
    return folder


def _act(folder: str, place: str, action: str, at: int | None, fault: str) -> None:
    """Save steps 2 and 4, do something, and be struck at one point of it; then save step 8, if still there."""
    path = Path(folder)
    first = trained(folder, "0-0", **_keys(path, place))
    save_steps(first, 2, 4, *([6] if action == "resume" else []))
    if action == "resume":
        _leave_a_mess(first.home)
    second = trained(folder, "0-1", **_keys(path, place))
    points = Points(at, fault)
    if action == "resume":
        points.arm()
    try:
        second.restore()
    except BaseException as e:  # DCP's are no Exception
        (path / "said").write_text(f"{type(e).__name__}: {e}")
        os._exit(1)  # a failed rank; the next round resumes
    if action != "resume":
        points.arm()
        save_steps(second, 4 if action == "replace" else 6)
        second._written_step = -1
    save_steps(second, 8)
    second.finish()
    (path / "points").write_text(json.dumps(points.seen))
    os._exit(0)


def _leave_a_mess(home: Path) -> None:
    """Leave what crashes leave behind: a damaged newest step, half a save, and half a replacement."""
    newest, *_ = catalog.find_checkpoints(home)
    flip_byte(next(f for f in newest.iterdir() if f.name.endswith(".distcp")))
    if not catalog.is_object_store(home):
        shutil.copytree(home / "step-00000004", home / "step-00000005.0-0-7.tmp")
        (home / "step-00000004").rename(home / "step-00000004.0-0-8.replaced")


def _check(folders: list[str], place: str, action: str) -> None:
    """Resume each of the runs, and write what is wrong with it."""
    wrong = {}
    for folder in folders:
        path = Path(folder)
        again = trained(folder, "0-2", **_keys(path, place))
        try:
            events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
            told = max(e["step"] for e in events if e["event"] in ("checkpoint", "checkpoint_on_nodes"))
            told = min(told, 4) if action == "resume" and told == 6 else told  # 6 is the one that was damaged
            outcomes = {e["step"] for e in events if e["event"] in ("checkpoint", "checkpoint_failed")}
            unsaid = {6, 8} - outcomes if place == "s3" and action == "save" and (path / "points").exists() else set()
            step = again.restore()
            whole = [f for f in catalog.find_checkpoints(again.home) if not catalog.verify(f)]
            if step < told:
                wrong[folder] = f"step {told} was recorded, and step {step} is what a resume finds"
            elif unsaid:
                wrong[folder] = f"nothing is said of the steps {unsaid}"
            elif value_of(again) != float(step):
                wrong[folder] = f"step {step} holds {value_of(again)}"
            elif len(whole) < (1 if action == "resume" else KEEP):  # of two, one was damaged on purpose
                wrong[folder] = f"only {[f.name for f in whole]} are whole"
            else:
                save_steps(again, 10)
                if again.failure is not None:
                    wrong[folder] = again.failure
        except BaseException as e:
            wrong[folder] = f"{type(e).__name__}: {e}"
    Path(folders[0], "wrong").write_text(json.dumps(wrong))
    os._exit(0)


def _strike(tmp_path: Path, place: str, action: str, fault: str, every: int) -> tuple[int, dict[str, str]]:
    """Strike at every n-th point of an action. Returns how many points were struck, and what was wrong after which."""
    name = f"{place}-{action}-{fault}".lower()
    calm = _folder(tmp_path, f"{name}-calm", place)
    assert run_to_the_end(1, _act, str(calm), place, action, None, "kill") == [0], list(calm.iterdir())
    points = json.loads((calm / "points").read_text())
    struck = {}
    for at in range(0, len(points), every):
        if fault != "half" or points[at] == "write":
            struck[str(_folder(tmp_path, f"{name}-{at}", place))] = at
    with ThreadPoolExecutor(3) as several:
        given = [(1, _act, folder, place, action, at, fault) for folder, at in struck.items()]
        codes = several.map(lambda one: run_to_the_end(*one), given)
        for (folder, at), (code,) in zip(struck.items(), codes, strict=True):
            killed = fault in ("kill", "half")
            assert code == (-9 if killed else 0) or Path(folder, "said").exists(), (at, points[at], code)
    folders = list(struck)
    run_to_the_end(1, _check, folders, place, action, seconds=1800)
    wrong = json.loads(Path(folders[0], "wrong").read_text())
    return len(folders), {f"{Path(f).parent.name} {points[struck[f]]}": what for f, what in wrong.items()}


@pytest.mark.parametrize(
    ("place", "action", "fault", "every"),
    [
        ("disk", "save", "kill", 17),
        ("disk", "replace", "kill", 13),
        ("disk", "resume", "kill", 13),
        ("disk", "resume", "EIO", 17),
        ("local_dir", "save", "kill", 19),
        ("disk", "save", "ENOSPC", 17),
        ("local_dir", "save", "EIO", 23),
    ],
)
def test_a_sample_of_all_crashes_loses_nothing(tmp_path: Path, place: str, action: str, fault: str, every: int) -> None:
    struck, wrong = _strike(tmp_path, place, action, fault, every)
    assert struck >= 2 and not wrong, wrong


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("place", PLACES)
def test_no_crash_at_any_point_loses_anything(tmp_path: Path, place: str) -> None:
    all_wrong: dict[str, str] = {}
    with simulated_store():
        for action in ACTIONS:
            for fault in FAULTS_IN_STORE if place == "s3" else FAULTS:
                every = 5 if place == "s3" and fault != "kill" else 1  # most of its points are questions
                struck, wrong = _strike(tmp_path / action / fault, place, action, fault, every)
                all_wrong |= wrong
                row = f"| {place:<9} | {action:<7} | {fault:<6} |"
                print(f"{row} {struck:>4} points | {len(wrong)} lost or half trusted |", flush=True)
    assert not all_wrong, all_wrong
