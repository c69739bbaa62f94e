"""The held-out part of a source, and a validation that depends on its documents alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from captured_log import captured_log
from data_samples import DOCUMENTS, TOKENIZER, make_loader, take, write_jsonl, write_tokens
from forked_run import finish, read_metrics

from torchtrain import trainer
from torchtrain.config.parse import parse
from torchtrain.config.schema import JobConfig, TrainingConfig
from torchtrain.datasets.build import build_loaders
from torchtrain.datasets.data_source import DataSource, Stream, StreamRequest, is_held_out, text_hash
from torchtrain.datasets.dataloader import DataLoader
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.errors import ConfigError, DataError
from torchtrain.labels import IGNORE_INDEX
from torchtrain.logging import logger
from torchtrain.metrics.options import ValidationConfig

SHARE = 0.3


@pytest.fixture
def text(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "text.jsonl", [*DOCUMENTS, None, "", DOCUMENTS[3], DOCUMENTS[5]])


def documents_in(loader: DataLoader) -> set[str]:
    """The texts of all batches of a loader of one row, without repetition."""
    tokens = torch.cat([batch.tokens[batch.labels != IGNORE_INDEX] for batch in loader]).tolist()
    return set(TOKENIZER.decode([token for token in tokens if token != TOKENIZER.bos_id]).split("end\n"))


class Windows(DataSource):
    """A source of another kind than those of torchtrain."""

    name = "it"

    def identity(self) -> str:
        return "it"

    def stream(self, request: StreamRequest) -> Stream:
        raise NotImplementedError


def source_of(kind: str, folder: Path, text: str) -> SourceConfig:
    """The documents of the file ``text`` as a source of which ``SHARE`` is held out."""
    path = write_tokens(folder / "tokens", text) if kind == "tokens" else text
    return SourceConfig(path=path, held_out=SHARE)


KINDS = ["text", "tokens"]


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_documents_are_not_trained_on(kind: str, tmp_path: Path, text: str) -> None:
    """The same documents, however they are stored."""
    source = source_of(kind, tmp_path, text)
    config = DataConfig(**vars(source), when_exhausted="stop", prefetch=0)
    trained, held_out = (
        documents_in(make_loader(config, range(1), batch=1, seq_len=20_000, drop_last=False, held_out=held_out))
        for held_out in (False, True)
    )
    kept = {document.removesuffix("end\n") for document in DOCUMENTS if not is_held_out(document, SHARE)}
    others = {document.removesuffix("end\n") for document in DOCUMENTS} - kept
    assert len(kept) > len(others) > 10
    assert trained & (kept | others) == kept
    assert held_out & (kept | others) == others


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_held_out_documents_are_not_trained_on_from_another_source(
    kind: str, weight: float, tmp_path: Path, text: str
) -> None:
    """Also if that source holds out a smaller share, or none, and if the source that does is only validated on."""
    other = replace(source_of(kind, tmp_path, text), held_out=0.0)
    source = SourceConfig(path=write_jsonl(tmp_path / "own.jsonl", DOCUMENTS), held_out=SHARE, weight=weight)
    sources = (other, source, replace(source, held_out=0.1))
    config = DataConfig(sources=sources, when_exhausted="stop", prefetch=0)
    with captured_log() as log:
        loader = make_loader(config, range(1), batch=1, seq_len=20_000, drop_last=False)
    trained = documents_in(loader)
    kept = {document.removesuffix("end\n") for document in DOCUMENTS if not is_held_out(document, SHARE)}
    others = {document.removesuffix("end\n") for document in DOCUMENTS} - kept
    assert trained & (kept | others) == kept
    named = (
        "data.sources[1].held_out = 0.3, of own, is the largest share that a source holds out: the same documents of"
    )
    assert f"{named} {kind}, own are not trained on, either" in "".join(log)


def test_document_with_a_lone_surrogate_is_known_by_its_bytes(tmp_path: Path) -> None:
    """JSON can contain one, and UTF-8 cannot."""
    documents = [f"item {number} \ud83d of text {number * 7}end\n" for number in range(100)]
    path = write_jsonl(tmp_path / "text.jsonl", documents)
    config = DataConfig(path=path, held_out=SHARE, when_exhausted="stop", prefetch=0)
    found = documents_in(make_loader(config, range(1), batch=1, seq_len=20_000, drop_last=False, held_out=True))
    expected = [text.replace("\ud83d", "?").removesuffix("end\n") for text in documents if is_held_out(text, SHARE)]
    assert len(expected) > 10
    assert {text.replace("\ufffd", "?") for text in found if text} == set(expected)
    assert text_hash(documents[0]) == text_hash(documents[0].replace("\ud83d", "?"))  # as explain names it


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_order_without_the_held_out_documents_resumes_and_has_any_layout(
    packing: Literal["cut", "best_fit"], text: str
) -> None:
    """In the third epoch, too."""
    config = DataConfig(path=text, held_out=SHARE, packing=packing, prefetch=0)
    whole, halves = make_loader(config), [make_loader(config, range(4)), make_loader(config, range(4, 8))]
    before = take(whole, 30)
    assert torch.equal(before, torch.cat([take(half, 30) for half in halves], dim=1))
    state, resumed = whole.state_dict(), make_loader(config)
    resumed.load_state_dict(state)
    assert torch.equal(take(resumed, 5), take(whole, 5))
    tokens = len(before.flatten())
    assert tokens > 2 * sum(len(TOKENIZER.encode(document, bos=True, eos=True)) for document in DOCUMENTS)
    rows = [TOKENIZER.decode(row.tolist()) for row in before.reshape(-1, 32)]
    for document in filter(lambda document: is_held_out(document, SHARE), DOCUMENTS):
        start = " ".join(document.split()[:2])
        assert [row for row in rows if f"{start} " in row or f"{start}\n" in row] == []


def test_held_out_documents_have_another_label_than_a_source_of_validation(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(trainer, "on_all_ranks", lambda function, _: function())
    (tmp_path / "other").mkdir()
    other = write_jsonl(tmp_path / "other" / "text.jsonl", ["only in [validation]"] * 20)
    config = JobConfig(
        data=DataConfig(path=text, held_out=SHARE),
        validation=ValidationConfig(enable=True, path=other),
        training=TrainingConfig(global_batch_size=1, seq_len=64),
    )
    group: Any = None
    rows = range(config.training.global_batch_size)
    _, loaders = build_loaders(config, TOKENIZER, rows, torch.device("cpu"), group)
    assert list(loaders) == ["text", "text_held_out"]
    assert documents_in(loaders["text"]) == {"only in [validation]" * 20}
    assert "only in [validation]" not in "".join(documents_in(loaders["text_held_out"]))


@pytest.mark.parametrize("seq_len", [pytest.param(7, marks=pytest.mark.slow), 32, 500])
def test_windows_of_a_validation_depend_on_the_documents_alone(text: str, seq_len: int) -> None:
    """For any batch and any ranks, also when the data are read again: every token once, with the bytes of the text."""
    found = []
    for batch, ranks in ((1, 1), (3, 1), (8, 1), (8, 4), (64, 2)):
        config = DataConfig(path=text, when_exhausted="stop", prefetch=0)
        loaders = [
            make_loader(
                config,
                range(batch * rank // ranks, batch * (rank + 1) // ranks),
                batch=batch,
                seq_len=seq_len,
                drop_last=False,
                count_bytes=True,
            )
            for rank in range(ranks)
        ]
        beginnings = [loader.state_dict() for loader in loaders]
        for _ in range(2):
            for loader, beginning in zip(loaders, beginnings, strict=True):
                loader.load_state_dict(beginning)
            labels, sizes = [], []
            while any(batches := [next(loader, None) for loader in loaders]):
                for part in filter(None, batches):
                    labels.append(part.labels[part.labels != IGNORE_INDEX])
                    assert part.label_bytes is not None
                    sizes.append(part.label_bytes[part.labels != IGNORE_INDEX])
            found.append((torch.cat(labels), torch.cat(sizes)))
    for labels, sizes in found[1:]:
        assert torch.equal(labels, found[0][0])
        assert torch.equal(sizes, found[0][1])
    texts = [*DOCUMENTS, DOCUMENTS[3], DOCUMENTS[5]]
    assert len(found[0][0]) == sum(len(TOKENIZER.encode(text, bos=True, eos=True)) for text in texts) - 1
    assert found[0][1].sum() == pytest.approx(sum(len(text.encode()) for text in texts))


def test_shares_that_cannot_be_held_out_are_rejected(tmp_path: Path, text: str) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", DOCUMENTS[:1])
    with pytest.raises(DataError, match=r"data.held_out = 1e-06 holds out none of the 1 documents of .*: raise it"):
        make_loader(DataConfig(path=one, held_out=1e-6, when_exhausted="stop"), held_out=True)
    with pytest.raises(DataError, match=r"data.held_out = 0.99999 holds out all of the 1 documents of .*: lower it"):
        make_loader(DataConfig(path=one, held_out=0.99999))
    with pytest.raises(DataError, match=r"data.held_out = 0.3 needs text, and it is none: set it to 0"):
        Windows().part(SHARE, held_out=False, section="data")
    with pytest.raises(ConfigError, match=r"documents of \[validation\] are all held out"):
        ValidationConfig(path=text, held_out=SHARE)
    with pytest.raises(ConfigError, match=r"held_out = 0.3 is an option of each source: put it into the tables"):
        DataConfig(sources=(SourceConfig(path=text),), held_out=SHARE)
    with pytest.raises(ConfigError, match=r"held_out = 1.0.* must be at least 0 and less than 1"):
        SourceConfig(path=text, held_out=1.0)


def test_held_out_part_of_the_default_data_is_not_one_of_others(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger.name)
    (tmp_path / "default.toml").write_text("[data]\nheld_out = 0.01\n")
    (tmp_path / "own.toml").write_text(f'[data]\nheld_out = 0.01\npath = "{text}"\n')

    def held_out(file: str, *words: str) -> float:
        return parse(["--job.config_file", str(tmp_path / file), *words], "torchtrain.train", "").data.held_out

    assert held_out("default.toml") == held_out("own.toml", "--data.path", text) == 0.01
    assert not caplog.messages
    assert held_out("default.toml", "--data.path", text) == 0
    assert [message.partition(",")[0] for message in caplog.messages] == [
        "data.held_out = 0.01 of the config file is for its own data"
    ]
    assert held_out("default.toml", "--data.path", text, "--data.held_out", "0.2") == 0.2


@pytest.mark.parametrize("kind", ["text", pytest.param("tokens", marks=pytest.mark.slow)])
def test_run_validates_on_what_it_holds_out(kind: str, tmp_path: Path, text: str) -> None:
    """Without another option, beside data of its own, and on any ranks."""
    path = str(source_of(kind, tmp_path, text).path)
    options = ["--data.path", path, "--data.held_out", "0.3", "--training.steps", "3", "--validation.interval", "2"]
    options += ["--data.label", "text", "--training.local_batch_size", "2"]
    log = finish(tmp_path / "one", *options, ranks=1)
    assert "validation   30.00% of text, every 2 steps and at the end" in log
    finish(tmp_path / "two", *options, "--validation.enable", "--validation.path", text, ranks=2)
    one, two = (
        [line for line in read_metrics(tmp_path / name) if "validation_loss" in line] for name in ("one", "two")
    )
    assert [line["step"] for line in one] == [2, 3] == [line["step"] for line in two]
    of_text = sum(len(TOKENIZER.encode(document, bos=True, eos=True)) for document in texts_held_out()) - 1
    for line, both in zip(one, two, strict=True):
        assert line["validation_tokens"] == of_text == both["validation_tokens_text_held_out"]
        assert both["validation_tokens_text"] > of_text
        assert both["validation_loss_text_held_out"] == pytest.approx(line["validation_loss"], rel=1e-5)


def texts_held_out() -> list[str]:
    return [text for text in [*DOCUMENTS, DOCUMENTS[3], DOCUMENTS[5]] if is_held_out(text, SHARE)]
