"""Checkpoints in an object store: kills, leases and damage at each request of a save or start.

The store is fsspec's in memory, which has the semantics of S3: no renames, conditional creates, current listings.
"""

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from test_checkpoint import Run, assert_bitwise_equal

from torchtrain.checkpoint.format import _NewFiles, read_manifest, verify
from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.storage import WriterLease
from torchtrain.checkpoint.weights import find_checkpoint
from torchtrain.config.registry import CHECKPOINT_STORAGES
from torchtrain.config.schema import JobConfig, JobSection
from torchtrain.datasets.token_folder import open_folder
from torchtrain.distributed.connections import gloo_backend
from torchtrain.errors import CheckpointError, ConfigError, StorageError, SupersededError
from torchtrain.plugins.huggingface.export import ORIGIN, export_origin, is_export_missing
from torchtrain.plugins.object_storage import object_store, outputs
from torchtrain.plugins.object_storage import storage as object_storage
from torchtrain.plugins.object_storage.outputs import METRICS, OUTPUTS, read_metrics, restore_outputs
from torchtrain.plugins.object_storage.storage import ObjectStorage, ObjectStore

OPTIONS = {"keep_latest_k": 1, "async_mode": "disabled"}


@pytest.fixture(autouse=True)
def process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Threads would make the order of requests random.
    monkeypatch.setattr(object_storage, "ThreadPoolExecutor", SerialExecutor)
    monkeypatch.setattr(ObjectStore, "uploads", lambda _: [])
    dist.init_process_group(gloo_backend(), store=dist.HashStore(), rank=0, world_size=1)
    yield
    MemoryFileSystem.store.clear()
    dist.destroy_process_group()


class SerialExecutor:
    def __init__(self, _workers: int) -> None:
        pass

    def __enter__(self) -> "SerialExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, *arguments: Any) -> Any:
        return map(*arguments)


