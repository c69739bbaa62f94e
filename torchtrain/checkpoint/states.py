"""What a checkpoint holds, as flat dicts of tensors. Every entry is a tensor, so nothing needs a pickle.

A state follows DCP's ``Stateful``: ``state_dict()`` gives the live tensors (DTensors where they are sharded), a load
writes into them in place, and ``load_state_dict`` is then called with the same dict.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.tensor import DTensor, Shard

from torchtrain.checkpoint.format import VerifiedReader, VerifiedWriter
from torchtrain.checkpoint.resume_compatibility import same_content, source_identities
from torchtrain.datasets.dataloader import DataLoader, LoaderLayout
from torchtrain.distributed.agreement import broadcast_from_rank0, gather_from_all_ranks
from torchtrain.distributed.mesh import Mesh, local
from torchtrain.errors import (
    CheckpointError,
    ConfigError,
    DamagedError,
    StorageError,
    SupersededError,
    TorchtrainError,
)
from torchtrain.logging import logger
from torchtrain.models.parameters import full_name
from torchtrain.models.spec import DecoderConfig, build_model
from torchtrain.pinned_memory import pinned_like

# A checkpoint may lack these, and is loaded without them: it is of a run without exact sums, averaged weights, or a
# limit on spikes.
OPTIONAL = ("sums.", "ema.", "spikes.")
POSITION = "loader.rows"  # the only entry whose shape is not that of a parameter, or of one number
STATES = {"trained": "model", "ema": "ema"}
"""The state that holds these weights, under the parameters' names."""
# With tied embeddings, two names of one parameter; a last pipeline stage has a copy of both.
TIED, ORIGINAL = "output.weight", "tok_embeddings.weight"


class ModelState(Stateful):
    """Parameters and persistent buffers of the parts of one model, under their full names.

    With ``tied`` embeddings the embedding and the output are one entry, also where two pipeline stages have a copy
    each: so the checkpoint does not depend on the stages.
    """

    def __init__(self, parts: Sequence[nn.Module], tied: bool = False) -> None:
        self.parts = parts
        self.tied = tied
        self.after_load: Callable[[], None] = lambda: None

    def state_dict(self) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        for part in self.parts:
            # Of a parameter with several names, named_parameters gives the first.
            unique = {full_name(name) for name, _ in chain(part.named_parameters(), part.named_buffers())}
            for name, tensor in get_model_state_dict(part).items():
                if name in unique:
                    entry = ORIGINAL if self.tied and name == TIED else name
                    # Else only one of them would be saved, or loaded.
                    assert tensors.setdefault(entry, tensor) is tensor, f"{name} and {entry} must be one parameter"
        return tensors

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: ARG002
        """The tensors of ``state_dict`` are the model's own."""
        self.after_load()


def parameter_shapes(model: DecoderConfig) -> dict[str, Tensor]:
    """Meta tensors of the parameters of ``model``, by our names, a tied one once."""
    with torch.device("meta"):
        return ModelState([build_model(model)], model.tied_embeddings).state_dict()


def flatten(states: Mapping[str, Stateful]) -> dict[str, Tensor]:
    """All live tensors of ``states``, as ``<state>.<name>``."""
    tensors = {}
    for state_name, state in states.items():
        for name, tensor in state.state_dict().items():
            assert isinstance(tensor, Tensor), f"{state_name}.{name} is a {type(tensor).__name__}, not a tensor"
            tensors[f"{state_name}.{name}"] = tensor
    return tensors


