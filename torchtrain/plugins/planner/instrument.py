"""Instrumentation of a training step for ``StepRecorder``: phases, modules, FSDP events and pipeline actions."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

from torchtrain.distributed.mesh import local
from torchtrain.metrics.hooks import Hook
from torchtrain.models.loss import OutputLoss
from torchtrain.parallelisms.pipeline_llama import GradReducingStage
from torchtrain.plugins.planner.operations import WAIT_FOR_MESSAGE
from torchtrain.plugins.planner.recorder import Action, StepRecorder
from torchtrain.plugins.planner.torch_internals import SINCE_2_15, FSDPParamGroup, ShardingPropagator


class RecorderHook(Hook):
    """Hook that marks the beginning of each microbatch and of the optimizer's update in ``recorder``."""

    def __init__(self, recorder: StepRecorder) -> None:
        self.recorder = recorder

    def before_microbatch(self, index: int) -> None:  # noqa: ARG002
        self.recorder.record.microbatches.append(len(self.recorder.record.operations))

    def after_backward(self) -> None:
        self.recorder.phase_override = "update"

    def after_step(self, *_: Any) -> None:
        self.recorder.phase_override = ""


@contextmanager
def instrument(recorder: StepRecorder) -> Iterator[StepRecorder]:
    """Context manager that enters ``recorder`` and reports to it what operations do not show.

    These are resized storages, FSDP events, pipeline actions, the loss, and the tensors that DTensor creates only to
    infer shapes, which are not recorded. PyTorch has no hooks for them, so their methods are patched.
    """

    def observe(
        owner: type, name: str, before: Callable[..., None] = lambda *_: None, **values: Any
    ) -> AbstractContextManager[Any]:
        """Patch a method: call ``before`` with its arguments first, and set ``values`` on the recorder during both."""
        original = getattr(owner, name)

        def observed(*args: Any, **options: Any) -> Any:
            with recorder.labeled(**values):
                before(*args)
                return original(*args, **options)

        return patch.object(owner, name, observed)

    def enter_module(group: FSDPParamGroup, *_: Any) -> None:
        recorder.module = group._module_fqn or ""

    def exit_module(*_: Any) -> None:
        recorder.module = ""

    def before_unshard(group: FSDPParamGroup, *_: Any) -> None:
        enter_module(group)
        if recorder.offloaded and not (group.is_unsharded or group._all_gather_result):
            recorder.record_host_copy("copy_to_gpu", group)

    def before_wait(group: FSDPParamGroup, *_: Any) -> None:
        enter_module(group)
        if group._all_gather_result is not None:
            recorder.record_operation("wait")

    def observed_post_backward(group: FSDPParamGroup, *args: Any) -> Any:
        # Accumulating on the host waits for the copy of the gradient. The copy of a first gradient is only waited for
        # at the end of the step.
        waits = any(parameter.sharded_param.grad is not None for parameter in group.fsdp_params)
        with recorder.labeled(fsdp=True, category="temporary", phase_override="backward"):
            post_backward(group, *args)
        if recorder.offloaded and group.reduce_grads and (group.all_reduce_grads or not group._is_hsdp):
            recorder.record_host_copy("copy_to_host_and_wait" if waits else "copy_to_host", group)
        recorder.categorize(group._partial_reduce_output, "gradients")  # HSDP keeps it between microbatches
        for parameter in group.fsdp_params:
            unsharded = getattr(parameter, "_unsharded_param", None)
            recorder.categorize((parameter.unsharded_accumulated_grad, getattr(unsharded, "grad", None)), "gradients")
            if parameter.sharded_param.grad is not None:
                recorder.categorize(local(parameter.sharded_param.grad), "gradients")

    def begin_chunk(name: str, stage: PipelineStage, index: int, *_: Any) -> None:
        action = Action(name, stage.stage_index // stage.group_size, index)
        recorder.record.chunks[len(recorder.record.operations)] = action

    def observed_backward(stage: PipelineStage, index: int, full_backward: bool = True, **options: Any) -> None:
        begin_chunk("FULL_BACKWARD" if full_backward else "BACKWARD_INPUT", stage, index)
        backward(stage, index, full_backward=full_backward, **options)

    def observed_batch(operations: list[dist.P2POp], **options: Any) -> list[dist.Work]:
        received = recorder.record.received.copy()
        works: list[dist.Work] = batch_p2p(operations, **options)
        messages = []
        for operation in operations:
            if operation.op is dist.irecv:
                messages.append((operation.peer, received[operation.peer]))
                received[operation.peer] += 1
        if messages:
            receiving.append((works, messages))
        return works

    def observed_wait(works: list[dist.Work]) -> None:
        for index, (received, messages) in enumerate(receiving):
            if received is works:
                del receiving[index]
                for peer, number in messages:
                    later = recorder.record.received[peer] - number - 1
                    recorder.record_operation(WAIT_FOR_MESSAGE, peer=peer, message=later)
                break
        wait_batch_p2p(works)

    receiving: list[tuple[list[dist.Work], list[tuple[int, int]]]] = []
    batch_p2p, wait_batch_p2p = schedules._batch_p2p, schedules._wait_batch_p2p
    backward, post_backward = PipelineStage.backward_one_chunk, FSDPParamGroup.post_backward
    reduction = "start_gradient_reduction" if SINCE_2_15 else "perform_reduce_grad"
    unsharding = {"module": "", "fsdp": True, "category": "gathered"}
    with (
        observe(torch.UntypedStorage, "resize_", recorder.resize),
        observe(ShardingPropagator, "_propagate_tensor_meta_non_cached", paused=True),
        observe(FSDPParamGroup, "unshard", before_unshard, **unsharding),
        observe(FSDPParamGroup, "wait_for_unshard", before_wait, **unsharding),
        patch.object(FSDPParamGroup, "post_backward", observed_post_backward),
        observe(FSDPParamGroup, "pre_forward", enter_module),
        observe(FSDPParamGroup, "post_forward", exit_module),
        observe(FSDPParamGroup, "pre_backward", enter_module),
        observe(PipelineStage, "forward_one_chunk", partial(begin_chunk, "FORWARD")),
        patch.object(PipelineStage, "backward_one_chunk", observed_backward),
        observe(PipelineStage, "backward_weight_one_chunk", partial(begin_chunk, "BACKWARD_WEIGHT")),
        observe(PipelineStage, reduction, lambda stage, *_: begin_chunk("REDUCE_GRAD", stage, 0)),
        observe(GradReducingStage, reduction, lambda stage, *_: begin_chunk("REDUCE_GRAD", stage, 0)),
        patch.object(schedules, "_batch_p2p", observed_batch),
        patch.object(schedules, "_wait_batch_p2p", observed_wait),
        observe(OutputLoss, "__call__", phase_override="loss"),
        recorder,
    ):
        yield recorder
