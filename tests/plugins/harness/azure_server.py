"""Microsoft's emulator of Azure Blob Storage (Azurite) on this machine: ``npm install --global azurite``."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from forkserver import free_port
from local_server import wait_until_it_listens

# The account and the key of every Azurite, from its documentation.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def azurite() -> str | None:
    """Path of the program; None if it is not installed."""
    return shutil.which("azurite-blob")


class AzureServer:
    """A server with its data in ``folder``; ``environment`` selects it."""

    def __init__(self, folder: Path) -> None:
        program = azurite()
        assert program
        port = free_port()
        options = ["--blobPort", str(port), "--location", str(folder), "--skipApiVersionCheck", "--silent"]
        self.log = folder.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen([program, *options], stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}/{ACCOUNT}"
        self.connection = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={url};"
        self.environment = {"AZURE_STORAGE_CONNECTION_STRING": self.connection}
        wait_until_it_listens(self.process, port, self.log)

    def client(self) -> Any:
        from azure.storage.blob import BlobServiceClient

        return BlobServiceClient.from_connection_string(self.connection)

    def make_container(self, name: str) -> str:
        with self.client() as client:
            client.create_container(name)
        return name

    def upload(self, container: str, name: str, content: bytes) -> None:
        with self.client() as client:
            client.get_blob_client(container, name).upload_blob(content)

    def objects(self, container: str, prefix: str = "") -> dict[str, bytes]:
        with self.client() as client:
            blobs = client.get_container_client(container)
            names = [blob.name for blob in blobs.list_blobs(name_starts_with=prefix)]
            return {name.removeprefix(prefix): blobs.download_blob(name).readall() for name in names}

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)
        if "adlfs" in sys.modules:  # its file systems keep the address
            sys.modules["adlfs"].AzureBlobFileSystem.clear_instance_cache()
