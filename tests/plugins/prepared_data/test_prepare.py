"""Tokenized datasets: the same bytes after interruptions and for any number of processes; damaged data are detected."""

import base64
import errno
import gc
import gzip
import io
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_data import cached_bytes, drop_from_cache, write_random_tokens
from data_samples import DOCUMENTS, TOKENIZER, make_loader, opened_text, take, write_jsonl, write_prepared
from forked_command import checked_command, run_command, start_command

from torchtrain import prepare as command
from torchtrain.config.schema import DataConfig, SourceConfig
from torchtrain.datasets import file_formats, local_files
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.environment import process_share
from torchtrain.errors import ConfigError, DataError, StorageError
from torchtrain.plugins.prepared_data import input_splits, tokenize_dataset
from torchtrain.plugins.prepared_data.open_folder import open_folder
from torchtrain.plugins.prepared_data.tokenize_dataset import prepare
from torchtrain.plugins.prepared_data.tokenized import PreparedManifest, Shard, TokenizedDataset

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_splits, "MIN_SHARD_BYTES", 1)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def tokens_of(folder: Path) -> list[int]:
    manifest = json.loads((folder / "manifest.json").read_text())
    parts = [np.fromfile(folder / f"{shard['name']}.tokens", "<u2") for shard in manifest["shards"]]
    return np.concatenate(parts).tolist()  # type: ignore[no-any-return]


def use_small_shards() -> None:
    """A hook: shards are as small as possible."""
    input_splits.MIN_SHARD_BYTES = 1


def use_small_shards_slowly() -> None:
    use_small_shards()
    write_slowly()


def use_fewer_files() -> None:
    """A hook: only a quarter of the files of the standard library are tokenized."""
    input_splits.MIN_SHARD_BYTES = 1
    found = local_files.standard_library_files()[::4]
    local_files.standard_library_files = lambda: found


def use_fewer_files_slowly() -> None:
    use_fewer_files()
    write_slowly()


def write_slowly() -> None:
    write_shard = tokenize_dataset._write_shard

    def pause_and_write(*arguments: Any) -> int:
        time.sleep(0.03)
        return write_shard(*arguments)

    tokenize_dataset._write_shard = pause_and_write


def complete_shards(folder: Path) -> int:
    """Return the number of complete shards in an unfinished dataset."""
    return len(list(folder.glob("shard-*.json")))


class OwnedByProcess:
    """An object that only the process that created it may collect, like a process group."""

    def __init__(self) -> None:
        self.itself, self.process = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os._exit(9)


def test_worker_processes_do_not_collect_garbage_of_their_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard = tokenize_dataset._write_shard

    def collect_and_write(*arguments: Any) -> int:
        gc.collect()
        return write_shard(*arguments)

    monkeypatch.setattr(tokenize_dataset, "_write_shard", collect_and_write)
    gc.disable()
    try:
        OwnedByProcess()
        prepare(
            SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)), "data", "", tmp_path / "out", processes=1
        )
    finally:
        gc.enable()


def test_prepare_killed_ten_times_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    checked_command("torchtrain.prepare", "--prepare.output", str(uninterrupted), hook=use_fewer_files)
    rng = random.Random(0)
    for _ in range(10):
        prepare_slowly = ("torchtrain.prepare", "--prepare.output", str(killed))
        [process], _ = start_command(tmp_path, *prepare_slowly, hook=use_fewer_files_slowly)
        wanted = complete_shards(killed) + rng.randrange(4)  # there are 64 shards in total
        while complete_shards(killed) < wanted:
            assert process.is_alive(), "prepare ended before it was killed"
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.03))
        process.kill()  # its worker processes notice and exit
        process.join()
    assert not (killed / "manifest.json").exists()
    checked_command("torchtrain.prepare", "--prepare.output", str(killed), hook=use_fewer_files)
    assert contents(killed) == contents(uninterrupted)
    # Restored after the test:
    monkeypatch.setattr(local_files, "standard_library_files", local_files.standard_library_files)
    use_fewer_files()
    source = local_files.open_standard_library()
    expected = [TOKENIZER.encode(text, bos=True, eos=True) for text in source.read_all(range(20)) if text]
    assert tokens_of(killed)[: sum(map(len, expected))] == [token for document in expected for token in document]


