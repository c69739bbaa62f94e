"""Validation: the loss per token of the complete set, on every layout, with sets of any size; bits per byte."""

import io
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import sentencepiece
import torch
from captured_log import captured_log
from data_samples import DOCUMENTS, TOKENIZER, write_jsonl, write_tokens
from forked_command import checked_command
from forked_run import ForkedRun, finish, read_metrics
from gloo_pool import GlooPool
from json_tokenizers import BOS, EOS, byte_level, save_tokenizer
from parity import TINY, use_existing_process_group
from tokenizers import normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torchtrain.checkpoint.options import CheckpointConfig
from torchtrain.checkpoint.states import flatten
from torchtrain.config.schema import JobConfig, TrainingConfig
from torchtrain.datasets.build import build_dataloader
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.distributed.mesh import local
from torchtrain.errors import ConfigError, DataError
from torchtrain.metrics.hooks import Hook, Hooks, Watched
from torchtrain.metrics.options import ValidationConfig
from torchtrain.metrics.run_description import warn_about_validation
from torchtrain.metrics.validation import Validator, results_of
from torchtrain.optimizers.options import EMAConfig
from torchtrain.parallelisms.options import ParallelismConfig
from torchtrain.trainer import Trainer

SEQ_LEN = 32


def validate(config: JobConfig) -> list[tuple[int, dict[str, float]]]:
    """Validate twice with a ``Trainer`` on this process group; return the reports."""

    with use_existing_process_group(TINY):
        trainer = Trainer(config)
    reports: list[tuple[int, dict[str, float]]] = []
    validator = Validator(
        config.validation,
        trainer.validation_loaders,
        trainer.model,
        trainer.train_step.microbatches,
        lambda step, results: reports.append((step, results)),
        must_stop=lambda: False,
        watch=lambda _: nullcontext(),
    )
    for step in range(1, 5):
        validator.maybe_run(step, last=step == 3)
    trainer.dataloader.close()
    trainer.checkpointer.close()
    return reports


