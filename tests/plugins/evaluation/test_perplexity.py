"""torchtrain.perplexity computes the loss that transformers has on the same windows of an exported model."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked_command import checked_command, run_command

from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.plugins.evaluation import perplexity_command

TEXTS = [f"def f{n}(x):\n    return x * {n}  # naïve\n" * (1 + n % 5 * 9) for n in range(12)]  # one to many windows
SEQ_LEN = 64  # that of trained_run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the texts in JSON lines, one of which is null and one empty, and the first one as plain text."""
    folder = tmp_path_factory.mktemp("texts")
    lines = [json.dumps({"body": text}) for text in (*TEXTS, None, "")]
    (folder / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "first.txt").write_text(TEXTS[0], encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def export(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "hf"
    checked_command("torchtrain.convert", str(trained_run), str(folder), "--dtype", "float32")
    return folder


def found(model: Path, file: Path, *options: str, **run: Any) -> dict[str, Any]:
    text = checked_command("torchtrain.perplexity", str(model), str(file), "--json", *options, **run).stdout
    result: dict[str, Any] = json.loads(text)
    return result


def expected(export: Path, texts: list[str], seq_len: int = SEQ_LEN) -> dict[str, Any]:
    """By transformers: the windows of the same length at once, without padding."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    total, tokens = 0.0, 0
    windows: dict[int, list[list[int]]] = {}  # by length
    for text in texts:
        ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]
        for first in range(0, len(ids) - 1, seq_len):
            window = ids[first : first + seq_len + 1]
            windows.setdefault(len(window), []).append(window)
    for of_length in windows.values():
        rows = torch.tensor(of_length)
        with torch.no_grad():
            logits = model(rows[:, :-1]).logits
        total += F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
        tokens += rows[:, 1:].numel()
    size = sum(len(text.encode()) for text in texts)
    values = {"loss": total / tokens, "perplexity": math.exp(total / tokens)}
    counts = {"documents": len(texts), "tokens": tokens, "bytes": size, "seq_len": seq_len}
    return {**values, "bits_per_byte": total / math.log(2) / size, **counts}


def test_loss_is_that_of_transformers(trained_run: Path, export: Path, files: Path) -> None:
    column = ("--text_column", "body")
    texts = expected(export, TEXTS)
    assert texts["tokens"] > 20 * SEQ_LEN
    assert found(trained_run, files / "texts.jsonl", *column, "--batch_size", "3") == pytest.approx(texts, rel=1e-5)
    of_export = found(export, files / "texts.jsonl", *column, "--seq_len", str(SEQ_LEN), ranks=2)
    assert of_export == pytest.approx(texts, rel=1e-5)
    short = found(trained_run, files / "texts.jsonl", *column, "--seq_len", "7")
    assert short == pytest.approx(expected(export, TEXTS, seq_len=7), rel=1e-5)
    assert short["loss"] > texts["loss"]  # each token has less context


def test_plain_text_is_one_document(trained_run: Path, export: Path, files: Path) -> None:
    expectation = expected(export, TEXTS[:1])
    text = checked_command("torchtrain.perplexity", str(trained_run), str(files / "first.txt")).stdout
    assert text.startswith(f"loss {expectation['loss']:.4f}  perplexity {expectation['perplexity']:.3f}  ")
    assert f"\n1 document, {expectation['tokens']} tokens, {len(TEXTS[0].encode())} bytes, in windows of 64" in text


@pytest.mark.parametrize(("bos", "eos", "begin"), [(1, 2, [1]), (None, 2, [2]), (None, None, [])])
def test_a_document_begins_with_bos_or_else_with_eos(
    files: Path, monkeypatch: pytest.MonkeyPatch, bos: int | None, eos: int | None, begin: list[int]
) -> None:
    """Without either, its first token is not predicted."""
    windows: list[list[int]] = []
    monkeypatch.setattr(perplexity_command, "loss_sum", lambda _, found, *__: windows.extend(found) or 1.0)
    tokenizer = load_tokenizer()
    tokenizer.bos_id, tokenizer.eos_id = bos, eos
    model: Any = SimpleNamespace(tokenizer=tokenizer, model=SimpleNamespace(config=SimpleNamespace(max_seq_len=8)))
    options = perplexity_command.PerplexityOptions("model", (str(files / "first.txt"),))
    tokens = begin + tokenizer.encode(TEXTS[0])
    assert perplexity_command.perplexity(model, options)["tokens"] == len(tokens) - 1
    assert windows == [tokens[first : first + 9] for first in range(0, len(tokens) - 1, 8)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "perplexity needs FILES: python -m torchtrain.perplexity CHECKPOINT FILES ... "),
        (["s3://bucket/texts.jsonl"], "a file of perplexity = 's3://bucket/texts.jsonl' must"),
        (["nowhere.jsonl"], "FILES = 'nowhere.jsonl' does not exist (looked for /"),
        (["FIRST", "--seq_len", "65"], "--seq_len = 65 must be at most 64, the longest context of the model"),
        (["EMPTY"], "there are no tokens to predict; name files with text"),
    ],
)
def test_invalid_options_are_one_line_errors(
    trained_run: Path, files: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    paths = {"FIRST": str(files / "first.txt"), "EMPTY": str(tmp_path / "empty.jsonl")}
    result = run_command("torchtrain.perplexity", str(trained_run), *(paths.get(word, word) for word in options))
    assert result.returncode == 2, result.stderr
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def diverge() -> None:
    """Let the model have a loss whose exponential is too large for a float."""
    perplexity_command.loss_sum = lambda _trained, windows, *_: 1e9 * len(list(windows))


def test_perplexity_of_a_model_that_has_diverged_is_infinite(trained_run: Path, files: Path) -> None:
    values = found(trained_run, files / "first.txt", hook=diverge)
    assert values["loss"] > 1e6
    assert values["perplexity"] is None
    text = checked_command("torchtrain.perplexity", str(trained_run), str(files / "first.txt"), hook=diverge).stdout
    assert "  perplexity inf  " in text
