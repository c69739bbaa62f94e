"""Performance options: selective checkpointing, attention backends, float8, bfloat16 optimizer states, benchmark.py."""

import itertools
import math
import os
import runpy
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_flash_attention
import pytest
import torch
import torch.distributed as dist
from emulated_float8 import emulated_float8
from forked_run import different_tensors, finish, saved_tensors
from gloo_pool import GlooPool
from parity import TINY, assert_same_run, build, config_of, full_weights, train, use_existing_process_group
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.attention import current_flash_attention_impl, register_flash_attention_impl
from torch.nn.attention._fa3 import register_flash_attention_fa3
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from torchtrain.config.schema import (
    ActivationCheckpointConfig,
    JobConfig,
    OptimizerConfig,
    TrainingConfig,
    section_of,
)
from torchtrain.cpu.attention_backward import BatchedBackwardAttention
from torchtrain.cpu.build import apply_batched_attention_backward
from torchtrain.distributed.mesh import ParallelDims, local
from torchtrain.errors import ConfigError
from torchtrain.metrics.run_description import _precision
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.models.llama.model import attend
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.parallelisms import activation_checkpoint
from torchtrain.parallelisms.activation_checkpoint import SelectiveACPolicy
from torchtrain.parallelisms.attention_backend import (
    attention_backend_name,
    check_attention_backend,
    choose_attention_backend,
)
from torchtrain.parallelisms.check import check_layout
from torchtrain.parallelisms.compile import apply_compile, set_async_tensor_parallel
from torchtrain.parallelisms.resolve import resolve_layout
from torchtrain.plugins.evaluation.generation import attention_for_generation
from torchtrain.plugins.float8.conversion import Float8
from torchtrain.plugins.float8.options import Float8Config
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
        with attention_for_generation():  # has masks, which flash does not support on GPUs
            assert torch.backends.cuda.math_sdp_enabled()
            assert torch.backends.cuda.mem_efficient_sdp_enabled()
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


def test_batched_attention_backward_can_be_compiled() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Transformer(TINY).bfloat16()
    apply_batched_attention_backward(model, "auto", torch.bfloat16)
    attention = model.layers["0"].get_submodule("attention").get_submodule("inner_attention")
    assert isinstance(attention, BatchedBackwardAttention)
    q, k, v, grad = (torch.randn(2, n, TINY.max_seq_len, TINY.head_size).bfloat16() for n in (4, 2, 2, 4))
    eager = attention_and_gradients(attention, q, k, v, grad)
    attention.compile(fullgraph=True, dynamic=False)
    with warnings.catch_warnings():  # warnings of torch.compile
        warnings.simplefilter("ignore")
        compiled = attention_and_gradients(attention, q, k, v, grad)
    assert max(relative_errors(compiled, eager)) < 2e-2


def test_float8_requires_a_gpu_of_compute_capability_8_9() -> None:
    with pytest.raises(ConfigError, match=r"float8.recipe = 'rowwise' needs a GPU of compute capability 8.9"):
        check_layout(config_of(float8={"recipe": "rowwise"}), CPU, ParallelDims(), TINY)


@pytest.mark.parametrize(
    ("training", "parallelism", "tokens"),
    [
        ({"seq_len": 1000, "local_batch_size": 1}, {}, 1000),
        ({"seq_len": 1000, "local_batch_size": 2}, {"context_parallel_degree": 2}, 1000),
        ({"seq_len": 1000, "local_batch_size": 4}, {"pipeline_parallel_degree": 2}, 1000),
    ],
)
def test_float8_requires_a_multiple_of_16_tokens(
    training: dict[str, Any], parallelism: dict[str, Any], tokens: int
) -> None:
    pytest.importorskip("torchao")
    config = config_of(training=training, parallelism=parallelism, float8={"recipe": "tensorwise"})
    config, degrees = resolve_layout(config, TINY, math.prod(parallelism.values()))
    gpu = torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=f"a multiple of 16 tokens at once, and a rank has {tokens},"):
        check_layout(config, gpu, degrees, TINY, HOPPER)
    config = replace(config, training=replace(config.training, seq_len=992))
    check_layout(config, gpu, degrees, TINY, HOPPER)


