"""Streamed text: the same rows on any ranks, every token once, positions, held-out and excluded documents."""

import gzip
import io
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from captured_log import captured_log
from data_samples import (
    DOCUMENTS,
    TOKENIZER,
    check_any_ranks,
    check_resumes,
    make_loader,
    take,
    write_hub_folder,
    write_jsonl,
)
from forked_run import ForkedRun, finish, read_metrics
from fsspec.implementations.local import LocalFileSystem

from torchtrain.config.parse import parse
from torchtrain.datasets import file_formats
from torchtrain.datasets.data_identity import Identity
from torchtrain.datasets.data_source import Place, SourceContext, Stream, StreamRequest, is_held_out, text_hash
from torchtrain.datasets.dataloader import DataLoader, LoaderLayout
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.datasets.order import Mixture
from torchtrain.datasets.text_input import PAUSES_SECONDS, InputFile
from torchtrain.errors import DataError, StorageError
from torchtrain.labels import IGNORE_INDEX
from torchtrain.plugins.remote_data import file_parts, remote_files, streamed_text
from torchtrain.plugins.remote_data.options import RemoteDataConfig
from torchtrain.plugins.remote_data.packed_text import PackedTextStream
from torchtrain.plugins.remote_data.sources import HubDataset, RemoteFiles
from torchtrain.plugins.remote_data.streamed_text import StreamedText, find_held_out
from torchtrain.resolve import check_run

SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 75))]
READERS = 4  # which a run keeps
KINDS = ["jsonl", "jsonl.gz", "parquet"]  # in ranges of bytes, as a whole, in row groups
SHARE = 0.3  # that is held out


class MemoryFile(InputFile):
    def __init__(self, name: str, content: bytes) -> None:
        self.content = content
        super().__init__(f"memory://{name}", len(content), name)

    def open(self) -> BinaryIO:
        return io.BytesIO(self.content)


