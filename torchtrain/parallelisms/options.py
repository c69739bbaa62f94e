"""Options of the layout: [parallelism], [activation_checkpoint] and [compile]."""

from dataclasses import dataclass
from typing import Literal

from torchtrain.config.section import Count, CountOrAuto, Fraction, Section, require


@dataclass(frozen=True)
class ParallelismConfig(Section, name="parallelism"):
    """Layout: data, tensor, context, pipeline parallelism."""

    data_parallel_replicate_degree: Count = 1
    """The degree of data parallelism for weight replication (HSDP): number of copies of the sharded model."""
    data_parallel_shard_degree: CountOrAuto = -1
    """The degree of data parallelism for weight sharding (FSDP): number of ranks over which parameters, gradients and
    optimizer states are sharded. -1: the world size divided by the other degrees."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether to free the all-gathered parameters of a block after its forward. default: free those of all blocks but
    the last, which backward needs next; with pipeline parallelism, where each microbatch would gather them again, and
    on one rank, free none."""
    fsdp_gradient_accumulation: Literal["sharded", "unsharded"] = "sharded"
    """How gradients are accumulated over microbatches, including those of a pipeline. sharded: reduce-scatter the
    gradient of each microbatch. unsharded: accumulate unsharded float32 gradients and reduce-scatter them once per
    step, which takes 4 bytes for each parameter of this rank's layers; for small models and slow links."""
    tensor_parallel_degree: Count = 1
    """Tensor parallelism degree: number of ranks over which each weight matrix is sharded. 1: disabled."""
    enable_sequence_parallel: bool = True
    """With tensor parallelism, also shard norms and the residual stream along the sequence."""
    enable_async_tensor_parallel: bool = False
    """Overlap the collectives of tensor parallelism with matrix products (CUDA and compile.enable only)."""
    context_parallel_degree: Count = 1
    """Context parallelism degree: number of ranks over which each sequence is sharded. 1: disabled."""
    pipeline_parallel_degree: Count = 1
    """Pipeline parallelism degree: number of ranks over which the layers are split. 1: disabled."""
    pipeline_parallel_schedule: Literal[
        "1F1B", "Interleaved1F1B", "GPipe", "InterleavedZeroBubble", "ZBVZeroBubble"
    ] = "1F1B"
    """Pipeline schedule. 1F1B and GPipe have one stage per rank, ZBVZeroBubble has two, and the interleaved schedules
    have two or as many as pipeline_parallel_layers_per_stage defines."""
    pipeline_parallel_microbatches: CountOrAuto = -1
    """Number of microbatches into which a pipeline splits local_batch_size sequences. -1: one per sequence."""
    pipeline_parallel_layers_per_stage: tuple[Count, ...] = ()
    """Number of layers of each stage, from first to last. Empty: an even split, in which the embedding and the output
    layer count as one layer each."""


@dataclass(frozen=True)
class ActivationCheckpointConfig(Section, name="activation_checkpoint"):
    """Recomputation of activations in backward."""

    mode: Literal["none", "selective", "full", "memory_budget"] = "none"
    """Activation checkpointing: which activations are recomputed in backward. none: none; selective: some, as
    selective_option says; full: all activations of each block; memory_budget: the compiler chooses (compile.enable
    only)."""
    selective_option: str = "op"
    """For mode = "selective". op: save the results of expensive ops and recompute the others; an int n: recompute all
    activations of every n-th block."""
    memory_budget: Fraction = 0.5
    """For mode = "memory_budget": fraction of the activations of a block that the compiler may save. 0 recomputes all
    activations, 1 none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        option = self.selective_option
        require(
            option == "op" or (option.isdecimal() and int(option) >= 1),
            f"activation_checkpoint.selective_option = {option!r} must be 'op' or an integer from 1, such as '2'",
        )


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile."""

    enable: bool = False
    """Apply torch.compile to each transformer block and to the loss."""
