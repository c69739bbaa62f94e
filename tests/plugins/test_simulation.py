"""GPU code paths without a GPU: training steps simulated on fake CUDA tensors (``harness/fake_cuda.py``)."""

import random
import re
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fake_cuda
import fake_flash_attention
import pytest
import simulated_step
import torch
import torch.distributed as dist
from parity import TINY
from simulated_step import Report
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrain.fault_tolerance.step_check import StepCheck
from torchtrain.models.llama.model import FeedForward, attend
from torchtrain.optimizers import ema
from torchtrain.optimizers.options import EMAConfig
from torchtrain.parallelisms import activation_checkpoint, pipeline_llama
from torchtrain.parallelisms.attention_backend import (
    attention_backend_name,
    choose_attention_backend,
)
from torchtrain.parallelisms.context_parallel import ContextParallelAttention
from torchtrain.parallelisms.pipeline_schedule import STAGES_PER_RANK
from torchtrain.plugins.evaluation.generation import attention_for_generation
from torchtrain.plugins.planner import simulation
from torchtrain.trainer import TrainStep

pytestmark = pytest.mark.skipif(fake_cuda.COMPILER is None, reason="a fake GPU needs g++")

# Without continue_hf.toml, whose model sizes come from a Hugging Face folder, and without configs of stages.
CONFIGS = sorted((Path(__file__).parents[2] / "train_configs").glob("[!c]*[!s].toml"))
P = "parallelism."
SMALL = {"training.seq_len": 64, "training.local_batch_size": 4, "training.loss_chunk_tokens": 0}
Reports = Callable[[str], Report]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fake_cuda.Worker]:
    worker = fake_cuda.Worker(tmp_path_factory.mktemp("fake_cuda"))
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def on_gpu(gpu: fake_cuda.Worker) -> Reports:
    """Return a function from a name in ``MATRIX`` or ``OFFLOADED`` to its report; each is simulated once."""
    layouts = {**MATRIX, **OFFLOADED}

    def report(name: str) -> Report:
        return simulate(gpu, *layouts[name], compare=name in MATRIX, shape=shape_of(name), steps=steps_of(name))

    return cache(report)


def layout(**degrees: int) -> dict[str, int]:
    names = {"replicate": "data_parallel_replicate", "shard": "data_parallel_shard"}
    return {f"{P}{names.get(axis, axis + '_parallel')}_degree": degree for axis, degree in degrees.items()}


def simulate(worker: fake_cuda.Worker, world_size: int, options: dict[str, Any], **kwargs: Any) -> Report:
    """Simulate the debug model with two layers; in a pipeline with four, one or two per stage."""
    pipeline = options.get(f"{P}pipeline_parallel_degree", 1)
    if pipeline > 1:  # as many microbatches as 1F1B needs at least
        options = {"training.local_batch_size": pipeline, **options}
    shape = {"n_layers": 4 if pipeline > 1 else 2, "vocab_size": 512, **kwargs.pop("shape", {})}
    report: Report = worker.run(simulated_step.run, {**SMALL, **options}, world_size, shape=shape, **kwargs)
    return report


def check(report: Report, *, offload: bool = False) -> None:
    assert report.disagreements == []
    assert report.rounded_gradients == set()  # training.mixed_precision_reduce is float32
    assert report.unexpected_dtypes == set()
    assert report.single_messages == 0
    if not offload:  # with offload the host makes the update, and waits for the gradient norm
        assert report.readbacks == []
        assert report.host_work == set()


LIKE_OTHERS = ("llama2_7b", "llama2_13b", "llama2_70b", "llama3_1b", "llama3_3b", "llama3_70b")  # but for the size
LIKE_OTHERS += ("debug_english", "debug_model", "open_1b", "llama3_405b")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem in LIKE_OTHERS else ()) for path in CONFIGS],
)
def test_train_config_runs_on_simulated_gpus(gpu: fake_cuda.Worker, path: Path) -> None:
    """With its model sizes, layout, ranks and options; but with two layers per stage, since all layers are equal.

    In one step: the layouts below have two.
    """
    options, world_size, shape = simulated_step.shipped_config(path)
    check(gpu.run(simulated_step.run, options, world_size, shape=shape, steps=1))


