"""From the ``[data]`` section to a loader."""

import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtrain.config.schema import DataConfig, SourceConfig
from torchtrain.datasets.loader import DataLoader
from torchtrain.datasets.order import Mixture, stream_seed, streams_of
from torchtrain.datasets.packing import PackedTextStream, Stream, TokenWindowStream
from torchtrain.datasets.prepared import PreparedTokens
from torchtrain.datasets.sources import ask_hub, open_prepared, open_text
from torchtrain.datasets.text import StreamedText, TextSource
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.distributed.agreement import gather_from_all_ranks, on_all_ranks, on_rank0
from torchtrain.errors import DataError
from torchtrain.files import with_retries


def build_loader(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    global_batch_size: int,
    rows: range,
    seed: int,
    device: torch.device,
    section: str = "data",
    drop_last: bool = True,
    count_bytes: bool = False,
    group: dist.ProcessGroup | None = None,
) -> DataLoader:
    """A loader of the data of ``config``, before its first batch.

    Row ``r`` of the global batch of a step depends on ``config``, ``seq_len``, ``global_batch_size``, ``seed``, the
    step and ``r`` alone.

    Args:
        rows: the rows of the global batch that this rank wants.
        section: name of ``config`` in messages.
        drop_last: if the data are not repeated, end before the first batch that is not full.
        count_bytes: batches have ``label_bytes``.
        group: a gloo group of all ranks, which open the data together, and on which all raise an error of one of them,
            now and in the loader; None for a rank that opens data by itself.

    Raises:
        DataError: the data are missing, empty, or not what ``config`` says; or ranks see other data than rank 0.
        StorageError: the hub does not answer.
    """
    assert 0 <= rows.start < rows.stop <= global_batch_size
    repeat = config.when_exhausted == "repeat"
    streamed_lanes = streams_of(config.streams, global_batch_size)
    streams: list[list[Stream]] = []
    keys = [f"{section}.sources[{number}]" if config.sources else section for number in range(len(config.all))]
    verify_bytes = config.verify_gib * 2**30

    def ask() -> list[Any]:
        return [ask_hub(source, key, verify_bytes) for source, key in zip(config.all, keys, strict=True)]

    def open_all() -> list[tuple[TextSource | PreparedTokens, str]]:
        opened = [
            _open(source, key, tokenizer, streamed_lanes, answer, verify_bytes)
            for source, key, answer in zip(config.all, keys, answers, strict=True)
        ]
        return [(source, source.identity()) for source in opened]

    answers = on_rank0(ask, group) if group is not None else ask()
    opened = on_all_ranks(open_all, group) if group is not None else open_all()
    identities = [identity for _, identity in opened]
    if group is not None:
        _require_same(keys, identities, group)
    for number, (source, _) in enumerate(opened):
        seed_of_source = stream_seed("data", seed, number)
        if isinstance(source, PreparedTokens):
            streams.append([TokenWindowStream(source, tokenizer, seq_len, seed_of_source, repeat)] * len(rows))
            continue
        lanes = streamed_lanes if isinstance(source, StreamedText) else global_batch_size
        rows_of_lane = global_batch_size // lanes
        assert rows.start % rows_of_lane == rows.stop % rows_of_lane == 0  # limits/layout.py refuses it
        by_lane = {
            lane: PackedTextStream(source, tokenizer, lane, lanes, seed_of_source, repeat)
            for lane in range(rows.start // rows_of_lane, rows.stop // rows_of_lane)
        }
        streams.append([by_lane[row // rows_of_lane] for row in rows])
    option = f"{section}.{'sources' if config.sources else 'name' if config.name else 'path'}"
    loader = DataLoader(
        streams,
        Mixture([source.weight for source in config.all]),
        rows,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        prefetch=config.prefetch,
        drop_last=drop_last,
        count_bytes=count_bytes,
        device=device,
        identity={option: "; ".join(identities), "model.tokenizer_path": tokenizer.identity},
    )
    if group is not None:
        loader.connect(group)
    return loader


def _open(
    source: SourceConfig, key: str, tokenizer: Tokenizer, lanes: int, from_hub: Any, verify_bytes: float
) -> TextSource | PreparedTokens:
    prepared = partial(open_prepared, source, key, tokenizer.content_hash, verify_bytes)
    first = Path(*source.paths[:1])
    return with_retries(prepared, first) or open_text(source, key, lanes, from_hub, verify_bytes)


def _require_same(keys: Sequence[str], identities: Sequence[str], group: dist.ProcessGroup) -> None:
    """Raise DataError on all ranks if one of them has other data than rank 0."""
    first, *others = gather_from_all_ranks(lambda: (socket.gethostname(), identities), group)
    for rank, (host, found) in enumerate(others, 1):
        for key, here, there in zip(keys, first[1], found, strict=True):
            if here != there:
                raise DataError(
                    f"{key}: rank {rank} on host {host} sees other data ({there}) than rank 0 on host {first[0]} "
                    f"({here}); give all hosts the same files"
                )
