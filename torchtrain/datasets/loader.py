"""The loader: this rank's rows of the global batch, step after step, read ahead in the background."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from torchtrain.datasets.order import Mixture
from torchtrain.datasets.packing import Stream
from torchtrain.errors import DataError
from torchtrain.loss import IGNORE_INDEX

# Ranks whose batch is late say so this often.
ROUND_SECONDS = 1.0


@dataclass(frozen=True)
class Batch:
    """One optimizer step's tokens, in CPU memory (pinned where there is a GPU).

    ``labels[r, t]`` is the token that follows ``tokens[r, t]``, or -100 where there is none. Both are int64 of shape
    (rows, seq_len).
    """

    tokens: torch.Tensor
    labels: torch.Tensor


class _Read(NamedTuple):
    """A batch as it comes from the background."""

    batch: Batch
    state: npt.NDArray[np.int64]  # after it
    targets: int  # number of labels that are not masked
    full: bool


class Loader:
    """An iterator of batches. Made by ``build_loader``.

    It is endless if the data are repeated. Otherwise it ends, on all ranks at the same step, before the first batch
    that is not full; or, with ``drop_last`` off, after the last token, the rest of the last rows being masked.
    """

    def __init__(
        self,
        streams: Sequence[Sequence[Stream]],
        mixture: Mixture,
        rows: range,
        *,
        seq_len: int,
        global_batch_size: int,
        prefetch: int,
        drop_last: bool,
        device: torch.device,
    ):
        """``streams[i][k]`` gives row ``rows[k]`` its windows of source ``i``; neighbors may share a stream."""
        self._streams = streams
        self._mixture = mixture
        self._rows = rows
        self._seq_len = seq_len
        self._global_batch_size = global_batch_size
        self._prefetch = prefetch
        self._drop_last = drop_last
        self._device = device
        self._step = 0
        self._turns = np.zeros(len(streams), dtype=np.int64)  # windows that each source has given to all rows
        self._state = self._snapshot()
        self.wait_seconds = 0.0
        """How long the last batch was waited for, the other ranks' batches apart."""
        self._group: dist.ProcessGroup | None = None
        self._background: _Background | None = None

    def connect(self, group: dist.ProcessGroup) -> None:
        """From now on fail and end together with the loaders of all ranks in ``group``, a gloo group of its own.

        A few words are exchanged for each batch, and every ``ROUND_SECONDS`` while the batch of any rank is late. So
        data that are read ahead may take longer than the group's time-out, but a rank that says nothing may not.
        """
        self._group = group

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        if self._background is None:
            self._background = _Background(self._read, self._prefetch, self._device)
        self._background.ask()
        self.wait_seconds = 0.0
        read: _Read | None = None
        error: BaseException | None = None
        late = True
        while late:
            if read is None:
                start = time.perf_counter()
                read, error = self._background.next(ROUND_SECONDS)
                self.wait_seconds += time.perf_counter() - start
            failed, late, targets, ended = self._agree(read, error)
            if failed:
                self.close()
                self._raise_on_all_ranks(error)
        assert read is not None
        if (ended and self._drop_last) or not targets:
            self.close()
            raise StopIteration
        self._state = read.state
        return read.batch

    def state_dict(self) -> dict[str, Any]:
        """``{"rows": int64 tensor (rows, k)}``: where each row goes on after the batch that was returned last.

        Row ``i`` of the tensor belongs to this rank's ``i``-th row of the batch, so the tensors of all ranks, one
        below the other, are the state of the whole loader, whatever the number of ranks.
        """
        return {"rows": torch.from_numpy(self._state.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; what was read ahead is forgotten.

        Raises:
            DataError: it was saved with another global batch size or another number of sources.
        """
        rows = state["rows"].numpy()
        if rows.shape != self._state.shape:
            raise DataError(
                f"the saved place in the data has shape {tuple(rows.shape)}, this run needs {self._state.shape}: "
                "resume with the same training.global_batch_size and the same [data] section"
            )
        self.close()
        self._step, first = int(rows[0, 0]), 1 + len(self._streams)
        self._turns = rows[0, 1:first].copy()
        for streams in self._streams:
            size = len(streams[0].state)
            for stream, row in zip(streams, rows[:, first : first + size].tolist(), strict=True):
                stream.state = tuple(row)
            first += size
        self._state = self._snapshot()

    def close(self) -> None:
        """Stop reading ahead."""
        if self._background is not None:
            self._background.close()
            self._background = None

    def _snapshot(self) -> npt.NDArray[np.int64]:
        columns = [np.tile(np.array([self._step, *self._turns]), (len(self._rows), 1))]
        columns += [np.array([stream.state for stream in streams], dtype=np.int64) for streams in self._streams]
        return np.concatenate(columns, axis=1)

    def _read(self) -> _Read:
        """The next batch, and the state after it."""
        windows = np.zeros((len(self._rows), self._seq_len + 1), dtype=np.int64)
        filled = np.empty(len(self._rows), dtype=np.int64)
        # Of the whole global batch, so that every rank knows how many windows each source has given.
        sources = self._mixture.choose(np.arange(self._global_batch_size) + self._step * self._global_batch_size)
        of_source = sources == np.arange(len(self._streams))[:, None]  # (sources, rows of the global batch)
        turns = self._turns[:, None] + of_source.cumsum(axis=1) - 1
        for row, number in enumerate(self._rows):
            source = sources[number]
            filled[row] = self._streams[source][row].fill(windows[row], int(turns[source, number]))
        self._step += 1
        self._turns = turns[:, -1] + 1
        both = torch.from_numpy(windows)
        tokens, labels = both[:, :-1].contiguous(), both[:, 1:].contiguous()
        full = bool((filled == self._seq_len + 1).all())
        if not full:
            beyond = torch.arange(self._seq_len) >= torch.from_numpy(filled)[:, None] - 1
            labels[beyond] = IGNORE_INDEX
        if self._device.type == "cuda":
            tokens, labels = tokens.pin_memory(), labels.pin_memory()
        return _Read(Batch(tokens, labels), self._snapshot(), int((filled - 1).clip(0).sum()), full)

    def _agree(self, read: _Read | None, error: BaseException | None) -> tuple[bool, bool, int, bool]:
        """Whether any rank has failed, whether any is late, the most targets of a rank, whether any has too few."""
        own = (error is not None, read is None, read.targets if read else 0, read is not None and not read.full)
        if self._group is None:
            return own
        words = torch.tensor(own, dtype=torch.int64)
        dist.all_reduce(words, dist.ReduceOp.MAX, group=self._group)
        failed, late, targets, ended = words.tolist()
        return bool(failed), bool(late), targets, bool(ended)

    def _raise_on_all_ranks(self, error: BaseException | None) -> None:
        messages: list[str | None] = [None]
        if self._group is not None:
            messages *= dist.get_world_size(self._group)
            dist.all_gather_object(messages, None if error is None else str(error) or repr(error), group=self._group)
        if error is not None:
            raise error
        rank, message = next((rank, message) for rank, message in enumerate(messages) if message is not None)
        raise DataError(f"rank {rank} cannot go on: {message}")


class _Background:
    """Calls ``read`` in a thread, up to ``ahead`` times more than was asked for; with 0, in ``next`` itself."""

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
        """Before the first ``next`` for each result."""
        self._allowed.release()

    def next(self, timeout_seconds: float) -> tuple[_Read | None, BaseException | None]:
        """The next result, if there is one in time; or the error that keeps it away, even if results are left."""
        if self._thread is None:
            try:
                return self._read(), None
            except BaseException as error:
                return None, error
        read = None
        if self._error is None:
            try:
                read = self._results.get(timeout=timeout_seconds)
            except queue.Empty:
                return None, None
        return (None, self._error) if self._error else (read, None)

    def close(self) -> None:
        """Let the thread end. One that hangs on the network is left behind: it ends with the process."""
        self._closed = True
        self._allowed.release()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        if self._device.type == "cuda":
            # A new thread's device is the first GPU: pinning there would cost every rank memory on it.
            torch.cuda.set_device(self._device)
        while self._allowed.acquire() and not self._closed:
            try:
                read = self._read()
            except BaseException as error:
                self._error = error
                self._results.put(None)
                return
            self._results.put(read)
