"""Options of the data: [data], and the sources of [validation]."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from torchtrain.config.registry import DATA_SOURCES, suffixes_of
from torchtrain.config.section import CountOrZero, LocalPath, Section, at_least, require
from torchtrain.files import is_url

BUILT_IN_SOURCES = (
    *("files", "remote_files", "hub"),
    *("standard_library", "standard_library_docs", "standard_library_prose"),
)


@dataclass(frozen=True)
class SourceConfig(Section):
    path: str | tuple[str, ...] = ""
    """Local .jsonl, .json, .csv, .tsv, .txt or .md file (each also as .gz, .zst or .xz), .parquet or .arrow file, a
    folder of such files, a pattern such as 'books/*.jsonl', a list of these, or a folder written by torchtrain.prepare.
    The first run tokenizes text into the cache, TORCHTRAIN_CACHE. The same by URLs such as s3://bucket/folder or
    gs://bucket/*.parquet: such text is streamed, without a copy."""
    name: str = ""
    """Name of a dataset on the Hugging Face hub."""
    subset: str = ""
    """Configuration name of the hub dataset, if it has several."""
    split: str = "train"
    """Split of the hub dataset, or of a folder written by DatasetDict.save_to_disk."""
    revision: str | None = None
    """Commit, branch or tag of the hub dataset. None: the newest commit at the start of the run; a resumed run uses the
    same commit."""
    download: bool = False
    """Download the hub dataset before training instead of streaming it."""
    text_column: str = "text"
    """Name of the column that contains the documents."""
    skip_not_utf8: bool = False
    """Skip files that are not UTF-8 (of streamed files the rest of the part that is read, from there on), and log their
    number. false: such a file is an error."""
    weight: float = 1.0
    """Share of the tokens that come from this source, relative to the weights of the other sources. 0: none; the source
    is only opened, and keeps its position for a later stage."""
    label: str = ""
    """Name of the source in the log, in metrics and plots. Empty: the name of its file, folder or dataset."""
    held_out: Annotated[float, ("be at least 0 and less than 1", lambda value: 0 <= value < 1)] = 0.0
    """Share of the documents that is not trained on, but validated on, without another option; [validation] has the
    interval. Documents are chosen by their content, so that equal ones are on the same side. Of several sources, all
    are trained on without the documents of the largest share. In a file that names no data it is of the standard
    library: --data.path unsets it."""
    type: str = ""
    """Type of the source: files, remote_files (those by URLs), hub, standard_library, standard_library_docs (its
    docstrings), standard_library_prose (the English sentences in them and in pydoc's pages), or one that a module in
    job.import registers (docs/extending.md). Empty: files or remote_files if path is set, hub if name is set."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """[data.options]: options of a registered type. Set them in the config file; the command line can then
    change them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not (self.path and self.name),
            f"path = {self.path!r} and name = {self.name!r} of a data source exclude each other; set one of them",
        )
        require(
            re.fullmatch(r"[\w.+-]*", self.label) is not None,
            f"label = {self.label!r} of a data source must have letters, digits and _ . + - only",
        )
        require("" not in self.paths, f"path = {self.path!r} of a data source has an empty name in it")
        DATA_SOURCES.check(self.source_type, DATA_SOURCES.option)
        for_paths = self.type in ("files", "remote_files")
        require(not for_paths or bool(self.path), f"data.type = {self.type!r} needs data.path")
        require(
            self.type != "remote_files" or all(map(is_url, self.paths)),
            f"data.type = 'remote_files' is for URLs, and data.path = {self.path!r} is none",
        )
        require(self.type != "hub" or bool(self.name), "data.type = 'hub' needs data.name")
        require(
            not self.options or self.source_type not in BUILT_IN_SOURCES,
            f"data.options = {self.options} are for a type of your own, and data.type is {self.source_type!r}",
        )
        require(
            self.weight >= 0,
            f"weight = {self.weight} of a data source must be at least 0; with 0 it only keeps its position",
        )
        require(self.weight < math.inf, f"weight = {self.weight} of a data source must be a finite number")

    @property
    def source_type(self) -> str:
        """The name in ``DATA_SOURCES`` of the type of this source."""
        if self.type in ("", "files") and any(map(is_url, self.paths)):
            return "remote_files"
        return self.type or ("files" if self.path else "hub" if self.name else "standard_library")

    @property
    def is_set(self) -> bool:
        """Whether the config names this source, so that it is not the default one."""
        return bool(self.path or self.name or self.type)

    @property
    def title(self) -> str:
        """A short name for the metrics of this source."""
        if self.label:
            return self.label
        if self.path:
            path = Path(self.paths[0])
            name = path.name.removeprefix("*.")  # of a pattern such as *.jsonl: the file extension
            if name.isdecimal() and path.parent.name:  # as prepare names the folders of several sources
                return f"{path.parent.name}_{name}"
            kind, compression = suffixes_of(name)
            suffix = "".join(f".{word}" for word in (kind, compression) if word)
            return name.removesuffix(suffix) if kind else name
        return "_".join(filter(None, (self.name.split("/")[-1], self.subset))) or self.type

    @property
    def paths(self) -> tuple[str, ...]:
        """``path`` as a tuple; empty if it is not set."""
        paths = (self.path,) if isinstance(self.path, str) else self.path
        return paths if self.path else ()