class Requests:
    """Calls ``before(number)`` before each request to the store, except for those of ``before`` itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[int], object]) -> None:
        self.before, self.count, self.inside = before, 0, False
        request = ObjectStore._request

        def observed(store: ObjectStore, *args: Any, **options: Any) -> Any:
            if not self.inside:
                self.inside = True
                try:
                    self.before(self.count)
                finally:
                    self.inside = False
                    self.count += 1
            return request(store, *args, **options)

        monkeypatch.setattr(ObjectStore, "_request", observed)


def storage(bucket: object = 0) -> ObjectStorage:
    return ObjectStorage(f"memory://{bucket}/run/checkpoint")


def wait_for_saves(run: Run) -> Run:
    run.manager.wait()
    if run.manager._thread is not None:
        run.manager._thread.join()
    return run


def resume(bucket: object, **options: Any) -> Run:
    run = Run(storage(bucket), seed=9, **options)
    step = run.manager.start.step
    assert step is not None
    run.manager.load(step)
    assert run.loader.row == 2 * step
    return run


def verified_steps(bucket: object) -> list[int]:
    found = storage(bucket)
    for step in found.steps():
        checkpoint = found.open(step)
        verify(checkpoint, read_manifest(checkpoint).files)
    return found.steps()


def objects(bucket: object = 0) -> set[str]:
    start = f"/{bucket}/run/checkpoint/"
    return {name.removeprefix(start) for name in MemoryFileSystem.store if name.startswith(start)}


def assert_no_left_overs(bucket: object) -> None:
    """Only the lease and files of complete checkpoints and those set aside are stored."""
    folders = {name.partition(".superseded")[0] for name in storage(bucket).names()}
    assert {name.split("/")[0] for name in objects(bucket) if "/" in name} == folders | {"lease"}
    assert len([name for name in objects(bucket) if name.startswith("lease/")]) == 1


def copy_bucket(source: object, target: object) -> None:
    for name, file in list(MemoryFileSystem.store.items()):
        if name.startswith(f"/{source}/"):
            copied = name.replace(f"/{source}/", f"/{target}/", 1)
            MemoryFileSystem.store[copied] = MemoryFile(None, copied, file.getvalue())
    MemoryFileSystem.pseudo_dirs.append("")


def test_run_resumes_bitwise_and_deletes_old_checkpoints() -> None:
    straight = wait_for_saves(Run(storage(1)).train(1, 6))
    wait_for_saves(Run(storage(0), keep_latest_k=2).train(1, 4))
    resumed = resume(0, keep_latest_k=2)
    wait_for_saves(resumed.train(5, 6))
    assert_bitwise_equal(resumed.tensors(), straight.tensors())
    assert verified_steps(0) == [4, 6]
    resume(0)
    assert_no_left_overs(0)


EACH = pytest.param(1, marks=pytest.mark.slow)


@pytest.mark.parametrize("stride", [7, EACH])
def test_newer_process_takes_over_at_any_request_of_a_save(monkeypatch: pytest.MonkeyPatch, stride: int) -> None:
    number = 0
    while True:
        bucket = number
        older = wait_for_saves(Run(storage(bucket), **OPTIONS).train(1, 4))
        newer: list[Run] = []

        def start(count: int, number: int = number, bucket: int = bucket, newer: list[Run] = newer) -> None:
            if count == number:
                newer.append(resume(bucket, **OPTIONS))
                resumed_from = newer[0].manager.start.step
                assert resumed_from in (4, 6)
                wait_for_saves(newer[0].train(resumed_from + 1, resumed_from + 4))

        with monkeypatch.context() as patched:
            Requests(patched, start)
            with suppress(CheckpointError):
                older.train(5, 6)
            wait_for_saves(older)
        if not newer:
            break
        last = newer[0].manager._newest
        before = storage(bucket).names()
        assert last in verified_steps(bucket), (number, before)
        with pytest.raises(SupersededError):
            older.train(7, 10)
        wait_for_saves(older)
        assert storage(bucket).names() == before, number
        wait_for_saves(newer[0].train(last + 1, last + 2))
        assert verified_steps(bucket)[-1] == last + 2
        assert resume(bucket, **OPTIONS).manager.start.step == last + 2
        assert_no_left_overs(bucket)
        MemoryFileSystem.store.clear()
        number += stride
    assert number > 20


def save(run: Run) -> None:
    run.train(5, 6)


def save_after_rollback(run: Run) -> None:
    """Save step 4, the only checkpoint, again after rolling back some of the states to it."""
    run.manager.load(4, only=("model", "optimizer"))
    run.manager.maybe_save(4, last=True)


@pytest.mark.parametrize("stride", [10, EACH])
@pytest.mark.parametrize("work", [save, save_after_rollback])
def test_kill_at_any_request_leaves_a_valid_checkpoint(
    work: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    run = wait_for_saves(Run(storage("run"), **OPTIONS).train(1, 4))
    with monkeypatch.context() as patched:
        requests = Requests(patched, lambda count: copy_bucket("run", count))
        work(run)
        wait_for_saves(run)
    copy_bucket("run", requests.count)
    assert requests.count > 20
    for count in [*range(0, requests.count, stride), requests.count]:
        verified_steps(count)
        with monkeypatch.context() as patched:
            again = Requests(patched, lambda at, count=count: at % 5 or copy_bucket(count, f"{count}-{at}"))
            resumed = resume(count, **OPTIONS)
        assert resumed.manager.start.step in (4, 6), count
        assert_no_left_overs(count)
        if count % 9 == 0:  # killed again in the start
            for at in range(0, again.count, 5):
                assert resume(f"{count}-{at}", **OPTIONS).manager.start.step in (4, 6)
                assert_no_left_overs(f"{count}-{at}")


@pytest.mark.parametrize(
    "number", [number if number % 7 == 0 else pytest.param(number, marks=pytest.mark.slow) for number in range(50)]
)
def test_of_two_simultaneous_starts_one_wins(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start acquires the lease before a request of this one: the newest holds it, or exactly one of the two."""
    wait_for_saves(Run(storage(), **OPTIONS).train(1, 4))
    others: list[Run] = []

    def start(count: int) -> None:
        if count == number:
            others.append(resume(0, **OPTIONS))

    with monkeypatch.context() as patched:
        Requests(patched, start)
        try:
            runs = [resume(0, **OPTIONS)]
        except SupersededError:
            runs = []
    holders = []
    for run in [*others, *runs]:
        with suppress(SupersededError):
            run.manager._check_lease()
            holders.append(run)
    assert len(holders) == 1
    wait_for_saves(holders[0].train(5, 6))
    assert verified_steps(0) == [6]


