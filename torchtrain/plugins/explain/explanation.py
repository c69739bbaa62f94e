"""The documents of a step: their losses under the weights before it, what is unusual, and what moved the weights."""

import math
import tempfile
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrain.checkpoint.manager import CheckpointManager
from torchtrain.datasets.build import document_start
from torchtrain.datasets.data_source import Piece, Place
from torchtrain.datasets.dataloader import Batch, DataLoader
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.distributed.mesh import local
from torchtrain.distributed.process_group import destroy_process_group
from torchtrain.errors import CheckpointError, DataError
from torchtrain.labels import IGNORE_INDEX
from torchtrain.logging import counted, logger
from torchtrain.metrics.recorder import device_info
from torchtrain.models.loss.output_loss import MIN_CHUNK_TOKENS
from torchtrain.parallelisms.microbatches import Microbatch, Microbatches
from torchtrain.plugins.explain.run import RunStep, loader_before, on_one_rank
from torchtrain.plugins.explain.signals import PieceTokens, Signal, combine, find_signals
from torchtrain.trainer import Trainer

SECONDS_PER_LINE = 10.0  # of the progress of steps that are trained again

# With fewer pieces of a source in the rows that are explained, those of other rows are compared with, too.
COMPARED_PIECES, COMPARED_ROWS = 128, 64


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
    signals: Mapping[str, Signal] = field(default_factory=dict)
    """What is compared with other documents of the source (``SIGNALS``). Empty without weights."""
    size: float = math.nan
    """Its share of the tokens that the step predicts."""
    gradient_share: float = math.nan
    """Its share of the gradient of the step (``RowGradient``); NaN if it is not known."""

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

    @property
    def pull(self) -> float:
        """How many times its share of the gradient is what its size explains, as a ratio of odds; NaN if unknown."""
        if not 0 < self.size < 1 or math.isnan(self.gradient_share):
            return math.nan
        share = min(max(self.gradient_share, 0.0), 1 - 1e-6)
        return share / (1 - share) / (self.size / (1 - self.size))

    @property
    def score(self) -> float:
        """How unusual it is, in standard deviations (``combine``); infinite if its loss is not finite."""
        return combine(self.signals, self.pull, self.predicted) if math.isfinite(self.loss) else math.inf


@dataclass(frozen=True)
class Weights:
    """The weights under which losses are computed."""

    checkpoint_step: int
    """The step of the checkpoint that they come from; 0 if they are the initial weights."""
    replayed: int
    """Number of steps that were trained again from there."""
    exact: bool
    """Whether they are those of the run to the last bit: without a replay, or if the run was trained on the same device
    and its layout has the bits of one rank."""

    @property
    def start(self) -> str:
        """Where they come from, for messages."""
        return f"checkpoint of step {self.checkpoint_step}" if self.checkpoint_step else "initial weights"

    def __str__(self) -> str:
        if not self.replayed:
            return f"{self.start}, exact"
        how = "as in the run" if self.exact else "on another layout or device than the run, so that rounding may differ"
        return f"{self.start}, and {counted(self.replayed, 'step')} trained again, {how}"


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
        """The ``top`` documents with the highest scores, beginning with losses that are not finite; None: all of them,
        in their order."""
        return list(self.documents) if top is None else by_score(self.documents)[:top]


def by_score(documents: Sequence[Document]) -> list[Document]:
    """Those that are predicted, with the highest score first."""
    return sorted((document for document in documents if document.predicted), key=lambda of: of.score, reverse=True)