class TensorSavePlanner(DefaultSavePlanner):
    """Plans the save of a flat dict of tensors: shapes and shards are those of the dict, values come from ``value``.

    ``value`` gives this rank's part of a tensor by its name.
    """

    def __init__(self, value: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.value = value

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.value(index.fqn).contiguous()  # the file then has the numbers in the order of the shape


class CompleteLoadPlanner(DefaultLoadPlanner):
    """Plans the load of a flat dict of tensors, and rejects a plan that does not load every element."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        planned: Counter[str] = Counter()  # elements
        for item in new_plan.items:
            assert item.type is not LoadItemType.BYTE_IO  # all entries of an index are tensors
            planned[item.dest_index.fqn] += item.lengths.numel()
        if missing := [name for name, t in self.state_dict.items() if planned[name] != local(t).numel()]:
            raise CheckpointError(f"it does not hold all of these tensors: {', '.join(missing[:5])}")
        return super().finish_plan(new_plan)


def load_tensors(
    tensors: Mapping[str, Tensor], reader: VerifiedReader, group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Read ``tensors``, live ones of any layout, from a checkpoint; returns those that it has. Collective.

    Raises, on all ranks:
        DamagedError: any of them finds a file damaged. Some tensors may have been written by then.
        CheckpointError: any of them misses a tensor, or it has another shape.
        StorageError: the file system fails again and again.
    """
    # Read here first: DCP would take an error for another format. Only errors are sent, not the large metadata.
    gather_from_all_ranks(lambda: bool(reader.read_metadata()), group)
    saved = reader.read_metadata().state_dict_metadata
    tensors = {name: tensor for name, tensor in tensors.items() if name in saved or not name.startswith(OPTIONAL)}
    size = getattr(saved.get(POSITION), "size", None)
    if POSITION in tensors and size not in (None, tensors[POSITION].shape):
        raise CheckpointError(
            f"{reader.checkpoint} cannot be loaded: its place in the data has shape {tuple(size)}, that of this run "
            f"{tuple(tensors[POSITION].shape)}. The number of data.sources, and whether each is streamed, must "
            "stay: set the old ones again, or start a new run from these weights (checkpoint.initial_load_path)"
        )

    planner = CompleteLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp_load(dict(tensors), storage_reader=reader, planner=planner, process_group=group)
    except CheckpointException as error:
        # All ranks have the same failures. One that may pass comes first: what cannot be read is not damaged.
        causes = [cause for cause, _ in error.failures.values()]
        for kind in (KeyboardInterrupt, StorageError, DamagedError):
            for cause in causes:
                if isinstance(cause, kind):
                    raise cause from error
        raise CheckpointError(f"{reader.checkpoint} cannot be loaded: {_first_failure(error)[1]}") from error
    return tensors


def load_weight_tensors(tensors: Mapping[str, Tensor], weights: str, reader: VerifiedReader) -> None:
    """``load_tensors`` of all ranks for the ``weights`` (see ``STATES``) of parameters, live ones by their names."""
    found = load_tensors({f"{STATES[weights]}.{name}": t for name, t in tensors.items()}, reader)
    if len(found) < len(tensors):
        raise CheckpointError(
            f"{reader.checkpoint} has no averaged weights, which a run saves with ema.enable; take the trained weights"
        )


def save_tensors(
    tensors: Mapping[str, Tensor],
    value: Callable[[str], Tensor],
    writer: StorageWriter,
    location: str | Path,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write ``location``: tensors of the shapes and shards of ``tensors``, with this rank's values by ``value(name)``.

    Collective. A value is asked for when it is written, and not kept.

    Raises:
        CheckpointError: on all ranks, if any of them cannot write its part, or (SupersededError) a newer start saves.
        ConfigError: on all ranks, if ``value`` raises one.
    """
    try:
        dcp_save(dict(tensors), storage_writer=writer, planner=TensorSavePlanner(value), process_group=group)
    except CheckpointException as error:
        if isinstance(writer, VerifiedWriter) and dist.get_rank(group) == 0:
            writer.remove()  # all ranks have ended their part
        for cause, _ in error.failures.values():
            if isinstance(cause, (SupersededError, ConfigError, KeyboardInterrupt)):
                raise cause from None
        if isinstance(writer, VerifiedWriter):
            # A newer start removes what this one was writing, which looks like a failure of the file system.
            broadcast_from_rank0(writer.superseded_error, group)
        failed = CheckpointError(f"{location} could not be written: {_first_failure(error)[1]}")
        if isinstance(_first_failure(error)[0], StorageError):
            failed.exit_code = StorageError.exit_code
        raise failed from error


def _first_failure(error: CheckpointException) -> tuple[BaseException, str]:
    """The first failure in DCP's error, and in words."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return cause, str(cause) if isinstance(cause, TorchtrainError) else f"{cause!r} (rank {rank})"


def read_layout(reader: VerifiedReader) -> LoaderLayout:
    """The layout of the position in the data, of which the checkpoint has all numbers.

    Raises:
        DamagedError: the checkpoint has no position, or not of the shape that its manifest says.
        StorageError: it cannot be read.
    """
    loader = reader.manifest.loader
    if loader is None:
        raise DamagedError(f"{reader.checkpoint} has no position in the data")
    layout = LoaderLayout(loader["global_batch_size"], loader["seq_len"], tuple(loader["state_sizes"]))
    saved = getattr(reader.read_metadata().state_dict_metadata.get(POSITION), "size", None)
    if saved != layout.shape:
        raise DamagedError(
            f"{reader.checkpoint} is damaged: its position in the data has shape {saved and tuple(saved)}, and by its "
            f"manifest {layout.shape}"
        )
    return layout


class LoaderState(Stateful):
    """The data loader's state as a tensor sharded by rows of the batch, so that any number of ranks can load it.

    ``expect`` prepares to load the state of a loader with another batch, sequence length or other sources.
    """

    def __init__(self, loader: DataLoader, mesh: Mesh):
        self.loader = loader
        self.mesh = mesh
        self._expected: tuple[LoaderLayout, list[bool]] | None = None

    @property
    def layout(self) -> LoaderLayout:
        """What the columns of the state stand for."""
        return self.loader.layout

    def expect(self, reader: VerifiedReader) -> None:
        """Prepare to load the state in the checkpoint of ``reader``. Raises as ``read_layout``."""
        self._expected = None
        saved = read_layout(reader)
        identities = source_identities(reader.manifest.data), source_identities(self.loader.identity)
        continued = [same_content(old, new) for old, new in zip(*identities, strict=False)]
        continued += [False] * (len(self.loader.streams) - len(continued))
        for source, is_continued in zip(self.loader.sources, continued, strict=False):
            if not is_continued:
                logger.info("%s is not in the checkpoint, or had other content: it is read from its start", source.name)
        if saved != self.loader.layout or not all(continued):
            self._expected = saved, continued

    def state_dict(self) -> dict[str, Any]:
        if self._expected is not None:
            layout, _ = self._expected
            return {"rows": torch.empty(layout.shape, dtype=torch.int64)}
        rows = self.loader.state_dict()["rows"]
        if self.mesh.batch.device_type == "cuda":  # from_local would copy them, and wait for it
            rows = rows.pin_memory().to("cuda", non_blocking=True)
        return {"rows": DTensor.from_local(rows, self.mesh.batch, [Shard(0)], run_check=False)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rows, expected = state_dict["rows"], self._expected
        self._expected = None
        if expected is not None:
            gather_from_all_ranks(lambda: self.loader.resume(rows.numpy(), *expected))
            return
        gather_from_all_ranks(lambda: self.loader.load_state_dict({"rows": rows.to_local().cpu()}))


class Stager:
    """Copies this rank's part of each tensor into CPU buffers that are kept from one save to the next.

    Buffers for tensors on a GPU are pinned, so that copies run at full speed. Without ``overlap``, ``copy_to_host``
    returns when the copy is made. With it, the copies are only enqueued on a CUDA stream, where they run beside the
    next forward and backward: call ``wait_for_copies`` before the optimizer step, and ``wait`` before reading them.
    """

    def __init__(self, overlap: bool) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._stream = torch.cuda.Stream() if overlap and torch.cuda.is_available() else None  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def copy_to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the local parts, valid until the next call."""
        parts = {name: local(tensor) for name, tensor in tensors.items()}
        new = {name: part for name, part in parts.items() if name not in self._buffers}
        self._buffers |= pinned_like({name: part for name, part in new.items() if part.is_cuda})
        for name in new.keys() - self._buffers.keys():
            self._buffers[name] = torch.empty_like(new[name], device="cpu")
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # None: on the current one
            for name, part in parts.items():
                self._buffers[name].copy_(part, non_blocking=True)
        if self._stream is None and any(part.is_cuda for part in parts.values()):
            torch.cuda.current_stream().synchronize()
        return self._buffers

    def wait_for_copies(self) -> None:
        """Make the current stream wait for copies under way; the CPU does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def wait(self) -> None:
        """Block until the copies are made. Safe to call from another thread."""
        if self._stream is not None:
            self._stream.synchronize()
