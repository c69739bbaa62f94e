"""Fingerprints of a step: a few numbers of each tensor of the whole model, the same on every layout.

Of each tensor: shape, dtype, sum, sum of absolutes, largest absolute, and values at places that its name gives. A rank
writes what it holds of each, and where that lies in the whole; ``judge.read`` puts the parts of all ranks together.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from torchtrain.datasets.order import permute, stream_seed
from torchtrain.initialization import full_name
from torchtrain.log import BestEffort
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.torch_internals import compute_local_shape_and_global_offset

SAMPLES = 256  # values of a tensor that are kept
BLOCK = 1 << 24  # elements that exist in float64 at once
ROWS, SEQUENCE = -1, -2  # in place of a size that is not the model's
LOSS = "loss"


@dataclass
class Part:
    """What a rank has seen of a tensor. ``index``: along each dimension the indices in the whole that it holds."""

    dtype: str
    index: list[Tensor]
    figures: list[Tensor] = field(default_factory=list)  # sum, sum of absolutes, largest absolute
    places: list[Tensor] = field(default_factory=list)  # in the flattened whole tensor
    values: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """What of the batch, and of each matrix, is this rank's."""

    rows: range
    global_rows: int
    sequence: Tensor  # positions, in this rank's order
    seq_len: int
    tensor: tuple[int, int] = (0, 1)  # rank and ranks that matrices are split over
    rank: int = 0
    ranks: int = 1


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """By full name the modules that are watched. Not the output: its logits never need to exist all at once."""
    named = ((full_name(f"{name}.")[:-1], module) for name, module in model.named_modules())
    return {name: module for name, module in named if name not in ("", "output")}  # of a wrapper what it wraps


