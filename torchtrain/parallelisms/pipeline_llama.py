"""Pipeline parallelism: layers are partitioned into stages on different ranks, and microbatches flow through them.

A stage is a ``Transformer`` without the children of other stages, so that parameters keep their names. Tied embeddings
are replicated on the first and the last stage. Both replicas start with the same values and receive the same gradient,
so they stay identical.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor

from torchtrain.config.schema import TrainingConfig
from torchtrain.distributed.mesh import Mesh
from torchtrain.models.loss import OutputLoss, exact_nats
from torchtrain.models.spec import Decoder, DecoderConfig, build_model, spec_of
from torchtrain.parallelisms.fsdp import set_accumulation
from torchtrain.parallelisms.microbatches import Microbatch, attention_mask
from torchtrain.parallelisms.options import ParallelismConfig


def build_stages(model: DecoderConfig, mesh: Mesh, parallelism: ParallelismConfig) -> dict[int, Decoder]:
    """Build this rank's pipeline stages on the meta device, keyed by stage index.

    ``resolve_layout`` has resolved ``parallelism``.
    """
    layers = parallelism.pipeline_parallel_layers_per_stage
    assert sum(layers) == model.n_layers
    assert len(layers) % mesh.degrees.pipeline == 0
    rank, degree, last = mesh.pipeline.get_local_rank(), mesh.degrees.pipeline, len(layers) - 1
    # Under ZBV rank r holds stages r and last - r (a V shape); under the other schedules every degree-th stage.
    v_shaped = parallelism.pipeline_parallel_schedule == "ZBVZeroBubble"
    own = (rank, last - rank) if v_shaped else range(rank, len(layers), degree)
    bounds = list(pairwise((0, *accumulate(layers))))
    return {i: build_stage(model, range(*bounds[i]), first=i == 0, last=i == last) for i in own}


def build_stage(model: DecoderConfig, layers: range, *, first: bool, last: bool) -> Decoder:
    """Build a ``Transformer`` on the meta device with only ``layers``.

    The first stage also has the embedding, and the last one the final norm and the output layer. With tied embeddings
    the last stage has the embedding, too.
    """
    with torch.device("meta"):
        stage = build_model(model)
    for layer_id in list(stage.layers):
        if int(layer_id) not in layers:
            del stage.layers[layer_id]
    spec = spec_of(model)
    for name in spec.first_stage:
        if not (first or (last and name == "tok_embeddings" and model.tied_embeddings)):
            setattr(stage, name, None)
    for name in spec.last_stage:
        if not last:
            setattr(stage, name, None)
    return stage


def gradients_to_assign(
    grad: Callable[..., tuple[Tensor, ...]], outputs: Any, inputs: Sequence[GradientEdge], **options: Any
) -> tuple[Tensor, ...]:
    """Gradients by ``grad``, which is ``torch.autograd.grad``, in dtypes in which their parameters take them.

    With FSDP this is since 2.15 the dtype of the reduction, to which only ``torch.autograd.backward`` converts.
    """
    with patch.object(torch.autograd, "grad", grad):  # PyTorch passes its function on by this name
        gradients = grad(outputs, inputs, **options)
    parameters: list[Any] = [edge.node.variable for edge in inputs]  # type: ignore[attr-defined]
    return tuple(g if p.grad_dtype is None else g.to(p.grad_dtype) for g, p in zip(gradients, parameters, strict=True))


class Stage(PipelineStage):
    """``PipelineStage`` whose backward of weights works in mixed precision, and which sends itself nothing at first.

    Under the V-shaped schedule one rank holds two neighboring stages, and gloo cannot send from a rank to itself. Only
    torch 2.11 does this exchange.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        if backward_type != "weight":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        with patch.object(torch.autograd, "grad", partial(gradients_to_assign, torch.autograd.grad)):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