@pytest.mark.parametrize("stride", [4, EACH])
def test_outage_from_any_request_of_a_save_on_supersedes_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    """A save may have failed only after its checkpoint was complete."""
    begins = [10**9]

    def fail(number: int) -> None:
        if number >= begins[0]:
            raise StorageError("the store does not respond")

    requests = Requests(monkeypatch, fail)
    kept = set()
    for bucket in range(1, 100, stride):
        run = wait_for_saves(Run(storage(bucket), **OPTIONS | {"keep_latest_k": 0}).train(1, 2))
        begins[0] = requests.count + bucket - 1
        wait_for_saves(run.train(3, 4))
        lasted = requests.count <= begins[0]
        begins[0] = 10**9
        wait_for_saves(run.train(5, 6))
        assert [name for name in storage(bucket).names() if "superseded" in name] == []
        kept.add(tuple(verified_steps(bucket)))
        assert_bitwise_equal(resume(bucket).tensors(), run.tensors())
        if lasted:
            break
    assert kept == {(2, 6), (2, 4, 6)}
    assert lasted


def test_late_commit_and_late_markers_of_an_older_start_have_no_effect() -> None:
    older = wait_for_saves(Run(storage(), keep_latest_k=0).train(1, 6))
    staged = older.manager.storage.new_checkpoint(8, older.manager.lease)
    with staged.create("config.toml") as file:
        file.write(b"[optimizer]\n")
    newer: list[Run] = []
    # The commit passes its checks, and hangs until the newer start has begun.
    with pytest.raises(SupersededError):
        staged.commit(b"{}", {"config.toml": 12}, lambda: bool(newer.append(resume(0))), older.manager._check_lease)
    before = storage().names()
    passed = [lambda: None, older.manager._check_lease]
    for change in (older.manager.storage.set_aside, lambda step, _, check: older.manager.storage.delete(step, check)):
        checks = iter(passed)
        with pytest.raises(SupersededError):
            change(6, "superseded", lambda checks=checks: next(checks)())  # type: ignore[misc]
    assert storage().names() == before
    assert verified_steps(0) == [2, 4, 6]
    wait_for_saves(newer[0].train(7, 8))
    assert resume(0).manager.start.step == 8
    assert_no_left_overs(0)


def test_commit_between_the_listing_and_the_lease_of_a_newer_start_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    older = wait_for_saves(Run(storage(), keep_latest_k=0).train(1, 4))
    create = ObjectStore.create
    saved = []

    def late(store: ObjectStore, name: str, content: bytes) -> None:
        if name == "lease/00000002.json" and not saved:
            saved.append(name)
            wait_for_saves(older.train(5, 6))
        create(store, name, content)

    monkeypatch.setattr(ObjectStore, "create", late)
    newer = resume(0)
    assert newer.manager.start.step == 6
    with pytest.raises(SupersededError):
        older.train(7, 8)
    assert verified_steps(0) == [2, 4, 6]
    assert resume(0).manager.start.step == 6


def damage(name: str, change: Callable[[bytes], bytes] | None) -> None:
    (path,) = (path for path in MemoryFileSystem.store if "/step-4." in path and path.endswith(name))
    content = MemoryFileSystem.store.pop(path).getvalue()
    if change is not None:
        MemoryFileSystem.store[path] = MemoryFile(None, path, change(content))


