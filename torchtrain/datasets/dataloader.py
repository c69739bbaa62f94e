"""Data loader: this rank's rows of the global batch of each step, prefetched in a background thread."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from torchtrain.datasets.data_source import DataSource, Piece, SavedPosition, Stream
from torchtrain.datasets.order import Mixture
from torchtrain.distributed.agreement import Request
from torchtrain.errors import DamagedError, DataError
from torchtrain.labels import IGNORE_INDEX

# Seconds between all-reduces while the batch of any rank is not ready.
ROUND_SECONDS = 1.0
MAX_COUNT = 2**53  # of steps or windows in a saved position


@dataclass(frozen=True)
class Batch:
    """One optimizer step's tokens, in CPU memory (pinned where there is a GPU).

    ``labels[r, t]`` is the token that follows ``tokens[r, t]``, or -100 where there is none. Both are int64 of shape
    (rows, seq_len). ``label_bytes`` has the same shape, float64: the number of bytes of its document that a label
    stands for; for a whole document they add up to the length of its text in UTF-8. None unless the loader counts them.
    ``sources``, int64 (rows,): the number of each row's source, all of whose tokens are from it.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    label_bytes: torch.Tensor | None = None
    sources: torch.Tensor | None = None

    def pinned(self) -> "Batch":
        """The batch in pinned memory, from which copies with ``non_blocking`` do not block."""
        parts = {name: part.pin_memory() for name, part in vars(self).items() if part is not None}
        return replace(self, **parts)


