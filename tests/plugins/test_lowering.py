"""A GPU's kernels, compiled without one: Inductor, Triton and ptxas compile training steps for real architectures."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fake_cuda
import fake_flash_attention
import fake_gpu_compiler
import lowered_step
import pytest
import simulated_step
import torch
from lower import byte_rows
from lowered_step import Lowered, problems
from lowering_matrix import CONFIGS, FOLDER, MATRIX, Case, lower_case, lower_config, problems_of
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import torchtrain.models.llama.model as llama
from torchtrain.models import document_mask
from torchtrain.models.loss import output_loss
from torchtrain.parallelisms import parallelize_llama
from torchtrain.parallelisms.attention_backend import choose_attention_backend

pytestmark = [
    pytest.mark.timeout(1200),  # compiling takes up to a minute of CPU time
    pytest.mark.skipif(fake_cuda.COMPILER is None, reason="a fake GPU needs g++"),
    pytest.mark.skipif(
        bool(fake_gpu_compiler.triton_version_problem()), reason=fake_gpu_compiler.triton_version_problem()
    ),
]

Worker = Callable[..., Lowered]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], fake_cuda.Worker]]:
    """Return a function from a GPU's name to a process that compiles for it."""
    started: dict[str, fake_cuda.Worker] = {}

    @cache
    def worker(gpu: str) -> fake_cuda.Worker:
        started[gpu] = fake_cuda.Worker(tmp_path_factory.mktemp(gpu), fake_gpu_compiler.install, gpu)
        return started[gpu]

    yield worker
    for process in started.values():
        process.close()


@pytest.mark.slow
def test_8b_compiles_for_an_h100(workers: Callable[[str], fake_cuda.Worker]) -> None:
    lowered, found = lower_config(workers("h100-80"), FOLDER / "llama3_8b.toml", "h100-80")
    assert found == []
    check_bytes(lowered)
    if torch.__version__.startswith("2.13."):  # the version of the tables in docs/development/lowering.md
        # The planner's bytes would not notice an operation that a change adds to the planner's step and the real one.
        page = (FOLDER.parent / "docs/development/lowering.md").read_text(encoding="utf-8").split("## Bytes")[1]
        stated = {line for line in page.splitlines() if line.startswith("| llama3_8b |")}
        assert set(byte_rows("llama3_8b", lowered)) == stated


def check_bytes(lowered: Lowered, error: float = 0.01) -> None:
    """Check the planner's bytes of the generated kernels of each block, and of the loss."""
    names = [graph.name for graph in lowered.code.graphs]
    assert set(names) >= {"model.forward forward", "model.forward backward"}
    for graph in lowered.code.graphs:
        if graph.name == "output_loss.token_losses forward":  # Inductor counts all logits for one per token
            assert graph.assumed_bytes < graph.generated_bytes
        else:
            assert graph.assumed_bytes == pytest.approx(graph.generated_bytes, rel=error), graph.name


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h100-80", "a100-80", "b200"])
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in CONFIGS])
def test_train_config_compiles(workers: Callable[[str], fake_cuda.Worker], path: Path, gpu: str) -> None:
    assert lower_config(workers(gpu), path, gpu)[1] == []


@pytest.fixture(scope="module")
def lowered_case(workers: Callable[[str], fake_cuda.Worker]) -> Callable[[Case], Lowered]:
    return cache(lambda case: lower_case(workers(case.gpu), case))


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in MATRIX])
def test_options_compile(lowered_case: Callable[[Case], Lowered], case: Case) -> None:
    assert problems_of(case, lowered_case(case)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "error"),
    [(Case("plain", "full"), 0.01), (Case("float8-rowwise", "selective"), 0.06), (Case("z-loss", "selective"), 0.01)],
)
def test_planner_counts_the_bytes_of_generated_kernels(
    lowered_case: Callable[[Case], Lowered], case: Case, error: float
) -> None:
    check_bytes(lowered_case(case), error)


@pytest.mark.slow
def test_async_tensor_parallelism_fuses_all_collectives_of_a_block(lowered_case: Callable[[Case], Lowered]) -> None:
    """At a local batch size of 1, where Inductor alone fuses two of the eight."""
    graphs = lowered_case(Case("async-tensor")).code.graphs
    for graph in graphs:
        assert Counter(name for name in graph.libraries if "symm_mem" in name) == {
            "torch.ops.symm_mem.fused_all_gather_matmul.default": 2,
            "torch.ops.symm_mem.fused_matmul_reduce_scatter.default": 2,
        }
        assert graph.collectives == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
    assert [graph.backward for graph in graphs] == [False, True]