DAMAGED = ((".distcp", "flip"), ("index.json", "truncate"), ("config.toml", "remove"), ("manifest.json", "flip"))


@pytest.mark.parametrize(
    ("how", "name"),
    [
        pytest.param(how, name, marks=() if (name, how) in DAMAGED else pytest.mark.slow)
        for how in ("flip", "truncate", "remove")
        for name in (".distcp", "index.json", "config.toml", "manifest.json")
    ],
)
def test_damaged_checkpoint_is_set_aside_and_the_previous_one_is_loaded(
    name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    Run(storage()).train(1, 4)
    changes = {
        "flip": lambda content: content[:-20] + bytes([content[-20] ^ 1]) + content[-19:],
        "truncate": lambda content: content[:-1],
        "remove": None,
    }
    damage(name, changes[how])
    resumed = Run(storage(), seed=1)
    assert resumed.manager.resume() == 2
    assert "(None)" not in caplog.text
    assert_bitwise_equal(resumed.tensors(), Run(storage(1)).train(1, 2).tensors())
    if (name, how) != ("manifest.json", "remove"):  # without a manifest it is the left-over of a killed save
        assert [name for name in storage().names() if "step-4." in name and name.endswith(".damaged")] != []
    assert resume(0).manager.start.step == 2


def test_run_with_only_damaged_checkpoints_does_not_start_over() -> None:
    Run(storage(), keep_latest_k=1, interval=4).train(1, 4)
    damage(".distcp", lambda content: content[:-1])
    with pytest.raises(CheckpointError, match=r"none of these is a valid checkpoint.*A new run does not replace them"):
        Run(storage())


def test_checkpoint_copied_as_a_plain_folder_is_loaded() -> None:
    run = wait_for_saves(Run(storage()).train(1, 4))
    folder = storage().folder_of(4)
    for name in objects():
        if name.startswith(f"{folder}/"):
            MemoryFileSystem().pipe_file(
                f"/copy/run/checkpoint/step-4/{name.split('/')[1]}",
                MemoryFileSystem.store[f"/0/run/checkpoint/{name}"].getvalue(),
            )
    copied = resume("copy")
    assert_bitwise_equal(copied.tensors(), run.tensors())
    wait_for_saves(copied.train(5, 6))
    assert verified_steps("copy") == [4, 6]


def test_lost_response_to_a_create_is_not_another_start() -> None:
    found = storage()
    lease = found.acquire_lease(None)
    found.store.create("lease/00000001.json", found.store.read("lease/00000001.json"))  # as a retry does
    found.check_lease(lease)
    with pytest.raises(FileExistsError):
        found.store.create("lease/00000001.json", b"of another start")
    MemoryFileSystem.store.clear()
    found.check_lease(lease)  # the object was lost: it is written again
    assert found.read_lease() == lease


def test_pieces_larger_than_a_range_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = wait_for_saves(Run(storage()).train(1, 2))
    monkeypatch.setattr(object_storage, "RANGE_BYTES", 100)
    assert_bitwise_equal(resume(0).tensors(), run.tensors())


def test_bytes_that_do_not_arrive_are_not_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_saves(Run(storage()).train(1, 2))
    read = ObjectStore.read_range
    monkeypatch.setattr(ObjectStore, "read_range", lambda *args: read(*args)[:-1])
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(StorageError, match=r"memory://.* cannot be read: .* bytes have arrived, in 4 attempts"):
        Run(storage()).manager.resume()
    assert [name for name in storage().names() if "damaged" in name] == []


def test_object_that_cannot_be_stored_is_not_stored_when_its_file_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = []

    def fail(_: ObjectStore, name: str, __: bytes) -> None:
        stored.append(name)
        raise StorageError("no answer")

    monkeypatch.setattr(ObjectStore, "write", fail)
    staged = storage().new_checkpoint(2, WriterLease(1, "0" * 32))
    files = _NewFiles(staged)
    with pytest.raises(StorageError), files.create_stream("a", "wb") as file:
        file.write(b"content")
    with pytest.raises(ZeroDivisionError), files.create_stream("b", "wb") as file:
        raise ZeroDivisionError
    del file
    gc.collect()
    assert [name.split("/")[1] for name in stored] == ["a"]


def test_older_start_does_not_discard_what_the_newer_one_has_adopted() -> None:
    older = wait_for_saves(Run(storage(), **OPTIONS).train(1, 4))
    check = older.manager._check_lease
    newer: list[Run] = []

    def start_once() -> None:
        newer.extend([] if newer else [resume(0, **OPTIONS)])
        check()

    staged = older.manager.storage.new_checkpoint(6, older.manager.lease)
    with staged.create("config.toml") as file:
        file.write(b"[optimizer]\n")
    with pytest.raises(SupersededError):  # the newer start lists the manifest, and then acquires the lease
        staged.commit(b"{}", {"config.toml": 12}, lambda: False, start_once)
    assert storage().steps() == [4, 6]
    with pytest.raises(SupersededError):
        staged.discard()
    assert {"config.toml", "manifest.json"} == {name.split("/")[1] for name in objects() if name.startswith("step-6.")}


def test_late_manifest_of_a_failed_save_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    run = wait_for_saves(Run(storage(), **OPTIONS).train(1, 4))
    create = ObjectStore.create
    late = []

    def fail(store: ObjectStore, name: str, content: bytes) -> None:
        if name.endswith("manifest.json"):
            late.append(partial(create, store, name, content))
            raise StorageError("no answer")
        create(store, name, content)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "create", fail)
        wait_for_saves(run.train(5, 6))
    assert not [name for name in objects() if name.startswith("step-6.") and "/" in name]
    late[0]()
    assert verified_steps(0) == [4]
    resume(0)
    assert_no_left_overs(0)


