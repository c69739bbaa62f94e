"""torchtrain.prepare: the same bytes after interruptions and for any number of processes; errors that name the rule."""

import base64
import errno
import gc
import gzip
import io
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_samples import DOCUMENTS, TOKENIZER, make_loader, write_jsonl, write_tokens
from forked_command import checked_command, run_command, start_command

from torchtrain import prepare as command
from torchtrain.datasets import standard_library, text_input, tokenize_text
from torchtrain.datasets.builtin_sources import Files
from torchtrain.datasets.data_source import SourceContext, text_hash
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.datasets.text_input import split_files
from torchtrain.datasets.token_folder import COLUMNS, LocalFolder, TokenManifest
from torchtrain.datasets.tokenize_text import tokenize
from torchtrain.datasets.tokenizers import Tokenizer, load_tokenizer
from torchtrain.environment import process_share
from torchtrain.errors import ConfigError, DataError
from torchtrain.files import hash_of


@pytest.fixture(autouse=True)
def many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_input, "MIN_SHARD_BYTES", 1)


def prepare(
    source: SourceConfig,
    folder: Path,
    rank: int = 0,
    world_size: int = 1,
    processes: int = 1,
    tokenizer: Tokenizer = TOKENIZER,
) -> TokenManifest | None:
    """What the command does with a source; returns the manifest if it was written."""
    text = Files.open_text(source, SourceContext("data", tokenizer))
    folder.mkdir(exist_ok=True)
    return tokenize(text, tokenizer, LocalFolder(folder), processes, rank=rank, world_size=world_size)


def run(*options: str) -> str:
    """Run the command in this process, and return the last line of its log, such as its error."""
    with redirect_stderr(io.StringIO()) as log:
        command.main(options)
    return log.getvalue().splitlines()[-1]


def contents(folder: Path) -> dict[str, str]:
    """Hash of each file."""
    return {path.name: hash_of(path) for path in folder.iterdir() if path.name != ".lock"}


def tokens_of(folder: Path) -> list[int]:
    manifest = json.loads((folder / "manifest.json").read_text())
    parts = [np.fromfile(folder / f"{shard['name']}.tokens", "<u2") for shard in manifest["shards"]]
    return np.concatenate(parts).tolist()  # type: ignore[no-any-return]


def use_small_shards() -> None:
    """A hook: shards are as small as possible."""
    text_input.MIN_SHARD_BYTES = 1


def use_small_shards_slowly() -> None:
    use_small_shards()
    write_slowly()


def use_fewer_files() -> None:
    """A hook: only a sixteenth of the files of the standard library is tokenized."""
    text_input.MIN_SHARD_BYTES = 1
    found = standard_library.standard_library_files()[::16]
    standard_library.standard_library_files = lambda: found


def use_fewer_files_slowly() -> None:
    use_fewer_files()
    write_slowly()