SELECTIVE, FULL = {"activation_checkpoint.mode": "selective"}, {"activation_checkpoint.mode": "full"}
COMPILE, DOCUMENTS = {"compile.enable": True}, {"data.document_mask": True}
BFLOAT16, MUON = {"optimizer.state_dtype": "bfloat16"}, {"optimizer.name": "muon"}
EMA_AND_Z = {"ema.enable": True, "training.z_loss_weight": 1e-4}
THREE = {"training.local_batch_size": 3}  # microbatches: one forward between two backward passes
NINE = {"training.local_batch_size": 9}  # microbatches: one more than torch's recompile limit
UNSHARDED = {f"{P}fsdp_gradient_accumulation": "unsharded"}


def schedule(name: str) -> dict[str, str]:
    return {f"{P}pipeline_parallel_schedule": name}


def accumulated(rows: int) -> dict[str, int]:
    return {"training.global_batch_size": rows}


MATRIX: dict[str, tuple[int, dict[str, Any]]] = {
    "shards": (8, {**accumulated(64), "training.loss_chunk_tokens": 128}),
    "replicas": (16, {**layout(replicate=2), **accumulated(128), **UNSHARDED, **BFLOAT16, **SELECTIVE, **MUON}),
    "tensor": (8, {**layout(tensor=2), f"{P}enable_sequence_parallel": False, **FULL}),
    "tensor-documents": (8, {**layout(tensor=2), f"{P}enable_sequence_parallel": False, **FULL, **DOCUMENTS}),
    "tensor-context": (64, {**layout(tensor=4, context=4, replicate=2), **SELECTIVE, **COMPILE, **MUON}),
    "averages-z-loss": (8, {**layout(tensor=2), **EMA_AND_Z, "training.loss_chunk_tokens": 128}),
    "async-tensor": (8, {**layout(tensor=4), f"{P}enable_async_tensor_parallel": True, **COMPILE}),
    "context-documents": (16, {**layout(context=4), **DOCUMENTS, **SELECTIVE}),
    "context-documents-compiled": (16, {**layout(context=4), **DOCUMENTS, **COMPILE, **SELECTIVE}),
    "float32": (8, {**layout(context=2), "training.mixed_precision_param": "float32"}),
    "memory-budget": (8, {**COMPILE, "activation_checkpoint.mode": "memory_budget", **BFLOAT16}),
    "1F1B": (8, {**schedule("1F1B"), **THREE, **layout(pipeline=2, tensor=2, replicate=2), **SELECTIVE}),
    "1F1B-three": (48, {**schedule("1F1B"), **THREE, **layout(pipeline=3, tensor=2, context=2, replicate=2)}),
    "1F1B-documents": (4, {**schedule("1F1B"), **layout(pipeline=2), **DOCUMENTS, **COMPILE, **THREE}),
    "1F1B-documents-eager": (4, {**schedule("1F1B"), **layout(pipeline=2), **DOCUMENTS, **THREE}),
    "1F1B-documents-nine": (4, {**schedule("1F1B"), **layout(pipeline=2), **DOCUMENTS, **COMPILE, **NINE}),
    "GPipe": (16, {**schedule("GPipe"), **layout(pipeline=2), **UNSHARDED, **accumulated(32)}),
    "GPipe-compiled": (16, {**schedule("GPipe"), **layout(pipeline=2), **COMPILE, **UNSHARDED, **accumulated(32)}),
    "Interleaved1F1B": (8, {**schedule("Interleaved1F1B"), **layout(pipeline=2), **DOCUMENTS, **FULL, **MUON}),
    "InterleavedZeroBubble": (16, {**schedule("InterleavedZeroBubble"), **layout(pipeline=2, tensor=2), **BFLOAT16}),
    "ZBVZeroBubble": (8, {**schedule("ZBVZeroBubble"), **layout(pipeline=2), **FULL}),
}


NOT_ON_TORCH_2_11 = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="parallelisms/check.py rejects it with torch 2.11"
)


def with_version_marks(names: Iterable[str], slow: Container[str] = ()) -> list[Any]:
    """The ``names`` as parameters, of which ``slow`` have the mark of this name."""
    marks = {
        name: [*[pytest.mark.slow] * (name in slow), *[NOT_ON_TORCH_2_11] * (name == "memory-budget")] for name in names
    }
    return [pytest.param(name, marks=of_name) for name, of_name in marks.items()]


