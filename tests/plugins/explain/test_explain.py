"""torchtrain.explain lists the documents of a step, and their losses under the weights before it."""

import atexit
import gzip
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from data_samples import DOCUMENTS, TOKENIZER, make_loader, take, write_jsonl, write_tokens
from forked_command import run_command
from forked_run import CONFIG, different_tensors, logged_losses, patched_loss, read_metrics, saved_tensors
from parity import config_of

from torchtrain.config.parse import from_text
from torchtrain.config.run_plan import plan_of
from torchtrain.config.schema import JobConfig
from torchtrain.datasets.data_source import Place, text_hash
from torchtrain.datasets.dataloader import DataLoader
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.datasets.token_dataset import TokenDataset
from torchtrain.errors import ConfigError, DataError
from torchtrain.fault_tolerance.options import FaultsConfig
from torchtrain.labels import IGNORE_INDEX
from torchtrain.models.model_config import build_model_config
from torchtrain.models.spec import build_model
from torchtrain.plugins.explain.explanation import split_at
from torchtrain.plugins.explain.run import RunStep, on_one_rank, open_run, skip
from torchtrain.plugins.recheck.options import RecheckConfig
from torchtrain.plugins.remote_data.options import RemoteDataConfig
from torchtrain.plugins.report.options import ReportConfig

SMALL = [
    *("--model.shape.dim=32", "--model.shape.n_layers=2", "--model.shape.n_heads=4", "--model.shape.n_kv_heads=2"),
    *("--model.shape.ffn_dim=64", "--job.device=cpu"),
]
BAD_STEP = 7
PLANTED = 22  # the number of a document that is in this step
STREAMS = {"remote_data": RemoteDataConfig(streams=4)}
SCRIPT = "<script>alert('&')</script> "


def one(folder: Path, kind: str) -> SourceConfig:
    """A source with ``DOCUMENTS``, of which ``text_at`` finds each by its place."""
    folder.mkdir()
    if kind == "text":
        for number, text in enumerate(DOCUMENTS):
            (folder / f"{number:02}.txt").write_text(text)
        return SourceConfig(path=str(folder))
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        for number in (0, 1):
            table = pyarrow.table({"text": DOCUMENTS[number::2]})
            pyarrow.parquet.write_table(table, folder / f"{number}.parquet", row_group_size=7)
        return SourceConfig(path=f"file://{folder}")
    for number in (0, 1):
        write_jsonl(folder / f"{number}.jsonl", DOCUMENTS[number::2])
    if kind == "compressed":
        for path in folder.glob("*.jsonl"):
            path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    if kind == "tokens":
        return SourceConfig(path=write_tokens(folder / "tokens", str(folder / "*.jsonl")))
    return SourceConfig(path=f"{'' if kind == 'local' else 'file://'}{folder}")


@cache
def content_of(file: str) -> bytes:
    path = Path(file.removeprefix("file://"))
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def text_at(place: Place) -> str:
    """The document at ``place``, read without the package's own readers."""
    name, position = Path(place.file).name, place.position.split()
    if name.endswith(".txt"):
        assert not position
        return content_of(place.file).decode()
    if name.endswith(".parquet"):
        assert position[0] == "row"
        return DOCUMENTS[int(name[0]) :: 2][int(position[1])]
    if place.position.startswith("the line at byte"):
        line = content_of(place.file)[int(position[-1]) :].splitlines()[0]
    else:
        assert position[0] == "line"
        line = content_of(place.file).splitlines()[int(position[1]) - 1]
    text: str = json.loads(line)["text"]
    return text


def with_slow_kinds(kinds: Sequence[str], slow: Sequence[str]) -> list[Any]:
    """``kinds`` as parameters, of which ``slow`` are of slow tests: others have the same readers."""
    return [pytest.param(kind, marks=pytest.mark.slow) if kind in slow else kind for kind in kinds]


KINDS = ("local", "text", "tokens", "streamed", "parquet", "local tokens", "local once", "local packed")