def watch(modules: Mapping[str, nn.Module], see: Callable[[str, Tensor], None]) -> Iterator[Any]:
    """Handles of hooks that call ``see(key, tensor)`` for what goes into a module and comes out, if it has a gradient.

    What goes in is a view of its own: its gradient is what this module gives, and no other that reads the same tensor.
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
    sizes = (config.vocab_size, config.ffn_dim, config.dim, config.n_heads * config.head_size)
    seq = 1 + max(sizes)  # unlike any other size
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
    return {**own, **forward, LOSS: [ROWS, SEQUENCE], **backward, **updates}


def ranges(index: Tensor) -> list[list[int]]:
    """The runs of successive numbers in ``index``: start and stop of each."""
    ends = torch.nonzero(index.diff() != 1).flatten() + 1
    return [[int(run[0]), int(run[-1]) + 1] for run in index.tensor_split(ends)]


class Fingerprints:
    """Writes those of steps to ``folder``. ``dtype``: in which the model computes."""

    def __init__(self, folder: Path, config: TransformerConfig, place: Place, dtype: str) -> None:
        self.folder = folder
        self.place = place
        self.dtype = dtype
        self.shapes = shapes_of(config)
        self.parts: dict[str, Part] = {}
        self.places: dict[str, Tensor] = {}  # of the samples: those of a tensor, its gradient and its update
        self.tokens = torch.empty(0)
        self.next_row: dict[nn.Module, int] = {}  # of each model's next microbatch
        self.rows: Tensor | None = None  # of the forward that is under way
        self.best_effort = BestEffort("fingerprints")

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

    def begin(self, tokens: Tensor) -> None:
        """The step begins, or begins again. ``tokens`` (rows, seq): of this rank's rows, in order."""
        self.tokens, self.next_row = tokens[:, self.place.sequence], {}
        self.parts = {key: part for key, part in self.parts.items() if " " not in key}  # parameters

    def _begin_forward(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        x, start = args[0], self.place.rows.start
        first = self.next_row.get(model, start)
        if not x.is_floating_point():  # tokens: where rows are left out, they tell which ones come
            tokens = x.to(self.tokens.device)
            later = range(first, self.place.rows.stop - len(x) + 1)
            first = next((r for r in later if torch.equal(self.tokens[r - start :][: len(x)], tokens)), first)
        self.next_row[model] = first + len(x)
        self.rows = torch.arange(first, first + len(x))

    def _end_forward(self, *_: Any) -> None:
        self.rows = None

    def _see(self, key: str, tensor: Tensor) -> None:
        rows = self.rows
        if rows is None:  # activation checkpointing computes it again
            return
        self.add(key, tensor.detach(), rows)
        seen: list[bool] = []

        def gradient(found: Tensor) -> None:
            if not seen:  # a backward in two passes may come by twice
                seen.append(True)
                self.add(f"{key} gradient", found, rows)

        tensor.register_hook(gradient)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def add(self, key: str, tensor: Tensor, rows: Tensor) -> None:
        """Note this rank's part of what the model computes for ``rows``."""
        if isinstance(tensor, DTensor):
            # Gradients of what all ranks read are sums that are still to be made.
            whole = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
            tensor = tensor.redistribute(placements=whole).to_local()
        own = {ROWS: rows, SEQUENCE: self.place.sequence}
        index = []
        for size, here in zip(self.shapes[key], tensor.shape, strict=True):
            held = own[size] if size in own else torch.arange(size)
            if len(held) != here:
                rank, ranks = self.place.tensor
                held = held.chunk(ranks)[rank]
            assert len(held) == here, f"{key}: {here} of {size} along a dimension"
            index.append(held)
        self._note(key, tensor, index)

    @torch.no_grad()
    def add_parameters(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        """Note this rank's part of the parameters ``tensors``, of any layout; ``what``: gradient, update, or none."""
        for name, tensor in tensors.items():
            local, offset = tensor, (0,) * tensor.ndim
            if isinstance(tensor, DTensor):
                mesh, placements = tensor.device_mesh, tensor.placements
                _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
                local = tensor.to_local()
            index = [torch.arange(start, start + size) for start, size in zip(offset, local.shape, strict=True)]
            self._note(f"{name} {what}".strip(), local, index)

    def add_loss(self, total: Tensor) -> None:
        """Note the sum of the losses of this rank's tokens."""
        part = self.parts[LOSS] = Part("float32", [torch.tensor(self.place.rows), self.place.sequence])
        part.figures.append(torch.stack((total, total, torch.ones_like(total))).double())  # no largest one is known
        part.places.append(torch.empty(0, dtype=torch.int64))
        part.values.append(torch.empty(0, dtype=torch.float64))

    def _shape(self, key: str) -> list[int]:
        own = {ROWS: self.place.global_rows, SEQUENCE: self.place.seq_len}
        return [own.get(size, size) for size in self.shapes[key]]

    def _note(self, key: str, tensor: Tensor, index: list[Tensor]) -> None:
        if tensor.numel() == 0:
            return
        name = key.removesuffix(" gradient").removesuffix(" update")
        # Gradients and updates were computed in self.dtype.
        dtype = str(tensor.dtype).removeprefix("torch.") if key == name else self.dtype
        part = self.parts.get(key)
        if part is None:
            part = self.parts[key] = Part(dtype, index)
        else:  # rows of another microbatch
            part.index[0] = torch.cat((part.index[0], index[0]))
        for block in torch.split(tensor.flatten(), BLOCK):
            wide = block.double()  # faster than sums of dtype float64
            size = wide.abs()
            part.figures.append(torch.stack((wide.sum(), size.sum(), size.max())))
        shape = self._shape(key)
        if name not in self.places:
            count = math.prod(shape)
            sampled = permute(np.arange(min(SAMPLES, count)), count, stream_seed("fingerprint", name))
            self.places[name] = torch.from_numpy(sampled)
        places = self.places[name]
        here = []
        for whole, along, held in zip(shape, torch.unravel_index(places, shape), index, strict=True):
            local = torch.full((whole,), -1)
            local[held] = torch.arange(len(held))
            here.append(local[along])
        inside = torch.stack(here).amin(dim=0) >= 0
        part.places.append(places[inside])
        part.values.append(tensor[tuple(i[inside].to(tensor.device) for i in here)].double())

    def write(self, step: int, tokens: Tensor, labels: Tensor) -> None:
        """Write what was seen of ``step``, and this rank's rows of the batch (rows, seq)."""
        tensors = {"tokens": tokens.to(torch.int32), "labels": labels.to(torch.int32)}
        entries = []
        for number, key in enumerate(self.shapes):
            if (part := self.parts.get(key)) is None:
                continue
            figures = torch.stack(part.figures)
            tensors[f"{number} figures"] = torch.cat((figures[:, :2].sum(0), figures[:, 2:].amax(0))).cpu()
            tensors[f"{number} places"] = torch.cat(part.places)
            tensors[f"{number} values"] = torch.cat(part.values).cpu()
            box = [ranges(index) for index in part.index]
            entries.append({"number": number, "key": key, "dtype": part.dtype, "shape": self._shape(key), "box": box})
        about = {"step": step, "ranks": self.place.ranks, "first_row": self.place.rows.start, "entries": entries}
        folder = self.folder / f"step-{step}"
        with self.best_effort:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"rank-{self.place.rank}.safetensors"
            save_file(tensors, file.with_suffix(".partial"), {"about": json.dumps(about)})
            file.with_suffix(".partial").rename(file)
        self.parts.clear()
