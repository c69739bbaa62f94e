"""Record fingerprints of a training step: a few numbers of each tensor of the model, the same on every layout.

A fingerprint has a tensor's dtype, shape, sum, sum of absolute values, maximum absolute value, and values at random
indices that depend only on its name and shape. Every rank records its parts of the tensors, with their global indices;
the first rank assembles the parts of all ranks.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from torchtrain.datasets.dataloader import Batch
from torchtrain.datasets.order import permute, stream_seed
from torchtrain.distributed.mesh import Mesh, local
from torchtrain.models.parameters import full_name, local_block
from torchtrain.models.spec import DecoderConfig, build_model
from torchtrain.plugins.comparison.fingerprints import Box, Fingerprint, RankPart, StepFingerprints, assemble, merge

SAMPLES = 256  # values recorded per tensor
ROWS, SEQUENCE = -1, -2  # symbolic sizes in shapes: rows of the batch, and positions of the sequence
BATCH, LOSS = "batch", "loss"


def recorded_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by full name except the output layer, whose logits may never exist as one tensor."""
    named = ((full_name(f"{name}.")[:-1], module) for name, module in model.named_modules())
    # A wrapper has the same full name as the module it wraps, which comes later and replaces it.
    return {name: module for name, module in named if name not in ("", "output")}


def register_hooks(modules: Mapping[str, nn.Module], record: Callable[[str, Tensor], None]) -> Iterator[Any]:
    """Register hooks that call ``record(key, tensor)`` for the inputs and outputs of modules that require a gradient.

    Each input is replaced by a view of it, so that the gradient of the view is the gradient through this module only.
    The keys of a module with several inputs end with q, k, v, 3 and so on.

    Yields:
        The handles of the hooks.
    """

    def record_inputs(name: str, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        differentiable = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.requires_grad]
        views = tuple(x.view_as(x) if i in differentiable else x for i, x in enumerate(args))
        for i in differentiable:
            which = f" {'qkv'[i] if i < 3 else i}" if len(differentiable) > 1 else ""
            record(f"{name} input{which}", views[i])
        return views

    def record_output(name: str, _: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        if isinstance(output, Tensor) and output.requires_grad:
            record(f"{name} output", output)

    for name, module in modules.items():
        yield module.register_forward_pre_hook(partial(record_inputs, name))
        yield module.register_forward_hook(partial(record_output, name))


def tensor_shapes(config: DecoderConfig) -> dict[str, list[int]]:
    """Return the global shape of every recorded tensor by its key, in the order of execution.

    ``ROWS`` and ``SEQUENCE`` stand for sizes that do not depend on the model.
    """
    with torch.device("meta"):
        model = build_model(config)
    # The dimensions whose sizes differ between two sequence lengths. A model may support no longer ones.
    lengths = config.max_seq_len, config.max_seq_len // 2 or 2
    found: dict[str, torch.Size] = {}

    def record(key: str, tensor: Tensor) -> None:
        found[key] = tensor.shape

    list(register_hooks(recorded_modules(model), record))
    both = []
    for seq in lengths:
        tokens = torch.zeros(1, seq, dtype=torch.int64, device="meta")
        model(tokens, positions=tokens, head=lambda hidden, _: hidden)
        both.append(dict(found))
    forward: dict[str, list[int]] = {}
    for key, whole in both[0].items():
        sizes = zip(whole[1:], both[1][key][1:], strict=True)
        forward[key] = [ROWS, *(size if size == other else SEQUENCE for size, other in sizes)]
    parameters = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    backward = {f"{name} gradient": shape for name, shape in parameters.items() if name.startswith("output.")}
    for key, shape in reversed(forward.items()):
        backward[f"{key} gradient"] = shape
        module = key.removesuffix(" output")
        backward |= {f"{n} gradient": s for n, s in parameters.items() if n.rpartition(".")[0] == module}
    # Those of modules that are not called, such as an embedding of positions whose weight is added.
    backward |= {f"{n} gradient": s for n, s in parameters.items() if f"{n} gradient" not in backward}
    updates = {f"{name} update": shape for name, shape in parameters.items()}
    return {BATCH: [ROWS, SEQUENCE], **parameters, **forward, LOSS: [ROWS, SEQUENCE], **backward, **updates}


def index_ranges(indices: Iterable[Tensor]) -> Box:
    """Return the ranges of consecutive numbers in the indices of each dimension."""
    ends = ((index, torch.nonzero(index.diff() != 1).flatten() + 1) for index in indices)
    return [[(int(run[0]), int(run[-1]) + 1) for run in index.tensor_split(end)] for index, end in ends]


@cache
def sample_indices(name: str, shape: tuple[int, ...]) -> list[Tensor]:
    """Return the indices along each dimension of a tensor's samples, which its gradient and its update share."""
    count = math.prod(shape)
    chosen = permute(np.arange(min(SAMPLES, count)), count, stream_seed("fingerprint", name))
    return [index.contiguous() for index in torch.unravel_index(torch.from_numpy(chosen), shape)]


class Samples(NamedTuple):
    """Where the samples of a tensor are in the part of it that this rank has."""

    box: Box
    at: list[Tensor]
    """Index of each sample along each dimension of the part; any index for a sample that this rank does not have."""
    present: Tensor
    """Whether this rank has the sample."""

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], indices: list[Tensor]) -> "Samples":
        """The samples of the tensor ``name`` in the part with these ``indices`` along each dimension."""
        samples = sample_indices(name, shape)
        at = [torch.searchsorted(index[:-1], i) for index, i in zip(indices, samples, strict=True)]
        present = torch.stack([index[j] == i for index, j, i in zip(indices, at, samples, strict=True)]).all(dim=0)
        return cls(index_ranges(indices), at, present)


