"""From the ``[data]`` section to a loader."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from torchtrain.config.schema import DataConfig
from torchtrain.datasets.hub import Ask, alone
from torchtrain.datasets.loader import DataLoader
from torchtrain.datasets.order import Mixture, stream_seed, streams_of
from torchtrain.datasets.packing import PackedTextStream, Stream, TokenWindowStream
from torchtrain.datasets.prepared import PreparedTokens
from torchtrain.datasets.sources import open_prepared, open_text
from torchtrain.datasets.text import StreamedText
from torchtrain.datasets.tokenizers import Tokenizer
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
    ask: Ask = alone,
) -> DataLoader:
    """A loader of the data of ``config``, before its first batch.

    Row ``r`` of the global batch of a step depends on ``config``, ``seq_len``, ``global_batch_size``, ``seed``, the
    step and ``r`` alone.

    Args:
        rows: the rows of the global batch that this rank wants.
        section: name of ``config`` in messages.
        drop_last: if the data are not repeated, end before the first batch that is not full.
        count_bytes: batches have ``label_bytes``.

    Raises:
        DataError: the data are missing, empty, or not what ``config`` says.
        StorageError: the hub does not answer.
    """
    assert 0 <= rows.start < rows.stop <= global_batch_size
    repeat = config.when_exhausted == "repeat"
    streamed_lanes = streams_of(config.streams, global_batch_size)
    streams: list[list[Stream]] = []
    identities: list[Callable[[], str]] = []
    for number, source in enumerate(config.all):
        key = f"{section}.sources[{number}]" if config.sources else section
        seed_of_source = stream_seed("data", seed, number)
        verify_bytes = config.verify_gib * 2**30
        prepared = partial(open_prepared, source, key, tokenizer.content_hash, verify_bytes)
        first = Path(*source.paths[:1])
        opened = with_retries(prepared, first) or open_text(source, key, streamed_lanes, ask, verify_bytes)
        identities.append(opened.identity)
        if isinstance(opened, PreparedTokens):
            streams.append([TokenWindowStream(opened, tokenizer, seq_len, seed_of_source, repeat)] * len(rows))
            continue
        lanes = streamed_lanes if isinstance(opened, StreamedText) else global_batch_size
        rows_of_lane = global_batch_size // lanes
        assert rows.start % rows_of_lane == rows.stop % rows_of_lane == 0  # limits/layout.py refuses it
        by_lane = {
            lane: PackedTextStream(opened, tokenizer, lane, lanes, seed_of_source, repeat)
            for lane in range(rows.start // rows_of_lane, rows.stop // rows_of_lane)
        }
        streams.append([by_lane[row // rows_of_lane] for row in rows])
    option = f"{section}.{'sources' if config.sources else 'name' if config.name else 'path'}"
    return DataLoader(
        streams,
        Mixture([source.weight for source in config.all]),
        rows,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        prefetch=config.prefetch,
        drop_last=drop_last,
        count_bytes=count_bytes,
        device=device,
        identity=lambda: {
            option: "; ".join(of_source() for of_source in identities),
            "model.tokenizer_path": tokenizer.identity,
        },
    )
