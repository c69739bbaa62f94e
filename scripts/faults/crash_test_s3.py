"""``python scripts/faults/crash_test.py --storage s3``: the rounds of a run whose checkpoints are in a bucket.

The ranks have no common folder: each has a dump folder of its own, which is lost before every other start. The server
(moto) is a process of its own, behind the proxy of ``s3_faults.py``. Each round starts the run and injects one fault:

- kill: SIGKILL to one rank or to both, at any moment, or, every other time, while a checkpoint is being written;
- trouble: for a while, one of three requests is throttled, fails, is reset or truncated, or its answer is lost;
- silence: a request is not answered for 30 s;
- outage: no request succeeds, until a save has failed;
- outage at the start: the run ends, and nothing is changed;
- two starts: of two starts at once, one ends with the message that the other one saves;
- flipped byte: an object of the newest checkpoint is damaged, and the one before is loaded;
- cut upload: a killed start has left parts of multipart uploads.

In the end the run must be bitwise identical to an undisturbed run into local folders, and the bucket contains only the
lease and checkpoints.
"""

import os
import random
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import torch
from s3_faults import S3Faults
from torch.distributed.checkpoint.state_dict_loader import load

from torchtrain.checkpoint.format import VerifiedReader, read_manifest, verify
from torchtrain.checkpoint.storage import StoredCheckpoint
from torchtrain.plugins.object_storage.storage import ObjectStorage

if TYPE_CHECKING:  # crash_test imports this module
    from crash_test import Run