def explain(
    run: RunStep,
    *,
    with_weights: bool,
    candidates: int = 0,
    with_row_gradients: bool = False,
    for_exclusion: bool = False,
) -> Explanation:
    """Find the documents of ``run.step``, and with the weights before it the losses of their tokens.

    ``candidates``: so many documents, those with the highest scores by then, also have their share of the gradient. All
    rows have a forward and backward for the gradient of the step, and each of these documents has one more.
    ``with_row_gradients``: also the gradient of each row, for which all rows have two backwards.
    ``for_exclusion``: the documents are to be listed for ``data.exclude``.

    Raises:
        ConfigError, DataError, CheckpointError: the data or the weights cannot be restored.
    """
    loader, tokenizer = loader_before(run)
    for opened in loader.sources if for_exclusion else ():
        if not opened.can_exclude:
            raise DataError(f"data.exclude cannot name documents of {opened.name}, a {type(opened).__name__}")
    batch = read_rows(run, loader, tokenizer)
    if batch is None:
        raise DataError(f"the data end before step {run.step}: step {run.step - 1} is the last one")
    rows = [batch[number] for number in run.rows]
    documents = [document for row in rows for document in row.documents]
    if not with_weights:
        return Explanation(run, tokenizer, documents, None)
    others = compared_rows(run, loader, tokenizer, batch)
    with trainer_before(run) as (trainer, weights):
        again = next(trainer.dataloader)
        assert torch.equal(again.tokens, torch.stack([row.tokens for row in batch])), "the trainer must read this batch"
        predicted = int((again.labels != IGNORE_INDEX).sum())
        compared = [
            replace(of, losses=of_row[of.begin : of.begin + len(of.tokens)], size=of.predicted / max(1, predicted))
            for row, of_row in zip((*rows, *others), token_losses(trainer, (*rows, *others)), strict=True)
            for of in row.documents
        ]
        with_signals = add_signals(compared)[: len(documents)]
        chosen = by_score(with_signals)[:candidates]
        gradients: list[RowGradient] = []
        shares: list[float] = []
        if chosen or with_row_gradients:
            gradients, shares = find_gradients(trainer, again, run.rows if with_row_gradients else (), chosen)
    share_of = dict(zip(map(id, chosen), shares, strict=True))
    found = [replace(of, gradient_share=share_of.get(id(of), math.nan)) for of in with_signals]
    return Explanation(run, tokenizer, found, weights, gradients)


@dataclass(frozen=True)
class Row:
    """A row of a global batch."""

    tokens: Tensor
    """int64 (seq_len,)."""
    labels: Tensor
    """int64 (seq_len,)."""
    source: str
    documents: Sequence[Document]


def read_rows(run: RunStep, loader: DataLoader, tokenizer: Tokenizer) -> list[Row] | None:
    """The rows of the next batch of ``loader``; None if the data end."""
    pieces, batch = loader.locate(), next(loader, None)
    if batch is None:
        return None
    assert batch.sources is not None
    rows = []
    for number, (tokens, labels) in enumerate(zip(batch.tokens, batch.labels, strict=True)):
        index = int(batch.sources[number])
        source = run.config.data.all[index]
        label = source.title or source.source_type
        window = torch.cat((tokens, labels[-1:]))
        found = pieces[number]
        if found is None:
            found = split_at(window, tokenizer.bos_id, loader.sources[index].name)
        documents, begin = [], 0
        for piece in found:
            of_piece = window[begin : begin + piece.tokens]
            if not piece.is_excluded:
                documents.append(Document(number, label, piece.place, begin, piece.offset, of_piece, piece.text_hash))
            begin += piece.tokens
        rows.append(Row(tokens, labels, label, documents))
    return rows


def compared_rows(run: RunStep, loader: DataLoader, tokenizer: Tokenizer, batch: Sequence[Row]) -> list[Row]:
    """Rows beside ``run.rows``, with whose documents those are compared: of the rest of ``batch`` and of later ones."""
    known: Counter[str] = Counter()
    for number in run.rows:
        known[batch[number].source] += sum(of.predicted > 0 for of in batch[number].documents)
    of_rows = set(known)

    def rest() -> Iterator[Row]:
        yield from (row for number, row in enumerate(batch) if number not in run.rows)
        while (following := read_rows(run, loader, tokenizer)) is not None:
            yield from following

    chosen: list[Row] = []
    if min(known.values()) >= COMPARED_PIECES:
        return chosen
    for row in islice(rest(), COMPARED_ROWS):
        if known[row.source] < COMPARED_PIECES and row.source in of_rows:
            known[row.source] += sum(of.predicted > 0 for of in row.documents)
            chosen.append(row)
        if all(known[source] >= COMPARED_PIECES for source in of_rows):
            break
    return chosen


def add_signals(documents: Sequence[Document]) -> list[Document]:
    """``documents`` with the signals of those that are predicted."""
    predicted = [document for document in documents if document.predicted]
    pieces = []
    for number, of in enumerate(predicted):
        assert of.losses is not None
        is_known = of.place.position or of.text_hash
        key: Hashable = of.place if is_known else number
        losses = of.losses[len(of.tokens) - of.predicted :].double().numpy()
        pieces.append(PieceTokens(of.source, key, of.tokens.numpy(), losses))
    signals = iter(find_signals(pieces))
    return [replace(of, signals=next(signals)) if of.predicted else of for of in documents]


def split_at(window: Tensor, bos_id: int | None, source: str) -> list[Piece]:
    """The pieces of a ``window``, int64 (n,), whose source does not know them: each begins with ``bos_id``."""
    begins = [place for place, token in enumerate(window.tolist()) if place == 0 or token == bos_id]
    ends = [*begins[1:], len(window)]
    return [Piece(Place(source), 0, end - begin) for begin, end in zip(begins, ends, strict=True)]


