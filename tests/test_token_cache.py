"""Text is tokenized once, into the cache: found again, shared by ranks and runs, resumed, and replaced if damaged."""

import errno
import fcntl
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist
from captured_log import captured_log
from data_samples import DOCUMENTS, TOKENIZER, write_jsonl
from disk_faults import DiskFaults
from forkserver import context
from gloo_pool import GlooPool
from json_tokenizers import save_tokenizer

from torchtrain import cache as command
from torchtrain.datasets import cache_folder, local_files, text_input, token_cache, tokenize_text
from torchtrain.datasets.build import open_source
from torchtrain.datasets.data_source import SourceContext
from torchtrain.datasets.options import SourceConfig
from torchtrain.datasets.text_input import TextsInMemory
from torchtrain.datasets.token_cache import tokenize_in_memory
from torchtrain.datasets.token_dataset import TokenDataset
from torchtrain.datasets.tokenizers import Tokenizer, load_tokenizer
from torchtrain.errors import ConfigError, DataError, TorchtrainError
from torchtrain.files import hash_of

MANY = [f"{text} {number}" for number in range(8) for text in DOCUMENTS]
SHARD_BYTES = 8000  # at least, so that the text has several shards
ENCODED = [token for text in MANY for token in TOKENIZER.encode(text, bos=True, eos=True)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a test, in which also small text has several shards."""
    monkeypatch.setattr(text_input, "MIN_SHARD_BYTES", SHARD_BYTES)
    monkeypatch.setenv("TORCHTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def text(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "a.jsonl", MANY)


def open_text(
    path: Path | str, verify_bytes: float = math.inf, tokenizer: Tokenizer = TOKENIZER, **options: Any
) -> TokenDataset:
    """Open a source as a run does, on all ranks if there are several."""
    group = dist.group.WORLD if dist.is_initialized() else None
    source = SourceConfig(path=str(path), **options)
    opened = open_source(source, SourceContext("data", tokenizer, verify_bytes=verify_bytes), group)
    assert isinstance(opened, TokenDataset)
    return opened


def tokens_of(source: TokenDataset) -> list[int]:
    out = np.empty(len(source), dtype=np.int64)
    source.read([(0, len(out))], [out])
    return out.tolist()  # type: ignore[no-any-return]


def folder_of(source: TokenDataset) -> Path:
    return Path(source.folder.location)


def contents(folder: Path) -> dict[str, str]:
    """Hash of each file."""
    return {path.name: hash_of(path) for path in folder.iterdir()}


@contextmanager
def written_shards() -> Iterator[list[str]]:
    """A list, to which the name of each shard is appended that this process writes."""
    names, write = list[str](), tokenize_text._write_shard

    def recorded(*arguments: Any) -> int:
        names.append(arguments[-2])
        return write(*arguments)

    with patch.object(tokenize_text, "_write_shard", recorded):
        yield names


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("s3://bucket/cache", r"TORCHTRAIN_CACHE = 's3://bucket/cache' must be a local folder"),
        ("{data}/cache", r"the cache for tokens, .*, is inside the data folder .*: set TORCHTRAIN_CACHE to a folder"),
        ("~nobody-of-this-name/cache", r"~nobody-of-this-name/cache, the cache for tokens: .*; set TORCHTRAIN_CACHE"),
    ],
)
def test_unusable_cache_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write_jsonl(data / "a.jsonl", MANY)
    monkeypatch.setenv("TORCHTRAIN_CACHE", value.format(data=data))
    with pytest.raises(ConfigError, match=message):
        open_text(data)


def test_cache_in_a_hidden_folder_of_the_data_is_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", MANY)
    monkeypatch.setenv("TORCHTRAIN_CACHE", str(tmp_path / ".cache"))
    first = tokens_of(open_text(tmp_path))
    assert tokens_of(open_text(tmp_path)) == first


def test_user_without_a_home_folder_is_told_to_name_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TORCHTRAIN_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**30)
    with pytest.raises(ConfigError, match=r"~/.cache/torchtrain, the cache for tokens: .* set TORCHTRAIN_CACHE"):
        cache_folder.cache_folder()


# A later start


def test_second_start_finds_the_tokens_and_reads_no_text(
    text: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_text(text)
    assert tokens_of(first) == ENCODED
    assert first.manifest.shard_count > 5

    def fail(*_: object) -> None:
        raise AssertionError("the text is read")

    monkeypatch.setattr(text_input, "read_split", fail)
    with captured_log() as log:
        second = open_text(text)
    assert tokens_of(second) == ENCODED
    (folder,) = (cache / "tokens").glob("*/")
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert log == [f"data.path = '{text}': {len(ENCODED):,} tokens in the cache, {folder} ({size / 1e6:.3g} MB)"]


def test_tokens_are_found_by_content_tokenizer_column_and_options(tmp_path: Path, text: str) -> None:
    rows = [{"text": text, "other": text.upper()} for text in MANY]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("two.txt", "two.json"):  # each reads the same bytes in another way
        shutil.copy(tmp_path / "two.jsonl", tmp_path / name)
    other = load_tokenizer(str(save_tokenizer(tmp_path / "tokenizer")))
    opened = [
        *(open_text(text), open_text(tmp_path / "two.jsonl"), open_text(tmp_path / "two.jsonl", text_column="other")),
        *(open_text(tmp_path / "two.jsonl", skip_not_utf8=True), open_text(tmp_path / "two.jsonl", tokenizer=other)),
        *(open_text(tmp_path / "two.txt"), open_text(tmp_path / "two.json")),
        *(open_text(f"{tmp_path}/two.json*"), tokenize_in_memory(TextsInMemory(MANY, "memory"), TOKENIZER)),
    ]
    assert len({folder_of(source) for source in opened}) == len(opened)
    (tmp_path / "copy").mkdir()
    shutil.copy(text, tmp_path / "copy/b.jsonl")
    with written_shards() as written:
        copy = open_text(tmp_path / "copy/b.jsonl")
        assert folder_of(copy) == folder_of(open_text(tmp_path / "copy")) == folder_of(opened[0])
    assert not written
    assert copy.file_table().files[0].name == str(tmp_path / "copy/b.jsonl")
    assert copy.describe(0, 0).file == str(tmp_path / "copy/b.jsonl")


def test_files_beyond_the_table_of_an_identity_are_found_by_their_content_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "MAX_FILES", 2)
    for number in range(3):
        (tmp_path / "texts").mkdir(exist_ok=True)
        write_jsonl(tmp_path / f"texts/{number}.jsonl", MANY[number:])
    first = open_text(tmp_path / "texts")
    shutil.copytree(tmp_path / "texts", tmp_path / "copy", copy_function=shutil.copyfile)  # with other times
    with written_shards() as written:
        assert folder_of(open_text(tmp_path / "copy")) == folder_of(first)
    assert not written


@pytest.mark.parametrize("verify_bytes", [math.inf, 1000])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_file_rewritten_with_the_same_size_and_time_is_tokenized_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, verify_bytes: float
) -> None:
    monkeypatch.setattr(local_files, "_WHOLE_BYTES", 1000)  # of a larger file, three blocks are hashed for its identity
    monkeypatch.setattr(local_files, "_BLOCK_BYTES", 100)
    file, lines = tmp_path / name, [json.dumps({"text": text}) + "\n" for text in MANY]
    file.write_text("".join(lines))
    before = file.stat()
    old = open_text(file, verify_bytes)
    lines[200] = lines[200].replace("document 20 ", "document 02 ")
    file.write_text("".join(lines))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    new = open_text(file, verify_bytes)
    assert len(new) == len(old)
    assert sum(a != b for a, b in zip(tokens_of(new), tokens_of(old), strict=True)) > 0
    assert (len(new.file_table().files[0].content) > 0) == (verify_bytes == math.inf)
    assert open_text(file, verify_bytes).identity() == new.identity() != old.identity()


def test_changed_text_is_tokenized_beside_the_tokens_of_the_old_one(tmp_path: Path, text: str) -> None:
    old = open_text(text)
    before = contents(folder_of(old))
    write_jsonl(tmp_path / "a.jsonl", [*MANY, "more"])
    new = open_text(text)
    assert tokens_of(new) == ENCODED + TOKENIZER.encode("more", bos=True, eos=True)
    assert contents(folder_of(old)) == before
    assert folder_of(new) != folder_of(old)


@pytest.mark.parametrize("moment", ["before it is read", "while it is read"])
def test_text_that_changes_meanwhile_is_one_error(text: str, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    file = Path(text)
    before, content = file.stat(), file.read_text()

    def rewrite() -> None:
        """The size and the modification time stay."""
        file.write_text(content.replace("document 20 ", "document 02 "))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    identify, read_split = token_cache.tokens_folder, text_input.read_split

    def after_hashing(*arguments: Any) -> Any:
        rewrite()
        return identify(*arguments)

    def after_reading(*arguments: Any) -> Any:
        yield from read_split(*arguments)
        rewrite()

    if moment == "before it is read":
        monkeypatch.setattr(token_cache, "tokens_folder", after_hashing)
    else:
        monkeypatch.setattr(text_input, "read_split", after_reading)
    with pytest.raises(DataError, match=rf"^{file} changed while it was tokenized: start again when nothing writes"):
        open_text(text)
    monkeypatch.setattr(token_cache, "tokens_folder", identify)
    monkeypatch.setattr(text_input, "read_split", read_split)
    changed = [re.sub("document 20 ", "document 02 ", text) for text in MANY]
    expected = [token for text in changed for token in TOKENIZER.encode(text, bos=True, eos=True)]
    assert tokens_of(open_text(text)) == expected


def test_what_was_skipped_is_logged_at_each_start(tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("a", None, 7, {}, "", "b")]
    (tmp_path / "a.jsonl").write_text("\n".join(["", *map(json.dumps, rows), "broken", "{}"]))
    for _ in range(2):
        with captured_log() as log:
            open_text(tmp_path / "a.jsonl")
        name = f"data.path = '{tmp_path}/a.jsonl'"
        assert f"{name}: skipped 1 malformed line(s), the first of them {tmp_path}/a.jsonl: line 8" in log
        assert f"{name}: skipped 5 document(s) that are empty, null or not text" in log


# Interrupted, damaged, and unwritable


def test_interrupted_start_resumes_with_the_shards_that_are_missing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = context().Process(target=die_in_shard_4, args=(text, str(tmp_path / "cache")))
    process.start()
    process.join()
    assert process.exitcode == 9
    (folder,) = (tmp_path / "cache/tokens").glob("*/")
    assert not (folder / "manifest.json").exists()
    (folder / "shard-00001.tokens").write_bytes(b"damaged")
    with written_shards() as written:
        resumed = open_text(text)
    names = [shard.name for shard in resumed.manifest.shards]
    assert written == [names[1], *names[4:]]
    monkeypatch.setenv("TORCHTRAIN_CACHE", str(tmp_path / "other"))
    assert contents(folder) == contents(folder_of(open_text(text)))


def die_in_shard_4(text: str, cache: str) -> None:
    os.environ["TORCHTRAIN_CACHE"] = cache
    text_input.MIN_SHARD_BYTES = SHARD_BYTES
    write = tokenize_text._write_shard

    def die(*arguments: Any) -> int:
        if arguments[-1] == 4:
            (Path(arguments[2].location) / "shard-00004.tokens.01234567.partial").write_bytes(b"left")
            os._exit(9)
        return write(*arguments)

    with patch.object(tokenize_text, "_write_shard", die):
        open_text(text)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("shard-00003.tokens", flip_a_bit),
        ("shard-00003.documents", flip_a_bit),
        ("shard-00003.tokens", lambda file: os.truncate(file, 10)),
        ("shard-00003.documents", Path.unlink),
        ("manifest.json", lambda file: file.write_text('{"format": 7}')),
        ("manifest.json", lambda file: os.truncate(file, 100)),
    ],
)
def test_damaged_tokens_are_written_again_with_a_warning(
    text: str, name: str, damage: Callable[[Path], object]
) -> None:
    folder = folder_of(open_text(text))
    before = contents(folder)
    damage(folder / name)
    with captured_log() as log:
        again = open_text(text)
    warning, _ = log
    assert warning.startswith(f"its tokens in the cache, {folder}, are damaged, and are written again: data.path = ")
    assert name in warning
    assert tokens_of(again) == ENCODED
    assert contents(folder) == before


def test_tokens_above_verify_gib_are_compared_by_size_only(text: str) -> None:
    folder = folder_of(open_text(text))
    flip_a_bit(folder / "shard-00003.tokens")
    assert open_text(text, verify_bytes=Path(text).stat().st_size).identity() == open_text(text).identity()
    with captured_log() as log:
        os.truncate(folder / "shard-00003.tokens", 10)
        open_text(text)
    assert "shard-00003.tokens has 10 bytes, not " in log[0]


def outcome(text: str, cache: str) -> str:
    """Of a start: the number of tokens, or its error."""
    with patch.dict(os.environ, {"TORCHTRAIN_CACHE": cache}), patch.object(text_input, "MIN_SHARD_BYTES", SHARD_BYTES):
        try:
            return str(len(open_text(text)))
        except TorchtrainError as error:
            return f"{error.exit_code}: {error}"


def test_read_only_cache_can_be_read_and_is_an_error_if_it_lacks_the_text(
    gloo: GlooPool, disk: DiskFaults, text: str, tmp_path: Path, cache: Path
) -> None:
    open_text(text)
    other = write_jsonl(tmp_path / "b.jsonl", DOCUMENTS)
    for operation in ("create", "mkdir", "write", "rename", "remove"):
        disk.fail(operation, f"{cache}*", errno.EROFS)
    for ranks in (1, 2):
        assert gloo.run(ranks, outcome, text, str(cache)) == [str(len(ENCODED))] * ranks
        for error in gloo.run(ranks, outcome, other, str(cache)):
            assert error.startswith(f"2: {cache}/tokens cannot be written: Read-only file system. Make room, or name")
            assert "another folder by TORCHTRAIN_CACHE" in error


def test_full_cache_is_an_error_and_the_next_start_resumes(
    gloo: GlooPool, disk: DiskFaults, text: str, cache: Path
) -> None:
    disk.fail("write", f"{cache}/tokens/*/shard-00004*", errno.ENOSPC)
    (error,) = gloo.run(1, outcome, text, str(cache))
    assert re.fullmatch(
        rf"2: {cache}/tokens/\w+ cannot be written: No space left on device\. Make room, or name another folder by "
        r"TORCHTRAIN_CACHE; what is complete is kept, and the same command continues from there",
        error,
    )
    disk.heal()
    with written_shards() as written:
        assert tokens_of(open_text(text)) == ENCODED
    assert written[0] == "shard-00004"


# Several processes


def test_second_of_two_starts_waits_and_says_so(
    text: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    first = context().Process(target=tokenize_after, args=(text, str(cache), str(go)))
    first.start()
    wait_for(lambda: bool(list(cache.glob("tokens/*/unfinished.json"))))

    def fail(*_: object) -> int:
        raise AssertionError("both tokenize")

    monkeypatch.setattr(tokenize_text, "_write_shard", fail)
    found: list[TokenDataset] = []
    with captured_log() as log:
        second = threading.Thread(target=lambda: found.append(open_text(text)))
        second.start()
        wait_for(lambda: len(log) > 0)
        (folder,) = (cache / "tokens").glob("*/")
        assert log == [f"data.path = '{text}': another run tokenizes it into {folder}; waiting for it"]
        go.touch()
        second.join()
    first.join()
    assert first.exitcode == 0
    assert tokens_of(found[0]) == ENCODED


def tokenize_after(text: str, cache: str, go: str) -> None:
    """Open the text, but write its third shard only when there is a file ``go``."""
    os.environ["TORCHTRAIN_CACHE"] = cache
    text_input.MIN_SHARD_BYTES = SHARD_BYTES
    write = tokenize_text._write_shard

    def write_after(*arguments: Any) -> int:
        wait_for(lambda: arguments[-1] != 2 or Path(go).exists())
        return write(*arguments)

    with patch.object(tokenize_text, "_write_shard", write_after):
        open_text(text)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def tokenize_on_ranks(paths: list[str], caches: list[str], verify_bytes: float) -> tuple[list[int], str, list[str]]:
    """On each rank, with its path and its cache: the tokens, their folder, and the shards that it wrote."""
    rank = dist.get_rank()
    cache = patch.dict(os.environ, {"TORCHTRAIN_CACHE": caches[rank]})
    with cache, patch.object(text_input, "MIN_SHARD_BYTES", SHARD_BYTES), written_shards() as written:
        opened = open_text(paths[rank], verify_bytes)
    return tokens_of(opened), str(folder_of(opened)), written


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([[0, 1, 2]], id="one folder", marks=pytest.mark.slow),
        pytest.param([[0, 1], [2]], id="a host with a folder of its own"),
        pytest.param([[0], [1], [2]], id="no folder is shared", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_see_the_same_folder_share_the_work(
    gloo: GlooPool, text: str, tmp_path: Path, groups: list[list[int]]
) -> None:
    caches = [str(tmp_path / f"cache {number}") for number, own in enumerate(groups) for _ in own]
    alone = open_text(text)
    names = [shard.name for shard in alone.manifest.shards]
    found = gloo.run(3, tokenize_on_ranks, [text] * 3, caches, math.inf)
    for own in groups:
        for number, rank in enumerate(own):
            tokens, folder, written = found[rank]
            assert tokens == ENCODED
            assert contents(Path(folder)) == contents(folder_of(alone))
            assert written == names[number :: len(own)]
    assert not list(tmp_path.glob("cache */tokens/.*"))
    assert [written for *_, written in gloo.run(3, tokenize_on_ranks, [text] * 3, caches, math.inf)] == [[]] * 3


def test_hosts_with_copies_whose_times_differ_share_a_cache(gloo: GlooPool, text: str, tmp_path: Path) -> None:
    """Above data.verify_gib the key has the times of the files: each host has a folder of its own in the cache."""
    (tmp_path / "copy").mkdir()
    copy = shutil.copy(text, tmp_path / "copy/a.jsonl")
    found = gloo.run(2, tokenize_on_ranks, [text, copy], [str(tmp_path / "cache")] * 2, 1000)
    assert found[0][0] == found[1][0] == ENCODED
    assert found[0][1] != found[1][1]
    assert found[0][2] == found[1][2] != []


def test_rank_that_lacks_the_tokens_is_waited_for(gloo: GlooPool, text: str, tmp_path: Path) -> None:
    caches = [str(tmp_path / "cache"), str(tmp_path / "other")]
    open_text(text)  # into the first cache
    first, second = gloo.run(2, tokenize_on_ranks, [text] * 2, caches, math.inf)
    assert first[0] == second[0] == ENCODED
    assert (len(first[2]), len(second[2])) == (0, len(open_text(text).manifest.shards))


def fail_on_rank_1(text: str, cache: str) -> str:
    def fail(*_: object) -> int:
        raise DataError("it is damaged")

    if dist.get_rank() == 0:
        return outcome(text, cache)
    with patch.object(tokenize_text, "_write_shard", fail):
        return outcome(text, cache)


def test_error_of_a_rank_ends_all(gloo: GlooPool, text: str, cache: Path) -> None:
    errors = gloo.run(2, fail_on_rank_1, text, str(cache))
    assert errors[0] == errors[1]
    assert re.fullmatch(r"2: rank 1 on host \S+: it is damaged", errors[0])


def lose_a_record(text: str, cache: str) -> str:
    write = tokenize_text._write_shard

    def write_and_lose(*arguments: Any) -> int:
        tokens = write(*arguments)
        if arguments[-1] == 1:
            next(Path(cache).glob("tokens/*/shard-00001.json")).unlink()
        return tokens

    with patch.object(tokenize_text, "_write_shard", write_and_lose), patch.object(token_cache, "VISIBLE_SECONDS", 0):
        return outcome(text, cache)


def test_shard_that_is_lost_after_it_was_written_ends_all(gloo: GlooPool, text: str, cache: Path) -> None:
    errors = gloo.run(2, lose_a_record, text, str(cache))
    assert errors[0] == errors[1]
    assert "lacks what was just written, or it is damaged: its disk does not keep it" in errors[0]


# Small text


def test_little_text_is_tokenized_in_this_process(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr(token_cache, "cores_of_process", lambda: 2)
    monkeypatch.setattr("torchtrain.datasets.tokenize_text.multiprocessing.get_context", fail)
    assert tokens_of(open_text(text)) == ENCODED
    with pytest.raises(AssertionError, match="a process is started"):
        tokenize_in_memory(TextsInMemory(["a document"] * 4096, "memory"), TOKENIZER)


def test_a_thousand_small_files_are_few_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("TORCHTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for number in range(1000):
        (tmp_path / f"texts/{number:03}.txt").write_text(f"text {number}")
    opened = open_text(tmp_path / "texts")
    assert len(opened.manifest.shards) == 1
    assert tokens_of(opened) == [t for n in range(1000) for t in TOKENIZER.encode(f"text {n}", bos=True, eos=True)]
    assert opened.describe(0, 777).file == str(tmp_path / "texts/777.txt")


# The command


@pytest.fixture
def two_texts(text: str, tmp_path: Path, cache: Path) -> list[Path]:
    """The folders of two texts that no run uses: the first is complete, and the second was begun."""
    write, other = tokenize_text._write_shard, write_jsonl(tmp_path / "b.jsonl", [f"{text} b" for text in MANY])

    def fail(*arguments: Any) -> int:
        if arguments[-1] == 4:
            raise DataError("it is damaged")
        return write(*arguments)

    open_text(text)
    with patch.object(tokenize_text, "_write_shard", fail), pytest.raises(DataError, match="it is damaged"):
        open_text(other)
    folders = (cache / "tokens").glob("*/")
    return sorted(folders, key=lambda folder: not (folder / "manifest.json").exists())


def run_command(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    assert command.main(options) == 0
    return capsys.readouterr().out.splitlines()


def test_command_lists_what_is_in_the_cache(
    two_texts: list[Path], cache: Path, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = two_texts
    for number, folder in enumerate(two_texts):
        os.utime(folder.with_suffix(".used") if number == 0 else folder, (10**9 + number * 86400,) * 2)
    days = [time.strftime("%Y-%m-%d %H:%M", time.localtime(10**9 + number * 86400)) for number in range(2)]
    sizes = [sum(path.stat().st_size for path in folder.iterdir()) / 1e6 for folder in two_texts]
    title, names, *rows, total = run_command(capsys)
    assert title == f"{cache}/tokens:"
    assert names.split() == ["size", "last", "used", "tokens", "folder", "text"]
    expected = [
        f"{sizes[1]:.1f} MB  {days[1]}  incomplete  {second.name}  data.path = '{tmp_path}/b.jsonl'",
        f"{sizes[0]:.1f} MB  {days[0]}  {len(ENCODED):,}  {first.name}  data.path = '{text}'",
    ]
    assert [re.sub(r"  +", "  ", row) for row in rows] == expected
    assert total == f"{cache}: {sum(sizes):.1f} MB in 2 folders of tokens"
    (first / "manifest.json").write_text("[" * 10**5)
    (cache / "windows").mkdir()
    (cache / f"windows/{'0' * 32}.npz").write_bytes(bytes(2_000_000))
    *_, damaged, total = run_command(capsys)
    assert damaged.split()[4] == "damaged"
    assert total.endswith(" MB in 2 folders of tokens, and 2.0 MB of packed windows")


def test_command_shortens_names_of_folders_in_a_narrow_terminal(
    cache: Path, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(open_text(text))
    for width in (None, 1000, 80):
        monkeypatch.setattr(command, "output_width", lambda width=width: width)
        shown = run_command(capsys)[2].split()[5]
        assert shown == (f"{folder.name[:8]}*" if width == 80 else folder.name)
        assert list((cache / "tokens").glob(f"{shown}/")) == [folder]


def test_command_clears_what_no_run_uses(two_texts: list[Path], cache: Path, text: str) -> None:
    windows, foreign = cache / f"windows/{'0' * 32}.npz", cache / "tokens/notes.txt"
    windows.parent.mkdir()
    windows.write_bytes(bytes(2_000_000))
    foreign.write_text("of the user")
    probes = [cache / f"tokens/.{'0' * 32}.{'1' * 32}.{number}" for number in range(2)]
    for number, probe in enumerate(probes):
        probe.touch()
        os.utime(probe, (time.time() - 7200 * number,) * 2)
    running = open_text(text)
    with cache_folder.locked(two_texts[1].with_suffix(".lock")):  # by this process
        process = context().Process(target=command_in_process, args=("--clear", str(cache / "printed"), str(cache)))
        process.start()
        process.join()
    summary, *kept = (cache / "printed").read_text().splitlines()
    assert summary == f"{cache}: 2.0 MB were removed"
    assert kept == [
        f"{folder}, {cache_folder.size_of(folder) / 1e6:.1f} MB, is kept: a run uses it" for folder in sorted(two_texts)
    ]
    assert tokens_of(running) == ENCODED
    assert [path.exists() for path in (windows, foreign, *probes)] == [False, True, True, False]


def command_in_process(option: str, output: str, cache: str) -> None:
    import sys

    os.environ["TORCHTRAIN_CACHE"] = cache
    with open(output, "w") as sys.stdout:
        command.main([option])


def test_cleared_text_is_tokenized_again(
    two_texts: list[Path], cache: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(two_texts[0])
    size = sum(map(cache_folder.size_of, two_texts))
    assert run_command(capsys, "--clear") == [f"{cache}: {size / 1e6:.1f} MB were removed"]
    assert list((cache / "tokens").iterdir()) == []
    assert run_command(capsys) == [f"{cache}: 0.0 MB in 0 folders of tokens"]
    assert contents(folder_of(open_text(text))) == before
    shutil.rmtree(cache)
    assert run_command(capsys, "--clear") == [f"{cache}: 0.0 MB were removed"]


def test_command_keeps_what_it_cannot_lock_or_remove(
    two_texts: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", unsupported)
        _, *kept = run_command(capsys, "--clear")
    assert [line.rpartition(", ")[2] for line in kept] == ["is not removed: No locks available"] * 2
    assert [folder for folder in two_texts if not folder.exists()] == []


def test_lock_file_that_was_removed_meanwhile_is_locked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened = tmp_path / "a.used", list[int]()
    open_file = cache_folder.open_lock_file

    def removed_at_first(path: Path) -> int:
        opened.append(open_file(path))
        if len(opened) == 1:
            path.unlink()  # as torchtrain.cache does at this moment
        return opened[-1]

    with monkeypatch.context() as patched:
        patched.setattr(cache_folder, "open_lock_file", removed_at_first)
        use = cache_folder.Use(path)
    assert len(opened) == 2
    with pytest.raises(BlockingIOError), cache_folder.unused(path):
        pass
    del use
    with cache_folder.unused(path):
        pass
