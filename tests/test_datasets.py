import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import zstandard
from data_samples import DOCUMENTS, TOKENIZER, make_loader, write_jsonl

from torchtrain.datasets import standard_library as standard_library_module
from torchtrain.datasets.data_source import SourceSize
from torchtrain.datasets.dataloader import Batch
from torchtrain.datasets.local_files import open_text_files
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.datasets.standard_library import standard_library, standard_library_docs, standard_library_prose
from torchtrain.errors import DataError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def jsonl(tmp_path):
    return write_jsonl(tmp_path / "text.jsonl", DOCUMENTS)


def loader(config, rows=range(4), *, batch=4, **options):
    return make_loader(config, rows, batch=batch, **options)


def test_default_data_are_the_standard_library():
    texts = list(standard_library().texts())
    assert len(texts) > 300
    assert sum("import" in text for text in texts) > len(texts) / 2
    assert len(loader(DataConfig(prefetch=0)).sources[0]) > 10**6


def test_size_is_that_of_the_tokens_and_the_text(jsonl):
    (source,) = loader(DataConfig(path=jsonl)).sources
    tokens = sum(len(TOKENIZER.encode(text, bos=True, eos=True)) for text in DOCUMENTS)
    assert source.size(TOKENIZER) == SourceSize(tokens, sum(map(len, DOCUMENTS)))


def test_labels_are_the_next_tokens(jsonl):
    batch = next(loader(DataConfig(path=jsonl)))
    assert batch.tokens.shape == batch.labels.shape == (4, 32)
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert torch.equal(batch.labels[:, :-1], batch.tokens[:, 1:])


def test_state_of_another_batch_size_is_rejected(jsonl):
    state = loader(DataConfig(path=jsonl)).state_dict()
    with pytest.raises(DataError, match=r"same training.global_batch_size"):
        loader(DataConfig(path=jsonl), range(8), batch=8).load_state_dict(state)


