import gzip
import itertools
import json
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import zstandard
from data_samples import DOCUMENTS, TOKENIZER, make_loader, opened_text, take, write_hub_folder, write_jsonl

from torchtrain.config.schema import DataConfig, SourceConfig
from torchtrain.datasets.dataloader import Batch
from torchtrain.errors import DataError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def jsonl(tmp_path):
    return write_jsonl(tmp_path / "text.jsonl", DOCUMENTS)


def loader(config, rows=range(4), *, batch=4, **options):
    return make_loader(config, rows, batch=batch, **options)


def all_texts(config, readers=1):
    source = opened_text(config, readers)
    return [text for unit in range(source.parts) for _, text in source.read(unit, 0)]


def test_default_data_are_the_standard_library():
    source = opened_text(DataConfig())
    assert source.parts > 300
    texts = [next(source.read(unit, 0))[1] for unit in range(0, source.parts, 20)]
    assert sum("import" in text for text in texts) > len(texts) / 2


def test_number_of_tokens_is_estimated_from_the_beginnings_of_some_documents(tmp_path):
    # Numbers take more tokens than words.
    texts = [" ".join(str(n * k % 9973) for k in range(300 + 40 * (n % 10))) for n in range(150)]
    texts += ["return self.value\n" * (100 + n % 30) for n in range(150)]
    source = opened_text(SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", texts)))
    size = source.size(TOKENIZER)
    assert size.is_estimate
    assert size.text_bytes == pytest.approx(sum(map(len, texts)), rel=0.02)
    assert size.tokens == pytest.approx(sum(len(TOKENIZER.encode(text)) for text in texts), rel=0.1)


def test_labels_are_the_next_tokens_and_windows_are_consecutive(jsonl):
    batches = loader(DataConfig(path=jsonl))
    first, second = next(batches), next(batches)
    assert first.tokens.shape == first.labels.shape == (4, 32)
    assert first.tokens.dtype == first.labels.dtype == torch.int64
    assert torch.equal(first.labels[:, :-1], first.tokens[:, 1:])
    # Every token is a label once: the last label of a window is the first token of the next window.
    assert torch.equal(first.labels[:, -1], second.tokens[:, 0])


def test_each_epoch_reads_every_document_once_in_a_new_order(jsonl):
    expected = sorted(TOKENIZER.encode(text, bos=True, eos=True) for text in DOCUMENTS)
    length = sum(map(len, expected))
    for batch in (1, 4):
        rows = take(loader(DataConfig(path=jsonl), range(batch), batch=batch), 2 * length // 32 + 50).transpose(0, 1)
        epochs = [[], []]
        for row in rows.reshape(batch, -1).tolist():
            starts = [position for position, token in enumerate(row) if token == TOKENIZER.bos_id]
            documents = [row[start:stop] for start, stop in itertools.pairwise(starts)]
            documents_per_row = len(DOCUMENTS) // batch
            for epoch in range(2):
                epochs[epoch] += documents[epoch * documents_per_row : (epoch + 1) * documents_per_row]
        assert sorted(epochs[0]) == sorted(epochs[1]) == expected
        assert epochs[0] != epochs[1]


def test_rows_beyond_the_number_of_documents_start_with_the_next_epoch(jsonl):
    """With 100 rows and 60 documents, rows 60 and up start with the second epoch."""
    tokens = take(loader(DataConfig(path=jsonl), range(100), batch=100, seq_len=8), 1)[0]
    assert (tokens[:, 0] == TOKENIZER.bos_id).all()
    assert len({tuple(row) for row in tokens[:60, :5].tolist()}) > 50


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
    assert all_texts(DataConfig(path=str(path))) == DOCUMENTS


@pytest.mark.parametrize("text", ["line of some words\n" * 200_000, "word " * 500_000, "字" * 700_000])
def test_large_text_file_is_split_into_pieces_without_loss(tmp_path, text):
    path = tmp_path / "large.txt"
    path.write_text(text)
    pieces = all_texts(DataConfig(path=str(path)))
    assert len(pieces) > 30
    assert "".join(pieces) == text
    if "\n" in text:
        assert [piece for piece in pieces if not piece.endswith("\n")] == []


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_streamed_dataset_is_read_once_and_from_any_document(tmp_path, kind):
    config = DataConfig(name=write_hub_folder(tmp_path / "hub", DOCUMENTS, files=3, kind=kind))
    for readers in (1, 2, 3, 7):
        assert sorted(all_texts(config, readers)) == sorted(DOCUMENTS)
        source = opened_text(config, readers)
        for unit in range(source.parts):  # from any document, as after a resume
            documents = list(source.read(unit, 0))
            for start in (1, 5, 8, 30):
                assert list(source.read(unit, start)) == [pair for pair in documents if pair[0] >= start]
    with pytest.raises(DataError, match=r"no column 'body' .text_column.; its columns are text"):
        loader(DataConfig(name=config.name, text_column="body"))
    assert all_texts(DataConfig(name=config.name, download=True)) == DOCUMENTS[0::3] + DOCUMENTS[1::3] + DOCUMENTS[2::3]


def test_documents_that_are_not_text_are_skipped(tmp_path):
    path = tmp_path / "mixed.jsonl"
    rows = [{"text": "good one"}, {"text": None}, {"text": 5}, {"other": "x"}, {"text": ""}, {"text": "good two"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "not json\n\n")
    good = {tuple(TOKENIZER.encode(text, bos=True, eos=True)) for text in ("good one", "good two")}
    tokens = take(loader(DataConfig(path=str(path)), range(1), batch=1, seq_len=4), 8).flatten().tolist()
    starts = [position for position, token in enumerate(tokens) if token == TOKENIZER.bos_id]
    assert {tuple(tokens[a:b]) for a, b in itertools.pairwise(starts)} == good


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
    with pytest.raises(DataError, match="several kinds"):
        loader(DataConfig(path=str(tmp_path)))


@pytest.mark.parametrize("lines", ['{"text": "short"}\n', '{"text": null}\n' * 9])
def test_too_little_text_for_one_window_is_an_error(tmp_path, lines):
    path = tmp_path / "little.jsonl"
    path.write_text(lines)
    with pytest.raises(DataError, match="too little text"):
        next(loader(DataConfig(path=str(path)), range(1), batch=1, seq_len=512))


def test_long_document_among_short_ones_is_found(tmp_path):
    """A row reads its documents of each epoch in random order; many short ones in a row are not too little text."""
    path = tmp_path / "few.jsonl"
    path.write_text('{"text": "short"}\n{"text": null}\n' + json.dumps({"text": " ".join(map(str, range(999)))}) + "\n")
    for seed in range(8):
        assert take(loader(DataConfig(path=str(path)), range(8), batch=8, seq_len=64, seed=seed), 20).shape == (
            20,
            8,
            64,
        )


def test_first_documents_are_from_the_whole_source(jsonl):
    """The first documents of the first epoch are not consecutive in the source."""
    tokens = take(loader(DataConfig(path=jsonl), range(16), batch=16, seq_len=8), 1)[0]
    numbers = [int(TOKENIZER.decode(row.tolist()).split()[1]) for row in tokens]
    assert np.abs(np.diff(numbers)).mean() > 8


def test_identity_of_a_mixture_covers_all_sources_and_the_tokenizer(tmp_path):
    paths = [write_jsonl(tmp_path / f"{n}.jsonl", DOCUMENTS[n:]) for n in range(2)]
    config = DataConfig(sources=tuple(SourceConfig(path=path) for path in paths), prefetch=0)
    before = loader(config).identity
    assert before.keys() == {"data.sources", "model.tokenizer_path"}
    assert TOKENIZER.content_hash[:16] in before["model.tokenizer_path"]
    write_jsonl(tmp_path / "1.jsonl", DOCUMENTS[2:])
    assert loader(config).identity["data.sources"] != before["data.sources"]


def test_docstrings_of_the_standard_library_are_a_source() -> None:
    source = opened_text(DataConfig(type="standard_library_docs"), 1)
    assert source.parts > 200
    texts = list(source.read_all(range(source.parts)))
    assert "Abstract Base Classes (ABCs) according to PEP 3119." in [text.splitlines()[0] for text in texts]
    assert [text for text in texts[:20] if "import " in text and "self." in text and "\n    return " in text] == []
    assert source.text_bytes == sum(len(text.encode()) for text in texts)
    assert source.identity() == opened_text(DataConfig(type="standard_library_docs"), 1).identity()


def test_prose_of_the_standard_library_is_a_source() -> None:
    source = opened_text(DataConfig(type="standard_library_prose"), 1)
    texts = list(source.read_all(range(source.parts)))
    assert source.text_bytes > 500_000
    sentence = "The value of an object is a rather abstract notion in Python:"  # of pydoc's page about classes
    assert any("Ensure changes to file f are physically on disk." in text for text in texts)
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n\n")]
    assert not any(word in text for word in (">>>", "----", "``") for text in paragraphs)
    assert all(paragraph[0].isupper() and paragraph.endswith(".") and "\n" not in paragraph for paragraph in paragraphs)
    assert sentence in " ".join(paragraphs)


WITHOUT_LIBRARIES_OF_FILE_FORMATS = """
import sys

sys.modules.update(dict.fromkeys(["datasets", "pyarrow", "pandas", "zstandard"]))  # importing them raises ImportError
from torchtrain import prepare, train

folder = sys.argv[1]
options = ["--training.steps=2", "--training.seq_len=32", "--training.local_batch_size=1", "--model.shape.n_layers=1"]
options += ["--job.config_file=train_configs/debug_model.toml", "--checkpoint.no-enable"]
assert train.main([*options, f"--job.dump_folder={folder}/standard_library"]) == 0
prepared = f"{folder}/prepared"
assert prepare.main([f"--data.path={folder}/text.txt", f"--prepare.output={prepared}", "--prepare.processes=1"]) == 0
assert train.main([*options, f"--data.path={prepared}", f"--job.dump_folder={folder}/tokenized"]) == 0
"""


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
