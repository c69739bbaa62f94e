"""Datasets of the hub over HTTP: the same batches as from local files, whatever the network does."""

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
from forked_run import ForkedRun, finish
from hub_server import Fault, Hub

from torchtrain.checkpoint.resume_compatibility import differences
from torchtrain.config.parse import to_toml
from torchtrain.config.schema import DataConfig, JobConfig, SourceConfig
from torchtrain.datasets import hub as client
from torchtrain.datasets import text
from torchtrain.datasets.hub import find_revision
from torchtrain.datasets.sources import with_revisions
from torchtrain.errors import DataError, StorageError

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
    """As C4 lies on the hub: gzipped JSON by a pattern in the card."""
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
    """As FineWeb lies there: parquet files of several row groups."""
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
    """The files of the train split, in a folder that ``datasets`` takes for a dataset."""
    folder.mkdir()
    for path, content in files.items():
        if "train" in path or "sample/" in path:
            (folder / path.rpartition("/")[2]).write_bytes(content)
    return str(folder)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was slept; and requests are waited for half a second."""
    slept: list[float] = []
    for module in (client, text):
        monkeypatch.setattr(module.time, "sleep", slept.append)
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
    again = make_loader(config)  # from the middle of files
    again.load_state_dict(remote.state_dict())
    assert torch.equal(take(again, 5), take(local, 5))
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
def test_a_network_that_fails_for_a_while_changes_nothing(
    hub: Hub, layout: str, fault: Fault, pauses: list[float]
) -> None:
    files, config = LAYOUTS[layout]
    before, then = f"org/before-{layout}", f"org/{layout}-{FAULTS.index(fault)}"  # one that lies in no cache
    undisturbed = take(make_loader(replace(config, name=before, revision=hub.add(before, files))), 8)
    config = replace(config, name=then, revision=hub.add(then, files))
    hub.faults.append(replace(fault))
    assert torch.equal(take(make_loader(config), 8), undisturbed)
    assert hub.faults[0].times < fault.times
    if fault.kind == 429 and "files" in fault.where:
        assert pauses[0] == 7  # then perhaps others: requests are waited for half a second
    if fault.kind == "reset":
        assert pauses == [1, 2]


def test_a_network_that_stays_away_is_not_the_users_error(hub: Hub, pauses: list[float]) -> None:
    files, config = LAYOUTS["c4"]
    hub.add(config.name, files)
    hub.faults.append(Fault("/api/", 503, times=10**9))
    with pytest.raises(StorageError, match=r"data.name = 'allenai/c4' .*does not answer: .*503 Service Unavailable"):
        find_revision(config, "data.name = 'allenai/c4' (subset 'en')")
    assert pauses == list(text.RETRY_SECONDS)
    hub.clear()
    hub.add(config.name, files)
    loader = make_loader(config)
    hub.faults.append(Fault("/files/", "reset", times=10**9))
    with pytest.raises(StorageError, match=r"at file \d of 4, document \d+: .*\.json\.gz: the hub or the network does"):
        take(loader, 12)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"name": "org/nothing"}, "cannot open .*Not Found"),
        ({"subset": "fr"}, "cannot open .*'fr' not found. Available: .*'en', 'de'"),
        ({"split": "test"}, "has no such split; there are train, validation"),
        ({"revision": "f" * 40}, "cannot open .*Not Found"),
        ({"text_column": "body"}, "json.gz: it has no column 'body' .text_column.; its columns are text, url"),
    ],
)
def test_what_is_wrong_in_the_config_is_told_at_once(
    hub: Hub, pauses: list[float], wrong: dict[str, str], told: str
) -> None:
    revision = hub.add("allenai/c4", c4())
    with pytest.raises(DataError, match=told):
        make_loader(DataConfig(**{"name": "allenai/c4", "subset": "en", "revision": revision, **wrong}))
    assert pauses == []


def test_a_damaged_file_is_told_at_once(hub: Hub, pauses: list[float]) -> None:
    name = "en/c4-train.00003-of-00004.json.gz"
    hub.add("allenai/c4", {**c4(), name: c4()[name][:-20]})
    with pytest.raises(DataError, match=r"cannot go on reading .* at file 3 of 4, document \d+: EOFError"):
        take(make_loader(LAYOUTS["c4"][1]), 12)
    first = "en/c4-train.00000-of-00004.json.gz"
    hub.add("allenai/c4", {**c4(), first: b"no gzip"})
    with pytest.raises(DataError, match=r"cannot open data.name = 'allenai/c4' .*: Not a gzipped file"):
        make_loader(LAYOUTS["c4"][1])
    assert pauses == []


def test_tokens_stay_with_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.add("allenai/c4", c4())
    take(make_loader(LAYOUTS["c4"][1]), 2)
    there = {request.authorized for request in hub.requests if request.path.startswith("/files/")}
    api = {request.authorized for request in hub.requests if "/resolve/" in request.path and request.range}
    assert (there, api) == ({False}, {True})


def test_of_parquet_the_text_alone_is_fetched(hub: Hub) -> None:
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


def test_a_resume_inside_a_packed_file_says_how_long_it_reads(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torchtrain")
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    hub.add("allenai/c4", c4())
    loader = make_loader(LAYOUTS["c4"][1])
    take(loader, 2)
    assert "where the run goes on" not in caplog.text
    again = make_loader(LAYOUTS["c4"][1])
    again.load_state_dict(loader.state_dict())
    take(again, 1)
    assert "reading file " in caplog.text
    assert " of 4 up to document " in caplog.text
    assert ": reached it after " in caplog.text


def test_revisions(hub: Hub) -> None:
    first = hub.add("org/a", fineweb())
    sources = (
        SourceConfig(name="org/a", subset="sample"),
        SourceConfig(path="x.jsonl"),
        SourceConfig(name="org/a", revision="v1"),
    )
    pinned = with_revisions(DataConfig(sources=sources), None, "data")
    assert [source.revision for source in pinned.sources] == [first, None, "v1"]
    second = hub.add("org/a", fineweb(DOCUMENTS[1:]))
    saved = DataConfig(name="org/a", subset="sample", revision=first)
    now = DataConfig(name="org/a", subset="sample")
    assert with_revisions(now, saved, "data") == saved
    assert with_revisions(now, DataConfig(name="org/a"), "data").revision == second  # of another subset
    # A checkpoint from before this option is not another run for it.
    old, new = JobConfig(data=DataConfig(sources=sources[:2])), JobConfig(data=DataConfig(sources=pinned.sources[:2]))
    assert differences(to_toml(old), to_toml(new)) == []


def open_downloaded(source: SourceConfig, verify_bytes: float = math.inf) -> text.LocalText:
    return client.open_downloaded(source, "it", client.download(source, "it", verify_bytes), verify_bytes)


def open_streamed(source: SourceConfig) -> text.StreamedText:
    return client.open_streamed(source, 2, "it", client.list_files(source, "it"))


@pytest.mark.parametrize("open_it", [open_downloaded, open_streamed])
def test_a_local_folder_is_known_by_its_content(
    open_it: Callable[[SourceConfig], text.TextSource], tmp_path: Path
) -> None:
    def identity(folder: str, documents: list[str]) -> str:
        path = Path(local_copy(tmp_path / folder, {"en/train.jsonl": lines_of(documents)}))
        (path / "validation.jsonl").write_bytes(lines_of([folder]))
        return open_it(SourceConfig(name=str(path), split="train")).identity()

    first = identity("first", ["aaa", "bbb"])
    assert identity("copy", ["aaa", "bbb"]) == first
    assert identity("other", ["aaa", "bbc"]) != first


class _OfAnotherNode:
    """What names files that do not lie here."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("/there/is/no/such/file",)


