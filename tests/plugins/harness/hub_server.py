"""A local HTTP server for the part of the Hugging Face hub's API that its client and ``datasets`` use, with faults.

As on the real hub, ``resolve`` redirects to a second host that serves the files. ``tests/conftest.py`` sets
``HF_ENDPOINT`` to the address of the first before anything is imported.
"""

import hashlib
import json
import socket
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Fault:
    """A fault of the next ``times`` requests whose method and path contain ``where``.

    ``kind``: an HTTP status (429, 503), "reset" (the connection breaks in the middle of the body), "short" (the body is
    shorter than requested, and its headers say so), or "silence" (no answer for ``seconds``).
    """

    where: str
    kind: int | str
    times: int = 1
    seconds: float = 0.0  # of "silence", or in the Retry-After header of a 429


@dataclass
class Request:
    method: str
    path: str
    host: str
    range: str
    authorized: bool


@dataclass
class Hub:
    """Repositories by name. Each has its revisions, oldest first, and a revision is a dict from path to content."""

    port: int
    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self.servers = [ThreadingHTTPServer(("127.0.0.1", port), Handler) for port in (self.port, 0)]
        # Another host name than localhost, which the API has.
        self.files_at = f"http://127.0.0.1:{self.servers[1].server_port}"
        for server in self.servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def add(self, repository: str, files: dict[str, bytes]) -> str:
        """Add a revision and return its name."""
        revisions = self.repositories.setdefault(repository, {})
        revision = hashlib.sha1(repr((repository, len(revisions), files)).encode()).hexdigest()
        revisions[revision] = files
        return revision

    def clear(self) -> None:
        with self.lock:
            self.repositories.clear()
            self.faults.clear()
            self.requests.clear()

    def fault(self, request: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.where in request:
                    fault.times -= 1
                    return fault
        return None

    def close(self) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def answer(self, posted: bytes = b"") -> None:
        hub = self.server_hub
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        with hub.lock:
            hub.requests.append(
                Request(
                    self.command,
                    path,
                    self.headers["Host"],
                    self.headers.get("Range", ""),
                    "Authorization" in self.headers,
                )
            )
        fault = hub.fault(f"{self.command} {path}")
        if fault is not None and fault.kind == "silence":
            time.sleep(fault.seconds)
            self.close_connection = True
            return
        if fault is not None and isinstance(fault.kind, int):
            headers = {"Retry-After": f"{fault.seconds:g}"} if fault.kind == 429 else {}
            self.send(fault.kind, b'{"error": "injected by the test"}', headers)
            return
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "datasets"]:
            self.api("/".join(parts[2:4]), parts[4:], posted)
        elif parts[0] == "datasets" and parts[3:4] == ["resolve"]:
            self.resolve("/".join(parts[1:3]), parts[4], "/".join(parts[5:]))
        elif parts[0] == "files":
            self.content(hub.repositories["/".join(parts[1:3])][parts[3]]["/".join(parts[4:])], fault)
        else:
            self.send(404, b"{}")

    def revision(self, repository: str, revision: str) -> str | None:
        revisions = self.server_hub.repositories.get(repository, {})
        if revision == "main" and revisions:
            return list(revisions)[-1]
        return revision if revision in revisions else None

    def api(self, repository: str, rest: list[str], posted: bytes) -> None:
        if repository not in self.server_hub.repositories:
            self.send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
            return
        verb, wanted, *below = [*rest, "main", "main"] if rest[:1] == ["revision"] or not rest else [*rest, ""]
        revision = self.revision(repository, wanted)
        if revision is None:
            self.send(404, b'{"error": "Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"})
            return
        files = self.server_hub.repositories[repository][revision]
        entries = [self.entry(path, content) for path, content in files.items()]
        if verb == "tree":
            prefix = "/".join(part for part in below if part)
            found = [entry for entry in entries if not prefix or entry["path"].startswith(prefix + "/")]
            recursive = "recursive=True" in self.path or "recursive=true" in self.path
            if not recursive:
                depth = prefix.count("/") + bool(prefix)
                folders = {"/".join(entry["path"].split("/")[: depth + 1]): entry for entry in found}
                found = [
                    entry if entry["path"] == name else {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
                    for name, entry in folders.items()
                ]
            if prefix and not found:
                self.send(404, b'{"error": "no such entry"}', {"X-Error-Code": "EntryNotFound"})
                return
            self.send(200, json.dumps(found).encode())
        elif verb == "paths-info":
            text = posted.decode()
            form = urllib.parse.parse_qs(text) if not text.startswith("{") else json.loads(text)
            wanted_paths = form["paths"] if isinstance(form["paths"], list) else [form["paths"]]
            self.send(200, json.dumps([entry for entry in entries if entry["path"] in wanted_paths]).encode())
        else:
            info = {
                "id": repository,
                "sha": revision,
                "private": False,
                "gated": False,
                "disabled": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "siblings": [{"rfilename": path} for path in files],
            }
            self.send(200, json.dumps(info).encode())

    @staticmethod
    def entry(path: str, content: bytes) -> dict[str, Any]:
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def resolve(self, repository: str, wanted: str, path: str) -> None:
        revision = self.revision(repository, wanted)
        content = self.server_hub.repositories.get(repository, {}).get(revision or "", {}).get(path)
        if revision is None or content is None:
            known = "RevisionNotFound" if repository in self.server_hub.repositories else "RepoNotFound"
            self.send(404, b"", {"X-Error-Code": "EntryNotFound" if revision else known})
            return
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": revision,
            "Accept-Ranges": "bytes",
        }
        if path == "README.md":
            self.send(200, content, headers)
            return
        location = f"{self.server_hub.files_at}/files/{repository}/{revision}/{urllib.parse.quote(path)}"
        linked = {"X-Linked-Size": str(len(content)), "X-Linked-ETag": headers["ETag"], "Location": location}
        self.send(302, b"", {**headers, **linked})

    def content(self, content: bytes, fault: Fault | None) -> None:
        start, stop, status = 0, len(content), 200
        if self.headers.get("Range"):
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, stop, status = int(first), min(int(last or len(content) - 1) + 1, len(content)), 206
        body = content[start:stop]
        headers = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"} if status == 206 else {}
        if fault is not None and fault.kind == "short":
            body = body[: len(body) // 2]
        self.send(status, body, headers, broken=fault is not None and fault.kind == "reset")

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None, broken: bool = False) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if broken else body)
        if broken:
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
