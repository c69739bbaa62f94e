"""Build a ``DataLoader`` from a config section such as ``[data]``."""

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchtrain.config.registry import DATA_SOURCES
from torchtrain.config.run_plan import plan_of
from torchtrain.config.schema import JobConfig
from torchtrain.datasets.data_source import (
    DataSource,
    Exclusions,
    SourceContext,
    SourceType,
    Stream,
    StreamRequest,
    TextInput,
)
from torchtrain.datasets.dataloader import DataLoader
from torchtrain.datasets.exclusions import read_exclusions
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.datasets.order import Mixture, stream_seed
from torchtrain.datasets.token_cache import find_tokens, log_tokens, tokenized
from torchtrain.datasets.tokenizers import Tokenizer
from torchtrain.distributed.agreement import gather_from_all_ranks, on_all_ranks, on_rank0
from torchtrain.errors import ConfigError, DataError
from torchtrain.logging import logger

T = TypeVar("T")


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
    held_out: bool = False,
    longest_seq_len: int = 0,
    plugins: Mapping[str, Any] = MappingProxyType({}),
    group: dist.ProcessGroup | None = None,
) -> DataLoader:
    """Open the data of ``config``, and return a loader at its first batch. Text is tokenized into the cache, unless it
    is there.

    Row ``r`` of the global batch of a step depends on ``config``, ``seq_len``, ``global_batch_size``, ``seed``, the
    step and ``r`` alone.

    Args:
        rows: this rank's rows of the global batch.
        section: name of ``config`` in messages.
        drop_last: if the data are not repeated, end before the first batch that is not full.
        count_bytes: whether batches have ``label_bytes``.
        held_out: whether to read the held-out parts of the sources, in place of the others. The others are without the
            largest share of all sources, because a document that one source holds out may be in another one, too.
        longest_seq_len: see ``StreamRequest``; ``config`` may have a larger length.
        plugins: see ``SourceContext``.
        group: a gloo group of all ranks. They open and tokenize the data together, and an error of one rank is raised
            on all ranks, here and in the loader. None: this rank opens the data without communication.

    Raises:
        DataError: the data or ``data.exclude`` are missing, empty, or do not match ``config``; or ranks see other data
            than rank 0.
        StorageError: the file system or network does not respond.
    """
    assert 0 <= rows.start < rows.stop <= global_batch_size
    contexts = [
        SourceContext(
            section=f"{section}.sources[{number}]" if config.sources else section,
            tokenizer=tokenizer,
            global_batch_size=global_batch_size,
            verify_bytes=config.verify_gib * 2**30,
            plugins=plugins,
            held_out=held_out,
        )
        for number in range(len(config.all))
    ]
    exclude = Exclusions()
    if config.exclude and not held_out:
        exclude = _on_all(partial(read_exclusions, config.exclude), group)
    opened = [open_source(source, context, group) for source, context in zip(config.all, contexts, strict=True)]
    select = _select_held_out if held_out else _exclude_held_out
    sources = _on_all(partial(select, config, opened, [context.section for context in contexts]), group)
    by_section = {context.section: source for context, source in zip(contexts, sources, strict=True)}
    _check_sources(config, by_section, exclude)
    identities = _identify(by_section, exclude, group)

    def streams_of(rows: range) -> list[Stream]:
        return [
            source.stream(
                StreamRequest(
                    *(tokenizer, seq_len, global_batch_size, rows, stream_seed("data", seed, number)),
                    repeat=config.when_exhausted == "repeat",
                    longest_seq_len=max(longest_seq_len, config.longest_seq_len),
                    packing=config.packing,
                    exclude=exclude,
                )
            )
            for number, source in enumerate(sources)
        ]

    loader = DataLoader(
        _on_all(partial(streams_of, rows), group),
        Mixture([source.weight for source in config.all]),
        rows,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        prefetch=config.prefetch,
        drop_last=drop_last,
        count_bytes=count_bytes,
        device=device,
        identity={
            f"{section}.{_option_of_data(config)}": "; ".join(identities),
            "model.tokenizer_path": tokenizer.identity,
            **({"data.exclude": exclude.identity} if exclude.identity else {}),
        },
        filler=next((token for token in (tokenizer.eos_id, tokenizer.bos_id) if token is not None), 0),
        sources=sources,
        streams_of=streams_of,
    )
    if group is not None:
        loader.connect(group)
    return loader