def test_float8_all_gather_is_rejected_where_it_is_not_supported() -> None:
    pytest.importorskip("torchao")
    gpu, degrees = torch.device("cuda", 0), ParallelDims(shard=2, context=3)
    config = config_of(training={"seq_len": 96}, float8={"recipe": "tensorwise"})
    offloaded = replace(config, training=replace(config.training, enable_cpu_offload=True))
    plain = Float8Config(recipe="tensorwise", enable_fsdp_float8_all_gather=False)
    with pytest.raises(ConfigError, match=r"6 shards, which .*, and attention.wq has 32; .*all_gather = false"):
        check_layout(config, gpu, degrees, TINY, HOPPER)
    with pytest.raises(ConfigError, match=r"enable_cpu_offload = true in CPU memory.*all_gather = false"):
        check_layout(offloaded, gpu, ParallelDims(shard=2), TINY, HOPPER)
    check_layout(config, gpu, ParallelDims(replicate=3, shard=2), TINY, HOPPER)
    check_layout(offloaded, gpu, ParallelDims(replicate=3), TINY, HOPPER)
    for one in (config, offloaded):
        check_layout(replace(one, plugins={"float8": plain}), gpu, degrees, TINY, HOPPER)


def train_in_float8(config: JobConfig, shape: TransformerConfig = TINY) -> Any:
    """Train with blocks that compute in emulated float8."""
    with emulated_float8():
        return train(config, shape)


