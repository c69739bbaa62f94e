"""Small data sources of each type, and loaders that read them."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchtrain.config.registry import DATA_SOURCES
from torchtrain.datasets.build import build_dataloader
from torchtrain.datasets.data_source import SourceContext
from torchtrain.datasets.dataloader import DataLoader
from torchtrain.datasets.options import DataConfig, SourceConfig
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


def check_any_ranks(config: DataConfig, steps: int, **options: Any) -> torch.Tensor:
    """Assert that the rows of 8 are the same on 1, 2 and 4 ranks, with and without prefetching; returns their tokens,
    of shape (steps, rows, seq_len)."""
    reference = take(make_loader(replace(config, prefetch=0), **options), steps)
    assert len({tuple(row) for row in reference[:5].flatten(0, 1).tolist()}) > 30  # rows differ
    for degree, prefetch in ((1, 3), (2, 0), (4, 2)):
        own = replace(config, prefetch=prefetch)
        loaders = [make_loader(own, rows, **options) for rows in _split(degree)]
        assert torch.equal(torch.cat([take(loader, steps) for loader in loaders], dim=1), reference)
        for loader in loaders:
            loader.close()
    assert not torch.equal(take(make_loader(replace(config, prefetch=0), seed=1, **options), steps), reference)
    return reference


def check_resumes(config: DataConfig, steps: int, seed: str, **options: Any) -> None:
    """Assert that loaders that resume at random steps, on other numbers of ranks, return the same rows."""
    reference = take(make_loader(replace(config, prefetch=0), **options), steps)
    rng = random.Random(seed)
    for degrees in ((1, 2, 4), (4, 2, 1)):
        stops = [0, *sorted(rng.sample(range(1, steps), 2)), steps]
        state = None
        for degree, start, stop in zip(degrees, stops[:-1], stops[1:], strict=True):
            loaders = [make_loader(config, rows, **options) for rows in _split(degree)]
            if state is not None:
                for loader, rows in zip(loaders, state.chunk(degree), strict=True):
                    loader.load_state_dict({"rows": rows})
            part = torch.cat([take(loader, stop - start) for loader in loaders], dim=1)
            assert torch.equal(part, reference[start:stop]), (degrees, start, stop)
            # The state is that of the batch returned last, although the background thread has read further.
            state = torch.cat([loader.state_dict()["rows"] for loader in loaders])
            for loader in loaders:
                loader.close()


def _split(degree: int) -> list[range]:
    """The rows of each rank, of 8."""
    return [range(8 * number // degree, 8 * (number + 1) // degree) for number in range(degree)]


def take(batches: DataLoader, steps: int) -> torch.Tensor:
    """The tokens of the next ``steps`` batches, of shape (steps, rows, seq_len)."""
    return torch.stack([next(batches).tokens for _ in range(steps)])
