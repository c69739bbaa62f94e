"""What a ledger cannot see from operations: where in a step and a model they are, and what FSDP does with storages."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.pipelining import PipelineStage

from torchtrain.distributed.mesh import local
from torchtrain.models.loss import OutputLoss
from torchtrain.planning.ledger import Ledger
from torchtrain.torch_internals import FSDPParamGroup, ShardingPropagator
from torchtrain.trainer import StepHook


class LedgerHook(StepHook):
    """Records in ``ledger`` where microbatches begin, and what belongs to the optimizer's update."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def before_microbatch(self, index: int) -> None:  # noqa: ARG002
        self.ledger.record.microbatches.append(len(self.ledger.record.operations))

    def after_backward(self) -> None:
        self.ledger.part = "update"

    def after_step(self, *_: Any) -> None:
        self.ledger.part = "forward"


@contextmanager
def following(ledger: Ledger) -> Iterator[Ledger]:
    """Tell ``ledger`` what it cannot see from operations: sizes of storages, FSDP's doings, DTensor's trial tensors."""

    def at(
        owner: type, name: str, see: Callable[..., None] = lambda *_: None, **values: Any
    ) -> AbstractContextManager[Any]:
        """Call ``see`` before each call of a method, with its arguments; in both the ledger has these ``values``."""
        original = getattr(owner, name)

        def run(*args: Any, **options: Any) -> Any:
            with ledger.marking(**values):
                see(*args)
                return original(*args, **options)

        return patch.object(owner, name, run)

    def enter(group: FSDPParamGroup, *_: Any) -> None:
        ledger.module = group._module_fqn or ""

    def leave(*_: Any) -> None:
        ledger.module = ""

    def gather(group: FSDPParamGroup, *_: Any) -> None:
        enter(group)
        if ledger.offloaded and not (group.is_unsharded or group._all_gather_result):
            ledger.crossed("copy_to_gpu", group)

    def wait(group: FSDPParamGroup, *_: Any) -> None:
        enter(group)
        if group._all_gather_result is not None:
            ledger.issue("wait")

    def after_backward(group: FSDPParamGroup, *args: Any) -> Any:
        # What is added to on the host must be there; a first gradient is waited for at the step's end alone.
        waits = any(parameter.sharded_param.grad is not None for parameter in group.fsdp_params)
        with ledger.marking(fsdp=True, kind="temporary", part="backward"):
            reduce(group, *args)
        if ledger.offloaded and group.reduce_grads and (group.all_reduce_grads or not group._is_hsdp):
            ledger.crossed("copy_to_host_and_wait" if waits else "copy_to_host", group)
        ledger.adopt(group._partial_reduce_output, "gradients")  # of HSDP, between microbatches
        for parameter in group.fsdp_params:
            unsharded = getattr(parameter, "_unsharded_param", None)
            ledger.adopt((parameter.unsharded_accumulated_grad, getattr(unsharded, "grad", None)), "gradients")
            if parameter.sharded_param.grad is not None:
                ledger.adopt(local(parameter.sharded_param.grad), "gradients")

    def chunk(name: str, stage: PipelineStage, number: int, *_: Any) -> None:
        ledger.record.chunks[len(ledger.record.operations)] = name, stage.stage_index // stage.group_size, number

    reduce = FSDPParamGroup.post_backward
    gathering = {"module": "", "fsdp": True, "kind": "gathered"}
    with (
        at(torch.UntypedStorage, "resize_", ledger.resized),
        at(ShardingPropagator, "_propagate_tensor_meta_non_cached", paused=True),
        at(FSDPParamGroup, "unshard", gather, **gathering),
        at(FSDPParamGroup, "wait_for_unshard", wait, **gathering),
        patch.object(FSDPParamGroup, "post_backward", after_backward),
        at(FSDPParamGroup, "pre_forward", enter),
        at(FSDPParamGroup, "post_forward", leave),
        at(FSDPParamGroup, "pre_backward", enter),
        at(PipelineStage, "forward_one_chunk", partial(chunk, "FORWARD")),
        at(PipelineStage, "backward_one_chunk", partial(chunk, "FULL_BACKWARD")),
        at(OutputLoss, "__call__", part="loss"),
        ledger,
    ):
        yield ledger