def test_prepare_resumes_after_the_last_complete_shard(tmp_path: Path) -> None:
    source = SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))
    prepare(source, "data", "", tmp_path / "whole", processes=2)
    whole = contents(tmp_path / "whole")
    folder = tmp_path / "part"
    manifest = PreparedManifest.read(open_folder(str(tmp_path / "whole")), "")
    folder.mkdir()
    plan = json.loads(whole["manifest.json"])
    (folder / "unfinished.json").write_text(json.dumps({**plan, "shards": []}))
    (folder / "shard-00003.tokens.999.partial").write_bytes(b"left by a killed process")
    kept = manifest.shards[5]
    for suffix in ("tokens", "documents"):
        (folder / f"{kept.name}.{suffix}").write_bytes(whole[f"{kept.name}.{suffix}"])
    (folder / f"{kept.name}.json").write_text(json.dumps(plan["shards"][5]))
    written = (folder / f"{kept.name}.tokens").stat().st_mtime_ns
    lost = manifest.shards[6]  # its record exists, but its tokens are truncated
    (folder / f"{lost.name}.json").write_text(json.dumps(plan["shards"][6]))
    (folder / f"{lost.name}.tokens").write_bytes(whole[f"{lost.name}.tokens"][:-2])
    (folder / f"{manifest.shards[7].name}.json").write_text('{"cut')
    prepare(source, "data", "", folder, processes=2)
    assert contents(folder) == whole
    assert (folder / f"{kept.name}.tokens").stat().st_mtime_ns == written


def test_manifest_counts_documents_tokens_and_bytes(tmp_path: Path) -> None:
    documents: list[Any] = [*DOCUMENTS[:20], None, 5, "", "zwölf"]
    folder = Path(write_prepared(tmp_path / "prepared", write_jsonl(tmp_path / "a.jsonl", documents)))
    shards = PreparedManifest.read(open_folder(str(folder)), "").shards
    texts = [*DOCUMENTS[:20], "zwölf"]
    encoded = [TOKENIZER.encode(text, bos=True, eos=True) for text in texts]
    assert sum(shard.documents for shard in shards) == len(texts)
    assert sum(shard.tokens for shard in shards) == sum(map(len, encoded))
    assert sum(shard.bytes for shard in shards) == sum(len(text.encode()) for text in texts)
    assert sum(shard.skipped for shard in shards) == 3
    starts = [np.fromfile(folder / f"{shard.name}.documents", "<i8") for shard in shards]
    assert [length for offsets in starts for length in np.diff(offsets)] == [len(document) for document in encoded]


def test_vocabularies_above_65536_take_four_bytes_per_token() -> None:
    assert PreparedManifest("", 1 << 16, "", "", 0).dtype == np.dtype("<u2")
    assert PreparedManifest("", (1 << 16) + 1, "", "", 0).dtype == np.dtype("<u4")


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    return Path(write_prepared(tmp_path / "prepared", write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)))