@pytest.mark.slow
def test_async_tensor_parallelism_in_float8_fuses_six_of_eight_collectives(
    lowered_case: Callable[[Case], Lowered],
) -> None:
    """In backward, each product of a sum has its own scales."""
    graphs = {graph.backward: graph for graph in lowered_case(Case("float8-async-tensor")).code.graphs}
    fused = {backward: Counter(n for n in graph.libraries if "symm_mem" in n) for backward, graph in graphs.items()}
    gathers, scatters = (
        f"torch.ops.symm_mem.{name}.default"
        for name in ("fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter")
    )
    assert fused == {False: {gathers: 2, scatters: 2}, True: {gathers: 2}}
    for graph, largest in zip((graphs[False], graphs[True]), (4, 7), strict=True):
        assert graph.collectives == {
            "all_gather_into_tensor": 2,
            "reduce_scatter_tensor": 2,
            "all_reduce": largest,  # of the largest absolute values
        }


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_cudnn_attention_compiles_for_an_h100(workers: Callable[[str], fake_cuda.Worker], mode: str) -> None:
    """cuDNN is torch's first choice on an H100."""
    assert problems(lower_case(workers("h100-80"), Case("plain", mode), fault=fake_cuda.cudnn), "cudnn") == []


@contextmanager
def flash_attention_3() -> Iterator[None]:
    """``training.attention_backend = "fa3"`` on a GPU with cuDNN."""
    fake_flash_attention.install()
    choose_attention_backend("fa3")
    try:
        with fake_cuda.cudnn():
            yield
    finally:
        choose_attention_backend("auto")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "context"])
def test_flash_attention_3_compiles_for_an_h100(workers: Callable[[str], fake_cuda.Worker], name: str) -> None:
    """It replaces the kernels of flash attention's operation, which compiled blocks call."""
    lowered = lower_case(workers("h100-80"), Case(name, "selective"), fault=flash_attention_3)
    assert problems(lowered, "flash") == []


# Each of the following tests injects a fault into a small model, of which a fault in the loss compiles the loss only.


def lower_small(
    worker: fake_cuda.Worker,
    fault: Callable[[], AbstractContextManager[Any]],
    vocab_size: int = 512,
    documents: bool = False,
) -> Lowered:
    options = {
        "data.document_mask": documents,
        "compile.enable": True,
        "training.seq_len": 64,
        "training.local_batch_size": 2,
        "training.global_batch_size": 8,
        "training.loss_chunk_tokens": 64,
    }
    lowered: Lowered = worker.run(
        lowered_step.lower, options, 2, shape={"n_layers": 1, "vocab_size": vocab_size}, fault=fault
    )
    return lowered


def in_the_loss(change: Callable[[Tensor], Tensor]) -> AbstractContextManager[Any]:
    """Apply ``change`` to the logits within the compiled loss; blocks are not compiled."""
    losses = output_loss.token_losses

    def token_losses(logits: Tensor, labels: Tensor, z_weight: float = 0.0) -> Tensor:
        return losses(change(logits), labels, z_weight)

    stack = ExitStack()
    stack.enter_context(patch.object(output_loss, "token_losses", token_losses))
    stack.enter_context(patch.object(parallelize_llama, "apply_compile", lambda *_: None))
    return stack


def unchanged(logits: Tensor) -> Tensor:
    return logits


def test_loss_alone_has_no_problem(workers: Callable[[str], fake_cuda.Worker]) -> None:
    """The reference of the faults below."""
    lowered = lower_small(workers("h100-80"), partial(in_the_loss, unchanged))
    assert problems(lowered, "flash") == []
    assert [graph.name for graph in lowered.code.graphs] == [
        "output_loss.token_losses forward",
        "output_loss.token_losses backward",
    ]


