"""Order of streams, threads and collectives, pinned memory, and devices of threads, on the fake GPU.

The first tests are of the recorder itself (``harness/stream_recorder.py``). The others run the real trainer on one
rank, then steps of layouts of several ranks, and both also with planted faults.
"""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import fake_cuda
import pytest
import recorded_training
import torch
import torch.distributed as dist
from recorded_training import DEVICE
from stream_recorder import FakeDevice, StreamRecorder, StreamReport, recording
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from torchtrain.checkpoint.states import Stager
from torchtrain.datasets.dataloader import Batch
from torchtrain.distributed.gradient_reducer import NoReduceScatter
from torchtrain.fault_tolerance.step_check import StepCheck
from torchtrain.parallelisms.pipeline_llama import Pipeline
from torchtrain.plugins.muon import muon

pytestmark = pytest.mark.skipif(fake_cuda.COMPILER is None, reason="a fake GPU needs g++")

Fault = Callable[[], AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fake_cuda.Worker]:
    worker = fake_cuda.Worker(tmp_path_factory.mktemp("fake_cuda"))
    yield worker
    worker.close()


# Small programs, correct and not.


def record(program: Callable[[bool], None], correct: bool) -> list[str]:
    """The faults of a program on the device ``DEVICE``."""
    torch.cuda.set_device(DEVICE)
    try:
        with recording(StreamRecorder(DEVICE), FakeDevice()) as recorder:
            program(correct)
    finally:
        torch.cuda.set_device(0)
    return recorder.report.faults


def read_on_another_stream(correct: bool) -> None:
    weights = torch.ones(4, device="cuda")
    side = torch.cuda.Stream()
    if correct:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weights.sum()