ROOT = Path(__file__).parent.parent.parent
BUCKET, URL = "bucket", "s3://bucket/run/checkpoint"
KEYS = {"AWS_ACCESS_KEY_ID": "crash", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
START_SECONDS = 120  # of the server
# The server and the proxy are slow.
SMALL_MODEL = "--model.shape.dim 32 --model.shape.n_layers 2 --model.shape.ffn_dim 64"
TROUBLE = ("slow down", "error", "reset", "truncate", "lost answer")
# Imported by the runs, so that an outage is over before somebody has lost patience.
SHORT_PAUSES = """
from torchtrain.plugins.object_storage import object_store
object_store.PAUSES_SECONDS = (0.2, 0.5, 1, 1, 1, 1, 1)
"""


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


class Server:
    """moto in a process of its own."""

    def __init__(self) -> None:
        import boto3

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)]
        with TemporaryFile() as log:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
            self.url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + START_SECONDS
            while not _answers(port):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    log.seek(0)
                    raise SystemExit(f"the S3 server did not start:\n{log.read().decode(errors='replace')}")
                time.sleep(0.1)
        options = {"aws_access_key_id": "crash", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        self.client: Any = boto3.client("s3", endpoint_url=self.url, **options)
        self.client.create_bucket(Bucket=BUCKET)

    def names(self) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return [item["Key"].removeprefix("run/checkpoint/") for page in pages for item in page.get("Contents", ())]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Trial:
    """A run that is disturbed, and what disturbs it."""

    server: Server
    proxy: S3Faults
    rng: random.Random
    starts: "Callable[[str, str, int], Run]"
    """Starts a run with its name, ``checkpoint.folder`` and number of steps."""
    lose_disks: Callable[[], object]
    """Removes the dump folders of all ranks."""
    ranks: int
    rounds: Counter[str] = field(default_factory=Counter)
    inside_saves: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        self.storage = ObjectStorage(URL)  # past the proxy

    def start(self, steps: int = 10**9) -> "Run":
        self.number += 1
        if self.number % 2:
            self.lose_disks()
        return self.starts("run", URL, steps)

    def newest(self) -> int:
        return max(self.storage.steps(), default=0)

    def wait_for_save(self, run: "Run") -> None:
        """Wait for one more checkpoint."""
        before = self.newest()
        run.wait_for(lambda: time.sleep(0.1) or self.newest() > before)

    def start_and_save(self) -> "Run":
        run = self.start()
        self.wait_for_save(run)
        return run

    def expect(self, run: "Run", code: int, message: str = "") -> None:
        codes = run.wait()
        assert codes == [code] * self.ranks, f"exit codes {codes}, not {code}\n{run.output()}"
        assert message in run.output(), run.output()

    def saving(self) -> bool:
        keys = self.server.names()
        folders = {key.partition("/")[0] for key in keys if key.startswith("step-") and "/" in key}
        return any(f"{folder}/manifest.json" not in keys for folder in folders)


def kill(trial: Trial) -> None:
    aimed = trial.rounds["kill"] % 2 == 1
    run = trial.start_and_save()
    if aimed:
        run.wait_for(lambda: time.sleep(0.02) or trial.saving())
    time.sleep(trial.rng.random() * (0.05 if aimed else 1))
    run.kill(*trial.rng.choice([[0], [1], [0, 1]]))
    run.end()
    trial.inside_saves += trial.saving()


def stop(trial: Trial, run: "Run") -> None:
    run.kill(number=15)
    trial.expect(run, 75)


def trouble(trial: Trial) -> None:
    trial.proxy.fail(trial.rng.choice(TROUBLE), every=3)
    run = trial.start_and_save()
    trial.proxy.heal()
    trial.wait_for_save(run)
    stop(trial, run)


def silence(trial: Trial) -> None:
    run = trial.start_and_save()
    fault = trial.proxy.fail("silence", trial.rng.choice(["PUT", "GET", "distcp", "manifest"]), times=1, seconds=30)
    run.wait_for(lambda: time.sleep(0.1) or fault.count == 1)
    trial.wait_for_save(run)
    stop(trial, run)
    trial.proxy.heal()


def outage(trial: Trial) -> None:
    run = trial.start_and_save()
    trial.proxy.fail(trial.rng.choice(["slow down", "error", "reset"]))
    run.wait_for(lambda: time.sleep(0.1) or "could not be written" in run.output())
    trial.proxy.heal()
    trial.wait_for_save(run)
    stop(trial, run)


def outage_at_the_start(trial: Trial) -> None:
    before = trial.server.names()
    trial.proxy.fail(trial.rng.choice(["slow down", "error", "reset"]), trial.rng.choice(["", "GET", "HEAD", "PUT"]))
    trial.expect(trial.start(), 74, "the store does not respond")
    trial.proxy.heal()
    assert {key for key in before if not key.startswith(("lease/", "access-"))} <= set(trial.server.names())


def two_starts(trial: Trial) -> None:
    run = trial.start_and_save()
    trial.number += (trial.number + 1) % 2  # keeps the disks
    other = trial.start()
    trial.expect(run, 2, "now saves to")
    trial.wait_for_save(other)
    assert not [name for name in trial.storage.names() if name.endswith(".superseded")], other.output()
    stop(trial, other)


def flipped_byte(trial: Trial) -> None:
    step = trial.newest()
    folder = trial.storage.folder_of(step)
    name = trial.rng.choice(
        [key for key in trial.server.names() if key.startswith(f"{folder}/") and "outputs" not in key]
    )
    content = bytearray(trial.storage.store.read(name))
    content[trial.rng.randrange(len(content))] ^= 1
    trial.storage.store.write(name, bytes(content))
    run = trial.start_and_save()
    assert f"checkpoint of step {step} is damaged" in run.output(), run.output()
    stop(trial, run)
    trial.storage.store.delete_folder(str(folder))  # which is kept otherwise


def cut_upload(trial: Trial) -> None:
    for key in ("step-2.1-0123abcd.1/__0_0_0.distcp", "hf/model.safetensors"):
        key = f"run/checkpoint/{key}"
        upload = trial.server.client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
        trial.server.client.upload_part(Bucket=BUCKET, Key=key, UploadId=upload, PartNumber=1, Body=b"a part")
    stop(trial, trial.start_and_save())
    assert not trial.storage.store.uploads()


FAULTS = (trouble, outage, two_starts, flipped_byte, trouble, outage_at_the_start, cut_upload, trouble, silence)


def disturb(trial: Trial, rounds: list[Callable[[Trial], None]]) -> int:
    """Make all ``rounds``; returns the step that the run has come to when it is finished a little later."""
    for number, make in enumerate(rounds, 1):
        make(trial)
        trial.rounds[make.__name__] += 1
        for step in trial.storage.steps():
            checkpoint = trial.storage.open(step)
            verify(checkpoint, read_manifest(checkpoint).files)
        print(f"{number}/{len(rounds)} {make.__name__}: newest step {trial.newest()}", flush=True)
    steps = trial.newest() + 4
    trial.expect(trial.start(steps), 0)
    left = {key.partition("/")[0] for key in trial.server.names()} - {*trial.storage.names(), "lease", "outputs"}
    assert not left, left
    assert not [name for name in trial.storage.names() if not name.startswith("step-") or "superseded" in name]
    return steps


def tensors(checkpoint: StoredCheckpoint) -> dict[str, torch.Tensor]:
    """All tensors, unsharded and verified."""
    reader = VerifiedReader(checkpoint)
    entries: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    found = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a single process
        load(found, storage_reader=reader, no_dist=True)
    return found


def set_up(folder: Path) -> tuple[Server, S3Faults, dict[str, str]]:
    """The server, the proxy and the environment of runs."""
    server = Server()
    os.environ.update(KEYS, AWS_ENDPOINT_URL=server.url)
    (folder / "short_pauses.py").write_text(SHORT_PAUSES)
    proxy = S3Faults(server.url, KEYS)
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return server, proxy, {**proxy.environment, "PYTHONPATH": path}


def lose(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
