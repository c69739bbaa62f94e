"""Requests to an object store: which errors are retried, for how long, and what an interrupted request leaves."""

import errno
import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
from botocore.exceptions import ClientError
from s3_faults import S3Faults
from s3_server import ENVIRONMENT, S3Server

from torchtrain import object_store
from torchtrain.datasets.data_folder import open_folder
from torchtrain.errors import ConfigError, StorageError
from torchtrain.object_store import PAUSES_SECONDS, with_store_retries
from torchtrain.plugins.object_storage.storage import ObjectStore

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::ResourceWarning")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses, also within the client, and only one attempt of its own."""
    monkeypatch.setattr("torchtrain.object_store.time.sleep", lambda _: None)
    client = {"connect_timeout": 2, "read_timeout": 2, "retries": {"mode": "standard", "total_max_attempts": 1}}
    monkeypatch.setattr(object_store, "_S3_CLIENT", client)
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Faults]:
    proxy = S3Faults(s3_server.url, s3_server.environment)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.stop()


def of_s3(status: int, code: str) -> ClientError:
    response: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "PutObject")


def translated(error: OSError, cause: ClientError) -> OSError:
    """As s3fs raises it."""
    error.__cause__ = cause
    return error


class AzureError(Exception):
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
    monkeypatch.setattr("torchtrain.object_store.time.sleep", lambda pause: now.__setitem__(0, now[0] + pause))
    monkeypatch.setattr("torchtrain.object_store.time.monotonic", lambda: now[0])
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


@pytest.mark.parametrize("method", ["read", "write", "read data", "write data"])
def test_a_server_that_stays_silent_is_an_error(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections, and reads nothing of an upload that is larger than the buffers of a socket."""
    silent = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
    monkeypatch.setattr(object_store, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(object_store, "MIN_BYTES_PER_SECOND", 1e9)
    monkeypatch.setattr(object_store, "MAX_RETRY_SECONDS", 0)
    monkeypatch.setattr(object_store, "_S3_CLIENT", {"connect_timeout": 60, "read_timeout": 60})
    store, folder = ObjectStore("s3://bucket", "checkpoint.folder"), open_folder("s3://bucket")
    requests: dict[str, Callable[[], object]] = {
        "read": lambda: store.read("a"),
        "write": lambda: store.write("a", bytes(2**25)),
        "read data": lambda: folder.read_ranges([("a", 0, 100)]),
        "write data": lambda: folder.create("a", bytes(2**25)),
    }
    began = time.monotonic()
    with pytest.raises(StorageError, match="the store does not respond"):
        requests[method]()
    assert time.monotonic() - began < 10
    silent.close()


@pytest.mark.parametrize("kind", ["slow down", "error", "timeout", "reset", "lost answer", "truncate"])
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


def test_rank_that_logs_only_errors_reports_failing_requests_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torchtrain.object_store.REPORT_SECONDS", 0)
    monkeypatch.setattr("torchtrain.object_store.logger.propagate", True)
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
