"""Layout validation: invalid configs raise a ConfigError with a way out, before process-group initialization."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from torchtrain.config.schema import JobConfig, TrainingConfig
from torchtrain.datasets.options import DataConfig
from torchtrain.distributed.mesh import ParallelDims, resolve_parallel_dims
from torchtrain.errors import ConfigError
from torchtrain.models.llama import TransformerConfig
from torchtrain.models.model_config import flavor_config
from torchtrain.optimizers.options import EMAConfig, OptimizerConfig
from torchtrain.parallelisms.check import check_layout, check_memory
from torchtrain.parallelisms.options import ActivationCheckpointConfig, CompileConfig, ParallelismConfig
from torchtrain.parallelisms.pipeline_schedule import split_evenly
from torchtrain.parallelisms.resolve import resolve_layout
from torchtrain.trainer import Trainer

LLAMA = flavor_config("llama3", "8B")  # 32 layers, 32 heads, 8 key/value heads


def check(
    model: TransformerConfig = LLAMA,
    device_type: str = "cuda",
    compile: bool = False,
    mode: Literal["none", "selective", "full", "memory_budget"] = "none",
    training: dict[str, Any] | None = None,
    document_mask: bool = False,
    **parallelism: Any,
) -> None:
    layout = ParallelismConfig(**parallelism)
    world = layout.pipeline_parallel_degree * layout.context_parallel_degree * layout.tensor_parallel_degree
    config = JobConfig(
        training=TrainingConfig(**{"seq_len": 8192, "local_batch_size": 8, **(training or {})}),
        parallelism=layout,
        activation_checkpoint=ActivationCheckpointConfig(mode=mode),
        compile=CompileConfig(enable=compile),
        data=DataConfig(document_mask=document_mask),
    )
    config, dims = resolve_layout(config, model, world)
    check_layout(config, torch.device(device_type), dims, model)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tensor_parallel_degree": 16},
            r"tensor_parallel_degree = 16 must divide the model's n_kv_heads = 8; try 4 or 8",
        ),
        ({"tensor_parallel_degree": 3}, r"tensor_parallel_degree = 3 must divide the model's n_heads = 32; try 1 or 2"),
        (
            {"model": replace(LLAMA, ffn_dim=14338), "tensor_parallel_degree": 4},
            r"tensor_parallel_degree = 4 must divide the model's ffn_dim = 14338; try 1 or 2",
        ),
        (
            {"context_parallel_degree": 4, "training": {"seq_len": 8196}},
            r"seq_len = 8196 must be a multiple of 2 \* parallelism.context_parallel_degree = 8: .*; try 8192 or 8200",
        ),
        (
            {"tensor_parallel_degree": 8, "training": {"seq_len": 8196}},
            r"seq_len = 8196 must be a multiple of .*tensor_parallel_degree = 8 .*; try 8192 or 8200, or .*sequence_",
        ),
        (
            {"tensor_parallel_degree": 8, "context_parallel_degree": 2, "training": {"seq_len": 72}},
            r"seq_len = 72 / context_parallel_degree = 36 must be .* = 8 with sequence parallelism; try 64 or 96",
        ),
        (
            {"enable_async_tensor_parallel": True, "tensor_parallel_degree": 2, "device_type": "cpu"},
            r"enable_async_tensor_parallel needs a GPU and compile.enable: .* switch it off",
        ),
        (
            {"enable_async_tensor_parallel": True, "compile": True},
            r"enable_async_tensor_parallel needs parallelism.tensor_parallel_degree above 1",
        ),
        (
            {"pipeline_parallel_degree": 64, "training": {"local_batch_size": 64}},
            r"pipeline_parallel_degree = 64 makes 64 stages .*, and the model has only 32 layers.*: lower the degree$",
        ),
        (
            {
                "pipeline_parallel_degree": 32,
                "pipeline_parallel_schedule": "Interleaved1F1B",
                "training": {"local_batch_size": 32},
            },
            r"makes 64 stages with the schedule Interleaved1F1B, .* or take a schedule with one stage a rank",
        ),
        (
            {"pipeline_parallel_degree": 2, "pipeline_parallel_layers_per_stage": (16, 17)},
            r"layers_per_stage = \[16, 17\] must add up to the model's 32 layers, not to 33",
        ),
        (
            {"pipeline_parallel_degree": 2, "pipeline_parallel_layers_per_stage": (8, 8, 8, 8)},
            r"layers_per_stage = \[8, 8, 8, 8\] has 4 stages; 1F1B on pipeline_parallel_degree = 2 needs 2",
        ),
        (
            {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_layers_per_stage": (10, 11, 11),
                "pipeline_parallel_schedule": "Interleaved1F1B",
            },
            r"has 3 stages; Interleaved1F1B on pipeline_parallel_degree = 2 needs a multiple of 2",
        ),
        (
            {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatches": 3},
            r"microbatches = 3 must divide training.local_batch_size = 8; try one of 1, 2, 4, 8",
        ),
        (
            {"pipeline_parallel_degree": 4, "pipeline_parallel_microbatches": 2},
            r"microbatches = 2 must be at least pipeline_parallel_degree = 4 for the schedule 1F1B: .* or take GPipe",
        ),
        (
            {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_microbatches": 7,
                "pipeline_parallel_schedule": "Interleaved1F1B",
                "training": {"local_batch_size": 7},
            },
            r"microbatches = 7 must be a multiple of 3, its rounds over 2 ranks, .*; try 6",
        ),
        (
            {
                "model": replace(LLAMA, tied_embeddings=True),
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": "ZBVZeroBubble",
            },
            r"'ZBVZeroBubble' puts the first and the last stage on one rank, .* try InterleavedZeroBubble",
        ),
        (
            {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble", "compile": True},
            r"'ZBVZeroBubble' runs the backward of a block in two passes, which .*; switch compile.enable off",
        ),
        (
            {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble", "document_mask": True},
            r"two passes, which flex_attention, .*; take the schedule Interleaved1F1B, or switch data.document_",
        ),
        (
            {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble", "mode": "selective"},
            r"two passes, and what activation_checkpoint.mode = 'selective' keeps .*; take mode 'full' or selective_",
        ),
        (
            {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": "InterleavedZeroBubble",
                "fsdp_reshard_after_forward": "always",
            },
            r"two passes, and .*reshard_after_forward = 'always' frees .* get no gradient; take 'default' or 'never'",
        ),
    ],
)
def test_invalid_layouts_raise_a_config_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(**options)


def test_chunked_loss_with_split_backward_requires_torch_2_13(monkeypatch: pytest.MonkeyPatch) -> None:
    split: dict[str, Any] = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"}
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    with pytest.raises(ConfigError, match=r"in torch 2.11.0; set training.loss_chunk_tokens = 0, or take torch 2.13"):
        check(**split)
    check(**split, training={"loss_chunk_tokens": 0})
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    check(**split)


def test_memory_budget_is_rejected_on_torch_versions_that_cannot_count_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    budget: dict[str, Any] = {"compile": True, "mode": "memory_budget"}
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    with pytest.raises(ConfigError, match=r"with torch 2.11.0 where .* fewer n_kv_heads than n_heads; take torch 2.12"):
        check(**budget)
    check(**budget, model=replace(LLAMA, n_kv_heads=LLAMA.n_heads))
    check(**budget, device_type="cpu")
    check(**budget, document_mask=True)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1"))
    check(**budget)
    with pytest.raises(ConfigError, match=r"with torch 2.12.1 under tensor parallelism; take torch 2.13"):
        check(**budget, tensor_parallel_degree=2)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    check(**budget, tensor_parallel_degree=2)


def test_trainer_for_a_gpu_rejects_document_masks_with_a_split_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torchtrain.trainer.pick_device", lambda _: torch.device("cuda", 0))
    parallelism = ParallelismConfig(pipeline_parallel_degree=2, pipeline_parallel_schedule="InterleavedZeroBubble")
    training = TrainingConfig(local_batch_size=4)
    with pytest.raises(ConfigError, match=r"or switch data.document_mask off"):
        Trainer(JobConfig(training=training, parallelism=parallelism, data=DataConfig(document_mask=True)))


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_degree": 8, "context_parallel_degree": 16, "pipeline_parallel_degree": 8},
        {"tensor_parallel_degree": 8, "training": {"seq_len": 8196}, "enable_sequence_parallel": False},
        {"tensor_parallel_degree": 2, "compile": True, "enable_async_tensor_parallel": True},
        {"pipeline_parallel_degree": 4, "pipeline_parallel_microbatches": 2, "pipeline_parallel_schedule": "GPipe"},
        {"context_parallel_degree": 1, "training": {"seq_len": 8191}},
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B", "document_mask": True},
        {
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_schedule": "ZBVZeroBubble",
            "document_mask": True,
            "device_type": "cpu",
            "training": {"loss_chunk_tokens": 0},
        },
    ],
)
def test_valid_layouts_are_accepted(options: dict[str, Any]) -> None:
    check(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"data_parallel_replicate_degree": 3},
            r"ranks, 8, but the product of data_parallel_replicate_degree = 3 x data_.* is 6",
        ),
        (
            {"tensor_parallel_degree": 3, "context_parallel_degree": 3},
            r"is 9; start 9 ranks \(NGPU=9 ./run_llama_train.sh ...\), or set data_par",
        ),
        ({"data_parallel_shard_degree": 1}, r"the number of ranks, 8, but the product of all of 1 is 1; start 1 ranks"),
    ],
)
def test_product_of_degrees_must_equal_the_world_size(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_parallel_dims(ParallelismConfig(**options), 8)


def test_shard_degree_is_inferred_from_the_world_size() -> None:
    config = ParallelismConfig(
        pipeline_parallel_degree=2,
        data_parallel_replicate_degree=2,
        context_parallel_degree=2,
        tensor_parallel_degree=4,
    )
    degrees = resolve_parallel_dims(config, 128)
    assert degrees == ParallelDims(pipeline=2, replicate=2, shard=4, context=2, tensor=4)
    # The ranks of a context, tensor or pipeline group read the same rows of the batch.
    assert [degrees.batch_rank(rank) for rank in (0, 7, 8, 63, 64, 127)] == [0, 0, 1, 7, 0, 7]


@pytest.mark.parametrize(
    ("n_layers", "stages", "expected"),
    [
        (32, 4, (7, 8, 9, 8)),
        (126, 16, (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)),  # Llama 3 405B, as in its paper
        (6, 4, (1, 2, 2, 1)),
        (5, 4, (1, 1, 2, 1)),
        (4, 4, (1, 1, 1, 1)),
        (3, 2, (1, 2)),
        (80, 1, (80,)),
    ],
)
def test_layers_per_stage_account_for_embedding_and_output(
    n_layers: int, stages: int, expected: tuple[int, ...]
) -> None:
    assert split_evenly(n_layers, stages) == expected
    assert sum(expected) == n_layers


def test_layers_per_stage_of_the_config_are_used() -> None:
    config = ParallelismConfig(pipeline_parallel_degree=2, pipeline_parallel_layers_per_stage=(20, 12))
    resolved, _ = resolve_layout(JobConfig(parallelism=config), LLAMA, 2)
    assert resolved.parallelism.pipeline_parallel_layers_per_stage == (20, 12)


def test_pipeline_options_are_ignored_without_pipeline_parallelism() -> None:
    config = ParallelismConfig(pipeline_parallel_schedule="ZBVZeroBubble", pipeline_parallel_layers_per_stage=(16, 16))
    resolved, _ = resolve_layout(JobConfig(parallelism=config), replace(LLAMA, tied_embeddings=True), 1)
    assert resolved.parallelism.pipeline_parallel_layers_per_stage == ()


def test_model_that_no_memory_can_hold_is_rejected_at_once() -> None:
    model = replace(flavor_config("llama3", "8B"), vocab_size=128256)
    config, gib = JobConfig(), 2**30
    with pytest.raises(ConfigError, match=r"8,030,261,248 parameters, .* take 119.7 GiB here, and there are 24.0 GiB"):
        check_memory(config, ParallelDims(), model, 24 * gib, 1)
    check_memory(config, ParallelDims(), model, 120 * gib, 1)
    check_memory(config, ParallelDims(shard=8), model, 24 * gib, 1)
    with pytest.raises(ConfigError, match=r"take 119.7 GiB here"):
        check_memory(config, ParallelDims(shard=8), model, 24 * gib, 8)  # all of them on this machine
    with pytest.raises(ConfigError, match=r"take 29.9 GiB here"):
        check_memory(config, ParallelDims(replicate=2, shard=4), model, 24 * gib, 1)


@pytest.mark.parametrize(
    ("changes", "bytes_per_parameter"),
    [
        ({}, 16),
        ({"ema": EMAConfig(enable=True)}, 20),
        ({"ema": EMAConfig(enable=True, offload=True)}, 16),
        ({"optimizer": OptimizerConfig(state_dtype="bfloat16"), "ema": EMAConfig(enable=True)}, 14),
    ],
)
def test_memory_that_a_model_needs_is_counted_by_parameter(changes: dict[str, Any], bytes_per_parameter: int) -> None:
    check_memory_by_parameter(changes, bytes_per_parameter)


def check_memory_by_parameter(changes: dict[str, Any], bytes_per_parameter: int) -> None:
    """On four ranks of sixteen, of two replicas in two pipeline stages."""
    model = replace(flavor_config("llama3", "8B"), vocab_size=128256)
    needed = bytes_per_parameter * 8_030_261_248 * 2 * 4 // 16
    degrees = ParallelDims(pipeline=2, replicate=2, shard=2, tensor=2)
    check_memory(JobConfig(**changes), degrees, model, needed, 4)
    with pytest.raises(ConfigError, match=f"take {needed / 2**30:.1f} GiB here"):
        check_memory(JobConfig(**changes), degrees, model, needed - 1, 4)