def test_another_tokenizer_raises_a_data_error(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtrain.datasets.tokenizers.LLAMA3_RANKS", 256)
    other = tmp_path / "tokenizer.model"
    other.write_text("".join(f"{base64.b64encode(bytes((n,))).decode()} {n}\n" for n in range(256)))
    with pytest.raises(DataError, match="begun with another tokenizer"):
        prepare(SourceConfig(path=str(tmp_path / "a.jsonl")), "data", str(other), prepared, processes=1)
    manifest = json.loads((prepared / "manifest.json").read_text())
    (prepared / "manifest.json").write_text(json.dumps({**manifest, "tokenizer_hash": "f" * 64}))
    with pytest.raises(DataError, match=r"prepared with another tokenizer .* than model.tokenizer_path names"):
        make_loader(DataConfig(path=str(prepared)))


def test_other_data_raise_a_data_error(prepared: Path, tmp_path: Path) -> None:
    source = SourceConfig(path=write_jsonl(tmp_path / "b.jsonl", DOCUMENTS[1:]))
    with pytest.raises(DataError, match="begun with other data"):
        prepare(source, "data", "", prepared, processes=1)


def test_prepared_data_as_input_raise_a_data_error(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is prepared already: train on it, or give the texts"):
        prepare(SourceConfig(path=str(prepared)), "data", "", tmp_path / "again", processes=1)
    assert not (tmp_path / "again").exists()


def test_second_prepare_in_one_folder_raises_a_data_error(prepared: Path, tmp_path: Path) -> None:
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", hold, str(prepared / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(DataError, match="another prepare is at work"):
            prepare(SourceConfig(path=str(tmp_path / "a.jsonl")), "data", "", prepared, processes=1)
        holder.communicate(b"\n")
    prepare(SourceConfig(path=str(tmp_path / "a.jsonl")), "data", "", prepared, processes=1)


def test_all_sources_are_checked_before_the_first_is_tokenized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "good.jsonl", DOCUMENTS)
    for name in ("a", "b", "c"):
        (tmp_path / f"bad-{name}.jsonl").write_bytes(b'{"text": "cafe"}\n{"text": "caf\xe9"}\n')
    config = tmp_path / "run.toml"
    sources = ("good.jsonl", "bad-*.jsonl")
    config.write_text("".join(f"[[data.sources]]\npath = '{tmp_path / source}'\n" for source in sources))
    options = ["--job.config_file", str(config), "--prepare.output", str(tmp_path / "mix")]
    assert command.main(options) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'bad-a.jsonl'}: line 2 is not UTF-8 at byte 30 of the text; convert the file" in error
    assert f"2 other file(s) are not UTF-8 either: {tmp_path / 'bad-b.jsonl'}, {tmp_path / 'bad-c.jsonl'}" in error
    assert not list(tmp_path.glob("mix/*"))


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_files_that_are_not_utf8_are_skipped_with_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(4):
        (tmp_path / f"texts/{number}.{kind}").write_bytes(b'{"text": "caf%s"}\n' % (b"\xe9" if number % 2 else b"e"))
    options = ["--data.path", str(tmp_path / "texts"), "--data.skip_not_utf8", "--prepare.output"]
    assert command.main([*options, str(tmp_path / "prepared")]) == 0
    names = ", ".join(str(tmp_path / f"texts/{number}.{kind}") for number in (1, 3))
    assert capsys.readouterr().err.count(f"skipped 2 of 4 file(s) that are not UTF-8: {names}\n") == 1


def text_folder(path: Path) -> str:
    path.mkdir()
    (path / "a.txt").write_text("some words " * 50)
    return str(path)


def test_disk_failure_in_a_worker_raises_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("torchtrain.datasets.local_files.start_of_piece", fail)
    monkeypatch.setattr("torchtrain.datasets.text_sources.PAUSES_SECONDS", ())
    with pytest.raises(StorageError, match=r"a.txt cannot be read: Input/output error"):
        prepare(SourceConfig(path=text_folder(tmp_path / "texts")), "data", "", tmp_path / "prepared", processes=1)


def test_file_system_without_locks_raises_a_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("torchtrain.plugins.prepared_data.tokenize_dataset.fcntl.lockf", fail)
    with pytest.raises(DataError, match=r"prepared cannot be written: No locks available"):
        prepare(SourceConfig(path=text_folder(tmp_path / "texts")), "data", "", tmp_path / "prepared", processes=1)


def test_ctrl_c_logs_that_the_same_command_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenize_dataset, "_run", interrupted)
    options = ["--data.path", text_folder(tmp_path / "texts"), "--prepare.output", str(tmp_path / "prepared")]
    assert command.main(options) == 130
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("run the same command again to resume")
    assert second.endswith("stopped by Ctrl-C")


def prepare_share(source: SourceConfig, folder: Path, rank: int, world_size: int) -> bool:
    """Prepare the share of one of several processes; returns whether the manifest was written."""
    return prepare(source, "data", "", folder, processes=1, rank=rank, world_size=world_size) is not None


