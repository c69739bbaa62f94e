"""Measure torchtrain.explain on tokens of 10 million documents with the batch of the 8B recipe.

    python scripts/benchmarks/benchmark_explain.py [--documents 10_000_000] [--steps 1 51 251] [--rows 8]
    python scripts/benchmarks/benchmark_explain.py --gradients

The files of tokens are sparse: all tokens are 0. The index of documents is real; lengths are random (lognormal, 480
tokens in the mean). Each line gives the seconds, those of CPU time, the bytes that were read, and the highest memory of
a process that has imported torch. A run saves each 500 steps, so that step 251 has the mean distance from a checkpoint.
With weights, the first step is explained, by a tiny model with the vocabulary of Llama 3: a replay of more steps takes
as long as they take in training.

``--gradients`` measures instead what signals and gradients take beside a training step: the debug model with a batch of
64 rows of 256 tokens of the Python standard library, whose first step is explained, three times each.
"""

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
from benchmark_data import write_rank_file

from torchtrain.datasets.token_folder import MANIFEST, Shard, TokenManifest
from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.plugins.explain.explanation import explain, trainer_before
from torchtrain.plugins.explain.run import open_run

MEAN_TOKENS, BYTES_OF_TOKEN, TEXT_OF_SHARD = 480, 4.4, 1 << 26
SEQ_LEN, BATCH = 8192, 512


def write_data(folder: Path, tokenizer_path: Path, documents: int) -> int:
    """Write a sparse folder of tokens; returns the number of tokens."""
    folder.mkdir()
    tokenizer, random = load_tokenizer(str(tokenizer_path)), np.random.default_rng(0)
    count = max(1, round(documents * MEAN_TOKENS * BYTES_OF_TOKEN / TEXT_OF_SHARD))
    shards = []
    for number in range(count):
        of_shard = documents * (number + 1) // count - documents * number // count
        lengths = random.lognormal(np.log(MEAN_TOKENS) - 0.5, 1, of_shard).astype(np.int64) + 2
        offsets = np.concatenate(([0], lengths.cumsum())).astype("<i8")
        name, tokens = f"shard-{number:05}", int(offsets[-1])
        shards.append(Shard(name, tokens, of_shard, 0, 0, "", ""))
        with (folder / f"{name}.documents").open("wb") as file:
            file.write(offsets.tobytes())
            file.truncate(shards[-1].index_bytes)
        with (folder / f"{name}.tokens").open("wb") as file:
            file.truncate(tokens * 4)
    manifest = TokenManifest(tokenizer.content_hash, tokenizer.vocab_size, "", "", count, tuple(shards))
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest)))
    return sum(shard.tokens for shard in shards)


def bytes_read() -> int:
    """Of this process since it began, by system calls."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def measure(run: Path, step: int, rows: int) -> None:
    """Print what it takes to explain a step; ``rows``: with weights those of so many rows, 0: without."""
    began, cpu_began, before = time.perf_counter(), time.process_time(), bytes_read()
    opened = open_run(str(run), step, range(rows))
    found = explain(opened, with_weights=rows > 0)
    seconds, cpu, read = time.perf_counter() - began, time.process_time() - cpu_began, bytes_read() - before
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    name = f"step {step}, " + (f"with weights, {rows} rows" if rows else "without weights")
    print(
        f"{name:34} {len(found.documents):9,} pieces {seconds:9.1f} s ({cpu:.1f} of CPU) {read / 1e6:10,.1f} MB read "
        f"{memory / 2**30:6.2f} GiB of memory",
        flush=True,
    )


def measure_gradients(folder: Path) -> None:
    """Print the seconds of CPU time of a training step, and of an explanation without and with gradients."""
    (folder / "config.toml").write_text(
        '[model]\nflavor = "debugmodel"\n[job]\ndevice = "cpu"\n'
        "[training]\nsteps = 10\nseq_len = 256\nlocal_batch_size = 8\nglobal_batch_size = 64\n"
    )
    opened = open_run(str(folder), 1, ())
    with trainer_before(opened) as (trainer, _):
        for step in (1, 2, 3):
            batch, began = next(trainer.dataloader), time.process_time()
            trainer.train_step(step, batch)
            print(f"training step {step}: {time.process_time() - began:.1f} s of CPU time", flush=True)
    for name, candidates, rows in (("losses", 0, False), ("20 documents", 20, False), ("and all rows", 20, True)):
        for _ in range(3):
            began = time.process_time()
            found = explain(opened, with_weights=True, candidates=candidates, with_row_gradients=rows)
            print(f"{name}: {time.process_time() - began:.1f} s, {len(found.documents)} pieces", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, nargs="*", default=[1, 51, 251])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--gradients", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.gradients:
            measure_gradients(folder)
            return
        write_rank_file(folder / "tokenizer.model")
        tokens = write_data(folder / "data", folder / "tokenizer.model", options.documents)
        print(f"{options.documents:,} documents, {tokens:,} tokens, batches of {BATCH} rows of {SEQ_LEN} tokens")
        (folder / "run").mkdir()
        (folder / "run/config.toml").write_text(
            f'[model]\ntokenizer_path = "{folder / "tokenizer.model"}"\n'
            "shape = { dim = 16, n_layers = 1, n_heads = 2, n_kv_heads = 2, ffn_dim = 32 }\n"
            f'[data]\npath = "{folder / "data"}"\n[job]\ndevice = "cpu"\n'
            f"[training]\nsteps = 1000\nseq_len = {SEQ_LEN}\nlocal_batch_size = 1\nglobal_batch_size = {BATCH}\n"
        )
        context = multiprocessing.get_context("fork")
        for step, rows in [*((step, 0) for step in options.steps), (1, options.rows)]:
            process = context.Process(target=measure, args=(folder / "run", step, rows))
            process.start()
            process.join()


if __name__ == "__main__":
    main()
