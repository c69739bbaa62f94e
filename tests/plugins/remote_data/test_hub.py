"""Datasets streamed from the hub give the same batches as local files, also when the network fails for a while."""

import gzip
import io
import json
import logging
import math
import os
import pickle
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
import torch
from data_samples import DOCUMENTS, make_loader, take
from forked_command import checked_command
from forked_run import ForkedRun, finish
from hub_server import Fault, Hub
from json_tokenizers import save_tokenizer

from torchtrain.checkpoint.resume_compatibility import differences
from torchtrain.config.parse import to_toml
from torchtrain.config.schema import DataConfig, JobConfig, SourceConfig
from torchtrain.datasets import packing, text_sources
from torchtrain.datasets.builtin_sources import pinned
from torchtrain.errors import DataError, StorageError
from torchtrain.plugins.remote_data import hub as client
from torchtrain.plugins.remote_data.hub import find_revision
from torchtrain.plugins.remote_data.streamed_text import StreamedText

CARD = b"""---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/c4-train.*.json.gz
  - split: validation
    path: en/c4-validation.*.json.gz
- config_name: de
  data_files: de/*.json.gz
---
# A corpus
"""
FILES = 4


def lines_of(documents: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "url": "https://example.org"}) + "\n" for text in documents).encode()


def c4(documents: list[str] = DOCUMENTS) -> dict[str, bytes]:
    """The layout of C4 on the hub: gzipped JSON, with a pattern in the card."""
    files = {
        f"en/c4-train.{n:05}-of-{FILES:05}.json.gz": gzip.compress(lines_of(documents[n::FILES]), mtime=0)
        for n in range(FILES)
    }
    return {
        "README.md": CARD,
        **files,
        "en/c4-validation.00000-of-00001.json.gz": gzip.compress(lines_of(documents[:3]), mtime=0),
        "de/c4-de.00000-of-00001.json.gz": gzip.compress(lines_of(["Text auf deutsch"]), mtime=0),
    }


def fineweb(documents: list[str] = DOCUMENTS) -> dict[str, bytes]:
    """The layout of FineWeb on the hub: Parquet files with several row groups."""
    files = {"README.md": b"---\nconfigs:\n- config_name: sample\n  data_files: sample/*\n---\n"}
    for n in range(FILES):
        content = io.BytesIO()
        table = pyarrow.table({"text": documents[n::FILES], "id": [str(k) for k in range(len(documents[n::FILES]))]})
        pyarrow.parquet.write_table(table, content, row_group_size=4)
        files[f"sample/{n:03}_00000.parquet"] = content.getvalue()
    return files


LAYOUTS: dict[str, tuple[dict[str, bytes], DataConfig]] = {
    "c4": (c4(), DataConfig(name="allenai/c4", subset="en", streams=2, prefetch=0)),
    "fineweb": (fineweb(), DataConfig(name="org/fineweb", subset="sample", streams=2, prefetch=0)),
}


