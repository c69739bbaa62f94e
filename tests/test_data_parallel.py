"""FSDP and HSDP train like a single rank, with any activation checkpointing and gradient accumulation."""

import math
from collections.abc import Callable
from dataclasses import astuple, replace
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from gloo_pool import GlooPool
from parity import TINY, Curve, assert_same_run, build, config_of, full_weights, global_batch, train
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtrain.config.schema import JobConfig
from torchtrain.cpu.build import build_cpu_model, use_cpu_kernels
from torchtrain.distributed.gradient_reducer import NoReduceScatter
from torchtrain.distributed.mesh import Mesh, ParallelDims, resolve_parallel_dims
from torchtrain.errors import ConfigError
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.models.model_config import flavor_config
from torchtrain.optimizers.clipping import clip_grad_norm
from torchtrain.optimizers.groups import build_optimizer
from torchtrain.optimizers.options import OptimizerConfig
from torchtrain.parallelisms.microbatches import Microbatch
from torchtrain.parallelisms.options import ActivationCheckpointConfig, ParallelismConfig
from torchtrain.parallelisms.parallel_model import ParallelModel, build_parallel_model
from torchtrain.parallelisms.parallelize_llama import parallelize_llama
from torchtrain.parallelisms.pipeline_llama import build_stages
from torchtrain.parallelisms.pipeline_schedule import resolve_layers_per_stage
from torchtrain.parallelisms.reduce_scatter import AllToAllReduceScatter
from torchtrain.trainer import initialize, use_deterministic_kernels

MODEL = replace(TINY, n_layers=3)  # a first, a middle and a last block


@pytest.fixture(scope="module")
def reference(gloo: GlooPool) -> Curve:
    """One rank, the full batch in one microbatch, no activation checkpointing."""
    return gloo.run(1, train, config_of(training={"local_batch_size": 8}), MODEL)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("ranks", "local_batch_size", "parallelism"),
    [
        (1, 1, {}),
        (1, 2, {"fsdp_reshard_after_forward": "always"}),  # one FSDP group per block, as on one GPU
        pytest.param(1, 2, {"fsdp_reshard_after_forward": "never"}, marks=pytest.mark.slow),
        pytest.param(2, 1, {}, marks=pytest.mark.slow),
        pytest.param(2, 2, {}, marks=pytest.mark.slow),
        pytest.param(4, 1, {}, marks=pytest.mark.slow),
        pytest.param(4, 2, {}, marks=pytest.mark.slow),  # one microbatch
        pytest.param(4, 1, {"data_parallel_replicate_degree": 2}, marks=pytest.mark.slow),
        pytest.param(4, 2, {"data_parallel_replicate_degree": 2}, marks=pytest.mark.slow),
        pytest.param(2, 1, {"data_parallel_replicate_degree": 2}, marks=pytest.mark.slow),
        (2, 2, {"fsdp_reshard_after_forward": "always"}),
        (2, 2, {"fsdp_reshard_after_forward": "never"}),
    ],
)
def test_data_parallel_run_equals_one_rank_for_any_accumulation(
    gloo: GlooPool, reference: Curve, ranks: int, local_batch_size: int, parallelism: dict[str, Any]
) -> None:
    config = config_of(training={"local_batch_size": local_batch_size}, parallelism=parallelism)
    assert_same_run(gloo.run(ranks, train, config, MODEL), reference)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "checkpoint",
    [{"mode": "full"}, {"mode": "selective"}, {"mode": "selective", "selective_option": "2"}],
    ids=lambda c: "-".join(c.values()),
)
def test_activation_checkpointing_does_not_change_the_run(
    gloo: GlooPool, reference: Curve, ranks: int, checkpoint: dict[str, str]
) -> None:
    assert_same_run(gloo.run(ranks, train, config_of(activation_checkpoint=checkpoint), MODEL), reference)


def test_run_learns_and_final_weights_agree(gloo: GlooPool, reference: Curve) -> None:
    # Not bitwise: AdamW divides a gradient by its size, which amplifies the rounding of tiny gradients.
    assert max(reference.losses) - min(reference.losses) > 1e-3
    for curve in gloo.run(2, train, config_of(), MODEL):
        for name, weights in reference.last.items():
            torch.testing.assert_close(curve.last[name], weights, rtol=1e-3, atol=1e-4)
            assert not torch.equal(weights, reference.first[name])


def _first_weights(config: JobConfig) -> dict[str, torch.Tensor]:
    return full_weights(build(config, MODEL).model_parts)


