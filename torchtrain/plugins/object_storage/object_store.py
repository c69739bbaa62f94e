"""Object stores such as S3: open a file system of fsspec by URL, and retry requests after transient errors.

Credentials and endpoints come from the provider's own environment variables and files, such as AWS_PROFILE and
AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, or AZURE_STORAGE_CONNECTION_STRING.
"""

import base64
import errno
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import AsyncFileSystem

from torchtrain.errors import ConfigError, DataError, StorageError, TorchtrainError
from torchtrain.files import BLOCK_BYTES, MISSING, TRANSIENT_ERRNOS, scheme_of
from torchtrain.logging import logger
from torchtrain.optional_packages import install_command

T = TypeVar("T")

# Pauses before each retry of a request, about four minutes in total.
PAUSES_SECONDS = (1, 2, 4, 8, 16, 32, 60, 60, 60)
# A request that fails slowly, as by its timeout, is retried for no longer than one that fails at once.
MAX_RETRY_SECONDS = 240
MIN_ATTEMPTS = 3
REPORT_SECONDS = 10  # after which a rank that does not log reports that its requests fail

# A request without an answer fails after this time, and the time that its bytes take at the slowest accepted rate.
REQUEST_SECONDS = 60
MIN_BYTES_PER_SECOND = 2**18

# Of the S3 client, for each of our attempts. By default botocore would wait for 60 s in each of 5 attempts, and s3fs
# would repeat that 5 times.
_S3_CLIENT = {"connect_timeout": 10, "read_timeout": 20, "retries": {"mode": "standard", "total_max_attempts": 3}}
_S3FS_ATTEMPTS = 1

# The extra of torchtrain that installs the package for a scheme.
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}

# Keys of fsspec's listings whose values change with the content, by provider; the first one present is used.
_TAGS = ("ETag", "etag", "md5Hash", "content_md5", "crc32c", "LastModified", "last_modified", "mtime", "created")

_TRANSIENT_ERRNOS = {
    *TRANSIENT_ERRNOS,
    errno.EAGAIN,
    errno.EBUSY,  # s3fs: SlowDown, ServiceUnavailable
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EPIPE,
    getattr(errno, "EREMOTEIO", errno.EIO),  # s3fs: InternalError
}
_TRANSIENT_STATUSES = {408, 409, 425, 429}  # and all from 500 on but for these:
_PERMANENT_STATUSES = {501, 505}
# Error codes of S3 whose status, if it has one, says otherwise.
_TRANSIENT_CODES = {
    "BadDigest",  # damaged on the way
    "IncompleteBody",
    "InternalError",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "XAmzContentSHA256Mismatch",
}
# Error codes of S3 for credentials that were valid before. The answer to a HEAD request has only its status, 400.
_EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "TokenRefreshRequired"}
_MISSING_BUCKET_CODES = {"NoSuchBucket", "ContainerNotFound"}  # of S3 and Azure
# Names of exception types of botocore, aiohttp, requests, google-auth, azure-core and fsspec, which are not imported.
_TRANSIENT_TYPES = {
    "ClientConnectionError",
    "ClientPayloadError",
    "ConnectionError",
    "FSTimeoutError",
    "HTTPClientError",
    "IncompleteRead",
    "IncompleteReadError",
    "ResponseParserError",
    "ServiceRequestError",
    "ServiceResponseError",
    "TimeoutError",
    "TransportError",
}
_DENIED_TYPES = {
    "ClientAuthenticationError",
    "CredentialRetrievalError",
    "DefaultCredentialsError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "PermissionError",
    "ProfileNotFound",
    "RefreshError",
    "TokenRetrievalError",
}