def local_copy(folder: Path, files: dict[str, bytes]) -> str:
    """Write the files of the train split to a folder that ``datasets`` treats as a dataset."""
    folder.mkdir()
    for path, content in files.items():
        if "train" in path or "sample/" in path:
            (folder / path.rpartition("/")[2]).write_bytes(content)
    return str(folder)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses instead of sleeping, and set the timeouts of requests to half a second."""
    slept: list[float] = []
    monkeypatch.setattr(client.time, "sleep", slept.append)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_ETAG_TIMEOUT", 0.5)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    return slept


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_are_those_of_local_files(hub: Hub, tmp_path: Path, layout: str) -> None:
    files, config = LAYOUTS[layout]
    hub.add(config.name, files)
    local = make_loader(DataConfig(name=local_copy(tmp_path / "data", files), streams=2, prefetch=0))
    remote = make_loader(config)
    assert torch.equal(take(remote, 12), take(local, 12))
    resumed = make_loader(config)  # starts in the middle of files
    resumed.load_state_dict(remote.state_dict())
    assert torch.equal(take(resumed, 5), take(local, 5))
    downloaded = make_loader(DataConfig(name=config.name, subset=config.subset, download=True, prefetch=0))
    assert take(downloaded, 1).shape == (1, 8, 32)


FAULTS = [
    Fault("/tree/", 503),
    Fault("/resolve/", 429, times=3, seconds=11),
    Fault("README.md", 503, times=3),
    Fault("GET /files", "reset", times=2),
    Fault("GET /files", "short"),
    Fault("GET /files", "silence", seconds=2),
    Fault("GET /files", 500),
    Fault("GET /files", 429, seconds=7),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.where}-{fault.kind}".replace("/", ""))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_temporary_network_failure_does_not_change_the_batches(
    hub: Hub, layout: str, fault: Fault, pauses: list[float]
) -> None:
    files, config = LAYOUTS[layout]
    before, then = f"org/before-{layout}", f"org/{layout}-{FAULTS.index(fault)}"  # not in any cache
    expected = take(make_loader(replace(config, name=before, revision=hub.add(before, files))), 8)
    config = replace(config, name=then, revision=hub.add(then, files))
    hub.faults.append(replace(fault))
    assert torch.equal(take(make_loader(config), 8), expected)
    assert hub.faults[0].times < fault.times
    if fault.kind == 429 and "files" in fault.where:
        assert pauses[0] == 7  # possibly followed by others, because requests time out
    if fault.kind == "reset":
        assert pauses == [1, 2]


def test_permanent_network_failure_is_a_storage_error(hub: Hub, pauses: list[float]) -> None:
    files, config = LAYOUTS["c4"]
    hub.add(config.name, files)
    hub.faults.append(Fault("/api/", 503, times=10**9))
    with pytest.raises(StorageError, match=r"data.name = 'allenai/c4' .*does not respond: .*503 Service Unavailable"):
        find_revision(config, "data.name = 'allenai/c4' (subset 'en')")
    assert pauses == list(text_sources.PAUSES_SECONDS)
    hub.clear()
    hub.add(config.name, files)
    loader = make_loader(config)
    hub.faults.append(Fault("/files/", "reset", times=10**9))
    with pytest.raises(StorageError, match=r"at file \d of 4, document \d+: .*\.json\.gz: the hub or the network does"):
        take(loader, 12)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "org/nothing"}, "cannot open .*Not Found"),
        ({"subset": "fr"}, "cannot open .*'fr' not found. Available: .*'en', 'de'"),
        ({"split": "test"}, "has no such split; there are train, validation"),
        ({"revision": "f" * 40}, "cannot open .*Not Found"),
        ({"text_column": "body"}, "json.gz: it has no column 'body' .text_column.; its columns are text, url"),
    ],
)
def test_wrong_option_is_an_error_without_retries(
    hub: Hub, pauses: list[float], wrong: dict[str, str], message: str
) -> None:
    revision = hub.add("allenai/c4", c4())
    with pytest.raises(DataError, match=message):
        make_loader(DataConfig(**{"name": "allenai/c4", "subset": "en", "revision": revision, **wrong}))
    assert pauses == []


def test_damaged_file_is_an_error_without_retries(hub: Hub, pauses: list[float]) -> None:
    name = "en/c4-train.00003-of-00004.json.gz"
    hub.add("allenai/c4", {**c4(), name: c4()[name][:-20]})
    with pytest.raises(DataError, match=r"cannot continue to read .* at file 3 of 4, document \d+: EOFError"):
        take(make_loader(LAYOUTS["c4"][1]), 12)
    first = "en/c4-train.00000-of-00004.json.gz"
    hub.add("allenai/c4", {**c4(), first: b"no gzip"})
    with pytest.raises(DataError, match=r"cannot open data.name = 'allenai/c4' .*: Not a gzipped file"):
        make_loader(LAYOUTS["c4"][1])
    assert pauses == []


def test_token_is_sent_to_the_hub_only(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.add("allenai/c4", c4())
    take(make_loader(LAYOUTS["c4"][1]), 2)
    file_host = {request.authorized for request in hub.requests if request.path.startswith("/files/")}
    api = {request.authorized for request in hub.requests if "/resolve/" in request.path and request.range}
    assert (file_host, api) == ({False}, {True})


def test_only_the_text_column_of_parquet_is_fetched(hub: Hub) -> None:
    documents = [f"document {n} " * 20 for n in range(400)]
    content = io.BytesIO()
    table = pyarrow.table({"text": documents, "image": [torch.randn(9000).numpy().tobytes() for _ in documents]})
    pyarrow.parquet.write_table(table, content, row_group_size=100)
    hub.add("org/pictures", {"data/train-0.parquet": content.getvalue()})
    take(make_loader(DataConfig(name="org/pictures", prefetch=0), range(1), batch=1), 40)
    fetched = 0
    for request in hub.requests:
        if request.path.startswith("/files/"):
            first, _, last = request.range.removeprefix("bytes=").partition("-")
            fetched += int(last) - int(first) + 1
    assert fetched < len(content.getvalue()) / 10


def test_resume_inside_a_compressed_file_logs_its_progress(
    hub: Hub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtrain.plugins.remote_data.streamed_text.SHUFFLED_DOCUMENTS", 2)
    logger = logging.getLogger("torchtrain")
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    hub.add("allenai/c4", c4())
    loader = make_loader(LAYOUTS["c4"][1])
    take(loader, 2)
    assert "up to document" not in caplog.text
    resumed = make_loader(LAYOUTS["c4"][1])
    resumed.load_state_dict(loader.state_dict())
    take(resumed, 1)
    assert "reading file " in caplog.text
    assert " of 4 up to document " in caplog.text
    assert ": reached it after " in caplog.text


def test_revision_of_the_checkpoint_is_kept_on_resume(hub: Hub) -> None:
    first = hub.add("org/a", fineweb())
    sources = (
        SourceConfig(name="org/a", subset="sample"),
        SourceConfig(path="x.jsonl"),
        SourceConfig(name="org/a", revision="v1"),
    )
    found = pinned(DataConfig(sources=sources), tuple, "data")
    assert [source.revision for source in found.sources] == [first, None, "v1"]
    second = hub.add("org/a", fineweb(DOCUMENTS[1:]))
    saved = DataConfig(name="org/a", subset="sample", revision=first)
    now = DataConfig(name="org/a", subset="sample")
    assert pinned(now, lambda: saved.all, "data") == saved
    assert pinned(now, lambda: [DataConfig(name="org/a")], "data").revision == second  # it has another subset
    # A checkpoint without revisions, from before this option, is compatible.
    old, new = JobConfig(data=DataConfig(sources=sources[:2])), JobConfig(data=DataConfig(sources=found.sources[:2]))
    assert differences(to_toml(old), to_toml(new)) == []


def open_downloaded(source: SourceConfig, verify_bytes: float = math.inf) -> text_sources.LocalText:
    return client.open_downloaded(source, "it", client.download(source, "it", verify_bytes), verify_bytes)


def open_streamed(source: SourceConfig) -> StreamedText:
    return client.open_streamed(source, 2, "it", client.list_files(source, "it"))


@pytest.mark.parametrize("open_it", [open_downloaded, open_streamed])
def test_identity_of_a_local_folder_is_that_of_its_content(
    open_it: Callable[[SourceConfig], packing.TextSource], tmp_path: Path
) -> None:
    def identity(folder: str, documents: list[str]) -> str:
        path = Path(local_copy(tmp_path / folder, {"en/train.jsonl": lines_of(documents)}))
        (path / "validation.jsonl").write_bytes(lines_of([folder]))
        return open_it(SourceConfig(name=str(path), split="train")).identity()

    first = identity("first", ["aaa", "bbb"])
    assert identity("copy", ["aaa", "bbb"]) == first
    assert identity("other", ["aaa", "bbc"]) != first


class _FilesOfAnotherNode:
    """Unpickles by opening a file that does not exist on this node."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("/there/is/no/such/file",)


