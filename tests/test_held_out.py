"""The held-out part of a source, and a validation that depends on its documents alone."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_log import captured_log
from data_samples import (
    DOCUMENTS,
    TOKENIZER,
    make_loader,
    opened_text,
    take,
    write_hub_folder,
    write_jsonl,
    write_prepared,
)
from forked_command import checked_command, run_command
from forked_run import CONFIG, finish, read_metrics

from torchtrain import trainer
from torchtrain.config.parse import parse
from torchtrain.config.schema import DataConfig, JobConfig, SourceConfig, TrainingConfig, ValidationConfig
from torchtrain.datasets.dataloader import DataLoader
from torchtrain.datasets.exclusions import text_hash
from torchtrain.datasets.held_out import SourcePart, is_held_out, part_of
from torchtrain.datasets.packing import DocumentSource, TextSource
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.errors import ConfigError, DataError
from torchtrain.labels import IGNORE_INDEX
from torchtrain.plugins.evaluation.options import EvaluationConfig
from torchtrain.plugins.prepared_data.tokenize_dataset import prepare
from torchtrain.plugins.remote_data.streamed_text import find_held_out

SHARE = 0.3


@pytest.fixture
def text(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "text.jsonl", [*DOCUMENTS, None, "", DOCUMENTS[3], DOCUMENTS[5]])


def documents_in(loader: DataLoader) -> set[str]:
    """The texts of all batches of a loader of one row, without repetition."""
    tokens = torch.cat([batch.tokens[batch.labels != IGNORE_INDEX] for batch in loader]).tolist()
    return set(TOKENIZER.decode([token for token in tokens if token != TOKENIZER.bos_id]).split("end\n"))


class Texts(TextSource):
    """A source of another kind than those of torchtrain."""

    def identity(self) -> str:
        return "it"

    def read(self, part: int, start: int) -> Iterator[tuple[int, str | None]]:  # noqa: ARG002
        yield from enumerate(DOCUMENTS[start:], start)


def source_of(kind: str, folder: Path, text: str) -> SourceConfig:
    """The documents of the file ``text`` as a source of which ``SHARE`` is held out."""
    if kind.startswith("prepared"):
        source = SourceConfig(path=text, held_out=SHARE)
        output = (folder / "prepared").as_uri() if kind == "prepared by URL" else str(folder / "prepared")
        prepare(source, "data", "", output, processes=2)
        return replace(source, path=output)
    if kind == "hub":
        return SourceConfig(name=write_hub_folder(folder / "hub", DOCUMENTS, files=3), held_out=SHARE)
    if kind == "compressed":
        (folder / "text.jsonl.gz").write_bytes(gzip.compress(Path(text).read_bytes()))
        return SourceConfig(path=(folder / "text.jsonl.gz").as_uri(), held_out=SHARE)
    return SourceConfig(path=Path(text).as_uri() if kind == "streamed" else text, held_out=SHARE)


KINDS = ["local", "prepared", "prepared by URL", "streamed", "compressed", "hub"]


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
    sources = (other, source) if kind.startswith("prepared") else (other, source, replace(source, held_out=0.1))
    config = DataConfig(sources=sources, when_exhausted="stop", prefetch=0)
    with captured_log() as log:
        loader = make_loader(config, range(1), batch=1, seq_len=20_000, drop_last=False)
    trained = documents_in(loader)
    kept = {document.removesuffix("end\n") for document in DOCUMENTS if not is_held_out(document, SHARE)}
    others = {document.removesuffix("end\n") for document in DOCUMENTS} - kept
    assert trained & (kept | others) == kept
    assert "data.sources[1].held_out = 0.3 is the largest share that a source holds out: the same" in "".join(log)


def test_prepared_data_with_documents_that_another_source_holds_out_are_rejected(tmp_path: Path, text: str) -> None:
    smaller, larger = str(tmp_path / "smaller"), str(tmp_path / "larger")
    for share, output in ((0.1, smaller), (0.5, larger)):
        prepare(SourceConfig(path=text, held_out=share), "data", "", output, processes=1)
    source = SourceConfig(path=text, held_out=SHARE)
    with pytest.raises(
        DataError,
        match=r"data.sources\[0\].held_out = 0.3 must be that with which data.sources\[1\].*was prepared, 0.1",
    ):
        make_loader(DataConfig(sources=(source, SourceConfig(path=smaller))))
    loader = make_loader(DataConfig(sources=(source, SourceConfig(path=larger))))
    assert take(loader, 1).shape == (1, 8, 32)
    with pytest.raises(DataError, match=r"data.held_out = 0.3 must be that with which .* was prepared, 0.5"):
        make_loader(DataConfig(path=larger, held_out=SHARE, when_exhausted="stop"), held_out=True)


def test_several_sources_are_prepared_with_the_largest_share(tmp_path: Path, text: str) -> None:
    tables = f'{{path = "{text}", held_out = 0.3}}, {{path = "{text}"}}'
    (tmp_path / "two.toml").write_text(f"[data]\nsources = [{tables}]\n")
    arguments = ("--job.config_file", str(tmp_path / "two.toml"), "--prepare.output", str(tmp_path / "out"))
    checked_command("torchtrain.prepare", *arguments)
    for number in "01":
        assert json.loads((tmp_path / "out" / number / "manifest.json").read_text())["held_out"] == 0.3
    paths = [str(tmp_path / "out" / number) for number in "01"]
    make_loader(DataConfig(sources=(SourceConfig(path=paths[0], held_out=0.3), SourceConfig(path=paths[1]))))


@pytest.mark.parametrize("kind", ["prepared", "streamed"])
def test_document_with_a_lone_surrogate_has_the_same_hash_in_all_data(kind: str, tmp_path: Path) -> None:
    """JSON can contain one, and the copy of local text cannot."""
    documents = [f"item {number} \ud83d of text {number * 7}end\n" for number in range(100)]
    path = write_jsonl(tmp_path / "text.jsonl", documents)
    found = []
    for of in ("local", kind):
        config = DataConfig(**vars(source_of(of, tmp_path, path)), when_exhausted="stop", prefetch=0)
        found.append(
            documents_in(make_loader(config, range(1), batch=1, seq_len=20_000, drop_last=False, held_out=True))
        )
    assert len(found[0]) > 10
    assert found[0] == found[1]
    assert text_hash(documents[0]) == text_hash(documents[0].replace("\ud83d", "?"))  # as explain names it


@pytest.mark.parametrize("kind", ["prepared", "streamed", "compressed"])
def test_order_without_the_held_out_documents_resumes_and_has_any_layout(kind: str, tmp_path: Path, text: str) -> None:
    """In the third epoch, too."""
    config = DataConfig(**vars(source_of(kind, tmp_path, text)), prefetch=0, streams=4)
    whole, halves = make_loader(config), [make_loader(config, range(4)), make_loader(config, range(4, 8))]
    before = take(whole, 30)
    assert torch.equal(before, torch.cat([take(half, 30) for half in halves], dim=1))
    state, resumed = whole.state_dict(), make_loader(config)
    resumed.load_state_dict(state)
    assert torch.equal(take(resumed, 5), take(whole, 5))
    tokens = len(before.flatten())
    assert tokens > 2 * sum(len(TOKENIZER.encode(document, bos=True, eos=True)) for document in DOCUMENTS)
    rows = [TOKENIZER.decode(row.tolist()) for row in before.transpose(0, 1).reshape(-1, 32)]
    for document in filter(lambda document: is_held_out(document, SHARE), DOCUMENTS):
        start = " ".join(document.split()[:2])
        assert [row for row in rows if f"{start} " in row or f"{start}\n" in row] == []


def test_held_out_documents_of_streamed_text_are_found_in_a_bounded_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtrain.plugins.remote_data.streamed_text.SHARE_BYTES", 20_000)
    documents = [f"document {n} " + "words " * 30 for n in range(4000)]
    path = Path(write_jsonl(tmp_path / "long.jsonl", documents))
    source = opened_text(SourceConfig(path=path.as_uri()))
    assert source.parts > 30
    read: list[int] = []
    one = type(source).read

    def counted(self: TextSource, part: int, start: int) -> Iterator[tuple[int, str | None]]:
        for number, text in one(self, part, start):
            read.append(len(text or ""))
            yield number, text

    monkeypatch.setattr(type(source), "read", counted)
    held_out = [document for document in documents if is_held_out(document, 0.01)]
    everything = find_held_out(source, 0.01, 1e12)  # type: ignore[arg-type]
    assert sorted(everything) == sorted(held_out)
    assert sum(read) == sum(map(len, documents))
    read.clear()
    some = find_held_out(source, 0.01, 200_000)  # type: ignore[arg-type]
    assert 200_000 <= sum(read) <= 200_000 + source.parts * max(map(len, documents))
    assert 0 < len(some) < len(everything)
    assert set(some) < set(everything)
    read.clear()
    many = find_held_out(source, 0.9, 200_000)  # type: ignore[arg-type]
    assert sum(map(len, many)) <= 200_000 / 16 + source.parts * max(map(len, documents))
    assert sum(read) < 30_000


def test_prepare_writes_what_is_held_out_into_a_folder_of_its_own(tmp_path: Path, text: str) -> None:
    out = str(tmp_path / "out")
    arguments = ["torchtrain.prepare", "--data.path", text, "--prepare.output", out, "--data.held_out"]
    log = checked_command(*arguments, "0.3").stderr
    assert f"--data.path {out} --data.held_out 0.3, which validates on {out}/held_out" in log
    assert "0 documents skipped" not in log  # that without text is counted once
    files = {path: path.read_bytes() for path in Path(out).rglob("*") if path.is_file()}
    checked_command(*arguments, "0.3")
    assert files == {path: path.read_bytes() for path in Path(out).rglob("*") if path.is_file()}
    result = run_command(*arguments, "0.2")
    assert result.returncode == 2
    assert "was begun with data.held_out = 0.3, not 0.2: set it to that, or use an empty folder" in result.stderr
    inner = Path(out, "held_out", "shard-00000.tokens")
    inner.write_bytes(inner.read_bytes()[::-1])
    result = run_command("torchtrain.prepare", "--prepare.output", out, "--prepare.verify")
    assert result.returncode == 2
    assert f"{out}/held_out: shard-00000.tokens is damaged or missing" in result.stderr
    Path(out, "held_out", "manifest.json").unlink()
    config = DataConfig(path=out, held_out=SHARE, when_exhausted="stop")
    make_loader(config)
    with pytest.raises(DataError, match=r"out/held_out, the part of .* that data.held_out holds out, is missing or"):
        make_loader(config, held_out=True)


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
    _, loaders = trainer.build_loaders(config, TOKENIZER, ParallelDims(), torch.device("cpu"), group)
    assert list(loaders) == ["text", "text_held_out"]
    assert documents_in(loaders["text"]) == {"only in [validation]" * 20}
    assert "only in [validation]" not in "".join(documents_in(loaders["text_held_out"]))


def test_data_with_a_held_out_part_train_without_the_option(tmp_path: Path, text: str) -> None:
    source = source_of("prepared", tmp_path, text)
    with captured_log() as log:
        one, other = (make_loader(DataConfig(**vars(of))) for of in (source, replace(source, held_out=0.0)))
    assert torch.equal(take(one, 5), take(other, 5))
    assert "was prepared with data.held_out = 0.3, and is trained on without these documents" in "".join(log)


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
    with pytest.raises(DataError, match=r"data.held_out = 0.3 must be that with which .*prepared.* was prepared, 0:"):
        make_loader(prepared)
    streamed = DataConfig(path=Path(one).as_uri(), held_out=1e-6, when_exhausted="stop")
    make_loader(streamed)
    with pytest.raises(DataError, match=r"data.held_out = 1e-06 holds out none of the documents of .* that were read"):
        make_loader(streamed, held_out=True)
    with pytest.raises(DataError, match=r"data.held_out = 0.3 needs text or prepared data, and it is neither: set it"):
        part_of(Texts(1, "it"), SHARE, held_out=False, section="data")
    with pytest.raises(ConfigError, match=r"documents of \[validation\] are all held out"):
        ValidationConfig(path=text, held_out=SHARE)
    with pytest.raises(ConfigError, match=r"held_out = 0.3 is an option of each source: put it into the tables"):
        DataConfig(sources=(SourceConfig(path=text),), held_out=SHARE)
    with pytest.raises(ConfigError, match=r"held_out = 1.0.* must be at least 0 and less than 1"):
        SourceConfig(path=text, held_out=1.0)
    with pytest.raises(ConfigError, match=r"evaluation.prompts needs validations: set data.held_out, or"):
        JobConfig(plugins={"evaluation": EvaluationConfig(prompts=("a",))})
    JobConfig(plugins={"evaluation": EvaluationConfig(prompts=("a",))}, data=DataConfig(held_out=SHARE))


def test_held_out_part_of_the_default_data_is_not_one_of_others(text: str, tmp_path: Path) -> None:
    (tmp_path / "default.toml").write_text("[data]\nheld_out = 0.01\n")
    (tmp_path / "own.toml").write_text(f'[data]\nheld_out = 0.01\npath = "{text}"\n')

    def held_out(file: str, *words: str) -> float:
        return parse(["--job.config_file", str(tmp_path / file), *words], "torchtrain.train", "").data.held_out

    assert held_out("default.toml") == held_out("own.toml", "--data.path", text) == 0.01
    assert held_out("default.toml", "--data.path", text) == 0
    assert held_out("default.toml", "--data.path", text, "--data.held_out", "0.2") == 0.2


@pytest.mark.parametrize("kind", ["local", "prepared", "streamed"])
def test_run_validates_on_what_it_holds_out(kind: str, tmp_path: Path, text: str) -> None:
    """Without another option, beside data of its own, and on any ranks."""
    path = str(source_of(kind, tmp_path, text).path)
    options = ["--data.path", path, "--data.held_out", "0.3", "--training.steps", "3", "--validation.interval", "2"]
    options += ["--data.label", "text"]
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
