"""State over HTTP and sums over gloo, under the address that ``replicas.host`` gives."""

import socket
import time
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo as Gloo
from torchft import ProcessGroupGloo
from torchft.checkpointing import HTTPTransport

from torchtrain.distributed.connections import gloo_options
from torchtrain.errors import StorageError
from torchtrain.plugins.replicas.reasons import reason_of
from torchtrain.torch_internals import _streaming_load

# Of torchft's servers, clients and groups, only urllib obeys http_proxy: gRPC is that of tonic, which knows no proxies.
WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def in_url(host: str) -> str:
    """``host`` as it is written in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


class StateTransport(HTTPTransport):  # type: ignore[misc]  # torchft has no types
    """Serves the state of this rank at ``host``, and reads that of another one, without a proxy."""

    def __init__(self, host: str, timeout: timedelta) -> None:
        self._host = host  # the constructor logs the address
        super().__init__(timeout, num_chunks=0)
        self._server.RequestHandlerClass.log_message = lambda *_: None  # a line for each request

    def address(self) -> str:
        """The URL of the state, without the step."""
        return f"http://{in_url(self._host)}:{self._server.server_port}/checkpoint/"

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:  # noqa: ARG002
        """Read the state at the address ``metadata``.

        Raises:
            StorageError: it cannot be read.
        """
        url = f"{metadata}{step}/full"
        try:
            with WITHOUT_PROXY.open(url, timeout=timeout.total_seconds()) as response:
                return _streaming_load(response, weights_only=False)
        except Exception as error:
            raise StorageError(f"the state at {url} cannot be read: {getattr(error, 'reason', error)}") from error


def require_listener(address: str, seconds: float) -> None:
    """Raise a ConnectionRefusedError if connections to ``address``, HOST:PORT, are refused for so many ``seconds``.

    The store of a group listens before others hear of it, so the member that opened it has died. PyTorch's client would
    try again until its timeout has passed twice.
    """
    host, _, port = address.rpartition(":")
    ends = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > ends:
                raise
        except OSError:
            return  # PyTorch's client says why
        time.sleep(0.1)


class SumGroup(ProcessGroupGloo):  # type: ignore[misc]  # the same
    """A replaceable gloo group for tensors on the CPU, which listens at ``host``.

    Args:
        host: empty: the default of PyTorch, which is the address of the machine's name, or of GLOO_SOCKET_IFNAME.
        begins: called with the store of a new group before its members connect.
        step: returns the progress of the members of a new group, which is a part of its name in the store: two
            lighthouses may give the same id to groups of the same members.

    Attributes:
        store: that of the current group.
        timed_out: whether another member has let this one wait for ``timeout`` since this was last set to False.
    """

    def __init__(self, host: str, timeout: timedelta, begins: Callable[[Any], None], step: Callable[[], int]) -> None:
        super().__init__(timeout=timeout)
        self._host, self._begins, self._step = host, begins, step
        self.store: Any = None
        self.timed_out = False

    def configure(self, store_addr: str, *arguments: Any, **options: Any) -> None:
        """Replace the group by one of the members that meet at ``store_addr``.

        Raises:
            StorageError: they cannot be connected.
        """
        began, at = time.monotonic(), store_addr.split("/")[0]
        try:
            # Long enough for the lighthouse to notice the death before the last of several attempts.
            require_listener(at, self._timeout.total_seconds() / 2)
            super().configure(f"{store_addr}/{self._step()}", *arguments, **options)
        except Exception as error:
            self.timed_out = self.has_passed(began)
            why = reason_of(error)
            raise StorageError(f"no connection with all members, which meet at {at}: {why}") from error

    def has_passed(self, began: float) -> bool:
        """Whether a wait that ``began`` at this ``time.monotonic()`` has failed by ``timeout``."""
        return time.monotonic() - began > 0.9 * float(self._timeout.total_seconds())

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Gloo:
        self.store = store
        self._begins(store)
        return Gloo(store, rank, world_size, gloo_options(self._timeout, self._host))