def test_one_rank_downloads_for_all(hub: Hub) -> None:
    source = SourceConfig(name="org/downloaded", subset="sample", revision=hub.add("org/downloaded", fineweb()))
    pickled = client.download(source, "it")
    first = client.open_downloaded(source, "it", pickled)
    assert "/files/" in " ".join(request.path for request in hub.requests)
    hub.requests.clear()
    second = client.open_downloaded(source, "it", pickled)
    assert hub.requests == []
    on_another_node = client.open_downloaded(source, "it", pickle.dumps(_FilesOfAnotherNode()))
    for other in (second, on_another_node):
        assert other.identity() == first.identity()
        assert list(other.read_all(range(other.parts))) == list(first.read_all(range(first.parts)))


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_one_rank_lists_files_and_a_resumed_run_keeps_its_revision(hub: Hub, tmp_path: Path) -> None:
    documents = [f"{text} {n}" for n in range(4) for text in DOCUMENTS]
    revision = hub.add("allenai/c4", c4(documents))
    make_loader(DataConfig(name="allenai/c4", subset="en", streams=4, prefetch=0, revision=revision))
    listings = [request.path for request in hub.requests if "/tree/" in request.path or "paths-info" in request.path]
    hub.requests.clear()
    local = ["--data.name", local_copy(tmp_path / "data", c4(documents)), "--data.streams", "4"]
    finish(tmp_path / "local", *local, "--training.steps", "8", ranks=1)
    options = ["--data.name", "allenai/c4", "--data.subset", "en", "--data.streams", "4", "--training.steps"]
    finish(tmp_path / "hub", *options, "4", ranks=4)
    assert [r.path for r in hub.requests if "/tree/" in r.path or "paths-info" in r.path] == listings
    assert f'revision = "{revision}"' in (tmp_path / "hub/checkpoint/step-4/config.toml").read_text()
    hub.add("allenai/c4", c4(documents[::-1]))
    assert "resumed from" in finish(tmp_path / "hub", *options, "8", ranks=2)
    assert losses(tmp_path / "hub") == pytest.approx(losses(tmp_path / "local"), rel=1e-4)


def use_short_retry_delays() -> Any:
    text_sources.PAUSES_SECONDS = (0.1, 0.1)


