"""Training with checkpoints in S3 (moto): the same run as on a local folder, when killed or moved."""

import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from forked_command import checked_command, run_command
from forked_run import TINY, ForkedRun, different_tensors, finish, logged_losses, slow_steps
from s3_faults import S3Faults
from s3_server import S3Server

from torchtrain.checkpoint.format import VerifiedReader
from torchtrain.checkpoint.local_storage import LocalStorage
from torchtrain.checkpoint.storage import CheckpointStorage
from torchtrain.config.schema import JobSection
from torchtrain.errors import ConfigError
from torchtrain.plugins.object_storage import object_store
from torchtrain.plugins.object_storage.storage import ObjectStorage

STEPS = 4
SHORT = ("--training.steps", str(STEPS))


@pytest.fixture(autouse=True)
def bucket(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for key, value in s3_server.environment.items():
        monkeypatch.setenv(key, value)
    return s3_server.make_bucket(f"bucket-{abs(hash(tmp_path)) % 10**8}")


def use_s3(environment: dict[str, str], slow: bool = False) -> Any:
    """A hook that lets a run use the server."""
    os.environ.update(environment)
    return slow_steps() if slow else None


def tensors_in(storage: CheckpointStorage, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, unsharded and verified."""
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = VerifiedReader(storage.open(step))
    entries: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a single process
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local")
    finish(folder, *SHORT)
    return folder


@pytest.mark.slow  # test_object_storage.py kills a save at each request
def test_run_killed_in_s3_ends_like_one_in_a_folder(
    s3_server: S3Server, bucket: str, local: Path, tmp_path: Path
) -> None:
    url = f"s3://{bucket}/run/checkpoint"
    options = (*SHORT, "--checkpoint.folder", url, "--metrics.enable_tensorboard")
    killed = ForkedRun(tmp_path / "killed", *options, hook=partial(use_s3, s3_server.environment, slow=True))
    # By its log: listing the bucket again and again would take the CPU of the server, which is in this process.
    killed.wait_for(lambda: f"saved {url}/step-2" in killed.output())
    killed.end()
    # On another machine, which shares nothing with the first.
    output = finish(tmp_path / "empty", *options, hook=partial(use_s3, s3_server.environment))
    assert f"resumed from {url}/step-2" in output
    assert f"start        resumes from {url}/step-2" in output
    assert not (tmp_path / "empty/checkpoint").exists()
    storage = ObjectStorage(url)
    assert storage.steps() == [2, 4]
    expected = tensors_in(LocalStorage(str(local / "checkpoint")), STEPS)
    assert different_tensors(tensors_in(storage, STEPS), expected) == []
    # Its metrics of the steps before, which it has not computed, come from the checkpoint.
    assert logged_losses(tmp_path / "empty") == logged_losses(local)
    assert "lacked metrics of other starts of the run: added those in" in output
    assert len(list((tmp_path / "empty/tensorboard").iterdir())) == 2
    folders = {name.split("/")[0] for name in s3_server.objects(bucket, "run/checkpoint/")}
    assert folders == {*storage.names(), "lease", "outputs"}  # nothing is left of the kill

    # Copied to a local folder, it resumes there; and the other way round.
    for name, content in s3_server.objects(bucket, f"run/checkpoint/{storage.folder_of(2)}/").items():
        (tmp_path / "copied/checkpoint/step-2").mkdir(parents=True, exist_ok=True)
        (tmp_path / "copied/checkpoint/step-2" / name).write_bytes(content)
    assert "resumed from" in finish(tmp_path / "copied", *SHORT)
    assert different_tensors(tensors_in(LocalStorage(str(tmp_path / "copied/checkpoint")), STEPS), expected) == []
    for file in (local / "checkpoint/step-2").iterdir():
        s3_server.upload(bucket, f"copied/step-2/{file.name}", file.read_bytes())
    options = (*SHORT, "--checkpoint.folder", f"s3://{bucket}/copied")
    assert "resumed from" in finish(tmp_path / "up", *options, hook=partial(use_s3, s3_server.environment))
    assert different_tensors(tensors_in(ObjectStorage(options[-1]), STEPS), expected) == []


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[S3Faults]:
    proxy = S3Faults(s3_server.url, s3_server.environment)
    yield proxy
    proxy.stop()


def short_pauses(environment: dict[str, str]) -> None:
    """A hook that lets a run use the server, with few attempts and short pauses."""
    os.environ.update(environment)
    object_store.PAUSES_SECONDS = (0.01,) * 9  # type: ignore[assignment]
    object_store._S3_CLIENT = {"connect_timeout": 2, "read_timeout": 2, "retries": {"total_max_attempts": 1}}


def test_run_with_faults_of_the_store_ends_like_one_in_a_folder(
    proxy: S3Faults, bucket: str, local: Path, tmp_path: Path
) -> None:
    kinds = {"slow down": 5, "error": 7, "reset": 13, "lost answer": 17, "truncate": 19, "silence": 37}
    faults = [proxy.fail("timeout", "PUT", every=5)]  # S3's, of an upload
    faults += [proxy.fail(kind, every=every, seconds=0.3) for kind, every in kinds.items()]
    url = f"s3://{bucket}/faults"
    output = finish(tmp_path, *SHORT, "--checkpoint.folder", url, hook=partial(short_pauses, proxy.environment))
    assert [fault for fault in faults if not fault.count] == []
    assert "could not be written" not in output
    proxy.heal()
    storage = ObjectStorage(url)
    assert storage.steps() == [2, 4]
    assert (
        different_tensors(tensors_in(storage, STEPS), tensors_in(LocalStorage(str(local / "checkpoint")), STEPS)) == []
    )


def test_store_that_does_not_respond_is_no_damage(proxy: S3Faults, bucket: str, tmp_path: Path) -> None:
    url, hook = f"s3://{bucket}/down", partial(short_pauses, proxy.environment)
    options = ("--checkpoint.folder", url, "--checkpoint.max_failed_saves", "1")

    def end(steps: int, folder: str, code: int, message: str) -> None:
        run = ForkedRun(tmp_path / folder, *options, "--training.steps", str(steps), hook=hook, ranks=1)
        assert run.wait() == [code], run.output()
        assert message in run.output()

    end(2, "a", 0, "saved")
    proxy.fail("slow down", "PUT .*distcp")  # in a save
    end(6, "b", 74, "the store does not respond: [Errno 16] injected: SlowDown")
    proxy.heal()
    proxy.fail("error", "GET .*(distcp|manifest)")  # in a resume
    end(6, "c", 74, "the store does not respond: [Errno 121] injected: InternalError")
    proxy.heal()
    end(4, "d", 0, "resumed from")
    assert ObjectStorage(url).names() == [ObjectStorage(url).folder_of(2), ObjectStorage(url).folder_of(4)]


def test_credentials_are_neither_logged_nor_stored(s3_server: S3Server, bucket: str, tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "AKIAKEYOFTHETEST", "AWS_SECRET_ACCESS_KEY": "secretofthetest"}
    options = ("--checkpoint.folder", f"s3://{bucket}/run", "--training.steps", "2")
    output = finish(tmp_path, *options, hook=partial(use_s3, {**s3_server.environment, **keys}), ranks=1)
    stored = [
        *s3_server.objects(bucket).values(),
        *(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()),
    ]
    for secret in keys.values():
        assert secret not in output
        assert [content for content in stored if secret.encode() in content] == []


def no_credentials(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.pop(key, None)
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    os.environ["HOME"] = "/nonexistent"


def without_s3fs() -> None:
    import sys

    sys.modules["s3fs"] = None  # type: ignore[assignment]


@pytest.mark.parametrize("case", ["no bucket", "no credentials", "no package"])
def test_storage_that_cannot_be_used_is_an_error_before_training(
    case: str, s3_server: S3Server, bucket: str, tmp_path: Path
) -> None:
    hooks = {
        "no bucket": (partial(use_s3, s3_server.environment), "specified bucket does not exist"),
        "no credentials": (partial(no_credentials, s3_server.environment), "Unable to locate credentials"),
        "no package": (without_s3fs, r"needs a package that is not installed: pip install 's3fs>="),
    }
    hook, message = hooks[case]
    url = f"s3://{'absent-bucket' if case == 'no bucket' else bucket}/run"
    run = ForkedRun(tmp_path, "--checkpoint.folder", url, hook=hook, ranks=1)
    assert run.wait() == [2], run.output()
    lines = [line for line in run.output().splitlines() if message in line]
    assert len(lines) == 1, run.output()
    assert "Traceback" not in run.output()
    assert "training begins" not in run.output()


def test_bucket_that_cannot_be_written_is_an_error_before_text_is_tokenized(
    proxy: S3Faults, bucket: str, tmp_path: Path
) -> None:
    proxy.fail("denied", "PUT")
    hook = partial(short_pauses, proxy.environment)
    run = ForkedRun(tmp_path, "--checkpoint.folder", f"s3://{bucket}/run", hook=hook, ranks=1)
    assert run.wait() == [2], run.output()
    assert "access is denied" in run.output()
    assert "tokens in the cache" not in run.output()  # tokenizing may take hours


def use_tiny() -> None:
    """A hook that lets a command know the model of forked runs."""
    patch("torchtrain.models.model_config.flavor_config", lambda *_: TINY).start()


def test_commands_take_urls(s3_server: S3Server, bucket: str, local: Path, tmp_path: Path) -> None:
    run = partial(checked_command, environment=s3_server.environment, hook=use_tiny)
    fails = partial(run_command, environment=s3_server.environment, hook=use_tiny)
    url = f"s3://{bucket}/run"
    options = (*SHORT, "--checkpoint.folder", f"{url}/checkpoint", "--huggingface.export")
    finish(tmp_path / "run", *options, hook=partial(use_s3, s3_server.environment))
    same = run("torchtrain.compare", url, str(local))
    assert "step 4: match, bitwise" in same.stdout
    assert "loss: identical in 4 steps" in same.stdout
    texts = [
        run("torchtrain.generate", source, "--prompt", "def ", "--temperature", "0").stdout
        for source in (url, f"{url}/checkpoint/step-4", str(local))
    ]
    assert texts[0] == texts[1] == texts[2]

    # The export at the end, and conversions to and from URLs.
    run("torchtrain.convert", str(local), str(tmp_path / "hf"))
    (weights,) = (tmp_path / "hf").glob("*.safetensors")
    exported = weights.read_bytes()
    assert s3_server.objects(bucket, "run/checkpoint/hf/")[weights.name] == exported
    run("torchtrain.convert", url, f"s3://{bucket}/hf")
    assert s3_server.objects(bucket, "hf/")[weights.name] == exported
    again = fails("torchtrain.convert", url, f"s3://{bucket}/hf")
    assert again.returncode == 2
    assert f"s3://{bucket}/hf exists; give a URL that does not" in again.stderr
    absent = fails("torchtrain.convert", url, "s3://absent-bucket/hf")
    assert absent.returncode == 2
    assert "'s3://absent-bucket/hf' cannot be used: The specified bucket does not exist" in absent.stderr
    run("torchtrain.convert", url, f"s3://{bucket}/weights", "--to", "torchtrain")
    run("torchtrain.convert", f"s3://{bucket}/weights", str(tmp_path / "hf2"))
    assert (tmp_path / "hf2" / weights.name).read_bytes() == exported

    # A new run from these weights.
    options = ("--checkpoint.initial_load_path", f"s3://{bucket}/weights", "--training.steps", "1")
    output = finish(tmp_path / "new", *options, hook=partial(use_s3, s3_server.environment), ranks=1)
    assert f"starts from the weights in s3://{bucket}/weights" in output


def test_dump_folder_must_be_local() -> None:
    with pytest.raises(ConfigError, match=r"job.dump_folder = 's3://b/run' must be a local folder: set"):
        JobSection(dump_folder="s3://b/run")
