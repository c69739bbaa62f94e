"""Options that name a config file, a tokenizer, a model or weights by URL: fetched once per machine (moto)."""

import functools
import os
import shutil
import socketserver
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tomli
from forked_command import checked_command, run_command
from forked_run import CONFIG, TINY, ForkedRun, finish, logged_losses
from s3_server import S3Server

from torchtrain.checkpoint.weights import find_weights
from torchtrain.config.parse import parse
from torchtrain.config.urls import local_copy
from torchtrain.datasets.tokenizers import load_tokenizer, tokenizer_file
from torchtrain.errors import ConfigError, StorageError
from torchtrain.plugins.object_storage import cached_copies, object_store
from torchtrain.plugins.object_storage.cached_copies import _fetch, _Store

STEPS = ("--training.steps", "2")


@pytest.fixture(autouse=True)
def bucket(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for key, value in s3_server.environment.items():
        monkeypatch.setenv(key, value)
    _fetch.cache_clear()
    return s3_server.make_bucket(f"urls-{abs(hash(tmp_path)) % 10**8}")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PAUSES_SECONDS", (0.0, 0.0))


def use(environment: dict[str, str], cache: Path, fetched: Path) -> None:
    """A hook that lets a run use the server, and lists in ``fetched`` what its ranks fetch."""
    os.environ.update(environment, XDG_CACHE_HOME=str(cache))
    copy_file = _Store._copy_file

    def listed(self: _Store, file: Any, target: Path) -> None:
        with fetched.open("a") as lines:
            lines.write(f"{file.name}\n")
        copy_file(self, file, target)

    patch.object(_Store, "_copy_file", listed).start()


def use_tiny(cache: Path) -> None:
    """A hook that lets a command know the model of forked runs."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    patch("torchtrain.models.model_config.flavor_config", lambda *_: TINY).start()


def upload_folder(server: S3Server, bucket: str, prefix: str, folder: Path) -> None:
    for file in folder.iterdir():
        server.upload(bucket, f"{prefix}/{file.name}", file.read_bytes())


def test_config_and_tokenizer_by_url_train_as_local_ones(s3_server: S3Server, bucket: str, tmp_path: Path) -> None:
    finish(tmp_path / "local", *STEPS)
    url, tokenizer = f"s3://{bucket}/runs/run.toml", f"s3://{bucket}/tokenizer"
    s3_server.upload(bucket, "runs/run.toml", f'{CONFIG}\n[model]\ntokenizer_path = "{tokenizer}"\n'.encode())
    s3_server.upload(bucket, "tokenizer/tokenizer.model", tokenizer_file().read_bytes())
    s3_server.upload(bucket, "tokenizer/README", b"not of a tokenizer")
    fetched, run = tmp_path / "fetched", tmp_path / "run"
    hook = partial(use, s3_server.environment, tmp_path / "cache", fetched)
    finish(run, *STEPS, "--job.config_file", url, hook=hook)
    assert logged_losses(run) == logged_losses(tmp_path / "local")
    assert sorted(fetched.read_text().split()) == ["run.toml", "tokenizer.model"]  # once for both ranks
    saved = tomli.loads((run / "checkpoint/step-2/config.toml").read_text())
    assert (saved["job"]["config_file"], saved["model"]["tokenizer_path"]) == (url, tokenizer)

    # On a new disk, and beside the old copies on the same one.
    again = partial(use, s3_server.environment, tmp_path / "other cache", fetched)
    output = finish(run, "--training.steps", "4", "--job.config_file", url, hook=again, ranks=1)
    assert "resumed from" in output
    assert len(fetched.read_text().split()) == 4
    finish(run, "--training.steps", "6", "--job.config_file", url, hook=hook, ranks=1)
    assert len(fetched.read_text().split()) == 4


@pytest.mark.slow
def test_hugging_face_folder_by_url_trains_as_a_local_one(s3_server: S3Server, bucket: str, tmp_path: Path) -> None:
    finish(tmp_path / "first", *STEPS, ranks=1)
    command = partial(
        checked_command, environment=s3_server.environment, hook=partial(use_tiny, tmp_path / "cache of commands")
    )
    command("torchtrain.convert", str(tmp_path / "first"), str(tmp_path / "hf"), "--dtype", "float32")
    upload_folder(s3_server, bucket, "hf", tmp_path / "hf")
    s3_server.upload(bucket, "hf/consolidated.safetensors", b"not read")
    fetched, url = tmp_path / "fetched", f"s3://{bucket}/hf"
    hook = partial(use, s3_server.environment, tmp_path / "cache", fetched)

    def options(folder: str) -> tuple[str, ...]:
        return (*STEPS, "--model.hf_folder", folder, "--checkpoint.initial_load_path", folder)

    finish(tmp_path / "local", *options(str(tmp_path / "hf")))
    output = finish(tmp_path / "run", *options(url), "--huggingface.export", hook=hook)
    assert f"starts from the weights in {url}" in output
    assert logged_losses(tmp_path / "run") == logged_losses(tmp_path / "local")
    assert fetched.read_text().split().count("model-00001-of-00001.safetensors") == 1
    assert "consolidated.safetensors" not in fetched.read_text()
    saved = (tmp_path / "run/checkpoint/step-2/config.toml").read_text()
    assert tomli.loads(saved)["model"]["tokenizer_path"] == url
    assert str(tmp_path / "cache") not in saved
    assert (tmp_path / "run/hf/tokenizer.json").read_bytes() == (tmp_path / "hf/tokenizer.json").read_bytes()

    # The commands, with these and with the config of the run.
    prompt = ("--prompt", "def ", "--temperature", "0")
    text = command("torchtrain.generate", url, *prompt).stdout
    assert text == command("torchtrain.generate", str(tmp_path / "hf"), *prompt).stdout
    assert text == command("torchtrain.generate", url, *prompt, "--tokenizer_path", url).stdout
    assert command("torchtrain.generate", str(tmp_path / "run"), *prompt).stdout
    command("torchtrain.convert", url, str(tmp_path / "weights"), "--to", "torchtrain")
    assert tomli.loads((tmp_path / "weights/config.toml").read_text())["model"]["tokenizer_path"] == url
    s3_server.upload(bucket, "run.toml", f'[model]\nhf_folder = "{url}"\n[training]\nseq_len = 32\n'.encode())
    config = ("--job.config_file", f"s3://{bucket}/run.toml")
    assert command("torchtrain.estimate", *config, "--estimate.world_size", "2").stdout.startswith("fits: ")
    (tmp_path / "text.txt").write_text("def f(): pass\n" * 100)
    data = ("--data.path", str(tmp_path / "text.txt"), "--prepare.output", str(tmp_path / "prepared"))
    command("torchtrain.prepare", *config, *data)
    assert (tmp_path / "prepared").is_dir()


def without_s3fs() -> None:
    patch("fsspec.core.url_to_fs", side_effect=ImportError("Install s3fs to access S3")).start()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--job.config_file", "s3://{bucket}/no.toml"], "job.config_file = 's3://{bucket}/no.toml' does not exist"),
        (["--model.tokenizer_path", "s3://{bucket}/no"], "model.tokenizer_path = 's3://{bucket}/no' does not exist"),
        pytest.param(
            ["--model.tokenizer_path", "s3://no-such-bucket/a"],
            "model.tokenizer_path = 's3://no-such-bucket/a'",
            marks=pytest.mark.slow,
        ),
        (["--model.hf_folder", "s3://{bucket}/no"], "model.hf_folder = 's3://{bucket}/no' does not exist"),
        (["--checkpoint.initial_load_path", "s3://{bucket}/no"], "s3://{bucket}/no has no checkpoint"),
        (["--model.tokenizer_path", "ftp://host/a"], "model.tokenizer_path = 'ftp://host/a': its scheme = 'ftp' must"),
    ],
)
def test_url_that_cannot_be_read_is_an_error_before_training(
    options: list[str], message: str, s3_server: S3Server, bucket: str, tmp_path: Path
) -> None:
    options = [option.format(bucket=bucket) for option in options]
    ranks = 2 if "no.toml" in message else 1
    hook = partial(use, s3_server.environment, tmp_path, tmp_path / "fetched")
    run = ForkedRun(tmp_path / "run", *options, hook=hook, ranks=ranks)
    assert run.wait() == [2] * ranks
    assert f"error: {message.format(bucket=bucket)}" in run.output()
    assert run.output().count("error: ") == 1
    assert not (tmp_path / "run/checkpoint").exists()


def test_missing_package_is_named() -> None:
    found = run_command("torchtrain.estimate", "--model.tokenizer_path", "s3://bucket/a", hook=without_s3fs)
    assert found.returncode == 2
    assert "model.tokenizer_path = 's3://bucket/a' needs a package that is not installed: pip install" in found.stderr
    assert "'s3fs>=" in found.stderr


def test_denied_access_is_an_error(s3_server: S3Server, bucket: str) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError("Access Denied")

    s3_server.upload(bucket, "a", b"content")
    with (
        patch.object(cached_copies, "with_timeout", lambda *_: denied),
        pytest.raises(ConfigError, match=r"access is denied: Access Denied. Set the credentials of the provider"),
    ):
        local_copy(f"s3://{bucket}/a", "model.tokenizer_path")


def copies(names: str = "") -> list[str]:
    """Paths of the files in the cache whose names begin so."""
    root = cached_copies.cache_folder()
    return sorted(str(file.relative_to(root)) for file in root.glob(f"{names}*/*"))


def test_processes_at_once_fetch_one_copy(s3_server: S3Server, bucket: str) -> None:
    s3_server.upload(bucket, "a", b"content")
    fetch = functools.partial(_fetch.__wrapped__, f"s3://{bucket}/a", "option", ())
    copied, copy = [], _Store.copy
    with patch.object(_Store, "copy", lambda *args: copied.append(args) or copy(*args)), ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: fetch(), range(4)))
    assert [path.read_bytes() for path in found] == [b"content"] * 4
    assert len(copied) == 1


def test_another_version_is_another_copy_and_a_truncated_one_is_replaced(s3_server: S3Server, bucket: str) -> None:
    url = f"s3://{bucket}/a"
    s3_server.upload(bucket, "a", b"first")
    first = local_copy(url, "option")
    s3_server.upload(bucket, "a", b"other")
    assert local_copy(url, "option") == first  # of one process
    assert first.read_bytes() == b"first"
    _fetch.cache_clear()
    other = local_copy(url, "option")
    assert other.read_bytes() == b"other"
    assert first.read_bytes() == b"first"
    other.write_bytes(b"oth")
    _fetch.cache_clear()
    assert local_copy(url, "option").read_bytes() == b"other"


@pytest.mark.usefixtures("quick")
def test_fetch_that_is_cut_short_is_repeated(s3_server: S3Server, bucket: str) -> None:
    s3_server.upload(bucket, "a", b"content")
    lengths = [3, 5, 7]

    def get_file(_: str, target: str) -> None:
        Path(target).write_bytes(b"content"[: lengths.pop(0)])

    def faulty(file_system: Any, method: str, *args: int) -> Any:
        return get_file if method == "get_file" else object_store.with_timeout(file_system, method, *args)

    with patch.object(cached_copies, "with_timeout", faulty):
        assert local_copy(f"s3://{bucket}/a", "option").read_bytes() == b"content"
        lengths[:] = [1, 1, 1]
        _fetch.cache_clear()
        shutil.rmtree(cached_copies.cache_folder())
        with pytest.raises(StorageError, match=r"the store does not respond: received 1 of 7 bytes"):
            local_copy(f"s3://{bucket}/a", "option")
    assert copies() == []


@pytest.mark.usefixtures("quick")
def test_bytes_are_compared_with_the_md5_of_the_store(s3_server: S3Server, bucket: str) -> None:
    s3_server.upload(bucket, "a", b"content")
    with (
        patch.object(cached_copies, "md5_of", lambda _: b"0" * 16),
        pytest.raises(StorageError, match="received other bytes than those whose MD5 the store has"),
    ):
        local_copy(f"s3://{bucket}/a", "option")


def test_object_that_is_replaced_while_it_is_fetched_is_an_error(s3_server: S3Server, bucket: str) -> None:
    s3_server.upload(bucket, "a", b"content")
    copy = _Store.copy

    def replaced(self: _Store, *args: Any) -> None:
        s3_server.upload(bucket, "a", b"another")
        copy(self, *args)

    with (
        patch.object(_Store, "copy", replaced),
        pytest.raises(StorageError, match=r"option = 's3://.*': a was replaced or removed while it was fetched"),
    ):
        local_copy(f"s3://{bucket}/a", "option")
    assert copies() == []


def test_cache_that_cannot_be_written_is_an_error(
    s3_server: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_server.upload(bucket, "a", b"content")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"the cache in .*/file/torchtrain/urls \(XDG_CACHE_HOME\) cannot be used"):
        local_copy(f"s3://{bucket}/a", "option")


class Web(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """The address of a web server, and the files in tmp_path/web."""
    (tmp_path / "web").mkdir()
    with socketserver.ThreadingTCPServer(
        ("127.0.0.1", 0), functools.partial(Web, directory=str(tmp_path / "web"))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_file_of_a_web_server(web: str, tmp_path: Path) -> None:
    shutil.copyfile(tokenizer_file(), tmp_path / "web/tokenizer.model")
    (tmp_path / "web/tokenizer_config.json").write_text('{"add_eos_token": true}')
    tokenizer = load_tokenizer(f"{web}/tokenizer.model?download=true")
    assert tokenizer.identity == load_tokenizer().identity
    assert tokenizer.added_ids[1] == [tokenizer.eos_id]  # by the file beside it
    (tmp_path / "web/run.toml").write_text("[training]\nsteps = 7\n")
    config = parse(["--job.config_file", f"{web}/run.toml"])
    assert (config.training.steps, config.job.config_file) == (7, f"{web}/run.toml")
    assert config.job.dump_folder == "outputs/run"
    (tmp_path / "web/run.toml").write_text("[training]\nsteps = 8\n")  # of the same size, without an ETag
    _fetch.cache_clear()
    assert parse(["--job.config_file", f"{web}/run.toml"]).training.steps == 8


def test_machine_that_cannot_read_the_config_says_so(web: str) -> None:
    """Also if its ranks are not the first, as other machines may have no error."""
    environment = {"RANK": "8", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "run"}
    result = run_command("torchtrain.train", "--job.config_file", f"{web}/no.toml", environment=environment)
    assert result.returncode == 2
    assert f"error: job.config_file = '{web}/no.toml' does not exist" in result.stderr


@pytest.mark.usefixtures("quick")
def test_errors_of_a_web_server(web: str) -> None:
    with pytest.raises(ConfigError, match=rf"option = '{web}/no' does not exist"):
        local_copy(f"{web}/no", "option")
    with pytest.raises(ConfigError, match="names a folder, which a web server does not list"):
        find_weights(web)
    with pytest.raises(ConfigError, match="option is a URL with a signature in it, which would be logged"):
        local_copy(f"{web}/a?X-Amz-Signature=secret", "option")
    with pytest.raises(StorageError, match="the store does not respond"):
        local_copy("http://127.0.0.1:9/a", "option")