def test_one_rank_downloads_for_all(hub: Hub) -> None:
    source = SourceConfig(name="org/downloaded", subset="sample", revision=hub.add("org/downloaded", fineweb()))
    pickled = client.download(source, "it")
    first = client.open_downloaded(source, "it", pickled)
    assert any("/files/" in request.path for request in hub.requests)
    hub.requests.clear()
    second = client.open_downloaded(source, "it", pickled)
    assert hub.requests == []
    of_another_node = client.open_downloaded(source, "it", pickle.dumps(_OfAnotherNode()))
    for other in (second, of_another_node):
        assert other.identity() == first.identity()
        assert list(other.read_all(range(other.units))) == list(first.read_all(range(first.units)))


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_one_rank_asks_and_a_run_keeps_to_its_revision(hub: Hub, tmp_path: Path) -> None:
    documents = [f"{text} {n}" for n in range(4) for text in DOCUMENTS]
    revision = hub.add("allenai/c4", c4(documents))
    make_loader(DataConfig(name="allenai/c4", subset="en", streams=4, prefetch=0, revision=revision))
    asked = [request.path for request in hub.requests if "/tree/" in request.path or "paths-info" in request.path]
    hub.requests.clear()
    local = ["--data.name", local_copy(tmp_path / "data", c4(documents)), "--data.streams", "4"]
    finish(tmp_path / "local", *local, "--training.steps", "8", ranks=1)
    options = ["--data.name", "allenai/c4", "--data.subset", "en", "--data.streams", "4", "--training.steps"]
    finish(tmp_path / "hub", *options, "4", ranks=4)
    assert [r.path for r in hub.requests if "/tree/" in r.path or "paths-info" in r.path] == asked
    assert f'revision = "{revision}"' in (tmp_path / "hub/checkpoint/step-4/config.toml").read_text()
    hub.add("allenai/c4", c4(documents[::-1]))
    assert "resumed from" in finish(tmp_path / "hub", *options, "8", ranks=2)
    assert losses(tmp_path / "hub") == pytest.approx(losses(tmp_path / "local"), rel=1e-4)


