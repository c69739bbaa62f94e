"""The code of docs/adding-a-data-source.md and docs/adding-a-metrics-writer.md, as a user's modules."""

import importlib
import io
import json
import lzma
import re
import sqlite3
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
from data_samples import DOCUMENTS, TOKENIZER, make_loader, take, write_jsonl, write_tokens
from forked_run import CONFIG, ForkedRun, different_tensors, finish, saved_tensors, slow_steps

from torchtrain.config.parse import from_toml
from torchtrain.config.registry import METRICS_WRITERS
from torchtrain.datasets.file_formats import documents, is_splittable, position_of
from torchtrain.datasets.find_files import find_files
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.datasets.token_dataset import TokenDataset
from torchtrain.datasets.token_folder import open_folder
from torchtrain.errors import ConfigError, DataError
from torchtrain.metrics.options import MetricsConfig

DOCS = Path(__file__).parent.parent / "docs"


def code_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def save_module(page: str, folder: Path, number: int = 0) -> str:
    """Write the module ``number`` of ``page`` to ``folder``; returns its name."""
    code = code_blocks(page, "python")[number]
    name = re.match(r"# (\w+)\.py\n", code)
    assert name is not None
    (folder / f"{name[1]}.py").write_text(code)
    return name[1]


@pytest.fixture
def sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module of the page, registered in this process too, and the data of its config."""
    module = save_module("adding-a-data-source.md", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    importlib.import_module(module)
    with sqlite3.connect(tmp_path / "articles.db") as database:
        database.execute("CREATE TABLE articles (text)")
        database.executemany("INSERT INTO articles VALUES (?)", [(text,) for text in [*DOCUMENTS, None]])
        database.execute("DELETE FROM articles WHERE rowid = 7")  # numbers of rows may have gaps
    write_jsonl(tmp_path / "books.jsonl", [f"a book {text}" for text in DOCUMENTS])
    return tmp_path


def config_of_the_page(folder: Path) -> str:
    """The TOML of the page with the paths of ``folder``."""
    (toml,) = code_blocks("adding-a-data-source.md", "toml")
    for name in ("articles.db", "books.jsonl"):
        assert name in toml
        toml = toml.replace(name, str(folder / name))
    return toml


def use_modules_of(folder: Path, slow: bool = False) -> Any:
    sys.path.insert(0, str(folder))
    return slow_steps() if slow else None


def steps_done(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_text().count('"loss"') if file.exists() else 0


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_batches_of_the_table_are_the_same_on_every_layout_and_after_a_resume(sqlite: Path) -> None:
    config = from_toml(DataConfig, tomli.loads(config_of_the_page(sqlite))["data"], "data.")
    whole = make_loader(config, range(8))
    tokens = take(whole, 30)
    for rows in (range(4), range(4, 8)):
        loader = make_loader(config, rows)
        assert torch.equal(take(loader, 30), tokens[:, rows])
    first = make_loader(config, range(8))
    take(first, 11)
    resumed = make_loader(config, range(8))
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(take(resumed, 19), tokens[11:])
    text = TOKENIZER.decode(tokens.transpose(0, 1).flatten().tolist())
    assert len(re.findall(r"(?<!book )document 8 ", text)) > 1
    assert "a book document " in text
    assert not re.findall(r"(?<!book )document 6 ", text)  # the row that was deleted
    documents = [text for number, text in enumerate(DOCUMENTS) if number != 6]
    count = sum(len(TOKENIZER.encode(text, bos=True, eos=True)) for text in documents)
    assert whole.identity["data.sources"].startswith(f"{count:,} tokens, hash ")


def test_run_on_two_ranks_reads_the_batches_of_one_rank_and_resumes_bitwise(sqlite: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG + config_of_the_page(sqlite))
    options = ("--job.config_file", str(config))
    for ranks in (1, 2):
        finish(tmp_path / f"{ranks}", *options, ranks=ranks, hook=partial(use_modules_of, sqlite))
    one, two = (saved_tensors(tmp_path / f"{ranks}", 8) for ranks in (1, 2))
    assert torch.equal(one["loader.rows"], two["loader.rows"])
    assert losses(tmp_path / "1") == pytest.approx(losses(tmp_path / "2"), rel=1e-5)

    killed = ForkedRun(tmp_path / "killed", *options, ranks=1, hook=partial(use_modules_of, sqlite, slow=True))
    killed.wait_for(lambda: steps_done(tmp_path / "killed") >= 5)
    killed.end()
    output = finish(tmp_path / "killed", *options, ranks=1, hook=partial(use_modules_of, sqlite))
    assert "resume" in output
    assert different_tensors(saved_tensors(tmp_path / "killed", 8), one) == []


def test_table_can_be_tokenized_by_prepare(sqlite: Path) -> None:
    source = SourceConfig(type="sqlite", options={"file": str(sqlite / "articles.db"), "table": "articles"})
    folder = write_tokens(sqlite / "tokens", source)
    documents = [text for number, text in enumerate(DOCUMENTS) if number != 6]
    tokens = [TOKENIZER.encode(text, bos=True, eos=True) for text in documents]
    assert len(TokenDataset(open_folder(folder), TOKENIZER.content_hash, 0, "")) == sum(map(len, tokens))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fil": "a.db"}, r"data.options.fil is not a known key; did you mean 'data.options.file'"),
        ({"file": 7}, r"data.options.file = 7 must be a string"),
        ({"file": "absent.db"}, r"data.options.file = 'absent.db' is not a file"),
    ],
)
@pytest.mark.usefixtures("sqlite")
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        make_loader(DataConfig(type="sqlite", options=options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "sqlit"}, "data.type = 'sqlit' must be one of 'files', 'standard_library'"),
        ({"type": "files"}, "data.type = 'files' needs data.path"),
        ({"path": "a.txt", "options": {"a": 1}}, "data.options = {'a': 1} are for a type of your own"),
        ({"type": "standard_library", "sources": (SourceConfig(path="b"),)}, "a path, name or type .* exclude"),
    ],
)
def test_wrong_types_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(**options)


def rows(file: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values of a metric in the database."""
    with sqlite3.connect(file) as database:
        return database.execute("SELECT step, value FROM metrics WHERE name = ? ORDER BY step", (name,)).fetchall()


