"""Datasets streamed from the hub give the same batches as local files, also when the network fails for a while."""

import gzip
import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
import torch
from data_samples import DOCUMENTS, TOKENIZER, make_loader, take
from forked_command import checked_command
from forked_run import ForkedRun, finish
from hub_server import Fault, Hub
from json_tokenizers import save_tokenizer

from torchtrain.checkpoint.resume_compatibility import differences
from torchtrain.config.parse import to_toml
from torchtrain.config.schema import JobConfig
from torchtrain.datasets.builtin_sources import pinned
from torchtrain.datasets.data_source import SkippedText, SourceContext, TextInput
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.datasets.text_input import LocalFile
from torchtrain.errors import DataError, StorageError
from torchtrain.plugins.remote_data import hub as client
from torchtrain.plugins.remote_data.hub import HubFile, find_revision
from torchtrain.plugins.remote_data.options import RemoteDataConfig
from torchtrain.plugins.remote_data.sources import HubDataset
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
TWO_STREAMS = {"remote_data": RemoteDataConfig(streams=2)}


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
    "c4": (c4(), DataConfig(name="allenai/c4", subset="en", prefetch=0)),
    "fineweb": (fineweb(), DataConfig(name="org/fineweb", subset="sample", prefetch=0)),
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
    """Record the pauses instead of sleeping."""
    slept: list[float] = []
    monkeypatch.setattr(client.time, "sleep", slept.append)
    return slept


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_are_those_of_local_files(hub: Hub, tmp_path: Path, layout: str) -> None:
    files, config = LAYOUTS[layout]
    hub.add(config.name, files)
    local = make_loader(DataConfig(name=local_copy(tmp_path / "data", files), prefetch=0), plugins=TWO_STREAMS)
    remote = make_loader(config, plugins=TWO_STREAMS)
    assert torch.equal(take(remote, 12), take(local, 12))
    resumed = make_loader(config, plugins=TWO_STREAMS)  # starts in the middle of files
    resumed.load_state_dict(remote.state_dict())
    assert torch.equal(take(resumed, 5), take(local, 5))
    copies = [local_copy(tmp_path / "copy", files), config.name]
    downloaded, copied = (
        make_loader(DataConfig(name=name, subset=subset, download=True, prefetch=0))
        for name, subset in zip(copies, ("", config.subset), strict=True)
    )
    assert torch.equal(take(downloaded, 12), take(copied, 12))


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
SLOW_FAULTS = (FAULTS[2], *FAULTS[-2:])


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        pytest.param(
            *(layout, fault),
            id=f"{layout}-{fault.where}-{fault.kind}".replace("/", ""),
            marks=pytest.mark.slow if fault in SLOW_FAULTS or layout != "c4" else (),
        )
        for layout in LAYOUTS
        for fault in FAULTS
    ],
)
def test_temporary_network_failure_does_not_change_the_batches(
    hub: Hub, layout: str, fault: Fault, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault.kind == "silence":  # a busy machine may take longer to respond, which would be another fault
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    files, config = LAYOUTS[layout]
    before, then = f"org/before-{layout}", f"org/{layout}-{FAULTS.index(fault)}"  # not in any cache
    config = replace(config, name=before, revision=hub.add(before, files))
    expected = take(make_loader(config, plugins=TWO_STREAMS), 8)
    config = replace(config, name=then, revision=hub.add(then, files))
    hub.faults.append(replace(fault))
    assert torch.equal(take(make_loader(config, plugins=TWO_STREAMS), 8), expected)
    assert hub.faults[0].times < fault.times
    if fault.kind == 429 and "files" in fault.where:
        assert pauses == [7]
    if fault.kind == "reset":
        assert pauses == [1, 2]


def test_permanent_network_failure_is_a_storage_error(hub: Hub, pauses: list[float]) -> None:
    files, config = LAYOUTS["c4"]
    hub.add(config.name, files)
    hub.faults.append(Fault("/api/", 503, times=10**9))
    with pytest.raises(StorageError, match=r"data.name = 'allenai/c4' .*does not respond: .*503 Service Unavailable"):
        find_revision(config, "data.name = 'allenai/c4' (subset 'en')")
    assert pauses == list(client.PAUSES_SECONDS)
    hub.clear()
    hub.add(config.name, files)
    loader = make_loader(config, plugins=TWO_STREAMS)
    hub.faults.append(Fault("/files/", "reset", times=10**9))
    with pytest.raises(StorageError, match=r"en/c4-train.*\.json\.gz: the hub or the network does not respond"):
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
    with pytest.raises(
        DataError, match=r"c4-train.00003-of-00004.json.gz cannot be read after document \d+, it seems damaged: "
    ):
        take(make_loader(LAYOUTS["c4"][1], plugins=TWO_STREAMS), 12)
    first = "en/c4-train.00000-of-00004.json.gz"
    hub.add("allenai/c4", {**c4(), first: b"no gzip"})
    with pytest.raises(DataError, match=r"c4-train.00000-of-00004.json.gz cannot be read after .*: Not a gzipped file"):
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


def open_streamed(source: SourceConfig) -> StreamedText:
    context = SourceContext("data", TOKENIZER, global_batch_size=2)
    opened = HubDataset.open(source, context, HubDataset.query_on_rank0(source, context))
    assert isinstance(opened, StreamedText)
    return opened


def open_downloaded(source: SourceConfig, verify_bytes: float = math.inf) -> TextInput:
    source, context = replace(source, download=True), SourceContext("data", TOKENIZER, verify_bytes=verify_bytes)
    opened = HubDataset.open(source, context, HubDataset.query_on_rank0(source, context))
    assert isinstance(opened, TextInput)
    return opened


def documents_of(text: TextInput) -> list[str | None]:
    return [document for shard in range(len(text.shard_sizes)) for *_, document in text.read(shard, SkippedText())]


@pytest.mark.parametrize("open_it", [open_downloaded, open_streamed])
def test_identity_of_a_local_folder_is_that_of_its_content(
    open_it: Callable[[SourceConfig], Any], tmp_path: Path
) -> None:
    def identity(folder: str, documents: list[str]) -> str:
        path = Path(local_copy(tmp_path / folder, {"en/train.jsonl": lines_of(documents)}))
        (path / "validation.jsonl").write_bytes(lines_of([folder]))
        opened = open_it(SourceConfig(name=str(path), split="train"))
        text: str = opened.identify().text if isinstance(opened, TextInput) else opened.identity()
        return text

    first = identity("first", ["aaa", "bbb"])
    assert identity("copy", ["aaa", "bbb"]) == first
    assert identity("other", ["aaa", "bbc"]) != first


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_downloaded_once(hub: Hub, layout: str) -> None:
    """By rank 0; the other ranks of its node find them in the cache, and those of other nodes download them."""
    files, config = LAYOUTS[layout]
    name = f"org/downloaded-{layout}"
    source = SourceConfig(name=name, subset=config.subset, revision=hub.add(name, files), download=True)
    context = SourceContext("data", TOKENIZER)
    answer = HubDataset.query_on_rank0(source, context)
    whole = [request for request in hub.requests if request.path.startswith("/files/") and not request.range]
    assert len(whole) >= FILES
    hub.requests.clear()
    first = HubDataset.open(source, context, answer)
    assert hub.requests == []
    assert isinstance(first, TextInput)
    in_order = [text for number in range(FILES) for text in DOCUMENTS[number::FILES]]
    assert documents_of(first) == in_order
    Path(first.files[0]).unlink()
    (damaged := Path(first.files[1]).resolve()).write_bytes(b"short")
    with pytest.raises(
        DataError, match=rf"{damaged}, to which hf://.* was downloaded, is damaged: it has 5 bytes, not"
    ):
        HubDataset.open(source, context, answer)
    damaged.unlink()
    again = HubDataset.open(source, context, answer)
    assert isinstance(again, TextInput)
    assert documents_of(again) == in_order
    assert again.identify() == first.identify()
    assert again.cache_key() == first.cache_key()


def test_tokenizing_reads_the_files_of_the_hub_in_place_unless_they_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    revision = hub.add("org/tokenized", fineweb())
    source, context = (
        SourceConfig(name="org/tokenized", subset="sample", revision=revision),
        SourceContext("data", TOKENIZER),
    )
    local = SourceConfig(name=local_copy(tmp_path / "data", fineweb()))
    expected = [text for number in range(FILES) for text in DOCUMENTS[number::FILES]]
    for config, kind in ((source, HubFile), (replace(source, download=True), LocalFile), (local, LocalFile)):
        text = HubDataset.open_text(config, context)
        assert {type(file) for file in text._files} == {kind}  # type: ignore[attr-defined]
        assert documents_of(text) == expected


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_one_rank_lists_files_and_a_resumed_run_keeps_its_revision(hub: Hub, tmp_path: Path) -> None:
    documents = [f"{text} {n}" for n in range(4) for text in DOCUMENTS]
    revision = hub.add("allenai/c4", c4(documents))
    make_loader(DataConfig(name="allenai/c4", subset="en", prefetch=0, revision=revision))
    listings = [request.path for request in hub.requests if "/tree/" in request.path or "paths-info" in request.path]
    hub.requests.clear()
    local = ["--data.name", local_copy(tmp_path / "data", c4(documents)), "--remote_data.streams", "4"]
    finish(tmp_path / "local", *local, "--training.steps", "4", ranks=1)
    options = ["--data.name", "allenai/c4", "--data.subset", "en", "--remote_data.streams", "4", "--training.steps"]
    finish(tmp_path / "hub", *options, "2", ranks=2)
    assert [r.path for r in hub.requests if "/tree/" in r.path or "paths-info" in r.path] == listings
    assert f'revision = "{revision}"' in (tmp_path / "hub/checkpoint/step-2/config.toml").read_text()
    hub.add("allenai/c4", c4(documents[::-1]))
    assert "resumed from" in finish(tmp_path / "hub", *options, "4", ranks=1)
    assert losses(tmp_path / "hub") == pytest.approx(losses(tmp_path / "local"), rel=1e-4)


@pytest.mark.slow  # test_files_are_downloaded_once asks what its ranks do
def test_run_on_a_downloaded_dataset_is_that_on_its_files(hub: Hub, tmp_path: Path) -> None:
    """On any ranks, which tokenize it together; rank 0 alone queries the hub."""
    hub.add("org/in-a-run", fineweb())
    options = ["--data.download", "--training.steps", "2", "--data.name"]
    finish(tmp_path / "local", *options, local_copy(tmp_path / "data", fineweb()), ranks=1)
    finish(tmp_path / "hub", *options, "org/in-a-run", "--data.subset", "sample", ranks=2)
    files = [request.path for request in hub.requests if request.path.startswith("/files/") and not request.range]
    assert len(files) == len(set(files)) == FILES
    assert losses(tmp_path / "hub") == pytest.approx(losses(tmp_path / "local"), rel=1e-4)


def use_short_retry_delays() -> Any:
    client.PAUSES_SECONDS = (0.1, 0.1)


@pytest.mark.timeout(60, func_only=True)  # with the short pauses of its hook
def test_run_without_network_exits_with_74_on_all_ranks(hub: Hub, tmp_path: Path) -> None:
    hub.faults.append(Fault("/", 503, times=10**9))
    run = ForkedRun(tmp_path, "--data.name", "allenai/c4", "--data.subset", "en", hook=use_short_retry_delays)
    assert run.wait() == [74, 74], run.output()
    assert "next attempt in 0.1 s: " in run.output()
    assert "503 Service Unavailable" in run.output()
    assert "Traceback" not in run.output()


@pytest.mark.parametrize("download", [False, True])
def test_another_revision_has_another_identity(hub: Hub, download: bool) -> None:
    config = replace(LAYOUTS["fineweb"][1], download=download, prefetch=0)
    first, second = (hub.add(config.name, fineweb(d)) for d in (DOCUMENTS, DOCUMENTS[::-1]))
    a, b, repeated = (make_loader(replace(config, revision=r)).identity for r in (first, second, first))
    assert a == repeated != b


def test_rewritten_local_folder_of_the_same_size_and_time_is_other_text(tmp_path: Path) -> None:
    source = SourceConfig(name=local_copy(tmp_path / "data", {"train.jsonl": lines_of(DOCUMENTS)}))
    (file,) = Path(source.name).rglob("*.jsonl")
    before = file.stat()
    olds = [open_downloaded(source, verify_bytes) for verify_bytes in (0, math.inf)]
    keys = [old.cache_key() for old in olds]
    file.write_bytes(lines_of([text.replace("document 20 ", "document 02 ") for text in DOCUMENTS]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert [old.cache_key() for old in olds] == keys  # those of what was opened
    assert not {open_downloaded(source, verify_bytes).cache_key() for verify_bytes in (0, math.inf)} & set(keys)


def test_binary_column_is_read_as_utf8(tmp_path: Path) -> None:
    for name, values, error in (("good", [b"caf\xc3\xa9", None], ""), ("bad", [b"caf\xe9"], "is not UTF-8 at byte 3")):
        content = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(values, pyarrow.binary())}), content)
        source = SourceConfig(name=local_copy(tmp_path / name, {"train.parquet": content.getvalue()}))
        if error:
            with pytest.raises(DataError, match=error):
                open_downloaded(source)
        else:
            assert documents_of(open_downloaded(source)) == ["caf\xe9", None]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train.jsonl": b""}, "has no documents"),
        ({"train.csv": b"text,n\n"}, "has no documents"),
        ({"train.xml": b"<a/>"}, "train.xml cannot be read, only .jsonl, "),
    ],
)
@pytest.mark.parametrize("download", [False, True])
def test_dataset_without_text_is_rejected(
    files: dict[str, bytes], message: str, download: bool, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        make_loader(DataConfig(name=local_copy(tmp_path / "data", files), download=download))


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