def break_graph(logits: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return logits


def test_graph_break_is_detected(workers: Callable[[str], fake_cuda.Worker]) -> None:
    with pytest.raises(AssertionError, match=r"graph_break\(\)"):
        lower_small(workers("h100-80"), partial(in_the_loss, break_graph))


def negate_by_largest(logits: Tensor) -> Tensor:
    return logits if logits.max().item() > 0 else -logits


def test_item_in_a_compiled_function_is_detected(workers: Callable[[str], fake_cuda.Worker]) -> None:
    with pytest.raises(AssertionError, match="data-dependent"):
        lower_small(workers("h100-80"), partial(in_the_loss, negate_by_largest))


def z_weight_by_microbatch() -> AbstractContextManager[Any]:
    chunk_losses, calls = output_loss.OutputLoss.chunk_losses, []

    def changing(loss: output_loss.OutputLoss, logits: Tensor, labels: Tensor) -> Tensor:
        calls.append(None)
        loss.z_weight = 1e-4 * len(calls)
        return chunk_losses(loss, logits, labels)

    stack = ExitStack()
    stack.enter_context(in_the_loss(unchanged))
    stack.enter_context(patch.object(output_loss.OutputLoss, "chunk_losses", changing))
    return stack


@pytest.mark.slow
def test_recompilation_per_microbatch_is_detected(workers: Callable[[str], fake_cuda.Worker]) -> None:
    with pytest.raises(AssertionError, match="RecompileError"):
        lower_small(workers("h100-80"), z_weight_by_microbatch)


def in_float64(logits: Tensor) -> Tensor:
    return (logits.double() * 1.1).to(logits.dtype)


def huge_blocks() -> AbstractContextManager[Any]:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    precompile = CachingAutotuner._precompile_config

    def enlarged(tuner: Any, config: Any) -> Any:
        if "R0_BLOCK" in config.kwargs:
            config.kwargs["R0_BLOCK"], config.num_warps = 8192, 1
        return precompile(tuner, config)

    stack = ExitStack()
    stack.enter_context(in_the_loss(unchanged))
    stack.enter_context(patch.object(CachingAutotuner, "_precompile_config", enlarged))
    return stack


@pytest.mark.slow
def test_spill_is_detected(workers: Callable[[str], fake_cuda.Worker]) -> None:
    found = problems(lower_small(workers("h100-80"), huge_blocks, vocab_size=8192), "flash")
    assert found
    assert [problem for problem in found if "spills" not in problem] == []


def masks_of_all_pairs() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(in_the_loss(unchanged))
    stack.enter_context(patch.object(document_mask, "compiled_create_block_mask", lambda: create_block_mask))
    return stack


@pytest.mark.slow
def test_document_mask_that_is_not_compiled_is_detected(workers: Callable[[str], fake_cuda.Worker]) -> None:
    """Beside spills, because ``flex_attention`` has no options for heads of this size."""
    found = problems(lower_small(workers("h100-80"), masks_of_all_pairs, documents=True), "flex")
    assert "the document mask is not compiled, and has all pairs of tokens" in found


def attend_by_products(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:  # noqa: ARG001
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~causal, float("-inf")).softmax(-1) @ v


def attention_by_products() -> AbstractContextManager[Any]:
    return patch.object(llama, "attend", attend_by_products)


def several_faults() -> AbstractContextManager[Any]:
    stack = ExitStack()
    for fault in (in_the_loss(in_float64), simulated_step.item_in_the_step(), attention_by_products()):
        stack.enter_context(fault)
    return stack


def test_items_float64_and_unfused_attention_are_detected(workers: Callable[[str], fake_cuda.Worker]) -> None:
    """The loss computes in float64; the item and the attention are outside of compiled functions."""
    first, second, *of_kernels, last = problems(lower_small(workers("h100-80"), several_faults), "flash")
    assert first == second == "waits for the device: item in forward"
    assert of_kernels
    assert [problem for problem in of_kernels if not problem.endswith("computes in float64")] == []
    assert last == "rank 0: attention by no fused kernel"


@pytest.mark.slow
def test_unfused_attention_in_a_compiled_block_is_detected(workers: Callable[[str], fake_cuda.Worker]) -> None:
    found = problems(lower_small(workers("h100-80"), attention_by_products), "flash")
    assert found == [
        "model.forward forward: a batched matrix product, which is attention without a fused kernel",
        "model.forward backward: a batched matrix product, which is attention without a fused kernel",
        "rank 0: attention by no fused kernel",
    ]
