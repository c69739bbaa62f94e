"""Compare the throughput of data loading with plain calls of the libraries, measured in turns in the same run.

    python scripts/benchmarks/benchmark_data.py [--copies 4] [--rounds 3] [--tiktoken_file FILE] [--only_cold]

The text is the embedded one, ``copies`` times. Each line gives the median of ``rounds``, in million tokens a second,
for torchtrain and for the plain call, and the ratios of their time and of the CPU time of all processes. The latter is
more reliable on a busy machine. Then windows of tokens are read in random order from a cold disk (Linux): the
milliseconds a batch takes, and the bytes that come from the disk for each byte used, beside a memory map and the same
windows as rows of the library ``datasets``; ``--only_cold`` takes these lines alone. The last lines give the share of
its time that a training run of the debug model waits for data.
"""

import argparse
import base64
import contextlib
import ctypes
import gc
import io
import json
import mmap
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import sentencepiece
import tiktoken
import torch

from torchtrain.datasets.build import build_dataloader
from torchtrain.datasets.dataloader import DataLoader
from torchtrain.datasets.local_files import open_text_files
from torchtrain.datasets.options import DataConfig
from torchtrain.datasets.standard_library import standard_library
from torchtrain.datasets.token_folder import MANIFEST, LocalFolder, Shard, TokenManifest
from torchtrain.datasets.tokenize_text import tokenize
from torchtrain.datasets.tokenizers import (
    LLAMA3_RANKS,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    load_tokenizer,
)

ROOT = Path(__file__).parent.parent.parent
SEQ_LEN, ROWS = 2048, 8


def bare_encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """The library's own call."""
    if isinstance(tokenizer, TiktokenTokenizer):
        encoding: tiktoken.Encoding = tokenizer._encoding
        return encoding.encode_ordinary
    assert isinstance(tokenizer, SentencePieceTokenizer)
    processor: sentencepiece.SentencePieceProcessor = tokenizer._processor
    return processor.encode  # type: ignore[no-any-return]


def write_rank_file(path: Path) -> None:
    """A rank file for tiktoken with the 256 bytes and the pieces of the package's SentencePiece model.

    It is filled up to Llama 3's number of ranks with what is no UTF-8, and so in no text.
    """
    processor = bare_encoder(load_tokenizer()).__self__  # type: ignore[attr-defined]
    pieces = [processor.IdToPiece(n).replace("\u2581", " ").encode() for n in range(259, processor.vocab_size())]
    tokens = list(dict.fromkeys([*(bytes([byte]) for byte in range(256)), *pieces]))
    tokens += [b"\xff" + n.to_bytes(3, "big") for n in range(LLAMA3_RANKS - len(tokens))]
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))


def seconds(call: Callable[[], Any]) -> tuple[float, float]:
    """On the clock, and of CPU time in this process and those that it waited for."""
    start, cpu_start = time.perf_counter(), sum(os.times()[:4])
    call()
    return time.perf_counter() - start, sum(os.times()[:4]) - cpu_start


def compare(name: str, tokens: int, rounds: int, ours: Callable[[], Any], plain: Callable[[], Any]) -> None:
    """Run both in turn and print the medians."""
    times = [(*seconds(ours), *seconds(plain)) for _ in range(rounds)]
    own, own_cpu, other, other_cpu = (statistics.median(column) for column in zip(*times, strict=True))
    rates = f"{tokens / own / 1e6:9.2f} {tokens / other / 1e6:9.2f}"
    print(f"{name:56} {rates} {own / other:8.2f}x {own_cpu / other_cpu:8.2f}x", flush=True)


def encode_share(encode: Callable[[str], list[int]], texts: list[str], first: int, step: int) -> None:
    for text in texts[first::step]:
        encode(text)


def in_processes(encode: Callable[[str], list[int]], texts: list[str], count: int) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=encode_share, args=(encode, texts, n, count)) for n in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def tokenize_quietly(files: Path, tokenizer: Tokenizer, output: Path, processes: int) -> None:
    output.mkdir()
    with contextlib.redirect_stderr(io.StringIO()):
        tokenize(open_text_files([str(files)]), tokenizer, LocalFolder(output), processes)


def loader_of(config: DataConfig, tokenizer: Tokenizer, seq_len: int = SEQ_LEN, rows: int = ROWS) -> DataLoader:
    return build_dataloader(
        config,
        tokenizer,
        seq_len=seq_len,
        global_batch_size=rows,
        rows=range(rows),
        seed=0,
        device=torch.device("cpu"),
    )