@contextmanager
def trainer_before(run: RunStep) -> Iterator[tuple[Trainer, Weights]]:
    """A context manager for a trainer with the weights before the step, whose next batch is that of the step."""
    first = run.plan.first_step(run.stage)
    start = run.checkpoint_step
    if start < first - 1:
        raise CheckpointError(
            f"no checkpoint of the steps {first - 1} to {run.step - 1} is left, and step {run.step} is in the stage of "
            f"the run that begins with step {first}: its weights cannot be restored. Its documents are listed with "
            "--without_weights"
        )
    replayed = run.step - 1 - start
    trained_on, threads = run.trained_on, torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        config = on_one_rank(run.config, folder)
        if start:
            config = replace(config, checkpoint=replace(config.checkpoint, initial_load_path=""))
        trainer = Trainer(config)
        try:
            if replayed:
                torch.set_num_threads(trained_on.get("threads", threads))
            same_bits = run.has_bits_of_one_rank(tied_embeddings=trainer.model_config.tied_embeddings)
            exact = not replayed or (same_bits and device_info(trainer.device) == trained_on)
            if start:
                # It only reads the checkpoint, and acquires no lease.
                CheckpointManager(
                    config.checkpoint, run.storage, trainer.states(), "", trainer.checkpointer.start
                ).load(start)
            weights = Weights(start, replayed, exact)
            if replayed:
                logger.info(
                    f"no checkpoint has the weights before step {run.step:,}: {counted(replayed, 'step')} after the "
                    f"{weights.start} will be trained again"
                )
            logged = time.monotonic()
            for step in range(start + 1, run.step):
                trainer.train_step(step, next(trainer.dataloader))
                if time.monotonic() - logged >= SECONDS_PER_LINE and step < run.step - 1:
                    logger.info(f"{step - start:,} of {counted(replayed, 'step')} trained again")
                    logged = time.monotonic()
            torch.set_num_threads(threads)
            yield trainer, weights
        finally:
            torch.set_num_threads(threads)
            trainer.dataloader.close()
            destroy_process_group()


def token_losses(trainer: Trainer, rows: Sequence[Row]) -> Tensor:
    """Losses of ``rows`` under the trainer's weights.

    Returns:
        float32 (rows, seq_len + 1): the loss of each token of the windows; the first one is NaN, as masked ones.
    """
    chosen = Batch(torch.stack([row.tokens for row in rows]), torch.stack([row.labels for row in rows]))
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


def find_gradients(
    trainer: Trainer, batch: Batch, rows: Sequence[int], documents: Sequence[Document]
) -> tuple[list[RowGradient], list[float]]:
    """The gradients of ``rows`` of ``batch``, the global batch, and the shares of ``documents`` in that of the step.

    The optimizer states are lost: the sum of all gradients is stored in their place.
    """
    for optimizer in trainer.optimizer.optimizers:
        optimizer.state.clear()
    microbatches = list(
        Microbatches(trainer.mesh, trainer.device, 1, document_start(trainer.config, trainer.tokenizer))(batch)
    )
    predicted = (batch.labels != IGNORE_INDEX).sum().to(trainer.device)

    def gradient(microbatch: Microbatch) -> list[Tensor]:
        """Of each parameter."""
        done = False
        while not done:  # exact sums may ask for another attempt
            trainer.optimizer.zero_grad()
            trainer.model.begin_gradients(rows=1)
            trainer.model.forward_backward(microbatch, predicted, is_last=True)
            done = trainer.model.finish_gradients()
        return [local(of.grad) for part in trainer.model.model_parts for of in part.parameters() if of.grad is not None]

    total = [of.clone() for of in gradient(microbatches[0])]
    for microbatch in microbatches[1:]:
        for summed, of_row in zip(total, gradient(microbatch), strict=True):
            summed += of_row
    square = product(total, total)

    def share(own: Sequence[Tensor]) -> float:
        return product(own, total) / square if square else math.nan

    of_rows = []
    for row in rows:
        own = gradient(microbatches[row])
        of_rows.append(RowGradient(row, math.sqrt(product(own, own)), share(own)))
    shares = []
    for document in documents:
        microbatch = microbatches[document.row]
        labels = torch.full_like(microbatch.labels, IGNORE_INDEX)
        end = document.begin + len(document.tokens) - 1  # the label of a token is the next one
        own_labels = slice(max(0, document.begin - 1), end)
        labels[:, own_labels] = microbatch.labels[:, own_labels]
        shares.append(share(gradient(microbatch._replace(labels=labels))))
    trainer.optimizer.zero_grad()
    return of_rows, shares


def product(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The scalar product of two gradients."""
    return sum(torch.sum(x.double() * y.double()).item() for x, y in zip(a, b, strict=True))