def write_slowly() -> None:
    write_shard = tokenize_text._write_shard

    def pause_and_write(*arguments: Any) -> int:
        time.sleep(0.03)
        return write_shard(*arguments)

    tokenize_text._write_shard = pause_and_write


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
    write_shard = tokenize_text._write_shard

    def collect_and_write(*arguments: Any) -> int:
        gc.collect()
        return write_shard(*arguments)

    monkeypatch.setattr(tokenize_text, "_write_shard", collect_and_write)
    gc.disable()
    try:
        OwnedByProcess()
        prepare(SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", DOCUMENTS * 2)), tmp_path / "out", processes=2)
    finally:
        gc.enable()


def test_prepare_killed_three_times_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    checked_command("torchtrain.prepare", "--prepare.output", str(uninterrupted), hook=use_fewer_files)
    rng = random.Random(0)
    for _ in range(3):
        prepare_slowly = ("torchtrain.prepare", "--prepare.output", str(killed))
        [process], _ = start_command(tmp_path, *prepare_slowly, hook=use_fewer_files_slowly)
        wanted = complete_shards(killed) + rng.randrange(1, 9)  # there are 64 shards in total
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
    monkeypatch.setattr(standard_library, "standard_library_files", standard_library.standard_library_files)
    use_fewer_files()
    texts = itertools.islice(standard_library.standard_library().texts(), 20)
    expected = [TOKENIZER.encode(text, bos=True, eos=True) for text in texts]
    assert tokens_of(killed)[: sum(map(len, expected))] == [token for document in expected for token in document]


def test_prepare_resumes_after_the_last_complete_shard(tmp_path: Path) -> None:
    source = SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", DOCUMENTS))
    prepare(source, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    folder = tmp_path / "part"
    manifest = TokenManifest.read(LocalFolder(tmp_path / "whole"), "")
    folder.mkdir()
    plan = json.loads((tmp_path / "whole/manifest.json").read_text())
    (folder / "unfinished.json").write_text(json.dumps({**plan, "shards": []}))
    (folder / "shard-00003.tokens.999.partial").write_bytes(b"left by a killed process")
    kept = manifest.shards[5]
    for suffix in ("tokens", "documents"):
        shutil.copy(tmp_path / "whole" / f"{kept.name}.{suffix}", folder)
    (folder / f"{kept.name}.json").write_text(json.dumps(plan["shards"][5]))
    written = (folder / f"{kept.name}.tokens").stat().st_mtime_ns
    lost = manifest.shards[6]  # its record exists, but its tokens are truncated
    (folder / f"{lost.name}.json").write_text(json.dumps(plan["shards"][6]))
    (folder / f"{lost.name}.tokens").write_bytes((tmp_path / "whole" / f"{lost.name}.tokens").read_bytes()[:-2])
    (folder / f"{manifest.shards[7].name}.json").write_text('{"cut')
    (folder / "download.partial").write_bytes(b"another program writes it")
    prepare(source, folder)
    (folder / "download.partial").unlink()
    assert contents(folder) == whole
    assert (folder / f"{kept.name}.tokens").stat().st_mtime_ns == written


def test_manifest_and_index_describe_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_input, "MIN_SHARD_BYTES", 900)
    first, second = [*DOCUMENTS[:20], None, 5, "", "zwölf \ud83d"], DOCUMENTS[20:30]
    for name, documents in (("a", first), ("b", second)):
        write_jsonl(tmp_path / f"{name}.jsonl", documents)
    folder = Path(write_tokens(tmp_path / "tokens", f"{tmp_path}/*.jsonl"))
    manifest = TokenManifest.read(LocalFolder(folder), "")
    assert (manifest.tokenizer_hash, manifest.vocab_size) == (TOKENIZER.content_hash, TOKENIZER.vocab_size)
    assert json.loads((folder / "files.json").read_text()) == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert len(manifest.shards) == manifest.shard_count > 2
    read = [0, 0]  # rows of each file in earlier shards
    documents = []
    for shard in manifest.shards:
        index = np.fromfile(folder / f"{shard.name}.documents", "<u8")
        offsets, columns = index[: shard.documents + 1], index[shard.documents + 1 :].reshape(len(COLUMNS), -1).T
        assert (offsets[0], offsets[-1], shard.bytes) == (0, shard.tokens, columns[:, 0].sum())
        for tokens, (size, token_bytes, file, number, *digest) in zip(np.diff(offsets), columns.tolist(), strict=True):
            documents.append((tokens, size, token_bytes, file, read[file] + number, *digest))
        for file, rows in enumerate(shard.numbers, shard.first_file):
            read[file] += rows
    assert (read, sum(shard.skipped for shard in manifest.shards)) == ([24, 10], 3)
    rows = [(0, number, text) for number, text in enumerate(first)] + [(1, *row) for row in enumerate(second)]
    texts = [(file, number, text.replace("\ud83d", "?")) for file, number, text in rows if text and text != 5]
    encoded = [TOKENIZER.encode(text, bos=True, eos=True) for *_, text in texts]
    sizes = [(len(ids), sum(TOKENIZER.token_bytes[token] for token in ids)) for ids in encoded]
    assert documents == [
        (tokens, len(text.encode()), own, file, number, int(text_hash(text)[:16], 16), int(text_hash(text)[16:], 16))
        for (tokens, own), (file, number, text) in zip(sizes, texts, strict=True)
    ]


def test_vocabularies_above_65536_take_four_bytes_per_token() -> None:
    assert TokenManifest("", 1 << 16, "", "", 0).dtype == np.dtype("<u2")
    assert TokenManifest("", (1 << 16) + 1, "", "", 0).dtype == np.dtype("<u4")


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    return Path(write_tokens(tmp_path / "prepared", write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)))