@dataclass(frozen=True)
class SourcesConfig(SourceConfig):
    sources: tuple[SourceConfig, ...] = ()
    """Several sources, each a table [[....sources]] with the keys of a source."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.sources or not self.is_set,
            f"a path, name or type ({self.path or self.name or self.type!r}) and [[sources]] exclude each other; put "
            "all into [[sources]]",
        )
        require(
            not (self.sources and self.held_out),
            f"held_out = {self.held_out} is an option of each source: put it into the tables [[data.sources]]",
        )
        for number, source in enumerate(self.sources):
            require(source.is_set, f"[[sources]] number {number + 1} has neither path nor name nor type")
        require(any(source.weight for source in self.all), "at least one data source must have a weight above 0")

    @property
    def all(self) -> tuple[SourceConfig, ...]:
        """All sources: those in ``sources``, or this one."""
        return self.sources or (self,)

    @property
    def largest_held_out(self) -> float:
        """The largest share that a source holds out. No source is trained on its documents of this share."""
        return max(source.held_out for source in self.all)


@dataclass(frozen=True)
class DataConfig(SourcesConfig, name="data"):
    """Training data. Without path, name or sources, it is the source code of the Python standard library."""

    when_exhausted: Literal["repeat", "stop"] = "repeat"
    """What happens at the end of a source. repeat: read it again in another order; stop: end the run."""
    packing: Literal["cut", "best_fit"] = "cut"
    """How documents become sequences. cut: one after the other, cut where a sequence ends. best_fit: those that fit
    into a sequence are not cut, and the rest of a sequence is padding, which is not predicted; not for streamed
    data."""
    exclude: LocalPath = ""
    """File with a list of documents that are not trained on, which torchtrain.explain writes. Their tokens have no
    loss, and are replaced by the end of a document; all other tokens stay in their steps and rows."""
    document_mask: bool = False
    """Restrict attention to tokens of the same document, and count positions from its start. false: tokens attend to
    all earlier tokens of the sequence."""
    longest_seq_len: Annotated[int, at_least(0), ("be at most 2**28", lambda value: value <= 2**28)] = 0
    """Order data so that training.seq_len can grow to this many tokens without reading any twice. 0: to the
    longest of all stages. A checkpoint keeps the order that it was saved with."""
    prefetch: CountOrZero = 2
    """Number of batches to read ahead in a background thread. 0: read each batch when the step needs it; a request to
    stop then waits for it."""
    verify_gib: Annotated[float, ("be at least 0; inf verifies all", lambda value: value >= 0)] = 1.0
    """Size, in GiB, up to which data are hashed in full when a run starts: of each source the local files and the
    tokens, each by itself. Of larger files only parts are hashed, and of more tokens only sizes are compared;
    torchtrain.prepare with prepare.verify hashes all tokens of a folder. inf: always hash everything."""