SLOW = ("1F1B-documents-nine", "1F1B-documents-eager", "context-documents-compiled", "GPipe-compiled")
# With the schedule 1F1B, and document masks and compiled blocks on other axes.
SLOW += ("1F1B-documents", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "async-tensor", "1F1B-three")
SLOW += ("tensor-context", "averages-z-loss", "memory-budget", "tensor-documents", "ZBVZeroBubble")
# The others in the default tests have the second step, which begins with the optimizer's states.
ONE_STEP = ("tensor", "context-documents", "float32", "1F1B")
LAYERS = {"replicas": 1, "tensor": 1, "context-documents": 1, "float32": 1, "1F1B": 2}


def steps_of(name: str) -> int:
    return 1 if name in ONE_STEP else 2


def shape_of(name: str) -> dict[str, Any]:
    return {"tied_embeddings": "tied" in name, **({"n_layers": LAYERS[name]} if name in LAYERS else {})}


@pytest.mark.parametrize("name", with_version_marks(MATRIX, slow=SLOW))
def test_layout_has_matching_collectives_and_no_host_synchronization(on_gpu: Reports, name: str) -> None:
    check(on_gpu(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_STEP)
def test_second_step_of_a_layout_has_no_host_synchronization(gpu: fake_cuda.Worker, name: str) -> None:
    check(simulate(gpu, *MATRIX[name], compare=True))


@pytest.mark.parametrize("name", with_version_marks(MATRIX, slow=SLOW))
def test_attention_of_a_layout_has_a_fused_kernel(on_gpu: Reports, name: str) -> None:
    options = MATRIX[name][1]
    kernel = "_scaled_dot_product_flash_attention"
    if options.get("data.document_mask"):
        kernel = "flex_attention"
    elif options.get("training.mixed_precision_param") == "float32":
        kernel = "_scaled_dot_product_efficient_attention"
    for seen in on_gpu(name).ranks:
        assert seen.attention == {kernel, f"{kernel}_backward"}


def test_exact_sums_reduce_integers_on_every_axis(gpu: fake_cuda.Worker) -> None:
    options = {**layout(tensor=4, replicate=2), "training.sums": "exact"}
    report = simulate(gpu, 16, options, shape={"n_layers": 1, "qk_norm": True}, steps=1)
    assert report.disagreements == []
    assert report.rounded_gradients == set()
    found = {(axis, dtype) for axis, _, dtype, _ in report.ranks[0].reductions}
    assert {("replicate", torch.int64), ("tensor", torch.int64)} <= found


@pytest.mark.parametrize("name", with_version_marks(("replicas", "memory-budget", "GPipe-compiled"), slow=SLOW))
def test_cudnn_attention_is_saved_for_backward_like_flash_attention(
    gpu: fake_cuda.Worker, on_gpu: Reports, name: str
) -> None:
    """cuDNN is torch's first choice on an H100: its results are saved wherever those of flash attention are."""
    report = simulate(gpu, *MATRIX[name], shape=shape_of(name), fault=fake_cuda.cudnn, steps=1)
    check(report)
    flash = {seen.rank: seen for seen in on_gpu(name).ranks}
    for seen in report.ranks:
        other = flash[seen.rank]
        assert seen.attention == {kernel.replace("flash", "cudnn") for kernel in other.attention}
        assert (seen.flops, seen.recomputed) == (other.flops, other.recomputed)


OFFLOAD = {"training.enable_cpu_offload": True}
OFFLOADED: dict[str, tuple[int, dict[str, Any]]] = {
    "offloaded": (8, {**OFFLOAD, **accumulated(64), **SELECTIVE}),
    "offloaded-tied-stages": (16, {**OFFLOAD, **schedule("1F1B"), **layout(pipeline=2, tensor=2), **BFLOAT16, **MUON}),
}


@pytest.mark.parametrize("name", with_version_marks(OFFLOADED, slow=("offloaded-tied-stages",)))
def test_offload_has_matching_collectives(on_gpu: Reports, name: str) -> None:
    check(on_gpu(name), offload=True)


def test_offload_copies_parameters_and_gradients_as_often_as_they_are_used(
    gpu: fake_cuda.Worker, on_gpu: Reports
) -> None:
    """Parameters are copied before each all-gather, gradients after each reduce-scatter, as float32 shards."""
    (rank,) = on_gpu("offloaded").ranks
    (cpu_rank,) = simulate(gpu, *OFFLOADED["offloaded"], device="cpu").ranks
    copied = dict.fromkeys(("copy_to_gpu", "copy_to_host", "copy_to_host_and_wait"), 0)
    for (axis, name, size), count in rank.collectives.items():
        if axis == "host":
            copied[name] += size * count
    assert {key: n for key, n in cpu_rank.collectives.items() if key[0] == "host"} == {
        key: n for key, n in rank.collectives.items() if key[0] == "host"
    }
    # There are two microbatches, and the second accumulates. The root and the last block are gathered once in each.
    gathered = sum(n for (axis, name, _), n in rank.collectives.items() if name == "allgather_base")
    assert sum(n for (_, name, _), n in rank.collectives.items() if name == "copy_to_gpu") == gathered
    assert copied["copy_to_host"] == copied["copy_to_host_and_wait"] > 0
    assert copied["copy_to_gpu"] > 2 * copied["copy_to_host"]


UNFUSED: dict[str, dict[str, Any]] = {
    name: {"optimizer.implementation": name, **options} for name, options in (("foreach", {}), ("for-loop", BFLOAT16))
}


@pytest.mark.parametrize("name", ["foreach", pytest.param("for-loop", marks=pytest.mark.slow)])
def test_unfused_update_synchronizes_with_the_host_for_the_guard_only(gpu: fake_cuda.Worker, name: str) -> None:
    report = simulate(gpu, 8, UNFUSED[name], compare=True)
    assert report.disagreements == []
    assert set(report.readbacks) == {"item in update"}


def sampled(seed: int) -> tuple[int, dict[str, Any]]:
    """Draw a layout and options at random, including most incompatible combinations."""
    pick = random.Random(seed)
    degrees = {axis: pick.choice((1, 1, 2)) for axis in ("replicate", "tensor", "context", "pipeline")}
    world_size = prod(degrees.values()) * pick.choice((1, 2))
    return world_size, {
        **layout(**degrees),
        **schedule(pick.choice(list(STAGES_PER_RANK))),
        **accumulated(8 * world_size),
        "activation_checkpoint.mode": pick.choice(("none", "selective", "full", "memory_budget")),
        "compile.enable": pick.random() < 0.3,
        "data.document_mask": pick.random() < 0.3,
        "training.enable_cpu_offload": pick.random() < 0.2,
        "training.sums": pick.choice(("fast", "fast", "exact")),
        "training.mixed_precision_param": pick.choice(("bfloat16", "float32")),
        "optimizer.implementation": pick.choice(("fused", "foreach", "for-loop")),
        "optimizer.state_dtype": pick.choice(("float32", "bfloat16")),
        f"{P}fsdp_gradient_accumulation": pick.choice(("sharded", "unsharded")),
        f"{P}fsdp_reshard_after_forward": pick.choice(("default", "always", "never")),
        f"{P}enable_sequence_parallel": pick.random() < 0.7,
    }


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 10))])
def test_config_that_passes_validation_runs(gpu: fake_cuda.Worker, seed: int) -> None:
    """No config is rejected after validation, when process groups exist."""
    world_size, options = sampled(seed)
    # Validation does not depend on the number of layers: use one per pipeline stage.
    pipeline = options[f"{P}pipeline_parallel_degree"]
    layers = pipeline * STAGES_PER_RANK[options[f"{P}pipeline_parallel_schedule"]] if pipeline > 1 else 2
    report = simulate(gpu, world_size, options, shape={"n_layers": layers}, allow_config_error=True, steps=1)
    assert report.config_error or report.ranks
    assert report.disagreements == []


