"""A checkpoint's metadata is read without running anything it names, as each Python pickles it."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex, TensorProperties

from fsdp_jobs.checkpoints.storage import _MetadataUnpickler, load_alone


class _Call:
    def __init__(self, *args: object):
        self.args = args

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return getattr, self.args


def test_an_enumerations_member_pickled_by_getattr_is_read() -> None:
    text = pickle.dumps(_Call(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST"))
    assert _MetadataUnpickler(io.BytesIO(text)).load() is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST


@pytest.mark.parametrize("name", ["__init__", "__getstate__"])
def test_getattr_reaches_nothing_but_members(name: str) -> None:
    for owner in (TensorProperties, _MEM_FORMAT_ENCODING):
        with pytest.raises((pickle.UnpicklingError, KeyError)):
            _MetadataUnpickler(io.BytesIO(pickle.dumps(_Call(owner, name)))).load()


def test_metadata_sets_nothing_on_a_class() -> None:
    honest = dict(vars(MetadataIndex))
    name = b"__reduce__"  # BUILD with slots calls setattr, whatever it is on the stack
    text = (
        pickle.PROTO + b"\x02" + b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n" + pickle.NONE
        + pickle.EMPTY_DICT + pickle.SHORT_BINUNICODE + bytes([len(name)]) + name + pickle.NONE + pickle.SETITEM
        + pickle.TUPLE2 + pickle.BUILD + pickle.STOP
    )  # fmt: skip
    with pytest.raises(pickle.UnpicklingError, match=r"MetadataIndex\.__reduce__ is not allowed"):
        _MetadataUnpickler(io.BytesIO(text)).load()
    assert dict(vars(MetadataIndex)) == honest


def test_a_path_is_read_as_any_python_wrote_it() -> None:
    for module in (b"pathlib", b"pathlib._local"):  # Python 3.13 writes the second
        text = b"c" + module + b"\nPosixPath\n(X\x01\x00\x00\x00atR."
        assert _MetadataUnpickler(io.BytesIO(text)).load() == Path("a")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_manifest_of_another_tool_is_not_taken_for_ours(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    file = tmp_path / "manifest.json"
    for theirs in ({"format": 2, "files": ["__0_0.distcp"], "sum": "abc"}, {"files": {}}, ["__0_0.distcp"], "x"):
        file.write_text(json.dumps(theirs))
        load_alone(tmp_path, state := {"w": torch.zeros(3)})
        assert state["w"].tolist() == [1, 1, 1]
    ours = {"step": 1, "samples": 1, "world_size": 1, "mesh": {}, "torch_version": "", "time": 0.0, "files": {}}
    for damaged in (json.dumps({**ours, "sum": "abc"}), json.dumps(ours)[:-9], ""):
        file.write_text(damaged)
        with pytest.raises((ValueError, TypeError)):
            load_alone(tmp_path, {"w": torch.zeros(3)})
