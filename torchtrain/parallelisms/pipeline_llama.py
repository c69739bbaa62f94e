"""Pipeline parallelism: each rank holds some of the layers, and microbatches flow through them.

A stage is a ``Transformer`` with missing children, so that its parameters keep their names. Tied embeddings are held
twice, by the first stage and the last: both begin with the same values and get the same gradient, and so stay the same.
"""

from functools import partial
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.distributed.tensor import DTensor

from torchtrain.config.schema import ParallelismConfig, TrainingConfig
from torchtrain.distributed.mesh import Mesh
from torchtrain.models.llama.model import Transformer, TransformerConfig
from torchtrain.models.loss import OutputLoss, exact_nats
from torchtrain.parallelisms.fsdp import set_accumulation
from torchtrain.parallelisms.microbatches import Microbatch, attention_mask
from torchtrain.parallelisms.pipeline_schedule import plan_stages, resolve_microbatches


def build_stages(model: TransformerConfig, mesh: Mesh, parallelism: ParallelismConfig) -> dict[int, Transformer]:
    """This rank's stages, on the meta device, by their number in the whole pipeline; without one, the whole model."""
    layers = plan_stages(model, parallelism)
    rank, degree, last = mesh.pipeline.get_local_rank(), mesh.degrees.pipeline, len(layers) - 1
    # ZBV's ranks hold both ends of a V, the others every degree-th stage.
    v_shaped = parallelism.pipeline_parallel_schedule == "ZBVZeroBubble"
    own = (rank, last - rank) if v_shaped else range(rank, len(layers), degree)
    bounds = list(pairwise((0, *accumulate(layers))))
    return {i: build_stage(model, range(*bounds[i]), first=i == 0, last=i == last) for i in own}


def build_stage(model: TransformerConfig, layers: range, *, first: bool, last: bool) -> Transformer:
    """A ``Transformer`` on the meta device with these layers and, at the ends, what comes before and after them."""
    with torch.device("meta"):
        stage = Transformer(model)
    for layer_id in list(stage.layers):
        if int(layer_id) not in layers:
            del stage.layers[layer_id]
    if not (first or (last and model.tied_embeddings)):
        stage.tok_embeddings = None
    if not last:
        stage.norm = stage.output = None
    return stage