def test_another_seed_gives_other_weights(gloo: GlooPool, reference: Curve) -> None:
    (other,) = gloo.run(1, _first_weights, config_of(training={"seed": 6}))
    assert not torch.equal(other["output.weight"], reference.first["output.weight"])


def _saved_activations(config: JobConfig) -> int:
    """Bytes that a forward of the blocks saves for backward."""
    (model,) = build(config).model_parts
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(8, 16, dtype=torch.long))
    return sum(saved.values())


def test_activation_checkpointing_saves_fewer_activations(gloo: GlooPool) -> None:
    modes: list[dict[str, Any]] = [{"mode": "none"}, {"mode": "selective", "selective_option": "2"}, {"mode": "full"}]
    none, every_other, full = (
        gloo.run(1, _saved_activations, config_of(activation_checkpoint=mode))[0] for mode in modes
    )
    assert full < every_other < none


def _reshard_settings(config: JobConfig) -> list[bool]:
    (model,) = build(config).model_parts
    model(torch.zeros(1, 16, dtype=torch.long))
    # After a forward, a resharded block has DTensors; an unsharded block has plain tensors.
    return [isinstance(block.get_parameter("ffn_norm.weight"), DTensor) for block in model.layers.values()]


@pytest.mark.parametrize(
    ("option", "resharded"),
    [
        ("default", [True, True, True, False]),
        pytest.param("always", [True] * 4, marks=pytest.mark.slow),
        ("never", [False] * 4),
    ],
)
def test_blocks_that_are_resharded_after_forward(gloo: GlooPool, option: str, resharded: list[bool]) -> None:
    config = config_of(parallelism={"fsdp_reshard_after_forward": option})
    assert gloo.run(2, _reshard_settings, config)[0] == resharded


def _reduces_in_place(build_model: Any) -> bool:
    device = torch.device("cpu")
    with patch.object(NoReduceScatter, "allocate", autospec=True, side_effect=NoReduceScatter.allocate) as shared:
        (model,) = build_model(TINY, Mesh(device, ParallelDims()), device, config_of()).model_parts
        initialize([model], 0, device)
        model(torch.zeros(1, 16, dtype=torch.long)).sum().backward()
    return bool(shared.called)


def test_one_rank_reduces_in_place(gloo: GlooPool) -> None:
    assert gloo.run(1, _reduces_in_place, build_cpu_model) == [True]
    assert gloo.run(1, _reduces_in_place, build_parallel_model) == [True]


def _norm_of_a_large_gradient() -> tuple[float, float]:
    parallel_model = build(config_of(), replace(TINY, vocab_size=5000, n_layers=1))
    (model,) = parallel_model.model_parts
    generator = torch.Generator().manual_seed(0)
    squares = 0.0
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        gradient = torch.randn(parameter.shape, generator=generator)
        squares += gradient.double().square().sum().item()
        parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
    return clip_grad_norm([model], 1.0, parallel_model.reducer).item(), math.sqrt(squares)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_norm_of_a_large_gradient_is_exact_on_any_number_of_ranks(gloo: GlooPool, ranks: int) -> None:
    for norm, exact in gloo.run(ranks, _norm_of_a_large_gradient):
        assert norm == pytest.approx(exact, rel=2e-7)


def _weights_after_updates(implementation: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    (model,) = build(config_of()).model_parts
    plain = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in full_weights([model]).items()}
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, implementation=implementation)
    optimizer = build_optimizer([model], config)
    use_cpu_kernels(optimizer)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in plain.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in plain.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for step in range(3):
        for name, parameter in model.named_parameters():
            gradient = torch.sin(plain[name].detach() * 100 + step)
            plain[name].grad = gradient
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        optimizer.step(torch.zeros(()))
        reference.step()
    return full_weights([model]), {name: tensor.detach() for name, tensor in plain.items()}


@pytest.mark.parametrize("implementation", ["fused", pytest.param("foreach", marks=pytest.mark.slow), "for-loop"])
def test_sharded_updates_equal_those_of_torch_adamw(gloo: GlooPool, implementation: str) -> None:
    for weights, reference in gloo.run(2, _weights_after_updates, implementation):
        torch.testing.assert_close(weights, reference, rtol=1e-5, atol=1e-6)  # three steps of size 1e-2


def _fsdp_groups(parallelism: dict[str, Any]) -> int:
    (model,) = build(config_of(parallelism=parallelism)).model_parts
    return sum(isinstance(module, FSDPModule) for module in model.modules())


