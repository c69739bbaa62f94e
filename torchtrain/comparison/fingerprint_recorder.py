"""Fingerprints of a step: a few numbers of each tensor of the whole model, the same on every layout.

Of each tensor: dtype, shape, sum, sum of absolutes, largest absolute, and values at places seeded by its name. A rank
notes what it holds of each, and where that lies in the whole; the first rank puts the parts of all together.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from torchtrain.comparison.fingerprint_findings import Box, Fingerprint, Step, together, whole
from torchtrain.datasets.loader import Batch
from torchtrain.datasets.order import permute, stream_seed
from torchtrain.distributed.mesh import Mesh, local
from torchtrain.models.initialization import block_held, full_name
from torchtrain.models.llama import Transformer, TransformerConfig

SAMPLES = 256  # values of a tensor that are kept
ROWS, SEQUENCE = -1, -2  # in place of a size that is not the model's
BATCH, LOSS = "batch", "loss"


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """By full name the modules that are watched. Not the output: its logits never need to exist all at once."""
    named = ((full_name(f"{name}.")[:-1], module) for name, module in model.named_modules())
    return {name: module for name, module in named if name not in ("", "output")}  # of a wrapper what it wraps


def watch(modules: Mapping[str, nn.Module], see: Callable[[str, Tensor], None]) -> Iterator[Any]:
    """Handles of hooks that call ``see(key, tensor)`` for what goes into a module and comes out, if it has a gradient.

    Each input is replaced by a view, so that its gradient is that through this module alone. Three inputs: q, k, v.
    """

    def before(name: str, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        own = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.requires_grad]
        views = tuple(x.view_as(x) if i in own else x for i, x in enumerate(args))
        for i in own:
            see(f"{name} input" + (f" {'qkv'[i]}" if len(own) > 1 else ""), views[i])
        return views

    def after(name: str, _: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        if isinstance(output, Tensor) and output.requires_grad:
            see(f"{name} output", output)

    for name, module in modules.items():
        yield module.register_forward_pre_hook(partial(before, name))
        yield module.register_forward_hook(partial(after, name))


def shapes_of(config: TransformerConfig) -> dict[str, list[int]]:
    """Every key there is, in the order of execution, with the shape of its tensor, ``ROWS`` and ``SEQUENCE`` in it."""
    with torch.device("meta"):
        model = Transformer(config)
    seq = 1 + max(config.vocab_size, config.ffn_dim, config.dim, config.n_heads * config.head_size)  # unlike any other
    forward: dict[str, list[int]] = {}

    def see(key: str, tensor: Tensor) -> None:
        forward[key] = [ROWS, *(SEQUENCE if size == seq else size for size in tensor.shape[1:])]

    tokens = torch.zeros(1, seq, dtype=torch.int64, device="meta")
    list(watch(modules_of(model), see))
    model(tokens, positions=tokens, head=lambda hidden, _: hidden)
    own = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    backward = {f"{name} gradient": shape for name, shape in own.items() if name.startswith("output.")}
    for key, shape in reversed(forward.items()):
        backward[f"{key} gradient"] = shape
        module = key.removesuffix(" output")
        backward |= {f"{n} gradient": s for n, s in own.items() if n.rpartition(".")[0] == module}
    updates = {f"{name} update": shape for name, shape in own.items()}
    return {BATCH: [ROWS, SEQUENCE], **own, **forward, LOSS: [ROWS, SEQUENCE], **backward, **updates}


def box_of(indices: Iterable[Tensor]) -> Box:
    """The runs of successive numbers in the index of each dimension."""
    ends = ((index, torch.nonzero(index.diff() != 1).flatten() + 1) for index in indices)
    return [[(int(run[0]), int(run[-1]) + 1) for run in index.tensor_split(end)] for index, end in ends]


@cache
def places(name: str, shape: tuple[int, ...]) -> list[Tensor]:
    """Of the samples of a tensor, its gradient and its update: indices along each dimension."""
    count = math.prod(shape)
    chosen = permute(np.arange(min(SAMPLES, count)), count, stream_seed("fingerprint", name))
    return [index.contiguous() for index in torch.unravel_index(torch.from_numpy(chosen), shape)]


class Fingerprints:
    """Takes them, step by step, of what this rank computes."""

    def __init__(self, config: TransformerConfig, mesh: Mesh, dtype: str, global_rows: int, sequence: Tensor) -> None:
        """``dtype``: in which the model computes. ``sequence``: this rank's positions of a sequence, in its order."""
        self.tensor_parallel = mesh.tensor
        self.dtype = dtype
        self.shapes = shapes_of(config)
        rows = global_rows // mesh.degrees.batch
        first = mesh.degrees.batch_rank(dist.get_rank()) * rows
        self.own = {ROWS: torch.arange(first, first + rows), SEQUENCE: sequence}
        self.whole = {ROWS: global_rows, SEQUENCE: len(sequence) * mesh.degrees.context}
        self.parts: dict[str, tuple[Box, Fingerprint]] = {}
        self.tokens = torch.empty(0)  # of this rank's rows
        self.next_row: dict[nn.Module, int] = {}  # of these: each model's next microbatch
        self.rows: Tensor | None = None  # of the forward that is under way

    @contextmanager
    def watching(self, models: Mapping[nn.Module, Mapping[str, nn.Module]]) -> Iterator[None]:
        """Within, what the named modules of each model take and give is noted."""
        with ExitStack() as stack:
            for model, modules in models.items():
                stack.enter_context(model.register_forward_pre_hook(self._begin_forward))
                stack.enter_context(model.register_forward_hook(self._end_forward))
                for handle in watch(modules, self._see):
                    stack.enter_context(handle)
            yield

    def begin(self, tokens: Tensor, parameters: Mapping[str, Tensor]) -> None:
        """The step begins, or begins again. ``tokens`` (rows, seq): of this rank's rows, in order."""
        self.tokens, self.next_row = tokens[:, self.own[SEQUENCE]], {}
        self.parts.clear()
        self._add(BATCH, self.tokens.double(), self.own[ROWS])
        self.add_parameters("", parameters)

    def _begin_forward(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0]
        first = self.next_row.get(model, 0)
        if not x.is_floating_point():  # tokens: where rows are left out, they tell which ones come
            later = range(first, len(self.tokens) - len(x) + 1)
            first = next((row for row in later if torch.equal(self.tokens[row : row + len(x)], x.cpu())), first)
        self.next_row[model] = first + len(x)
        self.rows = self.own[ROWS][first : first + len(x)]

    def _end_forward(self, *_: Any) -> None:
        self.rows = None

    def _see(self, key: str, tensor: Tensor) -> None:
        rows = self.rows
        if rows is None:  # activation checkpointing computes it again
            return
        self._add(key, tensor.detach(), rows)

        def gradient(found: Tensor) -> None:
            handle.remove()  # a backward in two passes may come by twice
            self._add(f"{key} gradient", found, rows)

        handle = tensor.register_hook(gradient)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _add(self, key: str, tensor: Tensor, rows: Tensor) -> None:
        """Note this rank's part of what the model computes for ``rows``."""
        if isinstance(tensor, DTensor):
            # Gradients of what all ranks read are sums that are still to be made.
            done = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
            tensor = tensor.redistribute(placements=done).to_local()
        own = {**self.own, ROWS: rows}
        index = []
        for size, here in zip(self.shapes[key], tensor.shape, strict=True):
            held = own[size] if size in own else torch.arange(size)
            if len(held) != here:
                held = held.chunk(self.tensor_parallel.size())[self.tensor_parallel.get_local_rank()]
            assert len(held) == here, f"{key}: {here} of {size} along a dimension"
            index.append(held)
        self._note(key, tensor, index)

    @torch.no_grad()
    def add_parameters(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        """Note this rank's part of the parameters ``tensors``, of any layout; ``what``: gradient, update, or none."""
        for name, tensor in tensors.items():
            held, spans = block_held(tensor)
            index = [torch.arange(span.start, span.stop) for span in spans]
            self._note(f"{name} {what}".strip(), local(held), index)

    def add_loss(self, total: Tensor) -> None:
        """Note the sum of the losses of this rank's tokens."""
        numbers = np.array([total.item(), total.item(), 1.0, total.item()])  # no largest one is known
        self.parts[LOSS] = box_of(self.own.values()), Fingerprint("float32", list(self.whole.values()), "", numbers)

    def _note(self, key: str, tensor: Tensor, index: list[Tensor]) -> None:
        if tensor.numel() == 0:
            return
        name = key.removesuffix(" gradient").removesuffix(" update")
        # Gradients and updates were computed in self.dtype.
        dtype = str(tensor.dtype).removeprefix("torch.") if key == name else self.dtype
        shape = [self.whole.get(size, size) for size in self.shapes[key]]
        along = places(name, tuple(shape))
        at = [torch.searchsorted(held[:-1], i) for held, i in zip(index, along, strict=True)]
        here = torch.stack([held[j] == i for held, j, i in zip(index, at, along, strict=True)]).all(dim=0)
        values = torch.where(here, tensor[tuple(j.to(tensor.device) for j in at)].double().cpu(), 0.0)
        flat, wide = tensor.flatten(), torch.float64
        absolute = flat.abs()
        figures = torch.stack((flat.sum(dtype=wide), absolute.sum(dtype=wide), absolute.max().to(wide)))
        box, part = box_of(index), Fingerprint(dtype, shape, "", torch.cat((figures.cpu(), values)).numpy())
        if key in self.parts:  # rows of another microbatch
            earlier_box, earlier = self.parts[key]
            box[0] = earlier_box[0] + box[0]
            part = together((earlier, part))
        self.parts[key] = box, part

    def collect(self, batch: Batch) -> Step | None:
        """What all ranks have noted of the step, on the first one. Collective. ``batch``: of this rank's rows."""
        own = self.own[ROWS].tolist(), torch.stack((batch.tokens, batch.labels), dim=1).int().numpy(), self.parts
        ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own, ranks)
        if ranks is None:
            return None
        rows = dict(row for numbers, held, _ in ranks for row in zip(numbers, held, strict=True))
        tensors = {}
        for key in self.shapes:
            if parts := {rank: held[key] for rank, (_, _, held) in enumerate(ranks) if key in held}:
                tensors[key] = whole(parts)
        return Step(tensors, np.stack([rows[number] for number in sorted(rows)]))
