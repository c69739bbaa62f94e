"""Datasets of the Hugging Face hub, streamed or downloaded."""

from collections.abc import Callable, Iterator
from functools import partial

import datasets
import fsspec
import pyarrow.parquet

from torchtrain.config.schema import Source
from torchtrain.datasets.files import open_dataset
from torchtrain.datasets.formats import as_text, require_column
from torchtrain.datasets.identity import identity_of_names
from torchtrain.datasets.text import LocalText, StreamedText
from torchtrain.errors import DataError


def open_downloaded(source: Source, label: str) -> LocalText:
    """A dataset of the hub, fetched in full the first time."""
    datasets.disable_progress_bars()  # they would come from every rank
    try:
        dataset = datasets.load_dataset(source.name, source.subset or None, split=source.split)
    except Exception as error:  # The hub's client raises dozens of kinds; its message says what is wrong.
        raise DataError(f"cannot download {label}: {error}") from error
    # The hub's revision is in it, and no path.
    return open_dataset(dataset, source.text_column, label, lambda: f"revision {dataset._fingerprint}")


def open_streamed(source: Source, lanes: int, label: str) -> StreamedText:
    """A dataset of the hub, to be streamed by ``lanes`` readers."""
    column, split = source.text_column, source.split
    try:
        builder = datasets.load_dataset_builder(source.name, source.subset or None)
        urls = [str(url) for url in (builder.config.data_files or {}).get(split, ())]
        files: list[Callable[[int], Iterator[str | None]]]
        if urls and all(url.endswith(".parquet") for url in urls):
            with fsspec.open(urls[0]) as file:
                columns = pyarrow.parquet.read_schema(file).names
            files = [_parquet_reader(url, column) for url in urls]
        else:
            dataset = datasets.load_dataset(source.name, source.subset or None, split=split, streaming=True)
            columns = dataset.column_names or list(next(iter(dataset), {}))
            files = [_stream_reader(dataset, number, column) for number in range(dataset.n_shards)]
    except Exception as error:  # As above; the message says what is wrong.
        raise DataError(f"cannot open {label}: {error}") from error
    if not columns:
        raise DataError(f"{label} has no documents")
    require_column(column, columns, label)
    return StreamedText(files, lanes, label, partial(identity_of_names, urls))


def _parquet_reader(url: str, column: str) -> Callable[[int], Iterator[str | None]]:
    """Fetches the one column alone, and begins at the row group in question."""

    def read(start: int) -> Iterator[str | None]:
        with fsspec.open(url) as file:
            parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=True)
            for group in range(parquet.num_row_groups):
                rows = parquet.metadata.row_group(group).num_rows
                if start >= rows:
                    start -= rows
                    continue
                for batch in parquet.iter_batches(256, row_groups=[group], columns=[column]):
                    yield from map(as_text, batch.column(0).slice(start).to_pylist())
                    start = max(0, start - len(batch))

    return read


def _stream_reader(
    dataset: datasets.IterableDataset, number: int, column: str
) -> Callable[[int], Iterator[str | None]]:
    def read(start: int) -> Iterator[str | None]:
        for row in dataset.shard(num_shards=dataset.n_shards, index=number).skip(start):
            yield as_text(row.get(column))

    return read
