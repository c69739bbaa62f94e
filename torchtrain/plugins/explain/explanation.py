"""The documents of a step, and their losses under the weights before it."""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrain.checkpoint.manager import CheckpointManager
from torchtrain.config.schema import ParallelismConfig
from torchtrain.datasets.build import document_start
from torchtrain.datasets.data_source import Piece, Place
from torchtrain.datasets.dataloader import Batch
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.distributed.mesh import local
from torchtrain.distributed.process_group import destroy_process_group
from torchtrain.errors import CheckpointError, DataError
from torchtrain.labels import IGNORE_INDEX
from torchtrain.logging import logger
from torchtrain.models.loss.output_loss import MIN_CHUNK_TOKENS
from torchtrain.parallelisms.microbatches import Microbatches
from torchtrain.plugins.explain.run import RunStep, loader_before, on_one_rank
from torchtrain.trainer import Trainer


@dataclass(frozen=True)
class Document:
    """The part of a document that is in a row, whose window has ``seq_len + 1`` tokens."""

    row: int
    source: str
    """Label of its source."""
    place: Place
    begin: int
    """Place of its first token in the window."""
    offset: int
    """Number of tokens of the document before this part."""
    tokens: Tensor
    """int64 (n,): its tokens in the window."""
    text_hash: str = ""
    """See ``Piece``."""
    losses: Tensor | None = None
    """float32 (n,): the loss of each token, in nats. The first token of a window has none in this step: NaN, as masked
    tokens. None without weights."""

    @property
    def predicted(self) -> int:
        """Number of tokens that are predicted in this row."""
        return len(self.tokens) - (self.begin == 0)

    @property
    def loss_sum(self) -> float:
        """Sum of the losses of its tokens."""
        assert self.losses is not None
        return self.losses[len(self.losses) - self.predicted :].double().sum().item()

    @property
    def loss(self) -> float:
        """Mean loss of its tokens; NaN if none is predicted."""
        return self.loss_sum / self.predicted if self.predicted else math.nan


@dataclass(frozen=True)
class Weights:
    """The weights under which losses are computed."""

    checkpoint_step: int
    """The step of the checkpoint that they come from; 0 if they are the initial weights."""
    replayed: int
    """Number of steps that were trained again from there."""
    exact: bool
    """Whether they are those of the run to the last bit: without a replay, or if the run has the same layout or exact
    sums. A replay on another kind of device differs by rounding all the same."""

    def __str__(self) -> str:
        start = f"checkpoint of step {self.checkpoint_step}" if self.checkpoint_step else "initial weights"
        if not self.replayed:
            return f"{start}, exact"
        how = "as in the run" if self.exact else "on another layout than the run's, so that rounding may differ"
        return f"{start}, and {self.replayed} step(s) trained again, {how}"


@dataclass(frozen=True)
class RowGradient:
    """The gradient of one row of a step: of the sum of its losses, divided by the number of tokens that the whole batch
    predicts. The gradients of all rows add up to that of the step, before clipping."""

    row: int
    norm: float
    """Its L2 norm."""
    share: float
    """Its part in the gradient of the step: the product of both, divided by the square of the step's norm. The shares
    of all rows add up to 1; a row that pulls the other way has a negative one."""


@dataclass(frozen=True)
class Explanation:
    """The documents of a step, in the order of the batch."""

    run: RunStep
    tokenizer: Tokenizer
    documents: Sequence[Document]
    weights: Weights | None
    """None without losses."""
    gradients: Sequence[RowGradient] = ()
    """Of the rows, if they were asked for."""

    def listed(self, top: int | None) -> list[Document]:
        """The ``top`` documents with the highest losses, beginning with those that are not finite; None: all of them,
        in their order."""
        if top is None:
            return list(self.documents)
        predicted = [document for document in self.documents if document.predicted]
        return sorted(predicted, key=lambda of: of.loss if math.isfinite(of.loss) else math.inf, reverse=True)[:top]


def explain(
    run: RunStep, *, with_weights: bool, with_gradients: bool = False, for_exclusion: bool = False
) -> Explanation:
    """Find the documents of ``run.step``, and with the weights before it the losses of their tokens.

    ``with_gradients``: also the gradient of each row, for which all rows of the batch have two backwards.
    ``for_exclusion``: the documents are to be listed for ``data.exclude``.

    Raises:
        ConfigError, DataError, CheckpointError: the data or the weights cannot be restored.
    """
    loader, tokenizer = loader_before(run)
    for opened in loader.sources if for_exclusion else ():
        if not opened.can_exclude:
            raise DataError(f"data.exclude cannot name documents of {opened.name}, a {type(opened).__name__}")
    pieces, batch = loader.locate(), next(loader)
    documents = []
    for row in run.rows:
        assert batch.sources is not None
        source = run.config.data.all[int(batch.sources[row])]
        window = torch.cat((batch.tokens[row], batch.labels[row, -1:]))
        found = pieces[row]
        if found is None:
            found = split_at(window, tokenizer.bos_id, loader.sources[int(batch.sources[row])].name)
        begin = 0
        for piece in found:
            tokens = window[begin : begin + piece.tokens]
            label = source.title or source.source_type
            if not piece.is_excluded:
                documents.append(Document(row, label, piece.place, begin, piece.offset, tokens, piece.text_hash))
            begin += piece.tokens
    if not with_weights:
        return Explanation(run, tokenizer, documents, None)
    losses, gradients, weights = replay(run, batch, with_gradients=with_gradients)
    with_losses = []
    for document in documents:
        of_row = losses[run.rows.index(document.row)]
        end = document.begin + len(document.tokens)
        with_losses.append(replace(document, losses=of_row[document.begin : end]))
    return Explanation(run, tokenizer, with_losses, weights, gradients)


