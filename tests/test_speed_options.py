"""Performance options: selective checkpointing, attention backends, bfloat16 optimizer states, benchmark.py."""

import os
import runpy
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_flash_attention
import pytest
import torch
from gloo_pool import GlooPool
from parity import TINY, build, config_of, full_weights
from torch import Tensor, nn
from torch.nn.attention import current_flash_attention_impl, register_flash_attention_impl
from torch.nn.attention._fa3 import register_flash_attention_fa3
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from torchtrain.config.schema import JobConfig, TrainingConfig
from torchtrain.cpu.attention_backward import BatchedBackwardAttention
from torchtrain.cpu.build import apply_batched_attention_backward
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.errors import ConfigError
from torchtrain.metrics.run_description import _precision
from torchtrain.models.llama import Transformer
from torchtrain.models.llama.model import attend
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.optimizers.options import OptimizerConfig
from torchtrain.parallelisms import activation_checkpoint
from torchtrain.parallelisms.activation_checkpoint import SelectiveACPolicy
from torchtrain.parallelisms.attention_backend import (
    attention_backend_name,
    check_attention_backend,
    choose_attention_backend,
)
from torchtrain.parallelisms.check import check_layout
from torchtrain.parallelisms.compile import apply_compile, set_async_tensor_parallel
from torchtrain.parallelisms.options import ActivationCheckpointConfig
from torchtrain.trainer import Trainer

CPU = torch.device("cpu")
BFLOAT16 = {"mixed_precision_param": "bfloat16"}
HOPPER = (9, 0)  # a compute capability
ROOT = Path(__file__).parent.parent


def test_selective_policy_saves_three_matrix_products_per_block_and_attention() -> None:
    class Context:
        is_recompute = False

    policy: Any = SelectiveACPolicy(7)
    matmul = torch.ops.aten.mm.default
    kept = [policy(Context(), matmul) is CheckpointPolicy.MUST_SAVE for _ in range(7)]
    assert kept == [True, False, True, False, True, False, False]
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert policy(Context(), attention) is CheckpointPolicy.MUST_SAVE
    assert policy(Context(), torch.ops.aten.silu.default) is CheckpointPolicy.PREFER_RECOMPUTE


def saved_bytes(mode: str) -> int:
    """Return the bytes that a forward with ``mode`` saves for backward, without parameters."""
    config = config_of(activation_checkpoint={"mode": mode})
    (model,) = build(config).model_parts
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.zeros(2, TINY.max_seq_len, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens)
    return sum(kept.values())


def test_full_checkpointing_saves_less_than_a_third_of_the_bytes(gloo: GlooPool) -> None:
    none, full = (gloo.run(1, saved_bytes, mode)[0] for mode in ("none", "full"))
    assert full < none / 3


def test_memory_budget_requires_compile() -> None:
    with pytest.raises(ConfigError, match=r"compile.enable = true"):
        Trainer(config_of(activation_checkpoint={"mode": "memory_budget"}))


def test_attention_backend_is_selected_and_logged() -> None:
    assert attention_backend_name("auto", TINY, torch.float32, CPU) == "flash"
    gpu = torch.device("cuda")
    assert attention_backend_name("auto", TINY, torch.bfloat16, gpu, documents=True) == "flex"
    batched = "bfloat16; attention: flash, backward in batched products"
    plain = config_of(training=BFLOAT16)
    assert _precision(plain, TINY, CPU, ParallelDims()) == batched
    assert _precision(plain, TINY, CPU, ParallelDims(context=2)) == "bfloat16; attention: flash"
    masked = replace(plain, data=replace(plain.data, document_mask=True))
    assert _precision(masked, TINY, CPU, ParallelDims()) == "bfloat16; attention: flash"
    try:
        choose_attention_backend("math")
        assert attention_backend_name("math", TINY, torch.bfloat16, CPU) == "math"
        choose_attention_backend("efficient")  # a CPU has no kernel of it
        with pytest.raises(ConfigError, match=r"'efficient' has no kernel here for 4 heads of 8 .* 2 key/value heads"):
            attention_backend_name("efficient", TINY, torch.bfloat16, CPU)
    finally:
        choose_attention_backend("auto")
    for is_enabled in ("flash", "cudnn", "mem_efficient", "math"):
        assert getattr(torch.backends.cuda, f"{is_enabled}_sdp_enabled")(), is_enabled
    assert attention_backend_name("auto", TINY, torch.float32, CPU) == "flash"
    with pytest.raises(ConfigError, match="attention_backend = 'cudnn' has no deterministic backward"):
        JobConfig(training=TrainingConfig(attention_backend="cudnn", deterministic=True))
    with pytest.raises(ConfigError, match="'cudnn' needs a GPU; on CPU there are flash, math and auto"):
        check_attention_backend("cudnn", CPU)
    check_attention_backend("auto", CPU)


def test_flash_attention_3_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # as if it was not installed
    with pytest.raises(ConfigError, match=r"'fa3' needs the package flash_attn_3, .*in the folder hopper"):
        choose_attention_backend("fa3")
    assert current_flash_attention_impl() is None


