"""Tensor and sequence parallelism: each matrix is split over the ranks of a group.

Megatron-LM (https://arxiv.org/abs/1909.08053) with sequence parallelism (https://arxiv.org/abs/2205.05198), written as
DTensor placements. Outside attention and feed-forward, activations (bs, seq, dim) are sharded along seq.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torchtrain.models.llama.model import Transformer


class ReplicateParallel(SequenceParallel):
    """For a norm without sequence parallelism: every rank computes all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence_sharding = (Replicate(),)  # type: ignore[assignment]


class EmbeddingParallel(RowwiseParallel):
    """RowwiseParallel that waits for its collective.

    Without the wait its result is an AsyncCollectiveTensor. The first block would be compiled apart from the others,
    and in torch 2.13 no gradient would come back through it: the embedding would not be trained.
    """

    @staticmethod
    def _prepare_output_fn(
        layouts: Any, use_local: bool, _module: nn.Module, outputs: Any, _mesh: DeviceMesh
    ) -> Tensor:
        outputs = outputs.redistribute(placements=layouts, async_op=False)
        return outputs.to_local() if use_local else outputs  # type: ignore[no-any-return]


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Split the matrices of ``model`` over the 1-D ``mesh``.

    The forward then takes the same tokens on all ranks of ``mesh`` and returns logits as a DTensor that is split along
    the vocabulary. A pipeline stage takes and returns this rank's part of the residual stream.
    """
    residual = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel if sequence_parallel else ReplicateParallel
    plan: dict[str, ParallelStyle] = {
        "layers.*.attention_norm": norm(),
        "layers.*.attention": PrepareModuleInput(  # x, cos, sin, mask
            input_layouts=(residual, None, None, None), desired_input_layouts=(Replicate(), None, None, None)
        ),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=residual),
        "layers.*.ffn_norm": norm(),
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=(residual,), desired_input_layouts=(Replicate(),)),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=residual),
    }
    if model.config.qk_norm:
        for name in ("q_norm", "k_norm"):
            plan[f"layers.*.attention.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)  # by heads
    if model.tok_embeddings is not None:
        plan["tok_embeddings"] = EmbeddingParallel(input_layouts=Replicate(), output_layouts=residual)
    if model.norm is not None:
        plan["norm"] = norm()
    if model.output is not None:
        plan["output"] = ColwiseParallel(input_layouts=residual, output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, plan)
    model.tie_weights()  # the plan has made two parameters of a shared one
