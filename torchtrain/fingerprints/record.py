"""Fingerprints of a step: what the tensors of the whole model are like, told the same on every layout.

Of each tensor: shape, dtype, sum, sum of absolutes, largest absolute, and values at places that its name gives. A rank
writes what it holds of each, and where that lies in the whole; ``judge.read`` puts the parts of all ranks together.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from torchtrain.distributed.mesh import Mesh
from torchtrain.initialization import full_name
from torchtrain.log import BestEffort
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.torch_internals import compute_local_shape_and_global_offset

SAMPLES = 256  # values of a tensor that are kept
BLOCK = 1 << 24  # elements that exist in float64 at once
Ranges = tuple[tuple[int, int], ...]  # start and stop of what a rank holds along one dimension, in its order
ROWS, SEQUENCE = -1, -2  # in place of a size that is not the model's
LOSS = "loss"


@dataclass
class Part:
    """What one rank has seen of a tensor: its ``box`` of it, and (sum, sum of absolutes, largest absolute)."""

    dtype: str
    shape: list[int]
    box: list[Ranges]
    figures: list[Tensor] = field(default_factory=list)
    places: list[Tensor] = field(default_factory=list)  # in the flattened whole tensor
    values: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """What of the batch, and of each matrix, is this rank's. The default: all."""

    global_rows: int
    seq_len: int
    rows: range
    rank: int = 0
    context: tuple[int, int] = (0, 1)  # rank and ranks
    tensor: tuple[int, int] = (0, 1)

    @classmethod
    def of_rank(cls, mesh: Mesh, rank: int, global_rows: int, seq_len: int) -> "Place":
        count = global_rows // mesh.degrees.batch
        first = mesh.degrees.batch_rank(rank) * count
        context, tensor = ((axis.get_local_rank(), axis.size()) for axis in (mesh.context, mesh.tensor))
        return cls(global_rows, seq_len, range(first, first + count), rank, context, tensor)

    @property
    def sequence(self) -> Ranges:
        """Of n ranks the r-th has the r-th of 2 n chunks, and the r-th from the end (``context_parallel``)."""
        rank, ranks = self.context
        if ranks == 1:
            return ((0, self.seq_len),)
        size = self.seq_len // (2 * ranks)
        return tuple((chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * ranks - 1 - rank))


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """By full name the modules that are watched. Not the output: its logits never need to exist all at once."""
    named = ((full_name(f"{name}.")[:-1], module) for name, module in model.named_modules())
    return {name: module for name, module in named if name not in ("", "output")}  # of a wrapper what it wraps


def watch(modules: Mapping[str, nn.Module], see: Callable[[str, Tensor], None]) -> Iterator[Any]:
    """Handles of hooks that call ``see(key, tensor)`` for what goes into a module and comes out, if it has a gradient.

    What goes in is a view of its own: its gradient is what this module gives, and no other that reads the same tensor.
    """

    def before(name: str, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        changed = list(args)
        own = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.requires_grad]
        for i in own:
            changed[i] = args[i].view_as(args[i])
            see(f"{name} input" + (f" {'qkv'[i]}" if len(own) > 1 else ""), changed[i])
        return tuple(changed)

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