def write_inputs(folder: Path, kind: str) -> SourceConfig:
    """Documents in files of one kind, some of which are larger than a shard."""
    folder.mkdir()
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        for number, documents in enumerate((DOCUMENTS[:40], DOCUMENTS[40:])):
            table = pyarrow.table({"n": list(range(len(documents))), "text": documents})
            pyarrow.parquet.write_table(table, folder / f"{number}.parquet", row_group_size=7)
    elif kind == "jsonl":
        write_jsonl(folder / "a.jsonl", [*DOCUMENTS[:40], None, 7, ""])
        (folder / "b.jsonl").write_text("no JSON\n\n" + json.dumps({"text": "a long document " * 100}) + "\n")
        lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in ("zwölf €", *DOCUMENTS[40:]))
        (folder / "c.jsonl").write_bytes(("\ufeff" + lines).encode().removesuffix(b"\n"))
    elif kind == "jsonl.gz":
        for number in range(5):
            text = Path(write_jsonl(folder / "a.jsonl", DOCUMENTS[12 * number : 12 * number + 12])).read_bytes()
            (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(text, mtime=0))
        (folder / "a.jsonl").unlink()
    else:
        for number, text in enumerate(DOCUMENTS):
            (folder / f"{number:02}.txt").write_text(text)
    return SourceConfig(path=str(folder))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "jsonl.gz", "txt"])
def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path, kind: str) -> None:
    source = write_inputs(tmp_path / "texts", kind)
    copy = opened_text(source)  # documents of the converted copy, in the order of the files
    texts = [text for part in range(copy.parts) for _, text in copy.read(part, 0) if text]
    alone = tmp_path / "1"
    assert prepare_share(source, alone, 0, 1)
    assert tokens_of(alone) == [token for text in texts for token in TOKENIZER.encode(text, bos=True, eos=True)]
    for world_size in (2, 5):
        folder = tmp_path / str(world_size)
        *others, last = [prepare_share(source, folder, rank, world_size) for rank in reversed(range(world_size))]
        assert (others, last) == ([False] * (world_size - 1), True)
        assert contents(folder) == contents(alone)


def test_process_that_was_killed_is_replaced_by_the_same_command(tmp_path: Path) -> None:
    source = write_inputs(tmp_path / "texts", "jsonl")
    prepare_share(source, tmp_path / "alone", 0, 1)
    folder = tmp_path / "shared"
    assert not prepare_share(source, folder, 0, 3)
    assert not prepare_share(source, folder, 2, 3)
    done = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tokens")}
    (folder / "shard-00001.tokens.0a1b2c3d.partial").write_bytes(b"left by process 1")
    assert [prepare_share(source, folder, rank, 3) for rank in (0, 1, 2)] == [False, True, True]
    assert contents(folder) == contents(tmp_path / "alone")
    assert [name for name, written in done.items() if (folder / name).stat().st_mtime_ns != written] == []
    with pytest.raises(DataError, match="begun with other data"):
        prepare_share(write_inputs(tmp_path / "others", "txt"), folder, 0, 3)


def test_each_line_is_in_exactly_one_range() -> None:
    content = b'{"text": "one"}\n\n{"text": "two"}\n{"text": "three"}'
    lines = [(0, '{"text": "one"}'), (16, ""), (17, '{"text": "two"}'), (33, '{"text": "three"}')]
    for cut in range(1, len(content)):
        ranges = ((0, cut), (cut, len(content)))
        found = [list(file_formats._lines_in_range(io.BytesIO(content), *one)) for one in ranges]
        assert found[0] + found[1] == lines
        assert [offset for offset, _ in found[0] if not (offset < cut)] == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"SLURM_STEP_NUM_TASKS": "64", "SLURM_PROCID": "5"}, (5, 64)),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"}, (0, 1)),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}, (2, 4)),
        ({"SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "5"}, (2, 4)),
        (
            {
                "SLURM_ARRAY_TASK_COUNT": "3",
                "SLURM_ARRAY_TASK_ID": "4",
                "SLURM_ARRAY_TASK_STEP": "2",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": "1",
            },
            (5, 6),
        ),
        ({"SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_ID": "9", "SLURM_ARRAY_TASK_MIN": "3"}, None),
    ],
)
def test_share_of_a_process_follows_its_launcher(
    environment: dict[str, str], expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "RANK", "WORLD_SIZE")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if expected is None:
        with pytest.raises(ConfigError, match="must be consecutive, as in --array=0-63"):
            process_share()
    else:
        assert process_share() == expected


