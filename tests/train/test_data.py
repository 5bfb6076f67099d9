"""The order of samples: arithmetic that every resume relies on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_jobs.config.schema import DataConfig
from fsdp_jobs.job.sampler import sample_at
from fsdp_jobs.train.data import IGNORE, Samples, batches, microbatches
from fsdp_jobs.train.sources import open_tokens
from tests.world import run_world, train_here


@settings(deadline=None)
@given(samples=st.integers(1, 700), seed=st.integers(0, 2**31), epoch=st.integers(0, 1000))
def test_an_epoch_is_a_permutation(samples: int, seed: int, epoch: int) -> None:
    seen = [sample_at(epoch * samples + i, samples, seed) for i in range(samples)]
    assert sorted(seen) == list(range(samples))


def test_epochs_and_seeds_differ_and_neighbours_are_spread() -> None:
    orders = [[sample_at(e * 1000 + i, 1000, s) for i in range(1000)] for e, s in ((0, 0), (1, 0), (0, 1))]
    for a in range(3):
        for b in range(a):
            agree = sum(x == y for x, y in zip(orders[a], orders[b], strict=True))
            assert agree < 20
    jumps = np.abs(np.diff(orders[0]))
    assert 280 < jumps.mean() < 390  # a random permutation's is n / 3


@settings(deadline=None)
@given(batch=st.integers(1, 97), micro=st.integers(1, 9), world=st.integers(1, 40), first=st.integers(0, 10**12))
def test_a_step_is_the_same_samples_over_any_world(batch: int, micro: int, world: int, first: int) -> None:
    data = DataConfig(kind="synthetic", global_batch=batch, micro_batch=micro)
    ranks = [microbatches(first, data, rank, world) for rank in range(world)]
    assert len({len(m) for m in ranks}) == 1  # every rank does the same number of collectives
    positions = [p for rank in ranks for micro_ in rank for p in micro_ if p >= 0]
    assert positions == list(range(first, first + batch))


def test_batches_start_anywhere_and_padding_does_not_count() -> None:
    data = DataConfig(kind="synthetic", tokens=1000, seq_len=10, global_batch=5, micro_batch=2, workers=0)
    samples = Samples(open_tokens(data), 10, seed=0)
    whole = list(batches(samples, data, rank=0, world=1, first=0, steps=4, pin=False))
    late = list(batches(samples, data, rank=0, world=1, first=10, steps=2, pin=False))
    assert all((a[0] == b[0]).all() for x, y in zip(whole[2:], late, strict=True) for a, b in zip(x, y, strict=True))
    second = next(batches(samples, data, rank=0, world=2, first=0, steps=1, pin=False))
    counted = sum(int((labels != IGNORE).any(dim=1).sum()) for _, labels in second)
    assert counted == 2 and sum(len(t) for t, _ in second) == 3


def test_labels_are_the_tokens_that_follow(tmp_path: Path) -> None:
    np.arange(101, dtype=np.uint16).tofile(tmp_path / "t.bin")
    data = DataConfig(kind="tokens", path=str(tmp_path / "t.bin"), seq_len=10)
    tokens, labels = Samples(open_tokens(data), 10, seed=3)[4]
    assert labels.tolist() == [t + 1 for t in tokens.tolist()]
    assert tokens.tolist()[0] % 10 == 0


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    for content, said in ((b"", "empty"), (b"abc", "not a whole number"), (b"ab" * 5, "one sample needs")):
        (tmp_path / "t.bin").write_bytes(content)
        with pytest.raises(ValueError, match=said):
            open_tokens(DataConfig(kind="tokens", path=str(tmp_path / "t.bin"), seq_len=10))


def test_the_fingerprint_tells_data_apart() -> None:
    one = open_tokens(DataConfig(kind="synthetic", tokens=5000))
    other = one.copy()
    other[4321] += 1
    assert Samples(one, 10, seed=0).fingerprint() != Samples(other, 10, seed=0).fingerprint()
    assert Samples(one, 10, seed=0).fingerprint() != Samples(one[:-1], 10, seed=0).fingerprint()


def test_the_standard_library_is_read_the_same_twice() -> None:
    data = DataConfig(kind="python_stdlib")
    tokens = open_tokens(data)
    assert len(tokens) > 5_000_000 and tokens.max() < 256
    assert Samples(tokens, 10, seed=0).fingerprint() == Samples(open_tokens(data), 10, seed=0).fingerprint()


def _whole_and_in_two_parts(folder: str, workers: int) -> tuple[list[float], list[float]]:
    dropout = ("model=custom", "model._target_=tests.models.dropping", "model.wrap_classes=[Block]")
    asked = (*dropout, "optim.schedule=constant", f"data.workers={workers}")
    whole = train_here(f"{folder}/whole", [*asked, "steps=6"])
    train_here(f"{folder}/parts", [*asked, "steps=3"])
    return whole, train_here(f"{folder}/parts", [*asked, "steps=6"])


@pytest.mark.integration
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resume_draws_the_random_numbers_that_would_have_been_next(tmp_path: Path, workers: int) -> None:
    whole, parts = run_world(2, _whole_and_in_two_parts, str(tmp_path), workers)[0]
    assert len(whole) == 6 and parts == whole
