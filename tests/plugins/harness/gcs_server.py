"""An emulator of Google Cloud Storage on this machine: https://github.com/fsouza/fake-gcs-server, a single program."""

import json
import shutil
import subprocess
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

from forkserver import free_port
from local_server import wait_until_it_listens


def fake_gcs_server() -> str | None:
    """Path of the program; None if it is not installed."""
    return shutil.which("fake-gcs-server")


class GCSServer:
    """A server whose objects end with it; ``environment`` selects it."""

    def __init__(self) -> None:
        program = fake_gcs_server()
        assert program
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        options = ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
        self.process = subprocess.Popen(
            [program, *options, "-external-url", self.url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        # Without the second variable, gcsfs asks an API that the emulator does not have for the kind of each bucket.
        self.environment = {"STORAGE_EMULATOR_HOST": self.url, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
        wait_until_it_listens(self.process, port)

    def _request(self, path: str, content: bytes | None = None, kind: str = "application/json") -> bytes:
        with urlopen(Request(f"{self.url}{path}", content, {"Content-Type": kind}), timeout=60) as response:
            answer: bytes = response.read()
            return answer

    def make_bucket(self, name: str) -> str:
        self._request("/storage/v1/b?project=test", json.dumps({"name": name}).encode())
        return name

    def upload(self, bucket: str, name: str, content: bytes) -> None:
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}"
        self._request(path, content, "application/octet-stream")

    def objects(self, bucket: str, prefix: str = "") -> dict[str, bytes]:
        listing: dict[str, Any] = json.loads(self._request(f"/storage/v1/b/{bucket}/o?prefix={quote(prefix)}"))
        names = [item["name"] for item in listing.get("items", ())]
        path = f"/storage/v1/b/{bucket}/o"
        return {name.removeprefix(prefix): self._request(f"{path}/{quote(name, safe='')}?alt=media") for name in names}

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)