def test_processes_of_torchrun_prepare_together_after_one_is_killed(tmp_path: Path) -> None:
    source = write_inputs(tmp_path / "texts", "jsonl")
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    options = ("torchtrain.prepare", "--data.path", str(source.path), "--prepare.output")
    checked_command(*options, str(alone), hook=use_small_shards)
    ranks, _ = start_command(tmp_path, *options, str(shared), ranks=2, hook=use_small_shards_slowly)
    while complete_shards(shared) < 3:
        assert None in [rank.exitcode for rank in ranks]
        time.sleep(0.005)
    for rank in ranks:
        rank.kill()
        rank.join()
    assert not (shared / "manifest.json").exists()
    checked_command(*options, str(shared), ranks=2, hook=use_small_shards)
    assert contents(shared) == contents(alone)


def test_process_that_finishes_last_reports_the_result(tmp_path: Path) -> None:
    source = write_inputs(tmp_path / "texts", "jsonl")
    command = ("torchtrain.prepare", "--data.path", str(source.path), "--prepare.output", str(tmp_path / "out"))
    first, last = (
        checked_command(*command, environment={"RANK": rank, "WORLD_SIZE": "2"}, hook=use_small_shards).stderr
        for rank in "01"
    )
    assert "shards are complete. The process that finishes last writes the manifest" in first
    assert "to train on it" not in first
    assert f"[rank 1] {tmp_path}/out: " in last
    assert "to train on it: --data.path" in last


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_shards_raise_a_data_error(prepared: Path) -> None:
    damage(prepared / "shard-00007.tokens")
    with pytest.raises(DataError, match=r"shard-00007.tokens is damaged"):
        make_loader(DataConfig(path=str(prepared)))
    make_loader(DataConfig(path=str(prepared), verify_gib=0))  # larger data are verified on request only
    assert command.main(["--prepare.output", str(prepared), "--prepare.verify"]) == 2
    damage(prepared / "shard-00007.tokens")  # restores the flipped bit
    assert command.main(["--prepare.output", str(prepared), "--prepare.verify"]) == 0
    damage(prepared / "shard-00003.documents")
    assert command.main(["--prepare.output", str(prepared), "--prepare.verify"]) == 2


def test_missing_and_truncated_shards_raise_a_data_error(prepared: Path) -> None:
    path = prepared / "shard-00007.tokens"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    with pytest.raises(DataError, match=rf"shard-00007.tokens has {len(content) - 2} bytes, not {len(content)}"):
        make_loader(DataConfig(path=str(prepared)))
    path.unlink()
    with pytest.raises(DataError, match=r"shard-00007.tokens is missing"):
        make_loader(DataConfig(path=str(prepared)))
    (prepared / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"its manifest.json is damaged"):
        make_loader(DataConfig(path=str(prepared)))


def test_data_shorter_than_one_window_raise_a_data_error(prepared: Path) -> None:
    with pytest.raises(DataError, match=r"tokens do not fill a window of training.seq_len \+ 1 = 100001 tokens"):
        make_loader(DataConfig(path=str(prepared)), seq_len=100_000)


def test_sources_without_text_raise_a_data_error(tmp_path: Path) -> None:
    source = SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", [None, None]))
    with pytest.raises(DataError, match="no text in its 2 documents"):
        prepare(source, "data", "", tmp_path / "prepared", processes=1)


def test_windows_span_shards(prepared: Path) -> None:
    tokens = tokens_of(prepared)
    shards = PreparedManifest.read(open_folder(str(prepared)), "").shards
    opened = TokenizedDataset(open_folder(str(prepared)), TOKENIZER.content_hash, 0, "")
    assert len(opened) == len(tokens)
    out = np.empty(5 * max(shard.tokens for shard in shards), dtype=np.int64)
    for start in (0, 1, shards[0].tokens - 1, shards[0].tokens, len(tokens) - len(out)):
        opened.read([start], [out])
        assert out.tolist() == tokens[start : start + len(out)]


@pytest.mark.parametrize("requested", [0, 5])
def test_number_of_worker_processes_is_the_configured_one(
    requested: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = requested or min(len(os.sched_getaffinity(0)), len(DOCUMENTS))  # 0: all cores
    barrier = multiprocessing.get_context("fork").Barrier(processes, timeout=120)
    first_here = [True]  # every forked process has its own copy
    encode = type(TOKENIZER).encode

    def encode_and_record(tokenizer: Tokenizer, text: str, *, bos: bool, eos: bool) -> list[int]:
        if first_here:
            first_here.clear()
            barrier.wait()  # so that no process can do all the work before another starts
        with open(tmp_path / "log", "a") as log:
            log.write(f"{os.getpid()} {text.splitlines()[0]}\n")
        return encode(tokenizer, text, bos=bos, eos=eos)

    monkeypatch.setattr(type(TOKENIZER), "encode", encode_and_record)
    source, output = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS), str(tmp_path / "prepared")
    options = ["--data.path", source, "--prepare.output", output, "--prepare.processes", str(requested)]
    assert command.main(options) == 0
    lines = [line.split(" ", 1) for line in (tmp_path / "log").read_text().splitlines()]
    assert len({pid for pid, _ in lines} - {str(os.getpid())}) == processes
    assert sorted(text for _, text in lines) == sorted(text.splitlines()[0] for text in DOCUMENTS)


