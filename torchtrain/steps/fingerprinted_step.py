"""A step that takes fingerprints, for ``torchtrain.compare``: a few numbers of each tensor, the same on every layout.

Of each tensor: eps of its dtype, shape, largest absolute, sum, sum of absolutes, and values at places that its name
seeds. A rank notes what it holds of each; numbers of the whole are sums, or the largest, of those of all ranks.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from torchtrain.config.schema import JobConfig
from torchtrain.datasets.loader import Batch
from torchtrain.datasets.order import permute, stream_seed
from torchtrain.distributed.mesh import Mesh, local
from torchtrain.distributed.process_group import all_reduce
from torchtrain.errors import TorchtrainError
from torchtrain.initialization import block_held, full_name
from torchtrain.log import BestEffort
from torchtrain.loss import TokenLoss
from torchtrain.models.llama import Transformer, TransformerConfig
from torchtrain.parallelisms.context_parallel import local_sequence
from torchtrain.steps.train_step import TrainStep

FILE = "tensors.safetensors"
SAMPLES = 256  # values of a tensor that are kept

Array = npt.NDArray[np.float64]
StepFunction = Callable[[int, Batch], tuple[TokenLoss, Tensor]]


@dataclass
class Step:
    """What was computed in a step."""

    shapes: dict[str, list[int]]  # by key, in the order of execution
    numbers: Array
    """For each key: eps, largest absolute; number of elements, their sum, sum of absolutes; for each sample how many
    ranks hold it, and the sum of what they hold."""
    rows: npt.NDArray[np.int32]  # of the whole batch: (rows, 2, seq), tokens and labels

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"numbers": self.numbers, "rows": self.rows}, folder / FILE, {"shapes": json.dumps(self.shapes)})

    def figures(self) -> Array:
        """For each key: largest absolute, sum, sum of absolutes, samples.

        Of what several ranks hold the mean: it is off where they do not hold the same. NaN where parts are missing.
        """
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        _, largest, elements, total, absolute, *samples = self.numbers.T
        held, values = np.split(np.array(samples), 2)
        with np.errstate(all="ignore"):
            copies = np.where(elements % sizes, np.nan, elements / sizes)
            return np.stack((largest, total / copies, absolute / copies, *(values / held)), axis=1)


def read(folder: Path) -> Step:
    """What ``Step.save`` has written; TorchtrainError: it is missing or damaged."""
    try:
        with safe_open(folder / FILE, "np") as file:
            return Step(json.loads(file.metadata()["shapes"]), file.get_tensor("numbers"), file.get_tensor("rows"))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise TorchtrainError(f"{folder / FILE} is missing or damaged ({error})") from error


def modules_of(parts: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """By full name the modules that are watched. Not the output: its logits never need to exist all at once."""
    named = ((full_name(f"{name}.")[:-1], module) for part in parts for name, module in part.named_modules())
    return {name: module for name, module in named if name not in ("", "output")}  # of a wrapper what it wraps


def watch(modules: Mapping[str, nn.Module], see: Callable[[str, Tensor], None]) -> ExitStack:
    """A context within which ``see(key, tensor)`` is called for what goes into a module and comes out.

    Only for what has a gradient; inputs are counted: 0, 1 and 2 are q, k and v. Each is replaced by a view, so that its
    gradient is that through this module alone.
    """

    def before(name: str, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        views = list(args)
        for i, x in enumerate(args):
            if isinstance(x, Tensor) and x.requires_grad:
                views[i] = x.view_as(x)
                see(f"{name} input {i}", views[i])
        return tuple(views)

    def after(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            see(f"{name} output", output)

    stack = ExitStack()
    for name, module in modules.items():
        stack.enter_context(module.register_forward_pre_hook(partial(before, name)))
        stack.enter_context(module.register_forward_hook(partial(after, name)))
    return stack


@cache
def shapes_of(config: TransformerConfig, rows: int, seq: int) -> dict[str, list[int]]:
    """Every key there is, in the order of execution, with the shape of its tensor. Parameters are keys, too."""
    with torch.device("meta"):
        model, tokens = Transformer(config), torch.zeros(rows, seq, dtype=torch.int64)
    parameters = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    forward: dict[str, list[int]] = {}

    def see(key: str, tensor: Tensor) -> None:
        module = key.removesuffix(" output")
        forward.update({name: shape for name, shape in parameters.items() if name.rpartition(".")[0] == module})
        forward[key] = list(tensor.shape)

    with watch(modules_of([model]), see):
        model(tokens, head=lambda hidden, _: hidden)
    forward.update(parameters)  # those of the output
    gradients = {f"{key} gradient": shape for key, shape in reversed(forward.items())}
    return {**forward, **gradients, **{f"{name} update": shape for name, shape in parameters.items()}}


class Recorder:
    """Takes fingerprints of what this rank computes of one step."""

    def __init__(self, config: TransformerConfig, mesh: Mesh, rows: int, sequence: Tensor) -> None:
        """``rows``: of the whole batch. ``sequence``: this rank's positions of a sequence, in order."""
        self.shapes = shapes_of(config, rows, len(sequence) * mesh.degrees.context)
        self.numbers = torch.zeros(len(self.shapes), 5 + 2 * SAMPLES, dtype=torch.float64)
        self.numbers_of = dict(zip(self.shapes, self.numbers, strict=True))
        self.rows = torch.arange(rows).chunk(mesh.degrees.batch)[mesh.degrees.batch_rank(dist.get_rank())]
        self.sequence = sequence
        self.mesh = mesh
        self.rows_seen: Counter[str] = Counter()  # of this rank's, by key

    def see(self, key: str, tensor: Tensor) -> None:
        """Note what a module takes or gives for the rows that come next, and its gradient when that is known."""
        if torch._C._current_autograd_node() is not None:  # activation checkpointing, which computes it again
            return
        rows = self.rows[self.rows_seen[key] :][: len(tensor)]
        self.rows_seen[key] += len(tensor)
        self._add_activation(key, tensor, rows)

        def gradient(found: Tensor) -> None:
            handle.remove()  # a backward in two passes may come by twice
            self._add_activation(f"{key} gradient", found, rows)

        handle = tensor.register_hook(gradient)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _add_activation(self, key: str, tensor: Tensor, rows: Tensor) -> None:
        if isinstance(tensor, DTensor):
            # Gradients of what all ranks read are sums that are still to be made.
            done = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
            tensor = tensor.redistribute(placements=done).to_local()
        held = [rows, *map(torch.arange, self.shapes[key][1:])]
        held[2 if "inner_attention" in key else 1] = self.sequence  # there heads come before it
        for i, size in enumerate(tensor.shape):
            if len(held[i]) != size:
                held[i] = held[i].chunk(self.mesh.tensor.size())[self.mesh.tensor.get_local_rank()]
        self._add(key, tensor, held)

    @torch.no_grad()
    def add_parameters(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        """Note this rank's part of the parameters ``tensors``, of any layout; ``what``: gradient, update, or none."""
        for name, tensor in tensors.items():
            part, spans = block_held(tensor)
            self._add(f"{name} {what}".strip(), local(part), [torch.arange(span.start, span.stop) for span in spans])

    def _add(self, key: str, part: Tensor, held: list[Tensor]) -> None:
        """``held``: the indices of ``part`` in the whole, along each dimension."""
        assert [len(indices) for indices in held] == list(part.shape), f"{key}: {part.shape}"
        if part.numel() == 0:
            return
        shape, name = self.shapes[key], key.removesuffix(" gradient").removesuffix(" update")
        count = math.prod(shape)
        chosen = permute(np.arange(SAMPLES) % count, count, stream_seed("fingerprint", name))
        places = [index.contiguous() for index in torch.unravel_index(torch.from_numpy(chosen), shape)]
        at = [torch.searchsorted(own[:-1], place) for own, place in zip(held, places, strict=True)]
        here = torch.stack([own[i] == place for own, i, place in zip(held, at, places, strict=True)]).all(dim=0)
        samples = part[tuple(i.to(part.device) for i in at)].double().cpu().where(here, 0.0)
        flat, wide = part.flatten(), torch.float64
        largest, *sums = flat.abs().max(), flat.sum(dtype=wide), flat.abs().sum(dtype=wide)
        numbers = self.numbers_of[key]
        numbers[:2] = numbers[:2].maximum(torch.tensor([torch.finfo(part.dtype).eps, largest], dtype=wide))
        numbers[2:] += torch.cat((torch.tensor([part.numel(), *sums], dtype=wide), here, samples))

    def collect(self, batch: Batch) -> Step:
        """What all ranks have noted of the step. Collective. ``batch``: of this rank's rows."""
        all_rows, seq = self.mesh.degrees.batch * len(self.rows), batch.tokens.shape[1]
        rows = torch.full((all_rows, 2, seq), torch.iinfo(torch.int32).min, dtype=torch.int32)
        rows[self.rows] = torch.stack((batch.tokens, batch.labels), dim=1).int()
        device = self.mesh.tensor.device_type
        sums, *largest = (x.contiguous().to(device) for x in (self.numbers[:, 2:], self.numbers[:, :2], rows))
        all_reduce(sums)
        for x in largest:
            all_reduce(x, op=dist.ReduceOp.MAX)
        return Step(self.shapes, torch.cat((largest[0], sums), dim=1).cpu().numpy(), largest[1].cpu().numpy())


class FingerprintedStep(TrainStep):
    """The same step, which also writes fingerprints, below the run's ``folder``."""

    def __init__(self, config: JobConfig, folder: Path, global_batch_size: int, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.folder = folder / "fingerprints"
        self.best_effort = BestEffort("fingerprints")
        self.parameters = {full_name(n): p for part in self.model.parts for n, p in part.named_parameters()}
        mesh = self.model.mesh
        sequence = local_sequence(torch.arange(config.training.seq_len), mesh.context, dim=0)
        self.make_recorder = partial(Recorder, self.model.parts[0].config, mesh, global_batch_size, sequence)

    def __call__(self, step: int, batch: Batch) -> tuple[TokenLoss, Tensor]:
        before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        computed = super().__call__(step, batch)
        updates = {name: parameter.detach() - before[name] for name, parameter in self.parameters.items()}
        self.recorder.add_parameters("update", updates)
        found = self.recorder.collect(batch)
        with self.best_effort:
            if dist.get_rank() == 0:
                found.save(self.folder / f"step-{step}")
        return computed

    def _forward_backward(self, batch: Batch, global_tokens: Tensor) -> TokenLoss:
        self.recorder = self.make_recorder()  # anew where the step is repeated
        self.recorder.add_parameters("", self.parameters)
        with watch(modules_of(self.model.parts), self.recorder.see):
            return super()._forward_backward(batch, global_tokens)

    def _share_tied_gradient(self) -> Sequence[nn.Parameter]:
        copies = super()._share_tied_gradient()
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        self.recorder.add_parameters("gradient", gradients)
        return copies


def make_step(config: JobConfig, folder: Path, global_batch_size: int, *args: Any, **options: Any) -> StepFunction:
    """A ``TrainStep``; in the steps that ``[debug]`` names a ``FingerprintedStep``."""
    steps, plain = config.debug.fingerprint_steps, TrainStep(*args, **options)
    if not steps:
        return plain
    fingerprinted = FingerprintedStep(config, folder, global_batch_size, *args, **options)
    return lambda step, batch: (fingerprinted if step in steps else plain)(step, batch)
