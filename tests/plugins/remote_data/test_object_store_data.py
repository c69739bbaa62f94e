"""Data on object stores: the same batches as from local files, read by ranges; errors and retries."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from data_samples import DOCUMENTS, TOKENIZER, make_loader, take, write_hub_folder, write_jsonl, write_tokens

from torchtrain.datasets import text_input, tokenize_text
from torchtrain.datasets.build import open_source
from torchtrain.datasets.data_source import SourceContext
from torchtrain.datasets.local_files import open_text_files
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.datasets.token_folder import open_folder
from torchtrain.errors import ConfigError, DataError, StorageError
from torchtrain.plugins.object_storage.object_store import open_file_system, with_store_retries
from torchtrain.plugins.remote_data.sources import RemoteFiles

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from s3_server import S3Server

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::ResourceWarning")


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torchtrain.plugins.object_storage.object_store.time.sleep", lambda _: None)
    return s3_server


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return Path(write_tokens(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)))


def upload(s3: S3Server, folder: Path, prefix: str) -> str:
    for file in folder.iterdir():
        s3.upload("bucket", f"{prefix}/{file.name}", file.read_bytes())
    return f"s3://bucket/{prefix}"


@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_tokenized_data_give_the_same_batches_from_s3(s3: S3Server, tokens: Path, prefetch: int) -> None:
    url = upload(s3, tokens, "tokens")
    local = make_loader(DataConfig(path=str(tokens)))
    remote = make_loader(DataConfig(path=url, prefetch=prefetch))
    assert remote.identity == local.identity
    expected = take(local, 12)  # several epochs
    assert torch.equal(take(remote, 5), expected[:5])
    state = remote.state_dict()
    remote.close()
    resumed = make_loader(DataConfig(path=f"{url}/", prefetch=prefetch), range(4, 8))
    resumed.load_state_dict({"rows": state["rows"][4:]})
    assert torch.equal(take(resumed, 7), expected[5:, 4:])
    resumed.close()


def test_tokenized_data_are_read_by_exact_ranges_and_ahead(
    s3: S3Server, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = upload(s3, tokens, "ranges")
    file_system, _ = open_file_system(url, "data.path")
    read: list[int] = []
    cat_file = file_system.cat_file

    def count(path: str, **options: Any) -> bytes:
        content: bytes = cat_file(path, **options)
        read.append(len(content))
        return content

    def read_batches(prefetch: int, batches: int) -> int:
        loader = make_loader(DataConfig(path=url, prefetch=prefetch), range(2), batch=2)
        read.clear()
        for _ in range(batches):
            loader._read()
        for future in loader.streams[0]._source.folder._pending.values():  # type: ignore[attr-defined]
            future.result()
        return sum(read)

    monkeypatch.setattr(file_system, "cat_file", count)
    used = 4 * 2 * 33 * 2
    assert read_batches(prefetch=0, batches=4) == used
    assert read_batches(prefetch=3, batches=1) == used  # three batches are read ahead


def test_errors_of_urls_name_the_way_out(s3: S3Server, tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"data.path = 'nowhere://x' has the unknown scheme 'nowhere'"):
        make_loader(DataConfig(path="nowhere://x"))
    with pytest.raises(ConfigError, match=r"data.path is a URL with a password in it"):
        make_loader(DataConfig(path="s3://key:secret@bucket/x"))
    with pytest.raises(DataError, match=r"data.path = 's3://no-such-bucket/x' (does not exist|has no manifest)"):
        make_loader(DataConfig(path="s3://no-such-bucket/x"))
    url = upload(s3, tokens, "gone")
    loader = make_loader(DataConfig(path=url, prefetch=0))
    client = s3.client()
    shrunk = next(key for key in s3.objects("bucket", "gone/") if key.endswith(".tokens"))
    s3.upload("bucket", f"gone/{shrunk}", b"xx")
    with pytest.raises(DataError, match=r"gone/shard-\d+.tokens has 2 bytes, and was longer when the run began"):
        next(loader)
    for key in s3.objects("bucket", "gone/"):
        client.delete_object(Bucket="bucket", Key=f"gone/{key}")
    with pytest.raises(DataError, match=r"gone/shard-\d+.tokens existed when the run began, and is missing now"):
        next(loader)

    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ConfigError, match=r"not installed: pip install 's3fs>="):
        make_loader(DataConfig(path=url))


class Response:
    def __init__(self, status: int) -> None:
        self.status_code = status


class HTTPError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.response = Response(status)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (HTTPError(503), StorageError),
        (HTTPError(429), StorageError),
        (ConnectionResetError(104, "reset by peer"), StorageError),
        (TimeoutError(), StorageError),
        (OSError(16, "Please reduce your request rate"), StorageError),
        (HTTPError(403), ConfigError),
        (PermissionError("Access Denied"), ConfigError),
        (OSError(22, "The specified bucket is not valid"), ConfigError),
        (FileNotFoundError("x"), FileNotFoundError),
        (ZeroDivisionError(), ZeroDivisionError),
    ],
)
def test_transient_errors_are_retried_and_others_raised(
    error: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("torchtrain.plugins.object_storage.object_store.time.sleep", pauses.append)
    failures = [error, error]

    def request() -> str:
        if failures:
            raise failures.pop()
        return "content"

    if expected is StorageError:
        assert with_store_retries(request, "s3://bucket/a") == "content"
        assert pauses == [1, 2]
        failures[:] = [error] * 99
        with pytest.raises(StorageError, match="s3://bucket/a: the store does not respond"):
            with_store_retries(request, "s3://bucket/a")
        assert math.isclose(sum(pauses), 3 + 243)
    else:
        with pytest.raises(expected):
            with_store_retries(request, "s3://bucket/a")
        assert pauses == []


@pytest.mark.usefixtures("s3")
def test_missing_credentials_are_a_config_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not os.path.exists(tmp_path / ".aws")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(ConfigError, match=r"s3://bucket/tokens: access is denied: .*credentials"):
        make_loader(DataConfig(path="s3://bucket/tokens"))
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.mark.parametrize("kind", [pytest.param("jsonl", marks=pytest.mark.slow), "parquet"])
def test_text_of_s3_is_streamed_like_a_dataset_of_the_hub(s3: S3Server, tmp_path: Path, kind: str) -> None:
    folder = Path(write_hub_folder(tmp_path / "texts", DOCUMENTS, files=4, kind=kind))
    url = upload(s3, folder, f"texts-{kind}")
    s3.upload("bucket", f"texts-{kind}/README.md", b"about")
    s3.upload("bucket", f"texts-{kind}/.cache/a.jsonl", b"{}")
    expected = make_loader(DataConfig(name=str(folder)))
    loaders = [
        make_loader(DataConfig(path=path))
        for path in (url, f"{url}/train-*.{kind}", tuple(f"{url}/train-{n}.{kind}" for n in range(4)), folder.as_uri())
    ]
    batches = take(expected, 4)
    for loader in loaders:
        assert torch.equal(take(loader, 4), batches)
    state = loaders[0].state_dict()
    resumed = make_loader(DataConfig(path=url))
    resumed.load_state_dict(state)
    assert torch.equal(take(resumed, 2), take(expected, 2))
    for loader in (expected, resumed, *loaders):
        loader.close()


def test_identity_of_a_url_is_its_listing(s3: S3Server) -> None:
    content = b"".join(b'{"text": "document %d"}\n' % number for number in range(60))
    for name in ("a", "b"):
        s3.upload("bucket", f"listing/{name}.jsonl", content)

    def identity() -> str:
        source = open_source(SourceConfig(path="s3://bucket/listing"), SourceContext("data", TOKENIZER))
        return source.identity()

    before = identity()
    assert before.startswith(f"2 object(s) of {2 * len(content):,} bytes, hash of the listing ")
    assert identity() == before
    s3.upload("bucket", "listing/a.jsonl", content.replace(b"document 1}", b"document 2}").replace(b"59", b"60"))
    assert identity() != before


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "does not exist: there is no such bucket, folder or file"),
        (("a.bin",), "is a folder without data files"),
        (("a.jsonl", "b.parquet"), r"mixes files of several formats \(.jsonl, .parquet\)"),
        (("inner/manifest.json",), "contains a folder of tokens"),
        (("unfinished.json",), "contains a folder of tokens, or of unfinished work"),
    ],
)
def test_urls_without_text_raise_a_data_error(s3: S3Server, names: tuple[str, ...], message: str) -> None:
    prefix = f"wrong-{len(names)}-{'-'.join(names).replace('/', '-')}"
    for name in names:
        s3.upload("bucket", f"{prefix}/{name}", b"content")
    with pytest.raises(DataError, match=message):
        make_loader(DataConfig(path=f"s3://bucket/{prefix}"))


def test_missing_column_of_a_url_is_an_error_before_training(s3: S3Server) -> None:
    s3.upload("bucket", "column/a.jsonl", b'{"content": "text"}\n')
    with pytest.raises(DataError, match=r"column/a.jsonl: it has no column 'text' \(text_column\)"):
        make_loader(DataConfig(path="s3://bucket/column"))
    with pytest.raises(DataError, match="mixes URLs and local paths"):
        make_loader(DataConfig(path=("s3://bucket/column", "a.jsonl")))
    with pytest.raises(DataError, match="mixes URLs of several file systems"):
        make_loader(DataConfig(path=("s3://bucket/column", "file:///a.jsonl")))


@pytest.mark.parametrize("kind", [pytest.param("jsonl", marks=pytest.mark.slow), "parquet"])
def test_tokenizing_from_s3_to_s3_writes_the_same_bytes(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(text_input, "MIN_SHARD_BYTES", 2000)
    folder = Path(write_hub_folder(tmp_path / "texts", DOCUMENTS, files=3, kind=kind))
    write_tokens(tmp_path / "local", str(folder))
    expected = {file.name: file.read_bytes() for file in (tmp_path / "local").glob("shard-*")}
    assert len(expected) > 4
    source = SourceConfig(path=upload(s3, folder, f"input-{kind}"))
    output = f"s3://bucket/output-{kind}"

    def share(rank: int, world_size: int, location: str = output) -> bool:
        text = RemoteFiles.open_text(source, SourceContext("data", TOKENIZER))
        to_folder = open_folder(location, "prepare.output")
        return tokenize_text.tokenize(text, TOKENIZER, to_folder, 1, rank=rank, world_size=world_size) is not None

    assert not share(1, 2)
    written = s3.objects("bucket", f"output-{kind}/")
    lost = next(name for name in written if name.endswith(".tokens"))
    s3.upload("bucket", f"output-{kind}/{lost}", b"")  # is written again, because of its size
    assert [share(0, 2), share(1, 2), share(0, 2)] == [False, True, True]
    objects = s3.objects("bucket", f"output-{kind}/")
    manifest, files = json.loads(objects.pop("manifest.json")), json.loads(objects.pop("files.json"))
    assert objects == expected
    assert manifest["shards"] == json.loads((tmp_path / "local/manifest.json").read_bytes())["shards"]
    assert files == [f"{source.path}/train-{number}.{kind}" for number in range(3)]
    local, remote = make_loader(DataConfig(path=str(tmp_path / "local"))), make_loader(DataConfig(path=output))
    assert torch.equal(take(local, 3), take(remote, 3))
    remote.close()
    with pytest.raises(DataError, match="begun with other data"):
        tokenize_text.tokenize(open_text_files([str(folder)]), TOKENIZER, open_folder(output), 1)
    with pytest.raises(ConfigError, match=r"prepare.output = 's3://missing/out' cannot be written: there is no such"):
        share(0, 1, "s3://missing/out")


def test_full_temporary_disk_is_not_reported_as_a_full_bucket(s3: S3Server) -> None:  # noqa: ARG001
    folder = open_folder("s3://bucket/full", "prepare.output")
    with (  # noqa: PT012
        pytest.raises(DataError, match=r", which holds each file of s3://bucket/full until it is uploaded, is full"),
        folder.write("shard") as file,
    ):
        file.write(b"tokens")
        raise OSError(errno.ENOSPC, "No space left on device")
