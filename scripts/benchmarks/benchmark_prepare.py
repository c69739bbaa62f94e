"""Measure ``torchtrain.prepare`` under torchrun: tokens per second, and the bytes that it writes to the local disk.

    python scripts/benchmarks/benchmark_prepare.py [--kind parquet] [--gigabytes 0.1] [--processes 2] [--s3]

The input is made in ``--folder`` if it is not there: files of ``--gigabytes`` in total, of documents that consist of
runs of 4 to 12 words from the docstrings of the standard library. They are prepared from there to a folder, or with
``--s3`` from and to a bucket of a local S3 server (moto, in its own process). Temporary files and the caches of Hugging
Face are in a folder whose size is read every 0.1 s; the largest one is printed.
"""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import zstandard

sys.path.append(str(Path(__file__).parent.parent / "faults"))
from crash_test_s3 import BUCKET, KEYS, Server

from torchtrain.datasets.standard_library import standard_library

ROOT = Path(__file__).parent.parent.parent
FILES = 16
# Bytes of text for each byte of a file.
COMPRESSION = {"jsonl.zst": 3.0, "parquet": 1.57}


def make_input(folder: Path, kind: str, size_bytes: float) -> None:
    texts = "\n".join(standard_library().texts())
    words = re.findall(r"\S+", " ".join(re.findall(r'"""(.*?)"""', texts, re.DOTALL)))
    joined = " ".join(words)
    begins = np.cumsum([0] + [len(word) + 1 for word in words])
    rng = np.random.default_rng(1)
    folder.mkdir(parents=True)
    for number in range(FILES):
        documents: list[str] = []
        left = size_bytes / FILES * COMPRESSION[kind]
        while left > 0:
            starts = rng.integers(0, len(words) - 16, int(rng.lognormal(6, 0.8)) // 8 + 1)
            ends = starts + rng.integers(4, 13, len(starts))
            runs = zip(begins[starts].tolist(), begins[ends].tolist(), strict=True)
            documents.append("".join([joined[start:end] for start, end in runs]))
            left -= len(documents[-1])
        file = folder / f"{number:03}.{kind}"
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": documents}), file, row_group_size=2000)
        else:
            with file.open("wb") as raw, zstandard.ZstdCompressor().stream_writer(raw) as written:
                for document in documents:
                    written.write(json.dumps({"text": document}).encode() + b"\n")


def size_of(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # removed meanwhile
                total += os.lstat(Path(where, name)).st_size
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=list(COMPRESSION), default="parquet")
    parser.add_argument("--gigabytes", type=float, default=0.1, help="size of the files")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmark_prepare"))
    options = parser.parse_args()
    data = options.folder.absolute() / f"{options.gigabytes:g}-GB-{options.kind}"
    if not data.exists():
        making = data.with_name(f"{data.name}.partial")
        shutil.rmtree(making, ignore_errors=True)
        make_input(making, options.kind, options.gigabytes * 1e9)
        making.rename(data)
    files = sorted(data.iterdir())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source, output, server = str(data), str(Path(folder, "output")), None
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if options.s3:
            server = Server()
            for file in files:
                server.client.upload_file(str(file), BUCKET, f"texts/{file.name}")
            source, output = f"s3://{BUCKET}/texts", f"s3://{BUCKET}/tokens"
            environment |= {**KEYS, "AWS_ENDPOINT_URL": server.url}
        local = Path(folder, "local")
        for variable in ("TMPDIR", "HF_HOME", "HF_DATASETS_CACHE", "HOME"):
            (local / variable).mkdir(parents=True)
            environment[variable] = str(local / variable)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.processes)]
        command += ["-m", "torchtrain.prepare", "--data.path", source, "--prepare.output", output]
        began, largest = time.perf_counter(), 0
        cpu_before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = subprocess.Popen([*command, "--prepare.processes", "1"], env=environment, cwd=local)
        while run.poll() is None:
            largest = max(largest, size_of(local))
            time.sleep(0.1)
        seconds, cpu = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_seconds = cpu.ru_utime + cpu.ru_stime - cpu_before.ru_utime - cpu_before.ru_stime
        if run.returncode:
            sys.exit(run.returncode)
        if server is None:
            manifest = Path(output, "manifest.json").read_bytes()
        else:
            manifest = server.client.get_object(Bucket=BUCKET, Key="tokens/manifest.json")["Body"].read()
            server.stop()
        tokens = sum(shard["tokens"] for shard in json.loads(manifest)["shards"])
        print(
            f"{sum(file.stat().st_size for file in files):,} bytes of {options.kind}, {options.processes} processes: "
            f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s, {tokens / cpu_seconds:,.0f} per "
            f"CPU second; at most {largest:,} bytes on the local disk"
        )


if __name__ == "__main__":
    main()
