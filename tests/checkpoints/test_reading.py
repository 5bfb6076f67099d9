"""Reading is not judging: a file is damaged when two nodes say so, and a node that cannot read is at fault itself."""

from __future__ import annotations

import errno
import io
import json
import os
import pathlib
import socket
from concurrent.futures import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_jobs.checkpoints import catalog, ranks, storage
from fsdp_jobs.checkpoints.catalog import CannotReadHere
from fsdp_jobs.config.errors import JobFailed
from fsdp_jobs.run.directory import RunDir
from fsdp_jobs.run.failure import Failure
from fsdp_jobs.run.rank_state import Phase
from tests.checkpoints.saving import run_to_the_end, save_steps, trained, value_of
from tests.world import events_of, flip_byte, run_world

pytestmark = pytest.mark.integration


def _saved(folder: str) -> None:
    checkpoints = trained(folder)
    save_steps(checkpoints, 2, 4)
    checkpoints.close()


def _resumed(folder: str) -> tuple[int, float]:
    checkpoints = trained(folder, "0-1")
    step = checkpoints.restore()
    return step, value_of(checkpoints)


class _Sick(io.FileIO):
    """A file that is read with a flipped bit in each piece."""

    def readinto(self, buffer: Any) -> int:
        size = super().readinto(buffer)
        if size:
            memoryview(buffer).cast("B")[0] ^= 1
        return size


def _with_sick_node(folder: str, sick: int, what: int | str, of: str) -> Any:
    """Resume while one node cannot open files named `of` (an errno), does not see them, or reads other bytes."""
    ranks._PATIENCE_S = 0.5
    if dist.get_rank() == sick:
        if what == "other bytes":
            opened = pathlib.Path.open
            pathlib.Path.open = lambda self, mode="r", *rest, **keys: (  # type: ignore[method-assign,assignment]
                _Sick(self) if self.name.endswith(of) and mode == "rb" else opened(self, mode, *rest, **keys)
            )
        else:
            stat, opened = pathlib.Path.stat, pathlib.Path.open
            number = errno.ENOENT if what == "not there" else what

            def refuse(honest: Any) -> Any:
                def call(self: Path, *args: Any, **kwargs: Any) -> Any:
                    if self.name.endswith(of) and folder in str(self):
                        raise OSError(number, os.strerror(number), str(self))
                    return honest(self, *args, **kwargs)

                return call

            pathlib.Path.stat, pathlib.Path.open = refuse(stat), refuse(opened)  # type: ignore[method-assign]
    try:
        said = str(_resumed(folder))
    except CannotReadHere as e:
        said = f"{type(e).__name__}: {e}"
    except RuntimeError:
        said = "a peer has gone"
    (Path(folder) / f"said-{dist.get_rank()}").write_text(said)
    os._exit(7)  # as failed ranks do, so that the others notice


@pytest.mark.parametrize(
    ("what", "of"),
    [
        (errno.EIO, ".distcp"),
        (errno.ESTALE, ".distcp"),
        (errno.EACCES, ".metadata"),
        (errno.EIO, "manifest.json"),
        ("not there", ".distcp"),
        ("other bytes", ".distcp"),
    ],
)
def test_a_node_that_cannot_read_condemns_nothing(tmp_path: Path, what: int | str, of: str) -> None:
    run_world(2, _saved, str(tmp_path))
    sick = 0 if of == "manifest.json" else 1
    run_to_the_end(2, _with_sick_node, str(tmp_path), sick, what, of)
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    assert said[1 - sick] == "a peer has gone"
    assert socket.gethostname() in said[sick] and of in said[sick] and str(tmp_path) in said[sick], said
    blamed = Failure(sick, sick, 1, said[sick], 0.0)
    assert blamed.may_be_machine_fault and not blamed.is_final

    found = catalog.find_checkpoints(tmp_path / "checkpoints")
    assert [f.name for f in found] == ["step-00000004", "step-00000002"]
    assert all(catalog.verify(f) == [] for f in found)
    assert not events_of(RunDir(tmp_path), "checkpoint_skipped")
    assert run_world(2, _resumed, str(tmp_path)) == [(4, 4.0), (4, 4.0)]