# The same on the CPU, where the planner simulates by default.

SIMULATED_ON_CPU = ("shards", "replicas", "averages-z-loss", "memory-budget", "GPipe-compiled")
SIMULATED_ON_CPU += ("tensor-context", "1F1B", "ZBVZeroBubble")


@pytest.mark.parametrize(
    "name", with_version_marks(SIMULATED_ON_CPU, slow=("tensor-context", "1F1B", "replicas", *SLOW))
)
def test_simulation_on_the_cpu_agrees_with_the_simulation_on_a_gpu(
    gpu: fake_cuda.Worker, on_gpu: Reports, name: str
) -> None:
    """The planner uses fake CPU tensors: live bytes by kind, collectives and FLOPs are those on a GPU."""
    on_gpus = {seen.rank: seen for seen in on_gpu(name).ranks}
    for other in simulate(gpu, *MATRIX[name], device="cpu", shape=shape_of(name), steps=steps_of(name)).ranks:
        one = on_gpus[other.rank]
        live = sum(one.peak.values())
        assert live == pytest.approx(sum(other.peak.values()), rel=0.01)
        for kind, size in one.peak.items():
            assert other.peak[kind] == pytest.approx(size, rel=0.01, abs=0.01 * live), kind
        assert one.collectives == other.collectives
        assert one.flops == other.flops
        assert one.recomputed == other.recomputed


