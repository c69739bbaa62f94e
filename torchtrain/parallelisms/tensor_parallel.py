"""Tensor and sequence parallelism: weight matrices are sharded over the ranks of a mesh dimension.

Megatron-LM tensor parallelism (https://arxiv.org/abs/1909.08053) with sequence parallelism
(https://arxiv.org/abs/2205.05198), written as DTensor placements. With sequence parallelism, activations (bs, seq, dim)
are sharded along seq outside attention and feed-forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from torchtrain.distributed.mesh import local
from torchtrain.distributed.process_group import all_reduce
from torchtrain.models.spec import Decoder, spec_of


class TensorParallelNorm(nn.RMSNorm):
    """RMSNorm with a weight replicated over tensor-parallel ranks; its backward does not reduce the weight's gradient.

    With torch's SequenceParallel, FSDP would all-reduce the gradient in param_dtype, for each norm and microbatch
    (https://github.com/pytorch/pytorch/issues/190626). ``reduce_norm_gradients`` reduces all of them once per step.
    """

    def __init__(self, norm: nn.RMSNorm, mesh: DeviceMesh, *, sharded_input: bool):
        """``sharded_input``: whether each rank normalizes only its shard of the input, not the full input."""
        super().__init__(norm.normalized_shape, norm.eps, device="meta")
        self.weight = nn.Parameter(DTensor.from_local(norm.weight, mesh, [Replicate()], run_check=False))
        # If all ranks compute the same gradient, only that of rank 0 is used. So the weights stay identical even if
        # kernels round differently across ranks.
        self.contributes = sharded_input or mesh.get_local_rank() == 0

    def forward(self, x: Tensor) -> Tensor:
        weight = cast(DTensor, self.weight).to_local(grad_placements=[Replicate()])  # no reduction in backward
        # The view makes autograd add the gradients in the same order as with torch's DTensors: bitwise the same sums.
        return F.rms_norm(x.view_as(x), self.normalized_shape, weight, self.eps)


@torch.no_grad()
def reduce_norm_gradients(model_parts: Sequence[nn.Module], mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Sum the gradients of all ``TensorParallelNorm`` weights over the 1-D ``mesh`` in ``dtype``, in one all-reduce."""
    norms = [module for part in model_parts for module in part.modules() if isinstance(module, TensorParallelNorm)]
    if not norms:  # of a user's model, whose norms reduce their gradients in backward
        return
    gradients = [local(norm.weight.grad) for norm in norms]
    summands = [g if norm.contributes else torch.zeros_like(g) for g, norm in zip(gradients, norms, strict=True)]
    sums = torch.cat(summands).to(mesh.device_type, dtype)  # under CPU offload they are in CPU memory
    all_reduce(sums, group=mesh.get_group())
    torch._foreach_copy_(gradients, torch.split(sums, [g.numel() for g in gradients]))


class EmbeddingParallel(RowwiseParallel):
    """RowwiseParallel that waits for its output collective.

    Without the wait the output is an AsyncCollectiveTensor. The first block would then be compiled separately from the
    others, and in torch 2.13 no gradient would flow back through it: the embedding would not be trained.
    """

    @staticmethod
    def _prepare_output_fn(
        layouts: Any, use_local: bool, _module: nn.Module, outputs: Any, _mesh: DeviceMesh
    ) -> Tensor:
        outputs = outputs.redistribute(placements=layouts, async_op=False)
        return outputs.to_local() if use_local else outputs  # type: ignore[no-any-return]


class GatherInput(PrepareModuleInput):
    """PrepareModuleInput for the first positional input of a module; the others are passed as they are."""

    def _prepare_input_fn(self, inputs: Any, device_mesh: DeviceMesh) -> Any:
        first, *others = inputs
        gathered: Any = super()._prepare_input_fn((first,), device_mesh)  # type: ignore[no-untyped-call]
        return (*gathered, *others)


@dataclass(frozen=True)
class LinearStyles:
    """The parallel styles of the linear layers of the blocks and of the modules that contain them."""

    gather_input: type[GatherInput] = GatherInput
    colwise: type[ColwiseParallel] = ColwiseParallel
    rowwise: type[RowwiseParallel] = RowwiseParallel


PLAIN_STYLES = LinearStyles()


def apply_tensor_parallel(
    model: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool, styles: LinearStyles = PLAIN_STYLES
) -> None:
    """Apply tensor parallelism to ``model`` over the 1-D ``mesh``, in place.

    Afterwards the forward takes the same tokens on all ranks of ``mesh`` and returns logits as a DTensor sharded along
    the vocabulary dimension. Pipeline stages exchange this rank's part of the residual stream.
    """
    residual = Shard(1) if sequence_parallel else Replicate()
    linear_layers = spec_of(model.config).linear_layers
    sharded = {name.rpartition(".")[0] for name in linear_layers}  # modules whose width is sharded over the ranks
    for name, norm in list(model.named_modules()):
        if isinstance(norm, nn.RMSNorm):
            by_heads = any(fnmatchcase(name, f"layers.*.{module}.*") for module in sharded)
            model.set_submodule(name, TensorParallelNorm(norm, mesh, sharded_input=sequence_parallel or by_heads))
    plan: dict[str, ParallelStyle] = {
        f"layers.*.{module}": styles.gather_input(input_layouts=residual, desired_input_layouts=Replicate())
        for module in sorted(sharded)
    }
    for name, style in linear_layers.items():
        colwise = style == "colwise"
        plan[f"layers.*.{name}"] = styles.colwise() if colwise else styles.rowwise(output_layouts=residual)
    if model.tok_embeddings is not None:
        plan["tok_embeddings"] = EmbeddingParallel(input_layouts=Replicate(), output_layouts=residual)
    if model.norm is not None:
        # The output stays a DTensor, because the loss gathers it before it splits it into chunks.
        plan["norm"] = PrepareModuleOutput(
            output_layouts=residual, desired_output_layouts=residual, use_local_output=False
        )
    if model.output is not None:
        plan["output"] = ColwiseParallel(input_layouts=residual, output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, plan)
    model.tie_weights()  # parallelize_module splits a shared parameter in two