def _fails(folder: str, **keys: Any) -> str:
    checkpoints = trained(folder, "0-2", **keys)
    if dist.get_rank():
        with pytest.raises(RuntimeError):  # rank 0 has gone
            checkpoints.restore()
        os._exit(0)
    try:
        checkpoints.restore()
    except JobFailed as e:
        (Path(folder) / "said").write_text(str(e))
    os._exit(0)


def test_what_two_nodes_read_as_damaged_is_set_aside_and_never_removed(tmp_path: Path) -> None:
    run_world(2, _saved, str(tmp_path))
    home = tmp_path / "checkpoints"
    (home / "step-00000004.damaged").mkdir()
    (home / "step-00000004.damaged" / "older").write_text("evidence")
    flip_byte(home / "step-00000004" / "__1_0.distcp")
    assert run_world(2, _resumed, str(tmp_path)) == [(2, 2.0), (2, 2.0)]
    assert (home / "step-00000004.damaged" / "older").exists()
    assert (home / "step-00000004.damaged-1" / "manifest.json").exists()
    (home / "step-00000002" / "__0_0.distcp").unlink()
    run_to_the_end(2, _fails, str(tmp_path))
    said = (tmp_path / "said").read_text()
    assert "a checkpoint of step 4" in said and "step-00000002: __0_0.distcp is missing" in said, said
    assert "checkpoint.restart_from_zero=true" in said
    assert run_world(1, _begun_again, str(tmp_path)) == [0]


def _begun_again(folder: str) -> int:
    return trained(folder, "0-3", restart_from_zero=True).restore()


def _restored_twice(folder: str) -> list[tuple[int, float]]:
    checkpoints, found = trained(folder), []
    save_steps(checkpoints, 2, 4)
    if checkpoints.rank == 0:
        flip_byte(Path(folder) / "checkpoints" / "step-00000004" / "__1_0.distcp")
    dist.barrier()
    for _ in range(2):
        found.append((checkpoints.restore(), value_of(checkpoints)))
        save_steps(checkpoints, 4)
    checkpoints.close()
    return found


def test_a_second_restore_judges_anew(tmp_path: Path) -> None:
    assert run_world(2, _restored_twice, str(tmp_path)) == [[(2, 2.0), (4, 4.0)]] * 2


def _flip_once(folder: str) -> Any:
    """Resume where the first reading of a file finds other bytes than are on the disk, as with a sick cache."""
    opened, read = pathlib.Path.open, set[Path]()

    def open_(self: Path, mode: str = "r", *rest: Any, **keys: Any) -> Any:
        is_first = mode == "rb" and self.suffix == ".distcp" and self not in read
        read.add(self)
        return _Sick(self) if is_first else opened(self, mode, *rest, **keys)

    pathlib.Path.open = open_  # type: ignore[method-assign,assignment]
    return _resumed(folder)


def test_one_node_reads_again_before_it_judges(tmp_path: Path) -> None:
    run_world(1, _saved, str(tmp_path))
    assert run_world(1, _flip_once, str(tmp_path)) == [(4, 4.0)]
    assert not events_of(RunDir(tmp_path), "checkpoint_skipped")


def test_a_manifest_that_lists_less_than_the_metadata_needs_is_passed_over(tmp_path: Path) -> None:
    run_world(2, _saved, str(tmp_path))
    file = tmp_path / "checkpoints" / "step-00000004" / "manifest.json"
    content = json.loads(file.read_text())
    del content["files"]["__1_0.distcp"], content["sum"]
    file.write_text(json.dumps(content))
    (file.parent / "__1_0.distcp").unlink()
    assert run_world(2, _resumed, str(tmp_path)) == [(2, 2.0), (2, 2.0)]
    (skipped,) = events_of(RunDir(tmp_path), "checkpoint_skipped")
    assert "manifest.json does not list __1_0.distcp" in skipped["why"][0]