class FingerprintRecorder:
    """Records fingerprints of the tensors that this rank computes in a step.

    Args:
        config: config of the global model.
        dtype: dtype in which the model computes.
        global_rows: rows of the global batch.
        sequence: the positions of each sequence that this rank has, in its order.
    """

    def __init__(self, config: DecoderConfig, mesh: Mesh, dtype: str, global_rows: int, sequence: Tensor) -> None:
        self.tensor_parallel = mesh.tensor
        self.dtype = dtype
        self.shapes = tensor_shapes(config)
        rows = global_rows // mesh.degrees.batch
        first = mesh.degrees.batch_rank(dist.get_rank()) * rows
        self.local_indices = {ROWS: torch.arange(first, first + rows), SEQUENCE: sequence}
        self.global_sizes = {ROWS: global_rows, SEQUENCE: len(sequence) * mesh.degrees.context}
        self.parts: dict[str, RankPart] = {}
        self.samples: dict[tuple[str, int, tuple[int, ...]], Samples] = {}
        """By name, first row and shape of a part: of the gradient, the update, and later steps they are the same."""
        self.tokens = torch.empty(0)  # of this rank's rows and positions
        self.next_row: dict[nn.Module, int] = {}  # for each model part, the first row of its next microbatch
        self.rows: Tensor | None = None  # global indices of the rows in the current forward

    @contextmanager
    def recording(self, models: Mapping[nn.Module, Mapping[str, nn.Module]]) -> Iterator[None]:
        """Context manager that records the inputs and outputs of the named modules of each model part."""
        with ExitStack() as stack:
            for model, modules in models.items():
                stack.enter_context(model.register_forward_pre_hook(self._begin_forward))
                stack.enter_context(model.register_forward_hook(self._end_forward))
                for handle in register_hooks(modules, self._record_activation):
                    stack.enter_context(handle)
            yield

    def begin(self, tokens: Tensor, parameters: Mapping[str, Tensor]) -> None:
        """Begin a step, and discard what was recorded of it before.

        Args:
            tokens: the rows of this rank in order, of shape (rows, seq).
        """
        self.tokens, self.next_row = tokens[:, self.local_indices[SEQUENCE]], {}
        self.parts.clear()
        self._record(BATCH, self.tokens.double(), self.local_indices[ROWS])
        self.add_parameters("", parameters)

    def _begin_forward(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0]
        first = self.next_row.get(model, 0)
        if not x.is_floating_point():  # the first stage gets tokens, which show whether microbatches were skipped
            candidates = range(first, len(self.tokens) - len(x) + 1)
            first = next((row for row in candidates if torch.equal(self.tokens[row : row + len(x)], x.cpu())), first)
        self.next_row[model] = first + len(x)
        self.rows = self.local_indices[ROWS][first : first + len(x)]

    def _end_forward(self, *_: Any) -> None:
        self.rows = None

    def _record_activation(self, key: str, tensor: Tensor) -> None:
        """Record an activation, and its gradient once it is computed."""
        rows = self.rows
        if rows is None:  # a recomputation by activation checkpointing
            return
        self._record(key, tensor.detach(), rows)

        def record_gradient(gradient: Tensor) -> None:
            handle.remove()  # a backward in two passes may call the hook twice
            self._record(f"{key} gradient", gradient, rows)

        handle = tensor.register_hook(record_gradient)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _record(self, key: str, tensor: Tensor, rows: Tensor) -> None:
        """Record this rank's part of the batch, an activation or its gradient, for the global ``rows``.

        A tensor is left out if the model on one device does not have it, or if its shape is not that of a part of it:
        the model may have been parallelized by a function of the user.
        """
        if isinstance(tensor, DTensor):
            # Gradients of replicated activations are partial sums.
            placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
            tensor = tensor.redistribute(placements=placements).to_local()
        shape = self.shapes.get(key, [])
        if len(shape) != tensor.ndim:
            return
        local_indices = {**self.local_indices, ROWS: rows}
        indices = []
        for size, local_size in zip(shape, tensor.shape, strict=True):
            index = local_indices[size] if size in local_indices else torch.arange(size)
            if len(index) != local_size:
                index = index.chunk(self.tensor_parallel.size())[self.tensor_parallel.get_local_rank()]
            if len(index) != local_size:
                return
            indices.append(index)
        self._record_part(key, tensor, indices, int(rows[0]))

    @torch.no_grad()
    def add_parameters(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        """Record this rank's shards of parameters, or of their gradients or updates.

        Args:
            what: "gradient", "update", or "" for the parameters themselves.
            tensors: tensors or DTensors by full name, on any layout.
        """
        for name, tensor in tensors.items():
            if name not in self.shapes:  # of a model that a function of the user has changed
                continue
            block, spans = local_block(tensor)
            indices = [torch.arange(span.start, span.stop) for span in spans]
            self._record_part(f"{name} {what}".strip(), local(block), indices)

    def add_loss(self, total: Tensor) -> None:
        """Record the sum of the losses of this rank's tokens."""
        numbers = np.array([total.item(), total.item(), 1.0, total.item()])  # the maximum is not known
        fingerprint = Fingerprint("float32", list(self.global_sizes.values()), "", numbers)
        self.parts[LOSS] = index_ranges(self.local_indices.values()), fingerprint

    def _record_part(self, key: str, tensor: Tensor, indices: list[Tensor], first_row: int = 0) -> None:
        """Record the part of a global tensor that has these ``indices`` along each dimension."""
        if tensor.numel() == 0:
            return
        name = key.removesuffix(" gradient").removesuffix(" update")
        # Gradients and updates may be stored as float32, but were computed in self.dtype.
        dtype = str(tensor.dtype).removeprefix("torch.") if key == name else self.dtype
        shape = [self.global_sizes.get(size, size) for size in self.shapes[key]]
        known = name, first_row, tuple(tensor.shape)
        if known not in self.samples:
            self.samples[known] = Samples.of(name, tuple(shape), indices)
        samples = self.samples[known]
        values = torch.where(
            samples.present, tensor[tuple(j.to(tensor.device) for j in samples.at)].double().cpu(), 0.0
        )
        flat, absolute = tensor.flatten(), tensor.flatten().abs()
        sums = flat.sum(dtype=torch.float64), absolute.sum(dtype=torch.float64)
        statistics = torch.stack((*sums, absolute.max().to(torch.float64)))
        box, part = samples.box, Fingerprint(dtype, shape, "", torch.cat((statistics.cpu(), values)).numpy())
        if key in self.parts:  # the rows of an earlier microbatch
            (earlier_rows, *_), earlier = self.parts[key]
            box = [earlier_rows + box[0], *box[1:]]
            part = merge((earlier, part))
        self.parts[key] = box, part

    def collect(self, batch: Batch) -> StepFingerprints | None:
        """Gather the fingerprints of all ranks on the first rank. All ranks must call this.

        Args:
            batch: the rows of this rank.

        Returns:
            The fingerprints of the step on rank 0, None on other ranks.
        """
        rows_here = torch.stack((batch.tokens, batch.labels), dim=1).int().numpy()
        recorded = self.local_indices[ROWS].tolist(), rows_here, self.parts
        ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(recorded, ranks)
        if ranks is None:
            return None
        rows = dict(row for numbers, values, _ in ranks for row in zip(numbers, values, strict=True))
        tensors = {key: assemble(parts) for key, parts in self.by_tensor([parts for *_, parts in ranks]).items()}
        return StepFingerprints(tensors, np.stack([rows[number] for number in sorted(rows)]))

    def by_tensor(self, recorded: Sequence[Mapping[str, RankPart]]) -> dict[str, dict[int, RankPart]]:
        """The parts of each tensor by rank, in the order of execution, from the ``parts`` of each rank."""
        by_rank = {key: {r: parts[key] for r, parts in enumerate(recorded) if key in parts} for key in self.shapes}
        return {key: parts for key, parts in by_rank.items() if parts}