def split_at(window: Tensor, bos_id: int | None, source: str) -> list[Piece]:
    """The pieces of a ``window``, int64 (n,), whose source does not know them: each begins with ``bos_id``."""
    begins = [place for place, token in enumerate(window.tolist()) if place == 0 or token == bos_id]
    ends = [*begins[1:], len(window)]
    return [Piece(Place(source), 0, end - begin) for begin, end in zip(begins, ends, strict=True)]


def replay(run: RunStep, batch: Batch, *, with_gradients: bool) -> tuple[Tensor, list[RowGradient], Weights]:
    """Losses of ``run.rows`` of ``batch``, the global batch of the step, under the weights before the step.

    Returns:
        float32 (rows, seq_len + 1): the loss of each token of the windows; the first one is NaN, as masked ones. Then
        the gradients of ``run.rows``, if asked for, and which weights these are.
    """
    first = run.plan.first_step(run.part)
    start = run.checkpoint_step
    if start < first - 1:
        raise CheckpointError(
            f"no checkpoint of the steps {first - 1} to {run.step - 1} is left, and step {run.step} is in the part of "
            f"the run that begins with step {first}: its weights cannot be restored. Its documents are listed with "
            "--without-weights"
        )
    with tempfile.TemporaryDirectory() as folder:
        config = on_one_rank(run.config, folder)
        if start:
            config = replace(config, checkpoint=replace(config.checkpoint, initial_load_path=""))
        trainer = Trainer(config)
        try:
            if start:
                # It only reads the checkpoint, and acquires no lease.
                CheckpointManager(
                    config.checkpoint, run.storage, trainer.states(), "", trainer.checkpointer.start
                ).load(start)
            for step in range(start + 1, run.step):
                logger.info("training step %d again, up to %d", step, run.step - 1)
                trainer.train_step(step, next(trainer.dataloader))
            again = next(trainer.dataloader)
            assert torch.equal(again.tokens, batch.tokens), "the trainer and the loader must read the same batch"
            losses = token_losses(trainer, batch, run.rows)
            gradients = row_gradients(trainer, batch, run.rows) if with_gradients else []
        finally:
            trainer.dataloader.close()
            destroy_process_group()
    replayed = run.step - 1 - start
    same_layout = all(degree == 1 for degree in degrees_of(run.config.parallelism))
    exact = not replayed or same_layout or run.config.training.sums == "exact"
    return losses, gradients, Weights(start, replayed, exact)


def degrees_of(config: ParallelismConfig) -> Sequence[int]:
    """The degree of each dimension of the layout."""
    return [value for name, value in vars(config).items() if name.endswith("_degree")]


def token_losses(trainer: Trainer, batch: Batch, rows: Sequence[int]) -> Tensor:
    """Losses of ``rows`` of ``batch`` under the trainer's weights; see ``replay``."""
    chosen = Batch(batch.tokens[list(rows)], batch.labels[list(rows)])
    # One row at a time: the logits of more may not fit into memory.
    microbatches = Microbatches(trainer.mesh, trainer.device, 1, document_start(trainer.config, trainer.tokenizer))
    losses = []
    with torch.no_grad():
        for microbatch in microbatches(chosen):
            labels = microbatch.labels[0]

            def head(hidden: Tensor, output: nn.Module, labels: Tensor = labels) -> Tensor:
                parts = []
                for begin in range(0, len(labels), MIN_CHUNK_TOKENS):
                    part = slice(begin, begin + MIN_CHUNK_TOKENS)
                    logits = output(hidden[:, part])[0].float()  # (chunk, vocab)
                    parts.append(F.cross_entropy(logits, labels[part], ignore_index=IGNORE_INDEX, reduction="none"))
                return torch.cat(parts)

            of_row = trainer.model.forward_with_head(microbatch, head)
            assert of_row is not None, "one rank has the last pipeline stage"
            of_row = torch.where(labels == IGNORE_INDEX, math.nan, of_row)
            losses.append(F.pad(of_row, (1, 0), value=math.nan).cpu())
    return torch.stack(losses)


def row_gradients(trainer: Trainer, batch: Batch, rows: Sequence[int]) -> list[RowGradient]:
    """The gradients of ``rows`` of ``batch``, the global batch, under the trainer's weights."""
    microbatches = list(
        Microbatches(trainer.mesh, trainer.device, 1, document_start(trainer.config, trainer.tokenizer))(batch)
    )
    predicted = (batch.labels != IGNORE_INDEX).sum().to(trainer.device)

    def gradient(row: int) -> list[Tensor]:
        """Of each parameter."""
        done = False
        while not done:  # exact sums may ask for another attempt
            trainer.optimizer.zero_grad()
            trainer.model.begin_gradients(rows=1)
            trainer.model.forward_backward(microbatches[row], predicted, is_last=True)
            done = trainer.model.finish_gradients()
        return [local(of.grad) for part in trainer.model.model_parts for of in part.parameters() if of.grad is not None]

    total = [of.clone() for of in gradient(0)]
    for row in range(1, len(microbatches)):
        for summed, of_row in zip(total, gradient(row), strict=True):
            summed += of_row
    square = product(total, total)
    found = []
    for row in rows:
        own = gradient(row)
        found.append(
            RowGradient(row, math.sqrt(product(own, own)), product(own, total) / square if square else math.nan)
        )
    trainer.optimizer.zero_grad()
    return found


def product(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The scalar product of two gradients."""
    return sum(torch.sum(x.double() * y.double()).item() for x, y in zip(a, b, strict=True))
