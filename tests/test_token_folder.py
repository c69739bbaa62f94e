"""Folders of tokens: damage is found, and only what is used is read, again after errors."""

import errno
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmark_data import cached_bytes, drop_from_cache, write_random_tokens
from data_samples import DOCUMENTS, TOKENIZER, make_loader, take, write_jsonl, write_tokens

from torchtrain import prepare as command
from torchtrain.datasets import text_input
from torchtrain.datasets.options import DataConfig
from torchtrain.datasets.token_dataset import TokenDataset
from torchtrain.datasets.token_folder import LocalFolder, Shard, TokenManifest
from torchtrain.errors import DataError, StorageError


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tokens with a shard for each document."""
    monkeypatch.setattr(text_input, "MIN_SHARD_BYTES", 1)
    return Path(write_tokens(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)))


def write_manifest(
    folder: Path, shard: Shard, tokenizer_hash: str = TOKENIZER.content_hash, vocab_size: int = TOKENIZER.vocab_size
) -> None:
    """Write the manifest of one shard, and an index of one document."""
    manifest = TokenManifest(tokenizer_hash, vocab_size, "", "", 1, (shard,))
    (folder / "manifest.json").write_text(json.dumps(asdict(manifest)))
    index = np.array([0, shard.tokens, 0, 0, 0, 0, 0, 0], dtype="<u8")
    (folder / f"{shard.name}.documents").write_bytes(index.tobytes())


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_shards_raise_a_data_error(tokens: Path) -> None:
    damage(tokens / "shard-00007.tokens")
    with pytest.raises(DataError, match=r"shard-00007.tokens is damaged"):
        make_loader(DataConfig(path=str(tokens)))
    make_loader(DataConfig(path=str(tokens), verify_gib=0))  # larger data are verified on request only
    assert command.main(["--prepare.output", str(tokens), "--prepare.verify"]) == 2
    damage(tokens / "shard-00007.tokens")  # restores the flipped bit
    assert command.main(["--prepare.output", str(tokens), "--prepare.verify"]) == 0
    damage(tokens / "shard-00003.documents")
    assert command.main(["--prepare.output", str(tokens), "--prepare.verify"]) == 2


def test_tokens_of_several_sources_are_verified_without_the_config_that_lists_them(tokens: Path) -> None:
    several = tokens.parent / "several"
    for number in "01":
        shutil.copytree(tokens, several / number)
    assert command.main(["--prepare.output", str(several), "--prepare.verify"]) == 0
    (several / "1/manifest.json").unlink()
    assert command.main(["--prepare.output", str(several), "--prepare.verify"]) == 2


def test_missing_and_truncated_shards_raise_a_data_error(tokens: Path) -> None:
    path = tokens / "shard-00007.tokens"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    with pytest.raises(DataError, match=rf"shard-00007.tokens has {len(content) - 2} bytes, not {len(content)}"):
        make_loader(DataConfig(path=str(tokens)))
    path.unlink()
    with pytest.raises(DataError, match=r"shard-00007.tokens is missing"):
        make_loader(DataConfig(path=str(tokens)))
    (tokens / "manifest.json").write_text("{")
    with pytest.raises(DataError, match=r"its manifest.json is damaged"):
        make_loader(DataConfig(path=str(tokens)))


def test_data_shorter_than_one_window_raise_a_data_error(tokens: Path) -> None:
    with pytest.raises(DataError, match=r"tokens do not fill a window of training.seq_len \+ 1 = 100001 tokens"):
        make_loader(DataConfig(path=str(tokens)), seq_len=100_000)


def test_windows_span_shards(tokens: Path) -> None:
    whole = np.concatenate([np.fromfile(path, "<u2") for path in sorted(tokens.glob("*.tokens"))]).tolist()
    opened = TokenDataset(LocalFolder(tokens), TOKENIZER.content_hash, 0, "")
    shards = opened.manifest.shards
    assert len(opened) == len(whole)
    out = np.empty(5 * max(shard.tokens for shard in shards), dtype=np.int64)
    for start in (0, 1, shards[0].tokens - 1, shards[0].tokens, len(whole) - len(out)):
        opened.read([(start, len(out))], [out])
        assert out.tolist() == whole[start : start + len(out)]


def test_loading_a_state_at_window_ten_million_reads_nothing_before_it(tmp_path: Path) -> None:
    """A loader resumes at any position at once: nothing is read or kept in memory for earlier windows."""
    seq_len, windows = 256, 20_000_000
    tokens = windows * seq_len + 1
    with open(tmp_path / "shard-00000.tokens", "wb") as file:
        file.truncate(tokens * 2)  # 10 GB of zeros that take no space on disk
    write_manifest(tmp_path, Shard("shard-00000", tokens, 1, 0, 0, "", ""))
    config = DataConfig(path=str(tmp_path), prefetch=0)
    loader = make_loader(config, seq_len=seq_len)
    state = loader.state_dict()["rows"]
    state[:, 0] = 10_000_000 // 8
    state[:, 1] = 10_000_000
    loader.load_state_dict({"rows": state})
    batch = next(loader)
    assert batch.tokens.shape == (8, seq_len)
    assert loader.state_dict()["rows"][:, 1].tolist() == [10_000_008] * 8
    order = loader.streams[0]._order  # type: ignore[attr-defined]
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
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    advise, pread = os.posix_fadvise, os.pread

    def advised(file: int, start: int, length: int, advice: int) -> None:
        calls.extend(["advise"] * (advice == os.POSIX_FADV_WILLNEED))
        advise(file, start, length, advice)

    def read(file: int, length: int, start: int) -> bytes:
        calls.append("read")
        return pread(file, min(length, 10), start)  # a short read, which some file systems return

    whole = take(make_loader(DataConfig(path=str(tokens), prefetch=0)), 1)
    monkeypatch.setattr(os, "posix_fadvise", advised)
    monkeypatch.setattr(os, "pread", read)
    assert torch.equal(take(make_loader(DataConfig(path=str(tokens), prefetch=0)), 1), whole)
    assert calls == sorted(calls)
    assert calls.count("advise") >= 8


def test_failed_reads_are_retried_for_minutes_then_raise_a_storage_error(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, pauses, pread = make_loader(DataConfig(path=str(tokens), prefetch=0)), list[float](), os.pread
    whole = take(make_loader(DataConfig(path=str(tokens), prefetch=0)), 1)

    def fail(*_: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fail)
    monkeypatch.setattr("torchtrain.files.time.sleep", pauses.append)
    with pytest.raises(StorageError, match=r"shard-\d+.tokens cannot be read: Input/output error"):
        next(batches)
    assert sum(pauses) > 200
    monkeypatch.setattr("torchtrain.files.time.sleep", lambda _: monkeypatch.setattr(os, "pread", pread))
    assert torch.equal(take(make_loader(DataConfig(path=str(tokens), prefetch=0)), 1), whole)
    for shard in tokens.glob("*.tokens"):
        os.truncate(shard, 2)
    with pytest.raises(DataError, match=r"shard-\d+.tokens is shorter than when the run began"):
        take(batches, 1)


def test_four_byte_tokens_are_read_at_any_offset(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.tokens").write_bytes(np.arange(70_000, 70_100, dtype="<u4").tobytes())
    write_manifest(tmp_path, Shard("shard-00000", 100, 1, 0, 0, "", ""), "hash", 128_256)
    opened, out = TokenDataset(LocalFolder(tmp_path), "hash", 0, ""), np.empty(20, dtype=np.int64)
    for start in (0, 1, 63, 80):
        opened.read([(start, 20)], [out])
        assert out.tolist() == list(range(70_000 + start, 70_020 + start))