@dataclass(frozen=True)
class LoaderLayout:
    """What the columns of a loader's state stand for."""

    global_batch_size: int
    seq_len: int
    state_sizes: tuple[int, ...]
    """For each source, the number of columns for the state of its stream."""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the state of all rows."""
        return self.global_batch_size, 1 + len(self.state_sizes) + sum(self.state_sizes)


_Read = tuple[Batch, npt.NDArray[np.int64], bool]
"""A batch, the state of the loader after it, and whether the data end in it."""


@dataclass(eq=False)
class DataLoader(Iterator[Batch]):
    """Iterator of batches; see ``build_dataloader``.

    It is endless if the data are repeated. Otherwise it ends on all ranks at the same step: with ``drop_last``, before
    the first batch that is not full; without, after the last token, and the rest of the last rows is masked.
    """

    streams: Sequence[Stream]
    """The windows of each source for ``rows``."""
    mixture: Mixture
    rows: range
    _: KW_ONLY
    seq_len: int
    global_batch_size: int
    prefetch: int
    drop_last: bool
    device: torch.device
    count_bytes: bool = False
    filler: int = 0
    """The token in place of those of documents that are left out (``Exclusions``)."""
    identity: Mapping[str, str] = field(default_factory=dict)
    """For each option that names data or the tokenizer, a text that identifies their content."""
    sources: Sequence[DataSource] = ()
    """Those of ``streams``."""
    streams_of: Callable[[range], Sequence[Stream]] | None = None
    """Returns ``streams`` for other rows of the global batch."""
    stop: Request | None = None
    """A request of any rank that ends the iteration on all of them while a batch is late."""

    def __post_init__(self) -> None:
        self._step = 0
        # For each source, the number of windows that it has returned for all rows of all ranks.
        self._windows_drawn = np.zeros(len(self.streams), dtype=np.int64)
        self._reads_ahead = any(stream.reads_ahead for stream in self.streams)
        # The first step that was not read ahead yet, and the windows drawn before it.
        self._next_ahead = self._step, self._windows_drawn
        self._state = self._snapshot()
        self._beginnings = [stream.state for stream in self.streams]
        self.wait_seconds = 0.0
        """How long this rank waited for its last batch."""
        self._group: dist.ProcessGroup | None = None
        self._background: _Background | None = None
        # The next batch, or the error that occurred instead; None while it is not ready.
        self._next_read: _Read | BaseException | None = None
        # The state of the next batch on all ranks: the tensor of maxima, and its pending all-reduce.
        self._reduction: tuple[torch.Tensor, dist.Work | None] | None = None

    def connect(self, group: dist.ProcessGroup) -> None:
        """Raise errors and end at the same step as the loaders of all other ranks in ``group``, a gloo group.

        For each batch the ranks perform a small all-reduce: during the step before, if the batch has been prefetched;
        else every ``ROUND_SECONDS`` until the batches of all ranks are ready. So reading data may take longer than the
        timeout of the group, but a rank that does not join the all-reduce in that time counts as dead. All users of
        ``group`` must be on one thread.
        """
        self._group = group

    def __next__(self) -> Batch:
        if self._background is None:
            self._background = _Background(self._read, self.prefetch, self.device)
        self._background.ask()
        self.wait_seconds = 0.0
        failed, late, stopping, targets, ended = self._agreed()
        while late and not failed:
            if stopping and self.stop is not None:
                self.stop.agreed = True
                self.close()
                raise StopIteration
            failed, late, stopping, targets, ended = self._agreed()
        read = self._next_read
        if failed:
            self.close()
            self._raise_on_all_ranks(read if isinstance(read, BaseException) else None)
        assert isinstance(read, tuple)
        if ended and (self.drop_last or not targets):
            self.close()
            if self.drop_last and self._state[0, 0] == 0:
                raise DataError(
                    "the data do not fill one batch, training.global_batch_size sequences of training.seq_len tokens: "
                    "give more, make batches smaller, or set data.when_exhausted = 'repeat'"
                )
            raise StopIteration
        batch, self._state, _ = read
        self._next_read = None
        if self._group is not None and self.prefetch > 0:
            self._poll(0.0)  # for the next batch: its all-reduce runs during this step
        return batch

    def _poll(self, timeout_seconds: float) -> None:
        """Check whether the next batch is ready, and start an all-reduce of the result. Collective."""
        if self._next_read is None:
            assert self._background is not None
            start = time.perf_counter()
            self._next_read = self._background.next(timeout_seconds)
            self.wait_seconds += time.perf_counter() - start
        read = self._next_read
        targets, ended = 0, False
        if isinstance(read, tuple):
            batch, _, ended = read
            targets = int((batch.labels != IGNORE_INDEX).sum())
        failed, late = isinstance(read, BaseException), read is None
        stopping = self.stop is not None and self.stop.pending
        values, work = torch.tensor([failed, late, stopping, targets, ended], dtype=torch.int64), None
        if self._group is not None:
            work = dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._reduction = values, work

    def _agreed(self) -> list[int]:
        """Maxima over all ranks of: whether reading failed, whether the batch is late, whether the rank is to stop, the
        batch's number of unmasked labels, and whether the data ended. Waits for the pending ``_poll``, or starts one
        that waits for a batch."""
        if self._reduction is None:
            self._poll(ROUND_SECONDS)
        assert self._reduction is not None
        (values, work), self._reduction = self._reduction, None
        if work is not None:
            work.wait()
        return values.tolist()

    def state_dict(self) -> dict[str, Any]:
        """``{"rows": int64 tensor (rows, k)}``: where each row resumes after the batch that was returned last.

        Columns: the step; for each source the windows drawn; for each source the state of its stream for the row.
        Row ``i`` of the tensor belongs to this rank's ``i``-th row of the batch. So the concatenated tensors of all
        ranks are the state of the whole loader, independent of the number of ranks.
        """
        return {"rows": torch.from_numpy(self._state.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``; prefetched batches are discarded.

        Raises:
            DataError: it was saved with another global batch size, or another number or kind of sources.
        """
        rows = state["rows"].numpy()
        if rows.shape != self._state.shape:
            raise DataError(
                f"the saved position in the data has shape {tuple(rows.shape)}, this run needs {self._state.shape}: "
                "resume with the same training.global_batch_size and the same [data] section"
            )
        self.close()
        _require_counts(rows, len(self.streams))
        self._step, first = int(rows[0, 0]), 1 + len(self.streams)
        self._windows_drawn = rows[0, 1:first].copy()
        for stream in self.streams:
            size = stream.state.shape[1]
            stream.state = rows[:, first : first + size].copy()
            first += size
        self._next_ahead = self._step, self._windows_drawn
        self._state = self._snapshot()

    def reassign(self, rows: range) -> None:
        """Read these rows of the global batch from now on, from their beginning; call ``load_state_dict`` after it."""
        assert self.streams_of is not None
        self.close()
        self.rows, self.streams = rows, self.streams_of(rows)
        self._state = self._snapshot()
        self._beginnings = [stream.state for stream in self.streams]

    @property
    def layout(self) -> LoaderLayout:
        sizes = tuple(stream.state.shape[1] for stream in self.streams)
        return LoaderLayout(self.global_batch_size, self.seq_len, sizes)

    def resume(self, rows: npt.NDArray[np.int64], saved: LoaderLayout, continued: Sequence[bool]) -> None:
        """Resume from the state of a loader with another batch, sequence length or other sources.

        Args:
            rows: the saved state of all rows of the global batch.
            saved: its layout.
            continued: for each source, whether it is the saved source of the same number, and continues from its
                position. Other sources begin.
        """
        self.close()
        _require_counts(rows, len(saved.state_sizes))
        self._step, first = int(rows[0, 0]), 1 + len(saved.state_sizes)
        positions = []
        for number, size in enumerate(saved.state_sizes):
            states, windows_drawn = rows[:, first : first + size], int(rows[0, 1 + number])
            positions.append(SavedPosition(states, windows_drawn, saved.seq_len))
            first += size
        same_windows = (saved.global_batch_size, saved.seq_len) == (self.global_batch_size, self.seq_len)
        for number, (stream, beginning) in enumerate(zip(self.streams, self._beginnings, strict=True)):
            self._windows_drawn[number] = 0
            if not continued[number]:
                stream.state = beginning
            elif same_windows:
                stream.state = positions[number].states[self.rows.start : self.rows.stop]
                self._windows_drawn[number] = positions[number].windows_drawn
            else:
                self._windows_drawn[number] = stream.resume(positions[number])
        self._next_ahead = self._step, self._windows_drawn
        self._state = self._snapshot()

    def locate(self) -> list[list[Piece] | None]:
        """For each row of the next batch, the pieces of its window of ``seq_len + 1`` tokens; None if not known.

        The last token of a window is the first one of the next window of its reader. Call it before the first batch, or
        on a loader that does not prefetch.
        """
        assert self.prefetch == 0 or self._background is None
        rows_of, drawn_before, _ = self._choose_windows(self._windows_drawn)
        pieces: list[list[Piece] | None] = [None] * len(self.rows)
        for source, rows in rows_of.items():
            found = self.streams[source].locate(rows, drawn_before[rows].tolist())
            for row, of_row in zip(rows, found or (), strict=False):
                pieces[row] = of_row
        return pieces

    def close(self) -> None:
        """Stop prefetching."""
        if self._background is not None:
            self._background.close()
            self._background = None
        self._next_read, self._reduction = None, None

    def _snapshot(self) -> npt.NDArray[np.int64]:
        columns = [np.tile(np.array([self._step, *self._windows_drawn]), (len(self.rows), 1))]
        return np.concatenate([*columns, *(stream.state for stream in self.streams)], axis=1)

    def _read(self) -> _Read:
        windows = np.zeros((len(self.rows), self.seq_len + 1), dtype=np.int64)
        sizes = np.zeros(windows.shape) if self.count_bytes else None
        filled = np.empty(len(self.rows), dtype=np.int64)
        if self._reads_ahead:
            self._read_ahead()
        sources = self._choose_sources(self._windows_drawn)[self.rows]
        rows_of, drawn_before, drawn_after = self._choose_windows(self._windows_drawn)
        for source, rows in rows_of.items():
            counted = None if sizes is None else [sizes[row] for row in rows]
            own = [windows[row] for row in rows]
            filled[rows] = self.streams[source].fill(rows, own, drawn_before[rows].tolist(), counted)
        self._step += 1
        self._windows_drawn = drawn_after
        # Copies, also of a single row: labels are written to below.
        tokens, labels = (torch.from_numpy(part.copy()) for part in (windows[:, :-1], windows[:, 1:]))
        tokens[tokens == IGNORE_INDEX] = self.filler  # their labels have no loss as they are
        ended = bool(filled.min() < self.seq_len + 1)
        if ended:
            beyond = torch.arange(self.seq_len) >= torch.from_numpy(filled)[:, None] - 1
            labels[beyond] = IGNORE_INDEX
        label_bytes = None if sizes is None else torch.from_numpy(sizes[:, 1:].copy())
        batch = Batch(tokens, labels, label_bytes, torch.from_numpy(sources))
        return batch.pinned() if self.device.type == "cuda" else batch, self._snapshot(), ended

    def _choose_sources(self, windows_drawn: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The source of each row of the global batch in a step, by number."""
        # The mixture counts rows over all steps, also of a run that has had another batch size.
        return self.mixture.choose(windows_drawn.sum() + np.arange(self.global_batch_size))

    def _choose_windows(
        self, windows_drawn: npt.NDArray[np.int64]
    ) -> tuple[dict[int, list[int]], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The rows of this rank by their source in a step, the windows drawn before each row, and those after the step.

        Windows drawn are how many windows a row's source has returned before it, for rows of all ranks:

            row of the global batch    0  1  2  3
            its source                 A  A  B  A
            windows drawn before it    7  8  5  9    with ``windows_drawn`` [7, 5]; after the step they are [10, 6]
        """
        sources = self._choose_sources(windows_drawn)
        of_source = sources == np.arange(len(self.streams))[:, None]  # (sources, rows of the global batch)
        drawn = windows_drawn[:, None] + of_source.cumsum(axis=1) - 1
        rows_of: dict[int, list[int]] = {}
        for row, source in enumerate(sources[self.rows].tolist()):
            rows_of.setdefault(source, []).append(row)
        return rows_of, drawn[sources[self.rows], self.rows], drawn[:, -1] + 1

    def _read_ahead(self) -> None:
        """Start reading this step and the ``prefetch`` steps after it."""
        step, windows_drawn = self._next_ahead
        while step <= self._step + self.prefetch:
            rows_of, drawn_before, windows_drawn = self._choose_windows(windows_drawn)
            for source, rows in rows_of.items():
                self.streams[source].read_ahead(drawn_before[rows].tolist())
            step += 1
        self._next_ahead = step, windows_drawn

    def _raise_on_all_ranks(self, error: BaseException | None) -> None:
        failure = (
            None if error is None else (str(error) or repr(error), getattr(error, "exit_code", DataError.exit_code))
        )
        everywhere: list[tuple[str, int] | None] = [failure]
        if self._group is not None:
            everywhere *= dist.get_world_size(self._group)
            dist.all_gather_object(everywhere, failure, group=self._group)
        if error is not None:
            raise error
        rank, (message, exit_code) = next(
            (rank, failure) for rank, failure in enumerate(everywhere) if failure is not None
        )
        elsewhere = DataError(f"rank {rank} cannot continue: {message}")
        elsewhere.exit_code = exit_code
        raise elsewhere


def _require_counts(rows: npt.NDArray[np.int64], sources: int) -> None:
    """Raise DamagedError unless ``rows``, the state of a loader, begin with a step and the windows drawn."""
    counts = rows[:, : 1 + sources]
    if counts.min() < 0 or counts.max() > MAX_COUNT:
        raise DamagedError("the saved position in the data is damaged: it has a step or windows that no run has")


class _Background:
    """Calls ``read`` in a thread, up to ``ahead`` times more often than ``ask``; with 0, in ``next`` itself."""

    def __init__(self, read: Callable[[], _Read], ahead: int, device: torch.device):
        self._read = read
        self._device = device
        self._allowed = threading.Semaphore(ahead)
        self._results: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        if ahead > 0:
            self._thread = threading.Thread(target=self._run, name="data", daemon=True)
            self._thread.start()

    def ask(self) -> None:
        """Allow one more ``read``. Call it once per result, before the first ``next`` for it."""
        self._allowed.release()

    def next(self, timeout_seconds: float) -> _Read | BaseException | None:
        """The next result, or None after the timeout. After an error always that error, even if results are left."""
        if self._thread is None:
            self._read_one()
        read = None
        with contextlib.suppress(queue.Empty):
            read = self._results.get(timeout=timeout_seconds)
        return read if self._error is None else self._error

    def close(self) -> None:
        """Stop the thread. One that waits for the network is not joined: it is a daemon thread."""
        self._closed = True
        self._allowed.release()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        if self._device.type == "cuda":
            # The default device of a new thread is the first GPU, where pinning would allocate memory for every rank.
            torch.cuda.set_device(self._device)
        while self._allowed.acquire() and not self._closed and self._error is None:
            self._read_one()

    def _read_one(self) -> None:
        try:
            self._results.put(self._read())
        except BaseException as error:
            self._error = error
            self._results.put(None)  # wakes the main thread