@pytest.mark.parametrize("method", ["write", "create"])
def test_denied_request_of_a_save_is_a_failed_save(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = wait_for_saves(Run(storage(), **OPTIONS).train(1, 4))

    def deny(*_: object) -> None:
        raise ConfigError("access is denied")

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, method, deny)
        run.train(5, 6)
    wait_for_saves(run.train(7, 8))
    assert verified_steps(0) == [8]


class Killed(BaseException):
    """Not caught by anyone."""


def kill(*_: object) -> None:
    raise Killed


def test_start_killed_before_it_has_adopted_leaves_that_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its listing and its lease, the older start saves step 6 and deletes step 4, the only one listed."""
    older = wait_for_saves(Run(storage(), **OPTIONS).train(1, 4))
    create = ObjectStore.create

    def late(store: ObjectStore, name: str, content: bytes) -> None:
        if name == "lease/00000002.json":
            wait_for_saves(older.train(5, 6))
            create(store, name, content)
            raise Killed
        create(store, name, content)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "create", late)
        with pytest.raises(Killed):
            resume(0)
    assert verified_steps(0) == [6]
    assert resume(0).manager.start.step == 6
    assert verified_steps(0) == [6]
    assert_no_left_overs(0)


def copy_checkpoint(target: str, only: str = "") -> None:
    """Copy the objects of step 4 that end with ``only`` to a folder without a generation, as a user does."""
    folder = storage().folder_of(4)
    for name in objects():
        if name.startswith(f"{folder}/") and name.endswith(only):
            content = MemoryFileSystem.store[f"/0/run/checkpoint/{name}"].getvalue()
            MemoryFileSystem().pipe_file(f"{target}/{name.split('/')[1]}", content)


def test_folder_that_is_being_copied_is_not_removed() -> None:
    wait_for_saves(Run(storage()).train(1, 4))
    copy_checkpoint("/0/run/checkpoint/step-3", ".distcp")
    resume(0)
    assert [name for name in objects() if name.startswith("step-3/")]
    assert 3 not in storage().steps()


def test_folder_copied_by_a_user_is_kept_beside_a_save_of_its_step() -> None:
    wait_for_saves(Run(storage()).train(1, 4))
    saved = storage().folder_of(4)
    copy_checkpoint("/0/run/checkpoint/step-4")
    before = {name for name in objects() if name.startswith("step-4/")}
    resume(0)
    assert before <= objects()
    assert storage().folder_of(4) == saved


def test_copied_checkpoint_can_be_copied_again_after_its_deletion(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_saves(Run(storage()).train(1, 4))
    copy_checkpoint("/copy/run/checkpoint/step-4")
    run = resume("copy", **OPTIONS)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "delete_folder", kill)
        with pytest.raises(Killed):  # after the marker, before the deletion
            run.manager.storage.delete(4, run.manager._check_lease)
    assert storage("copy").steps() == []
    acquired = storage("copy")
    acquired.acquire_lease(None)
    assert {name.split("/")[0] for name in objects("copy")} == {"lease"}
    copy_checkpoint("/copy/run/checkpoint/step-4")
    assert acquired.steps() == [4]
    assert resume("copy").manager.start.step == 4


def test_start_removes_what_a_killed_check_of_the_access_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "delete", kill)
        with pytest.raises(Killed):
            storage().check_access()
    assert len(objects()) == 1
    storage().check_access()
    Run(storage())
    assert {name.split("/")[0] for name in objects()} == {"lease"}


def test_store_that_ignores_the_condition_of_a_create_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_file = MemoryFileSystem.pipe_file
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda *args, **_: pipe_file(*args))
    with pytest.raises(ConfigError, match="ignores the condition of a request to create an object"):
        storage().check_access()
    assert objects() == set()


def test_state_costs_two_listings_and_start_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_saves(Run(storage(), keep_latest_k=0).train(1, 12))
    with monkeypatch.context() as patched:
        requests = Requests(patched, lambda _: None)
        run = resume(0)
        assert requests.count <= 60
        requests.count = 0
        assert len(run.manager.storage.steps()) == 6
        assert requests.count == 2
        requests.count = 0
        wait_for_saves(run.train(13, 14))
        assert requests.count <= 45  # with two deletions


class Uploads:
    """A file system with unfinished multipart uploads, which it lists in pages of two."""

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys

    def call_s3(self, method: str, **options: str) -> dict[str, Any]:
        if method == "abort_multipart_upload":
            self.keys.remove(options["Key"])
            return {}
        assert method == "list_multipart_uploads"
        rest = [key for key in self.keys if key > options.get("KeyMarker", "")]
        page = {"Uploads": [{"Key": key, "UploadId": "1"} for key in rest[:2]], "IsTruncated": len(rest) > 2}
        return {**page, "NextKeyMarker": rest[1], "NextUploadIdMarker": "1"} if len(rest) > 2 else page


def test_uploads_of_older_starts_are_aborted_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = ["run/checkpoint/step-6.2-0123abcd.1/a", "run/checkpoint/step-6.3-0123abcd.1/a", "run/checkpoint/step-6/a"]
    abort = [f"run/checkpoint/step-{step}.1-0123abcd.1/{name}" for step in (4, 6) for name in "ab"]
    abort += ["run/checkpoint/hf/model.safetensors", "run/checkpoint/outputs/metrics.jsonl"]
    found = Uploads(sorted([*keep, *abort]))
    monkeypatch.undo()  # of ``uploads``
    started = storage()
    lease = WriterLease(2, "0" * 32)
    started.write_lease(lease)
    monkeypatch.setitem(started.store.__dict__, "_opened", (found, "bucket/run/checkpoint"))
    started._abort_uploads(lambda: None)
    assert found.keys == sorted(keep)


@pytest.fixture
def memory_urls() -> None:
    CHECKPOINT_STORAGES.register("memory")(ObjectStorage)


@pytest.mark.usefixtures("memory_urls")
def test_url_of_a_missing_checkpoint_is_not_that_of_another_with_its_step() -> None:
    wait_for_saves(Run(storage()).train(1, 4))
    url, folder = "memory://0/run/checkpoint", storage().folder_of(4)
    for found in ("memory://0/run", url, f"{url}/step-4", f"{url}/{folder}"):
        assert str(find_checkpoint(found)) == f"{url}/{folder}"
    for missing in (f"{url}/step-4.1-00000000.9", f"{url}/step-4x"):
        with pytest.raises(CheckpointError, match="has no checkpoint"):
            find_checkpoint(missing)


@pytest.mark.usefixtures("memory_urls")
def test_export_is_repeated_until_it_is_complete_in_the_bucket(tmp_path: Path) -> None:
    wait_for_saves(Run(storage()).train(1, 4))
    checkpoint = CheckpointConfig(folder="memory://0/run/checkpoint")
    config = JobConfig(job=JobSection(dump_folder=str(tmp_path)), checkpoint=checkpoint)
    assert dist.group.WORLD is not None
    needed = partial(is_export_missing, config, 4, dist.group.WORLD)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model.safetensors").write_bytes(b"weights")
    (tmp_path / "hf/config.json").write_bytes(b"{}")
    origin = json.dumps(export_origin(config, 4)).encode()
    (tmp_path / ORIGIN).write_bytes(origin)  # killed before the upload
    assert needed()
    storage().store_export(tmp_path / "hf", origin)
    assert not needed()
    written = [name.removeprefix("/0/run/checkpoint/") for name in MemoryFileSystem.store if "hf" in name]
    assert written == ["hf/config.json", "hf/model.safetensors", "hf_made_from.json"]


def test_upload_of_which_the_store_keeps_less_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export and a file of prepared data; it is uploaded again, and if that does not help, an error."""
    monkeypatch.setattr(object_store, "PAUSES_SECONDS", (0.0, 0.0, 0.0))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model.safetensors").write_bytes(b"weights")
    attempts = 0
    put = MemoryFileSystem.put_file

    def keep_less(system: MemoryFileSystem, source: str, target: str, **options: Any) -> None:
        nonlocal attempts
        attempts += 1
        put(system, source, target, **options)
        if attempts <= failing:
            MemoryFileSystem.store[target] = MemoryFile(None, target, b"weig")

    monkeypatch.setattr(MemoryFileSystem, "put_file", keep_less)

    def prepared() -> None:
        with open_folder("memory://0/tokens", "prepare.output").write("shard") as file:
            file.write(b"weights")

    for work in (lambda: storage().store_export(tmp_path / "hf", b"{}"), prepared):
        failing, attempts = 2, 0
        work()
        assert attempts == 3
        failing, attempts = 100, 0
        with pytest.raises(StorageError, match="the store has 4 bytes of an upload of 7"):
            work()