@pytest.mark.parametrize("form", ["jsonl.gz", "jsonl.zst", "json", "json lines", "parquet", "arrow", "txt", "folder"])
def test_every_file_format_gives_the_same_documents(tmp_path, form):
    rows = [{"n": n, "text": text} for n, text in enumerate(DOCUMENTS)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path = tmp_path / f"data.{form.split()[0]}"
    if form == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif form == "jsonl.zst":
        path.write_bytes(zstandard.compress(lines.encode()))
    elif form == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif form == "json lines":
        path.write_text(lines)
    elif form == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif form == "arrow":
        with datasets.arrow_writer.ArrowWriter(path=str(path)) as writer:
            for row in rows:
                writer.write(row)
            writer.finalize()
    elif form == "txt":
        path = tmp_path
        for n, text in enumerate(DOCUMENTS):
            (path / f"{n:03}.txt").write_text(text)
    else:
        path = tmp_path / "deep"
        (path / "b").mkdir(parents=True)
        (path / "README.md").write_text("not data")
        (path / "a.jsonl").write_text("".join(lines.splitlines(keepends=True)[:10]))
        (path / "b" / "c.jsonl").write_text("".join(lines.splitlines(keepends=True)[10:]))
    assert list(open_text_files([str(path)]).texts()) == DOCUMENTS


@pytest.mark.parametrize("text", ["line of some words\n" * 200_000, "word " * 500_000, "字" * 700_000])
def test_large_text_file_is_split_into_pieces_without_loss(tmp_path, text):
    path = tmp_path / "large.txt"
    path.write_text(text)
    pieces = list(open_text_files([str(path)]).texts())
    assert len(text.encode()) / 2**17 < len(pieces) <= len(text.encode()) / 2**16
    assert "".join(pieces) == text
    if "\n" in text:
        assert [piece for piece in pieces if not piece.endswith("\n")] == []


def test_documents_that_are_not_text_are_skipped(tmp_path):
    path = tmp_path / "mixed.jsonl"
    rows = [{"text": "good one"}, {"text": None}, {"text": 5}, {"other": "x"}, {"text": ""}, {"text": "good two"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "not json\n\n")
    (source,) = loader(DataConfig(path=str(path)), range(1), batch=1, seq_len=4).sources
    tokens = np.zeros(len(source), dtype=np.int64)
    source.read([(0, len(source))], [tokens])
    expected = [TOKENIZER.encode(text, bos=True, eos=True) for text in ("good one", "good two")]
    assert tokens.tolist() == expected[0] + expected[1]
    assert source.skipped == 4


@pytest.mark.parametrize(
    ("name", "content", "config", "message"),
    [
        ("a.jsonl", '{"body": "x", "id": 1}\n', {}, "'text' .text_column.; its columns are body, id"),
        ("a.jsonl", "", {}, "has no documents"),
        ("a.txt", "", {}, "has no documents"),
        ("a.jsonl", "plain text\n", {}, "one JSON object a line"),
        ("a.json", '[{"id": 1}]', {}, "'text' .text_column.; its columns are id"),
        ("a.json", "[]", {}, "no data"),
        ("a.json", '[{"text": 1}]', {}, "'text' .text_column. holds int, not text"),
        ("a.parquet", "no parquet", {}, "a.parquet cannot be read after document 0"),
        ("a.doc", "x", {}, "must end in one of .jsonl"),
    ],
)
def test_invalid_sources_are_rejected(tmp_path, name, content, config, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        loader(DataConfig(path=str(path), **config))


def test_missing_empty_and_mixed_folders_are_rejected(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        loader(DataConfig(path=str(tmp_path / "missing")))
    with pytest.raises(DataError, match="folder without data files"):
        loader(DataConfig(path=str(tmp_path)))
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match="several formats"):
        loader(DataConfig(path=str(tmp_path)))


@pytest.mark.parametrize("lines", ['{"text": "short"}\n', '{"text": null}\n' * 9])
def test_too_little_text_for_one_window_is_an_error(tmp_path, lines):
    path = tmp_path / "little.jsonl"
    path.write_text(lines)
    with pytest.raises(DataError, match=r"too little text: its 3 tokens do not fill|has no text in its 9 documents"):
        next(loader(DataConfig(path=str(path)), range(1), batch=1, seq_len=512))


def test_first_documents_are_from_the_whole_source(jsonl):
    """The first windows of the first epoch are not consecutive in the source."""
    located = loader(DataConfig(path=jsonl, prefetch=0), range(16), batch=16, seq_len=8).locate()
    numbers = [int(row[0].place.position.removeprefix("line ")) for row in located]
    assert np.abs(np.diff(numbers)).mean() > 8


def test_identity_of_a_mixture_covers_all_sources_and_the_tokenizer(tmp_path):
    paths = [write_jsonl(tmp_path / f"{n}.jsonl", DOCUMENTS[n:]) for n in range(2)]
    config = DataConfig(sources=tuple(SourceConfig(path=path) for path in paths), prefetch=0)
    before = loader(config).identity
    assert before.keys() == {"data.sources", "model.tokenizer_path"}
    assert TOKENIZER.content_hash[:16] in before["model.tokenizer_path"]
    write_jsonl(tmp_path / "1.jsonl", DOCUMENTS[2:])
    assert loader(config).identity["data.sources"] != before["data.sources"]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Some of the modules of the standard library, as if it had no others: to parse all takes seconds."""
    found = standard_library_module.standard_library_files()
    modules = [path for n, path in enumerate(found) if n % 8 == 0 or path.name in ("abc.py", "mailbox.py")]
    monkeypatch.setattr(standard_library_module, "standard_library_files", lambda: modules)
    standard_library_module._docstrings_of_modules.cache_clear()
    yield modules
    standard_library_module._docstrings_of_modules.cache_clear()


def test_docstrings_of_the_standard_library_are_a_source(modules: list[Path]) -> None:
    texts = list(standard_library_docs().texts())
    assert len(modules) > 80
    assert len(texts) > 0.8 * len(modules)
    assert "Abstract Base Classes (ABCs) according to PEP 3119." in [text.splitlines()[0] for text in texts]
    assert [text for text in texts[:20] if "import " in text and "self." in text and "\n    return " in text] == []
    assert standard_library_docs().identify() == standard_library_docs().identify()


@pytest.mark.usefixtures("modules")
def test_prose_of_the_standard_library_is_a_source() -> None:
    texts = list(standard_library_prose().texts())
    assert sum(map(len, texts)) > 200_000
    sentence = "The value of an object is a rather abstract notion in Python:"  # of pydoc's page about classes
    assert any("Ensure changes to file f are physically on disk." in text for text in texts)
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n\n")]
    assert [text for text in paragraphs if any(word in text for word in (">>>", "----", "``"))] == []
    assert [text for text in paragraphs if not (text[0].isupper() and text.endswith(".") and "\n" not in text)] == []
    assert sentence in " ".join(paragraphs)


WITHOUT_LIBRARIES_OF_FILE_FORMATS = """
import sys

sys.modules.update(dict.fromkeys(["datasets", "pyarrow", "pandas", "zstandard"]))  # importing them raises ImportError
from torchtrain import prepare, train

folder = sys.argv[1]
options = ["--training.steps=2", "--training.seq_len=32", "--training.local_batch_size=1", "--model.shape.n_layers=1"]
options += ["--job.config_file=train_configs/debug_model.toml", "--checkpoint.no-enable"]
assert train.main([*options, f"--job.dump_folder={folder}/standard_library"]) == 0
tokens = f"{folder}/tokens"
assert prepare.main([f"--data.path={folder}/text.txt", f"--prepare.output={tokens}", "--prepare.processes=1"]) == 0
assert train.main([*options, f"--data.path={tokens}", f"--job.dump_folder={folder}/tokenized"]) == 0
"""


@pytest.mark.slow
def test_standard_library_and_tokenized_data_need_neither_datasets_nor_pyarrow(tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(2000))))
    command = [sys.executable, "-c", WITHOUT_LIBRARIES_OF_FILE_FORMATS, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_all_parts_of_a_batch_are_pinned_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is copied with ``non_blocking``, which blocks unless the memory is pinned."""
    pinned: list[int] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(id(tensor))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    parts = {name: torch.zeros(1) for name in ("tokens", "labels", "label_bytes", "sources")}
    batch = Batch(**parts).pinned()
    assert [id(part) for part in vars(batch).values()] == pinned
    assert parts.keys() == Batch.__dataclass_fields__.keys()
    assert Batch(parts["tokens"], parts["labels"]).pinned().label_bytes is None