def _saved_with_a_mask(folder: str) -> None:
    model = nn.Linear(8, 8)
    model.mask = nn.Parameter(torch.full((8, 8), -torch.inf), requires_grad=False)
    checkpoints = trained(folder, model=model)
    for step in (2, 4):
        checkpoints.save(step, block=True)
    checkpoints.close()


def test_what_training_does_not_change_may_hold_infinities(tmp_path: Path) -> None:
    run_world(2, _saved_with_a_mask, str(tmp_path))
    assert not events_of(RunDir(tmp_path), "checkpoint_failed")
    assert [catalog.verify(f) for f in catalog.find_checkpoints(RunDir(tmp_path).checkpoints)] == [[], []]


def _resumed_from_what_it_knows(folder: str) -> tuple[int, float]:
    newest = catalog.find_checkpoints(RunDir(folder).checkpoints)[0]
    content = json.loads((newest / catalog.MANIFEST).read_text())
    del content["samples"]  # as a version to come may do
    content["sum"] = catalog._sum(content)
    (newest / catalog.MANIFEST).write_text(json.dumps(content))
    return _resumed(folder)


def test_a_checkpoint_of_another_version_is_passed_over_and_left_as_it_is(tmp_path: Path) -> None:
    run_world(1, _saved, str(tmp_path))
    assert run_world(1, _resumed_from_what_it_knows, str(tmp_path)) == [(2, 2.0)]
    assert [catalog.step_of(f) for f in catalog.find_checkpoints(RunDir(tmp_path).checkpoints)] == [4, 2]
    (skipped,) = events_of(RunDir(tmp_path), "checkpoint_skipped")
    assert catalog.OTHER_VERSION in skipped["why"][0]


def _with_an_expired_credential(folder: str) -> None:
    """Neither what is to be committed can be written nor what was written be removed."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "the credential has expired")

    checkpoints = trained(folder)
    save_steps(checkpoints, 2)
    honest = catalog.commit, catalog.remove
    catalog.commit = storage.commit = catalog.remove = refuse  # type: ignore[assignment, attr-defined]
    save_steps(checkpoints, 4)
    catalog.commit, catalog.remove = honest
    storage.commit = honest[0]  # type: ignore[attr-defined]
    save_steps(checkpoints, 6)
    checkpoints.close()


def test_a_save_that_fails_and_cannot_be_removed_is_recorded_and_training_goes_on(tmp_path: Path) -> None:
    run_world(1, _with_an_expired_credential, str(tmp_path))
    (failed,) = events_of(RunDir(tmp_path), "checkpoint_failed")
    assert failed["step"] == 4 and "credential has expired" in failed["error"], failed
    assert [catalog.step_of(f) for f in catalog.find_checkpoints(RunDir(tmp_path).checkpoints)] == [6, 2]


def _phases_while_a_failed_save_is_removed(folder: str) -> tuple[list[Phase], Phase]:
    checkpoints, reported, then = trained(folder, async_mode="thread"), list[Phase](), list[Phase]()
    checkpoints._report = reported.append
    away = OSError(errno.EIO, os.strerror(errno.EIO))
    with (
        patch.object(storage.SaveRequest, "commit", side_effect=away),
        patch.object(catalog, "remove_failed", lambda _: then.append(reported[-1])),
    ):
        checkpoints.save(2)
        assert checkpoints._written is not None
        wait([checkpoints._written])
        checkpoints.poll()
    return then, reported[-1]


def test_a_rank_that_waits_for_storage_to_remove_a_failed_save_says_that_it_saves(tmp_path: Path) -> None:
    """Else it counts as stalled: a storage that has just failed may take minutes for each answer."""
    assert run_world(1, _phases_while_a_failed_save_is_removed, str(tmp_path)) == [([Phase.SAVING], Phase.TRAINING)]