class Stage(PipelineStage):
    """torch's stage without messages to this rank itself in the first exchange: gloo cannot send them.

    With the V-shaped schedule a rank holds neighboring stages. Only torch 2.11 makes this exchange.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


class GradReducingStage(Stage):
    """A stage that reduces the gradients of each microbatch into their shards.

    torch's keeps whole gradients until the last one: before each backward it switches the reduction off.
    """

    def __init__(self, stage: Transformer, *args: Any, **options: Any):
        super().__init__(stage, *args, **options)
        self.is_last_run = True  # of the schedule in this step
        self._is_last = False  # whether the backward under way is the last one of the run
        stage.set_requires_gradient_sync = self._set_accumulation  # type: ignore[assignment]

    def _set_accumulation(self, requires_gradient_sync: bool) -> None:
        is_last = self.is_last_run and (requires_gradient_sync or self._is_last)
        set_accumulation(cast(FSDPModule, self.submod), "sharded", is_last)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        self._is_last = last_backward
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


class Pipeline:
    """Runs this rank's stages together with those of the other ranks. With two ranks of one stage each:

        rank 0   tokens -> stage 0 -> send hidden states         receive their gradient -> backward of stage 0
        rank 1     receive them -> stage 1 -> ``_loss`` -> backward of both -> send the gradient

    torch's schedule orders the microbatches. It gives labels to its loss function alone: so the last stage ends with
    hidden states, and ``_loss`` applies the output layer to them.
    """

    def __init__(
        self,
        stages: dict[int, Transformer],
        mesh: Mesh,
        device: torch.device,
        loss: OutputLoss,
        training: TrainingConfig,
        parallelism: ParallelismConfig,
    ):
        """``stages``: from ``build_stages``, parallelized, on their device."""
        self.mesh = mesh.pipeline
        self.context = mesh.context
        self.device = device
        self.loss = loss
        self.stages = stages
        model = next(iter(stages.values())).config
        count = len(plan_stages(model, parallelism))
        self.first, self.last = stages.get(0), stages.get(count - 1)
        self.tied = model.tied_embeddings
        if self.last is not None:
            # Not as an argument of the schedule: those of torch 2.11 with a split backward take tensors alone.
            to_hidden_states = partial(self.last.forward, head=lambda h, output: h)  # noqa: ARG005
            self.last.forward = to_hidden_states  # type: ignore[method-assign]
        for stage in stages.values():
            stage.register_forward_pre_hook(self._add_mask, with_kwargs=True)
        microbatches = resolve_microbatches(parallelism, training)
        rows, seq = training.local_batch_size // microbatches, training.seq_len // mesh.degrees.context
        # What goes into the first stage, between stages and out of the last. torch is told these shapes, so that no
        # stage must be run to find them out. Between stages a rank has its part of sequence parallelism.
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
            scale_grads=False,  # the loss is a sum, divided by the tokens of the whole global batch
        )
        # Only now: the V-shaped schedule has changed on which ranks the stages are.
        self.rank_of: dict[int, int] = self.pipeline_stages[0].stage_index_to_group_rank

    def forward_backward(self, microbatch: Microbatch, global_tokens: Tensor, is_last: bool) -> Tensor:
        """As ``ParallelModel.forward_backward``. The schedule splits the rows of ``microbatch`` once more."""
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
    def forward(self, microbatch: Microbatch) -> Tensor:
        """The sums of the losses, (2,), without a backward; zeros but on the rank of the last stage.

        Not by torch's schedule: one that splits the backward cannot run the forward alone.
        """
        tokens, labels, positions, documents = microbatch[:4]
        group, own_rank = self.mesh.get_group(), self.mesh.get_local_rank()
        output = tokens
        for i, stage in self.stages.items():
            before, after = self.rank_of.get(i - 1, own_rank), self.rank_of.get(i + 1, own_rank)
            if before != own_rank:
                output = torch.empty(len(tokens), *self.hidden.shape[1:], dtype=self.hidden.dtype, device=self.device)
                dist.recv(output, group=group, group_src=before)
            head = partial(self.loss, labels=labels) if stage is self.last else None
            output = stage(output, positions, documents=documents, head=head)
            if after != own_rank:
                dist.send(output.contiguous(), group=group, group_dst=after)
        return output if self.last is not None else torch.zeros(2, device=self.device)

    def _add_mask(self, _: nn.Module, args: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Give a stage the mask of the ``documents`` that the schedule has split, tensors alone, into microbatches.

        A BlockMask is split by torch into masks with an integer each, for which flex_attention is compiled every time.
        """
        documents = arguments.pop("documents", None)
        return args, {**arguments, "mask": attention_mask(documents, self.context)}

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        assert isinstance(self.last, FSDPModule)
        self.last.unshard()  # gather the output layer once more: FSDP may have freed it after the stage's forward
        assert self.last.output is not None
        losses = self.loss(hidden, self.last.output, labels)
        self.losses += exact_nats(losses.detach())
        return losses.sum() / self.global_tokens

    @property
    def copies(self) -> list[nn.Parameter]:
        """This rank's parameters that the first stage holds, too: a norm must not count them twice."""
        return [self.last.get_parameter("output.weight")] if self.tied and self.last is not None else []

    def sync_tied_embedding_grads(self) -> None:
        """Give the first and the last stage the sum of their gradients of the tied matrix. Call it once a step."""
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
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        gradient.to_local().add_(other.to(gradient.to_local().device))  # a + b = b + a: the two copies stay equal
