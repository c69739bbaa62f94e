"""Fixtures of the tests of plugins."""

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import Hub
from s3_server import S3Server


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    """A local S3 server with an empty bucket named "bucket"."""
    server = S3Server()
    server.make_bucket("bucket")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def hub_of_session() -> Iterator[Hub]:
    server = Hub(int(os.environ["HF_ENDPOINT"].rpartition(":")[2]))
    yield server
    server.close()


@pytest.fixture
def hub(hub_of_session: Hub) -> Iterator[Hub]:
    """A local server that this process and its children use as the Hugging Face hub."""
    yield hub_of_session
    hub_of_session.clear()


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A function that writes a module that a command can import."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)

    return write


@pytest.fixture
def example_families(_restore_registries: None) -> None:
    """Registers the example families again: the end of each test unregisters them."""
    importlib.reload(importlib.import_module("torchtrain_families"))


@pytest.fixture
def mixtures_of_experts(_restore_registries: None) -> None:
    """Registers the mixtures of experts again: the end of each test unregisters them."""
    importlib.reload(importlib.import_module("torchtrain_moe"))
