"""Config tables for the files of a folder or pattern that have several formats; a source has files of one format."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import BinaryIO

from torchtrain.datasets.data_identity import shortened
from torchtrain.datasets.file_formats import COMPRESSIONS, KINDS, documents, kind_of
from torchtrain.datasets.packing import text_bytes
from torchtrain.logging import logger

SAMPLED_FILES = 8  # of each format and compression, for the estimate of their text
SAMPLED_BYTES = 1 << 22  # of each of them
SAMPLED_ROWS = 1000  # of a Parquet file


def kinds_of_descriptions(names: Iterable[str]) -> set[str]:
    """Kinds of those files of a folder that probably describe the data: a README, or a table beside other formats."""
    kinds = {kind_of(name)[0] for name in names}
    of_data = kinds
    for description in ({"md"}, {"csv", "tsv"}):
        of_data = of_data - description or of_data
    return kinds - of_data


def log_left_out(label: str, names: Sequence[str]) -> None:
    """Say which files of a folder are not read because they probably describe the data."""
    if names:
        kinds = " and ".join(f".{kind}" for kind in sorted({kind_of(name)[0] for name in names}))
        logger.info(
            "%s: left out %d %s file(s), since such files often describe the data: %s; to read them, name them by a "
            "pattern, in a source of their own",
            *(label, len(names), kinds, shortened(names)),
        )


def advice(
    pattern: str, label: str, column: str, by_kind: Mapping[str, Sequence[Path]], left_out: Sequence[Path]
) -> str:
    """An error message with config tables to paste.

    Args:
        pattern: the folder or pattern.
        label: its option, for messages.
        column: the column that contains the text.
        by_kind: the files by their kind.
        left_out: files of the folder that are not read; their tables are comments.
    """
    section = label.split(".")[0]
    sizes = {kind: estimate_text_bytes(files, column) for kind, files in by_kind.items()}
    total = max(1, sum(sizes.values()))

    def table(files: Sequence[Path], size: int) -> list[str]:
        lines = [f"[[{section}.sources]]", f"path = {_as_toml(_patterns(pattern, files))}"]
        if column != "text":
            lines.append(f"text_column = {_as_toml([column])}")
        return [*lines, f"weight = {size / total:.2g}"]

    tables = ["\n".join(table(files, sizes[kind])) for kind, files in sorted(by_kind.items())]
    for kind in sorted({kind_of(file.name)[0] for file in left_out}):
        files = [file for file in left_out if kind_of(file.name)[0] == kind]
        note = (
            f"# {len(files):,} .{kind} file(s) are left out, since such files often describe the data. To read them, "
            "remove the # before:"
        )
        lines = table(files, estimate_text_bytes(files, column))
        tables.append("\n".join([note, *(f"# {line}" for line in lines)]))
    return (
        f"{label} mixes files of several kinds (.{', .'.join(sorted(by_kind))}), and a source has files of one kind. "
        f"Name one kind, such as '*.{min(by_kind)}', or put these tables into the config file in its place; each "
        "weight is the estimated share of the text, uncompressed:\n\n" + "\n\n".join(tables)
    )


def estimate_text_bytes(files: Sequence[Path], column: str) -> int:
    """The size of the text in ``column`` of ``files``, from the beginnings of some of them."""
    groups: dict[tuple[str, str], list[Path]] = {}
    for file in files:
        groups.setdefault(kind_of(file.name), []).append(file)
    estimate = 0.0
    for group in groups.values():
        step = -(-len(group) // SAMPLED_FILES)
        sampled = [_sample(file, column) for file in group[::step]]
        text, read = (sum(sizes) for sizes in zip(*sampled, strict=True))
        estimate += text / max(1, read) * sum(file.stat().st_size for file in group)
    return round(estimate)


def _sample(file: Path, column: str) -> tuple[float, int]:
    """Bytes of text, and the bytes of the file that contain it."""
    size = file.stat().st_size
    try:
        with file.open("rb") as raw:
            if kind_of(file.name)[0] != "parquet":
                return _sample_in_order(raw, documents(raw, file.name, column), size)
            import pyarrow.parquet  # takes a second, and other formats do not need it

            rows = pyarrow.parquet.read_metadata(raw).num_rows
            head = [text for _, text in zip(range(SAMPLED_ROWS), documents(raw, file.name, column), strict=False)]
            return sum(text_bytes(text or "") for text in head) * rows / max(1, len(head)), size
    except Exception:  # Each format's reader has its own errors. The source that is pasted will raise this one.
        return size, size


def _sample_in_order(raw: BinaryIO, texts: Iterator[str | None], size: int) -> tuple[int, int]:
    """As ``_sample``, of a file that is read from its beginning on, in blocks."""
    text, read = 0, 0
    for number, document in enumerate(texts):
        if raw.tell() != read:  # ``document`` is the first one of the next block
            if number and read >= SAMPLED_BYTES:
                return text, read
            read = raw.tell()
        text += text_bytes(document or "")
    return text, size


def _patterns(pattern: str, files: Sequence[Path]) -> list[str]:
    """Patterns that match exactly ``files``, the matches of ``pattern`` of one kind; their names if there is none."""
    suffix = re.compile(rf"\.({'|'.join(KINDS)})(\.({'|'.join(filter(None, COMPRESSIONS))}))?$", re.IGNORECASE)
    suffixes = sorted({match.group() for file in files if (match := suffix.search(file.name))})
    if Path(pattern).is_dir():
        return [f"{escape(pattern.rstrip('/'))}/**/*{suffix}" for suffix in suffixes]
    if Path(pattern).name == "*":
        return [f"{pattern}{suffix}" for suffix in suffixes]
    return [escape(str(file)) for file in files]


def _as_toml(values: Sequence[str]) -> str:
    """One string, or an array of several, in TOML."""
    quoted = [json.dumps(value) for value in values]
    return quoted[0] if len(quoted) == 1 else f"[{', '.join(quoted)}]"
