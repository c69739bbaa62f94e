"""A model on its mesh: what training and validation ask for a loss, whatever the layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.mesh import Mesh
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.models.loss import OutputLoss
from torchtrain.parallelisms.exact_sums import ExactSums
from torchtrain.parallelisms.fsdp import reduce_dtype, set_accumulation
from torchtrain.parallelisms.microbatches import Microbatch, attention_mask
from torchtrain.parallelisms.parallelize_llama import parallelize_llama
from torchtrain.parallelisms.pipeline_llama import Pipeline, build_stages
from torchtrain.parallelisms.tensor_parallel import reduce_norm_gradients


@dataclass(frozen=True)
class ParallelModel:
    """This rank's share of a model. Forward and backward are collective: all ranks call them alike."""

    mesh: Mesh
    device: torch.device
    parts: Sequence[Transformer]  # the model, or the pipeline stages that this rank holds
    pipeline: Pipeline | None
    loss: OutputLoss
    accumulation: str  # parallelism.fsdp_gradient_accumulation
    reduce_dtype: torch.dtype  # of gradients
    sums: ExactSums | None  # training.sums

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes losses: within a pipeline only the last stage does."""
        return self.pipeline is None or self.pipeline.last is not None

    def begin_gradients(self, rows: int) -> None:
        """Call it before the first ``forward_backward`` of a step. ``rows``: of the batch, on this rank."""
        if self.sums is not None:
            degrees = self.mesh.degrees
            # At most: one row per microbatch. Norms are summed over tensor-parallel ranks, too.
            self.sums.begin(rows * degrees.batch * degrees.context * degrees.tensor)

    def finish_gradients(self) -> bool:
        """Call it after the last one. False where exact sums have overflowed: the step must be computed again."""
        if self.mesh.degrees.tensor > 1:
            reduce_norm_gradients(self.parts, self.mesh.tensor, self.reduce_dtype)
        return self.sums is None or self.sums.finish(self.parts)

    def forward_backward(self, microbatch: Microbatch, global_tokens: Tensor, is_last: bool) -> Tensor:
        """Add the gradient of the microbatch's loss, divided by ``global_tokens``, to that of the step.

        ``is_last``: whether it is the step's last microbatch, whose backward completes the reduction over all ranks.
        Returns the two sums of ``token_losses``, (2,); zeros without ``has_loss``.
        """
        tokens, labels, positions, documents = microbatch[:4]
        with loss_parallel():  # for logits that tensor parallelism splits along the vocabulary
            if self.pipeline is not None:
                return self.pipeline.forward_backward(microbatch, global_tokens, is_last)
            (model,) = self.parts
            assert isinstance(model, FSDPModule)
            set_accumulation(model, self.accumulation, is_last)
            mask = attention_mask(documents, self.mesh.context)
            losses: Tensor = model(tokens, positions, mask, head=partial(self.loss, labels=labels))
            torch.autograd.backward(losses.sum() / global_tokens)
            return losses.detach()

    @torch.no_grad()
    def forward(self, microbatch: Microbatch) -> Tensor:
        """The sum of the microbatch's losses alone, without z-loss."""
        tokens, labels, positions, documents = microbatch[:4]
        with loss_parallel():
            if self.pipeline is not None:
                return self.pipeline.forward(microbatch)[0]
            mask = attention_mask(documents, self.mesh.context)
            losses: Tensor = self.parts[0](tokens, positions, mask, head=partial(self.loss, labels=labels))
            return losses[0]


def build_parallel_model(
    shape: TransformerConfig, mesh: Mesh, device: torch.device, config: JobConfig
) -> ParallelModel:
    """Meta device, parallelize, ``to_empty``. Parameters and buffers are still to be initialized or loaded."""
    training, parallelism = config.training, config.parallelism
    stages = build_stages(shape, mesh, parallelism)
    sums = ExactSums(device) if training.sums == "exact" else None
    for stage in stages.values():
        parallelize_llama(stage, mesh, config, sums)
        stage.to_empty(device="cpu" if training.enable_cpu_offload else device)
        stage.tie_weights()  # to_empty has made two parameters of a shared one
    loss = OutputLoss(training.loss_chunk_tokens, z_weight=training.z_loss_weight, compile=config.compile.enable)
    split = mesh.degrees.pipeline > 1
    pipeline = Pipeline(stages, mesh, device, loss, training, parallelism) if split else None
    accumulation = parallelism.fsdp_gradient_accumulation
    return ParallelModel(
        mesh, device, list(stages.values()), pipeline, loss, accumulation, reduce_dtype(training), sums
    )


def initialize_buffers(parts: Sequence[Transformer], device: torch.device) -> None:
    """Compute the buffers, which no checkpoint holds, on ``device``, where CPU offload leaves them, too."""
    for part in parts:
        for module in part.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        part.init_buffers()