class GradReducingStage(Stage):
    """Pipeline stage that reduce-scatters the gradients of every microbatch.

    torch's stage disables the reduction before each backward but the last, and so keeps unsharded gradients until then.
    """

    def __init__(self, stage: Decoder, *args: Any, **options: Any):
        super().__init__(stage, *args, **options)
        self.is_last_run = True  # whether this is the last run of the schedule in this step
        self._is_last = False  # whether the current backward is the last of this run
        stage.set_requires_gradient_sync = self._set_accumulation  # type: ignore[assignment]
        # Since 2.15 torch's stage would leave all reductions to ``start_gradient_reduction``, for which FSDP must not
        # have reduced a gradient before.
        stage.set_manual_backward_finalization = lambda enabled: None  # type: ignore[assignment]  # noqa: ARG005

    def _set_accumulation(self, requires_gradient_sync: bool) -> None:
        is_last = self.is_last_run and (requires_gradient_sync or self._is_last)
        set_accumulation(cast(FSDPModule, self.submod), "sharded", is_last)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        self._is_last = last_backward
        self.submod.set_is_last_backward(False)  # type: ignore[operator]
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def start_gradient_reduction(self) -> None:
        """Reduce what the last backward has left, and end it. Until 2.14 ``perform_reduce_grad`` does the same."""
        module = cast(FSDPModule, self.submod)
        module.set_is_last_backward(True)
        module.set_reshard_after_backward(True)
        self._set_accumulation(requires_gradient_sync=True)
        root = fully_shard.state(module)  # type: ignore[attr-defined]
        for state in root._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                group.post_backward()
        root._root_post_backward_final_callback()

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """The backward that has ended has waited, and the gradients are not scaled (``Pipeline``)."""


