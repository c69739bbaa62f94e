"""Training under ``StreamRecorder`` on the fake GPU; runs inside ``fake_cuda.Worker``."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from simulated_step import config_of
from stream_recorder import FakeDevice, StreamRecorder, StreamReport, recording
from torch._subclasses import fake_tensor

from torchtrain.checkpoint.states import LoaderState, TensorSavePlanner
from torchtrain.config.parse import parse
from torchtrain.datasets.dataloader import Batch
from torchtrain.models.model_config import build_model_config
from torchtrain.plugins.planner import simulation
from torchtrain.plugins.planner.hardware import GPUS
from torchtrain.plugins.planner.instrument import instrument
from torchtrain.plugins.planner.recorder import StepRecorder
from torchtrain.plugins.planner.request import resolve_and_check
from torchtrain.trainer import Trainer

DEVICE = 1  # of the simulated rank; new threads begin with device 0

TINY = [
    *("--model.shape.dim=32", "--model.shape.n_layers=1", "--model.shape.n_heads=2", "--model.shape.n_kv_heads=2"),
    *("--model.shape.ffn_dim=32", "--training.seq_len=16", "--training.local_batch_size=2"),
    *("--training.global_batch_size=4", "--training.steps=3", "--metrics.log_freq=10", "--checkpoint.interval=1"),
    *("--metrics.no-enable_tensorboard", "--report.no-enable", "--job.device=cuda"),
]


@contextmanager
def one_of_two_gpus() -> Iterator[None]:
    """Context manager in which this process is the second rank of its machine, and the only one of the run."""
    properties = SimpleNamespace(total_memory=80 << 30, name="a fake GPU", major=9, minor=0, multi_processor_count=132)
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda device=None: properties,  # noqa: ARG005
        "max_memory_allocated": lambda device=None: 0,  # noqa: ARG005
        "max_memory_reserved": lambda device=None: 0,  # noqa: ARG005
        "memory_stats": lambda device=None: {},  # noqa: ARG005
        "reset_peak_memory_stats": lambda device=None: None,  # noqa: ARG005
    }
    init = dist.init_process_group

    def init_fake(backend: str, store: Any, rank: int, world_size: int, **_: Any) -> None:  # noqa: ARG001
        init("fake", store=store, rank=rank, world_size=world_size)

    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(patch.object(torch.cuda, name, function))
        # A CUDA build of torch would create a real context together with the first fake tensor.
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda *_: None, create=True))
        stack.enter_context(patch.object(dist, "init_process_group", init_fake))
        stack.enter_context(patch.dict(os.environ, LOCAL_RANK=str(DEVICE)))
        yield


@contextmanager
def blocking_copies_only_of(owner: type, name: str, recorder: StreamRecorder) -> Iterator[None]:
    """Context manager in which blocking copies are reported while the method ``name`` of ``owner`` runs."""
    method = getattr(owner, name)
    recorder.reports_blocking_copies = False

    def reporting(*args: Any, **options: Any) -> Any:
        recorder.reports_blocking_copies = True
        try:
            return method(*args, **options)
        finally:
            recorder.reports_blocking_copies = False

    with patch.object(owner, name, reporting):
        yield


def train(
    folder: Path,
    options: Sequence[str] = (),
    fault: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> StreamReport:
    """Train the real ``Trainer`` on a rank of its own, with real data, checkpoints and threads.

    Args:
        options: as on the command line.
        fault: a context in which the run happens.
    """
    recorder = StreamRecorder(DEVICE)
    lookup = TensorSavePlanner.lookup_object

    def copy_to_host(_: LoaderState, state_dict: Mapping[str, Any]) -> None:
        """As the original, without the loader: the fake GPU has lost the position in the data."""
        state_dict["rows"].to_local().cpu().numpy()

    def recorded_lookup(planner: TensorSavePlanner, index: Any) -> Any:
        value = lookup(planner, index)
        if not value.is_cuda:
            recorder.host_access("save", [value])  # DCP writes its memory to the file
        return value

    config = parse([*TINY, f"--job.dump_folder={folder}", f"--data.path={folder.parent}", *options])
    with (
        one_of_two_gpus(),
        fault(),
        patch.object(TensorSavePlanner, "lookup_object", recorded_lookup),
        patch.object(LoaderState, "load_state_dict", copy_to_host),
        blocking_copies_only_of(Trainer, "run_steps", recorder),
        recording(recorder, FakeDevice()),
    ):
        try:
            Trainer(config).train()
        finally:
            if dist.is_initialized():  # otherwise, an error would fail later runs of the worker, too
                dist.destroy_process_group()
    return recorder.report


def simulate(
    options: Mapping[str, Any],
    world_size: int,
    rank: int,
    shape: Mapping[str, Any],
    steps: int,
    fault: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> StreamReport:
    """Simulate steps of ``rank`` of ``world_size`` ranks with the planner, on the device ``DEVICE``.

    Args:
        options: values by "section.name".
        shape: model config fields that override those of the debug model.
        fault: a context in which the model is built and the steps run.
    """
    recorder = StreamRecorder(DEVICE)
    config = config_of({**options, "estimate.world_size": world_size})
    model = replace(build_model_config(config.model, None, config.training.seq_len), **shape)
    config, degrees = resolve_and_check(config, model, GPUS["h100-80"])

    @contextmanager
    def instrument_and_record(planner: StepRecorder) -> Iterator[StepRecorder]:
        recorder.axes = planner.axes
        recorder.phase = lambda: planner.phase
        recorder.paused = lambda: planner.paused  # while DTensor infers shapes
        with instrument(planner), recording(recorder):
            yield planner

    torch.cuda.set_device(DEVICE)
    try:
        with (
            fault(),
            patch.object(simulation, "STEPS", steps),
            patch.object(simulation, "instrument", instrument_and_record),
            patch.object(simulation, "Batch", lambda tokens, labels: Batch(tokens, labels).pinned()),
        ):
            simulation.simulate(config, model, degrees, rank, max_microbatches=2, device=torch.device("cuda", DEVICE))
    finally:
        torch.cuda.set_device(0)
    return recorder.report
