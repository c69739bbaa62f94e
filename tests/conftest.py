import atexit
import gc
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import forked_python
import pytest
import torch
from disk_faults import DiskFaults
from filelock import FileLock
from forked_command import checked_command
from forkserver import Server, free_port
from gloo_pool import GlooPool
from slurm import Slurm

from torchtrain.config import registry
from torchtrain.cpu import matmul as cpu_matmul
from torchtrain.distributed.connections import gloo_backend
from torchtrain.logging import logger


@pytest.fixture(autouse=True, scope="session")
def forkserver(tmp_path_factory: pytest.TempPathFactory) -> Server:
    return Server(tmp_path_factory.mktemp("forkserver"))


@pytest.fixture(scope="session")
def forked_ranks(tmp_path_factory: pytest.TempPathFactory, forkserver: Server) -> dict[str, str]:  # noqa: ARG001
    """An environment in which torchrun forks its ranks from a process that has imported torch."""
    return {"PYTHON_EXEC": str(forked_python.start(tmp_path_factory.mktemp("python")))}


@pytest.fixture
def disk(forkserver: Server) -> Iterator[DiskFaults]:
    """Injects disk faults into forked processes."""
    if forkserver.disk is None:
        pytest.skip("needs a C compiler")
    yield forkserver.disk
    forkserver.disk.heal()


# Not for the session: the threads of idle workers wake up a hundred times a second for each group of their past calls.
@pytest.fixture(scope="module")
def gloo() -> Iterator[GlooPool]:
    pool = GlooPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A SLURM cluster of two virtual nodes."""
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def replacements(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that grows at each replacement of kernels, on a CPU without bfloat16 products."""
    calls: list[None] = []
    monkeypatch.setattr(cpu_matmul, "slow_dtypes", lambda: (torch.bfloat16,))
    monkeypatch.setattr(cpu_matmul, "_replace", lambda: calls.append(None))
    return calls


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory, forkserver: Server) -> Path:  # noqa: ARG001
    """Dump folder of a short run, which must not be changed. The workers of pytest-xdist share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained_run"
    options = [
        *("--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder", str(folder)),
        *("--training.steps", "8", "--training.seq_len", "64", "--training.local_batch_size", "4"),
        *("--training.mixed_precision_param", "float32", "--metrics.log_freq", "1", "--model.shape.n_layers", "2"),
    ]
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            checked_command("torchtrain.train", *options)
            (folder / "done").touch()
    return folder


# pytest-xdist distributes whole files. The longest start first, so that no worker is left with one at the end.
DURATIONS = Path(__file__).parent / "durations.json"
"""Seconds of each file in a quiet run of the default suite; ``pytest --write_durations`` writes it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write_durations", action="store_true", help=f"write the seconds of each file to {DURATIONS}")


class Durations:
    """Sums up the seconds of each file, and writes them at the end."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[Path(report.nodeid.partition("::")[0]).name] += report.duration

    def pytest_sessionfinish(self) -> None:
        rounded = {name: round(seconds) for name, seconds in self.seconds.most_common() if seconds >= 1}
        DURATIONS.write_text(json.dumps(rounded, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.write_durations and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Durations())
    gc.disable()  # until all test modules are imported: their objects are not garbage
    config.option.loadscopereorder = False  # pytest-xdist would sort by the number of tests
    # Tiny models gain nothing from a second thread, and spinning threads slow each other down.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
    # Otherwise Inductor compiles a test program for each vector instruction set of the CPU, in each process.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    if config.option.markexpr != "gpu":  # all other tests run on CPUs, with more ranks than there may be GPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Read when huggingface_hub is imported, as by transformers, so that no test contacts the real hub. The tests of
    # plugins start a hub at this address, one for each pytest-xdist worker.
    os.environ["HF_ENDPOINT"] = f"http://localhost:{free_port()}"
    os.environ["HF_HUB_CACHE"] = tempfile.mkdtemp(prefix="hub-cache-")
    atexit.register(shutil.rmtree, os.environ["HF_HUB_CACHE"], ignore_errors=True)
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    if "PYTEST_XDIST_WORKER" not in os.environ:  # its workers share the tokens of the standard library
        os.environ["TORCHTRAIN_CACHE"] = tempfile.mkdtemp(prefix="torchtrain-cache-")
        atexit.register(shutil.rmtree, os.environ["TORCHTRAIN_CACHE"], ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def _datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a cache of ``datasets`` for this session alone, in this process and its children."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("datasets"))
        patch.setenv("HF_DATASETS_CACHE", folder)
        if find_spec("datasets"):  # scripts/first_hour.sh runs tests without it
            patch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
        yield


@pytest.fixture(autouse=True)
def _restore_logger() -> Iterator[None]:
    """Restore the logger after each test: commands called in this process configure it."""
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate


@pytest.fixture(autouse=True)
def _restore_registries() -> Iterator[None]:
    """Unregister the components that a test has registered, which other tests would see in the choices of an option."""
    registry.load_plugins()  # once in a process: their entries must be there before the first test
    registries = [entry for entry in vars(registry).values() if isinstance(entry, registry.Registry)]
    entries = [dict(entry._entries) for entry in registries]
    yield
    for entry, before in zip(registries, entries, strict=True):
        entry._entries.clear()
        entry._entries.update(before)


@pytest.fixture
def process_group() -> None:
    """A gloo process group with only this process; ``_destroy_process_group`` destroys it."""
    torch.distributed.init_process_group(gloo_backend(), store=torch.distributed.HashStore(), rank=0, world_size=1)


@pytest.fixture(autouse=True)
def _destroy_process_group() -> Iterator[None]:
    """Destroy the process group of a test, or that of a command that raised in this process."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seconds = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    items.sort(key=lambda item: -seconds.get(item.path.name, 0))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device and pytest -m gpu"))
