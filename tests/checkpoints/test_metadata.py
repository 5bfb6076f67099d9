"""A checkpoint's metadata is read without running anything it names, as each Python pickles it."""

from __future__ import annotations

import io
import pickle

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex, TensorProperties

from fsdp_jobs.checkpoints.storage import _MetadataUnpickler


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