@pytest.mark.parametrize("kinds", with_slow_kinds((*KINDS, "compressed"), ("local", "streamed", "local once")))
def test_pieces_of_a_row_are_its_tokens(kinds: str, tmp_path: Path) -> None:
    kinds, _, option = kinds.partition(" ") if kinds.endswith((" once", " packed")) else (kinds, "", "")
    once = option == "once"
    sources = [one(tmp_path / kind, kind) for kind in kinds.split()]
    exhausted: Literal["stop", "repeat"] = "stop" if once else "repeat"
    config = DataConfig(
        sources=tuple(sources),
        prefetch=0,
        document_mask=True,
        when_exhausted=exhausted,
        packing="best_fit" if option == "packed" else "cut",
    )
    loader, undisturbed = (make_loader(config, range(4), batch=4, plugins=STREAMS) for _ in range(2))
    files, documents = set(), []
    for _ in range(18 if once else 45):  # more than two epochs
        located, batch = loader.locate(), next(loader)
        assert torch.equal(batch.tokens, take(undisturbed, 1)[0])
        assert batch.sources is not None
        for row, pieces in enumerate(located):
            assert pieces is not None
            tokens: list[int] = []
            for piece in pieces:
                encoded = TOKENIZER.encode(text_at(piece.place), bos=True, eos=True)
                tokens += encoded[piece.offset : piece.offset + piece.tokens]
                files.add(piece.place.file)
                documents.append(piece.place)
                assert kinds.split()[int(batch.sources[row])] in piece.place.file
            window = [*batch.tokens[row].tolist(), int(batch.labels[row, -1])]
            assert tokens == window[: len(tokens)]
            assert (batch.labels[row, max(0, len(tokens) - 1) :] == IGNORE_INDEX).all()  # padding, or the end
            assert option or len(tokens) == len(window)
    loader.close()
    assert len(files) >= (60 if kinds == "text" else 2)
    if kinds != "local tokens" and not once:
        assert len(set(documents)) == len(DOCUMENTS)  # in each epoch the same places


@pytest.mark.parametrize("kinds", ["tokens", "tokens local", "tokens streamed"])
def test_batches_are_skipped_where_the_number_of_windows_is_the_position(kinds: str, tmp_path: Path) -> None:
    sources = [one(tmp_path / str(number), kind) for number, kind in enumerate(kinds.split())]
    sources[-1] = replace(sources[-1], weight=0.3)
    config = DataConfig(sources=tuple(sources), prefetch=0)
    skipping, reading = (make_loader(config, range(4), batch=4, plugins=STREAMS) for _ in range(2))
    take(skipping, 3)
    take(reading, 3 + 47)  # more than an epoch
    assert skip(skipping, 47) == ("streamed" not in kinds)
    if "streamed" not in kinds:
        assert torch.equal(skipping.state_dict()["rows"], reading.state_dict()["rows"])
        assert skipping.locate() == reading.locate()
        assert torch.equal(take(skipping, 5), take(reading, 5))


def test_a_stream_without_places_is_split_at_bos() -> None:
    window = torch.tensor([5, 1, 7, 8, 1, 9])
    pieces = split_at(window, 1, "a table")
    assert [piece.tokens for piece in pieces] == [1, 3, 2]
    assert pieces[0].place == Place("a table")
    assert [piece.tokens for piece in split_at(window, None, "a table")] == [6]


def bad_loss() -> None:
    """A hook that makes the loss of ``BAD_STEP``, with four microbatches a step, infinite in this process."""
    stack = ExitStack()
    stack.enter_context(patched_loss(lambda call, loss: loss * torch.inf if call == 4 * BAD_STEP else loss))
    atexit.register(stack.close)


def nothing() -> None:
    """No hook."""


def train(folder: Path, config: str, *options: str, ranks: int = 1, hook: Callable[[], None] = nothing) -> str:
    """Train a small model, and return the log."""
    file = folder.with_suffix(".toml")
    file.write_text(config)
    options = ("--job.config_file", str(file), "--job.dump_folder", str(folder), *SMALL, *options)
    result = run_command("torchtrain.train", *options, ranks=ranks, hook=hook)
    assert result.returncode == 0, result.stderr
    return result.stderr


def explain(run: Path, *options: str, code: int = 0) -> Any:
    """The JSON that ``torchtrain.explain`` prints, or its error."""
    result = run_command("torchtrain.explain", str(run), *options, *(["--json"] if code == 0 else []))
    assert result.returncode == code, result.stderr
    return json.loads(result.stdout) if code == 0 else result.stderr