# The simulation detects faults: each of the following tests injects one into the trainer.

ONE_LAYER, TWO_LAYERS = {"n_layers": 1}, {"n_layers": 2}


def rope_on_the_host() -> AbstractContextManager[Any]:
    def initialize_buffers(parts: Any, _: Any) -> None:
        for part in parts:
            part.init_buffers()

    return patch.object(simulation, "initialize_buffers", initialize_buffers)


def test_tensor_on_the_wrong_device_is_detected(gpu: fake_cuda.Worker) -> None:
    with pytest.raises(AssertionError, match=r"cuda:0 and cpu|found two different devices cuda:0, cpu"):
        simulate(gpu, 8, OFFLOAD, shape=ONE_LAYER, fault=rope_on_the_host)


class OperationNames(TorchDispatchMode):
    """Records the names of the operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def attention_kernels(dtype: torch.dtype, masked: bool, context: Any = nullcontext) -> list[str]:
    """Return the attention kernels for two query heads per key/value head, within ``context``."""
    with context(), FakeTensorMode(), OperationNames() as names:
        q, k = (torch.empty(1, heads, 16, 8, dtype=dtype, device="cuda") for heads in (4, 2))
        mask = torch.ones(16, 16, dtype=torch.bool, device="cuda") if masked else None
        attend(q, k, k, mask)
    return [name for name in names.called if "attention" in name]


def attention_kernel_in_the_log(dtype: torch.dtype, context: Any = nullcontext, parallel: bool = False) -> str:
    FakeTensorMode.cache_clear()  # otherwise, the choice of an earlier call
    with context(), FakeTensorMode():
        return attention_backend_name("auto", TINY, dtype, torch.device("cuda"), context=parallel)


@pytest.mark.parametrize(
    ("dtype", "masked", "kernel"),
    [(torch.bfloat16, False, "flash"), (torch.bfloat16, True, "efficient"), (torch.float32, False, "efficient")],
)
def test_grouped_query_attention_uses_a_fused_kernel(
    gpu: fake_cuda.Worker, dtype: torch.dtype, masked: bool, kernel: str
) -> None:
    """The math kernel would materialize all scores."""
    assert gpu.run(attention_kernels, dtype, masked) == [f"_scaled_dot_product_{kernel}_attention"]
    assert masked or gpu.run(attention_kernel_in_the_log, dtype) == kernel


class Transfers(TorchDispatchMode):
    """Counts the copies from the GPU that the host waits for, and the others."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"waited for": 0, "enqueued": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        source = args[1] if func is torch.ops.aten.copy_.default else args[0] if args else None
        copies = func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
        if copies and source.is_cuda and out.device.type == "cpu":
            enqueued = args[2:] == (True,) or (kwargs or {}).get("non_blocking", False)
            self.counts["enqueued" if enqueued else "waited for"] += 1
        return out


def transfers_of_offloaded_ema(parameters: int) -> dict[str, int]:
    """Count the transfers of one EMA update; "synchronized" is how often the host waits for a stream."""
    counts = {"synchronized": 0}

    def synchronize(_: fake_cuda.Stream) -> None:
        counts["synchronized"] += 1

    def not_pinned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}

    with (
        FakeTensorMode(),
        patch.object(ema, "pinned_like", not_pinned),
        patch.object(fake_cuda.Stream, "synchronize", synchronize),
    ):
        model = nn.ParameterList(torch.empty(64, 8, device="cuda") for _ in range(parameters))
        kept = ema.EMA([model], EMAConfig(enable=True, offload=True))
        with Transfers() as transfers:
            kept.update(1, torch.zeros((), device="cuda"))
    return {**counts, **transfers.counts}


def test_offloaded_ema_synchronizes_with_the_gpu_once_per_bucket(gpu: fake_cuda.Worker) -> None:
    """And once to read whether the update was skipped."""
    found = gpu.run(transfers_of_offloaded_ema, 290)
    assert found == {"waited for": 1, "enqueued": 290, "synchronized": 1}


