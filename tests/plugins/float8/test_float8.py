"""Linear layers in float8: which layers are converted, what is computed, and what is saved."""

import itertools
import math
import shutil
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emulated_float8 import emulated_float8
from forked_run import different_tensors, finish, saved_tensors
from gloo_pool import GlooPool
from parity import TINY, assert_same_run, config_of, train, use_existing_process_group
from safetensors.torch import load_file
from test_speed_options import CPU, HOPPER
from test_user_errors import check as check_run

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.distributed.mesh import ParallelDims, local
from torchtrain.errors import ConfigError
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.parallelisms.check import check_layout
from torchtrain.parallelisms.resolve import resolve_layout
from torchtrain.plugins.float8.conversion import Float8
from torchtrain.plugins.float8.options import Float8Config
from torchtrain.trainer import Trainer


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
        pytest.param(1, "tensorwise", {}, {}, marks=pytest.mark.slow),
        pytest.param(2, "tensorwise", {}, {}, marks=pytest.mark.slow),
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
    options = ("--float8.recipe", "tensorwise", "--ema.enable", "--huggingface.export", "--training.steps", "2")
    options += ("--checkpoint.interval", "1")
    finish(tmp_path, *options, hook=emulated_float8)
    whole = saved_tensors(tmp_path, 2)
    assert {type(tensor) for tensor in whole.values()} == {torch.Tensor}
    exported = load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(exported, whole["model.layers.0.feed_forward.w3.weight"].bfloat16())
    shutil.rmtree(tmp_path / "checkpoint" / "step-2")
    finish(tmp_path, *options, hook=emulated_float8)
    assert different_tensors(saved_tensors(tmp_path, 2), whole) == []


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


def test_check_rejects_float8_on_a_cpu(tmp_path: Path) -> None:
    found = check_run(f"--job.dump_folder={tmp_path}/run", "--job.device=cpu", "--float8.recipe=tensorwise")
    assert (found.returncode, "Traceback" in found.stderr) == (2, False), found.stderr
    assert "this is a CPU" in found.stderr.partition("error: ")[2]
