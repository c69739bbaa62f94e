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
import torch.distributed as dist
from forked_command import checked_command
from forked_run import TINY, ForkedRun, different_tensors, finish, logged_losses, slow_steps
from s3_faults import S3Faults
from s3_server import S3Server

from torchtrain import convert as convert_command
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
    finish(folder, *SHORT, ranks=1)
    return folder


@pytest.mark.slow  # test_object_storage.py kills a save at each request
def test_run_killed_in_s3_ends_like_one_in_a_folder(
    s3_server: S3Server, bucket: str, local: Path, tmp_path: Path
) -> None:
    url = f"s3://{bucket}/run/checkpoint"
    options = (*SHORT, "--checkpoint.folder", url, "--metrics.enable_tensorboard")
    hook = partial(use_s3, s3_server.environment, slow=True)
    killed = ForkedRun(tmp_path / "killed", *options, hook=hook, ranks=1)
    # By its log: listing the bucket again and again would take the CPU of the server, which is in this process.
    killed.wait_for(lambda: f"saved {url}/step-2" in killed.output())
    killed.end()
    # On another machine, which shares nothing with the first.
    output = finish(tmp_path / "empty", *options, hook=partial(use_s3, s3_server.environment), ranks=1)
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
    assert "resumed from" in finish(tmp_path / "copied", *SHORT, ranks=1)
    assert different_tensors(tensors_in(LocalStorage(str(tmp_path / "copied/checkpoint")), STEPS), expected) == []
    for file in (local / "checkpoint/step-2").iterdir():
        s3_server.upload(bucket, f"copied/step-2/{file.name}", file.read_bytes())
    options = (*SHORT, "--checkpoint.folder", f"s3://{bucket}/copied")
    assert "resumed from" in finish(tmp_path / "up", *options, hook=partial(use_s3, s3_server.environment), ranks=1)
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


@pytest.fixture(scope="module")
def run_with_faults(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a run that had faults of all kinds and exported its weights."""
    proxy = S3Faults(s3_server.url, s3_server.environment)
    kinds = {"slow down": 5, "error": 7, "reset": 13, "lost answer": 17, "truncate": 19, "silence": 37}
    faults = [proxy.fail("timeout", "PUT", every=5)]  # S3's, of an upload
    faults += [proxy.fail(kind, every=every, seconds=0.3) for kind, every in kinds.items()]
    url = f"s3://{s3_server.make_bucket('faults')}/run"
    options = (*SHORT, "--checkpoint.folder", f"{url}/checkpoint", "--huggingface.export")
    hook = partial(short_pauses, proxy.environment)
    output = finish(tmp_path_factory.mktemp("faults"), *options, hook=hook, ranks=1)
    assert [fault for fault in faults if not fault.count] == []
    assert "could not be written" not in output
    proxy.stop()
    return url


def test_run_with_faults_of_the_store_ends_like_one_in_a_folder(run_with_faults: str, local: Path) -> None:
    storage = ObjectStorage(f"{run_with_faults}/checkpoint")
    assert storage.steps() == [2, 4]
    assert (
        different_tensors(tensors_in(storage, STEPS), tensors_in(LocalStorage(str(local / "checkpoint")), STEPS)) == []
    )


def test_store_that_does_not_respond_is_no_damage(proxy: S3Faults, bucket: str, tmp_path: Path) -> None:
    url, hook = f"s3://{bucket}/down", partial(short_pauses, proxy.environment)
    options = ("--checkpoint.folder", url, "--checkpoint.max_failed_saves", "1")

    def fail(folder: str, message: str) -> None:
        run = ForkedRun(tmp_path / folder, *options, "--training.steps", "6", hook=hook, ranks=1)
        assert run.wait() == [74], run.output()
        assert f"the store does not respond: {message}" in run.output()

    proxy.fail("slow down", "PUT .*distcp", skip=1)  # in the second save
    fail("a", "[Errno 16] injected: SlowDown")
    proxy.heal()
    proxy.fail("error", "GET .*(distcp|manifest)")  # in a resume
    fail("b", "[Errno 121] injected: InternalError")
    proxy.heal()
    assert "resumed from" in finish(tmp_path / "c", *options, "--training.steps", "4", hook=hook, ranks=1)
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


def test_commands_take_urls(
    s3_server: S3Server,
    bucket: str,
    run_with_faults: str,
    local: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = partial(checked_command, environment=s3_server.environment, hook=use_tiny)
    same = run("torchtrain.compare", run_with_faults, str(local))
    assert "step 4: match, bitwise" in same.stdout
    assert "loss: identical in 4 steps" in same.stdout
    texts = [
        run("torchtrain.generate", source, "--prompt", "def ", "--temperature", "0").stdout
        for source in (run_with_faults, f"{run_with_faults}/checkpoint/step-4", str(local))
    ]
    assert texts[0] == texts[1] == texts[2]

    # The export at the end, and conversions to and from URLs.
    monkeypatch.setattr("torchtrain.models.model_config.flavor_config", lambda *_: TINY)

    def convert(*arguments: str) -> int:
        capsys.readouterr()
        code = convert_command.main([*arguments])
        if dist.is_initialized():
            dist.destroy_process_group()
        return code

    assert convert(str(local), str(tmp_path / "hf")) == 0
    (weights,) = (tmp_path / "hf").glob("*.safetensors")
    exported = weights.read_bytes()
    assert s3_server.objects("faults", "run/checkpoint/hf/")[weights.name] == exported
    assert convert(run_with_faults, f"s3://{bucket}/hf") == 0
    assert s3_server.objects(bucket, "hf/")[weights.name] == exported
    assert convert(run_with_faults, f"s3://{bucket}/hf") == 2
    assert f"s3://{bucket}/hf exists; give a URL that does not" in capsys.readouterr().err
    assert convert(run_with_faults, "s3://absent-bucket/hf") == 2
    message = "'s3://absent-bucket/hf' cannot be used: The specified bucket does not exist"
    assert message in capsys.readouterr().err
    assert convert(run_with_faults, f"s3://{bucket}/weights", "--to", "torchtrain") == 0
    assert convert(f"s3://{bucket}/weights", str(tmp_path / "hf2")) == 0
    assert (tmp_path / "hf2" / weights.name).read_bytes() == exported

    # A new run from these weights.
    options = ("--checkpoint.initial_load_path", f"s3://{bucket}/weights", "--training.steps", "1")
    output = finish(tmp_path / "new", *options, hook=partial(use_s3, s3_server.environment), ranks=1)
    assert f"starts from the weights in s3://{bucket}/weights" in output


def test_dump_folder_must_be_local() -> None:
    with pytest.raises(ConfigError, match=r"job.dump_folder = 's3://b/run' must be a local folder: set"):
        JobSection(dump_folder="s3://b/run")
