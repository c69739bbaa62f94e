"""A parallelized model with its loss: one forward and backward interface for every parallel layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from torchtrain.config.schema import JobConfig
from torchtrain.distributed.gradient_reducer import GradientReducer
from torchtrain.distributed.mesh import Mesh
from torchtrain.models.loss import OutputLoss
from torchtrain.models.spec import Decoder, DecoderConfig, build_model, spec_of
from torchtrain.parallelisms.fsdp import set_accumulation
from torchtrain.parallelisms.microbatches import Microbatch, attention_mask
from torchtrain.parallelisms.model_split import model_split
from torchtrain.parallelisms.parallelize_llama import build_gradient_reducer, parallelize_llama
from torchtrain.parallelisms.pipeline_llama import Pipeline, build_stages
from torchtrain.parallelisms.tensor_parallel import reduce_norm_gradients


@dataclass(frozen=True)
class ParallelModel:
    """This rank's model parts with their loss. Forward and backward are collective: every rank must call them."""

    mesh: Mesh
    device: torch.device
    model_parts: Sequence[Decoder]  # the full model, or this rank's pipeline stages
    pipeline: Pipeline | None
    loss: OutputLoss
    accumulation: str  # parallelism.fsdp_gradient_accumulation
    reducer: GradientReducer

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes losses; under pipeline parallelism only ranks of the last stage do."""
        return self.pipeline is None or self.pipeline.last is not None

    def begin_gradients(self, rows: int) -> None:
        """Call it before the first ``forward_backward`` of a step. ``rows``: this rank's rows of the global batch."""
        self.reducer.begin(rows)

    def finish_gradients(self) -> bool:
        """Complete the gradients; call it after the last ``forward_backward`` of a step.

        Returns False if they are not usable: the step must then be recomputed.
        """
        if self.mesh.degrees.tensor > 1:
            reduce_norm_gradients(self.model_parts, self.mesh.tensor, self.reducer.dtype)
        usable = self.reducer.finish(self.model_parts)
        if not usable:
            self.finish_step(None)
        return usable

    def finish_step(self, skip: Tensor | None) -> None:
        """Call ``ModelSpec.finish_step``, if the model has one."""
        finish_step = spec_of(self.model_parts[0].config).finish_step
        if finish_step is not None:
            finish_step(self.model_parts, self.mesh, skip)

    def forward_backward(self, microbatch: Microbatch, global_tokens: Tensor, is_last: bool) -> Tensor:
        """Forward and backward of one microbatch; accumulates the gradient of its loss divided by ``global_tokens``.

        ``is_last``: whether it is the step's last microbatch, whose backward completes the reduction over all ranks.
        Returns the two sums of ``token_losses``, shape (2,); zeros if this rank computes no loss (``has_loss``).
        """
        tokens, labels, positions, documents = microbatch[:4]
        with loss_parallel():  # under tensor parallelism logits are sharded along the vocabulary dimension
            if self.pipeline is not None:
                return self.pipeline.forward_backward(microbatch, global_tokens, is_last)
            (model,) = self.model_parts
            assert isinstance(model, FSDPModule)
            set_accumulation(model, self.accumulation, is_last)
            mask = attention_mask(documents, self.mesh.context)
            losses: Tensor = model(tokens, positions, mask, head=partial(self.loss, labels=labels))
            torch.autograd.backward(losses.sum() / global_tokens)
            return losses.detach()

    @torch.no_grad()
    def forward(self, microbatch: Microbatch) -> Tensor:
        """Forward of one microbatch without backward; returns the sum of its token losses, without z-loss."""
        losses = self.forward_with_head(microbatch, partial(self.loss, labels=microbatch.labels))
        return torch.zeros((), device=self.device) if losses is None else losses[0]

    @torch.no_grad()
    def forward_with_head(self, microbatch: Microbatch, head: Callable[[Tensor, nn.Module], Tensor]) -> Tensor | None:
        """Forward of one microbatch without backward; returns ``head(h, output)`` as ``Transformer.forward`` does.

        ``h`` has the shape (bs, seq, dim), and with tensor parallelism is a DTensor, of which ``output(h)`` is sharded
        along the vocabulary. On ranks without the last pipeline stage the result is None.
        """
        tokens, _, positions, documents = microbatch[:4]
        with loss_parallel():
            if self.pipeline is not None:
                return self.pipeline.forward(microbatch, head)
            mask = attention_mask(documents, self.mesh.context)
            result: Tensor = self.model_parts[0](tokens, positions, mask, head=head)
            return result


def build_parallel_model(
    model_config: DecoderConfig,
    mesh: Mesh,
    device: torch.device,
    config: JobConfig,
    reducer: GradientReducer | None = None,
) -> ParallelModel:
    """Build the model on the meta device, parallelize it and materialize it with ``to_empty``.

    Parameters and buffers are uninitialized: initialize or load them afterwards. ``reducer``: by default that of the
    config. On CPUs use ``cpu.build.build_cpu_model``.
    """
    training, parallelism = config.training, config.parallelism
    parallelize = spec_of(model_config).parallelize or parallelize_llama
    if mesh.degrees.pipeline > 1:
        stages = build_stages(model_config, mesh, parallelism)
    else:
        with torch.device("meta"):
            stages = {0: build_model(model_config)}
    if reducer is None:
        reducer = build_gradient_reducer(config, mesh)
    for stage in stages.values():
        parallelize(stage, mesh, config, reducer)
        stage.to_empty(device="cpu" if training.enable_cpu_offload else device)
        stage.tie_weights()  # to_empty splits a shared parameter in two
    has_stages = mesh.degrees.pipeline > 1
    split = model_split(config)
    make_loss = OutputLoss if split is None else partial(split.loss, mesh)
    loss = make_loss(
        training.loss_chunk_tokens,
        z_weight=training.z_loss_weight,
        compile=config.compile.enable,
        split_backward=has_stages and "ZeroBubble" in parallelism.pipeline_parallel_schedule,
    )
    pipeline = Pipeline(stages, mesh, device, loss, training, parallelism) if has_stages else None
    accumulation = parallelism.fsdp_gradient_accumulation
    return ParallelModel(mesh, device, list(stages.values()), pipeline, loss, accumulation, reducer)


def initialize_buffers(model_parts: Sequence[Decoder], device: torch.device) -> None:
    """Compute the buffers on ``device``, even under CPU offload. Checkpoints do not contain buffers."""
    for part in model_parts:
        for module in part.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        part.init_buffers()