def _on_all(function: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """The result of ``function``; with ``group``, an error of one rank is raised on all ranks."""
    return on_all_ranks(function, group) if group is not None else function()


def _select_held_out(config: DataConfig, opened: Sequence[DataSource], sections: Sequence[str]) -> list[DataSource]:
    """Of each source that holds out documents only these."""
    return [
        tokens.part(source.held_out, held_out=True, section=section) if source.held_out else tokens
        for source, tokens, section in zip(config.all, opened, sections, strict=True)
    ]


def _exclude_held_out(config: DataConfig, opened: Sequence[DataSource], sections: Sequence[str]) -> list[DataSource]:
    """Of each source the documents that are not of the largest share that a source holds out."""
    share = config.largest_held_out
    if not share:
        return list(opened)
    titles = [source.title or source.source_type for source in config.all]
    largest = max(range(len(config.all)), key=lambda number: config.all[number].held_out)
    others = [title for source, title in zip(config.all, titles, strict=True) if source.held_out < share]
    if others:
        logger.info(
            "%s.held_out = %g, of %s, is the largest share that a source holds out: the same documents of %s are not "
            "trained on, either",
            *(sections[largest], share, titles[largest], ", ".join(others)),
        )
    return [tokens.part(share, held_out=False, section=sections[largest]) for tokens in opened]


def _identify(sources: Mapping[str, DataSource], exclude: Exclusions, group: dist.ProcessGroup | None) -> Sequence[str]:
    """The identity of each of ``sources``, by their sections. Raise DataError if ranks see other data than rank 0."""
    identities = _on_all(lambda: [source.identity() for source in sources.values()], group)
    if group is not None:
        _require_same([*sources, "data.exclude"], [*identities, exclude.identity], group)
    return identities


def _option_of_data(config: DataConfig) -> str:
    """The option that names the data of ``config``."""
    if config.sources:
        return "sources"
    kind: type[SourceType] = DATA_SOURCES[config.source_type]
    return kind.data_option(config)


def build_loaders(
    config: JobConfig,
    tokenizer: Tokenizer,
    rows: range,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> tuple[DataLoader, dict[str, DataLoader]]:
    """Build the data loader of ``[data]`` and those of ``[validation]``, by label, for this rank's ``rows`` of the
    global batch. Collective, unless ``group`` is None."""
    open_loader = partial(
        build_dataloader,
        tokenizer=tokenizer,
        seq_len=config.training.seq_len,
        global_batch_size=config.training.global_batch_size,
        rows=rows,
        seed=config.training.seed,
        device=device,
        plugins=config.plugins,
        group=group,
    )
    open_once = partial(open_loader, drop_last=False, count_bytes=True, seed=0)
    validation_loaders = {}
    for number, source in enumerate(config.validation.all if config.validation.enable else ()):
        section = f"validation.sources[{number}]" if config.validation.sources else "validation"
        validation_loaders[source.title] = open_once(_once(config.data, source), section=section)
    titles = [source.title or source.source_type for source in config.data.all]
    for number, (source, title) in enumerate(zip(config.data.all, titles, strict=True)):
        if source.held_out:
            section = f"data.sources[{number}]" if config.data.sources else "data"
            label = title if titles.count(title) == 1 else f"{title}_{number + 1}"
            while label in validation_loaders:
                label += "_held_out"
            validation_loaders[label] = open_once(_once(config.data, source), section=section, held_out=True)
    return open_loader(config.data, longest_seq_len=plan_of(config).longest_seq_len), validation_loaders


def _once(config: DataConfig, source: SourceConfig) -> DataConfig:
    """``source`` alone, read once, with the other options of ``[data]``."""
    fields = asdict(source)
    of_source = {key: fields[key] for key in asdict(SourceConfig())}
    return replace(config, **of_source | {"weight": 1.0}, sources=(), when_exhausted="stop", packing="cut", exclude="")


def check_data(
    config: JobConfig, tokenizer: Tokenizer, rows: range, opened: dict[str, DataSource | TextInput]
) -> list[DataSource | TextInput]:
    """Open the data of a stage of a run without communication, and without tokenizing text that is not in the cache.

    Args:
        rows: those of one rank.
        opened: the training data that earlier stages of the run have opened, to which those of this stage are added.

    Returns:
        The sources of training data.

    Raises:
        DataError, StorageError: as ``build_dataloader``, but for what only the tokens show.
    """
    data, validation = config.data, config.validation.all if config.validation.enable else ()
    exclude = read_exclusions(data.exclude) if data.exclude else Exclusions()
    repeat = data.when_exhausted == "repeat"

    def open_it(section: str, source: SourceConfig) -> DataSource | TextInput:
        batch, verify_bytes = config.training.global_batch_size, data.verify_gib * 2**30
        context = SourceContext(section, tokenizer, batch, verify_bytes=verify_bytes, plugins=config.plugins)
        source_type = DATA_SOURCES[source.source_type]
        found: DataSource | TextInput = source_type.open(source, context, source_type.query_on_rank0(source, context))
        if isinstance(found, TextInput):
            cached = find_tokens(found, tokenizer, verify_bytes)
            if cached is not None:
                return cached
            logger.info("%s: the run will tokenize it first", found.name)
        return found

    def request_windows(source: DataSource | TextInput, repeat: bool) -> None:
        if isinstance(source, DataSource):  # it is not packed, which takes long
            batch = config.training.global_batch_size
            source.stream(StreamRequest(tokenizer, config.training.seq_len, batch, rows, 0, repeat))

    sources: dict[str, DataSource | TextInput] = {}
    for number, source in enumerate(data.all):
        section, key = f"data.sources[{number}]" if data.sources else "data", source_key(source)
        if key not in opened:
            opened[key] = open_it(section, source)
        found = opened[key]
        if data.largest_held_out and isinstance(found, DataSource):
            found = found.part(data.largest_held_out, held_out=False, section=section)
        sources[section] = found
    known = {section: source for section, source in sources.items() if isinstance(source, DataSource)}
    _check_sources(data, known, exclude)
    for found in sources.values():
        request_windows(found, repeat)
    for number, source in enumerate(validation):
        section = f"validation.sources[{number}]" if config.validation.sources else "validation"
        request_windows(open_it(section, source), repeat=False)
    return list(sources.values())


def source_key(source: SourceConfig) -> str:
    """What ``source`` opens, without its share and its revision."""
    options = {field.name: getattr(source, field.name) for field in fields(SourceConfig)}
    return str({**options, "weight": 0, "revision": None, "label": "", "type": source.source_type})


def open_source(config: SourceConfig, context: SourceContext, group: dist.ProcessGroup | None = None) -> DataSource:
    """Open a source; text is tokenized into the cache, unless it is there. Collective; see ``build_dataloader``."""
    source_type = DATA_SOURCES[config.source_type]
    query = partial(source_type.query_on_rank0, config, context)
    answer = on_rank0(query, group) if group is not None else query()
    open_it = partial(source_type.open, config, context, answer)
    opened: DataSource | TextInput = on_all_ranks(open_it, group) if group is not None else open_it()
    if not isinstance(opened, TextInput):
        return opened
    tokens = tokenized(opened, context.tokenizer, context.verify_bytes, group)
    if not context.held_out:  # otherwise the loader of the other documents logs it
        log_tokens(tokens)
    return tokens


def _check_sources(config: DataConfig, sources: Mapping[str, DataSource], exclude: Exclusions) -> None:
    """Raise DataError if a source, by its section, cannot be packed, or documents of ``exclude`` cannot be left out."""
    for section, source in sources.items():
        kind = type(source).__name__
        if exclude.identity and not source.can_exclude:
            raise DataError(
                f"data.exclude = {config.exclude!r} needs text, and {section} is {kind}: leave the option out, or let "
                "its stream leave out StreamRequest.exclude"
            )
        if config.packing not in source.packings:
            raise DataError(
                f"data.packing = {config.packing!r} needs tokens, and {section} is {kind}: set it to "
                f"{' or '.join(map(repr, source.packings))}, or tokenize the text first (torchtrain.prepare)"
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