def test_copy_of_a_checkpoint_beside_it_is_not_deleted() -> None:
    run = wait_for_saves(Run(storage(), keep_latest_k=2).train(1, 4))
    (folder,) = (
        name.split("/")[0] for name in objects() if name.startswith("step-4.") and name.endswith("manifest.json")
    )
    for name, file in list(MemoryFileSystem.store.items()):
        if f"/{folder}/" in name:
            copied = name.replace(folder, "step-4")
            MemoryFileSystem.store[copied] = MemoryFile(None, copied, file.getvalue())
    copied_objects = {name for name in objects() if name.startswith("step-4/")}
    wait_for_saves(run.train(5, 14))
    assert {name for name in objects() if name.startswith("step-4/")} == copied_objects
    assert verified_steps(0) == [4, 12, 14]
    wait_for_saves(resume(0, keep_latest_k=2).train(15, 20))  # a later start owns what it has found
    assert verified_steps(0) == [18, 20]


def test_interrupted_restore_of_metrics_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run/tensorboard").mkdir(parents=True)
    (tmp_path / "run" / METRICS).write_text("{}")
    (tmp_path / "run/tensorboard/events").write_bytes(b"events")
    run = Run(storage())
    run.manager.outputs = storage().output_copies(tmp_path / "run", list, lambda _: None)
    wait_for_saves(run.train(1, 4))
    checkpoint, target = storage().open(4), tmp_path / "other"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", kill)
        with pytest.raises(Killed):
            restore_outputs(checkpoint, target)
    assert not (target / METRICS).exists()
    restore_outputs(checkpoint, target)
    assert {file.name for file in target.rglob("*") if file.is_file()} >= {METRICS, "events"}


