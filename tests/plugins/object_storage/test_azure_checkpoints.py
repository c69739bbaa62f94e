"""Training with checkpoints in Azure's emulator (Azurite): the same run as on a local folder, and as in S3 (moto)."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from azure_server import AzureServer, azurite
from forked_run import ForkedRun, different_tensors, finish, logged_losses
from s3_server import S3Server
from test_s3_checkpoints import tensors_in

from torchtrain.checkpoint.local_storage import LocalStorage
from torchtrain.datasets.tokenizers import load_tokenizer, tokenizer_file
from torchtrain.plugins.object_storage import cached_copies
from torchtrain.plugins.object_storage.object_store import md5_of, md5_of_file
from torchtrain.plugins.object_storage.storage import ObjectStorage

STEPS = 4
SHORT = ("--training.steps", str(STEPS))


@pytest.fixture
def azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AzureServer]:
    pytest.importorskip("adlfs", reason="needs pip install -e '.[azure]'")
    if azurite() is None:
        pytest.skip("needs npm install --global azurite")
    server = AzureServer(tmp_path / "azurite")
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    yield server
    server.stop()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    server = S3Server()
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    yield server
    server.stop()


def use(variables: dict[str, str]) -> None:
    """A hook that lets a run use the servers."""
    os.environ.update(variables)


@pytest.mark.slow
def test_runs_in_a_folder_in_s3_and_in_azure_are_bitwise_the_same(
    azure: AzureServer, s3: S3Server, tmp_path: Path
) -> None:
    hook = partial(use, {**azure.environment, **s3.environment})
    in_azure, in_s3 = f"az://{azure.make_container('runs')}/run", f"s3://{s3.make_bucket('runs')}/run"
    output = finish(tmp_path / "local", *SHORT)
    expected = tensors_in(LocalStorage(str(tmp_path / "local/checkpoint")), STEPS)
    for name, url in (("azure", in_azure), ("s3", in_s3)):
        output = finish(tmp_path / name, *SHORT, "--checkpoint.folder", url, hook=hook)
        assert "resumed" not in output
        assert ObjectStorage(url).steps() == [2, 4]
        assert different_tensors(tensors_in(ObjectStorage(url), STEPS), expected) == []
        assert logged_losses(tmp_path / name) == logged_losses(tmp_path / "local")

    # From each to the next: the checkpoint of step 2 is copied, and the run continues there on an empty machine.
    def files_of(url: str) -> dict[str, bytes]:
        server = azure if url == in_azure else s3
        return server.objects("runs", f"run/{ObjectStorage(url).folder_of(2)}/")

    local = {file.name: file.read_bytes() for file in (tmp_path / "local/checkpoint/step-2").iterdir()}
    for name, content in local.items():
        azure.upload("runs", f"from-local/step-2/{name}", content)
    for name, content in files_of(in_azure).items():
        s3.upload("runs", f"from-azure/step-2/{name}", content)
    for name, content in files_of(in_s3).items():
        azure.upload("runs", f"from-s3/step-2/{name}", content)
    for url in ("az://runs/from-local", "s3://runs/from-azure", "az://runs/from-s3"):
        output = finish(tmp_path / url.replace("/", "-"), *SHORT, "--checkpoint.folder", url, hook=hook)
        assert f"resumed from {url}/step-2" in output
        assert different_tensors(tensors_in(ObjectStorage(url), STEPS), expected) == []
    (tmp_path / "home/checkpoint/step-2").mkdir(parents=True)
    for name, content in files_of(in_azure).items():
        (tmp_path / "home/checkpoint/step-2" / name).write_bytes(content)
    assert "resumed from" in finish(tmp_path / "home", *SHORT)
    assert different_tensors(tensors_in(LocalStorage(str(tmp_path / "home/checkpoint")), STEPS), expected) == []


@pytest.mark.parametrize("case", ["no container", pytest.param("no credentials", marks=pytest.mark.slow)])
def test_storage_that_cannot_be_used_is_an_error_before_training(case: str, azure: AzureServer, tmp_path: Path) -> None:
    url = f"az://{'absent' if case == 'no container' else azure.make_container('runs')}/run"
    wrong = azure.environment["AZURE_STORAGE_CONNECTION_STRING"].replace("Eby8", "Aby8")
    hook = partial(use, azure.environment if case == "no container" else {"AZURE_STORAGE_CONNECTION_STRING": wrong})
    run = ForkedRun(tmp_path / "run", "--checkpoint.folder", url, hook=hook, ranks=1)
    assert run.wait() == [2], run.output()
    assert "Traceback" not in run.output()
    assert "training begins" not in run.output()
    message = {
        "no container": "The specified container does not exist",
        "no credentials": "access is denied",
    }
    assert message[case] in run.output(), run.output()
    assert "AccountKey" not in run.output()


def test_tokenizer_by_url_has_the_md5_of_the_store(
    azure: AzureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = f"{azure.make_container('tokenizers')}/llama"
    azure.upload("tokenizers", "llama/tokenizer.model", tokenizer_file().read_bytes())
    md5s: list[bytes | None] = []
    monkeypatch.setattr(cached_copies, "md5_of", lambda info: md5s.append(md5_of(info)) or md5s[-1])
    for url in (f"az://{folder}", f"az://{folder}/tokenizer.model"):
        assert load_tokenizer(url).identity == load_tokenizer().identity
    assert set(md5s) == {md5_of_file(tokenizer_file())}