def test_flash_attention_3_needs_a_build_with_backward() -> None:
    def register() -> None:
        raise RuntimeError("Module 'flash_attn_interface' does not expose FA3 backward kernels")

    register_flash_attention_impl("FA3", register_fn=register)
    try:
        with pytest.raises(ConfigError, match="does not expose FA3 backward kernels; install it from"):
            choose_attention_backend("fa3")
    finally:
        register_flash_attention_impl("FA3", register_fn=register_flash_attention_fa3)


def test_flash_attention_3_is_activated_until_another_backend_is_chosen() -> None:
    fake_flash_attention.install()
    try:
        choose_attention_backend("fa3")
        assert current_flash_attention_impl() == "FA3"
        assert torch.backends.cuda.flash_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        choose_attention_backend("flash")  # a later stage of the run
        assert current_flash_attention_impl() is None
        assert not torch.backends.cuda.math_sdp_enabled()
        assert not torch.backends.cuda.mem_efficient_sdp_enabled()
    finally:
        choose_attention_backend("auto")


@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attention_3_is_deterministic_if_the_run_is(deterministic: bool) -> None:
    fake_flash_attention.install()
    fake_flash_attention.calls.clear()
    torch.use_deterministic_algorithms(deterministic)
    try:
        choose_attention_backend("fa3")
        q, k = (torch.ones(1, heads, 8, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2))
        with fake_flash_attention.on_cpus():
            torch.ops.aten._scaled_dot_product_flash_attention(q, k, k, is_causal=True)[0].sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
        choose_attention_backend("auto")
    assert list(fake_flash_attention.calls) == ["forward", "deterministic backward" if deterministic else "backward"]


@pytest.mark.parametrize(
    ("sections", "shape", "capability", "message"),
    [
        ({}, {}, (8, 0), r"needs a GPU of compute capability 9.0 \(Hopper\), and this one has 8.0; set 'auto'"),
        ({}, {}, (10, 0), "and this one has 10.0"),
        ({"training": {"mixed_precision_param": "float32"}}, {}, HOPPER, "no kernel for float32"),
        ({"data": {"document_mask": True}}, {}, HOPPER, "no kernel for data.document_mask = true"),
        ({}, {"head_dim": 20}, HOPPER, "heads of a multiple of 8 channels, at most 256, not 20"),
        ({}, {"head_dim": 264}, HOPPER, "heads of a multiple of 8 channels, at most 256, not 264"),
        ({"training": {"deterministic": True}}, {"head_dim": 200}, HOPPER, "no deterministic backward .* have 200"),
    ],
)
def test_flash_attention_3_is_rejected_where_it_has_no_kernel(
    sections: dict[str, Any], shape: dict[str, Any], capability: tuple[int, int], message: str
) -> None:
    def check(sections: dict[str, Any], shape: dict[str, Any], capability: tuple[int, int]) -> None:
        training = {"attention_backend": "fa3", **BFLOAT16, **sections.get("training", {})}
        config, gpu = config_of(**{**sections, "training": training}), torch.device("cuda", 0)
        check_layout(config, gpu, ParallelDims(), replace(TINY, **shape), capability)

    check({}, {}, HOPPER)
    with pytest.raises(ConfigError, match=message):
        check(sections, shape, capability)


def attention_and_gradients(attention: Any, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def relative_errors(results: list[Tensor], references: list[Tensor]) -> list[float]:
    return [((a - b).norm() / b.norm()).item() for a, b in zip(results, references, strict=True)]


@pytest.mark.parametrize(("kv_heads", "seq"), [(4, 300), (2, 300), (1, 7)])
def test_batched_attention_backward_is_as_accurate_as_torch(kv_heads: int, seq: int) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, seq, n, 32).transpose(1, 2) for n in (4, kv_heads, kv_heads, 4))
    q, k = 3 * q, 3 * k  # sharp softmax: each query attends to a few keys
    plain, batched = partial(attend, mask=None), BatchedBackwardAttention()
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [x.to(dtype) for x in (q, k, v, grad)]
        exact = attention_and_gradients(plain, *(x.double() for x in inputs))
        errors = relative_errors(attention_and_gradients(batched, *inputs), exact)
        torch_errors = relative_errors(attention_and_gradients(plain, *inputs), exact)
        assert errors[0] == torch_errors[0]  # the forward kernel is the same
        assert max(errors) < 1.5 * max(torch_errors)


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.slow)])
def test_batched_attention_backward_can_be_compiled(backend: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Transformer(TINY).bfloat16()
    apply_batched_attention_backward(model, "auto", torch.bfloat16)
    attention = model.layers["0"].get_submodule("attention").get_submodule("inner_attention")
    assert isinstance(attention, BatchedBackwardAttention)
    q, k, v, grad = (torch.randn(2, n, TINY.max_seq_len, TINY.head_size).bfloat16() for n in (4, 2, 2, 4))
    eager = attention_and_gradients(attention, q, k, v, grad)
    attention.compile(fullgraph=True, dynamic=False, backend=backend)
    with warnings.catch_warnings():  # warnings of torch.compile
        warnings.simplefilter("ignore")
        compiled = attention_and_gradients(attention, q, k, v, grad)
    assert max(relative_errors(compiled, eager)) < 2e-2


def states_after_steps(state_dtype: str) -> Any:
    parts = build(config_of()).model_parts
    optimizer = build_optimizer(parts, OptimizerConfig(lr=1e-2, state_dtype=state_dtype))  # type: ignore[arg-type]
    starts = {parameter: parameter.detach().clone() for part in parts for parameter in part.parameters()}
    for step in range(5):
        for parameter, start in starts.items():
            parameter.grad = torch.sin(start * 100 + step)
        optimizer.step(torch.zeros(()))
    before = full_weights(parts)
    optimizer.step(torch.ones(()))  # skipped
    assert [name for name, tensor in full_weights(parts).items() if not torch.equal(tensor, before[name])] == []
    states = optimizer.state_dict()
    dtypes = {
        entry: {state.dtype for name, state in states.items() if name.endswith(f".{entry}")}
        for entry in ("exp_avg", "exp_avg_sq")
    }
    return full_weights(parts), dtypes


def test_bfloat16_optimizer_states_make_nearly_the_same_updates(gloo: GlooPool) -> None:
    [(exact, dtypes)] = gloo.run(1, states_after_steps, "float32")
    assert dtypes == {"exp_avg": {torch.float32}, "exp_avg_sq": {torch.float32}}
    [(weights, dtypes)] = gloo.run(1, states_after_steps, "bfloat16")
    assert dtypes == {"exp_avg": {torch.bfloat16}, "exp_avg_sq": {torch.bfloat16}}
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, exact[name])] != []
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, exact[name], rtol=0, atol=1e-3)  # five steps of 1e-2