def part_of(ranges: Ranges, rank: int, ranks: int) -> Ranges:
    """The ``rank``-th of ``ranks`` chunks, as torch.chunk cuts them, of what lies in ``ranges``, end to end."""
    size = -(-length(ranges) // ranks)
    found, seen = [], 0
    for start, stop in ranges:
        low, high = max(rank * size - seen, 0), min((rank + 1) * size - seen, stop - start)
        if low < high:
            found.append((start + low, start + high))
        seen += stop - start
    return tuple(found)


def length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


class Fingerprints:
    """Writes those of ``steps`` to ``folder``. ``dtype``: in which the model computes."""

    def __init__(
        self, folder: Path, steps: Sequence[int], config: TransformerConfig, place: Place, dtype: str, ranks: int = 1
    ) -> None:
        self.folder = folder
        self.steps = frozenset(steps)
        self.place = place
        self.dtype = dtype
        self.ranks = ranks
        self.shapes = shapes_of(config)
        self.parts: dict[str, Part] = {}
        self.places: dict[str, np.ndarray[Any, Any]] = {}  # of the samples of a tensor
        self.tokens = torch.empty(0)
        self.next_row: dict[int, int] = {}  # of each model's next microbatch
        self.now: dict[int, tuple[int, int]] = {}  # rows of the forward that is under way, if one is
        self.best_effort = BestEffort("fingerprints")

    @contextmanager
    def watching(self, models: Mapping[nn.Module, Mapping[str, nn.Module]]) -> Iterator[None]:
        """Within, what the modules of each model take and give, by name, is seen: that of the step's rows in order."""
        with ExitStack() as stack:
            for model, modules in models.items():
                key = id(model)
                handles = [
                    model.register_forward_pre_hook(partial(self._begin, key)),
                    *watch(modules, partial(self._see, key)),
                    model.register_forward_hook(partial(self._end, key)),
                ]
                for handle in handles:
                    stack.callback(handle.remove)
            yield

    def begin(self, tokens: Tensor) -> None:
        """The step begins, or begins again. ``tokens`` (rows, seq): of this rank's rows, in order."""
        parts = [tokens[:, start:stop] for start, stop in self.place.sequence]
        self.tokens, self.next_row = torch.cat(parts, dim=1), {}
        self.parts = {key: part for key, part in self.parts.items() if " " not in key}

    def _begin(self, model: int, _: nn.Module, args: tuple[Any, ...]) -> None:
        x, start = args[0], self.place.rows.start
        first = self.next_row.get(model, start)
        if not x.is_floating_point():  # where rows are left out, those that come are known by their tokens
            later = range(first, self.place.rows.stop - len(x) + 1)
            mine = x.to(self.tokens.device)
            first = next((r for r in later if torch.equal(self.tokens[r - start : r - start + len(x)], mine)), first)
        self.next_row[model] = first + len(x)
        self.now[model] = (first, first + len(x))

    def _end(self, model: int, *_: Any) -> None:
        del self.now[model]

    def _see(self, model: int, key: str, tensor: Tensor) -> None:
        rows = self.now.get(model)
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
    def add(self, key: str, tensor: Tensor, rows: tuple[int, int]) -> None:
        """Note this rank's part of what the model computes for ``rows``."""
        if isinstance(tensor, DTensor):
            # Gradients of what all ranks read are sums that are still to be made.
            whole = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
            tensor = tensor.redistribute(placements=whole).to_local()
        self._note(key, tensor, self._box(key, tensor.shape, rows))

    def _box(self, key: str, local: torch.Size, rows: tuple[int, int]) -> list[Ranges]:
        own: dict[int, Ranges] = {ROWS: (rows,), SEQUENCE: self.place.sequence}
        box = []
        for size, here in zip(self.shapes[key], local, strict=True):
            whole = own.get(size, ((0, size),))
            box.append(whole if length(whole) == here else part_of(whole, *self.place.tensor))
            assert length(box[-1]) == here, f"{key}: {here} along a dimension of {whole}"
        return box

    @torch.no_grad()
    def add_parameters(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        """Note this rank's part of the parameters ``tensors``, of any layout; ``what``: gradient, update, or none."""
        for name, tensor in tensors.items():
            here: tuple[int, ...] = tensor.shape
            offset: tuple[int, ...] = (0,) * tensor.ndim
            if isinstance(tensor, DTensor):
                mesh, placements = tensor.device_mesh, tensor.placements
                here, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
                tensor = tensor.to_local()
            box: list[Ranges] = [((start, start + size),) for start, size in zip(offset, here, strict=True)]
            self._note(f"{name} {what}".strip(), tensor, box)

    def add_loss(self, total: Tensor) -> None:
        """Note the sum of the losses of this rank's tokens."""
        rows = (self.place.rows.start, self.place.rows.stop)
        part = self.parts[LOSS] = Part("float32", self._shape(LOSS), [(rows,), self.place.sequence])
        part.figures.append(torch.stack((total, total, torch.ones_like(total))).double())  # no largest one is known

    def _shape(self, key: str) -> list[int]:
        own = {ROWS: self.place.global_rows, SEQUENCE: self.place.seq_len}
        return [own.get(size, size) for size in self.shapes[key]]

    def _note(self, key: str, tensor: Tensor, box: list[Ranges]) -> None:
        if tensor.numel() == 0:
            return
        shape, dtype = self._shape(key), str(tensor.dtype).removeprefix("torch.")
        if key.endswith((" gradient", " update")):
            dtype = self.dtype  # they were computed in it
        part = self.parts.setdefault(key, Part(dtype, shape, [(), *box[1:]]))
        part.box[0] = (*part.box[0], *box[0])  # rows of another microbatch, or all there is
        for block in torch.split(tensor.flatten(), BLOCK):
            wide = block.double()  # faster than sums of dtype float64
            size = wide.abs()
            part.figures.append(torch.stack((wide.sum(), size.sum(), size.max())))
        places, here = self._samples(key, shape, box)
        part.places.append(places)
        part.values.append(tensor[tuple(index.to(tensor.device) for index in here)].double())

    def _samples(self, key: str, shape: list[int], box: list[Ranges]) -> tuple[Tensor, list[Tensor]]:
        """Places of the samples that lie in ``box``: in the flattened whole, and in this part, by dimension."""
        # The same for a tensor, its gradient and its update.
        name = key.removesuffix(" gradient").removesuffix(" update")
        if name not in self.places:
            count = math.prod(shape)
            self.places[name] = permute(np.arange(min(SAMPLES, count)), count, stream_seed("fingerprint", name))
        places = self.places[name]
        here, inside = [], np.ones(len(places), dtype=bool)
        for along, ranges in zip(np.unravel_index(places, shape), box, strict=True):
            local = np.full(len(places), -1)
            seen = 0
            for start, stop in ranges:
                hit = (along >= start) & (along < stop)
                local[hit] = seen + along[hit] - start
                seen += stop - start
            inside &= local >= 0
            here.append(local)
        return torch.from_numpy(places[inside]), [torch.from_numpy(local[inside]) for local in here]

    def write(self, step: int, tokens: Tensor, labels: Tensor) -> None:
        """Write what was seen of ``step``, and this rank's rows of the batch (rows, seq)."""
        order = {key: number for number, key in enumerate(self.shapes)}
        keys = sorted((key for key, part in self.parts.items() if part.figures), key=order.__getitem__)
        found = [self.parts[key] for key in keys]
        figures = [torch.stack(part.figures).cpu() for part in found]
        tensors = {
            "figures": torch.stack([torch.cat((f[:, :2].sum(0), f[:, 2].max(0).values[None])) for f in figures]),
            "places": torch.cat([place for part in found for place in part.places]),
            "values": torch.cat([values for part in found for values in part.values]).cpu(),
            "tokens": tokens.to(torch.int32),
            "labels": labels.to(torch.int32),
        }
        entries = [
            {"key": key, "at": order[key], "dtype": part.dtype, "shape": part.shape, "box": part.box}
            | {"samples": sum(map(len, part.places))}
            for key, part in zip(keys, found, strict=True)
        ]
        about = {"step": step, "ranks": self.ranks, "first_row": self.place.rows.start, "entries": entries}
        folder = self.folder / f"step-{step}"
        with self.best_effort:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"rank-{self.place.rank}.safetensors"
            save_file(tensors, file.with_suffix(".partial"), {"about": json.dumps(about)})
            file.with_suffix(".partial").rename(file)
        self.parts.clear()
