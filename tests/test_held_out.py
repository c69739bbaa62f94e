"""The held-out part of a source, and a validation that depends on its documents alone."""

from pathlib import Path

import pytest
import torch
from data_samples import DOCUMENTS, TOKENIZER, make_loader, opened_text, write_jsonl, write_prepared
from forked_command import run_command
from forked_run import CONFIG, finish, read_metrics

from torchtrain.config.parse import parse
from torchtrain.config.schema import DataConfig, JobConfig, SourceConfig, ValidationConfig
from torchtrain.datasets.dataloader import DataLoader
from torchtrain.datasets.held_out import SourcePart, is_held_out
from torchtrain.datasets.packing import DocumentSource
from torchtrain.errors import ConfigError, DataError
from torchtrain.labels import IGNORE_INDEX
from torchtrain.plugins.evaluation.options import EvaluationConfig

SHARE = 0.3


@pytest.fixture
def text(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "text.jsonl", [*DOCUMENTS, None, "", DOCUMENTS[3], DOCUMENTS[5]])


def documents_in(loader: DataLoader) -> set[str]:
    """The texts of all batches of a loader of one row, without repetition."""
    tokens = torch.cat([batch.tokens[batch.labels != IGNORE_INDEX] for batch in loader]).tolist()
    return set(TOKENIZER.decode([token for token in tokens if token != TOKENIZER.bos_id]).split("end\n"))


def test_each_document_is_in_one_part_and_equal_ones_in_the_same(text: str) -> None:
    source = opened_text(SourceConfig(path=text))
    assert isinstance(source, DocumentSource)
    parts = [SourcePart(source, SHARE, held_out=held_out, section="data") for held_out in (False, True)]
    for number in range(source.parts):
        whole = source.document(number)
        kept, held_out = (part.document(number) for part in parts)
        if whole:
            assert [kept, held_out] == (["", whole] if is_held_out(whole, SHARE) else [whole, ""])
        else:
            assert (kept, held_out) == (whole, "")
    assert [part.document(3) for part in parts] == [part.document(len(DOCUMENTS) + 2) for part in parts]
    assert parts[0].identity() != source.identity() != SourcePart(source, 0.2, held_out=True, section="").identity()


def test_held_out_documents_are_not_trained_on(text: str) -> None:
    config = DataConfig(path=text, held_out=SHARE, when_exhausted="stop", prefetch=0)
    trained, held_out = (
        documents_in(make_loader(config, range(1), batch=1, drop_last=False, held_out=held_out))
        for held_out in (False, True)
    )
    kept = {document.removesuffix("end\n") for document in DOCUMENTS if not is_held_out(document, SHARE)}
    others = {document.removesuffix("end\n") for document in DOCUMENTS} - kept
    assert len(kept) > len(others) > 10
    assert trained & (kept | others) == kept
    assert held_out & (kept | others) == others


@pytest.mark.parametrize("seq_len", [7, 32, 500])
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
                sequential=True,
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


def test_later_validations_read_their_own_documents_alone(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataConfig(path=text, held_out=SHARE, when_exhausted="stop", prefetch=0)
    loader = make_loader(config, range(1), batch=1, drop_last=False, sequential=True, held_out=True)
    beginning, read = loader.state_dict(), []
    document = SourcePart.document
    monkeypatch.setattr(SourcePart, "document", lambda part, n: (read.append(n), document(part, n))[1])
    for count in (len(DOCUMENTS) + 4, len(texts_held_out())):
        read.clear()
        loader.load_state_dict(beginning)
        list(loader)
        assert len(read) <= count + 1  # the cache may hold the last one
        assert len(set(read)) == len(read)


def test_sources_of_one_name_and_of_weight_zero_are_validated(tmp_path: Path) -> None:
    paths = []
    for folder in "abc":
        (tmp_path / folder).mkdir()
        paths.append(write_jsonl(tmp_path / folder / "train.jsonl", DOCUMENTS))
    tables = [f'{{path = "{path}", held_out = 0.3, weight = {n % 2}}}' for n, path in enumerate(paths, 1)]
    (tmp_path / "own.toml").write_text(
        f"{CONFIG.replace('steps = 8', '')}\n[data]\nsources = [{', '.join(tables)}]\n"
        '[[stages]]\nname = "first"\nsteps = 1\n[[stages]]\nname = "second"\nsteps = 1\n'
    )
    finish(tmp_path, "--job.config_file", str(tmp_path / "own.toml"))
    lines = [line for line in read_metrics(tmp_path) if "validation_loss" in line]
    assert lines
    assert {f"validation_loss_train_{number}" for number in (1, 2, 3)} <= lines[-1].keys()


def test_shares_that_cannot_be_held_out_are_rejected(tmp_path: Path, text: str) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", DOCUMENTS[:1])
    with pytest.raises(DataError, match=r"data.held_out = 1e-06 holds out none of the 1 documents of .*: raise it"):
        make_loader(DataConfig(path=one, held_out=1e-6, when_exhausted="stop"), held_out=True)
    prepared = DataConfig(path=write_prepared(tmp_path / "prepared", text), held_out=SHARE)
    with pytest.raises(DataError, match=r"data.held_out = 0.3 needs text on a local disk, and .*prepared.* is not"):
        make_loader(prepared)
    with pytest.raises(ConfigError, match=r"documents of \[validation\] are all held out"):
        ValidationConfig(path=text, held_out=SHARE)
    with pytest.raises(ConfigError, match=r"held_out = 0.3 is an option of each source: put it into the tables"):
        DataConfig(sources=(SourceConfig(path=text),), held_out=SHARE)
    with pytest.raises(ConfigError, match=r"held_out = 1.0.* must be at least 0 and less than 1"):
        SourceConfig(path=text, held_out=1.0)
    with pytest.raises(ConfigError, match=r"evaluation.prompts needs validations: set data.held_out, or"):
        JobConfig(plugins={"evaluation": EvaluationConfig(prompts=("a",))})
    JobConfig(plugins={"evaluation": EvaluationConfig(prompts=("a",))}, data=DataConfig(held_out=SHARE))
    result = run_command(
        "torchtrain.prepare", "--data.path", text, "--data.held_out", "0.3", "--prepare.output", str(tmp_path / "out")
    )
    assert result.returncode == 2
    assert "prepare held-out data by themselves" in result.stderr


def test_held_out_part_of_the_default_data_is_not_one_of_others(text: str, tmp_path: Path) -> None:
    (tmp_path / "default.toml").write_text("[data]\nheld_out = 0.01\n")
    (tmp_path / "own.toml").write_text(f'[data]\nheld_out = 0.01\npath = "{text}"\n')

    def held_out(file: str, *words: str) -> float:
        return parse(["--job.config_file", str(tmp_path / file), *words], "torchtrain.train", "").data.held_out

    assert held_out("default.toml") == held_out("own.toml", "--data.path", text) == 0.01
    assert held_out("default.toml", "--data.path", text) == 0
    assert held_out("default.toml", "--data.path", text, "--data.held_out", "0.2") == 0.2


def test_run_validates_on_what_it_holds_out(tmp_path: Path, text: str) -> None:
    """Without another option, beside data of its own, and on any ranks."""
    options = ["--data.path", text, "--data.held_out", "0.3", "--training.steps", "3", "--validation.interval", "2"]
    log = finish(tmp_path / "one", *options)
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