def test_metrics_are_stored_in_parts_of_a_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "PART_BYTES", 10_000)
    content = {METRICS: os.urandom(70_001), "tensorboard/a": os.urandom(30_000), "tensorboard/b": b""}
    (tmp_path / "run/tensorboard").mkdir(parents=True)
    for name, data in content.items():
        (tmp_path / "run" / name).write_bytes(data)
    run = Run(storage())
    run.manager.outputs = storage().output_copies(tmp_path / "run", list, lambda _: None)
    wait_for_saves(run.train(1, 2))
    checkpoint = storage().open(2)
    sizes = {record.name: record.size_bytes for record in read_manifest(checkpoint).files if OUTPUTS in record.name}
    assert set(sizes) == {OUTPUTS, *(f"{OUTPUTS}.{number}" for number in range(1, len(sizes)))}
    assert sum(sizes.values()) > 100_001
    assert max(sizes.values()) < 3 * 10_000  # a part, and one more block of the compressor
    assert read_metrics(checkpoint) == content[METRICS]
    restore_outputs(checkpoint, tmp_path / "other")
    assert {name: (tmp_path / "other" / name).read_bytes() for name in content} == content

    # If one part cannot be stored, the checkpoint has no metrics.
    write = ObjectStore.write

    def fail(store: ObjectStore, name: str, content: bytes) -> None:
        if name.endswith(f"{OUTPUTS}.3"):
            raise StorageError("the store does not respond")
        write(store, name, content)

    monkeypatch.setattr(ObjectStore, "write", fail)
    wait_for_saves(run.train(3, 4))
    checkpoint = storage().open(4)
    assert not [record.name for record in read_manifest(checkpoint).files if OUTPUTS in record.name]
    assert read_metrics(checkpoint) == b""


