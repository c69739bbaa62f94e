"""Object stores such as S3: open a file system of fsspec by URL, and retry requests after transient errors.

Credentials and endpoints come from the provider's own environment variables and files, such as AWS_PROFILE and
AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, or AZURE_STORAGE_CONNECTION_STRING.
"""

import errno
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import fsspec

from torchtrain.errors import ConfigError, StorageError, TorchtrainError
from torchtrain.files import MISSING, TRANSIENT_ERRNOS
from torchtrain.logging import logger

T = TypeVar("T")

URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)

# Pauses before each retry of a request, about four minutes in total.
PAUSES_SECONDS = (1, 2, 4, 8, 16, 32, 60, 60, 60)

# The extra of torchtrain that installs the package for a scheme.
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}

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
_TRANSIENT_STATUSES = {408, 425, 429}  # and all from 500 on
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


def is_url(location: str) -> bool:
    """Whether ``location`` is a URL, and not a path."""
    return URL.match(location) is not None


def open_file_system(url: str, option: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of ``url``, and the path in it. No request is sent to the server.

    Args:
        url: such as "s3://bucket/folder".
        option: the option whose value it is, for messages.

    Raises:
        ConfigError: the scheme is unknown, its package is not installed, or the URL contains a password.
    """
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    if parts.password is not None:
        raise ConfigError(
            f"{option} is a URL with a password in it, which would be logged and stored in checkpoints: pass "
            "credentials in the environment of the provider"
        )
    try:
        # Listings must be current: other processes write to the same folders.
        file_system, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        hint = f"pip install 'torchtrain[{EXTRAS[scheme]}]'" if scheme in EXTRAS else str(error)
        raise ConfigError(f"{option} = {url!r} needs a package that is not installed: {hint}") from error
    except ValueError as error:
        if scheme not in fsspec.available_protocols():
            raise ConfigError(
                f"{option} = {url!r} has the unknown scheme {scheme!r}; use s3://, gs://, az:// or another of fsspec"
            ) from error
        raise ConfigError(f"{option} = {url!r} cannot be opened: {_reason([error])}") from error
    return file_system, path.rstrip("/")


def with_store_retries(request: Callable[[], T], location: str, pauses_seconds: Sequence[float] | None = None) -> T:
    """Call ``request()``, and retry it after each of the pauses (``PAUSES_SECONDS``) after a transient error.

    Args:
        request: sends requests to the store.
        location: URL for messages.

    Raises:
        FileNotFoundError, FileExistsError, ...: the object does not exist (``MISSING``), or exists already.
        ConfigError: credentials are missing, permission is denied, or the request is invalid.
        StorageError: the last attempt failed with a transient error.
    """
    for pause in (*(PAUSES_SECONDS if pauses_seconds is None else pauses_seconds), None):
        try:
            return request()
        except (*MISSING, FileExistsError, TorchtrainError):
            raise
        except Exception as error:  # each client has its own exception types
            chain = _causes(error)
            if _is_denied(chain):
                raise ConfigError(
                    f"{location}: access is denied: {_reason(chain)}. Set the credentials of the provider in the "
                    "environment, and let this user read and write there"
                ) from error
            if not _is_transient(chain):
                if isinstance(error, OSError):
                    raise ConfigError(f"{location}: the request is invalid: {_reason(chain)}") from error
                raise
            if pause is None:
                raise StorageError(
                    f"{location}: the store does not respond: {_reason(chain)}. Start again later; nothing is lost"
                ) from error
            logger.warning("%s: next attempt in %g s: %s", location, pause, _reason(chain))
            time.sleep(pause)
    raise AssertionError


def _causes(error: BaseException | None) -> list[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
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
    for status in (response, getattr(response, "status_code", None), *(getattr(error, k, None) for k in _STATUS_KEYS)):
        if isinstance(status, int) and 100 <= status < 600:
            return status
    return None


_STATUS_KEYS = ("status_code", "status", "code")


def _type_names(chain: Sequence[BaseException]) -> set[str]:
    return {kind.__name__ for error in chain for kind in type(error).__mro__}


def _is_denied(chain: Sequence[BaseException]) -> bool:
    return any(_status(error) in (401, 403) for error in chain) or bool(_type_names(chain) & _DENIED_TYPES)


def _is_transient(chain: Sequence[BaseException]) -> bool:
    for error in chain:
        status = _status(error)
        if status is not None:
            return status in _TRANSIENT_STATUSES or status >= 500
        if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
            return True
    return bool(_type_names(chain) & _TRANSIENT_TYPES)