def planted(folder: Path) -> str:
    """A file of similar documents, of which one is random characters."""
    letters = random.Random(0)
    texts = [f"{SCRIPT}the same few words, document {number % 4}. " * 2 for number in range(48)]
    texts[PLANTED] = "".join(chr(letters.randrange(0x400, 0x3000)) for _ in range(12))
    return write_jsonl(folder / "planted.jsonl", texts)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of eight steps with a checkpoint every two, whose step 7 is bad, and its log."""
    folder = tmp_path_factory.mktemp("explain")
    log = train(folder / "run", CONFIG, f"--data.path={planted(folder)}", hook=bad_loss)
    return folder / "run", log


def test_report_of_a_bad_step_names_the_command(run: tuple[Path, str]) -> None:
    folder, log = run
    line = next(line for line in log.splitlines() if f"step {BAD_STEP} is bad" in line)
    assert f"; its documents: python -m torchtrain.explain {folder} --step {BAD_STEP};" in line


@pytest.fixture(scope="module")
def fifth_step(run: tuple[Path, str]) -> dict[str, Any]:
    """The explanation of step 5 of the run, with all documents."""
    before = sorted(path for path in run[0].rglob("*"))
    found: dict[str, Any] = explain(run[0], "--step=5", "--top=1000")
    assert sorted(path for path in run[0].rglob("*")) == before
    return found


def test_losses_of_documents_are_those_of_plain_pytorch(
    run: tuple[Path, str], fifth_step: dict[str, Any], tmp_path: Path
) -> None:
    folder, found = run[0], fifth_step
    assert found["weights"] == {"checkpoint_step": 4, "replayed": 0, "exact": True}
    config = from_text((folder / "config.toml").read_text(), "config.toml")
    model = build_model(build_model_config(config.model, TOKENIZER, 32))
    model.init_buffers()
    shutil.copytree(folder / "checkpoint/step-4", tmp_path / "checkpoint/step-4")
    tensors = saved_tensors(tmp_path, 4)
    model.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
    loader = make_loader(config.data, range(4), batch=4)
    take(loader, 4)
    batch = next(loader)
    loader.close()
    with torch.no_grad():
        logits = model(batch.tokens)
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none").view(4, 32)
    assert len(found["documents"]) > 4
    for document in found["documents"]:
        begin, end = document["begin"], document["begin"] + document["tokens"]
        expected = losses[document["row"], max(0, begin - 1) : end - 1]  # the label of token t is token t + 1
        assert document["predicted"] == len(expected)
        assert document["loss_sum"] == pytest.approx(expected.sum().item(), rel=1e-5)
        assert document["loss"] == pytest.approx(expected.mean().item(), rel=1e-5)
    assert found["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
    assert found["loss"] == pytest.approx(logged_losses(folder)[5], rel=1e-6)
    scores = [of["score"] for of in found["documents"]]
    assert scores == sorted(scores, reverse=True)
    assert sum(of["size"] for of in found["documents"]) == pytest.approx(1)


def log_each_step() -> None:
    from torchtrain.plugins.explain import explanation

    explanation.SECONDS_PER_LINE = 0.0


def test_replay_restores_the_weights(run: tuple[Path, str], fifth_step: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    shutil.rmtree(folder / "checkpoint/step-4")
    options = ("--step=5", "--top=1000", "--json")
    result = run_command("torchtrain.explain", str(folder), *options, hook=log_each_step)
    found = json.loads(result.stdout)
    assert "before step 5: 2 steps after the checkpoint of step 2 will be trained again\n" in result.stderr
    assert re.findall(r"\d of 2 steps trained again", result.stderr) == ["1 of 2 steps trained again"]
    assert found["weights"] == {"checkpoint_step": 2, "replayed": 2, "exact": True}
    assert found["documents"] == fifth_step["documents"]
    first = explain(folder, "--step=1", "--rows", "0", "1", "2", "3")
    assert first["weights"] == {"checkpoint_step": 0, "replayed": 0, "exact": True}
    assert first["loss"] == pytest.approx(logged_losses(folder)[1], rel=1e-6)


def test_replay_on_another_device_is_not_exact(run: tuple[Path, str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    shutil.rmtree(folder / "checkpoint/step-4")
    metrics = folder / "metrics.jsonl"
    text = metrics.read_text()
    assert '"device": "cpu"' in text
    metrics.write_text(text.replace('"device": "cpu"', '"device": "cuda"'))
    assert "trained again, on another layout or device than the run, so that rounding may differ" in (
        run_command("torchtrain.explain", str(folder), "--step=5").stdout.replace("\n", " ")
    )


class Checkpoints:
    """A storage with checkpoints of these steps."""

    def __init__(self, *steps: int) -> None:
        self.saved = steps

    def steps(self) -> tuple[int, ...]:
        return self.saved


def step_of_run(folder: Path, config: JobConfig | None = None, step: int = 9) -> RunStep:
    config = config or JobConfig()
    storage: Any = Checkpoints(2, 5)
    return RunStep(folder, config, plan_of(config), storage, step, range(4), None)


def start_event(step: int, threads: int) -> dict[str, Any]:
    return {"step": step, "event": "start", "device": "cpu", "threads": threads, "torch": "2.13.0"}


@pytest.mark.parametrize(
    ("starts", "threads"),
    [
        ([(0, 1)], 1),
        ([(0, 1), (5, 4)], 4),  # its checkpoint is the last one
        ([(0, 1), (6, 4)], None),  # steps of both are trained again
        ([(0, 4), (7, 1), (6, 4)], 4),  # a start from step 6 undoes step 7 and later ones
        ([(0, 1), (9, 4)], 1),  # after the step
        ([], None),
    ],
)
def test_replay_takes_as_many_threads_as_the_run(
    starts: list[tuple[int, int]], threads: int | None, tmp_path: Path
) -> None:
    lines = [start_event(*start) for start in starts]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = step_of_run(tmp_path).trained_on
    assert found == ({} if threads is None else {"device": "cpu", "threads": threads, "torch": "2.13.0"})


@pytest.mark.parametrize(
    ("layout", "sums", "grains", "tied", "expected"),
    [
        ({}, "fast", 1, True, True),
        ({"data_parallel_shard_degree": 2}, "fast", 1, False, False),
        ({"data_parallel_shard_degree": 2}, "exact", 1, True, True),
        ({"tensor_parallel_degree": 2}, "exact", 1, False, False),
        ({"context_parallel_degree": 2}, "exact", 1, False, False),
        ({"context_parallel_degree": 2}, "exact", 4, True, True),
        ({"pipeline_parallel_degree": 2}, "exact", 1, False, True),
        ({"pipeline_parallel_degree": 2}, "exact", 1, True, False),
    ],
)
def test_layouts_with_the_bits_of_one_rank(
    layout: dict[str, Any], sums: Any, grains: int, tied: bool, expected: bool, tmp_path: Path
) -> None:
    layout = {"data_parallel_shard_degree": 1, **layout}
    config = config_of(parallelism=layout, training={"sums": sums}, grains={"context": grains})
    assert step_of_run(tmp_path, config).has_bits_of_one_rank(tied_embeddings=tied) == expected


def test_one_rank_has_the_microbatches_of_the_pipeline() -> None:
    layout = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatches": 2}
    config = config_of(parallelism=layout, training={"local_batch_size": 8})
    assert on_one_rank(config, "run").training.local_batch_size == 4
    layout["pipeline_parallel_microbatches"] = -1
    config = config_of(parallelism=layout, training={"local_batch_size": 8})
    assert on_one_rank(config, "run").training.local_batch_size == 1
    assert on_one_rank(config_of(training={"local_batch_size": 8}), "run").training.local_batch_size == 8


@pytest.mark.parametrize("sums", ["fast", pytest.param("exact", marks=pytest.mark.slow)])
def test_gradients_of_rows_add_up_to_that_of_the_step(sums: str, run: tuple[Path, str], tmp_path: Path) -> None:
    options = [f"--data.path={run[0].parent / 'planted.jsonl'}", "--training.steps=3", f"--training.sums={sums}"]
    train(tmp_path / "run", CONFIG, *options, "--training.z_loss_weight=1e-3")
    line = next(line for line in read_metrics(tmp_path / "run") if line["step"] == 3 and "grad_norm" in line)
    explained = explain(tmp_path / "run", "--step=3", "--gradients", "--top=1000")
    found, documents = explained["gradients"], explained["documents"]
    assert [of["row"] for of in found] == [0, 1, 2, 3]
    assert sum(of["share"] for of in found) == pytest.approx(1, rel=1e-6)  # the sum is in float32
    # The product of a gradient and the whole is at most that of their norms.
    bounds = [of["share"] * line["grad_norm"] / of["norm"] for of in found]
    assert max(map(abs, bounds)) <= 1 + 1e-6
    (one,) = explain(tmp_path / "run", "--step=3", "--gradients", "--rows=2")["gradients"]
    assert one == found[2]
    assert len({document["row"] for document in documents}) == len(found) < len(documents)
    for of in found:
        shares = [document["gradient_share"] for document in documents if document["row"] == of["row"]]
        assert sum(shares) == pytest.approx(of["share"], rel=1e-4, abs=1e-6)
    compared = explain(tmp_path / "run", "--step=3", "--top=1000", "--without-gradients")["documents"]
    assert {document["gradient_share"] for document in compared} == {None}
    signals = {(document["row"], document["begin"]): document["signals"] for document in documents}
    assert signals == {(document["row"], document["begin"]): document["signals"] for document in compared}


def test_the_gradient_of_a_single_row_is_that_of_the_step(run: tuple[Path, str], tmp_path: Path) -> None:
    options = [f"--data.path={run[0].parent / 'planted.jsonl'}", "--training.steps=1", "--training.global_batch_size=1"]
    train(tmp_path / "run", CONFIG, *options)
    line = next(line for line in read_metrics(tmp_path / "run") if line["step"] == 1 and "grad_norm" in line)
    (of_row,) = explain(tmp_path / "run", "--step=1", "--gradients")["gradients"]
    assert of_row == {"row": 0, "norm": pytest.approx(line["grad_norm"], rel=1e-6), "share": pytest.approx(1)}
    text = run_command("torchtrain.explain", str(tmp_path / "run"), "--step=1", "--gradients").stdout
    assert f"row 0: gradient norm {line['grad_norm']:.4g}, 100.0% of the step's gradient" in text


def test_a_planted_document_comes_first(run: tuple[Path, str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    top = explain(run[0], f"--step={BAD_STEP}", "--top=2", f"--html={page}")["documents"]
    assert len(top) == 2
    assert top[0]["position"] == f"line {PLANTED + 1}"
    assert top[0]["file"].endswith("planted.jsonl")
    assert top[0]["source"] == "planted"
    assert top[0]["loss"] > 2 * top[1]["loss"]
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;" in text
    assert text.count("<p>") == 2
    assert f"<h2>1. score {top[0]['score']:.1f}, " in text
    assert f", {top[0]['gradient_share']:.1%} of the gradient: row " in text
    assert 'src="' not in text
    assert f"<title>run, step {BAD_STEP}</title>" in text
    assert f"<h1>run, step {BAD_STEP}</h1>" in text
    assert str(run[0]) not in text
    assert "its tokens are rare in other documents" in top[0]["reasons"]


def test_a_repeated_word_comes_first_and_the_columns_disagree(tmp_path: Path) -> None:
    choice = random.Random(0)
    words = ["import", "return", "class", "self", "value", "index", "error", "string", "file", "list", "number", "test"]
    texts = [" ".join(choice.choices(words, k=24)) for _ in range(48)]
    texts[20] = "value " * 40
    train(tmp_path / "run", CONFIG, f"--data.path={write_jsonl(tmp_path / 'words.jsonl', texts)}")
    config = from_text((tmp_path / "run/config.toml").read_text(), "config.toml")
    loader = make_loader(replace(config.data, prefetch=0), range(4), batch=4)
    steps = []
    for step in range(1, 9):
        pieces = [piece for row in loader.locate() for piece in row or ()]
        steps += [step] * sum(piece.tokens > 20 and piece.place.position == "line 21" for piece in pieces)
        next(loader)
    loader.close()
    result = run_command("torchtrain.explain", str(tmp_path / "run"), f"--step={steps[-1]}")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert max(map(len, lines[:6])) <= 80
    assert re.fullmatch(r"listed by score; the columns disagree: number \d+ is first by mean loss", lines[2])
    assert re.match(r"  1 +\d+\.\d  \d\.\d{3}", lines[4])
    assert "it repeats itself" in lines[5]
    assert any(re.search(r", line 21[:,] ", line) for line in lines[6:8]), lines
    documents = explain(tmp_path / "run", f"--step={steps[-1]}")["documents"]
    assert documents[0]["gradient_share"] == max(of["gradient_share"] for of in documents) > 2 * documents[0]["size"]
    assert documents[0]["loss"] < max(of["loss"] for of in documents)


def test_a_file_name_that_is_not_utf8_is_shown_with_an_escape(tmp_path: Path) -> None:
    data, page, exclude = tmp_path / "data", tmp_path / "page.html", tmp_path / "list.jsonl"
    data.mkdir()
    write_jsonl(data / os.fsdecode(b"caf\xe9.jsonl"), DOCUMENTS)
    train(tmp_path / "run", CONFIG, f"--data.path={data}", "--training.steps=1")
    options = ("--step=1", "--top=1", f"--html={page}", f"--exclude_to={exclude}")
    result = run_command("torchtrain.explain", str(tmp_path / "run"), *options)
    assert result.returncode == 0, result.stderr
    assert r"caf\udce9.jsonl" in result.stdout
    assert r"caf\udce9.jsonl" in page.read_text(encoding="utf-8")
    listed = json.loads(exclude.read_text())
    assert os.fsencode(listed["file"]).endswith(b"caf\xe9.jsonl")
    assert listed["text_hash"] in map(text_hash, DOCUMENTS)


def test_the_last_step_of_data_that_end_is_explained_and_no_step_after_it(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl", DOCUMENTS[:12])
    train(tmp_path / "run", CONFIG, f"--data.path={data}", "--data.when_exhausted=stop", "--training.steps=100")
    losses = logged_losses(tmp_path / "run")
    found = explain(tmp_path / "run", f"--step={max(losses)}")
    assert found["loss"] == pytest.approx(losses[max(losses)], rel=1e-6)
    message = explain(tmp_path / "run", f"--step={max(losses) + 1}", code=2)
    assert f"the data end before step {max(losses) + 1}: step {max(losses)} is the last one" in message


def test_stages_and_ranks(tmp_path: Path) -> None:
    sources = [one(tmp_path / kind, kind) for kind in ("local", "streamed", "tokens")]
    config = (
        '[training]\nseq_len = 32\nglobal_batch_size = 4\nlocal_batch_size = 1\nmixed_precision_param = "float32"\n'
        "[metrics]\nlog_freq = 1\n[checkpoint]\ninterval = 2\n[remote_data]\nstreams = 4\n"
        + "".join(f'[[data.sources]]\npath = "{source.path}"\n' for source in sources)
        + '[[stages]]\nname = "first"\nsteps = 3\n'
        '[[stages]]\nname = "second"\nsteps = 3\ntraining.seq_len = 64\ntraining.global_batch_size = 8\n'
        "data.document_mask = true\n"
    )
    folder = tmp_path / "run"
    train(folder, config, "--report.no-enable", ranks=2)
    losses = logged_losses(folder)
    for step, replayed, exact, rows in ((3, 0, True, 4), (4, 0, True, 8), (6, 1, False, 8)):
        if step == 6:
            shutil.rmtree(folder / "checkpoint/step-4")
            replayed = 2
        found = explain(folder, f"--step={step}")
        assert found["weights"]["replayed"] == replayed
        assert found["weights"]["exact"] == exact
        assert len(found["rows"]) == rows
        assert found["loss"] == pytest.approx(losses[step], rel=1e-4)
    shutil.rmtree(folder / "checkpoint/step-3")
    shutil.rmtree(folder / "checkpoint/step-2")
    assert "its weights cannot be restored" in explain(folder, "--step=5", code=2)
    without = explain(folder, "--step=6", "--without-weights")  # through both stages
    assert without["weights"] is None
    of_rows = {(of["row"], of["begin"]): of["text"] for of in without["documents"]}
    assert [of for of in found["documents"] if of_rows[of["row"], of["begin"]] != of["text"]] == []


def test_errors(run: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = run
    assert "is not the folder of a run" in explain(tmp_path, "--step=1", code=2)
    assert "exclude each other" in explain(folder, "--step=1", "--gradients", "--without-gradients", code=2)
    for arguments, message in {
        (str(folder), 0, ()): r"--step 0 must be from 1 to 8, the last step of the run",
        (str(folder), 9, ()): r"--step 9 must be from 1 to 8",
        (str(folder), 3, (1, 4)): r"--rows 4 must be from 0 to 3, the last row",
        ("s3://bucket/run", 1, ()): r"is a URL",
    }.items():
        with pytest.raises(ConfigError, match=message):
            open_run(*arguments)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = (copy / "config.toml").read_text()
    write_jsonl(tmp_path / "other.jsonl", DOCUMENTS)
    assert "the data are not those" not in explain(copy, "--step=7", "--without-weights")
    shutil.rmtree(copy / "checkpoint/step-8")  # else that has the config of step 7
    path = from_text(config, "config.toml").data.path
    (copy / "config.toml").write_text(config.replace(str(path), str(tmp_path / "other.jsonl")))
    assert "the data are not those of the checkpoint of step 6 any more" in explain(
        copy, "--step=7", "--without-weights", code=2
    )


@pytest.mark.parametrize("kinds", with_slow_kinds(KINDS, ("local", "text", "tokens", "streamed", "local once")))
def test_excluded_documents_are_masked_where_they_are(kinds: str, tmp_path: Path) -> None:
    kinds, _, option = kinds.partition(" ") if kinds.endswith((" once", " packed")) else (kinds, "", "")
    once = option == "once"
    config = DataConfig(
        sources=tuple(one(tmp_path / kind, kind) for kind in kinds.split()),
        prefetch=0,
        document_mask=True,
        when_exhausted="stop" if once else "repeat",
        packing="best_fit" if option == "packed" else "cut",
    )

    def opened(config: DataConfig, rows: range = range(4)) -> DataLoader:
        return make_loader(config, rows, batch=4, plugins=STREAMS)

    loader = opened(config)
    pieces = [piece for row in loader.locate() for piece in row or ()][::3]
    assert [piece for piece in pieces if piece.text_hash != text_hash(text_at(piece.place))] == []
    lines = [{"text_hash": piece.text_hash, **vars(piece.place)} for piece in pieces]
    (tmp_path / "exclude.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    changed = replace(config, exclude=str(tmp_path / "exclude.jsonl"))
    without, resumed = opened(changed), opened(changed)
    parts = [opened(changed, rows) for rows in (range(2), range(2, 4))]
    excluded, met = {piece.text_hash for piece in pieces}, 0
    for step in range(15 if once else 45):  # more than two epochs
        located, expected = loader.locate(), next(loader)
        windows = torch.cat((expected.tokens, expected.labels[:, -1:]), dim=1)
        is_excluded = torch.zeros_like(windows, dtype=torch.bool)
        for row, of_row in enumerate(located):
            begin = 0
            for piece in of_row or ():
                is_excluded[row, begin : begin + piece.tokens] = piece.text_hash in excluded
                met += piece.text_hash in excluded
                begin += piece.tokens
        assert TOKENIZER.eos_id is not None
        resumed.load_state_dict(without.state_dict())
        batch, of_parts, again = next(without), [next(part) for part in parts], next(resumed)
        assert torch.equal(batch.tokens, expected.tokens.masked_fill(is_excluded[:, :-1], TOKENIZER.eos_id))
        assert torch.equal(batch.labels, expected.labels.masked_fill(is_excluded[:, 1:], IGNORE_INDEX)), step
        assert torch.equal(batch.labels, torch.cat([part.labels for part in of_parts]))
        assert torch.equal(batch.labels, again.labels)
    assert met >= len(pieces) + (not once)  # also in later epochs
    for each in (loader, without, resumed, *parts):
        each.close()


def test_a_run_without_a_document_is_the_same_from_its_start_and_from_a_checkpoint(
    run: tuple[Path, str], tmp_path: Path
) -> None:
    exclude = tmp_path / "exclude.jsonl"
    folder, config = run[0], CONFIG.replace("[checkpoint]", '[checkpoint]\nallow_changes = ["data.exclude"]')
    (planted,) = explain(folder, f"--step={BAD_STEP}", "--top=1", f"--exclude-to={exclude}")["documents"]
    assert json.loads(exclude.read_text())["text_hash"] == planted["text_hash"] != ""
    data = [f"--data.path={run[0].parent / 'planted.jsonl'}", f"--data.exclude={exclude}"]
    # The document begins in step 6.
    steps = ["--training.steps=4", "--lr_scheduler.total_steps=8"]
    train(tmp_path / "resumed", CONFIG, data[0], *steps)
    log = train(tmp_path / "resumed", config, *data, "--lr_scheduler.total_steps=8")
    assert "leaves out 1 document(s) of data.exclude" in log
    train(tmp_path / "whole", CONFIG, *data)
    assert different_tensors(saved_tensors(tmp_path / "resumed", 8), saved_tensors(tmp_path / "whole", 8)) == []
    changed, before = logged_losses(tmp_path / "whole"), logged_losses(folder)
    assert [changed[step] == before[step] for step in range(1, 7)] == [True] * 5 + [False]
    listed = explain(tmp_path / "whole", f"--step={BAD_STEP}", "--top=1000")["documents"]
    assert planted["position"] not in {document["position"] for document in listed}
    assert len(listed) > 1
    # Another list is another run, and the same one elsewhere is not.
    shutil.copy(exclude, tmp_path / "elsewhere.jsonl")
    train(tmp_path / "whole", CONFIG, data[0], f"--data.exclude={tmp_path / 'elsewhere.jsonl'}")
    exclude.write_text("")
    options = ("--job.config_file", str(tmp_path / "whole.toml"), "--job.dump_folder", str(tmp_path / "whole"), *SMALL)
    result = run_command("torchtrain.train", *options, *data)
    assert result.returncode == 2
    assert re.search(r"data\.exclude = .*0 documents, hash .* \(checkpoint: '1 documents", result.stderr), result.stderr


def test_errors_of_excluded_documents(tmp_path: Path) -> None:
    source = one(tmp_path / "tokens", "tokens")
    for lines, message in {
        None: r"data\.exclude = '.*' is not a file",
        "{": r"data\.exclude = '.*', line 1",
        '\n{"text": "word"}': r"line 2: .* is no document, an object with a text_hash of",
        "[1]": "line 1: .* is no document",
        '{"text_hash": "ABC"}': "line 1: .* is no document",
        '{"file": "texts.jsonl", "position": "line 1"}': "line 1: .* is no document",
    }.items():
        exclude = tmp_path / "exclude.jsonl"
        exclude.unlink(missing_ok=True)
        if lines is not None:
            exclude.write_text(lines)
        with pytest.raises(DataError, match=message):
            make_loader(DataConfig(path=source.path, exclude=str(exclude)))
    # Characters that end a line of text, but not one of JSON lines.
    exclude.write_text(json.dumps({"text": "a\u2028b\x85c", "text_hash": "0" * 32}, ensure_ascii=False))
    with (
        patch.object(TokenDataset, "can_exclude", False),
        pytest.raises(DataError, match=r"data\.exclude = .* needs text, and data is TokenDataset"),
    ):
        make_loader(DataConfig(path=source.path, exclude=str(exclude)))


def test_stages_may_leave_out_other_documents(tmp_path: Path) -> None:
    source = one(tmp_path / "local", "local")
    for name, texts in {"first": DOCUMENTS[:2], "second": DOCUMENTS[:1]}.items():
        lines = [json.dumps({"text_hash": text_hash(text)}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    stages = "".join(
        f'[[stages]]\nname = "{name}"\nsteps = 2\ndata.exclude = "{tmp_path / name}.jsonl"\n'
        for name in ("first", "second")
    )
    config = CONFIG.replace("steps = 8\n", "")
    train(tmp_path / "run", config + stages, f"--data.path={source.path}", "--report.no-enable")
    assert max(logged_losses(tmp_path / "run")) == 4
    (tmp_path / "second.jsonl").write_text("")
    message = explain(tmp_path / "run", "--step=4", "--without-weights", code=2)
    assert "data.exclude names other documents than the first checkpoint after step 3: 0 documents, hash" in message
    packed = stages.replace("data.exclude =", 'data.packing = "best_fit"\ndata.exclude =', 1)
    options = [*SMALL, f"--data.path={source.path}", f"--job.dump_folder={tmp_path / 'packed'}"]
    (tmp_path / "packed.toml").write_text(config + packed)
    result = run_command("torchtrain.train", "--job.config_file", str(tmp_path / "packed.toml"), *options)
    assert result.returncode == 2
    assert "data.packing must not differ between stages: the position in the data depends on it" in result.stderr


def test_a_step_without_any_other_document_is_bad(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl", ["a single document of a few words"])
    (tmp_path / "exclude.jsonl").write_text(json.dumps({"text_hash": text_hash("a single document of a few words")}))
    options = ["--training.steps=2", "--training.seq_len=8", f"--data.exclude={tmp_path / 'exclude.jsonl'}"]
    log = train(tmp_path / "run", CONFIG, f"--data.path={data}", *options)
    words = "is bad (loss nan, gradient norm 0): it has no token to predict"
    assert [step for step in (1, 2) if f"step {step} {words}" not in log] == [], log
    assert logged_losses(tmp_path / "run") == {1: None, 2: None}


def test_steps_are_trained_again_in_the_same_order_without_plugins_that_only_watch() -> None:
    cached = RemoteDataConfig(cache_folder="cache")
    config = replace(JobConfig(), plugins={"recheck": RecheckConfig(interval=10), "remote_data": cached})
    again = on_one_rank(config, "folder")
    assert again.plugins == {"report": ReportConfig(enable=False), "remote_data": cached}
    assert again.data.longest_seq_len == config.training.seq_len
    longer = replace(config, data=replace(config.data, longest_seq_len=2**20))
    assert on_one_rank(longer, "folder").data.longest_seq_len == 2**20


@pytest.mark.parametrize("policy", ["skip", "rollback", "stop"])
def test_steps_that_were_bad_are_skipped_when_they_are_trained_again(policy: Any) -> None:
    """Whatever the run did: a rollback of the run has a checkpoint of its own."""
    faults = FaultsConfig(on_nonfinite=policy, max_bad_steps=1, spike_threshold=6.0)
    again = on_one_rank(replace(JobConfig(), faults=faults), "folder").faults
    assert (again.on_nonfinite, again.spike_threshold) == ("skip", 6.0)
    assert again.max_bad_steps > 10**9