def cudnn_in_generation() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(fake_cuda.cudnn())
    stack.enter_context(attention_for_generation())
    return stack


def test_generation_does_not_use_cudnn_attention(gpu: fake_cuda.Worker) -> None:
    assert gpu.run(attention_kernels, torch.bfloat16, True, fake_cuda.cudnn) == ["_scaled_dot_product_cudnn_attention"]
    kernels = gpu.run(attention_kernels, torch.bfloat16, True, cudnn_in_generation)
    assert kernels == ["_scaled_dot_product_efficient_attention"]


@contextmanager
def only(backend: str) -> Iterator[None]:
    """The backend of ``training.attention_backend``, on a GPU with cuDNN."""
    if backend == "fa3":
        fake_flash_attention.install()
    choose_attention_backend(backend)
    try:
        with fake_cuda.cudnn():
            yield
    finally:
        choose_attention_backend("auto")


@contextmanager
def generation_with_only(backend: str) -> Iterator[None]:
    with only(backend), attention_for_generation():
        yield


@pytest.mark.parametrize("backend", ["flash", "fa3", "cudnn", "efficient"])
def test_generation_has_a_kernel_with_any_attention_backend(gpu: fake_cuda.Worker, backend: str) -> None:
    kernels = gpu.run(attention_kernels, torch.bfloat16, True, partial(generation_with_only, backend))
    assert kernels == ["_scaled_dot_product_efficient_attention"]
    if backend in ("flash", "fa3"):  # the reference: without the context there is none
        with pytest.raises(AssertionError, match="No viable backend"):
            gpu.run(attention_kernels, torch.bfloat16, True, partial(only, backend))


def test_flash_attention_3_is_chosen_and_logged(gpu: fake_cuda.Worker) -> None:
    """It replaces the kernels of flash attention's operation, so that compiled blocks call it, too."""
    kernels = gpu.run(attention_kernels, torch.bfloat16, False, partial(only, "fa3"))
    assert kernels == ["_scaled_dot_product_flash_attention"]
    assert gpu.run(attention_kernel_in_the_log, torch.bfloat16, partial(only, "fa3")) == "fa3"
    assert gpu.run(attention_kernel_in_the_log, torch.bfloat16, partial(only, "flash")) == "flash"


@pytest.mark.parametrize(
    ("backend", "dtype", "kernel", "parallel"),
    [
        ("auto", torch.bfloat16, "cudnn", "flash"),
        ("fa3", torch.bfloat16, "fa3", "fa3"),
        ("cudnn", torch.bfloat16, "cudnn", "cudnn"),
        ("efficient", torch.float32, "efficient", "efficient"),
    ],
)
def test_log_names_the_kernel_of_context_parallelism(
    gpu: fake_cuda.Worker, backend: str, dtype: torch.dtype, kernel: str, parallel: str
) -> None:
    """It calls the flash kernel by name, or has an explicit mask."""
    assert gpu.run(attention_kernel_in_the_log, dtype, partial(only, backend)) == kernel
    assert gpu.run(attention_kernel_in_the_log, dtype, partial(only, backend), True) == parallel


def test_device_to_host_synchronization_is_detected(gpu: fake_cuda.Worker) -> None:
    report = simulate(gpu, 8, {}, shape=ONE_LAYER, fault=simulated_step.item_in_the_step)
    assert report.readbacks == ["item in forward", "item in forward"]


def collectives_swapped_on_the_second_stage() -> AbstractContextManager[Any]:
    update = TrainStep.clip_and_update

    def swapped(step: TrainStep, number: int, loss: Any) -> Tensor:
        if dist.get_rank() < 4:
            return update(step, number, loss)
        skip = step.step_check(number, loss, torch.zeros((), device=loss.total.device))
        with patch.object(StepCheck, "__call__", lambda *_: skip):
            return update(step, number, loss)

    return patch.object(TrainStep, "clip_and_update", swapped)


def test_collectives_in_another_order_are_detected(gpu: fake_cuda.Worker) -> None:
    fault = collectives_swapped_on_the_second_stage
    report = simulate(gpu, 8, layout(pipeline=2), shape=TWO_LAYERS, fault=fault, steps=1)
    assert report.disagreements == ["call 0 of a group: rank 0 has allreduce of 8 bytes, rank 4 allreduce of 48 bytes"]