def content_of(name: str, texts: Sequence[str | None], row_group_size: int = 7) -> bytes:
    """A file of these documents, in the format of its name."""
    content = io.BytesIO()
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), content, row_group_size=row_group_size)
    else:
        content.write("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    return gzip.compress(content.getvalue()) if name.endswith(".gz") else content.getvalue()


def file_of(name: str, texts: Sequence[str | None]) -> MemoryFile:
    return MemoryFile(name, content_of(name, texts))


def streams(number: int) -> dict[str, RemoteDataConfig]:
    """``plugins`` of a config with remote_data.streams = ``number``."""
    return {"remote_data": RemoteDataConfig(streams=number)}


def opened(source: SourceConfig, readers: int = 1) -> StreamedText:
    of_type = RemoteFiles if source.path else HubDataset
    context = SourceContext("data", TOKENIZER, global_batch_size=readers)
    found = of_type.open(source, context, of_type.query_on_rank0(source, context))
    assert isinstance(found, StreamedText)
    return found


def texts_in(source: StreamedText) -> list[str | None]:
    return [text for part in range(source.parts) for _, text in source.read(part, 0)]


# Every token is trained on once.


class Numbers:
    """A tokenizer of texts that are numbers: a text is a sequence of ids, of which each occurs once in all texts."""

    def __init__(self, vocab_size: int) -> None:
        self.token_bytes = [1] * vocab_size

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        return [0] * bos + [int(word) for word in text.split()] + [1] * eos


class Documents(StreamedText):
    """Three files, with texts of the given numbers of tokens; ``first`` is their first id."""

    def __init__(self, kind: str, lengths: list[int], first: int = 2) -> None:
        ends = np.cumsum([first, *lengths]).tolist()
        texts = [" ".join(map(str, range(start, end))) for start, end in itertools.pairwise(ends)]
        self.tokens = range(first, ends[-1])
        self.tokenizer: Any = Numbers(self.tokens.stop)
        context = SourceContext("data", self.tokenizer, READERS, plugins=streams(READERS))
        files = [file_of(f"{number}.{kind}", texts[number::3]) for number in range(3)]
        super().__init__(files, "text", "numbers", context, lambda: Identity("numbers"))


def loader_of(
    weights: Mapping[Documents, float], batch: int, seq_len: int, ranks: int, rank: int, *, repeat: bool = False
) -> DataLoader:
    """A loader of sources with their weights."""
    rows = range(batch * rank // ranks, batch * (rank + 1) // ranks)
    requests = [StreamRequest(source.tokenizer, seq_len, batch, rows, 5, repeat) for source in weights]
    return DataLoader(
        [source.stream(request) for source, request in zip(weights, requests, strict=True)],
        Mixture(list(weights.values())),
        rows,
        seq_len=seq_len,
        global_batch_size=batch,
        prefetch=0,
        drop_last=False,
        device=torch.device("cpu"),
    )


def labels_of_chain(
    source: Documents, random_numbers: random.Random, lengths: Sequence[int], other: Documents | None
) -> dict[int, int]:
    """How often each token is a label in runs with other batches, lengths and ranks, each after the one before, until
    ``source`` ends.

    ``other``: a source that a part of the runs has too, some of them without ``source``, which then keeps its position.
    """
    labels: Counter[int] = Counter()
    saved, layout = None, None
    while True:
        batch = random_numbers.choice([4, 8, 12, 16])
        seq_len = random_numbers.choice(lengths)
        ranks = random_numbers.choice([1, 2, 4])
        weights = {source: 1.0}
        if other is not None:
            weights = random_numbers.choice([weights, {source: 1.0, other: 0.5}, {source: 0.0, other: 1.0}])
        loaders = [loader_of(weights, batch, seq_len, ranks, rank) for rank in range(ranks)]
        if saved is not None and layout is not None:
            for loader in loaders:
                loader.resume(saved, layout, [number < len(layout.state_sizes) for number in range(len(weights))])
        for _ in range(random_numbers.randrange(1, 9)):
            batches = [next(loader, None) for loader in loaders]
            if not any(batches):
                if len(weights) > 1:  # a step had rows of a source that has ended alone
                    other = None
                    break
                del labels[IGNORE_INDEX]
                return labels
            for found in filter(None, batches):  # the loaders of a run end together; these do not communicate
                labels.update(found.labels.flatten().tolist())
        saved = np.concatenate([loader.state_dict()["rows"].numpy() for loader in loaders])
        layout = loaders[0].layout


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_token_is_trained_on_once(kind: str, mixed: bool, seed: int) -> None:
    """In any chain of changes of the batch, the sequence length, the ranks and the sources."""
    random_numbers = random.Random(seed)
    source = Documents(
        kind, [random_numbers.choice([1, 2, 7, 20, 90]) for _ in range(random_numbers.randrange(20, 80))]
    )
    other = Documents(kind, [random_numbers.choice([3, 30]) for _ in range(20)], source.tokens.stop) if mixed else None
    counts = labels_of_chain(source, random_numbers, [5, 8, 16, 33], other)
    assert {counts[token] for token in source.tokens} == {1}


def test_rest_of_a_document_is_not_all_the_text() -> None:
    """Readers begin in the middle of the few documents."""
    source = Documents("jsonl", [1000] * 3)
    old, new = (loader_of({source: 1.0}, batch, 10, 1, 0, repeat=True) for batch in (8, 4))
    for _ in range(100):
        next(old)
    new.resume(old.state_dict()["rows"].numpy(), old.layout, [True])
    for _ in range(200):
        next(new)


@pytest.mark.parametrize("lines", [["short"], [None] * 9])
def test_too_little_text_for_one_window_is_an_error(lines: list[str | None]) -> None:
    context = SourceContext("data", TOKENIZER)
    source = StreamedText([file_of("a.jsonl", lines)], "text", "it", context, lambda: Identity("it"))
    request = StreamRequest(TOKENIZER, 512, 1, range(1), 0, repeat=True)
    with pytest.raises(DataError, match=r"it has too little text: .*training.seq_len \+ 1 = 513 tokens"):
        source.stream(request).fill([0], [np.zeros(513, dtype=np.int64)], [0])


# The same rows on any ranks.

SOURCES = ["jsonl", "parquet", "compressed", "mixed"]
ON_SOURCES = pytest.mark.parametrize(  # "mixed" has Parquet files, too
    "source", [pytest.param(of, marks=pytest.mark.slow) if of == "parquet" else of for of in SOURCES]
)
STEPS = 50


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DataConfig]:
    folder = tmp_path_factory.mktemp("sources")
    hub = write_hub_folder(folder / "hub", DOCUMENTS, files=3)
    parquet = write_hub_folder(folder / "parquet", DOCUMENTS, files=5, kind="parquet")
    local = write_jsonl(folder / "a.jsonl", DOCUMENTS)
    compressed = folder / "a.jsonl.gz"
    compressed.write_bytes(gzip.compress(Path(local).read_bytes()))
    return {
        "jsonl": DataConfig(name=hub),
        "parquet": DataConfig(name=parquet),
        "compressed": DataConfig(path=compressed.as_uri()),
        "mixed": DataConfig(
            sources=(
                SourceConfig(path=local, weight=2),
                SourceConfig(path=Path(local).as_uri(), weight=0.5),
                SourceConfig(name=parquet, weight=1),
            ),
        ),
    }


def plugins_of(source: str) -> dict[str, RemoteDataConfig]:
    """Also fewer streams than rows."""
    return streams(64 if source == "jsonl" else 4)


@ON_SOURCES
def test_rows_depend_neither_on_ranks_nor_on_prefetching(configs: dict[str, DataConfig], source: str) -> None:
    check_any_ranks(configs[source], STEPS, plugins=plugins_of(source))


@ON_SOURCES
def test_resume_at_random_steps_on_other_ranks_gives_the_same_rows(configs: dict[str, DataConfig], source: str) -> None:
    check_resumes(configs[source], STEPS, source, plugins=plugins_of(source))


def test_each_epoch_has_every_document_once(configs: dict[str, DataConfig]) -> None:
    config = replace(configs["parquet"], when_exhausted="stop")
    rows: list[list[int]] = [[] for _ in range(8)]
    for batch in make_loader(config, drop_last=False, plugins=streams(4)):
        for row, labels in zip(rows, batch.labels, strict=True):
            row += labels[labels != IGNORE_INDEX].tolist()
    # Every token is a label once, except the first of each of the 4 streams.
    expected = [token for text in DOCUMENTS for token in TOKENIZER.encode(text, bos=True, eos=True)]
    seen = [token for row in rows for token in row]
    assert sorted(seen + [TOKENIZER.bos_id] * 4) == sorted(expected)


def test_row_on_its_own_rank_ends_like_the_row_of_a_full_batch(configs: dict[str, DataConfig]) -> None:
    config = replace(configs["parquet"], when_exhausted="stop")
    full = list(make_loader(config, range(4), batch=4, drop_last=False))
    assert (full[-1].labels == IGNORE_INDEX).any()
    for row in range(4):
        loader = make_loader(config, range(row, row + 1), batch=4, drop_last=False)
        for batch, own in zip(full, loader, strict=False):  # a rank with one row ends when that row does
            assert own.tokens.min() >= 0
            known = own.labels != IGNORE_INDEX
            assert torch.equal(own.tokens[known], batch.tokens[[row]][known])
            assert torch.equal(own.labels, batch.labels[[row]])


def test_bytes_of_tokens_add_up_to_those_of_the_text(configs: dict[str, DataConfig]) -> None:
    config = replace(configs["parquet"], when_exhausted="stop", prefetch=0)
    total = 0.0
    for batch in make_loader(config, range(1), batch=1, drop_last=False, count_bytes=True):
        assert batch.label_bytes is not None
        total += float(batch.label_bytes[batch.labels != IGNORE_INDEX].sum())
    assert total == pytest.approx(sum(len(text.encode()) for text in DOCUMENTS))


# Parts of files.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("documents", [1, 5, 60])
def test_parts_of_a_file_have_each_document_once(kind: str, documents: int) -> None:
    """From any document on, as after a resume; in any number of parts, also of more parts than row groups."""
    texts = [f"document {number}" * (1 + number % 5) for number in range(documents)]
    file = file_of(f"a.{kind}", texts)
    for count in (1, 2, 3, 7, 20):
        parts = [file_parts.FilePart(file, number, count) for number in range(count)]
        found = [list(part.read("text", 0, pytest.fail)) for part in parts]
        assert sorted(itertools.chain.from_iterable(found)) == sorted(texts)  # type: ignore[type-var]
        if documents == 60 and count < 20:
            assert min(map(len, found)) > 0
        for part, whole in zip(parts, found, strict=True):
            for start in (1, 4, 9, 60):
                assert list(part.read("text", start, pytest.fail)) == whole[start:]


@pytest.mark.parametrize("kind", [*KINDS, "jsonl of one part", "txt"])
def test_positions_name_the_document_in_the_file(kind: str) -> None:
    texts = [f"document {number} é" * (1 + number % 5) for number in range(60)]
    if kind == "txt":
        texts = [f"{number:06} {'words ' * 20}\n" for number in range(20_000)]
        file = MemoryFile("a.txt", "".join(texts).encode())
    else:
        file = file_of(f"a.{kind.split()[0]}", texts)
    count = 1 if " " in kind else 4
    for number in range(count):
        part = file_parts.FilePart(file, number, count)
        for document, text in enumerate(part.read("text", 0, pytest.fail)):
            position = part.position(document)
            if kind == "parquet":
                assert texts[int(position.removeprefix("row "))] == text
            elif position.startswith("line "):
                assert texts[int(position.removeprefix("line ")) - 1] == text
            elif kind == "jsonl":
                offset = int(position.removeprefix("the line at byte "))
                assert json.loads(file.content[offset:].partition(b"\n")[0])["text"] == text
            else:
                assert kind == "txt"
                assert position == f"document {document}" + f" of part {number} of 4" * (number > 0)


@pytest.mark.parametrize(("sizes", "readers"), [([9], 8), ([14], 8), ([1, 5, 3], 4), ([1, 1, 1], 8)])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_parts_are_a_multiple_of_the_readers(sizes: list[int], readers: int, kind: str) -> None:
    """Otherwise some readers begin the next epoch early, or, with when_exhausted = "stop", all end early."""
    files: list[InputFile] = [MemoryFile(f"{number}.{kind}", b"") for number in range(len(sizes))]
    for file, size in zip(files, sizes, strict=True):
        file.size = size * file_parts.PART_BYTES
    parts = file_parts.divide_files(files, readers)
    assert len(parts) % readers == 0
    assert len(parts) < sum(max(size, -(-readers // len(sizes))) for size in sizes) + readers


def test_only_the_row_groups_of_a_part_are_read_and_none_before_the_document() -> None:
    texts = [random.Random(number).randbytes(2000).hex() for number in range(800)]
    content = content_of("a.parquet", texts, row_group_size=100)
    starts, size = list[int](), len(content)

    class Counted(MemoryFile):
        def open(self) -> BinaryIO:
            def fetch(start: int, end: int) -> bytes:
                if end < len(content) - 2**17:  # not of the footer
                    starts.append(start)
                return content[start:end]

            return remote_files.open_ranges(self.location, len(content), fetch)

    part = file_parts.FilePart(Counted("a.parquet", content), 1, 2)
    for document, least in ((0, 0.48), (250, 0.73)):
        starts.clear()
        is_same = list(part.read("text", document, pytest.fail)) == texts[400 + document :]
        assert is_same  # without a long message
        assert min(starts) > size * least


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
def test_damaged_file_is_one_error_with_its_location(kind: str, count: int) -> None:
    content = content_of(f"a.{kind}", DOCUMENTS)
    part = file_parts.FilePart(MemoryFile(f"a.{kind}", content[: len(content) // 2]), 0, count)
    with pytest.raises(DataError, match=rf"memory://a.{kind} cannot be read.* it seems damaged: "):
        list(part.read("text", 0, pytest.fail))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_dataset_is_read_once_and_from_any_document(tmp_path: Path, kind: str) -> None:
    config = SourceConfig(name=write_hub_folder(tmp_path / "hub", DOCUMENTS, files=3, kind=kind))
    for readers in (1, 2, 3, 7):
        source = opened(config, readers)
        assert sorted(text for text in texts_in(source) if text) == sorted(DOCUMENTS)
        for part in range(source.parts):  # from any document, as after a resume
            documents = list(source.read(part, 0))
            for start in (1, 5, 8, 30):
                assert list(source.read(part, start)) == [pair for pair in documents if pair[0] >= start]
    with pytest.raises(DataError, match=r"no column 'body' .text_column.; its columns are text"):
        make_loader(DataConfig(name=config.name, text_column="body"))


# What is skipped.


@pytest.mark.parametrize("readers", [1, 4])
def test_malformed_lines_are_skipped_and_counted(tmp_path: Path, readers: int) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    size = (tmp_path / "train.jsonl").write_text(lines + "broken\n" + lines + "broken\n") // 2 - 7
    with captured_log() as log:
        source = opened(SourceConfig(name=str(tmp_path)), readers)
        assert sorted(text for text in texts_in(source) if text) == sorted(DOCUMENTS * 2)
    places = ("line 61", "line 122") if readers == 1 else (f"the line at byte {n}" for n in (size, 2 * size + 7))
    for number, place in enumerate(places, 1):
        assert f"skipped {number} malformed line(s) so far: {tmp_path}/train.jsonl: {place}" in "\n".join(log)
    assert (source.malformed, source.skipped) == (2, 0)


@pytest.mark.parametrize(("name", "parts"), [("a.jsonl", 1), ("a.jsonl", 3), ("a.csv", 1), ("a.json", 1), ("a.csv", 3)])
def test_malformed_lines_before_the_document_of_a_resume_are_not_counted_again(name: str, parts: int) -> None:
    if name == "a.jsonl":
        content = "".join(f'{{"text": "{n}"}}\n' if n % 3 else "broken\n" for n in range(60))
    elif name == "a.csv":
        content = "n,text\n" + "".join(f"{n},{n}\n" if n % 3 else f"{n}\n" for n in range(60))
    else:
        content = json.dumps([{"text": str(n)} if n % 3 else "broken" for n in range(60)])
    file = MemoryFile(name, content.encode())
    for number in range(parts):
        part, malformed = file_parts.FilePart(file, number, parts), list[str]()
        texts = list(part.read("text", 10, malformed.append))
        if file.name == "a.csv" and parts > 1:  # all parts read all lines, and one of them counts
            assert len(malformed) == (10 if number == 0 else 0)
        else:
            assert sum(not text for text in texts) == len(malformed) > 0


def test_skipped_documents_are_counted_in_the_log() -> None:
    context = SourceContext("data", TOKENIZER)
    texts = [*DOCUMENTS, None, None, None, None, ""]
    source = StreamedText([file_of("a.jsonl", texts)], "text", "it", context, lambda: Identity("it"))
    stream = source.stream(StreamRequest(TOKENIZER, 32, 1, range(1), 0, repeat=False))
    with captured_log() as log:
        while stream.fill([0], [np.zeros(33, dtype=np.int64)], [0]) == [33]:
            pass
    for count in (1, 2, 4):
        assert f"it: skipped {count} document(s) so far that are empty, null or not text" in log
    assert source.skipped == 5


# Errors of the network; those of the hub's own API are in test_hub.py.


class Remote:
    """A streamed dataset of one file. ``next`` lists the outcomes of the next range requests: an error, or None."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source = opened(SourceConfig(name=write_hub_folder(folder / "hub", DOCUMENTS, files=1)), 2)
        self.documents = list(self.source.read(0, 0))
        self.next: list[Exception | None] = []
        fetch = LocalFileSystem.cat_file

        def fail(file_system: Any, path: str, **limits: int) -> bytes:
            if self.next and (error := self.next.pop(0)):
                raise error
            return fetch(file_system, path, **limits)  # type: ignore[no-any-return]

        monkeypatch.setattr(remote_files, "RANGE_BYTES", 256)
        monkeypatch.setattr(file_formats, "_BLOCK_BYTES", 256)
        monkeypatch.setattr(LocalFileSystem, "cat_file", fail)


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Remote:
    return Remote(tmp_path, monkeypatch)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    return slept


def test_transient_errors_are_retried(remote: Remote, pauses: list[float]) -> None:
    reset, broken = ConnectionError("reset"), OSError(5, "Input/output error")
    remote.next = [reset, None, None, reset, broken, reset]
    with captured_log() as log:
        assert list(remote.source.read(0, 0)) == remote.documents
    assert not remote.next
    assert pauses == [1, 1, 2, 4]  # the delays start over after a range was read
    assert "train-0.jsonl: next attempt in 4 s: reset" in "\n".join(log)


def test_persistent_error_names_the_file(remote: Remote, pauses: list[float]) -> None:
    remote.next = [None, None, *[ConnectionError("reset")] * 99]
    with pytest.raises(StorageError, match=r"hub/train-0.jsonl: the hub or the network does not respond: reset"):
        list(remote.source.read(0, 0))
    assert StorageError.exit_code == 74  # the command may be repeated later
    assert pauses == list(PAUSES_SECONDS)
    assert sum(pauses) > 200


def test_permanent_error_is_not_retried(remote: Remote, pauses: list[float]) -> None:
    """Nor is it taken for a part without text, in which lines are not missed."""
    remote.next = [None, ValueError("bad bytes")]
    with pytest.raises(DataError, match="bad bytes"):
        list(remote.source.read(0, 0))
    assert pauses == []


# Other data, and positions of others.


def loader(config: DataConfig, batch: int = 4, seq_len: int = 16, most: int = 64) -> DataLoader:
    return make_loader(config, range(batch), batch=batch, seq_len=seq_len, plugins=streams(most))


def resumed(old: DataLoader, new: DataLoader, continued: tuple[bool, ...] = (True,)) -> DataLoader:
    new.resume(old.state_dict()["rows"].numpy(), old.layout, continued)
    return new


@pytest.fixture
def text(tmp_path: Path) -> DataConfig:
    return DataConfig(path=Path(write_jsonl(tmp_path / "text.jsonl", DOCUMENTS)).as_uri(), prefetch=0)


def test_other_sequence_length_continues_with_the_next_token(text: DataConfig) -> None:
    old, whole = loader(text, seq_len=16), loader(text, seq_len=16)
    take(old, 4)
    new = resumed(old, loader(text, seq_len=32))
    assert new.state_dict()["rows"][0, 1] == 4 * 4 // 2
    expected = take(whole, 8)[4:].transpose(0, 1).reshape(4, -1)
    assert torch.equal(take(new, 2).transpose(0, 1).reshape(4, -1), expected)


def test_other_sequence_length_continues_in_the_next_epoch(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "text.jsonl", DOCUMENTS[:9])
    config = DataConfig(path=Path(path).as_uri(), prefetch=0)
    old, whole = loader(config, seq_len=16), loader(config, seq_len=16)
    steps = 0
    while old.state_dict()["rows"][:, 2].min() < 2 * 4:  # parts over all epochs
        steps += take(old, 2).shape[0]
    new = resumed(old, loader(config, seq_len=32))
    expected = take(whole, steps + 8)[steps:].transpose(0, 1).reshape(4, -1)
    assert torch.equal(take(new, 4).transpose(0, 1).reshape(4, -1), expected)


def test_new_source_begins_and_the_other_continues(tmp_path: Path, text: DataConfig) -> None:
    first = SourceConfig(path=text.path)
    second = SourceConfig(path=Path(write_jsonl(tmp_path / "b.jsonl", DOCUMENTS[:30])).as_uri())
    old = loader(DataConfig(sources=(first,), prefetch=0))
    take(old, 5)
    both = DataConfig(sources=(first, second), prefetch=0)
    new, fresh = resumed(old, loader(both), (True, False)), loader(both)
    assert new.state_dict()["rows"][:, 1].tolist() == [20] * 4
    assert torch.equal(new.state_dict()["rows"][:, 3:7], old.state_dict()["rows"][:, 2:6])
    assert torch.equal(new.state_dict()["rows"][:, 7:], fresh.state_dict()["rows"][:, 7:])


@pytest.mark.parametrize(("before", "now"), [(6, 2), (12, 3)])
def test_streams_of_a_smaller_batch_do_not_continue_those_of_a_larger(text: DataConfig, before: int, now: int) -> None:
    with pytest.raises(DataError, match=rf"is not one of {now} streams: .* a training.global_batch_size for which it"):
        resumed(loader(text, batch=before, most=12), loader(text, batch=now, most=12))
    old, whole = loader(text, batch=6, most=2), loader(text, batch=6, most=2)
    take(old, 2)
    new = resumed(old, loader(text, batch=2, most=2))
    # Reader 1 of 2 has filled rows 3 to 5 of each batch, and fills row 1 now.
    assert torch.equal(take(new, 3)[:, 1], take(whole, 3)[2, 3:])


@pytest.mark.parametrize("columns", [0, 3, 5])
def test_positions_of_other_versions_are_rejected(text: DataConfig, columns: int) -> None:
    for config in (text, replace(text, when_exhausted="stop")):
        for batch in (4, 8):
            rows = np.zeros((4, 2 + columns), dtype=np.int64)
            with pytest.raises(DataError, match=r"the saved position in .* is of other data, "):
                loader(config, batch=batch).resume(rows, LoaderLayout(4, 16, (columns,)), (True,))


def test_position_of_another_number_of_streams_is_rejected(tmp_path: Path) -> None:
    """Otherwise rows that shared a stream would continue with the same documents."""
    config = DataConfig(name=write_hub_folder(tmp_path / "hub", DOCUMENTS, files=3), prefetch=0)
    for number in (2, 4):
        saved = make_loader(config, plugins=streams(number)).state_dict()
        with pytest.raises(DataError, match=r"is not one of 8 streams: resume with the same remote_data.streams"):
            make_loader(config).load_state_dict(saved)
    with pytest.raises(DataError, match="is not one of 2 streams"):
        make_loader(config, plugins=streams(2)).load_state_dict(saved)


def test_data_parallel_ranks_must_divide_the_number_of_streams(text: DataConfig) -> None:
    """In training and in validation; local text may be divided among any ranks."""
    make_loader(text, range(4), plugins=streams(3))  # 2 streams: the largest divisor of 8 that is at most 3
    for section in ("data", "validation"):
        message = rf"^{section}.path = .* is streamed in 2 streams, .* of 8 up to remote_data.streams; the number of"
        with pytest.raises(DataError, match=message):
            make_loader(text, range(2), section=section, plugins=streams(3))
    make_loader(DataConfig(path=text.path.removeprefix("file://"), prefetch=0), range(2), plugins=streams(3))


@pytest.mark.parametrize("section", ["data", "validation"])
def test_check_says_that_the_ranks_do_not_divide_the_streams(text: DataConfig, tmp_path: Path, section: str) -> None:
    options = ["--data.path", text.path.removeprefix("file://"), "--validation.enable", f"--{section}.path", text.path]
    options += ["--validation.path", text.path] * (section == "data")
    options += ["--job.device", "cpu", "--job.dump_folder", str(tmp_path / "run"), "--model.flavor", "debugmodel"]
    options += ["--training.global_batch_size", "8", "--training.local_batch_size", "2", "--training.seq_len", "32"]
    config = parse([*options, "--remote_data.streams", "3"])
    check_run(config, 2)
    with pytest.raises(DataError, match=rf"^{section}.path = .* is streamed in 2 streams, .*; the number of data-par"):
        check_run(config, 4)


def test_run_does_not_resume_with_another_number_of_streams(text: DataConfig, tmp_path: Path) -> None:
    """It ends before training with one message; more streams than rows of the batch are as many as before."""
    options = ["--data.path", text.path, "--training.steps"]
    finish(tmp_path / "run", *options, "2", ranks=1)
    before = read_metrics(tmp_path / "run")
    run = ForkedRun(tmp_path / "run", *options, "3", "--remote_data.streams", "2")
    assert run.wait() == [DataError.exit_code] * 2, run.output()
    assert "Traceback" not in run.output()
    [message] = [line for line in run.output().splitlines() if "is not one of 2 streams" in line]
    assert "resume with the same remote_data.streams" in message
    assert read_metrics(tmp_path / "run") == before
    assert "resumed from" in finish(tmp_path / "run", *options, "3", "--remote_data.streams", "4", ranks=1)


def test_stream_without_resume_rejects_another_batch(text: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedTextStream, "resume", Stream.resume)
    with pytest.raises(DataError, match=r"PackedTextStream cannot continue with another training.global_batch_size"):
        resumed(loader(text), loader(text, batch=8))


@pytest.mark.parametrize("when", ["repeat", "stop"])
def test_numbers_of_a_saved_position_that_no_run_has_are_one_error(text: DataConfig, when: Any) -> None:
    """Or a position like any other."""
    config = replace(text, when_exhausted=when)
    first = loader(config, batch=2, most=1)
    next(first)
    saved, errors = first.state_dict()["rows"], 0
    for column in range(2, saved.shape[1]):
        for number in (-1, 0, 10**15, 2**63 - 1):
            rows = saved.clone()
            rows[:, column] = number
            other = loader(config, batch=2, most=1)
            try:
                other.load_state_dict({"rows": rows})
                next(other, None)
                other.state_dict()
            except DataError:
                errors += 1
    assert errors >= 2 * 4 + 1


def test_best_fit_is_rejected(text: DataConfig) -> None:
    with pytest.raises(DataError, match=r"data.packing = 'best_fit' .*set it to 'cut'"):
        make_loader(replace(text, packing="best_fit"))


# Places, and excluded documents.


def place_to_text(place: Place, content: bytes) -> str:
    number = int(place.position.split()[-1])
    line = content[number:].split(b"\n")[0] if "byte" in place.position else content.split(b"\n")[number - 1]
    text: str = json.loads(line)["text"]
    return text


@pytest.mark.parametrize("kind", ["jsonl", pytest.param("jsonl.gz", marks=pytest.mark.slow)])
def test_pieces_of_a_row_are_its_tokens(tmp_path: Path, kind: str) -> None:
    """Also in later epochs; and the documents of ``data.exclude`` are masked there, and no other token."""
    content = content_of("a.jsonl", DOCUMENTS)
    file = tmp_path / f"a.{kind}"
    file.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    config = DataConfig(path=file.as_uri(), prefetch=0)
    located, plain = loader(config, most=2), loader(config, most=2)
    excluded = {text_hash(text) for text in DOCUMENTS[::5]}
    (tmp_path / "exclude.jsonl").write_text("".join(f'{{"text_hash": "{digest}"}}\n' for digest in excluded))
    without = loader(replace(config, exclude=str(tmp_path / "exclude.jsonl")), most=2)
    met = 0
    for _ in range(100):
        of_rows, before, batch, rest = located.locate(), without.locate(), next(plain), next(without)
        assert torch.equal(next(located).tokens, batch.tokens)
        for row, (pieces, of_exclude) in enumerate(zip(of_rows, before, strict=True)):
            assert pieces is not None
            assert of_exclude is not None
            tokens, is_excluded = list[int](), list[bool]()
            for piece, other in zip(pieces, of_exclude, strict=True):
                text = place_to_text(piece.place, content)
                assert piece.place.file == file.as_uri()
                assert text_hash(text) == piece.text_hash
                assert other == replace(piece, is_excluded=piece.text_hash in excluded)
                tokens += TOKENIZER.encode(text, bos=True, eos=True)[piece.offset : piece.offset + piece.tokens]
                is_excluded += [other.is_excluded] * piece.tokens
            assert tokens == [*batch.tokens[row].tolist(), int(batch.labels[row, -1])]
            masked = torch.tensor(is_excluded[1:])
            assert torch.equal(rest.labels[row], batch.labels[row].masked_fill(masked, IGNORE_INDEX))
            met += int(masked.sum())
    assert met > 100


# Held-out documents.


def documents_in(loader: DataLoader) -> set[str]:
    """The texts of all batches of a loader of one row, without repetition."""
    tokens = torch.cat([batch.tokens[batch.labels != IGNORE_INDEX] for batch in loader]).tolist()
    return set(TOKENIZER.decode([token for token in tokens if token != TOKENIZER.bos_id]).split("end\n"))


def read_once(config: DataConfig, *, held_out: bool = False) -> set[str]:
    return documents_in(make_loader(config, range(1), batch=1, seq_len=20_000, drop_last=False, held_out=held_out))


@pytest.fixture
def jsonl(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "text.jsonl", [*DOCUMENTS, None, "", DOCUMENTS[3], DOCUMENTS[5]])


def source_of(kind: str, folder: Path, jsonl: str) -> SourceConfig:
    """The documents of the file ``jsonl`` as a source of which ``SHARE`` is held out."""
    if kind == "hub":
        return SourceConfig(name=write_hub_folder(folder / "hub", DOCUMENTS, files=3), held_out=SHARE)
    if kind == "compressed":
        (folder / "text.jsonl.gz").write_bytes(gzip.compress(Path(jsonl).read_bytes()))
        return SourceConfig(path=(folder / "text.jsonl.gz").as_uri(), held_out=SHARE)
    return SourceConfig(path=Path(jsonl).as_uri() if kind == "streamed" else jsonl, held_out=SHARE)


def divided(documents: list[str]) -> tuple[set[str], set[str]]:
    """Those that are trained on, and those that are held out."""
    kept = {document.removesuffix("end\n") for document in documents if not is_held_out(document, SHARE)}
    return kept, {document.removesuffix("end\n") for document in documents} - kept


@pytest.mark.parametrize("kind", ["streamed", "compressed", "hub"])
def test_held_out_documents_are_not_trained_on(kind: str, tmp_path: Path, jsonl: str) -> None:
    """The same documents, however they are stored."""
    config = DataConfig(**vars(source_of(kind, tmp_path, jsonl)), when_exhausted="stop", prefetch=0)
    trained, held_out = (read_once(config, held_out=held_out) for held_out in (False, True))
    kept, others = divided(DOCUMENTS)
    assert len(kept) > len(others) > 10
    assert trained & (kept | others) == kept
    assert held_out & (kept | others) == others


@pytest.mark.parametrize("kind", ["streamed", "compressed", "hub"])
def test_held_out_documents_are_not_trained_on_from_another_source(kind: str, tmp_path: Path, jsonl: str) -> None:
    """Also if that source holds out a smaller share, or none."""
    other = replace(source_of(kind, tmp_path, jsonl), held_out=0.0)
    source = SourceConfig(path=write_jsonl(tmp_path / "own.jsonl", DOCUMENTS), held_out=SHARE)
    config = DataConfig(sources=(other, source, replace(source, held_out=0.1)), when_exhausted="stop", prefetch=0)
    kept, others = divided(DOCUMENTS)
    assert read_once(config) & (kept | others) == kept


def test_document_with_a_lone_surrogate_has_the_same_hash_in_all_data(tmp_path: Path) -> None:
    """JSON can contain one."""
    documents = [f"item {number} \ud83d of text {number * 7}end\n" for number in range(100)]
    path = write_jsonl(tmp_path / "text.jsonl", documents)
    found = [
        read_once(DataConfig(**vars(source_of(of, tmp_path, path)), when_exhausted="stop", prefetch=0), held_out=True)
        for of in ("local", "streamed")
    ]
    assert len(found[0]) > 10
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["streamed", "compressed"])
def test_order_without_the_held_out_documents_resumes_and_has_any_layout(kind: str, tmp_path: Path, jsonl: str) -> None:
    """In the third epoch, too."""
    config = DataConfig(**vars(source_of(kind, tmp_path, jsonl)), prefetch=0)
    whole, *halves = (make_loader(config, rows, plugins=streams(4)) for rows in (range(8), range(4), range(4, 8)))
    before = take(whole, 30)
    assert torch.equal(before, torch.cat([take(half, 30) for half in halves], dim=1))
    state, other = whole.state_dict(), make_loader(config, plugins=streams(4))
    other.load_state_dict(state)
    assert torch.equal(take(other, 5), take(whole, 5))
    assert len(before.flatten()) > 2 * sum(len(TOKENIZER.encode(text, bos=True, eos=True)) for text in DOCUMENTS)
    rows = [TOKENIZER.decode(row.tolist()) for row in before.transpose(0, 1).reshape(-1, 32)]
    for document in filter(lambda document: is_held_out(document, SHARE), DOCUMENTS):
        start = " ".join(document.split()[:2])
        assert [row for row in rows if f"{start} " in row or f"{start}\n" in row] == []


def test_held_out_documents_are_found_in_a_bounded_part_of_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_parts, "PART_BYTES", 20_000)
    documents = [f"document {n} " + "words " * 30 for n in range(4000)]
    source = opened(SourceConfig(path=Path(write_jsonl(tmp_path / "long.jsonl", documents)).as_uri()))
    assert source.parts > 30
    read: list[int] = []
    one = StreamedText.read

    def counted(self: StreamedText, part: int, start: int) -> Iterator[tuple[int, str | None]]:
        for number, text in one(self, part, start):
            read.append(len(text or ""))
            yield number, text

    monkeypatch.setattr(StreamedText, "read", counted)
    held_out = [document for document in documents if is_held_out(document, 0.01)]
    everything = find_held_out(source, 0.01, 1e12)
    assert sorted(everything) == sorted(held_out)
    assert sum(read) == sum(map(len, documents))
    read.clear()
    some = find_held_out(source, 0.01, 200_000)
    assert 200_000 <= sum(read) <= 200_000 + source.parts * max(map(len, documents))
    assert 0 < len(some) < len(everything)
    assert set(some) < set(everything)
    read.clear()
    many = find_held_out(source, 0.9, 200_000)
    assert sum(map(len, many)) <= 200_000 / 16 + source.parts * max(map(len, documents))
    assert sum(read) < 30_000


def test_source_without_held_out_documents_is_trained_on_and_not_validated_on(tmp_path: Path) -> None:
    path = Path(write_jsonl(tmp_path / "one.jsonl", DOCUMENTS[:1])).as_uri()
    config = DataConfig(path=path, held_out=1e-6, when_exhausted="stop")
    make_loader(config)
    with pytest.raises(DataError, match=r"data.held_out = 1e-06 holds out none of the documents of .* that were read"):
        make_loader(config, held_out=True)


@pytest.mark.parametrize("runs", [(2,), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_run_validates_on_what_it_holds_out(tmp_path: Path, jsonl: str, runs: tuple[int, ...]) -> None:
    """On any ranks."""
    options = ["--data.path", Path(jsonl).as_uri(), "--data.held_out", "0.3", "--training.steps", "2"]
    options += ["--validation.interval", "2", "--data.label", "text"]
    texts = [text for text in [*DOCUMENTS, DOCUMENTS[3], DOCUMENTS[5]] if is_held_out(text, SHARE)]
    tokens = sum(len(TOKENIZER.encode(document, bos=True, eos=True)) for document in texts) - 1
    losses = []
    for ranks in runs:
        log = finish(tmp_path / str(ranks), *options, ranks=ranks)
        assert "validation   30.00% of text, every 2 steps and at the end" in log
        lines = [line for line in read_metrics(tmp_path / str(ranks)) if "validation_loss" in line]
        assert [(line["step"], line["validation_tokens"]) for line in lines] == [(2, tokens)]
        losses.append([line["validation_loss"] for line in lines])
    assert losses[0] == pytest.approx(losses[-1], rel=1e-5)


# The log.


def test_log_says_what_tokens_would_take_once_for_the_data_of_training(jsonl: str) -> None:
    size = Path(jsonl).stat().st_size / 2**30
    with captured_log() as log:
        make_loader(DataConfig(path=Path(jsonl).as_uri(), held_out=SHARE, prefetch=0))
        make_loader(DataConfig(path=Path(jsonl).as_uri(), held_out=SHARE, prefetch=0), held_out=True)
        make_loader(DataConfig(path=Path(jsonl).as_uri(), prefetch=0), section="validation")
    found = [line for line in log if "torchtrain.prepare" in line]
    expected = f"about {size:.3g} GiB of text are streamed; tokenized first, they would take about {size / 2:.3g} GiB: "
    assert found == [
        f"data.path = '{Path(jsonl).as_uri()}': {expected}"
        "python -m torchtrain.prepare --job.config_file ... --prepare.output FOLDER"
    ]


def test_resume_logs_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_text, "SHUFFLED_DOCUMENTS", 2)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(content_of("a.jsonl.gz", DOCUMENTS))
    config = DataConfig(path=path.as_uri(), prefetch=0)
    with captured_log() as log:
        old = make_loader(config, plugins=streams(2))
        take(old, 2)
        assert "up to document" not in "\n".join(log)
        new = make_loader(config, plugins=streams(2))
        new.load_state_dict(old.state_dict())
        take(new, 1)
    assert re.search(
        rf"reading {path.as_uri()}, part \d of 2 up to document \d+, where the run resumes", "\n".join(log)
    )
    assert ": reached it after " in "\n".join(log)
