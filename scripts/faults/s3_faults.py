"""An HTTP proxy in front of a local S3 server, which injects faults into requests."""

import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

# Error answers: status and S3's code.
ANSWERS = {
    "slow down": (503, "SlowDown"),
    "error": (500, "InternalError"),
    "timeout": (400, "RequestTimeout"),
    "denied": (403, "AccessDenied"),
    "expired": (400, "ExpiredToken"),
    "no bucket": (404, "NoSuchBucket"),
    "conflict": (409, "ConditionalRequestConflict"),
    "precondition": (412, "PreconditionFailed"),
}
KINDS = (*ANSWERS, "reset", "lost answer", "truncate", "silence", "stale", "short")
CHECKSUMS = re.compile(r"content-md5|x-amz-(checksum-|content-sha256|decoded-content-length|sdk-checksum|trailer).*")


@dataclass(eq=False)
class Fault:
    kind: str
    requests: re.Pattern[str]
    times: float
    skip: int
    every: int
    seconds: float
    key: str
    matches: int = 0
    count: int = 0
    """Requests that it has hit."""
    over: threading.Event = field(default_factory=threading.Event)


class S3Faults:
    """A proxy for the server at ``target``. Clients use ``environment``.

    Kinds of faults: those of ``ANSWERS``; "reset": the connection is reset before the server has the request; "lost
    answer": after it has answered; "truncate": half of the answer's body is missing; "silence": no answer for
    ``seconds``, then a reset; "stale": a listing is answered as the last time; "short": the server receives and keeps
    half of the body, and its answer is that of a success.

    "conflict" and "precondition" are the answers to a create in a race. S3 answers "conflict" (409) in place of the
    create, and "precondition" (412) when the object exists, here because an attempt before has created it unnoticed.
    """

    def __init__(self, target: str, environment: dict[str, str]) -> None:
        self.target = urlsplit(target).netloc
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        """All requests, such as "PUT /bucket/key?query"."""
        self.before: Callable[[str], object] = lambda _: None
        """Called before each request is forwarded."""
        self.lock = threading.Lock()
        self.listings: dict[str, tuple[int, list[tuple[str, str]], bytes]] = {}
        handler = type("Handler", (_Handler,), {"proxy": self})
        self.server = _Server(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.environment = {**environment, "AWS_ENDPOINT_URL": self.url}

    def fail(
        self,
        kind: str,
        requests: str = "",
        *,
        times: float = float("inf"),
        skip: int = 0,
        every: int = 1,
        seconds: float = 3600,
        key: str = "",
    ) -> Fault:
        """Inject a fault into requests that contain a match of ``requests``: after ``skip``, one of ``every``.

        Args:
            key: only into requests that are signed with this access key, as one that has expired.
        """
        assert kind in KINDS
        fault = Fault(kind, re.compile(requests), times, skip, every, seconds, key)
        with self.lock:
            self.faults.append(fault)
        return fault

    def heal(self, fault: Fault | None = None) -> None:
        """Remove a fault, or all of them; what is silent is reset."""
        with self.lock:
            faults = self.faults if fault is None else [other for other in self.faults if other is fault]
            self.faults = [other for other in self.faults if other not in faults]
        for fault in faults:
            fault.over.set()

    def hit(self, request: str, headers: Mapping[str, str]) -> Fault | None:
        """The first fault of ``request``."""
        creates = headers.get("If-None-Match") == "*"
        key = re.search("Credential=([^/]*)/", headers.get("Authorization", ""))
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.kind in ("conflict", "precondition") and not creates:
                    continue
                if fault.key and (key is None or key[1] != fault.key):
                    continue
                if fault.requests.search(request):
                    fault.matches += 1
                    due = fault.matches > fault.skip and (fault.matches - fault.skip) % fault.every == 0
                    if due and fault.count < fault.times:
                        fault.count += 1
                        return fault
        return None

    def stop(self) -> None:
        self.heal()
        self.server.shutdown()
        self.server.server_close()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that are killed reset their connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    proxy: S3Faults

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return body

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def _forward(self, body: bytes, without: re.Pattern[str] | None = None) -> tuple[int, list[tuple[str, str]], bytes]:
        names = [name for name in self.headers if name.lower() not in ("transfer-encoding", "connection", "expect")]
        headers = {name: self.headers[name] for name in names if not (without and without.fullmatch(name.lower()))}
        headers["Content-Length"] = str(len(body))
        connection = HTTPConnection(self.proxy.target, timeout=60)
        try:
            connection.request(self.command, self.path, body, headers)
            response: HTTPResponse = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    def _answer(self) -> None:
        name = f"{self.command} {unquote(self.path)}"
        body = self._body()
        fault = self.proxy.hit(name, self.headers)
        kind = fault.kind if fault else ""
        if fault and kind == "silence":
            fault.over.wait(fault.seconds)
        if kind in ("reset", "silence"):
            return self._reset()
        if kind == "precondition":
            self._forward(body)
        if kind in ANSWERS:
            status, code = ANSWERS[kind]
            content = f"<Error><Code>{code}</Code><Message>injected: {code}</Message></Error>".encode()
            return self._send(status, [("Content-Type", "application/xml")], content)
        self.proxy.before(name)
        is_listing = self.command == "GET" and "list-type" in self.path
        if kind == "stale" and name in self.proxy.listings:
            return self._send(*self.proxy.listings[name])
        answer = self._forward(body[: len(body) // 2], CHECKSUMS) if kind == "short" else self._forward(body)
        if is_listing:
            self.proxy.listings[name] = answer
        if kind == "lost answer":
            return self._reset()
        return self._send(*answer, part=0.5 if kind == "truncate" else 1.0)

    def _send(self, status: int, headers: list[tuple[str, str]], content: bytes, part: float = 1.0) -> None:
        self.send_response_only(status)
        for key, value in headers:
            if key.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(key, value)
        length = next((v for k, v in headers if k.lower() == "content-length"), "") if self.command == "HEAD" else ""
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: int(part * len(content))])
        if part < 1:
            self.wfile.flush()
            time.sleep(0.01)
            self._reset()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer
