"""Requests to an object store: which errors are retried, for how long, and what an interrupted request leaves."""

import errno
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from botocore.exceptions import ClientError
from s3_faults import S3Faults
from s3_server import ENVIRONMENT, S3Server

from torchtrain.checkpoint.storage import NewCheckpoint, WriterLease
from torchtrain.datasets.token_folder import open_folder
from torchtrain.errors import CheckpointError, ConfigError, DamagedError, StorageError
from torchtrain.plugins.object_storage import object_store
from torchtrain.plugins.object_storage.object_store import PAUSES_SECONDS, missing_bucket, with_store_retries
from torchtrain.plugins.object_storage.storage import ObjectStorage, ObjectStore

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::ResourceWarning")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses, also within the client, and only one attempt of its own."""
    monkeypatch.setattr("torchtrain.plugins.object_storage.object_store.time.sleep", lambda _: None)
    client = {"connect_timeout": 2, "read_timeout": 2, "retries": {"mode": "standard", "total_max_attempts": 1}}
    monkeypatch.setattr(object_store, "_S3_CLIENT", client)
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)


@pytest.fixture
def new_clients() -> Iterator[None]:
    """File systems keep their clients, which have the address and the credentials of the first request."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture(scope="module")
def proxy_of_module(s3_server: S3Server) -> Iterator[S3Faults]:
    proxy = S3Faults(s3_server.url, s3_server.environment)
    yield proxy
    proxy.stop()


@pytest.fixture
def proxy(proxy_of_module: S3Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Faults]:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy_of_module.url)
    proxy_of_module.requests.clear()
    yield proxy_of_module
    proxy_of_module.heal()


def of_s3(status: int, code: str) -> ClientError:
    response: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "PutObject")


def translated(error: OSError, cause: Exception) -> OSError:
    """As s3fs and adlfs raise it."""
    error.__cause__ = cause
    return error


class AzureError(Exception):
    error_code: str

    def __init__(self, status_code: int) -> None:
        super().__init__("an error of azure-core")
        self.status_code = status_code


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (translated(TimeoutError("idle"), of_s3(400, "RequestTimeout")), StorageError),
        (translated(OSError(errno.EINVAL, "wrong"), of_s3(400, "BadDigest")), StorageError),
        (translated(OSError(errno.EIO, "conflict"), of_s3(409, "ConditionalRequestConflict")), StorageError),
        (translated(OSError(errno.EIO, "unknown"), of_s3(400, "KMS.DisabledException")), ConfigError),
        (translated(OSError(errno.ENOSYS, "unknown"), of_s3(501, "NotImplemented")), ConfigError),
        (OSError("Forbidden: b/bucket/o\nthe caller has no access"), ConfigError),  # gcsfs
        (AzureError(500), StorageError),
        (AzureError(404), FileNotFoundError),
        (AzureError(412), FileExistsError),
        (AzureError(400), ConfigError),
    ],
)
def test_errors_are_classified_by_code_and_status(error: Exception, expected: type[Exception]) -> None:
    def request() -> None:
        raise error

    with pytest.raises(expected):
        with_store_retries(request, "s3://bucket/a")


def test_the_store_says_that_a_bucket_is_missing() -> None:
    of_azure = AzureError(404)
    of_azure.args = ("The specified container does not exist.\nRequestId:1\nErrorCode:ContainerNotFound",)
    of_azure.error_code = "ContainerNotFound"
    missing_file = FileNotFoundError(errno.ENOENT, "No such file or directory", "absent/run/lease")
    assert missing_bucket(translated(missing_file, of_azure)) == "The specified container does not exist"
    of_bucket = FileNotFoundError("The specified bucket does not exist")
    assert missing_bucket(translated(of_bucket, of_s3(404, "NoSuchBucket"))) == "The specified bucket does not exist"
    of_azure.error_code = "BlobNotFound"
    assert missing_bucket(translated(missing_file, of_azure)) == ""
    assert missing_bucket(translated(missing_file, of_s3(404, "NoSuchKey"))) == ""


@pytest.mark.parametrize("status", [404, 412])
def test_reset_while_another_error_is_handled_is_retried(status: int) -> None:
    failures: list[Exception] = [ConnectionResetError(errno.ECONNRESET, "reset")]

    def request() -> bytes:
        if failures:
            raise failures.pop()
        return b"content"

    try:
        raise translated(FileExistsError(), of_s3(status, "of an earlier request"))
    except FileExistsError:
        assert with_store_retries(request, "s3://bucket/a") == b"content"


def test_slow_failures_are_not_retried_for_longer_than_fast_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(
        "torchtrain.plugins.object_storage.object_store.time.sleep", lambda pause: now.__setitem__(0, now[0] + pause)
    )
    monkeypatch.setattr("torchtrain.plugins.object_storage.object_store.time.monotonic", lambda: now[0])
    for seconds, total, attempts in ((0, 243, 10), (60, 247, 4), (300, 903, 3)):
        now[0], calls = 0.0, []

        def request(seconds: float = seconds, calls: list[int] = calls) -> None:
            calls.append(1)
            now[0] += seconds
            raise TimeoutError

        with pytest.raises(StorageError):
            with_store_retries(request, "s3://bucket/a")
        assert (now[0], len(calls)) == (total, attempts)
    assert sum(PAUSES_SECONDS) == 243


@pytest.mark.usefixtures("new_clients")
@pytest.mark.timeout(50, func_only=True)  # below the 60 s that a request has by default
@pytest.mark.parametrize(
    "method", ["write", "read data", *(pytest.param(of, marks=pytest.mark.slow) for of in ("read", "write data"))]
)
def test_a_server_that_stays_silent_is_an_error(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections, and reads nothing of an upload that is larger than the buffers of a socket."""
    silent = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
    monkeypatch.setattr(object_store, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(object_store, "MIN_BYTES_PER_SECOND", 1e9)
    monkeypatch.setattr(object_store, "MAX_RETRY_SECONDS", 0)
    monkeypatch.setattr(object_store, "_S3_CLIENT", {"connect_timeout": 3600, "read_timeout": 3600})
    store, folder = ObjectStore("s3://bucket", "checkpoint.folder"), open_folder("s3://bucket")
    requests: dict[str, Callable[[], object]] = {
        "read": lambda: store.read("a"),
        "write": lambda: store.write("a", bytes(2**25)),
        "read data": lambda: folder.read_ranges([("a", 0, 100)]),
        "write data": lambda: folder.create("a", bytes(2**25)),
    }
    with pytest.raises(StorageError, match="the store does not respond"):
        requests[method]()
    silent.close()


OF_A_RUN = ("slow down", "error", "timeout", "reset")  # test_s3_checkpoints.py has them in a run, too


@pytest.mark.parametrize(
    "kind", ["lost answer", "truncate", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OF_A_RUN)]
)
def test_each_request_succeeds_after_a_fault(kind: str, proxy: S3Faults) -> None:
    store = ObjectStore(f"s3://bucket/{kind.replace(' ', '-')}", "checkpoint.folder")
    requests = (
        lambda: store.write("a", b"some content" * 100),
        lambda: store.create("b", b"other content"),
        lambda: store.names(),
        lambda: store.read("a"),
        lambda: store.read_range("a", 4, 8),
        lambda: store.size_bytes("a"),
        lambda: store.delete("b"),
        lambda: store.exists("b"),
    )
    results = []
    for request in requests:
        fault = proxy.fail(kind, times=1)
        results.append(request())
        assert fault.count == 1
        proxy.heal()
    assert results == [None, None, {"a": False, "b": False}, b"some content" * 100, b" con", 1200, None, False]


