"""Text and data sets: tokenized once, resumed anywhere, the same over any world."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from fsdp_jobs.config.data import input_paths
from fsdp_jobs.config.errors import BadInput
from fsdp_jobs.config.hydra import compose_job
from fsdp_jobs.config.schema import DataConfig
from fsdp_jobs.submit.validate import validate
from tests.jobs import job

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]


def tenfold(row: dict[str, str]) -> list[int]:
    """A user's own: the bytes of the title, ten times."""
    return list(row["title"].encode() * 10)


def texts() -> list[str]:
    return [" ".join(WORDS[(i * j) % 9] for j in range(5 + i % 7)) + f" {i}" for i in range(200)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The same documents as text files, as a file of JSON lines, and a tokenizer of their words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "text").mkdir()
    for i, text in enumerate(texts()):
        (tmp_path / "text" / f"{i:03}.txt").write_text(text)
    rows = [json.dumps({"text": text, "title": text[:9]}) for text in texts()]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    vocabulary = {word: i for i, word in enumerate(["<end>", "<unknown>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unknown>")
    whole.save_pretrained(tmp_path / "tokenizer")
    return tmp_path


def _data(corpus: Path, kind: str, **values: object) -> DataConfig:
    path = corpus / ("text" if kind == "text" else "rows.jsonl")
    small = {"seq_len": 16, "global_batch": 6, "micro_batch": 2, "workers": 0, "cache_dir": str(corpus / "cache")}
    return DataConfig(kind=kind, path=str(path), **small | values)  # type: ignore[arg-type]


def _rows(
    data: DataConfig, world: int, first: int, steps: int, mark: dict[str, Any] | None = None
) -> Iterator[list[list[int]]]:
    """The samples of each step over all ranks, tokens and last label, in the order of their positions."""
    from fsdp_jobs.train.data import IGNORE, batches
    from fsdp_jobs.train.sources import open_samples

    each = [open_samples(data, seed=3) for _ in range(world)]
    for samples in each:
        samples.read_on(mark)
    ranks = [batches(samples, data, r, world, first, steps, pin=False) for r, samples in enumerate(each)]
    for step in zip(*ranks, strict=True):
        pairs = [(t, y) for rank in step for tokens, labels in rank for t, y in zip(tokens, labels, strict=True)]
        yield [[*t.tolist(), int(y[-1])] for t, y in pairs if y[-1] != IGNORE]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_resumes_anywhere_on_any_world(corpus: Path, streaming: bool) -> None:
    words = {"tokenizer": str(corpus / "tokenizer"), "vocab_size": 11}
    data = _data(corpus, "hf_dataset", streaming=streaming, **words)
    steps = list(_rows(data, 1, 0, 50))
    assert list(_rows(data, 4, 18, 47)) == steps[3:]
    assert list(_rows(replace(data, workers=1), 3, 18, 2)) == steps[3:5]
    a_epoch = (sum(len(t.split()) + 1 for t in texts()) - 1) // 16
    seen = [tuple(row) for step in steps for row in step]
    assert len(set(seen[:a_epoch])) > a_epoch * 0.9  # a few word sequences are alike
    again = seen[a_epoch : 2 * a_epoch]
    assert sorted(again) == sorted(seen[:a_epoch])
    assert (again == seen[:a_epoch]) is streaming  # a stream has one order, and it is its own
    if streaming:
        assert seen[0][:4] == (2, 2, 2, 2) and 0 in seen[0]  # documents end with the tokenizer's end of text


def noted(row: dict[str, str]) -> list[int]:
    """A user's own, which notes the documents that it is given."""
    with Path(os.environ["NOTES"]).open("a") as f:
        f.write(row["text"].split()[-1] + "\n")
    return list(row["text"].encode())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("step", [1, 40, 77])  # of 6 samples: the first epoch ends in step 77
def test_a_stream_is_read_on_where_it_was_on_any_world(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, step: int, workers: int
) -> None:
    from fsdp_jobs.train.data import batches
    from fsdp_jobs.train.sources import open_samples

    monkeypatch.setenv("NOTES", str(corpus / "notes"))
    own = "tests.hub.test_sources.noted"
    data = _data(corpus, "hf_dataset", streaming=True, workers=workers, tokenize=own, vocab_size=256)
    whole = list(_rows(data, 1, 0, step + 3))
    samples = open_samples(data, 3)
    reading = batches(samples, data, 0, 2, 0, step + 3, pin=False)
    for _ in range(step):
        next(reading)
    mark = json.loads(json.dumps(samples.mark))
    reading.close()
    assert list(_rows(data, 3, 6 * step, 3, mark)) == whole[step:]
    (corpus / "notes").unlink()
    assert list(_rows(data, 1, 6 * step, 3, mark)) == whole[step:]
    assert len((corpus / "notes").read_text().split()) < 40, "documents of before are not tokenized again"
    other = replace(data, seq_len=8)
    assert list(_rows(other, 1, 12, 1, mark)) == list(_rows(other, 1, 12, 1)), "a mark of other samples is of no use"


def test_a_full_cache_is_named_and_what_a_killed_process_left_there_is_removed(small_disk: Path) -> None:
    from fsdp_jobs.hub.tokenize import cached

    data = DataConfig(kind="text", cache_dir=str(small_disk), vocab_size=256)
    with pytest.raises(OSError, match=f"No space left on device: '{small_disk}/[0-9a-f]*.bin'"):
        cached(data, ["too long"], ([7] * 1000 for _ in range(5000)))
    left, growing = small_disk / ".old.bin.1234.tmp", small_disk / ".new.bin.1234.tmp"
    for part in (left, growing):
        part.write_text("tokens")
    os.utime(left, (0, 0))
    assert cached(data, ["short"], [[7] * 10]).stat().st_size == 20
    assert not left.exists() and growing.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_cache_of_several_users_serves_them_or_says_what_to_do() -> None:
    from fsdp_jobs.hub.tokenize import cached

    with TemporaryDirectory() as name:  # pytest's own folders are closed to others
        cache, tokens = Path(name, "cache"), [[7] * 10]
        cache.mkdir()
        Path(name).chmod(0o755)
        data = DataConfig(kind="text", cache_dir=str(cache), vocab_size=256)
        shared, killed, closed = (cached(data, [kind], tokens) for kind in ("shared", "killed", "closed"))
        killed.unlink()
        closed.chmod(0o600)  # its owner's umask
        cure = re.escape(f"-> another folder, or one that its owner shares with your group: chmod -R g+rwX {cache}")
        for mode in (0o777, 0o755):
            cache.chmod(mode)
            os.seteuid(65534)
            try:
                assert cached(data, ["shared"], ()) == shared
                assert cached(data, ["killed"], tokens).stat().st_size == 20, "the lock file of a killed user is there"
                with pytest.raises(BadInput, match=f"{closed} cannot be used by .*: Permission denied\n *{cure}"):
                    cached(data, ["closed"], ())
                if mode == 0o755:
                    with pytest.raises(BadInput, match=cure):
                        cached(data, ["new"], tokens)
            finally:
                os.seteuid(0)


def test_tokens_are_made_once_and_again_when_what_they_come_from_changes(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsdp_jobs.train.sources import open_tokens

    data = _data(corpus, "text")
    text = "".join(texts())
    (corpus / "text" / ".git").mkdir()
    for hidden in ("._000.txt", ".nfs00000000000000010000000a", ".git/config"):
        (corpus / "text" / hidden).write_bytes(b"\0\5\26\7")
    for _ in range(2):
        assert bytes(open_tokens(data)).decode("utf-16-le") == text  # a byte each, kept in 16 bits
    assert len(capsys.readouterr().out.splitlines()) == 1
    (corpus / "text" / "000.txt").write_text("something else")
    assert bytes(open_tokens(data)).decode("utf-16-le").startswith("something else")
    open_tokens(_data(corpus, "text", tokenizer=str(corpus / "tokenizer"), vocab_size=11))
    own = open_tokens(_data(corpus, "hf_dataset", tokenize="tests.hub.test_sources.tenfold"))
    assert len(own) == 200 * 90
    of_column = {name: len(open_tokens(_data(corpus, "hf_dataset", text_column=name))) for name in ("text", "title")}
    assert of_column == {"text": len(text), "title": 200 * 9}
    assert len(list((corpus / "cache").glob("*.bin"))) == 6
    shutil.rmtree(corpus / "text")
    with pytest.raises(BadInput, match="go from 0 to 10"):
        open_tokens(_data(corpus, "hf_dataset", tokenizer=str(corpus / "tokenizer"), vocab_size=9))


def test_what_cannot_be_read_is_said_before_submission(corpus: Path) -> None:
    for overrides, said in (
        (["data=text"], "data.path"),
        (["data=text", "data.path=nowhere/*.txt"], "there is no such file"),
        (["data=text", f"data.path={corpus}/text", "data.vocab_size=100"], "data.vocab_size=256"),
        (["data=text", f"data.path={corpus}/text", "data.tokenizer=./nowhere"], "there is no such folder"),
        (["data=text", f"data.path={corpus}/text", f"data.tokenizer={corpus}/text"], "holds no tokenizer"),
        (["data=hf_dataset", "data.path=./nowhere"], "there is no such file"),
        (["data=hf_dataset", f"data.path={corpus}/rows.jsonl", "data.tokenize=nowhere.at.all"], "cannot be imported"),
        (["data=text", f"data.path={corpus}/text", "data.streaming=true"], "cannot be streamed"),
    ):
        with pytest.raises(BadInput, match=said):
            validate(compose_job(overrides))
    whole = [f"data.path={corpus}/text/*.txt", f"data.tokenizer={corpus}/tokenizer"]
    with pytest.raises(BadInput, match=r"data\.vocab_size=11"):
        validate(compose_job(["data=text", *whole, "data.vocab_size=10"]))
    validate(compose_job(["data=text", *whole, "data.vocab_size=11"]))


@pytest.mark.integration
@pytest.mark.parametrize("place", ["storage", "memory"])
def test_a_job_on_a_stream_loses_a_node_and_goes_on(corpus: Path, place: str) -> None:
    stream = ["data=hf_dataset", f"data.path={corpus}/rows.jsonl", "data.streaming=true", "data.workers=1"]
    if place == "storage":
        saved = ["checkpoint.every_steps=13", "checkpoint.async_mode=off"]
    else:
        saved = ["checkpoint.every_steps=0", "checkpoint.memory.every_steps=13"]
    with job(corpus, "killed", *stream, "steps=40", *saved, nodes="1") as killed:
        killed.until_step(15)
        killed.agent(0).kill()
        assert killed.wait().verdict == "done"
        first = {m["step"]: m["loss"] for m in reversed(killed.metrics())}
        assert [e["place"] for e in killed.events("resumed")] == [place]
        assert len(first) == 40 < len(killed.metrics())
        assert killed.losses() == pytest.approx(first, rel=1e-5)  # steps that were done again saw the same samples


def test_what_ranks_read_on_this_machine_is_known(corpus: Path) -> None:
    text = ["data=text", f"data.path={corpus}/text/*.txt", f"data.tokenizer={corpus}/tokenizer"]
    model = ["model=hf", f"model.name_or_path={corpus}/tokenizer", f"init_from={corpus}/rows.jsonl"]
    found = set(input_paths(compose_job([*text, *model])))
    assert found == {corpus / "text", corpus / "tokenizer", corpus / "rows.jsonl"}
    assert not list(input_paths(compose_job(["data=hf_dataset", "data.path=owner/name"])))