def messages_one_by_one() -> AbstractContextManager[Any]:
    def send_and_receive(*messages: dist.P2POp) -> None:
        for work in [m.op(m.tensor, m.peer, m.group) for m in messages]:
            work.wait()

    return patch.object(pipeline_llama, "_wait", send_and_receive)


def test_messages_outside_of_a_batch_are_detected(gpu: fake_cuda.Worker) -> None:
    """Of the gradient of tied embeddings, on the two ranks that hold them."""
    options = {**layout(pipeline=2), f"{P}pipeline_parallel_schedule": "1F1B"}
    shape = {**TWO_LAYERS, "tied_embeddings": True}
    report = simulate(gpu, 4, options, shape=shape, fault=messages_one_by_one, steps=1)
    assert report.single_messages == 2 * 2


def additional_collective_on_the_last_rank() -> AbstractContextManager[Any]:
    update = TrainStep.clip_and_update

    def with_additional_collective(step: TrainStep, number: int, loss: Any) -> Tensor:
        if dist.get_rank() == 7:
            dist.all_reduce(torch.zeros(5, device=loss.total.device), group=step.model.mesh.batch.get_group())
        return update(step, number, loss)

    return patch.object(TrainStep, "clip_and_update", with_additional_collective)


def test_additional_collective_in_a_group_without_rank_0_is_detected(gpu: fake_cuda.Worker) -> None:
    """Rank 7 would wait for ranks 1, 3 and 5, which are not simulated."""
    fault = additional_collective_on_the_last_rank
    report = simulate(gpu, 8, layout(tensor=2), shape=ONE_LAYER, fault=fault, compare=True, steps=1)
    (found,) = report.disagreements
    assert re.fullmatch(r"call \d+ of a group: rank 0 has .*, rank 7 allreduce on \w+ of 20 bytes", found)


def attention_not_saved() -> AbstractContextManager[Any]:
    aten = torch.ops.aten
    kernels = {aten._scaled_dot_product_flash_attention.default, torch.ops.higher_order.flex_attention}
    return patch.object(activation_checkpoint, "OPS_TO_SAVE", activation_checkpoint.OPS_TO_SAVE - kernels)


@pytest.mark.parametrize(
    "options", [SELECTIVE, pytest.param({**SELECTIVE, **DOCUMENTS}, marks=pytest.mark.slow)], ids=["flash", "flex"]
)
def test_recomputed_attention_is_detected(gpu: fake_cuda.Worker, options: dict[str, Any]) -> None:
    faults: tuple[dict[str, Any], ...] = ({}, {"fault": attention_not_saved})
    kept, again = (simulate(gpu, 8, options, shape=ONE_LAYER, steps=1, **fault).ranks[0] for fault in faults)
    assert again.recomputed > kept.recomputed


def products_in_float32() -> AbstractContextManager[Any]:
    def forward(layer: FeedForward, x: Tensor) -> Tensor:
        hidden = nn.functional.silu(layer.w1(x)) * layer.w3(x)
        return (hidden.float() @ layer.w2.weight.float().T).to(x.dtype)

    return patch.object(FeedForward, "forward", forward)


def keys_gathered_in_float32() -> AbstractContextManager[Any]:
    forward = ContextParallelAttention.forward

    def in_float32(attention: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        with patch.object(DTensor, "from_local", lambda x, *args, **options: from_local(x.float(), *args, **options)):
            return forward(attention, q.float(), k, v, mask).to(q.dtype)

    from_local = DTensor.from_local
    return patch.object(ContextParallelAttention, "forward", in_float32)


def test_products_and_collectives_in_another_dtype_are_detected(gpu: fake_cuda.Worker) -> None:
    report = simulate(gpu, 8, {}, shape=ONE_LAYER, fault=products_in_float32, steps=1)
    assert {(name, dtype) for name, _, dtype in report.unexpected_dtypes} == {("mm", torch.float32)}
    report = simulate(gpu, 8, layout(context=2), shape=ONE_LAYER, fault=keys_gathered_in_float32, steps=1)
    sent = {found for found in report.unexpected_dtypes if len(found) == 4}
    names = ("all_gather_into_tensor", "reduce_scatter_tensor")
    assert sent == {("context", name, torch.float32, 5) for name in names}