def read(loader: DataLoader, steps: int) -> None:
    for _ in range(steps):
        next(loader)


def plain_reading(tokens: "np.memmap[Any, Any]", steps: int) -> None:
    """Random windows of a memory map, as small training scripts read them."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        starts = rng.integers(0, len(tokens) - SEQ_LEN - 1, ROWS)
        torch.stack([torch.from_numpy(tokens[start : start + SEQ_LEN].astype(np.int64)) for start in starts])
        torch.stack([torch.from_numpy(tokens[start + 1 : start + SEQ_LEN + 1].astype(np.int64)) for start in starts])


def drop_from_cache(folder: Path) -> None:
    """Let the files in ``folder`` be read from the disk the next time. Nobody may have them mapped."""
    gc.collect()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache, in whole pages."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
        if ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(size), pages):
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


def bytes_from_disk() -> int:
    """Of this process since it began."""
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])


def write_random_tokens(folder: Path, shards: int, tokens: int) -> np.ndarray[Any, Any]:
    """A folder of tokens; returns all of them."""
    folder.mkdir()
    rng, tokenizer = np.random.default_rng(0), load_tokenizer()
    parts = [rng.integers(0, tokenizer.vocab_size, tokens).astype("<u2") for _ in range(shards)]
    for number, part in enumerate(parts):
        part.tofile(folder / f"shard-{number:05}.tokens")
    listed = tuple(Shard(f"shard-{number:05}", tokens, 1, 0, 0, "", "") for number in range(shards))
    for shard in listed:
        (folder / f"{shard.name}.documents").write_bytes(bytes(shard.index_bytes))
    manifest = TokenManifest(tokenizer.content_hash, tokenizer.vocab_size, "", "", shards, listed)
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest)))
    return np.concatenate(parts)


def read_cold(folder: Path, rounds: int) -> None:
    """Print what random windows cost that are not in the page cache."""
    seq_len, rows, steps, shards = 8192, 16, 20, 64  # 1 GiB
    length = seq_len + 1
    tokens = write_random_tokens(folder / "cold", shards, (1 << 23) + 1)
    for name in ("memmap", "arrow"):
        (folder / name).mkdir()
    tokens.tofile(folder / "memmap/tokens")
    windows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(tokens[: len(tokens) // length * length]), length)
    with datasets.arrow_writer.ArrowWriter(path=str(folder / "arrow/data.arrow")) as writer:
        for first in range(0, len(windows), 100):
            writer.write_table(pyarrow.table({"tokens": windows[first : first + 100]}))
        writer.finalize()
    count, used = len(windows), steps * rows * length * 2
    del tokens, windows

    def ours() -> Callable[[Any], object]:
        loader = loader_of(
            DataConfig(path=str(folder / "cold"), prefetch=0, verify_gib=0), load_tokenizer(), seq_len, rows
        )
        return lambda _: next(loader)

    def memmap() -> Callable[[Any], object]:
        mapped = np.memmap(folder / "memmap/tokens", "<u2", "r")
        return lambda batch: [mapped[n * length : (n + 1) * length].astype(np.int64) for n in batch]

    def arrow() -> Callable[[Any], object]:
        dataset = datasets.Dataset.from_file(str(folder / "arrow/data.arrow")).with_format("numpy")
        return lambda batch: [dataset[n]["tokens"] for n in batch]

    def measure(make: Callable[[], Callable[[Any], object]], seed: int) -> None:
        batches = np.random.default_rng(seed).integers(0, count, (steps, rows)).tolist()
        before = bytes_from_disk()
        read_batch = make()  # which touches much of an Arrow file
        start = time.perf_counter()
        for batch in batches:
            read_batch(batch)
        found.put(((time.perf_counter() - start) / steps * 1000, (bytes_from_disk() - before) / used))

    print(f"{'from a cold disk':56} {'ms a batch':>12} {'bytes read for each used':>26}")
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    for kind, make in (("cold", ours), ("memmap", memmap), ("arrow", arrow)):
        rates = []
        for seed in range(rounds):
            drop_from_cache(folder / kind)
            process = context.Process(target=measure, args=(make, seed))  # its memory maps end with it
            process.start()
            rates.append(found.get())
            process.join()
        milliseconds, ratio = (statistics.median(column) for column in zip(*rates, strict=True))
        name = {"cold": "tokens", "memmap": "memory map", "arrow": "rows of datasets (Arrow)"}[kind]
        print(f"{f'{rows} windows of {seq_len} tokens, {name}':56} {milliseconds:12.2f} {ratio:26.2f}", flush=True)


def wait_fraction(name: str, folder: Path, *options: str) -> None:
    """Train the debug model and print what share of its time it waited, after the first steps."""
    command = [sys.executable, "-m", "torchtrain.train", "--job.config_file", "train_configs/debug_model.toml"]
    command += ["--job.dump_folder", str(folder), "--training.steps", "30", "--checkpoint.no-enable", *options]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "data_wait_fraction" in line][-1]
    print(
        f"training waits, {name:40} {last['data_wait_fraction']:9.3%} of {last['step_seconds']:.3f} s a step",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiktoken_file", default="")
    parser.add_argument("--only_cold", action="store_true")
    options = parser.parse_args()
    if options.only_cold:
        with tempfile.TemporaryDirectory(dir=".") as name:
            read_cold(Path(name), options.rounds)
        return
    cores = len(os.sched_getaffinity(0))
    texts = list(standard_library().texts()) * options.copies
    size = sum(len(text.encode()) for text in texts)
    print(
        f"{platform.machine()}, {cores} cores, load {os.getloadavg()[0]:.1f}, python {platform.python_version()}, ",
        end="",
    )
    print(f"torch {torch.__version__}; {len(texts)} documents, {size / 1e6:.0f} MB")
    print(f"{'million tokens a second':56} {'torchtrain':>9} {'plain':>9} {'takes':>9} {'CPU':>9}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rank_file = options.tiktoken_file or str(folder / "ranks.model")
        if not options.tiktoken_file:
            write_rank_file(Path(rank_file))
        files = folder / "text"
        files.mkdir()
        for part in range(16):
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[part::16])
            (files / f"{part}.jsonl").write_text(lines)
        for kind, path in (("sentencepiece", ""), ("tiktoken", rank_file)):
            tokenizer = load_tokenizer(path)
            encode, few = bare_encoder(tokenizer), texts[: len(texts) // options.copies]
            tokens = sum(len(encode(text)) for text in few)
            compare(
                f"tokenizing, {kind}",
                tokens,
                options.rounds,
                lambda: [tokenizer.encode(text, bos=True, eos=True) for text in few],  # noqa: B023
                lambda: [encode(text) for text in few],  # noqa: B023
            )
            numbers = iter(range(options.rounds))
            compare(
                f"a folder of tokens, {kind}, {cores} processes",
                tokens * options.copies,
                options.rounds,
                lambda: tokenize_quietly(files, tokenizer, folder / f"{kind}-{next(numbers)}", cores),  # noqa: B023
                lambda: in_processes(encode, texts, cores),  # noqa: B023
            )
        tokenizer = load_tokenizer()
        encode = bare_encoder(tokenizer)
        steps = 100
        loader = loader_of(DataConfig(path=f"file://{files}", prefetch=0), tokenizer)
        read(loader, 2)
        needed = texts[: int(steps * ROWS * SEQ_LEN / tokens * len(texts) / options.copies)]
        compare(
            "a stream, beside tokenizing alone",
            steps * ROWS * SEQ_LEN,
            options.rounds,
            lambda: read(loader, steps),
            lambda: [encode(text) for text in needed],
        )
        prepared = folder / "sentencepiece-0"
        loader = loader_of(DataConfig(path=str(prepared), prefetch=0), tokenizer)
        whole = folder / "whole"
        whole.write_bytes(b"".join(path.read_bytes() for path in sorted(prepared.glob("*.tokens"))))
        memmap = np.memmap(whole, "<u2", "r")
        steps = 2000
        compare(
            "tokens, beside slices of a memmap",
            steps * ROWS * SEQ_LEN,
            options.rounds,
            lambda: read(loader, steps),
            lambda: plain_reading(memmap, steps),
        )
        read_cold(folder, options.rounds)
        wait_fraction("standard library", folder / "run-0")
        wait_fraction("a stream", folder / "run-1", "--data.path", f"file://{files}")
        wait_fraction("tokens", folder / "run-2", "--data.path", str(prepared))


if __name__ == "__main__":
    main()
