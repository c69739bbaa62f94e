"""Checkpoints and data in an emulator of Google Cloud Storage (fake-gcs-server), through gcsfs."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from data_samples import DOCUMENTS, make_loader, take, write_jsonl, write_tokens
from forked_run import ForkedRun, different_tensors, finish, logged_losses, slow_steps
from gcs_server import GCSServer, fake_gcs_server
from test_s3_checkpoints import tensors_in

from torchtrain.checkpoint.local_storage import LocalStorage
from torchtrain.datasets.options import DataConfig
from torchtrain.datasets.tokenizers import load_tokenizer, tokenizer_file
from torchtrain.plugins.object_storage import cached_copies
from torchtrain.plugins.object_storage.object_store import md5_of, md5_of_file
from torchtrain.plugins.object_storage.storage import ObjectStorage, ObjectStore

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::ResourceWarning")  # of gcsfs

STEPS = 4
SHORT = ("--training.steps", str(STEPS))


@pytest.fixture(scope="module")
def server() -> Iterator[GCSServer]:
    if find_spec("gcsfs") is None:
        pytest.skip("needs pip install -e '.[gcs]'")
    if fake_gcs_server() is None:
        pytest.skip("needs fake-gcs-server")
    server = GCSServer()
    server.make_bucket("bucket")
    yield server
    server.stop()


@pytest.fixture
def gcs(server: GCSServer, monkeypatch: pytest.MonkeyPatch) -> GCSServer:
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    return server


def use(environment: dict[str, str], slow: bool = False) -> object:
    """A hook that lets a run use the server."""
    os.environ.update(environment)
    return slow_steps() if slow else None


def test_of_many_that_create_an_object_at_once_one_wins(gcs: GCSServer) -> None:
    stores = [ObjectStore("gs://bucket/race", "checkpoint.folder") for _ in range(16)]
    stores[0].check_access()
    assert stores[0].names() == {}

    def create(number: int) -> bool:
        try:
            stores[number].create("lease/1.json", str(number).encode())
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(create, range(16)))
    assert won.count(True) == 1
    assert gcs.objects("bucket", "race/") == {"lease/1.json": str(won.index(True)).encode()}
    stores[0].create("lease/1.json", str(won.index(True)).encode())  # as after a lost answer


@pytest.mark.usefixtures("gcs")
def test_objects_are_read_by_ranges_listed_and_deleted() -> None:
    store, content = ObjectStore("gs://bucket/objects", "checkpoint.folder"), os.urandom(2**20)
    store.write("step-2/a", content)
    store.write("step-2/manifest.json", b"{}")
    assert store.names() == {"step-2": True}
    assert store.files("step-2") == {"a": 2**20, "manifest.json": 2}
    assert store.read_range("step-2/a", 1000, 5000) == content[1000:5000]
    assert store.read_range("step-2/a", 2**20 - 10, 2**20 + 10) == content[-10:]
    assert [store.exists("step-2/a"), store.exists("step-2"), store.exists("b")] == [True, True, False]
    store.delete_folder("step-2")
    store.delete("step-2/a")
    assert store.names() == {}
    assert store.uploads() == []


@pytest.mark.slow
def test_run_killed_in_gcs_ends_like_one_in_a_folder(gcs: GCSServer, tmp_path: Path) -> None:
    url = "gs://bucket/run/checkpoint"
    options = (*SHORT, "--checkpoint.folder", url)
    finish(tmp_path / "local", *SHORT)
    expected = tensors_in(LocalStorage(str(tmp_path / "local/checkpoint")), STEPS)
    killed = ForkedRun(tmp_path / "killed", *options, hook=partial(use, gcs.environment, slow=True))
    killed.wait_for(lambda: f"saved {url}/step-2" in killed.output())
    killed.end()
    output = finish(tmp_path / "empty", *options, hook=partial(use, gcs.environment))
    assert f"resumed from {url}/step-2" in output
    storage = ObjectStorage(url)
    assert storage.steps() == [2, 4]
    assert different_tensors(tensors_in(storage, STEPS), expected) == []
    assert logged_losses(tmp_path / "empty") == logged_losses(tmp_path / "local")
    folders = {name.partition("/")[0] for name in gcs.objects("bucket", "run/checkpoint/")}
    assert folders == {*storage.names(), "lease", "outputs"}  # nothing is left of the kill

    # Copied to a local folder, it resumes there; and the other way round.
    (tmp_path / "copied/checkpoint/step-2").mkdir(parents=True)
    for name, content in gcs.objects("bucket", f"run/checkpoint/{storage.folder_of(2)}/").items():
        (tmp_path / "copied/checkpoint/step-2" / name).write_bytes(content)
    assert "resumed from" in finish(tmp_path / "copied", *SHORT)
    assert different_tensors(tensors_in(LocalStorage(str(tmp_path / "copied/checkpoint")), STEPS), expected) == []
    for file in (tmp_path / "local/checkpoint/step-2").iterdir():
        gcs.upload("bucket", f"copied/step-2/{file.name}", file.read_bytes())
    options = (*SHORT, "--checkpoint.folder", "gs://bucket/copied")
    assert "resumed from" in finish(tmp_path / "up", *options, hook=partial(use, gcs.environment))
    assert different_tensors(tensors_in(ObjectStorage(options[-1]), STEPS), expected) == []


@pytest.mark.slow
def test_older_start_that_still_runs_cannot_save(gcs: GCSServer, tmp_path: Path) -> None:
    options = ("--checkpoint.folder", "gs://bucket/two", "--training.steps", "1000")
    older = ForkedRun(tmp_path / "older", *options, hook=partial(use, gcs.environment, slow=True))
    older.wait_for(lambda: "saved gs://bucket/two/step-2" in older.output())
    newer = ForkedRun(tmp_path / "newer", *options, hook=partial(use, gcs.environment, slow=True))
    assert older.wait() == [2, 2], older.output()
    assert "now saves to" in older.output()
    saved = newer.output().count("saved gs://bucket/two/")
    newer.wait_for(lambda: newer.output().count("saved gs://bucket/two/") > saved + 1)
    newer.end()
    assert not [name for name in ObjectStorage("gs://bucket/two").names() if "superseded" in name]


@pytest.mark.slow
def test_missing_bucket_is_an_error_before_training(gcs: GCSServer, tmp_path: Path) -> None:
    run = ForkedRun(
        tmp_path, "--checkpoint.folder", "gs://absent-bucket/run", hook=partial(use, gcs.environment), ranks=1
    )
    assert run.wait() == [2], run.output()
    assert "checkpoint.folder = 'gs://absent-bucket/run' cannot be used" in run.output()
    assert "Traceback" not in run.output()
    assert "training begins" not in run.output()


@pytest.mark.slow
def test_tokens_written_in_gcs_have_the_same_bytes_and_batches(gcs: GCSServer, tmp_path: Path) -> None:
    texts = Path(write_jsonl(tmp_path / "texts.jsonl", DOCUMENTS))
    gcs.upload("bucket", "texts/texts.jsonl", texts.read_bytes())
    url, local = "gs://bucket/tokens", tmp_path / "tokens"
    write_tokens(url, "gs://bucket/texts")
    write_tokens(local, str(texts))
    tokens = {file.name: file.read_bytes() for file in local.iterdir() if file.suffix in (".tokens", ".documents")}
    assert tokens
    assert {name: gcs.objects("bucket", "tokens/")[name] for name in tokens} == tokens
    assert take(make_loader(DataConfig(path=url)), 5).equal(take(make_loader(DataConfig(path=str(local))), 5))


@pytest.mark.usefixtures("gcs")
def test_tokenizer_by_url_has_the_md5_of_the_store(
    gcs: GCSServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ObjectStore("gs://bucket/tokenizer", "option").write("tokenizer.model", tokenizer_file().read_bytes())
    md5s: list[bytes | None] = []
    monkeypatch.setattr(cached_copies, "md5_of", lambda info: md5s.append(md5_of(info)) or md5s[-1])
    for url in ("gs://bucket/tokenizer", "gs://bucket/tokenizer/tokenizer.model"):
        assert load_tokenizer(url).identity == load_tokenizer().identity
    assert set(md5s) == {md5_of_file(tokenizer_file())}
    assert gcs.objects("bucket", "tokenizer/").keys() == {"tokenizer.model"}