def config_of(folder: Path, rows: int = 8, **parallelism: Any) -> JobConfig:
    return JobConfig(
        training=TrainingConfig(
            local_batch_size=rows,
            global_batch_size=8,
            seq_len=SEQ_LEN,
            mixed_precision_param="float32",
            loss_chunk_tokens=0,
            seed=5,
        ),
        data=DataConfig(prefetch=0),
        parallelism=ParallelismConfig(**parallelism),
        checkpoint=CheckpointConfig(enable=False),
        validation=ValidationConfig(
            enable=True,
            interval=4,
            sources=(SourceConfig(path=str(folder / "text.jsonl")), SourceConfig(path=str(folder / "tokens"))),
        ),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validation")
    write_jsonl(folder / "text.jsonl", DOCUMENTS[:37])
    write_tokens(folder / "tokens", write_jsonl(folder / "more.jsonl", [*DOCUMENTS[37:], None]))
    return folder


@pytest.fixture(scope="module")
def reference(gloo: GlooPool, folder: Path) -> list[tuple[int, dict[str, float]]]:
    return gloo.run(1, validate, config_of(folder))[0]  # type: ignore[no-any-return]


def test_every_token_of_the_set_counts_once(reference: list[tuple[int, dict[str, float]]]) -> None:
    assert [step for step, _ in reference] == [3, 4]  # the last step, and a multiple of the interval
    assert reference[0][1] == reference[1][1]  # each validation starts at the beginning of the data
    results = reference[0][1]

    def tokens_of(documents: list[str]) -> int:
        return sum(len(TOKENIZER.encode(text, bos=True, eos=True)) for text in documents)

    # The first token is not predicted.
    assert results["validation_tokens_text"] == tokens_of(DOCUMENTS[:37]) - 1
    assert results["validation_tokens_tokens"] == tokens_of(DOCUMENTS[37:]) - 1
    assert results["validation_tokens_text"] % SEQ_LEN
    parts = [
        (results[f"validation_tokens_{label}"], results[f"validation_loss_{label}"]) for label in ("text", "tokens")
    ]
    tokens = sum(number for number, _ in parts)
    assert results["validation_tokens"] == tokens
    assert results["validation_loss"] == pytest.approx(sum(number * loss for number, loss in parts) / tokens, rel=1e-9)
    assert results["validation_perplexity"] == pytest.approx(math.exp(results["validation_loss"]))
    size = sum(len(text.encode()) for text in DOCUMENTS)
    bits = results["validation_loss"] * tokens / math.log(2) / size
    assert results["validation_bits_per_byte"] == pytest.approx(bits, rel=1e-9)


@pytest.mark.parametrize(
    ("ranks", "rows", "parallelism"),
    [
        pytest.param(1, 2, {}, marks=pytest.mark.slow),
        (2, 4, {}),
        pytest.param(4, 1, {}, marks=pytest.mark.slow),
        (2, 8, {"tensor_parallel_degree": 2}),
        pytest.param(2, 8, {"context_parallel_degree": 2}, marks=pytest.mark.slow),
        pytest.param(2, 8, {"pipeline_parallel_degree": 2}, marks=pytest.mark.slow),
        (2, 8, {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"}),
        pytest.param(
            2,
            8,
            {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            8,
            {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": "Interleaved1F1B",
                "tensor_parallel_degree": 2,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_every_layout_has_the_same_results(
    gloo: GlooPool,
    folder: Path,
    reference: list[tuple[int, dict[str, float]]],
    ranks: int,
    rows: int,
    parallelism: dict[str, Any],
) -> None:
    for reports in gloo.run(ranks, validate, config_of(folder, rows, **parallelism)):
        for (step, results), (expected_step, expected) in zip(reports, reference, strict=True):
            assert step == expected_step
            assert results == pytest.approx(expected, rel=1e-6)


def weights_are_restored(config: JobConfig, ends_by_error: bool) -> bool:
    """Return whether parameters and averages are unchanged by a validation of the averages that ends before its end."""
    with use_existing_process_group(TINY):
        trainer = Trainer(config)
    assert trainer.ema is not None
    for average in trainer.ema.averages.values():
        average += 1.0
    before = {name: local(tensor).clone() for name, tensor in flatten(trainer.checkpointer.states).items()}
    calls = count()

    def stop_in_the_second_batch() -> bool:
        second = next(calls) == 1
        if second and ends_by_error:
            raise DataError("no more data")
        return second

    validator = Validator(
        config.validation,
        trainer.validation_loaders,
        trainer.model,
        trainer.train_step.microbatches,
        lambda *_: None,
        averaged=trainer.averaged_weights,
        must_stop=stop_in_the_second_batch,
        watch=lambda _: nullcontext(),
    )
    with pytest.raises(DataError) if ends_by_error else nullcontext():
        validator.maybe_run(1, last=True)
    assert next(calls) == 2
    after = flatten(trainer.checkpointer.states)
    trainer.dataloader.close()
    trainer.checkpointer.close()
    return all(torch.equal(local(after[name]), tensor) for name, tensor in before.items())


@pytest.mark.parametrize("ends_by_error", [pytest.param(False, marks=pytest.mark.slow), True], ids=["stop", "error"])
def test_validation_of_averaged_weights_that_ends_early_restores_the_weights(
    gloo: GlooPool, folder: Path, ends_by_error: bool
) -> None:
    config = config_of(folder, rows=1)
    config = replace(config, ema=EMAConfig(enable=True), validation=replace(config.validation, weights="ema"))
    assert gloo.run(2, weights_are_restored, config, ends_by_error) == [True, True]


TEXTS = [
    *DOCUMENTS[:9],
    " begins with a space",
    "\tand with a tab, Größe ﬁﬂ ½ Å e\u0301",
    "  two  spaces \u2581 and  its sign \ud800",
    "あいう 中文 \U0001f642",
    "\u4e2d\u6587",
    "a" * 300,
]


def save_sentencepiece(folder: Path, **options: Any) -> Path:
    """Save a SentencePiece model that is trained on text without spaces, so that it has no piece for them."""
    folder.mkdir()
    model = io.BytesIO()
    words = [word for text in DOCUMENTS for word in text.split()]
    fixed = {"vocab_size": 300, "hard_vocab_limit": False, "minloglevel": 2, "add_dummy_prefix": False}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(words), model_writer=model, **{**fixed, **options})
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder


def save_byte_level(folder: Path, *, prefix: bool, bos: str, eos: str) -> Path:
    """Save a byte-level BPE tokenizer with transformers; ``prefix``: whether it prepends a space to each text."""
    library = byte_level()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    library.normalizer = normalizers.NFKC()
    PreTrainedTokenizerFast(tokenizer_object=library, bos_token=bos, eos_token=eos).save_pretrained(folder)
    return folder


BYTE_TOKENIZERS: dict[str, Callable[[Path], Path]] = {
    "adds a space": lambda folder: save_byte_level(folder, prefix=True, bos=BOS, eos=EOS),
    "adds a space, bos is eos": lambda folder: save_byte_level(folder, prefix=True, bos=EOS, eos=EOS),
    "NFKC": lambda folder: save_byte_level(folder, prefix=False, bos=BOS, eos=EOS),
    "metaspace": lambda folder: save_tokenizer(folder, "metaspace BPE"),
    "unigram with unknown characters": lambda folder: save_tokenizer(folder, "unigram"),
    "no piece for spaces": lambda folder: save_sentencepiece(folder),
    "no piece for spaces, bytes": lambda folder: save_sentencepiece(folder, byte_fallback=True, vocab_size=600),
    "spaces removed": lambda folder: save_sentencepiece(folder, add_dummy_prefix=True, remove_extra_whitespaces=True),
    "no bos": lambda folder: save_sentencepiece(folder, bos_id=-1),
}


@pytest.mark.parametrize("kind", BYTE_TOKENIZERS)
def test_bits_per_byte_count_the_bytes_of_the_documents(tmp_path: Path, kind: str) -> None:
    """Also for tokenizers that add, remove or normalize characters; in many windows, and in a single one."""
    path = str(BYTE_TOKENIZERS[kind](tmp_path / "tokenizer"))
    tokenizer = load_tokenizer(path)
    write_jsonl(tmp_path / "text.jsonl", TEXTS)
    exact = [len(text.encode("utf-8", "replace")) for text in TEXTS]
    for seq_len in (16, 8192):
        loader = build_dataloader(
            DataConfig(path=str(tmp_path / "text.jsonl"), when_exhausted="stop", prefetch=0),
            tokenizer,
            seq_len=seq_len,
            global_batch_size=1,
            rows=range(1),
            seed=3,
            device=torch.device("cpu"),
            drop_last=False,
            count_bytes=True,
        )
        labels, sizes = [], []
        for batch in loader:
            assert batch.label_bytes is not None
            known = batch.labels >= 0
            labels += batch.labels[known].tolist()
            sizes += batch.label_bytes[known].tolist()
        # The first token is not predicted. Without bos it has bytes, which are not counted.
        missing = sum(exact) - sum(sizes)
        assert -1e-9 < missing < (max(exact) if tokenizer.bos_id is None else 1e-9), seq_len
    if tokenizer.bos_id is not None:  # of the single window, which has the documents one after the other
        number = np.cumsum(np.array(labels) == tokenizer.bos_id)
        assert np.bincount(number, weights=sizes).tolist() == pytest.approx(exact, rel=1e-12)


def test_validation_requires_its_own_data_with_different_names() -> None:
    with pytest.raises(
        ConfigError, match=r"validation.enable = true needs data to validate on: .* set data.held_out alone"
    ):
        JobConfig(validation=ValidationConfig(enable=True))
    with pytest.raises(ConfigError, match=r"must differ in label, by default the name.*; they are a, a"):
        ValidationConfig(enable=True, sources=(SourceConfig(path="x/a.jsonl"), SourceConfig(path="y/a.txt")))


def test_validation_data_without_text_raise_a_data_error(gloo: GlooPool, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "text.jsonl", [None])
    config = config_of(tmp_path)
    validation = ValidationConfig(enable=True, path=str(tmp_path / "text.jsonl"))
    config = replace(config, validation=validation, training=replace(config.training, local_batch_size=4))
    assert gloo.run(2, raises_data_error, config) == [True, True]


def test_perplexity_of_a_large_loss_is_infinite() -> None:
    results = results_of(torch.tensor([8000.0, 10.0, 20.0], dtype=torch.float64), "validation", "")
    assert (results["validation_loss"], results["validation_perplexity"]) == (800.0, math.inf)
    results = results_of(torch.tensor([math.nan, 10.0, 20.0], dtype=torch.float64), "validation", "")
    assert math.isnan(results["validation_perplexity"])


def raises_data_error(config: JobConfig) -> bool:
    try:
        validate(config)
    except DataError as error:
        return "has no text in its 1 document" in str(error)
    return False


def test_data_that_are_named_in_vain_are_a_warning() -> None:
    named = JobConfig(validation=ValidationConfig(path="texts.jsonl"))
    with captured_log() as log:
        warn_about_validation(JobConfig().validation)
        warn_about_validation(replace(named.validation, enable=True))
        assert log == []
        warn_about_validation(named.validation)
    assert "[validation] names data, and validation.enable is false" in "".join(log)


def test_train_command_validates_and_logs_the_results(folder: Path, tmp_path: Path) -> None:
    options = [
        *("--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder", str(tmp_path)),
        *("--training.steps", "3", "--training.seq_len", "64", "--training.local_batch_size", "2"),
        *("--validation.enable", "--validation.path", str(folder / "text.jsonl"), "--validation.interval", "2"),
        *("--validation.steps", "1", "--data.held_out", "0", "--data.document_mask", "--checkpoint.no-enable"),
        *("--model.shape.n_layers", "1", "--model.shape.dim", "64", "--model.shape.ffn_dim", "128"),
    ]
    checked_command("torchtrain.train", *options)
    results = {line["step"]: line for line in read_metrics(tmp_path) if "validation_loss" in line}
    assert list(results) == [2, 3]
    assert results[3]["validation_tokens"] <= 2 * 64  # one batch
    assert 3 < results[3]["validation_loss"] < 12


def test_run_ends_at_the_end_of_the_data(tmp_path: Path) -> None:
    options = options_of_little_data(tmp_path)
    assert "the data end" in finish(tmp_path / "run", *options, ranks=2)
    finish(tmp_path / "run", *options, ranks=1)  # nothing is left to do
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "validation_loss" in line] == [max(line["step"] for line in lines)]

    run = ForkedRun(tmp_path / "none", *options, "--training.global_batch_size", "64", ranks=1)
    assert run.wait() == [2]
    assert "error: the data do not fill one batch" in run.output()


def options_of_little_data(tmp_path: Path) -> list[str]:
    """Options of a run that ends with its data."""
    write_jsonl(tmp_path / "few.jsonl", DOCUMENTS[:20])
    return [
        *("--data.path", str(tmp_path / "few.jsonl"), "--data.when_exhausted", "stop"),
        *("--validation.enable", "--validation.path", str(tmp_path / "few.jsonl"), "--training.steps", "99"),
    ]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"validation_x": torch.tensor(1.5)}, "Mist.validate returned a Tensor as validation_x: give a number"),
        ({"validation_samples": "text"}, "Mist.validate returned a str as validation_samples"),
        (
            {"validation_loss": 1.0},
            "Mist.validate returned validation_loss: begin names with validation_, each its own",
        ),
        ({"mine": 1.0}, "Mist.validate returned mine: begin names with validation_"),
    ],
)
def test_wrong_results_of_a_hook_are_rejected(found: dict[str, Any], message: str) -> None:
    """Otherwise the line of the validation is lost, or the loss in it is another number."""

    class Mist(Hook):
        def validate(self, step: int, prefix: str, watched: Watched) -> dict[str, Any]:  # noqa: ARG002
            return found

    validator = Validator(
        ValidationConfig(),
        {},
        MagicMock(),
        MagicMock(),
        MagicMock(),
        must_stop=lambda: False,
        watch=lambda _: nullcontext(),
        hooks=Hooks(Mist()),
    )
    with (
        patch.object(Validator, "_sums", lambda *_: torch.ones(3)),
        patch.object(validator, "loaders", {"text": MagicMock()}),
        patch.object(validator, "beginnings", {"text": {}}),
        pytest.raises(TypeError, match=re.escape(message)),
    ):
        validator.maybe_run(1, last=True)