def test_writer_of_the_page_gets_the_metrics_of_a_run_and_of_its_resumes(tmp_path: Path) -> None:
    save_module("adding-a-metrics-writer.md", tmp_path)
    (toml,) = code_blocks("adding-a-metrics-writer.md", "toml")
    assert "metrics.db" in toml
    settings, database = CONFIG.replace("[metrics]\n", "[metrics]\nwriters = ['sqlite']\n"), tmp_path / "store.db"
    options = toml.partition("[metrics]")[0] + toml[toml.index("[metrics.options") :]
    config = tmp_path / "run.toml"
    config.write_text(settings + options.replace("metrics.db", str(database)))

    def train(*options: str) -> None:
        given = ("--job.config_file", str(config), *options)
        finish(tmp_path / "run", *given, hook=partial(use_modules_of, tmp_path), ranks=1)

    for steps in ("6", "8"):
        train("--training.steps", steps)
    assert rows(database, "loss/average") == list(enumerate(losses(tmp_path / "run"), 1))
    assert rows(database, "event/start") == [(0, 1), (6, 1)]
    changed = ("--optimizer.lr", "0.1", "--checkpoint.allow_changes", "optimizer.lr", "--checkpoint.load_step", "6")
    train("--training.steps", "7", *changed)
    kept = [*losses(tmp_path / "run")[:6], losses(tmp_path / "run")[-1]]
    assert rows(database, "loss/average") == list(enumerate(kept, 1))

    config.write_text(config.read_text().replace("file =", "fil ="))
    hook = partial(use_modules_of, tmp_path)
    wrong = ForkedRun(tmp_path / "wrong", "--job.config_file", str(config), hook=hook, ranks=1)
    assert wrong.wait() == [2]
    assert "metrics.options.sqlite.fil is not a known key; did you mean" in wrong.output()


def test_wrong_writers_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"metrics.writers = 'absent' must be one of 'tensorboard'"):
        MetricsConfig(writers=("absent",))
    METRICS_WRITERS.add("mine", "module:Mine")
    with pytest.raises(ConfigError, match=r"metrics.options.absent must be a table .* metrics.writers = \['mine'\]"):
        MetricsConfig(writers=("mine",), options={"absent": {}})


def test_files_of_a_format_from_outside_are_found_decompressed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = save_module("adding-a-data-source.md", tmp_path, number=1)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    importlib.import_module(module)
    films = tmp_path / "films"
    films.mkdir()
    subtitles = b"1\n00:00:01,000 --> 00:00:02,500\nA line.\n\n2\n00:00:03,000 --> 00:00:04,000\nAnother one.\n"
    (films / "a.srt").write_bytes(subtitles)
    (films / "b.srt.xz").write_bytes(lzma.compress(subtitles.replace(b"line", b"word")))
    (films / "poster.png").write_bytes(b"no text")
    files = find_files(str(films), "data.path", "")
    assert [file.name for file in files] == ["a.srt", "b.srt.xz"]
    assert SourceConfig(path=str(films / "b.srt.xz")).title == "b"
    found = [text for file in files for text in documents(io.BytesIO(file.read_bytes()), file.name, "text")]
    assert found == ["A line.\n\nAnother one.\n", "A word.\n\nAnother one.\n"]
    assert position_of("a.srt", 0, 1) == ""
    assert not is_splittable("a.srt", 1 << 30)