@pytest.mark.parametrize(
    ("ranks", "reshard", "groups"),
    [
        (1, "default", 1),
        (1, "always", 2 + TINY.n_layers),
        pytest.param(1, "never", 2 + TINY.n_layers, marks=pytest.mark.slow),
        (2, "default", 2 + TINY.n_layers),
    ],
)
def test_one_cpu_rank_has_one_fsdp_group_by_default(gloo: GlooPool, ranks: int, reshard: str, groups: int) -> None:
    assert gloo.run(ranks, _fsdp_groups, {"fsdp_reshard_after_forward": reshard})[0] == groups


@pytest.mark.parametrize(
    ("flavor", "degrees"),
    [
        pytest.param("70B", ParallelDims(shard=512), marks=pytest.mark.slow),
        pytest.param("405B", ParallelDims(replicate=2, shard=256), marks=pytest.mark.slow),
        ("405B", ParallelDims(replicate=2, shard=16, context=2, tensor=8)),
    ],
)
def test_large_models_are_sharded_over_hundreds_of_ranks_on_meta(flavor: str, degrees: ParallelDims) -> None:
    world = math.prod(astuple(degrees))
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        config = JobConfig(activation_checkpoint=ActivationCheckpointConfig(mode="full"))
        mesh = Mesh(torch.device("cpu"), degrees)
        with torch.device("meta"):
            model = Transformer(replace(flavor_config("llama3", flavor), max_seq_len=8192))
        parallelize_llama(model, mesh, config)
        assert [block for block in model.layers.values() if not isinstance(block, FSDPModule)] == []
        parameters = list(model.parameters())
        total = sum(parameter.numel() for parameter in parameters)
        assert total == {"70B": 70_553_706_496, "405B": 405_853_388_800}[flavor]
        assert [p for p in parameters if not (isinstance(p, DTensor) and p.is_meta)] == []
        local = sum(parameter.to_local().numel() for parameter in parameters if isinstance(parameter, DTensor))
        shards = degrees.fsdp * degrees.tensor
        # The vocabulary is not split evenly, and all ranks of a tensor-parallel group have the norms.
        assert local == pytest.approx(total / shards, rel=1e-3)
        with pytest.raises(RuntimeError, match=r"after model.to_empty\(device=...\) and init_weights"):
            build_optimizer([model], config.optimizer)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("parallelism", "world"),
    [
        (ParallelismConfig(data_parallel_replicate_degree=3), 4),
        (ParallelismConfig(data_parallel_shard_degree=3), 4),
        (ParallelismConfig(data_parallel_replicate_degree=2, data_parallel_shard_degree=4), 4),
    ],
)
def test_degrees_must_multiply_to_the_number_of_ranks(parallelism: ParallelismConfig, world: int) -> None:
    with pytest.raises(ConfigError, match=r"must be the number of ranks, 4"):
        resolve_parallel_dims(parallelism, world)


@pytest.mark.parametrize("rank", [*(pytest.param(rank, marks=pytest.mark.slow) for rank in (0, 300)), 1023])
def test_largest_model_is_sharded_over_all_axes(rank: int) -> None:
    degrees = ParallelDims(pipeline=8, replicate=2, shard=4, context=2, tensor=8)
    dist.init_process_group("fake", rank=rank, world_size=1024, store=FakeStore())
    try:
        mesh = Mesh(torch.device("cpu"), degrees)
        parallelism = ParallelismConfig(pipeline_parallel_degree=8, pipeline_parallel_schedule="Interleaved1F1B")
        model = replace(flavor_config("llama3", "405B"), max_seq_len=8192)
        parallelism = replace(
            parallelism, pipeline_parallel_layers_per_stage=resolve_layers_per_stage(model, parallelism)
        )
        config = JobConfig(parallelism=parallelism)
        stages = build_stages(model, mesh, parallelism)
        stage = rank // 128
        assert list(stages) == [stage, stage + 8]
        bounds = list(accumulate(parallelism.pipeline_parallel_layers_per_stage, initial=0))
        for number, part in stages.items():
            assert list(part.layers) == [str(i) for i in range(bounds[number], bounds[number + 1])]
            assert (part.tok_embeddings is not None) == (number == 0)
            assert (part.output is not None) == (number == 15)
            parallelize_llama(part, mesh, config)
            parameters = list(part.parameters())
            assert [p for p in parameters if not (isinstance(p, DTensor) and p.is_meta)] == []
            local = sum(parameter.to_local().numel() for parameter in parameters if isinstance(parameter, DTensor))
            assert local == pytest.approx(sum(p.numel() for p in parameters) / (4 * 2 * 8), rel=1e-3)
    finally:
        dist.destroy_process_group()


