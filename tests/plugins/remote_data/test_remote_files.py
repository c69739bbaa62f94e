"""Data on file systems of fsspec, here in memory: verification, changed objects, hosts in URLs, encodings."""

import gzip
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from data_samples import DOCUMENTS, TOKENIZER, make_loader, take, write_jsonl, write_tokens
from fsspec.implementations.memory import MemoryFileSystem

from torchtrain.checkpoint.local_storage import LocalStorage
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.storage import open_storage
from torchtrain.config.registry import DATA_SOURCES
from torchtrain.datasets import text_input, tokenize_text
from torchtrain.datasets.data_source import SkippedText, SourceContext
from torchtrain.datasets.dataloader import DataLoader
from torchtrain.datasets.file_formats import NotUTF8Error
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.datasets.text_input import LocalFile
from torchtrain.datasets.token_folder import LocalFolder, TokenManifest, open_folder, verify
from torchtrain.errors import ConfigError, DataError
from torchtrain.files import local_path, scheme_of
from torchtrain.plugins.object_storage.object_store import open_file_system
from torchtrain.plugins.object_storage.storage import ObjectStorage
from torchtrain.plugins.remote_data import file_parts, remote_folder
from torchtrain.plugins.remote_data.remote_files import (
    ListedFile,
    RemoteFile,
    find_remote_files,
    identify_listing,
    open_ranges,
)
from torchtrain.plugins.remote_data.sources import RemoteFiles
from torchtrain.plugins.remote_data.streamed_text import StreamedText


def opened_text(source: SourceConfig, readers: int = 1) -> StreamedText:
    context = SourceContext("data", TOKENIZER, global_batch_size=readers)
    opened = RemoteFiles.open(source, context, RemoteFiles.query_on_rank0(source, context))
    assert isinstance(opened, StreamedText)
    return opened


def tokenize(source: SourceConfig, location: Path | str, rank: int = 0, world_size: int = 1) -> TokenManifest | None:
    """As torchtrain.prepare does in one of its processes."""
    text = RemoteFiles.open_text(source, SourceContext("data", TOKENIZER))
    if isinstance(location, Path):
        location.mkdir(exist_ok=True)
    return tokenize_text.tokenize(text, TOKENIZER, open_folder(location), 1, rank=rank, world_size=world_size)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    monkeypatch.setattr("torchtrain.plugins.object_storage.object_store.time.sleep", lambda _: pytest.fail("retried"))
    file_system, _ = open_file_system("memory://", "data.path")
    yield file_system
    file_system.store.clear()