def test_run_without_network_exits_with_74_on_all_ranks(hub: Hub, tmp_path: Path) -> None:
    hub.faults.append(Fault("/", 503, times=10**9))
    started = time.monotonic()
    run = ForkedRun(tmp_path, "--data.name", "allenai/c4", "--data.subset", "en", hook=use_short_retry_delays)
    assert run.wait() == [74, 74], run.output()
    assert time.monotonic() - started < 60
    assert "next attempt in 0.1 s: " in run.output()
    assert "503 Service Unavailable" in run.output()
    assert "Traceback" not in run.output()


@pytest.mark.parametrize("download", [False, True])
def test_another_revision_has_another_identity(hub: Hub, download: bool) -> None:
    config = replace(LAYOUTS["fineweb"][1], download=download, prefetch=0)
    first, second = (hub.add(config.name, fineweb(d)) for d in (DOCUMENTS, DOCUMENTS[::-1]))
    a, b, repeated = (make_loader(replace(config, revision=r)).identity for r in (first, second, first))
    assert a == repeated != b


def download_documents(source: SourceConfig) -> list[str | None]:
    opened = open_downloaded(source)
    return list(opened.read_all(range(opened.parts)))


@pytest.mark.parametrize("local", [False, True])
def test_damaged_file_of_a_downloaded_dataset_is_rejected(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    source = SourceConfig(name="org/damaged", subset="sample", revision=hub.add("org/damaged", fineweb()))
    if local:
        source = SourceConfig(name=local_copy(tmp_path / "data", {"train.jsonl": lines_of(DOCUMENTS)}))
    expected = download_documents(source)
    (file,) = (tmp_path / "cache").rglob("*.arrow")
    content = file.read_bytes()
    file.write_bytes(content.replace(b"document 41 ", b"document 14 "))
    with pytest.raises(DataError, match=rf"{file}, into which it was converted, is damaged: .*; remove the folder"):
        download_documents(source)
    unverified = open_downloaded(source, len(content) - 1)
    assert list(unverified.read_all(range(unverified.parts))) != expected
    file.write_bytes(content + b"more")
    with pytest.raises(DataError, match="is damaged: its size or hash"):
        open_downloaded(source, verify_bytes=0)
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=rf"If {file.parent}, into which it was converted, is damaged, remove it"):
        open_downloaded(source, verify_bytes=0)
    shutil.rmtree(file.parent)
    assert download_documents(source) == expected


def test_rewritten_local_folder_of_the_same_size_and_time_is_detected(tmp_path: Path) -> None:
    source = SourceConfig(name=local_copy(tmp_path / "data", {"train.jsonl": lines_of(DOCUMENTS)}))
    (file,) = Path(source.name).rglob("*.jsonl")
    before = file.stat()
    old = open_downloaded(source)
    identity = old.identity()
    changed = [text.replace("document 20 ", "document 02 ") for text in DOCUMENTS]
    file.write_bytes(lines_of(changed))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert download_documents(source) == changed
    assert old.identity() == identity  # the identity of what was opened
    assert open_downloaded(source).identity() != identity


def test_binary_column_of_a_downloaded_dataset_is_read_as_utf8(tmp_path: Path) -> None:
    for name, values, error in (("good", [b"caf\xc3\xa9", None], ""), ("bad", [b"caf\xe9"], "is not UTF-8 at byte 3")):
        content = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(values, pyarrow.binary())}), content)
        source = SourceConfig(name=local_copy(tmp_path / name, {"train.parquet": content.getvalue()}))
        if error:
            with pytest.raises(DataError, match=error):
                download_documents(source)
        else:
            assert download_documents(source) == ["caf\xe9", None]


def test_config_with_open_data_and_tokenizer_is_accepted(hub: Hub, tmp_path: Path) -> None:
    """With stand-ins for its data and its tokenizer, which it names by URL."""
    files = {name.replace("sample/", "sample/10BT/"): content for name, content in fineweb().items()}
    files["README.md"] = b"---\nconfigs:\n- config_name: sample-10BT\n  data_files: sample/10BT/*\n---\n"
    hub.add("HuggingFaceFW/fineweb-edu", files)
    config, tokenizer = "train_configs/open_1b.toml", save_tokenizer(tmp_path / "tokenizer")
    options = [f"--job.dump_folder={tmp_path}/run", f"--model.tokenizer_path={tokenizer}", "--data.held_out=0.2"]
    options += ["--training.local_batch_size=1", "--training.global_batch_size=2"]  # with fewer readers
    found = checked_command("torchtrain.check", "2", "--job.config_file", config, *options).stderr
    assert "vocabulary 49,152" in found, found
    assert "fineweb-edu" in found