def test_another_tokenizer_raises_a_data_error(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtrain.datasets.tokenizers.LLAMA3_RANKS", 256)
    other = tmp_path / "tokenizer.model"
    other.write_text("".join(f"{base64.b64encode(bytes((n,))).decode()} {n}\n" for n in range(256)))
    with pytest.raises(DataError, match="begun with another tokenizer"):
        prepare(SourceConfig(path=str(tmp_path / "a.jsonl")), prepared, tokenizer=load_tokenizer(str(other)))
    manifest = json.loads((prepared / "manifest.json").read_text())
    (prepared / "manifest.json").write_text(json.dumps({**manifest, "tokenizer_hash": "f" * 64}))
    with pytest.raises(DataError, match=r"tokenized by another tokenizer .* than model.tokenizer_path names"):
        make_loader(DataConfig(path=str(prepared)))


def test_other_data_raise_a_data_error(prepared: Path, tmp_path: Path) -> None:
    source = SourceConfig(path=write_jsonl(tmp_path / "b.jsonl", DOCUMENTS[1:]))
    with pytest.raises(DataError, match="begun with other data"):
        prepare(source, prepared)


def test_tokens_as_input_raise_a_data_error(prepared: Path, tmp_path: Path) -> None:
    options = ("--data.path", str(prepared), "--prepare.output", str(tmp_path / "again"))
    assert "is tokenized already: train on it, or give its text" in run(*options)
    assert not list((tmp_path / "again").iterdir())


def test_second_prepare_in_one_folder_raises_a_data_error(prepared: Path, tmp_path: Path) -> None:
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    holding = [sys.executable, "-c", hold, str(prepared / ".lock")]
    options = ("--data.path", str(tmp_path / "a.jsonl"), "--prepare.output", str(prepared))
    with subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert "another prepare is at work" in run(*options)
        holder.communicate(b"\n")
    assert "to train on it: --data.path" in run(*options)


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EIO])
def test_output_without_locks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def fail(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("torchtrain.datasets.tokenize_text.fcntl.lockf", fail)
    message = run("--data.path", text_folder(tmp_path / "texts"), "--prepare.output", str(tmp_path / "out"))
    assert f"out cannot be written: {os.strerror(error)}" in message


def test_parent_of_folders_of_tokens_raises_a_data_error(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    (tmp_path / "tokens").mkdir()
    both = tuple(write_tokens(tmp_path / f"tokens/{number}", file) for number in range(2))
    for path in (str(tmp_path / "tokens"), both):
        with pytest.raises(DataError, match=r"several folders \(.*tokens/0.*\); name each in a table"):
            make_loader(DataConfig(path=path))
    make_loader(DataConfig(path=both[0] + "/"))
    (tmp_path / "tokens/0/manifest.json").rename(tmp_path / "tokens/0/unfinished.json")
    with pytest.raises(DataError, match=r"tokens/0 has only a part of its tokens; run torchtrain.prepare again"):
        make_loader(DataConfig(path=both[0]))


def test_output_inside_the_data_is_rejected(tmp_path: Path) -> None:
    texts = text_folder(tmp_path / "texts")
    assert "is inside the data folder" in run("--data.path", texts, "--prepare.output", f"{texts}/out")


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
    skipped = "2 of 4" if kind == "txt" else "2"  # the beginning of text files is read when they are opened
    log = capsys.readouterr().err
    assert log.count(f"skipped {skipped} file(s) that are not UTF-8: {names}\n") == log.count("not UTF-8") == 1


def text_folder(path: Path) -> str:
    path.mkdir()
    (path / "a.txt").write_text("some words " * 50)
    return str(path)


def test_ctrl_c_logs_that_the_same_command_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenize_text, "_run", interrupted)
    options = ["--data.path", text_folder(tmp_path / "texts"), "--prepare.output", str(tmp_path / "prepared")]
    assert command.main(options) == 130
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("run the same command again to resume")
    assert second.endswith("stopped by Ctrl-C")


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


@pytest.mark.parametrize(
    "kind", ["jsonl", "parquet", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("jsonl.gz", "txt"))]
)
def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path, kind: str) -> None:
    source = write_inputs(tmp_path / "texts", kind)
    texts = [text for text in DOCUMENTS if text]
    if kind == "jsonl":
        texts[40:40] = ["a long document " * 100, "zwölf €"]
    alone = tmp_path / "1"
    assert prepare(source, alone)
    assert tokens_of(alone) == [token for text in texts for token in TOKENIZER.encode(text, bos=True, eos=True)]
    for world_size in (2, 5):
        folder = tmp_path / str(world_size)
        *others, last = [prepare(source, folder, rank, world_size) for rank in reversed(range(world_size))]
        assert others == [None] * (world_size - 1)
        assert last is not None
        assert contents(folder) == contents(alone)