def write_while_another_stream_reads(correct: bool) -> None:
    weights = torch.ones(4, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weights.sum()
        end = side.record_event()
    if correct:
        torch.cuda.current_stream().wait_event(end)
    weights.zero_()


def record_an_event_too_early(correct: bool) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        weights = torch.ones(4, device="cuda")
        early = side.record_event()
        weights.mul_(2)
        late = side.record_event()
    torch.cuda.current_stream().wait_event(late if correct else early)
    weights.sum()


def free_memory_that_another_stream_uses(correct: bool) -> None:
    weights = torch.ones(4, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weights.sum()
    if correct:
        weights.record_stream(side)
    del weights
    torch.zeros(4, device="cuda")


def differentiate_on_two_streams(correct: bool) -> None:
    """Autograd runs the backward of an operation on the stream of its forward, and then orders the streams."""
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    weights = torch.ones(4, device="cuda", requires_grad=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        doubled = weights * 2
    torch.cuda.current_stream().wait_stream(side)
    doubled.sum().backward()
    assert weights.grad is not None
    if correct:
        weights.grad.sum()
    else:
        with torch.cuda.stream(other):
            weights.grad.sum()


def read_before_the_copy_has_ended(correct: bool) -> None:
    on_host = torch.ones(4, device="cuda").to("cpu", non_blocking=True)
    copied = torch.cuda.current_stream().record_event()
    if correct:
        copied.synchronize()
    on_host.tolist()


def overwrite_while_a_copy_reads(correct: bool) -> None:
    batch = torch.ones(4).pin_memory()
    batch.to("cuda", non_blocking=True)
    if correct:
        torch.cuda.synchronize()
    batch.zero_()


def overwrite_in_a_thread(correct: bool) -> None:
    batch = torch.ones(4).pin_memory()
    thread = threading.Thread(target=batch.zero_, name="writer")
    thread.start()
    if correct:
        thread.join()
    else:
        while thread.is_alive():  # has ended in time, but nothing says so
            pass
    batch.to("cuda", non_blocking=True)


def copy_from_unpinned_memory(correct: bool) -> None:
    batch = torch.ones(4)
    (batch.pin_memory() if correct else batch).to("cuda", non_blocking=True)


def copy_and_wait(correct: bool) -> None:
    torch.ones(4).pin_memory().to("cuda", non_blocking=correct)


def compute_in_a_thread(correct: bool) -> None:
    def compute() -> None:
        if correct:
            torch.cuda.set_device(DEVICE)
        torch.ones(4, device="cuda")

    thread = threading.Thread(target=compute, name="helper")
    thread.start()
    thread.join()


def read_a_pinned_copy(correct: bool) -> None:
    """As the sums over replicas do, on the host."""
    from torchtrain.plugins.replicas.group import PinnedCopies

    with nullcontext() if correct else patch.object(fake_cuda.Stream, "synchronize", lambda _: None):
        on_host = PinnedCopies().copy(torch.ones(4, device="cuda"))
    on_host.add_(1)


def copy_into_a_buffer_that_is_copied_back(correct: bool) -> None:
    from torchtrain.plugins.replicas.group import PinnedCopies

    copies = PinnedCopies()
    with torch.cuda.stream(torch.cuda.Stream()):
        first = torch.ones(4, device="cuda")
        copies.copy(first)
        copies.copy_back(first)
    if not correct:
        copies._copied_back = dict.fromkeys(copies._copied_back, torch.cuda.Event())
    copies.copy(torch.ones(4, device="cuda"))
    torch.cuda.synchronize()


PROGRAMS: dict[Callable[[bool], None], str] = {
    read_on_another_stream: "sum on stream 1 of cuda:1 is not ordered after ones on default stream of cuda:1",
    write_while_another_stream_reads: (
        "zero_ on default stream of cuda:1 is not ordered after sum on stream 1 of cuda:1"
    ),
    record_an_event_too_early: "sum on default stream of cuda:1 is not ordered after mul_ on stream 1 of cuda:1",
    free_memory_that_another_stream_uses: (
        "zeros on default stream of cuda:1 is not ordered after sum on stream 1 of cuda:1"
    ),
    differentiate_on_two_streams: "sum on stream 2 of cuda:1 is not ordered after mul on stream 1 of cuda:1",
    read_before_the_copy_has_ended: (
        "tolist on thread MainThread is not ordered after _to_copy on default stream of cuda:1"
    ),
    overwrite_while_a_copy_reads: (
        "zero_ on thread MainThread is not ordered after _to_copy on default stream of cuda:1"
    ),
    overwrite_in_a_thread: "_to_copy on default stream of cuda:1 is not ordered after zero_ on thread writer",
    copy_from_unpinned_memory: "_to_copy from unpinned memory in test_streams.copy_from_unpinned_memory",
    copy_and_wait: "_to_copy from memory without non_blocking in test_streams.copy_and_wait",
    read_a_pinned_copy: "add_ on thread MainThread is not ordered after copy_ on default stream of cuda:1",
    copy_into_a_buffer_that_is_copied_back: (
        "copy_ on default stream of cuda:1 is not ordered after copy_ on stream 1 of cuda:1"
    ),
    compute_in_a_thread: "ones in thread helper, whose current device is cuda:0",
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_fault_of_a_small_program_is_noticed(gpu: fake_cuda.Worker, program: Callable[[bool], None]) -> None:
    assert gpu.run(record, program, True) == []
    assert gpu.run(record, program, False) == [PROGRAMS[program]]


# The trainer on one rank, with its threads, data and checkpoints.

# The host waits for the device when it logs, and once to measure the first step.
EXPECTED_COPIES = {
    f"_to_copy from memory without non_blocking in {function}"
    for function in ("recorder.record_last", "watchdog.set_timeout_after_first_step")
}
SAVES = ["--checkpoint.enable", "--checkpoint.interval=1"]
CHECKPOINT = [*SAVES, "--checkpoint.async_mode=async_with_pinned_mem"]
VALIDATION = ["--validation.enable", "--validation.interval=1", "--validation.steps=1"]
MUON, AVERAGES = ["--optimizer.name=muon"], ["--ema.enable", "--ema.interval=1"]
RUNS: dict[str, tuple[int, list[str]]] = {  # steps and options
    "copies that overlap": (3, [*CHECKPOINT, *MUON, *AVERAGES]),
    "copies that the step waits for": (2, [*SAVES, "--checkpoint.async_mode=async", *AVERAGES, "--ema.offload"]),
    "saves that the step waits for": (2, [*SAVES, "--checkpoint.async_mode=disabled", *VALIDATION]),
    "without prefetching": (1, ["--data.prefetch=0", "--checkpoint.no-enable"]),
}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "text.txt").write_text("a short text of a few words\n" * 500)
    return folder


def train(
    gpu: fake_cuda.Worker, texts: Path, options: Sequence[str], fault: Fault = nullcontext, steps: int = 3
) -> StreamReport:
    """Train with a save after each step, the last of which is not asynchronous, and two microbatches per step."""
    options = [f"--data.path={texts}", f"--validation.path={texts}", f"--training.steps={steps}", *options]
    report: StreamReport = gpu.run(recorded_training.train, texts.parent / "run", options, fault)
    return report


@pytest.mark.parametrize(
    "name",
    [name if name == "copies that overlap" else pytest.param(name, marks=pytest.mark.slow) for name in RUNS],
)
def test_trainer_has_no_races_and_waits_for_no_copy(gpu: fake_cuda.Worker, name: str, texts: Path) -> None:
    steps, options = RUNS[name]
    report = train(gpu, texts, options, steps=steps)
    assert report.races == []
    assert report.wrong_devices == []
    assert set(report.blocking_copies) == EXPECTED_COPIES
    # What was followed: the copies of batches from the thread that reads ahead, and those of a save to its thread.
    assert ("thread data" in report.operations) == ("prefetch" not in name)
    assert ("thread save" in report.operations) == name.startswith("copies")
    if name == "copies that overlap":
        # With forward and backward of the next step. After the first step the trainer waits for the device once.
        found = copies(report)
        first, second = found[: len(found) // 2], found[len(found) // 2 :]
        assert set(first) == {0}
        assert min(second) > 100


@contextmanager
def replicas(pinned: type[Any] | None = None) -> Iterator[None]:
    """Train as one of two replicas, whose sums are already there."""
    from torchtrain.plugins.replicas import group
    from torchtrain.plugins.replicas.options import ReplicasConfig
    from torchtrain.trainer import Trainer

    done = SimpleNamespace(wait=lambda: None)

    def build_replicas(*_: Any) -> Any:
        found = group.ReplicaGroup(ReplicasConfig())
        found._manager = SimpleNamespace(
            num_participants=lambda: 2, errored=lambda: None, should_commit=lambda: True, shutdown=lambda **_: None
        )
        found._pg = SimpleNamespace(allreduce=lambda *_: done, abort=lambda: None)
        if pinned is not None:
            found._pinned = pinned()
        return found

    with patch.object(Trainer, "build_replicas", build_replicas):
        yield


@contextmanager
def replicas_with_pageable_copies() -> Iterator[None]:
    class Pageable:
        def copy(self, tensor: torch.Tensor) -> torch.Tensor:
            self.last = tensor.cpu()
            return self.last

        def copy_back(self, tensor: torch.Tensor) -> None:
            tensor.copy_(self.last)

    with replicas(Pageable):
        yield


@contextmanager
def lone_replica() -> Iterator[None]:
    """Train as the only replica, which sums nothing."""
    from torchtrain.plugins.replicas.group import ReplicaGroup

    with replicas(), patch.object(ReplicaGroup, "all_reduce", lambda *_, **__: None):
        yield


REPLICA = ["--training.sums=exact", "--checkpoint.no-enable", "--diagnostics.enable_loss_by_source"]


@pytest.mark.slow
def test_a_replica_that_is_alone_has_no_races(gpu: fake_cuda.Worker, texts: Path) -> None:
    report = train(gpu, texts, ["--replicas.allow_fast_sums", "--checkpoint.no-enable"], lone_replica, steps=2)
    assert report.races == []


def test_sums_over_replicas_have_no_races_and_wait_only_for_pinned_copies(gpu: fake_cuda.Worker, texts: Path) -> None:
    report = train(gpu, texts, REPLICA, replicas, steps=2)
    assert report.races == []
    assert set(report.blocking_copies) <= EXPECTED_COPIES


@pytest.mark.slow
def test_faults_of_sums_over_replicas_are_noticed(gpu: fake_cuda.Worker, texts: Path) -> None:
    report = train(gpu, texts, REPLICA, replicas_with_pageable_copies, steps=1)
    assert "copy_ from memory without non_blocking in test_streams.copy_back" in report.blocking_copies


def test_loading_a_checkpoint_has_no_races(gpu: fake_cuda.Worker, texts: Path) -> None:
    schedule = ["--lr_scheduler.total_steps=3", *CHECKPOINT]
    train(gpu, texts, schedule, steps=1)
    report = train(gpu, texts, schedule, steps=2)
    assert "_to_copy from memory without non_blocking in watchdog.set_timeout_after_first_step" in report.faults
    assert set(report.faults) <= EXPECTED_COPIES


def copies(report: StreamReport) -> list[int]:
    """Of each copy of a checkpoint on a stream of its own, the number of kernels that may run at the same time."""
    return [sum(operation.kernels.values()) for operation in report.asynchronous if operation.name == "copy"]


@pytest.mark.slow
def test_lost_overlap_of_copies_is_noticed(gpu: fake_cuda.Worker, texts: Path) -> None:
    assert set(copies(train(gpu, texts, CHECKPOINT, wait_for_copies_at_once))) == {0}


@contextmanager
def copy_without_waiting_for_the_update() -> Iterator[None]:
    stage = Stager.copy_to_host

    def stage_at_once(stager: Stager, tensors: Any) -> Any:
        with patch.object(fake_cuda.Stream, "wait_stream", lambda *_: None):
            return stage(stager, tensors)

    with patch.object(Stager, "copy_to_host", stage_at_once):
        yield


def update_without_waiting_for_the_copy() -> AbstractContextManager[Any]:
    return patch.object(Stager, "wait_for_copies", lambda _: None)


def save_without_waiting_for_the_copy() -> AbstractContextManager[Any]:
    return patch.object(Stager, "wait", lambda _: None)


@contextmanager
def wait_for_copies_at_once() -> Iterator[None]:
    stage = Stager.copy_to_host

    def stage_and_wait(stager: Stager, tensors: Any) -> Any:
        staged = stage(stager, tensors)
        stager.wait_for_copies()
        return staged

    with patch.object(Stager, "copy_to_host", stage_and_wait):
        yield


@contextmanager
def check_that_reads_without_waiting() -> Iterator[None]:
    wait = StepCheck.wait

    def wait_for_nothing(check: StepCheck) -> None:
        with patch.object(fake_cuda.Event, "synchronize", lambda _: None):
            wait(check)

    with patch.object(StepCheck, "wait", wait_for_nothing):
        yield


def unpinned_batches() -> AbstractContextManager[Any]:
    return patch.object(Batch, "pinned", lambda batch: batch)


def batches_that_are_waited_for() -> AbstractContextManager[Any]:
    to = Tensor.to

    def waiting(tensor: Tensor, *args: Any, non_blocking: bool = False, **options: Any) -> Tensor:
        return to(tensor, *args, non_blocking=non_blocking and tensor.is_cuda, **options)

    return patch.object(Tensor, "to", waiting)


def thread_without_a_device() -> AbstractContextManager[Any]:
    set_device = torch.cuda.set_device

    def in_main_thread(device: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            set_device(device)

    return patch.object(torch.cuda, "set_device", in_main_thread)


TRAINER_FAULTS: dict[Fault, str] = {
    copy_without_waiting_for_the_update: (
        "copy_ on stream 1 of cuda:1 is not ordered after _fused_adamw_ on default stream of cuda:1"
    ),
    update_without_waiting_for_the_copy: (
        "_fused_adamw_ on default stream of cuda:1 is not ordered after copy_ on stream 1 of cuda:1"
    ),
    save_without_waiting_for_the_copy: "save on thread save is not ordered after copy_ on stream 1 of cuda:1",
    check_that_reads_without_waiting: (
        "tolist on thread MainThread is not ordered after _to_copy on default stream of cuda:1"
    ),
    unpinned_batches: "_to_copy from unpinned memory in microbatches.<genexpr>",
    batches_that_are_waited_for: "_to_copy from memory without non_blocking in test_streams.waiting",
    thread_without_a_device: "pin_memory in thread data, whose current device is cuda:0",
}


# The steps of a run, and faults that do not hide each other in it: where the host waits, much is ordered.
FAULTS_OF_RUNS: list[tuple[int, list[Fault]]] = [
    (3, [copy_without_waiting_for_the_update, thread_without_a_device, check_that_reads_without_waiting]),
    (3, [update_without_waiting_for_the_copy, save_without_waiting_for_the_copy, unpinned_batches]),
    (1, [batches_that_are_waited_for]),
]


@contextmanager
def several(faults: list[Fault]) -> Iterator[None]:
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault())
        yield


# Their faults are like those of the small programs.
SLOW_RUNS = [pytest.param(*run, marks=pytest.mark.slow) for run in FAULTS_OF_RUNS[1:]]


@pytest.mark.parametrize(
    ("steps", "faults"),
    [FAULTS_OF_RUNS[0], *SLOW_RUNS],
    ids=lambda of: of[0].__name__ if isinstance(of, list) else "",
)
def test_faults_of_the_trainer_are_noticed(gpu: fake_cuda.Worker, steps: int, faults: list[Fault], texts: Path) -> None:
    found = train(gpu, texts, CHECKPOINT, partial(several, faults), steps).faults
    assert [fault.__name__ for fault in faults if TRAINER_FAULTS[fault] not in found] == []


# Steps of one rank of several.

P = "parallelism."
SMALL = {"training.seq_len": 64, "training.local_batch_size": 4, "training.loss_chunk_tokens": 0}
SHAPE = {"vocab_size": 512, "dim": 64, "ffn_dim": 64, "n_heads": 4, "n_kv_heads": 2}
REPLICAS = {f"{P}data_parallel_replicate_degree": 2, f"{P}fsdp_gradient_accumulation": "unsharded"}
RESHARDED, AVERAGED = {f"{P}fsdp_reshard_after_forward": "always"}, {"ema.enable": True}
TENSOR, CONTEXT = {f"{P}tensor_parallel_degree": 2}, {f"{P}context_parallel_degree": 2}
PIPELINE = {f"{P}pipeline_parallel_degree": 2}
# The ranks, the simulated one, its steps, the layers of the model, and options.
LAYOUTS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "one rank": (1, 0, 2, 2, {}),
    "one rank, offload": (1, 0, 1, 2, {"training.enable_cpu_offload": True}),
    "one rank, bfloat16": (1, 0, 1, 2, {"training.mixed_precision_reduce": "bfloat16"}),
    "one rank of a pipeline, bfloat16": (
        *(2, 0, 1, 4),
        {
            **PIPELINE,
            f"{P}pipeline_parallel_schedule": "Interleaved1F1B",
            "training.mixed_precision_reduce": "bfloat16",
        },
    ),
    "shards": (8, 0, 2, 2, {}),
    "replicas": (8, 0, 2, 1, {**REPLICAS, **RESHARDED, **AVERAGED}),
    "muon": (4, 0, 1, 2, {"optimizer.name": "muon", **TENSOR}),
    "context, exact sums": (4, 0, 1, 1, {**CONTEXT, "training.sums": "exact"}),
    "tied 1F1B": (4, 2, 1, 2, {**PIPELINE, f"{P}pipeline_parallel_schedule": "1F1B"}),
    "Interleaved1F1B": (4, 2, 1, 4, {**PIPELINE, f"{P}pipeline_parallel_schedule": "Interleaved1F1B"}),
    "offload": (4, 0, 1, 1, {"training.enable_cpu_offload": True}),
}
# Once, of a pipeline in torch 2.11.
FIRST_MESSAGE = "_to_copy from memory without non_blocking in pipeline_llama._get_init_p2p_neighbors_ops"
# With CPU offload the host makes the update, and needs the norm of the gradient.
EXPECTED_WITH_OFFLOAD = {
    f"_to_copy from memory without non_blocking in {function}"
    for function in ("clipping.clip_grad_norm", "step_check.__call__")
}


def simulate(gpu: fake_cuda.Worker, name: str, fault: Fault | None = None) -> StreamReport:
    """Steps of a layout, of two microbatches each; a single step with a ``fault``."""
    ranks, rank, steps, layers, options = LAYOUTS[name]
    options = {**SMALL, "training.global_batch_size": 8 * ranks, **options}
    shape = {**SHAPE, "n_layers": layers, "tied_embeddings": "tied" in name}
    steps, context = (steps, small_buckets) if fault is None else (1, fault)
    report: StreamReport = gpu.run(recorded_training.simulate, options, ranks, rank, shape, steps, context)
    return report


def overlaps(report: StreamReport, name: str, phase: str, kernel: str) -> list[int]:
    """Of each collective, the number of kernels of a name that may run at the same time."""
    return [o.kernels[kernel] for o in report.asynchronous if (o.name, o.phase) == (name, phase)]


# Repeat others on more ranks, or with another schedule or optimizer.
SLOW = ("one rank of a pipeline, bfloat16", "offload", "Interleaved1F1B", "one rank, bfloat16", "tied 1F1B", "one rank")
SLOW += ("muon",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LAYOUTS]
)
def test_step_has_no_races_and_waits_for_no_copy(gpu: fake_cuda.Worker, name: str) -> None:
    report = simulate(gpu, name)
    assert report.races == []
    assert report.wrong_devices == []
    assert report.deferred_frees == []
    found = set(report.blocking_copies) - {FIRST_MESSAGE}
    assert found == (EXPECTED_WITH_OFFLOAD if "offload" in name else set())
    if name == "shards":
        # Of each microbatch: the root and the first block are gathered before any product, the second block during the
        # seven of the first, and the output layer during those of both.
        assert overlaps(report, "allgather_base", "forward", "mm") == [0, 0, 7, 14] * 4
        # The output layer's gradients are reduced during the backward of the second block, its own during that of the
        # first, and then there are no more products.
        assert overlaps(report, "reduce_scatter_base", "backward", "mm") == [14, 14, 0, 0] * 4
    if name == "muon":
        # Two products in each of five iterations. The first exchange brings the first momenta, and of the last bucket
        # this rank owns no matrix to orthogonalize.
        assert overlaps(report, "alltoall_base", "update", "addmm") == [0, 10, 10, 10, 10, 10, 0, 0]


def test_lost_overlap_of_gathers_is_noticed(gpu: fake_cuda.Worker) -> None:
    report = simulate(gpu, "shards", gather_on_the_default_stream)
    assert overlaps(report, "allgather_base", "forward", "mm") == [0] * 8


@pytest.mark.slow
def test_lost_overlap_of_exchanges_is_noticed(gpu: fake_cuda.Worker) -> None:
    found = overlaps(simulate(gpu, "muon", exchanges_that_are_waited_for), "alltoall_base", "update", "addmm")
    assert found == [0] * 8


def gather_on_the_default_stream() -> AbstractContextManager[Any]:
    def default_streams(*_: Any) -> tuple[Any, Any]:
        return torch.cuda.current_stream(), torch.cuda.current_stream()

    return patch.object(FSDPCommContext, "get_all_gather_streams", default_streams)


def small_buckets() -> AbstractContextManager[Any]:
    return patch.object(muon, "BUCKET_BYTES", 1 << 12)


@contextmanager
def exchanges_that_are_waited_for() -> Iterator[None]:
    exchange = muon.Muon._exchange

    def exchange_and_wait(optimizer: muon.Muon, *args: Any) -> Callable[[], Tensor]:
        received = exchange(optimizer, *args)()
        return lambda: received

    with small_buckets(), patch.object(muon.Muon, "_exchange", exchange_and_wait):
        yield


@contextmanager
def exchanges_that_are_not_waited_for() -> Iterator[None]:
    all_to_all = dist.all_to_all_single

    def unfinished(*args: Any, **options: Any) -> Any:
        work = all_to_all(*args, **options)
        return SimpleNamespace(wait=lambda: work is None)

    with patch.object(dist, "all_to_all_single", unfinished):
        yield


@contextmanager
def update_without_waiting_for_the_reduction() -> Iterator[None]:
    end = FSDPState._root_post_backward_final_callback

    def end_at_once(state: FSDPState) -> None:
        with patch.object(fake_cuda.Stream, "wait_event", lambda *_: None):
            end(state)

    with patch.object(FSDPState, "_root_post_backward_final_callback", end_at_once):
        yield


@contextmanager
def tied_gradient_that_is_not_waited_for() -> Iterator[None]:
    sync = Pipeline.sync_tied_embedding_grads

    def sync_at_once(pipeline: Pipeline) -> None:
        with patch.object(StreamRecorder, "finish", lambda *_: None):
            sync(pipeline)

    with patch.object(Pipeline, "sync_tied_embedding_grads", sync_at_once):
        yield


@contextmanager
def gradients_in_memory_that_may_be_used_again() -> Iterator[None]:
    allocate = NoReduceScatter.allocate

    def allocate_at_once(reduce: NoReduceScatter, *args: Any, **options: Any) -> Tensor:
        with patch.object(fake_cuda.Stream, "wait_stream", lambda *_: None):
            return allocate(reduce, *args, **options)

    with patch.object(NoReduceScatter, "allocate", allocate_at_once):
        yield


STEP_FAULTS: dict[Fault, tuple[str, str]] = {  # the layout, and a pattern of one of the races
    exchanges_that_are_not_waited_for: (
        "muon",
        "copy_ on default stream of cuda:1 is not ordered after alltoall_base on NCCL all",
    ),
    update_without_waiting_for_the_reduction: (
        "shards",
        "linalg_vector_norm on default stream of cuda:1 is not ordered after add_ on stream 3 of cuda:1",
    ),
    tied_gradient_that_is_not_waited_for: (
        "tied 1F1B",
        "add_ on default stream of cuda:1 is not ordered after recv on NCCL pipeline",
    ),
    gradients_in_memory_that_may_be_used_again: (
        "one rank",
        "chunk_cat(_mixed_dtype)? on default stream of cuda:1 is not ordered after add_ on stream 3 of cuda:1",
    ),
}


# Their races are like those of the others.
SLOW_FAULTS = (
    exchanges_that_are_not_waited_for,
    tied_gradient_that_is_not_waited_for,
    gradients_in_memory_that_may_be_used_again,
)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=pytest.mark.slow) if fault in SLOW_FAULTS else fault for fault in STEP_FAULTS],
    ids=lambda fault: fault.__name__,
)
def test_fault_of_a_step_is_noticed(gpu: fake_cuda.Worker, fault: Fault) -> None:
    layout, expected = STEP_FAULTS[fault]
    races = simulate(gpu, layout, fault).races
    assert [race for race in races if re.fullmatch(expected, race)] != [], races