class Pipeline:
    """Runs this rank's pipeline stages in the configured schedule. With two ranks of one stage each:

        rank 0   tokens -> stage 0 -> send hidden states         receive their gradient -> backward of stage 0
        rank 1     receive them -> stage 1 -> ``_loss`` -> backward of both -> send the gradient

    torch's schedule orders the microbatches. It passes labels only to its loss function, so the last stage returns
    hidden states, and ``_loss`` applies the output layer to them.
    """

    def __init__(
        self,
        stages: dict[int, Decoder],
        mesh: Mesh,
        device: torch.device,
        loss: OutputLoss,
        training: TrainingConfig,
        parallelism: ParallelismConfig,
    ):
        """``stages``: the result of ``build_stages``, parallelized and on their device."""
        self.mesh = mesh.pipeline
        self.context = mesh.context
        self.device = device
        self.loss = loss
        self.stages = stages
        model = next(iter(stages.values())).config
        count = len(parallelism.pipeline_parallel_layers_per_stage)
        self.first, self.last = stages.get(0), stages.get(count - 1)
        self.tied = model.tied_embeddings
        if self.last is not None:
            # The head is bound here, not passed to the schedule: with a split backward, torch 2.11's schedules accept
            # only tensors as arguments.
            to_hidden_states = partial(self.last.forward, head=lambda h, output: h)  # noqa: ARG005
            self.last.forward = to_hidden_states  # type: ignore[method-assign]
        for stage in stages.values():
            stage.register_forward_pre_hook(self._add_mask, with_kwargs=True)
        microbatches = parallelism.pipeline_parallel_microbatches
        rows, seq = training.local_batch_size // microbatches, training.seq_len // mesh.degrees.context
        self.seq = seq
        # Shapes of the input of the first stage, of activations between stages, and of the output of the last stage.
        # With them, torch need not run the stages for shape inference. Under sequence parallelism, activations between
        # stages are sharded along the sequence.
        between = seq // mesh.degrees.tensor if parallelism.enable_sequence_parallel else seq
        dtype = getattr(torch, training.mixed_precision_param)
        tokens = torch.empty(rows, seq, dtype=torch.int64, device="meta")
        self.hidden, last_hidden = (
            torch.empty(rows, n, model.dim, dtype=dtype, device="meta", requires_grad=True) for n in (between, seq)
        )
        stage_type = GradReducingStage if parallelism.fsdp_gradient_accumulation == "sharded" else Stage
        self.pipeline_stages = [
            stage_type(
                stage,
                i,
                count,
                device,
                input_args=tokens if i == 0 else self.hidden,
                output_args=last_hidden if i == count - 1 else self.hidden,
                group=self.mesh.get_group(),
            )
            for i, stage in stages.items()
        ]
        schedule: Any = get_schedule_class(parallelism.pipeline_parallel_schedule)
        self.schedule = schedule(
            self.pipeline_stages if issubclass(schedule, PipelineScheduleMulti) else self.pipeline_stages[0],
            n_microbatches=microbatches,
            loss_fn=self._loss,
            scale_grads=False,  # the loss is already divided by the tokens of the global batch
        )
        # Read after the schedule is built: the V-shaped schedule changes the assignment of stages to ranks.
        self.rank_of: dict[int, int] = self.pipeline_stages[0].stage_index_to_group_rank
        self.last_rank = self.rank_of[count - 1]

    def forward_backward(self, microbatch: Microbatch, global_tokens: Tensor, is_last: bool) -> Tensor:
        """See ``ParallelModel.forward_backward``. The schedule splits ``microbatch`` into pipeline microbatches."""
        tokens, labels, positions, documents = microbatch[:4]
        self.global_tokens = global_tokens
        self.losses = torch.zeros(2, dtype=torch.float64, device=self.device)
        for stage in self.pipeline_stages:
            if isinstance(stage, GradReducingStage):
                stage.is_last_run = is_last
        inputs = (tokens,) if self.first is not None else ()
        target = labels if self.last is not None else None
        arguments: dict[str, Any] = {"positions": positions.expand(len(tokens), -1)}
        if documents is not None:
            arguments["documents"] = documents
        self.schedule.step(*inputs, target=target, return_outputs=False, **arguments)
        return self.losses

    @torch.no_grad()
    def forward(self, microbatch: Microbatch, head: Callable[[Tensor, nn.Module], Tensor]) -> Tensor | None:
        """Forward without backward; returns ``head(h, output)``, or None on ranks without the last stage.

        torch's schedule is not used, because schedules with a split backward cannot run only the forward. The shape of
        ``microbatch`` may differ from that of training.
        """
        tokens, _, positions, documents = microbatch[:4]
        group, own_rank = self.mesh.get_group(), self.mesh.get_local_rank()
        output = tokens
        for i, stage in self.stages.items():
            before, after = self.rank_of.get(i - 1, own_rank), self.rank_of.get(i + 1, own_rank)
            if before != own_rank:
                seq = self.hidden.shape[1] * tokens.shape[1] // self.seq  # this rank's part under sequence parallelism
                shape = (len(tokens), seq, self.hidden.shape[2])
                output = torch.empty(shape, dtype=self.hidden.dtype, device=self.device)
                _wait(dist.P2POp(dist.irecv, output, group=group, group_peer=before))
            output = stage(output, positions, documents=documents, head=head if stage is self.last else None)
            if after != own_rank:
                _wait(dist.P2POp(dist.isend, output.contiguous(), group=group, group_peer=after))
        return output if self.last is not None else None

    def _add_mask(self, _: nn.Module, args: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Forward pre-hook that builds a stage's attention mask from the microbatch's ``documents``.

        The schedule gets the tensor ``documents`` to split into microbatches. Were it given a BlockMask, torch would
        split it into masks that each contain another integer, and flex_attention would be recompiled for each.
        """
        documents = arguments.pop("documents", None)
        return args, {**arguments, "mask": attention_mask(documents, self.context)}

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        assert isinstance(self.last, FSDPModule)
        self.last.unshard()  # all-gather a tied output layer again: FSDP may have freed it after the forward
        assert self.last.output is not None
        losses = self.loss(hidden, self.last.output, labels)
        self.losses += exact_nats(losses.detach())
        return losses.sum() / self.global_tokens

    @property
    def tied_replicas(self) -> list[nn.Parameter]:
        """This rank's replicas of parameters of the first stage, which a gradient norm must not count twice."""
        return [self.last.get_parameter("output.weight")] if self.tied and self.last is not None else []

    def sync_tied_embedding_grads(self) -> None:
        """Sum the gradients of the tied embedding over the first and the last stage. Call it once per step."""
        holder = self.first or self.last
        if not self.tied or holder is None:
            return
        peer = self.mesh.size() - 1 if holder is self.first else 0
        gradient = holder.get_parameter("tok_embeddings.weight").grad
        assert isinstance(gradient, DTensor)
        own = gradient.to_local().to(self.device)  # under CPU offload it is in CPU memory
        other = torch.empty_like(own)
        group = self.mesh.get_group()
        send = dist.P2POp(dist.isend, own, group=group, group_peer=peer)
        receive = dist.P2POp(dist.irecv, other, group=group, group_peer=peer)
        _wait(send, receive)
        gradient.to_local().add_(other.to(gradient.to_local().device))  # a + b = b + a: identical


def _wait(*messages: dist.P2POp) -> None:
    """Send and receive ``messages``, as a batch: NCCL serializes single ones with all other work of their group."""
    for work in dist.batch_isend_irecv(list(messages)):
        work.wait()