@pytest.mark.parametrize(
    ("ranks", "recipe", "changes", "optimizer"),
    [
        (1, "tensorwise", {}, {}),
        (2, "tensorwise", {}, {}),
        (2, "rowwise", {}, {}),
        (2, "tensorwise", {"qk_norm": True, "qkv_bias": True}, {"name": "muon"}),
    ],
)
def test_float8_keeps_float32_master_weights_and_is_close_to_float32(
    gloo: GlooPool, ranks: int, recipe: str, changes: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    pytest.importorskip("torchao")
    shape = replace(TINY, n_layers=2, **changes)
    config = config_of(training={"local_batch_size": 8 // ranks}, float8={"recipe": recipe}, optimizer=optimizer)
    [reference] = gloo.run(1, train, config_of(training={"local_batch_size": 8}, optimizer=optimizer), shape)
    for curve in gloo.run(ranks, train_in_float8, config, shape):
        assert_same_run([curve], reference, rel=0.1)
        assert curve.losses != reference.losses
        assert [name for name, tensor in curve.last.items() if tensor.dtype != torch.float32] == []


def test_float8_checkpoint_has_plain_tensors_and_resumes_bitwise(tmp_path: Path) -> None:
    if not find_spec("torchao"):
        pytest.skip("needs torchao")
    options = ("--float8.recipe", "tensorwise", "--ema.enable", "--huggingface.export", "--training.steps", "4")
    finish(tmp_path, *options, hook=emulated_float8)
    whole = saved_tensors(tmp_path, 4)
    assert {type(tensor) for tensor in whole.values()} == {torch.Tensor}
    exported = load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(exported, whole["model.layers.0.feed_forward.w3.weight"].bfloat16())
    shutil.rmtree(tmp_path / "checkpoint" / "step-4")
    finish(tmp_path, *options, hook=emulated_float8)
    assert different_tensors(saved_tensors(tmp_path, 4), whole) == []


def scales_with_averaged_weights(config: JobConfig) -> list[float]:
    """Return, for each float8 weight of the model with averaged weights, its scale times its largest element."""
    with use_existing_process_group(TINY), emulated_float8():
        trainer = Trainer(config)
    assert trainer.ema is not None
    for average in trainer.ema.averages.values():
        local(average).mul_(2)
    found = []
    with trainer.averaged_weights():
        for module in trainer.model.model_parts[0].modules():
            held: Any = getattr(getattr(module, "weight", None), "_local_tensor", None)
            if hasattr(held, "_precomputed_scale"):
                largest = held._tensor.abs().max()
                dist.all_reduce(largest, op=dist.ReduceOp.MAX)
                found.append((largest * held._precomputed_scale).item())
    trainer.dataloader.close()
    trainer.checkpointer.close()
    return found


def test_averaged_weights_have_their_own_float8_scales(gloo: GlooPool, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    job, ema = {"dump_folder": str(tmp_path)}, {"enable": True}
    config = config_of(job=job, data={"prefetch": 0}, ema=ema, float8={"recipe": "tensorwise"})
    largest = torch.finfo(torch.float8_e4m3fn).max
    for found in gloo.run(2, scales_with_averaged_weights, config):
        assert found == pytest.approx([largest] * 7 * TINY.n_layers)


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


@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile
def test_selective_checkpointing_saves_attention_that_is_compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert matrix_products_of_a_step(True, monkeypatch) == matrix_products_of_a_step(False, monkeypatch) - 2
    assert torch.ops.higher_order.flex_attention in activation_checkpoint.OPS_TO_SAVE  # for a compiled block


@pytest.mark.parametrize(("recipe", "granularity"), [("tensorwise", "TENSORWISE"), ("rowwise", "AXISWISE")])
def test_float8_scaling_granularity_is_that_of_the_recipe(recipe: Any, granularity: str) -> None:
    pytest.importorskip("torchao")
    with torch.device("meta"):
        model = Transformer(TINY)
    Float8(Float8Config(recipe=recipe), emulate=True).convert(model, shards=1)
    linear: Any = model.layers["0"].get_submodule("attention.wq")
    assert linear.config.cast_config_weight.scaling_granularity.name == granularity


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_small_layers_that_are_filtered_are_those_of_torchao(recipe: Any) -> None:
    rule = pytest.importorskip("torchao.float8.float8_linear_utils")._auto_filter_for_recipe(recipe, filter_fqns=[])
    sizes = [16 * n for n in (1, 64, 65, 128, 129, 256, 257, 896)]
    conversion = Float8(Float8Config(recipe=recipe, filter_small_layers=True))
    with torch.device("meta"):
        for outputs, inputs in itertools.product(sizes, sizes):
            layer = torch.nn.Linear(inputs, outputs, bias=False)
            assert conversion.is_converted(outputs, inputs) == rule(layer, ""), (outputs, inputs)
        model = Transformer(replace(TINY, dim=2048, n_heads=16, n_kv_heads=4, ffn_dim=8192, n_layers=1))
    conversion.convert(model, shards=1)
    converted = {name for name, module in model.layers["0"].named_modules() if type(module).__name__ == "Float8Linear"}
    small = {"attention.wk", "attention.wv"} | ({"attention.wq", "attention.wo"} if recipe == "rowwise" else set())
    of_block = {name for name, module in model.layers["0"].named_modules() if isinstance(module, torch.nn.Linear)}
    assert converted == of_block - small - ({"feed_forward.w2"} if recipe == "rowwise" else set())


def test_filtered_float8_layers_are_rejected_with_tensor_parallelism() -> None:
    pytest.importorskip("torchao")
    shape = replace(TINY, dim=2048, n_heads=16, n_kv_heads=4, ffn_dim=8192, n_layers=1)
    for recipe, tensor, rejected in (("tensorwise", 2, True), ("tensorwise", 1, False), ("rowwise", 2, False)):
        config = config_of(float8={"recipe": recipe, "filter_small_layers": True})
        check = partial(
            Float8(section_of(config, Float8Config)).check, config, ParallelDims(tensor=tensor), shape, 64, (9, 0)
        )
        if not rejected:
            check()
            continue
        with pytest.raises(ConfigError, match=r"filter_small_layers = true leaves out some layers .*; set it to false"):
            check()


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