def _norms_around_clipping() -> tuple[int, list[float]]:
    parallel_model = build(config_of())
    (model,) = parallel_model.model_parts
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    elements = sum(parameter.numel() for parameter in model.parameters())
    return elements, [clip_grad_norm([model], limit, parallel_model.reducer).item() for limit in (3.0, 5.0, math.inf)]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_gradient_norm_is_clipped_and_never_scaled_up(gloo: GlooPool, ranks: int) -> None:
    for elements, norms in gloo.run(ranks, _norms_around_clipping):
        assert norms == pytest.approx([math.sqrt(elements), 3.0, 3.0], rel=1e-5)


def _dtypes_of_sums(config: JobConfig) -> set[torch.dtype]:
    seen, reduce = set(), AllToAllReduceScatter.reduce

    def record(self: AllToAllReduceScatter, output: Any, summands: torch.Tensor, group: Any) -> None:
        seen.add(summands.dtype)
        reduce(self, output, summands, group)

    with patch.object(AllToAllReduceScatter, "reduce", record):
        train(config, steps=1)
    return seen


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_are_reduced_in_the_configured_dtype(gloo: GlooPool, dtype: str) -> None:
    config = config_of(training={"mixed_precision_param": "bfloat16", "mixed_precision_reduce": dtype})
    assert gloo.run(2, _dtypes_of_sums, config) == [{getattr(torch, dtype)}] * 2


def _fills_new_tensors() -> bool:
    try:
        use_deterministic_kernels()
        return bool(torch.empty(1000).isnan().all())
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def test_deterministic_kernels_do_not_fill_new_tensors(gloo: GlooPool) -> None:
    assert gloo.run(1, _fills_new_tensors) == [False]


def norm_gradients(
    config: JobConfig,
    shape: TransformerConfig,
    reduced: bool,
    prepare: Callable[[ParallelModel], object] = lambda _: None,
    spacing: Callable[[ParallelModel], float] = lambda _: 1.0,
) -> dict[str, torch.Tensor]:
    """Gradients of the norms after one backward.

    Args:
        reduced: whether they are also reduced over the tensor-parallel group.
        prepare: called with the model before the backward.
        spacing: the factor of the gradients that are not reduced.
    """
    model = build(config, shape)
    tokens = global_batch(1, shape.vocab_size, shape.max_seq_len)
    positions = torch.arange(shape.max_seq_len)[None]
    prepare(model)
    model.begin_gradients(len(tokens))
    model.forward_backward(
        Microbatch(tokens[:, :-1], tokens[:, 1:], positions, None), torch.tensor(tokens[:, 1:].numel()), is_last=True
    )
    named = ((name, p.grad) for name, p in model.model_parts[0].named_parameters() if "norm" in name)
    gradients = {name: grad.to_local() for name, grad in named if isinstance(grad, DTensor)}
    if reduced:
        assert model.finish_gradients()
    else:
        torch._foreach_mul_(list(gradients.values()), spacing(model))
    return gradients


def _own_and_total(gradients: Callable[..., Any], config: JobConfig, shape: TransformerConfig) -> tuple[Any, Any]:
    return gradients(config, shape, False), gradients(config, shape, True)


@pytest.mark.parametrize("sequence", [True, False])
def test_norm_gradients_are_reduced_over_tensor_parallel_ranks_in_float32(gloo: GlooPool, sequence: bool) -> None:
    assert_norm_gradients_are_reduced(gloo, sequence, "fast", norm_gradients)


def assert_norm_gradients_are_reduced(
    gloo: GlooPool, sequence: bool, sums: str, gradients: Callable[..., dict[str, torch.Tensor]]
) -> None:
    parallelism = {"tensor_parallel_degree": 2, "enable_sequence_parallel": sequence}
    config = config_of(
        training={"mixed_precision_param": "bfloat16", "sums": sums, "local_batch_size": 8}, parallelism=parallelism
    )
    shape = replace(TINY, n_layers=1, qk_norm=True)
    own, total = zip(*gloo.run(2, _own_and_total, gradients, config, shape), strict=True)
    assert total[0].keys() == own[0].keys()
    for name, found in total[0].items():
        assert torch.equal(found, total[1][name]), f"{name} differs between ranks"
        by_heads = "q_norm" in name or "k_norm" in name
        expected = own[0][name].double() + (own[1][name].double() if sequence or by_heads else 0)
        assert (found - expected).norm() < 1e-6 * expected.norm(), name