@pytest.mark.parametrize("name", ["index.json", "config.toml", "manifest.json"])
def test_bit_that_flips_on_the_way_is_not_damage(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_saves(Run(storage()).train(1, 4))
    read = ObjectStore.read
    flipped = []

    def flip(store: ObjectStore, path: str) -> bytes:
        content = read(store, path)
        if path.startswith("step-4.") and path.endswith(name) and not flipped:
            flipped.append(path)
            return content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]
        return content

    monkeypatch.setattr(ObjectStore, "read", flip)
    assert resume(0).manager.start.step == 4
    assert flipped


def test_status_of_a_save_names_why_its_requests_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PAUSES_SECONDS", (0.0,))
    run = Run(storage())
    statuses: list[str] = []
    pipe = MemoryFileSystem.pipe_file

    def refuse(system: MemoryFileSystem, path: str, *arguments: Any, **options: Any) -> Any:
        if path.endswith(".distcp") and not statuses:
            statuses.append("refused")
            raise ConnectionError("503 slow down")
        if statuses == ["refused"]:
            statuses.append(run.manager.status())
        return pipe(system, path, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    wait_for_saves(run.train(1, 2))
    assert "writes its part since" in statuses[1]
    assert statuses[1].endswith(".distcp: 503 slow down)")
    assert run.manager.storage.store.problem == ""  # type: ignore[attr-defined]


def test_notes_are_beside_the_checkpoints() -> None:
    wait_for_saves(Run(storage()).train(1, 2))
    writer, reader = storage(), storage()
    assert reader.read_notes() == {}
    writer.write_note("a", b"1")
    writer.write_note("a", b"2")
    writer.write_note("b", b"3")
    writer.delete_note("b")
    writer.delete_note("missing")
    assert reader.read_notes() == {"a": b"2"}
    resume(0)
    assert reader.read_notes() == {"a": b"2"}  # a start does not remove them
    assert verified_steps(0) == [2]