def test_each_source_has_its_own_folder(tmp_path: Path) -> None:
    first, second = (write_jsonl(tmp_path / f"{n}.jsonl", DOCUMENTS[n::2]) for n in range(2))
    config = tmp_path / "mix.toml"
    config.write_text(f'[[data.sources]]\npath = "{first}"\n[[data.sources]]\npath = "{second}"\nweight = 2\n')
    assert command.main(["--job.config_file", str(config), "--prepare.output", str(tmp_path / "mix")]) == 0
    for number, name in enumerate(("first", "second")):
        alone = write_prepared(tmp_path / name, str(tmp_path / f"{number}.jsonl"))
        assert tokens_of(tmp_path / "mix" / str(number)) == tokens_of(Path(alone))
    assert command.main([]) == 2


def test_death_of_a_worker_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(tokenizer: Tokenizer, text: str, *, bos: bool, eos: bool) -> list[int]:  # noqa: ARG001
        if text.startswith("document 0 "):
            os._exit(9)
        return signal.pause()  # type: ignore[return-value]

    monkeypatch.setattr(type(TOKENIZER), "encode", die)
    source = SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))
    before = set(multiprocessing.active_children())  # started by other tests
    with pytest.raises(DataError, match=r"ended with code 9, .* fewer --prepare.processes"):
        prepare(source, "data", "", tmp_path / "prepared", processes=2)
    assert set(multiprocessing.active_children()) <= before


def test_loading_a_state_at_window_ten_million_reads_nothing_before_it(tmp_path: Path) -> None:
    """A loader resumes at any position at once: nothing is read or kept in memory for earlier windows."""
    seq_len, windows = 256, 20_000_000
    tokens = windows * seq_len + 1
    with open(tmp_path / "shard-00000.tokens", "wb") as file:
        file.truncate(tokens * 2)  # 10 GB of zeros that take no space on disk
    shard = Shard("shard-00000", tokens, 1, 0, 0, "", "", 0)
    (tmp_path / "manifest.json").write_text(
        json.dumps(asdict(PreparedManifest(TOKENIZER.content_hash, TOKENIZER.vocab_size, "", "", 1, (shard,))))
    )
    config = DataConfig(path=str(tmp_path), prefetch=0)
    loader = make_loader(config, seq_len=seq_len)
    state = loader.state_dict()["rows"]
    state[:, 0] = 10_000_000 // 8
    state[:, 1] = 10_000_000
    loader.load_state_dict({"rows": state})
    batch = next(loader)
    assert batch.tokens.shape == (8, seq_len)
    assert loader.state_dict()["rows"][:, 1].tolist() == [10_000_008] * 8
    order = loader.streams[0][0]._order  # type: ignore[attr-defined]
    assert order._windows_of_group.cache_info().currsize == 1
    assert len(order._windows_of_group(0, order.find(0, 10_000_000)[0])) < windows / 30
    assert take(loader, 2).count_nonzero() == 0


def test_loader_reads_from_disk_only_what_it_uses(tmp_path: Path) -> None:
    write_random_tokens(tmp_path / "cold", 2, 1 << 23)
    files = sorted((tmp_path / "cold").glob("*.tokens"))
    drop_from_cache(tmp_path / "cold")
    if sum(map(cached_bytes, files)) > 0:
        pytest.skip("needs a file system on a disk")
    batches = make_loader(DataConfig(path=str(tmp_path / "cold"), prefetch=0, verify_gib=0), seq_len=8192)
    take(batches, 2)
    used = 2 * 8 * 8193 * 2
    assert used <= sum(map(cached_bytes, files)) <= 1.5 * used


