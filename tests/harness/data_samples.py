"""Small data sources of each type, and loaders that read them."""

import json
from pathlib import Path
from typing import Any

import torch

from torchtrain.config.registry import DATA_SOURCES
from torchtrain.config.schema import DataConfig, SourceConfig
from torchtrain.datasets.build import build_dataloader
from torchtrain.datasets.data_source import SourceContext
from torchtrain.datasets.dataloader import DataLoader
from torchtrain.datasets.token_folder import LocalFolder, open_folder
from torchtrain.datasets.tokenize_text import tokenize
from torchtrain.datasets.tokenizers import Tokenizer, load_tokenizer

TOKENIZER = load_tokenizer()
DOCUMENTS = [f"document {n} " + " ".join(str(n * k % 997) for k in range(n % 7 * 5)) + " end\n" for n in range(60)]


def write_jsonl(path: Path, documents: list[Any]) -> str:
    path.write_text("".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(documents)))
    return str(path)


def write_hub_folder(path: Path, documents: list[str], *, files: int, kind: str = "jsonl") -> str:
    """Write a folder that ``datasets`` treats as a dataset of the hub and streams in the same way."""
    import pyarrow
    import pyarrow.parquet

    path.mkdir()
    for number in range(files):
        part = documents[number::files]
        if kind == "parquet":
            table = pyarrow.table({"text": part, "n": list(range(len(part)))})
            pyarrow.parquet.write_table(table, path / f"train-{number}.parquet", row_group_size=7)
        else:
            write_jsonl(path / f"train-{number}.jsonl", part)
    return str(path)


def write_tokens(output: Path | str, source: SourceConfig | str, tokenizer: Tokenizer = TOKENIZER) -> str:
    """Tokenize text into the folder ``output``, as torchtrain.prepare does."""
    if isinstance(source, str):
        source = SourceConfig(path=source)
    text = DATA_SOURCES[source.source_type].open_text(source, SourceContext("data", tokenizer))
    folder = open_folder(output)
    if isinstance(folder, LocalFolder):
        folder.path.mkdir()
    tokenize(text, tokenizer, folder, processes=1)
    return str(output)


def make_loader(
    config: DataConfig,
    rows: range = range(8),
    *,
    batch: int = 8,
    seq_len: int = 32,
    seed: int = 0,
    drop_last: bool = True,
    **options: Any,
) -> DataLoader:
    return build_dataloader(
        config,
        TOKENIZER,
        seq_len=seq_len,
        global_batch_size=batch,
        rows=rows,
        seed=seed,
        device=torch.device("cpu"),
        drop_last=drop_last,
        **options,
    )


def take(batches: DataLoader, steps: int) -> torch.Tensor:
    """The tokens of the next ``steps`` batches, of shape (steps, rows, seq_len)."""
    return torch.stack([next(batches).tokens for _ in range(steps)])