def open_file_system(url: str, option: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of ``url``, and the path in it. No request is sent to the server.

    Args:
        url: such as "s3://bucket/folder".
        option: the option whose value it is, for messages.

    Raises:
        ConfigError: the scheme is unknown, its package is not installed, or the URL contains a password.
    """
    scheme = scheme_of(url)
    if urlsplit(url).password is not None:
        raise ConfigError(
            f"{option} is a URL with a password in it, which would be logged and stored in checkpoints: pass "
            "credentials in the environment of the provider"
        )
    options: dict[str, Any] = {"use_listings_cache": False}  # other processes write to the same folders
    if scheme in ("s3", "s3a"):
        config = fsspec.config.conf.get(scheme, {}).get("config_kwargs", {})
        options["config_kwargs"] = {**_S3_CLIENT, **config}
    try:
        file_system, path = fsspec.core.url_to_fs(f"{scheme}{url[len(scheme) :]}", **options)
    except ImportError as error:
        hint = install_command(EXTRAS[scheme]) if scheme in EXTRAS else str(error)
        raise ConfigError(f"{option} = {url!r} needs a package that is not installed: {hint}") from error
    except ValueError as error:
        if scheme not in fsspec.available_protocols():
            raise ConfigError(
                f"{option} = {url!r} has the unknown scheme {scheme!r}; use s3://, gs://, az:// or another of fsspec"
            ) from error
        raise ConfigError(f"{option} = {url!r} cannot be opened: {_reason([error])}") from error
    if scheme in ("s3", "s3a"):
        file_system.retries = _S3FS_ATTEMPTS
    return file_system, path.rstrip("/")


def with_timeout(file_system: fsspec.AbstractFileSystem, method: str, size_bytes: int = 0) -> Callable[..., Any]:
    """The ``method`` of ``file_system``; it fails after a time that suffices for a request of ``size_bytes``.

    If the credentials of S3 have expired, it reads them again from their source, and is called once more.
    """
    call: Callable[..., Any] = getattr(file_system, method)
    if isinstance(file_system, AsyncFileSystem):
        call = partial(call, timeout=REQUEST_SECONDS + size_bytes / MIN_BYTES_PER_SECOND)
    return partial(_with_new_credentials, file_system, call) if hasattr(file_system, "set_session") else call


def _with_new_credentials(file_system: Any, call: Callable[..., T], *args: Any, **options: Any) -> T:
    handled = sys.exc_info()[1]
    try:
        return call(*args, **options)
    except Exception as error:  # each client has its own exception types
        chain = causes(error, handled)
        if not _have_expired(chain):
            raise
        logger.warning("the store refuses the credentials, which may have expired: read again: %s", _reason(chain))
    # botocore renews credentials with a known end by itself, but reads those of a file only once.
    file_system.connect(refresh=True)
    return call(*args, **options)


def with_store_retries(
    request: Callable[[], T],
    location: str,
    pauses_seconds: Sequence[float] | None = None,
    on_retry: Callable[[str], None] = lambda _: None,
) -> T:
    """Call ``request()``, and retry it after each of the pauses (``PAUSES_SECONDS``) after a transient error.

    No retry begins later than ``MAX_RETRY_SECONDS`` after the first attempt, except for the first ``MIN_ATTEMPTS``.

    Args:
        request: sends requests to the store.
        location: URL for messages.
        on_retry: called with the reason before each pause.

    Raises:
        FileNotFoundError, FileExistsError, ...: the object does not exist (``MISSING``), or exists already.
        ConfigError: credentials are missing or have expired, permission is denied, or the request is invalid.
        StorageError: the last attempt failed with a transient error.
    """
    began, has_reported = time.monotonic(), False
    # The caller may be handling the error of an earlier request, which Python adds to the chain of each new error.
    handled = sys.exc_info()[1]
    pauses = (*(PAUSES_SECONDS if pauses_seconds is None else pauses_seconds), None)
    for attempt, pause in enumerate(pauses, start=1):
        try:
            return request()
        except (*MISSING, FileExistsError, TorchtrainError):
            raise
        except Exception as error:  # each client has its own exception types
            chain = causes(error, handled)
            status = next(filter(None, map(_status, chain)), None)
            if status in (404, 412):  # which s3fs, but not every client, translates
                kind = FileNotFoundError if status == 404 else FileExistsError
                raise kind(errno.ENOENT if status == 404 else errno.EEXIST, _reason(chain), location) from error
            if _is_denied(chain):
                raise ConfigError(
                    f"{location}: access is denied: {_reason(chain)}. Set the credentials of the provider in the "
                    "environment, and let this user read and write there"
                ) from error
            if not _is_transient(chain):
                if isinstance(error, OSError) or status is not None:
                    # An answer to HEAD has no code that would tell one from the other.
                    also = ", or the credentials have expired" if _have_expired(chain) else ""
                    raise ConfigError(f"{location}: the request is invalid{also}: {_reason(chain)}") from error
                raise
            if pause is None or (attempt >= MIN_ATTEMPTS and time.monotonic() - began >= MAX_RETRY_SECONDS):
                raise StorageError(
                    f"{location}: the store does not respond: {_reason(chain)}. Start again later; nothing is lost"
                ) from error
            reason = _reason(chain)
            on_retry(f"{location}: {reason}")
            if logger.isEnabledFor(logging.WARNING):
                logger.warning("%s: next attempt in %g s: %s", location, pause, reason)
            elif not has_reported and time.monotonic() - began >= REPORT_SECONDS:  # a rank that logs only errors
                has_reported = True
                logger.error("%s: requests fail and are repeated: %s", location, reason)
            time.sleep(pause)
    raise AssertionError


def upload_file(file_system: fsspec.AbstractFileSystem, source: Path, path: str, url: str) -> None:
    """Upload a local file to the object ``path``, and check that the store has it whole. ``url``: for messages.

    Raises:
        StorageError: the store does not respond, or keeps something else, for minutes.
        ConfigError, FileNotFoundError: see ``with_store_retries``.
    """
    size = source.stat().st_size

    def upload() -> None:
        with_timeout(file_system, "put_file", size)(str(source), path)
        file_system.invalidate_cache()
        info = with_timeout(file_system, "info")(path)
        if info["size"] != size:
            raise ConnectionError(f"the store has {info['size']} bytes of an upload of {size}")
        md5 = md5_of(info)  # S3's client sends a checksum that the store compares
        if md5 and md5 != md5_of_file(source):
            raise ConnectionError("the store has another MD5 than the uploaded file")

    with_store_retries(upload, url)


def md5_of(info: Mapping[str, Any]) -> bytes | None:
    """The MD5 of an object that Google Cloud Storage or Azure has in its ``info``; None if there is none.

    S3's client itself compares a checksum.
    """
    if info.get("md5Hash"):
        return base64.b64decode(info["md5Hash"])
    md5 = (info.get("content_settings") or {}).get("content_md5")
    return bytes(md5) if md5 else None


def md5_of_file(file: Path) -> bytes:
    """The MD5 of a local file."""
    digest = hashlib.md5(usedforsecurity=False)
    with file.open("rb") as opened:
        while block := opened.read(BLOCK_BYTES):
            digest.update(block)
    return digest.digest()


def tag_of(info: dict[str, Any]) -> str:
    """The ETag in an entry of a listing, or what the provider has instead."""
    return next((f"{key}={info[key]}" for key in _TAGS if info.get(key)), "")


def has_tag(file_system: fsspec.AbstractFileSystem, path: str, tag: str) -> bool:
    """Whether an object has the tag of a listing now; False also if the store does not answer."""
    key, _, listed = tag.partition("=")
    try:
        file_system.invalidate_cache()  # as not every client follows use_listings_cache
        value = with_timeout(file_system, "info")(path).get(key)
    except Exception:  # each client has its own exception types
        return False
    # Some listings of Azure have no quotes, and those of fsspec's memory have seconds for a date.
    forms = (str(value).strip('"'), str(value.timestamp()) if isinstance(value, datetime) else None)
    return listed.strip('"') in forms


def read_range(file_system: fsspec.AbstractFileSystem, path: str, url: str, start: int, end: int) -> bytes:
    """The bytes of an object from one offset to another. ``url``: for messages.

    Raises:
        DataError: the object is shorter than when the run began, or missing.
        StorageError: the store does not respond, or does not return the whole range, for minutes.
    """

    def read() -> bytes:
        content: bytes = with_timeout(file_system, "cat_file", end - start)(path, start=start, end=end)
        if len(content) != end - start:
            require_length()
            raise ConnectionError(f"received {len(content)} bytes instead of {end - start}")
        return content

    def require_length() -> None:
        file_system.invalidate_cache()
        size = with_timeout(file_system, "info")(path)["size"]
        if size < end:
            raise DataError(f"{url} has {size} bytes, and was longer when the run began: restore it")

    try:
        return with_store_retries(read, url)
    except MISSING as error:
        raise DataError(f"{url} existed when the run began, and is missing now: restore it") from error
    except (DataError, StorageError):
        raise
    except Exception:
        with_store_retries(require_length, url)  # each store has its own error for a range beyond the end
        raise


def causes(error: BaseException | None, handled: BaseException | None = None) -> list[BaseException]:
    """The error, its cause, the cause of that, and so on, up to the error ``handled``, which is not a cause."""
    chain: list[BaseException] = []
    while error is not None and error is not handled and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _reason(chain: Sequence[BaseException]) -> str:
    return " ".join(str(chain[0]).split()) or repr(chain[0])


def _status(error: Any) -> int | None:
    """The HTTP status of an error of botocore, aiohttp, gcsfs, azure-core, requests or httpx; None if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if not isinstance(response, int | None):
        response = getattr(response, "status_code", None)
    for key in ("response", *_STATUS_KEYS):
        status = response if key == "response" else getattr(error, key, None)
        if isinstance(status, int) and 100 <= status < 600:
            return status
    return None


_STATUS_KEYS = ("status_code", "status", "code")  # the last one is not read of aiohttp, which warns of it


def error_code(error: Any) -> str | None:
    """The error code of an exception of botocore; None of others."""
    response = getattr(error, "response", None)
    details = response.get("Error") if isinstance(response, Mapping) else None
    return details.get("Code") if isinstance(details, Mapping) else None


def _type_names(chain: Sequence[BaseException]) -> set[str]:
    return {kind.__name__ for error in chain for kind in type(error).__mro__}


def missing_bucket(error: BaseException) -> str:
    """What the store says of a missing bucket; empty if the error is about a missing object of a bucket."""
    for cause in causes(error):
        if error_code(cause) in _MISSING_BUCKET_CODES:
            return _reason([error])
        if getattr(cause, "error_code", None) in _MISSING_BUCKET_CODES:  # adlfs itself names only the object
            return str(cause).partition("\n")[0].rstrip(".")
    return ""


def _have_expired(chain: Sequence[BaseException]) -> bool:
    heads = (getattr(error, "operation_name", "").startswith("Head") for error in chain)
    return any(error_code(error) in _EXPIRED_CODES for error in chain) or (
        any(heads) and any(_status(error) == 400 for error in chain)
    )


def _is_denied(chain: Sequence[BaseException]) -> bool:
    if any(error_code(error) in _EXPIRED_CODES for error in chain):
        return True
    if any(error_code(error) in _TRANSIENT_CODES for error in chain):
        return False
    if any(_status(error) in (401, 403) for error in chain) or _type_names(chain) & _DENIED_TYPES:
        return True
    return any(isinstance(error, OSError) and str(error).startswith("Forbidden: ") for error in chain)  # gcsfs: 403


def _is_transient(chain: Sequence[BaseException]) -> bool:
    if any(error_code(error) in _TRANSIENT_CODES for error in chain):
        return True
    # Before the status, because aiohttp gives an interrupted answer the status 400.
    if _type_names(chain) & _TRANSIENT_TYPES:
        return True
    for status in filter(None, map(_status, chain)):
        return status in _TRANSIENT_STATUSES or (status >= 500 and status not in _PERMANENT_STATUSES)
    return any(isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS for error in chain)