def test_denied_request_is_not_retried(proxy: S3Faults) -> None:
    proxy.fail("denied")
    with pytest.raises(ConfigError, match="access is denied"):
        ObjectStore("s3://bucket", "checkpoint.folder").read("a")
    assert len(proxy.requests) == 1


@pytest.mark.usefixtures("new_clients")
def test_expired_credentials_are_read_again(
    proxy: S3Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setattr("torchtrain.plugins.object_storage.object_store.logger.propagate", True)

    def renew(key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")

    renew("first")
    store = ObjectStore("s3://bucket/expired", "checkpoint.folder")
    requests: tuple[Callable[[], object], ...] = (
        lambda: store.write("a", b"content"),
        lambda: store.size_bytes("a"),  # a HEAD request, whose answer has no error code
        lambda: store.read("a"),
        lambda: store.names(),
        lambda: store.uploads(),
    )
    store.write("a", b"content")
    for number, request in enumerate(requests):
        proxy.fail("expired", key="first" if number == 0 else f"key{number - 1}")
        # Where the client asks by HEAD first, the answer has no error code.
        with pytest.raises(ConfigError, match=r"access is denied|or the credentials have expired"):
            request()
        renew(f"key{number}")
        request()
    assert "the store refuses the credentials, which may have expired: read again: " in caplog.messages[-1]
    assert store.read("a") == b"content"


@pytest.mark.parametrize("kind", ["conflict", "precondition"])
def test_of_two_creates_in_a_race_one_succeeds(kind: str, proxy: S3Faults) -> None:
    stores = [ObjectStore(f"s3://bucket/{kind}", "checkpoint.folder") for _ in range(2)]
    fault = proxy.fail(kind, times=1)
    stores[0].create("a", b"of the first")
    assert fault.count == 1
    fault = proxy.fail(kind, times=1)
    with pytest.raises(FileExistsError):
        stores[1].create("a", b"of the second")
    assert fault.count == 1
    assert stores[1].read("a") == b"of the first"


LEASE = WriterLease(1, "0123abcd" * 4, "run")


def acquired(url: str) -> ObjectStorage:
    storage = ObjectStorage(url)
    storage.write_lease(LEASE)
    return storage


def save(storage: ObjectStorage, step: int) -> NewCheckpoint:
    """Commit a checkpoint of one file."""
    staged = storage.new_checkpoint(step, LEASE)
    with staged.create("__0_0.distcp") as file:
        file.write(b"tensors" * 100)
    try:
        staged.commit(b"{}" * 100, {"__0_0.distcp": 700}, lambda: False, lambda: storage.check_lease(LEASE))
    except CheckpointError:
        staged.discard()
        raise
    return staged


@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_bucket_that_is_missing_for_a_moment_is_not_an_empty_one(proxy: S3Faults, stride: int) -> None:
    url = "s3://bucket/missing"
    save(acquired(url), 2)
    number = 0
    messages: list[str] = []
    while True:
        fault = proxy.fail("no bucket", times=1, skip=number)
        try:
            storage = ObjectStorage(url)
            assert storage.steps() == [2]
            storage.acquire_lease("run")
            checkpoint = storage.open(2)
            assert checkpoint.size_bytes("__0_0.distcp") == 700
            assert checkpoint.read("__0_0.distcp") == b"tensors" * 100
        except ConfigError as error:
            messages.append(str(error))
        proxy.heal()
        assert ObjectStorage(url).steps() == [2]
        if not fault.count:
            break
        number += stride
    assert 5 / stride < len(messages) < number
    assert {message.partition(": nothing")[0] for message in messages} == {
        "checkpoint.folder = 's3://bucket/missing' cannot be used: injected: NoSuchBucket; create the bucket, or start "
        "again once the store has it"
    }


@pytest.mark.parametrize(
    ("object_", "message"), [("distcp", "has 350 bytes, not 700"), ("manifest.json", "has kept only a part of it")]
)
def test_object_of_a_save_that_is_stored_short_is_a_failed_save(object_: str, message: str, proxy: S3Faults) -> None:
    storage = acquired(f"s3://bucket/short-{object_[:3]}")
    save(storage, 2)
    fault = proxy.fail("short", f"PUT .*{object_}", times=1)
    with pytest.raises(DamagedError, match=message):
        save(storage, 4)
    assert fault.count == 1
    assert ObjectStorage(storage.location).steps() == [2]
    save(storage, 4)
    assert ObjectStorage(storage.location).steps() == [2, 4]


@pytest.mark.parametrize("writes", [2, 9])
def test_lease_that_is_stored_short_is_written_again(writes: int, proxy: S3Faults) -> None:
    url = f"s3://bucket/short-lease-{writes}"
    proxy.fail("short", "PUT .*lease", times=writes)
    if writes > 2:
        with pytest.raises(StorageError, match=r"has kept only a part of it\. Start again later"):
            acquired(url)
        return
    save(acquired(url), 2)
    assert ObjectStorage(url).read_lease() == LEASE
    assert ObjectStorage(url).steps() == [2]


def test_rank_that_logs_only_errors_reports_failing_requests_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torchtrain.plugins.object_storage.object_store.REPORT_SECONDS", 0)
    monkeypatch.setattr("torchtrain.plugins.object_storage.object_store.logger.propagate", True)
    reasons: list[str] = []
    answers = iter([ConnectionError("503"), ConnectionError("503"), None])

    def request() -> str:
        if (error := next(answers)) is not None:
            raise error
        return "done"

    with caplog.at_level(logging.ERROR, logger="torchtrain"):
        assert with_store_retries(request, "s3://bucket/x", (0.0,) * 4, reasons.append) == "done"
    assert reasons == ["s3://bucket/x: 503"] * 2
    assert [record.getMessage() for record in caplog.records] == ["s3://bucket/x: requests fail and are repeated: 503"]