def test_benchmark_has_the_environment_of_the_launcher(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nenv\n")
    python.chmod(0o755)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    launched = subprocess.run(
        [ROOT / "run_llama_train.sh"],
        env={**plain, "PYTHON": str(python), "NGPU": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    environment = dict(line.split("=", 1) for line in launched.stdout.splitlines() if "=" in line)
    benchmark = runpy.run_path(str(ROOT / "scripts/benchmarks/benchmark.py"))
    malloc = {name: value for name, value in environment.items() if name.startswith("MALLOC_")}
    assert malloc == (benchmark["LAUNCHER_ENVIRONMENT"] if not torch.cuda.is_available() else {})


def test_benchmark_adds_the_cpu_time_of_all_ranks() -> None:
    benchmark = runpy.run_path(str(ROOT / "scripts/benchmarks/benchmark.py"))
    entrant, result = benchmark["Entrant"], benchmark["Result"]
    group = benchmark["Group"]("ranks", (entrant("ours"), entrant("ours", ranks=2)))
    row = benchmark["row"](group, group.entrants[1], result([1.0], [1.0]), result([2.0], [2.0]))
    assert (row["first_is_faster_by"], row["first_takes_less_cpu_by"]) == (0.5, 1.0)


def matrix_products_of_a_step(keep: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Count the matrix products of a step in which attention is compiled alone, like flex_attention on CUDA."""
    if not keep:
        kept = activation_checkpoint.OPS_TO_SAVE - {activation_checkpoint.inductor_compiled_code}
        monkeypatch.setattr(activation_checkpoint, "OPS_TO_SAVE", kept)
    attention = torch.compile(lambda q, k: (q @ k.T).softmax(-1) @ k, options={"wrap_inductor_compiled_regions": True})
    x, weight = (torch.randn(16, 16, requires_grad=True) for _ in range(2))

    def block(x: torch.Tensor) -> torch.Tensor:
        q = (x @ weight).cos()
        return attention(q, 2 * q).sin()

    contexts = partial(activation_checkpoint._selective_contexts, 7)
    checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::mm")


@pytest.mark.slow  # Inductor compiles it twice
@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile
def test_selective_checkpointing_saves_attention_that_is_compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert matrix_products_of_a_step(True, monkeypatch) == matrix_products_of_a_step(False, monkeypatch) - 2


def test_selective_checkpointing_keeps_compiled_attention() -> None:
    """The one that is compiled alone, and that of a compiled block."""
    compiled = {activation_checkpoint.inductor_compiled_code, torch.ops.higher_order.flex_attention}
    assert compiled <= set(activation_checkpoint.OPS_TO_SAVE)


def test_memory_budget_is_set_in_torch_compile() -> None:
    from torch._functorch import config

    model: Any = SimpleNamespace(layers={})
    with config.patch(activation_memory_budget=1.0):
        apply_compile(model, ActivationCheckpointConfig(mode="memory_budget", memory_budget=0.3))
        assert config.activation_memory_budget == 0.3
        apply_compile(model, ActivationCheckpointConfig())  # another stage of the same process
        assert config.activation_memory_budget == 1.0


def test_async_tensor_parallelism_of_a_stage_ends_with_it() -> None:
    from torch._inductor import config

    with config.patch(_micro_pipeline_tp=True, post_grad_custom_pre_pass=lambda _: None):
        set_async_tensor_parallel(None)
        assert not config._micro_pipeline_tp
        assert config.post_grad_custom_pre_pass is None
