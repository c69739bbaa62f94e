"""What a ledger cannot see from operations: where in a step and a model they are, and what FSDP does with storages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from torchtrain.distributed.mesh import local
from torchtrain.loss import OutputLoss
from torchtrain.parallelisms.parallel_model import ParallelModel
from torchtrain.planning.ledger import Ledger
from torchtrain.planning.operations import Operation
from torchtrain.steps.train_step import TrainStep
from torchtrain.torch_internals import FSDPParamGroup, ShardingPropagator


@contextmanager
def following(ledger: Ledger) -> Iterator[Ledger]:
    """Tell ``ledger`` what it cannot see from operations: sizes of storages, FSDP's doings, DTensor's trial tensors."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        ledger.resized(storage, size)
        return resize(storage, size)

    def marked(original: Any, **values: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            with ledger.marking(**values):
                return original(*args, **options)

        return run

    def gathering(original: Any, waits: bool) -> Any:
        def run(group: FSDPParamGroup, *args: Any, **options: Any) -> Any:
            with ledger.marking(module=group._module_fqn or "", fsdp=True, kind="gathered"):
                if waits and group._all_gather_result is not None:
                    ledger.record.operations.append(Operation("wait", ledger.phase, ledger.module))
                if ledger.offloaded and not (waits or group.is_unsharded or group._all_gather_result):
                    ledger.crossed("copy_to_gpu", group)
                return original(group, *args, **options)

        return run

    def placing(original: Any, leaves: bool = False) -> Any:
        def run(group: FSDPParamGroup, *args: Any) -> Any:
            ledger.module = "" if leaves else group._module_fqn or ""
            return original(group, *args)

        return run

    def after_backward(group: FSDPParamGroup, *args: Any) -> Any:
        # What is added to on the host must be there; a first gradient is waited for at the step's end alone.
        waits = any(parameter.sharded_param.grad is not None for parameter in group.fsdp_params)
        reduce(group, *args)
        if ledger.offloaded and group.reduce_grads and (group.all_reduce_grads or not group._is_hsdp):
            ledger.crossed("copy_to_host_and_wait" if waits else "copy_to_host", group)
        ledger.adopt(group._partial_reduce_output, "gradients")  # of HSDP, between microbatches
        for parameter in group.fsdp_params:
            unsharded = getattr(parameter, "_unsharded_param", None)
            ledger.adopt((parameter.unsharded_accumulated_grad, getattr(unsharded, "grad", None)), "gradients")
            if parameter.sharded_param.grad is not None:
                ledger.adopt(local(parameter.sharded_param.grad), "gradients")

    def chunk(original: Any, name: str) -> Any:
        def run(stage: PipelineStage, number: int, *args: Any, **options: Any) -> Any:
            ledger.record.chunks.append((len(ledger.record.operations), name, stage.stage_index, number))
            return original(stage, number, *args, **options)

        return run

    def microbatch(*args: Any, **options: Any) -> Tensor:
        ledger.record.microbatches.append(len(ledger.record.operations))
        return forward_backward(*args, **options)

    forward_backward = ParallelModel.forward_backward
    reduce = marked(FSDPParamGroup.post_backward, fsdp=True, kind="temporary", part="backward")
    propagate = "_propagate_tensor_meta_non_cached"
    with (
        patch.object(torch.UntypedStorage, "resize_", resized),
        patch.object(ShardingPropagator, propagate, marked(getattr(ShardingPropagator, propagate), paused=True)),
        patch.object(FSDPParamGroup, "unshard", gathering(FSDPParamGroup.unshard, waits=False)),
        patch.object(FSDPParamGroup, "wait_for_unshard", gathering(FSDPParamGroup.wait_for_unshard, waits=True)),
        patch.object(FSDPParamGroup, "post_backward", after_backward),
        patch.object(FSDPParamGroup, "pre_forward", placing(FSDPParamGroup.pre_forward)),
        patch.object(FSDPParamGroup, "post_forward", placing(FSDPParamGroup.post_forward, leaves=True)),
        patch.object(FSDPParamGroup, "pre_backward", placing(FSDPParamGroup.pre_backward)),
        patch.object(ParallelModel, "forward_backward", microbatch),
        patch.object(PipelineStage, "forward_one_chunk", chunk(PipelineStage.forward_one_chunk, "FORWARD")),
        patch.object(PipelineStage, "backward_one_chunk", chunk(PipelineStage.backward_one_chunk, "FULL_BACKWARD")),
        patch.object(OutputLoss, "__call__", marked(OutputLoss.__call__, part="loss")),
        patch.object(TrainStep, "_update", marked(TrainStep._update, part="update")),
        ledger,
    ):
        yield ledger