@pytest.fixture
def tokens(tmp_path: Path, memory: MemoryFileSystem) -> str:
    """A folder of tokens, by URL."""
    folder = Path(write_tokens(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", DOCUMENTS * 10)))
    for file in folder.iterdir():
        memory.pipe_file(f"/tokens/{file.name}", file.read_bytes())
    return "memory://tokens"


def test_verify_names_a_damaged_short_or_missing_object(
    tokens: str, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_folder, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(memory, "ls", lambda *_, **__: pytest.fail("one listing for each file"))
    folder, name = open_folder(tokens), "shard-00000.tokens"
    verify(folder, tokens)
    whole = memory.cat_file(f"/tokens/{name}")
    for content in (bytes([whole[0] ^ 1]) + whole[1:], whole[:-2], whole + b"\0\0"):
        memory.pipe_file(f"/tokens/{name}", content)
        with pytest.raises(DataError, match=rf"{name} is damaged or missing"):
            verify(folder, tokens)
    memory.rm_file(f"/tokens/{name}")
    with pytest.raises(DataError, match=rf"{name} is damaged or missing"):
        verify(folder, tokens)


def test_truncated_answer_is_requested_again_while_an_object_is_verified(
    tokens: str, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    cat_file, cut, pauses = memory.cat_file, [True], list[float]()

    def cat_less(path: str, **options: Any) -> bytes:
        content: bytes = cat_file(path, **options)
        return content[:-1] if path.endswith(".tokens") and cut and cut.pop() else content

    monkeypatch.setattr(memory, "cat_file", cat_less)
    monkeypatch.setattr("torchtrain.plugins.object_storage.object_store.time.sleep", pauses.append)
    verify(open_folder(tokens), tokens)
    assert len(pauses) == 1


def test_object_that_shrinks_during_a_run_is_a_data_error(tokens: str, memory: MemoryFileSystem) -> None:
    loader = make_loader(DataConfig(path=tokens, prefetch=0))
    for name in memory.ls("/tokens", detail=False):
        if name.endswith(".tokens"):
            memory.pipe_file(name, b"")
    with pytest.raises(DataError, match=r"shard-\d+.tokens has 0 bytes, and was longer when the run began"):
        next(loader)


def test_object_that_changes_while_it_is_tokenized_is_a_data_error(
    memory: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = Path(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)).read_bytes()
    memory.pipe_file("/texts/a.jsonl", content)
    run = tokenize_text._run

    def change_after(*arguments: Any) -> None:
        run(*arguments)
        memory.pipe_file("/texts/a.jsonl", content)

    source = SourceConfig(path="memory://texts")
    with monkeypatch.context() as patch:
        patch.setattr(tokenize_text, "_run", change_after)
        with pytest.raises(DataError, match=r"data.path = 'memory://texts' changed while it was tokenized"):
            tokenize(source, tmp_path / "out")
    with pytest.raises(DataError, match="content of its files has changed since"):
        tokenize(source, tmp_path / "out")
    assert tokenize(source, tmp_path / "new") is not None


@pytest.mark.parametrize("kind", ["tokens", pytest.param("documents", marks=pytest.mark.slow)])
def test_shard_that_the_store_has_kept_short_is_written_again(
    memory: MemoryFileSystem, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a run does not read it."""
    monkeypatch.setattr(text_input, "MIN_SHARD_BYTES", 1 << 15)
    lines = "".join(json.dumps({"text": f"document {n} " + "words " * 12}) + "\n" for n in range(2000))
    memory.pipe_file("/texts/a.jsonl", lines.encode())
    source = SourceConfig(path="memory://texts")
    assert tokenize(source, "memory://out", 1, 2) is None
    name = next(name for name in memory.ls("/out", detail=False) if name.endswith(f".{kind}"))
    whole = memory.cat_file(name)

    def damage(content: bytes | None) -> None:
        memory.rm_file(name) if content is None else memory.pipe_file(name, content)

    for content in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"x", None):
        damage(content)
        assert tokenize(source, "memory://out", 1, 2) is None
        assert memory.cat_file(name) == whole
    damage(b"")
    assert tokenize(source, "memory://out", 0, 2) is None  # the last process does not write the manifest
    assert tokenize(source, "memory://out", 1, 2) is not None
    make_loader(DataConfig(path="memory://out", prefetch=0))
    size, short = len(whole), whole[:-1]
    for content, found in ((short, f"has {size - 1} bytes, not"), (b"", "has 0 bytes, not"), (None, "is missing")):
        damage(content)
        with pytest.raises(DataError, match=rf"{Path(name).name} {found}"):
            make_loader(DataConfig(path="memory://out", prefetch=0))


class HostedFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A file system whose URLs name a host, which its paths do not contain, as sftp://."""

    protocol = "hosted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def __init__(self, host: str, **options: Any) -> None:
        assert host == "server"
        super().__init__(**options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        is_url = path.startswith("hosted://")
        return MemoryFileSystem._strip_protocol(path.removeprefix("hosted://").partition("/")[2] if is_url else path)

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        return {"host": path.removeprefix("hosted://").partition("/")[0]} if path.startswith("hosted://") else {}


def test_urls_with_a_host_are_read_from_that_host(tmp_path: Path) -> None:
    fsspec.register_implementation("hosted", HostedFileSystem, clobber=True)
    hosted = HostedFileSystem("server")
    (tmp_path / "texts").mkdir()
    for number in range(2):
        path = Path(write_jsonl(tmp_path / f"texts/{number}.jsonl", DOCUMENTS[number::2]))
        hosted.pipe_file(f"/texts/{path.name}", path.read_bytes())
    expected = take(make_loader(DataConfig(path=(tmp_path / "texts").as_uri(), prefetch=0)), 3)
    paths: list[Any] = ["hosted://server/texts", "hosted://server/texts/*.jsonl"]
    paths.append(("hosted://server/texts/0*", "hosted://server/texts/*"))  # 0.jsonl is found twice
    for path in paths:
        assert torch.equal(take(make_loader(DataConfig(path=path, prefetch=0)), 3), expected)
    with pytest.raises(DataError, match=r"hosted://server/texts/0.jsonl: it has no column 'other'"):
        make_loader(DataConfig(path="hosted://server/texts", text_column="other"))


@pytest.mark.parametrize("pattern", ["", "/*.jsonl", "/**/*.jsonl", "/*/*.jsonl"])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_hidden_files_are_left_out_of_folders_and_patterns(scheme: str, pattern: str, tmp_path: Path) -> None:
    """Such as copies that Jupyter and macOS make; a hidden folder that the path names is read."""
    folder = tmp_path / ".data" / "text"
    for name in ("a.jsonl", "._a.jsonl", ".ipynb_checkpoints/a-checkpoint.jsonl", "inner/b.jsonl", "inner/.b.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / name, [f"text of {name}"])
    config = DataConfig(path=f"{scheme}{folder}{pattern}", when_exhausted="stop", prefetch=0)
    batches = list(make_loader(config, range(1), batch=1, seq_len=2000, drop_last=False))
    found = set(re.findall("text of ([^<]*?jsonl)", TOKENIZER.decode(batches[0].tokens[0].tolist())))
    expected = {"": {"a.jsonl", "inner/b.jsonl"}, "/*.jsonl": {"a.jsonl"}, "/*/*.jsonl": {"inner/b.jsonl"}}
    assert found == expected.get(pattern, expected[""])


@pytest.mark.parametrize("name", ["web[1]/a.jsonl", "web[1]", "text [part 1].jsonl", "we[ab]/*.jsonl"])
def test_brackets_in_a_url_are_of_a_name_or_of_a_pattern(name: str, memory: MemoryFileSystem) -> None:
    for path in ("web[1]/a.jsonl", "text [part 1].jsonl", "web/a.jsonl"):
        memory.pipe_file(f"/data/{path}", json.dumps({"text": path}).encode())
    files = find_remote_files([f"memory://data/{name}"], "the data", "data.path")
    expected = {"web[1]": "web[1]/a.jsonl", "we[ab]/*.jsonl": "web/a.jsonl"}.get(name, name)
    assert [file.path for file in files] == [f"/data/{expected}"]
    with pytest.raises(DataError, match="the data does not exist"):
        find_remote_files(["memory://data/web[2]"], "the data", "data.path")


def test_case_of_a_scheme_does_not_matter(tmp_path: Path) -> None:
    url = f"FILE://{tmp_path}/a"
    assert scheme_of(url) == "file"
    assert scheme_of("a/b://c") == ""
    assert local_path(url) == local_path(f"file://{tmp_path}/a") == tmp_path / "a"
    assert local_path("S3://bucket/a") is None
    folder = open_folder(url)
    assert isinstance(folder, LocalFolder)
    assert folder.path == tmp_path / "a"
    storage = open_storage(CheckpointConfig(folder=url).location("unused"))
    assert isinstance(storage, LocalStorage)
    assert storage.folder == tmp_path / "a"
    assert isinstance(open_storage(CheckpointConfig(folder="S3://bucket/a").location("unused")), ObjectStorage)
    with pytest.raises(ConfigError, match="unknown"):
        CheckpointConfig(folder="UNKNOWN://bucket/a")


def test_streamed_files_that_are_not_utf8_are_skipped_and_counted(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "0.jsonl").write_bytes('{"text": "zwölf"}\n'.encode("latin-1"))
    for number in (1, 2):
        (texts / f"{number}.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    with (texts / "2.jsonl").open("ab") as file:
        file.write(b'{"text": "\xff"}\n')
    with pytest.raises(NotUTF8Error, match=r"0.jsonl: .*is not UTF-8"):
        opened_text(SourceConfig(path=texts.as_uri()))
    source = opened_text(SourceConfig(path=texts.as_uri(), skip_not_utf8=True))
    found = [[text for _, text in source.read(part, 0)] for part in (*range(3), *range(3))]
    assert found == [[], ["one", "two"], ["one", "two"]] * 2
    assert source.not_utf8 == {f"{texts.as_uri()}/{number}.jsonl" for number in (0, 2)}
    for name in ("1.jsonl", "2.jsonl"):
        shutil.copy(texts / "0.jsonl", texts / name)
    with pytest.raises(NotUTF8Error):
        opened_text(SourceConfig(path=texts.as_uri(), skip_not_utf8=True))


def test_identity_of_objects_depends_neither_on_their_bucket_nor_on_their_names() -> None:
    def identity(folder: str, tags: str = "xy", names: str = "ab") -> str:
        url = f"s3://{folder}"
        files = [
            ListedFile(f"{url}/{name}.jsonl", 5, tag, f"{folder}/{name}.jsonl", url)
            for name, tag in zip(names, tags, strict=True)
        ]
        return identify_listing(files, 0).text

    assert identity("one/texts") == identity("other")
    assert identity("one") == identity("one", names="ac")  # a renamed file
    assert len({identity("one"), identity("one", tags="xz"), identity("one", tags="yx")}) == 3
    assert identity("one", "x", "a") == identity("other", "x", "a")


def documents_in_order(loader: DataLoader, steps: int) -> list[int]:
    """The numbers of the documents that begin in the next ``steps`` batches."""
    return [
        int(number)
        for _ in range(steps)
        for row in next(loader).tokens.tolist()
        for number in re.findall(r"doc(\d{4}) ", TOKENIZER.decode(row))
    ]


def write_texts(path: Path, texts: list[str]) -> None:
    """Write a file of a format that is read in ranges (Parquet has one row group), or that is not (compressed)."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
        return
    write_jsonl(path, texts)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(path.read_bytes()))


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        *((1, "jsonl"), (1, "jsonl.gz"), (4, "parquet")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, "jsonl"), (20, "jsonl"), (1, "parquet"))),
    ],
)
def test_streamed_documents_are_shuffled_anew_in_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, kind: str
) -> None:
    """With fewer files than readers, and exactly again after a resume within a block, on any number of ranks."""
    monkeypatch.setattr(file_parts, "PART_BYTES", 4000)  # one file has more parts than there are readers
    texts = [f"doc{number:04d} {'word ' * 8}" for number in range(800)]
    for number in range(files):
        write_texts(tmp_path / f"part{number}.{kind}", texts[number::files])
    config = DataConfig(path=tmp_path.as_uri())
    loader = make_loader(config, seq_len=64)
    order = documents_in_order(loader, 60)
    first, second = order[:400], order[900:1300]
    assert len(set(first)) == 400
    shared = [number for number in first if number in set(second)]
    places = [[epoch.index(number) for number in shared] for epoch in (first, second)]
    assert abs(np.corrcoef(*places)[0, 1]) < 0.2
    assert abs(np.corrcoef(range(400), first)[0, 1]) < 0.2  # nor is the first epoch in the order of the files

    loader = make_loader(config, seq_len=64)
    take(loader, 7)
    state = loader.state_dict()
    expected = take(loader, 3)
    parts = []
    for rows in (range(4), range(4, 8)):
        resumed = make_loader(config, rows, seq_len=64)
        resumed.load_state_dict({"rows": state["rows"][rows.start : rows.stop]})
        parts.append(take(resumed, 3))
    assert torch.equal(torch.cat(parts, dim=1), expected)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_large_file_is_divided_among_its_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Each reads its own part of the file, and all parts together contain each document once."""
    # A request is not smaller than a document of a large text.
    monkeypatch.setattr("torchtrain.plugins.remote_data.remote_files.RANGE_BYTES", 1 << 15)
    monkeypatch.setattr("torchtrain.datasets.file_formats._BLOCK_BYTES", 1 << 13)
    monkeypatch.setattr(file_parts, "PART_BYTES", 1 << 20)
    texts = [f"doc{number:06d} {hashlib.sha512(bytes(number)).hexdigest() * 2}\n" for number in range(12_000)]
    path = tmp_path / f"corpus.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=250, compression=None)
    elif kind == "txt":
        path.write_text("".join(texts))
    else:
        write_jsonl(path, texts)
    fetched: list[int] = []
    read = RemoteFile._read

    def counted(*arguments: Any) -> bytes:
        fetched.append(arguments[-1] - arguments[-2])
        return read(*arguments)

    monkeypatch.setattr(RemoteFile, "_read", counted)
    source = opened_text(SourceConfig(path=path.as_uri()), readers=3)
    size = path.stat().st_size
    assert source.parts == (3 if kind == "parquet" else 6)  # a multiple of the readers, so that an epoch ends evenly
    fetched.clear()
    parts = [[text or "" for _, text in source.read(part, 0)] for part in range(source.parts)]
    assert "".join(itertools.chain.from_iterable(parts)) == "".join(texts)
    assert max(map(len, parts)) < 1.1 * min(map(len, parts)) + 3
    assert sum(fetched) < 1.5 * size


def test_closed_file_keeps_no_block_in_memory() -> None:
    file: Any = open_ranges("s3://bucket/a.jsonl", 100, lambda start, end: bytes(end - start))
    assert file.read(10) == bytes(10)
    cache = file.cache
    assert cache._fetch_block_cached.cache_info().currsize == 1
    file.close()
    assert cache._fetch_block_cached.cache_info().currsize == 0


def test_tokenizing_does_not_continue_with_other_options(
    memory: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of objects have no hash of the input. A folder is of one column, also when it is complete."""
    monkeypatch.setattr(text_input, "MIN_SHARD_BYTES", 1 << 15)
    documents = ({"text": f"document {n} " + "words " * 12, "title": f"title {n}"} for n in range(2000))
    memory.pipe_file("/texts/a.jsonl", "".join(json.dumps(document) + "\n" for document in documents).encode())
    source, folder = SourceConfig(path="memory://texts/a.jsonl"), tmp_path / "out"
    assert tokenize(source, folder, 0, 2) is None
    error = r"was begun with other options \(text_column = 'text', skip_not_utf8 = False, \d+ shards; now "
    for changed in (replace(source, skip_not_utf8=True), replace(source, text_column="title")):
        with pytest.raises(DataError, match=error):
            tokenize(changed, folder, 1, 2)
    manifest = tokenize(source, folder)
    assert manifest is not None
    assert sum(shard.documents for shard in manifest.shards) == 2000
    with pytest.raises(DataError, match=error):
        tokenize(replace(source, text_column="title"), folder)


@pytest.mark.parametrize(
    "name", ["a.parquet", *(pytest.param(f"a.{kind}", marks=pytest.mark.slow) for kind in ("jsonl", "jsonl.gz", "txt"))]
)
def test_text_by_url_is_tokenized_as_local_text(
    name: str, memory: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the same bytes, in the same shards; file:// is local text."""
    monkeypatch.setattr(text_input, "MIN_SHARD_BYTES", 1 << 15)
    path = tmp_path / name
    texts = [f"{number:05} {'words ' * 20}" for number in range(2000)]
    if name == "a.txt":
        path.write_text("\n".join(texts))
    else:
        write_texts(path, texts)
    memory.pipe_file(f"/texts/{name}", path.read_bytes())
    context = SourceContext("data", TOKENIZER)
    found = []
    for number, url in enumerate((path.as_uri(), f"memory://texts/{name}")):
        text = RemoteFiles.open_text(SourceConfig(path=url), context)
        assert [type(file) for file in text._files] == [RemoteFile if number else LocalFile]  # type: ignore[attr-defined]
        documents = [text.read(shard, SkippedText()) for shard in range(len(text.shard_sizes))]
        found.append([[document for *_, document in shard] for shard in documents])
        assert tokenize(SourceConfig(path=url), tmp_path / str(number)) is not None
    assert found[0] == found[1]
    assert "".join(text or "" for shard in found[0] for text in shard) == ("\n" if name == "a.txt" else "").join(texts)
    for file in (tmp_path / "0").glob("shard-*"):
        assert file.read_bytes() == (tmp_path / "1" / file.name).read_bytes()


def test_folder_of_tokens_is_not_tokenized_again(tokens: str) -> None:
    with pytest.raises(DataError, match=r"data.path = 'memory://tokens' is tokenized already: train on it"):
        RemoteFiles.open_text(SourceConfig(path=tokens), SourceContext("data", TOKENIZER))


def test_formats_of_a_folder_are_those_of_the_data(memory: MemoryFileSystem) -> None:
    """A list of patterns may have several; .md files are left out beside others."""
    line = json.dumps({"text": "text"}).encode()
    for name, content in (("a.jsonl", line), ("b/c.jsonl.gz", gzip.compress(line)), ("README.md", b"about")):
        memory.pipe_file(f"/mixed/{name}", content)

    def names(*paths: str) -> list[str]:
        return [file.path for file in find_remote_files(paths, "the data", "data.path")]

    assert names("memory://mixed") == ["/mixed/a.jsonl", "/mixed/b/c.jsonl.gz"]
    assert names("memory://mixed/*.md") == ["/mixed/README.md"]
    memory.pipe_file("/mixed/b/d.csv", b"text\n1\n")
    pattern = r'path = \["memory://mixed/\*\*/\*.csv\*", "memory://mixed/\*\*/\*.jsonl\*"\]'
    with pytest.raises(DataError, match=rf"mixes files of several formats \(.csv, .jsonl\).* {pattern}"):
        names("memory://mixed")
    both = names("memory://mixed/**/*.csv*", "memory://mixed/**/*.jsonl*")
    assert both == ["/mixed/b/d.csv", "/mixed/a.jsonl", "/mixed/b/c.jsonl.gz"]


def test_option_by_which_a_checkpoint_names_remote_data() -> None:
    """It is stored, so it must not change."""
    for source, option in ((SourceConfig(path="s3://bucket/a.txt"), "path"), (SourceConfig(name="org/data"), "name")):
        assert DATA_SOURCES[source.source_type].data_option(source) == option