def impatient() -> Any:
    text.RETRY_SECONDS = (0.1, 0.1)


def test_a_run_without_network_ends_with_74_on_all_ranks(hub: Hub, tmp_path: Path) -> None:
    hub.faults.append(Fault("/", 503, times=10**9))
    started = time.monotonic()
    run = ForkedRun(tmp_path, "--data.name", "allenai/c4", "--data.subset", "en", hook=impatient)
    assert run.wait() == [74, 74], run.output()
    assert time.monotonic() - started < 60
    assert "next attempt in 0.1 s: " in run.output()
    assert "503 Service Unavailable" in run.output()
    assert "Traceback" not in run.output()


@pytest.mark.parametrize("download", [False, True])
def test_another_revision_is_other_data(hub: Hub, download: bool) -> None:
    config = replace(LAYOUTS["fineweb"][1], download=download, prefetch=0)
    first, second = (hub.add(config.name, fineweb(d)) for d in (DOCUMENTS, DOCUMENTS[::-1]))
    a, b, again = (make_loader(replace(config, revision=r)).identity for r in (first, second, first))
    assert a == again != b


def downloaded(source: SourceConfig) -> list[str | None]:
    opened = open_downloaded(source)
    return list(opened.read_all(range(opened.units)))


@pytest.mark.parametrize("local", [False, True])
def test_a_damaged_copy_of_what_was_downloaded_is_rejected(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    source = SourceConfig(name="org/damaged", subset="sample", revision=hub.add("org/damaged", fineweb()))
    if local:
        source = SourceConfig(name=local_copy(tmp_path / "data", {"train.jsonl": lines_of(DOCUMENTS)}))
    whole = downloaded(source)
    (copy,) = (tmp_path / "cache").rglob("*.arrow")
    content = copy.read_bytes()
    copy.write_bytes(content.replace(b"document 41 ", b"document 14 "))
    with pytest.raises(DataError, match=rf"{copy}, into which it was converted, is damaged: .*; remove the folder"):
        downloaded(source)
    unverified = open_downloaded(source, len(content) - 1)
    assert list(unverified.read_all(range(unverified.units))) != whole
    copy.write_bytes(content + b"more")
    with pytest.raises(DataError, match="is damaged: its size or hash"):
        open_downloaded(source, verify_bytes=0)
    copy.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=rf"If {copy.parent}, into which it was converted, is damaged, remove it"):
        open_downloaded(source, verify_bytes=0)
    shutil.rmtree(copy.parent)
    assert downloaded(source) == whole


def test_a_local_folder_that_is_rewritten_with_its_old_size_and_time(tmp_path: Path) -> None:
    source = SourceConfig(name=local_copy(tmp_path / "data", {"train.jsonl": lines_of(DOCUMENTS)}))
    (file,) = Path(source.name).rglob("*.jsonl")
    before = file.stat()
    old = open_downloaded(source)
    identity = old.identity()
    changed = [text.replace("document 20 ", "document 02 ") for text in DOCUMENTS]
    file.write_bytes(lines_of(changed))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert downloaded(source) == changed
    assert old.identity() == identity  # of what is read
    assert open_downloaded(source).identity() != identity


def test_a_binary_column_of_what_was_downloaded_is_text(tmp_path: Path) -> None:
    for name, values, told in (("good", [b"caf\xc3\xa9", None], ""), ("bad", [b"caf\xe9"], "is not UTF-8 at byte 3")):
        content = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(values, pyarrow.binary())}), content)
        source = SourceConfig(name=local_copy(tmp_path / name, {"train.parquet": content.getvalue()}))
        if told:
            with pytest.raises(DataError, match=told):
                downloaded(source)
        else:
            assert downloaded(source) == ["caf\xe9", None]
