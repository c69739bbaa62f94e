"""Build a ``DataLoader`` from a config section such as ``[data]``."""

import socket
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from torchtrain.config.registry import DATA_SOURCES
from torchtrain.config.schema import DataConfig, JobConfig
from torchtrain.datasets.data_source import DataSource, Exclusions, SourceContext, Stream, StreamRequest
from torchtrain.datasets.dataloader import DataLoader
from torchtrain.datasets.exclusions import read_exclusions
from torchtrain.datasets.held_out import part_of
from torchtrain.datasets.order import Mixture, number_of_readers, stream_seed
from torchtrain.datasets.packing import TextSource
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.distributed.agreement import gather_from_all_ranks, on_all_ranks, on_rank0
from torchtrain.errors import ConfigError, DataError
from torchtrain.logging import logger


def document_start(config: JobConfig, tokenizer: Tokenizer) -> int | None:
    """Id of the token that begins a document (bos), for the document mask; None without ``data.document_mask``.

    Raises:
        ConfigError: the tokenizer has no such token.
    """
    if not config.data.document_mask:
        return None
    if tokenizer.bos_id is None:
        raise ConfigError(
            "data.document_mask = true needs a tokenizer with a token that begins a document (bos); that of "
            f"model.tokenizer_path = {config.model.tokenizer_path!r} has none"
        )
    return tokenizer.bos_id


def build_dataloader(
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
    sequential: bool = False,
    held_out: bool = False,
    longest_seq_len: int = 0,
    plugins: Mapping[str, Any] = MappingProxyType({}),
    group: dist.ProcessGroup | None = None,
) -> DataLoader:
    """Open the data of ``config``, and return a loader at its first batch.

    Row ``r`` of the global batch of a step depends on ``config``, ``seq_len``, ``global_batch_size``, ``seed``, the
    step and ``r`` alone.

    Args:
        rows: this rank's rows of the global batch.
        section: name of ``config`` in messages.
        drop_last: if the data are not repeated, end before the first batch that is not full.
        count_bytes: whether batches have ``label_bytes``.
        held_out: whether to read the held-out parts of the sources, in place of the others. The others are without the
            largest share of all sources, because a document that one source holds out may be in another one, too.
        sequential, longest_seq_len: see ``StreamRequest``; ``config`` may have a larger length.
        plugins: see ``SourceContext``.
        group: a gloo group of all ranks. They open the data together, and an error of one rank is raised on all ranks,
            here and in the loader. None: this rank opens the data without communication.

    Raises:
        DataError: the data or ``data.exclude`` are missing, empty, or do not match ``config``; or ranks see other data
            than rank 0.
        StorageError: the file system or network does not respond.
    """
    assert 0 <= rows.start < rows.stop <= global_batch_size
    repeat = config.when_exhausted == "repeat"
    readers = number_of_readers(config.streams, global_batch_size)
    contexts = [
        SourceContext(
            section=f"{section}.sources[{number}]" if config.sources else section,
            tokenizer=tokenizer,
            readers=readers,
            verify_bytes=config.verify_gib * 2**30,
            plugins=plugins,
            held_out=held_out,
        )
        for number in range(len(config.all))
    ]

    read = partial(read_exclusions, config.exclude)
    share = config.largest_held_out
    shares = {context.section: source.held_out for source, context in zip(config.all, contexts, strict=True)}
    of_share = max(shares, key=lambda section: shares[section])
    others = [section for section, own in shares.items() if own < share]
    if others and not held_out:
        logger.info(
            "%s.held_out = %g is the largest share that a source holds out: the same documents of %s are not trained "
            "on, either",
            *(of_share, share, ", ".join(others)),
        )

    def query_on_rank0() -> list[Any]:
        pairs = zip(config.all, contexts, strict=True)
        return [DATA_SOURCES[source.source_type].query_on_rank0(source, context) for source, context in pairs]

    def open_all() -> list[tuple[DataSource, str]]:
        sources = []
        for source, context, answer in zip(config.all, contexts, answers, strict=True):
            found = DATA_SOURCES[source.source_type].open(source, context, answer)
            if held_out and source.held_out:
                found = part_of(found, source.held_out, held_out=True, section=context.section)
            elif share:
                found = part_of(found, share, held_out=False, section=of_share)
            sources.append(found)
        return [(source, source.identity()) for source in sources]

    exclude = Exclusions()
    if config.exclude and not held_out:
        exclude = on_all_ranks(read, group) if group is not None else read()
    answers = on_rank0(query_on_rank0, group) if group is not None else query_on_rank0()
    opened = on_all_ranks(open_all, group) if group is not None else open_all()
    sources, identities = [source for source, _ in opened], [identity for _, identity in opened]
    sections = [context.section for context in contexts]
    _check_sources(config, dict(zip(sections, sources, strict=True)), exclude)
    if group is not None:
        _require_same([*sections, "data.exclude"], [*identities, exclude.identity], group)

    def streams_of(rows: range) -> list[Sequence[Stream]]:
        return [
            source.streams(
                StreamRequest(
                    *(tokenizer, seq_len, global_batch_size, rows, readers, stream_seed("data", seed, number), repeat),
                    sequential=sequential,
                    longest_seq_len=max(longest_seq_len, config.longest_seq_len),
                    packing=config.packing,
                    exclude=exclude,
                )
            )
            for number, source in enumerate(sources)
        ]

    key = {"files": "path", "remote_files": "path", "hub": "name", "standard_library": "path"}.get(
        config.source_type, "type"
    )
    option = f"{section}.{'sources' if config.sources else key}"
    loader = DataLoader(
        streams_of(rows),
        Mixture([source.weight for source in config.all]),
        rows,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        prefetch=config.prefetch,
        drop_last=drop_last,
        count_bytes=count_bytes,
        device=device,
        identity={
            option: "; ".join(identities),
            "model.tokenizer_path": tokenizer.identity,
            **({"data.exclude": exclude.identity} if exclude.identity else {}),
        },
        filler=next((token for token in (tokenizer.eos_id, tokenizer.bos_id) if token is not None), 0),
        sources=sources,
        max_readers=config.streams,
        streams_of=streams_of,
    )
    if group is not None:
        loader.connect(group)
    return loader


def _check_sources(config: DataConfig, sources: Mapping[str, DataSource], exclude: Exclusions) -> None:
    """Raise DataError if a source, by its section, cannot be packed, or documents of ``exclude`` cannot be left out."""
    option = f"data.exclude = {config.exclude!r}"
    for section, source in sources.items():
        kind = type(source).__name__
        if exclude.identity and not source.can_exclude:
            raise DataError(
                f"{option} needs text or prepared data, and {section} is {kind}: leave the option out, or let its "
                "streams leave out StreamRequest.exclude"
            )
        if config.packing not in source.packings:
            raise DataError(
                f"data.packing = {config.packing!r} needs text, and {section} is {kind}: set it to "
                f"{' or '.join(map(repr, source.packings))}, or give the text itself"
            )
    unknown = exclude.places.difference(*(source.places_in(exclude.places) for source in sources.values()))
    if unknown:
        file = min(place.file for place in unknown)
        raise DataError(
            f"{option} names {file}, and no prepared data of this run have this file: name it as it is in data.path now"
        )
    if exclude.texts and not any(isinstance(source, TextSource) for source in sources.values()):
        raise DataError(
            f"{option} names documents by text_hash, and this run has prepared data only: name them by file and "
            "position, as torchtrain.explain does"
        )


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