def test_all_windows_of_a_batch_are_prefetched_before_the_first_is_read(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    advise, pread = os.posix_fadvise, os.pread

    def advised(file: int, start: int, length: int, advice: int) -> None:
        calls.extend(["advise"] * (advice == os.POSIX_FADV_WILLNEED))
        advise(file, start, length, advice)

    def read(file: int, length: int, start: int) -> bytes:
        calls.append("read")
        return pread(file, min(length, 10), start)  # a short read, which some file systems return

    whole = take(make_loader(DataConfig(path=str(prepared), prefetch=0)), 1)
    monkeypatch.setattr(os, "posix_fadvise", advised)
    monkeypatch.setattr(os, "pread", read)
    assert torch.equal(take(make_loader(DataConfig(path=str(prepared), prefetch=0)), 1), whole)
    assert calls == sorted(calls)
    assert calls.count("advise") >= 8


def test_failed_reads_are_retried_for_minutes_then_raise_a_storage_error(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, pauses, pread = make_loader(DataConfig(path=str(prepared), prefetch=0)), list[float](), os.pread
    whole = take(make_loader(DataConfig(path=str(prepared), prefetch=0)), 1)

    def fail(*_: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    monkeypatch.setattr("torchtrain.files.time.sleep", pauses.append)
    with pytest.raises(StorageError, match=r"shard-\d+.tokens cannot be read: Input/output error"):
        next(batches)
    assert sum(pauses) > 200
    monkeypatch.setattr("torchtrain.files.time.sleep", lambda _: monkeypatch.setattr(os, "pread", pread))
    assert torch.equal(take(make_loader(DataConfig(path=str(prepared), prefetch=0)), 1), whole)
    for shard in prepared.glob("*.tokens"):
        os.truncate(shard, 2)
    with pytest.raises(DataError, match=r"shard-\d+.tokens is shorter than when the run began"):
        take(batches, 1)


def test_four_byte_tokens_are_read_at_any_offset(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.tokens").write_bytes(np.arange(70_000, 70_100, dtype="<u4").tobytes())
    manifest = PreparedManifest("hash", 128_256, "", "", 1, (Shard("shard-00000", 100, 1, 0, 0, "", "", 0),))
    (tmp_path / "manifest.json").write_text(json.dumps(asdict(manifest)))
    opened, out = TokenizedDataset(open_folder(str(tmp_path)), "hash", 0, ""), np.empty(20, dtype=np.int64)
    for start in (0, 1, 63, 80):
        opened.read([start], [out])
        assert out.tolist() == list(range(70_000 + start, 70_020 + start))


def stderr_on_a_full_disk() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)


def stderr_is_a_closed_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)


@pytest.mark.parametrize("hook", [stderr_on_a_full_disk, stderr_is_a_closed_pipe])
def test_prepare_continues_if_its_progress_cannot_be_written(tmp_path: Path, hook: Callable[[], None]) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    options = ("--data.path", texts, "--prepare.output", str(tmp_path / "out"))
    assert run_command("torchtrain.prepare", *options, hook=hook).returncode == 0
    assert (tmp_path / "out/manifest.json").exists()


def test_shard_records_are_removed_after_the_manifest_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[int] = []
    monkeypatch.setattr(
        tokenize_dataset, "fsync_folder", lambda folder, _: records.append(len(list(folder.glob("shard-*.json"))))
    )
    prepare(SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)), "data", "", tmp_path / "out", 1)
    assert records == [len(list((tmp_path / "out").glob("*.tokens")))]
    assert not list((tmp_path / "out").glob("shard-*.json"))


def test_number_of_shards_depends_on_the_size_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for size, shards in ((1, 1), (135_000, 1), (600_000, 3), (1_300_000, 7)):
        documents = ["some words " * 10] * (size // 110 + 1)
        folder = tmp_path / str(size)
        manifest = prepare(
            SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", documents)), "data", "", folder, processes=2
        )
        assert manifest is not None
        assert len(manifest.shards) == manifest.shard_count == shards
        assert len(list(folder.glob("shard-*"))) == 2 * shards
    for documents, gib, shards in ((10**6, 1, 976), (10**7, 10, 4096), (1000, 1, 64), (10, 1, 10)):
        assert len(input_splits.split_documents(documents, gib << 30)) == shards