def test_process_that_was_killed_is_replaced_by_the_same_command(tmp_path: Path) -> None:
    source = write_inputs(tmp_path / "texts", "jsonl")
    prepare(source, tmp_path / "alone")
    folder = tmp_path / "shared"
    assert prepare(source, folder, 0, 3) is None
    assert prepare(source, folder, 2, 3) is None
    done = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tokens")}
    (folder / "shard-00001.tokens.0a1b2c3d.partial").write_bytes(b"left by process 1")
    assert [prepare(source, folder, rank, 3) is None for rank in (0, 1, 2)] == [True, False, False]
    assert contents(folder) == contents(tmp_path / "alone")
    assert [name for name, written in done.items() if (folder / name).stat().st_mtime_ns != written] == []
    with pytest.raises(DataError, match="begun with other data"):
        prepare(write_inputs(tmp_path / "others", "txt"), folder, 0, 3)


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
    assert "this process has written its share. The process that finishes last writes the manifest" in first
    assert "to train on it" not in first
    assert f"[rank 1] {tmp_path}/out: " in last
    assert "to train on it: --data.path" in last


def test_sources_without_text_raise_a_data_error(tmp_path: Path) -> None:
    source = SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", [None, None]))
    for _ in range(2):  # also if all shards are there
        with pytest.raises(DataError, match="no text in its 2 documents"):
            prepare(source, tmp_path / "out")


@pytest.mark.parametrize("requested", [0, 5])
def test_number_of_worker_processes_is_the_configured_one(
    requested: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize_text, "LEAST_FORKED", 0)
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
        alone = write_tokens(tmp_path / name, str(tmp_path / f"{number}.jsonl"))
        assert tokens_of(tmp_path / "mix" / str(number)) == tokens_of(Path(alone))
    assert command.main([]) == 2


def test_death_of_a_worker_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(tokenizer: Tokenizer, text: str, *, bos: bool, eos: bool) -> list[int]:  # noqa: ARG001
        if text.startswith("document 0 "):
            os._exit(9)
        return signal.pause()  # type: ignore[return-value]

    monkeypatch.setattr(type(TOKENIZER), "encode", die)
    source = SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", DOCUMENTS * 2))
    before = set(multiprocessing.active_children())  # started by other tests
    with pytest.raises(DataError, match=r"ended with code 9, .* fewer --prepare.processes"):
        prepare(source, tmp_path / "out", processes=2)
    assert set(multiprocessing.active_children()) <= before


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
        tokenize_text, "fsync_folder", lambda folder, _: records.append(len(list(folder.glob("shard-*.json"))))
    )
    prepare(SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)), tmp_path / "out")
    assert records == [len(list((tmp_path / "out").glob("*.tokens")))]
    assert not list((tmp_path / "out").glob("shard-*.json"))


def test_number_of_shards_depends_on_the_size_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for size, shards in ((1, 1), (1 << 18, 1), (600_000, 3), (1_300_000, 5), (1 << 24, 64), (1 << 34, 256)):
        assert len(split_files([size], [True])) == shards
    assert len(split_files([1 << 34, 1 << 20, 1 << 20], [False, True, True])) == 2  # files that stay whole
    for documents, shards in ((10**6, 976), (10**7, 4096), (4096, 64), (4000, 1)):
        assert len(text_input.TextsInMemory([""] * documents, "").shard_sizes) == shards
