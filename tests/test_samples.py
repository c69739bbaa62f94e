"""Samples of a model under training: those of plain generation on every layout, and a run that they do not change."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from data_samples import DOCUMENTS, write_jsonl
from forked_run import finish, read_metrics, saved_tensors
from gloo_pool import GlooPool
from parity import TINY, build, config_of, full_weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtrain.config.schema import JobConfig, ValidationConfig
from torchtrain.errors import ConfigError
from torchtrain.inference.generation import Sampling, generate
from torchtrain.inference.samples import Samples, encode_prompts
from torchtrain.models.llama import Transformer

PROMPTS = ("a", "bcd", "ef")
NEW_TOKENS = 9
EOS = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP": (2, {}),
    "FSDP, more ranks than prompts": (4, {}),
    "TP": (2, {"tensor_parallel_degree": 2}),
    "TP without SP": (2, {"tensor_parallel_degree": 2, "enable_sequence_parallel": False}),
    "CP": (2, {"context_parallel_degree": 2}),
    "PP, FSDP": (4, {"pipeline_parallel_degree": 2}),
    "ZBV": (2, {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"}),
    "PP, TP": (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}),
}


class Letters:
    """A tokenizer with a token for each character, and one for each number below the vocabulary size."""

    bos_id, eos_id = 1, EOS

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        return [self.bos_id] * bos + [ord(character) % TINY.vocab_size for character in text]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def config_with_prompts(parallelism: dict[str, Any], temperature: float) -> JobConfig:
    config = config_of(parallelism=parallelism, training={"local_batch_size": 2})
    validation = replace(config.validation, enable=True, path="text.jsonl", prompts=PROMPTS)
    validation = replace(validation, prompt_max_new_tokens=NEW_TOKENS, prompt_temperature=temperature)
    return replace(config, validation=validation)


def sampled(parallelism: dict[str, Any], temperature: float) -> list[str]:
    """The samples of two steps with the initial weights; the state of torch's random numbers must not change."""
    config, tokenizer = config_with_prompts(parallelism, temperature), Letters()
    model = build(config)
    before = torch.get_rng_state()
    samples = Samples(config, tokenizer, model)
    texts = [text for step in (5, 6) for text in samples(step, "validation", nullcontext)["validation_samples"]]
    assert [text["prompt"] for text in texts] == 2 * [*PROMPTS]
    assert torch.equal(torch.get_rng_state(), before)
    return [text["text"] for text in texts]


def generated(temperature: float) -> list[str]:
    """The same by ``generate``, with a key/value cache, on one unsharded model."""
    config, tokenizer = config_with_prompts({}, temperature), Letters()
    model = Transformer(TINY)
    model.load_state_dict(full_weights(build(config).model_parts))
    texts = []
    for step in (5, 6):
        sampling = Sampling(temperature, seed=config.training.seed * 1_000_003 + step)
        prompts = [tokenizer.encode(prompt, bos=True) for prompt in PROMPTS]
        steps = list(generate(model, prompts, sampling, max_new_tokens=NEW_TOKENS, eos_ids=[EOS]))
        for row in zip(*steps, strict=True):
            texts.append(tokenizer.decode([token for token in row if token is not None and token != EOS]))
    return texts


@pytest.fixture(scope="module")
def references(gloo: GlooPool) -> dict[float, list[str]]:
    return {temperature: gloo.run(1, generated, temperature)[0] for temperature in (0.0, 1.0)}


def test_samples_are_those_of_generate(gloo: GlooPool, references: dict[float, list[str]]) -> None:
    greedy, drawn = references[0.0], references[1.0]
    assert greedy[:3] == greedy[3:]
    assert drawn[:3] != drawn[3:]
    assert len(set(drawn)) == 6
    for temperature, expected in references.items():
        assert gloo.run(1, sampled, {}, temperature) == [expected]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_the_same_on_layouts(gloo: GlooPool, references: dict[float, list[str]], layout: str) -> None:
    ranks, parallelism = LAYOUTS[layout]
    assert gloo.run(ranks, sampled, parallelism, 1.0) == [references[1.0]] * ranks


def run_and_read(folder: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    """Train two ranks with a validation after step 2 and 4; returns the lines of metrics.jsonl and the log."""
    write_jsonl(folder.parent / "held_out.jsonl", DOCUMENTS[:2])
    validation = ("--validation.enable", "--validation.path", str(folder.parent / "held_out.jsonl"))
    steps = ("--training.steps", "4", "--validation.interval", "2", "--metrics.log_freq", "1")
    output = finish(folder, *validation, *steps, "--metrics.enable_report", *options)
    return read_metrics(folder), output


def test_run_reports_samples_and_is_not_changed_by_them(tmp_path: Path) -> None:
    """Texts are in the log, TensorBoard and report.md. Parameters, optimizer states and losses are bitwise the same."""
    expected, _ = run_and_read(tmp_path / "without", "--validation.weights", "both", "--ema.enable")
    options = ("--validation.prompts", "def main(", "a\nb", "--validation.prompt_max_new_tokens", "5")
    options = (*options, "--validation.weights", "both", "--ema.enable", "--metrics.enable_tensorboard")
    found, log = run_and_read(tmp_path / "with", *options)
    assert [line["loss"] for line in found if "loss" in line] == [line["loss"] for line in expected if "loss" in line]
    for name, tensor in saved_tensors(tmp_path / "without", 4).items():
        assert torch.equal(saved_tensors(tmp_path / "with", 4)[name], tensor), name
    by_step = {line["step"]: line for line in found if "validation_samples" in line}
    assert list(by_step) == [2, 4]
    texts = by_step[4]["validation_samples"]
    assert [sample["prompt"] for sample in texts] == ["def main(", "a\nb"]
    assert by_step[2]["validation_samples"] != texts
    assert by_step[4]["validation_ema_samples"] != texts
    for name in ("samples", "ema samples"):
        assert f"{name} after step 4:" in log
    assert '  "a\\nb"' in log
    report = (tmp_path / "with" / "report.md").read_text()
    assert "## Samples after step 4\n\nPrompt:\n\n    def main(\n\nText:\n\n    " in report
    assert "Prompt:\n\n    a\n    b\n\nText:" in report
    assert "## Samples after step 4 with the averaged weights\n" in report
    events = EventAccumulator(str(tmp_path / "with" / "tensorboard")).Reload()
    texts_of = events.Tensors("validation/samples/text_summary")
    assert [event.step for event in texts_of] == [2, 4]
    assert b"Prompt:\n\n    def main(\n" in texts_of[-1].tensor_proto.string_val[0]


def test_prompts_that_cannot_be_continued_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"validation.prompts are continued .* set validation.enable = true"):
        ValidationConfig(prompts=("a",))
    config = config_with_prompts({}, 1.0)
    long = replace(config, validation=replace(config.validation, prompts=("abc", "a" * 9)))
    message = r"validation.prompts\[1\] has 10 tokens, which with validation.prompt_max_new_tokens = 9 .*seq_len = 16"
    with pytest.raises(ConfigError, match=message):
        encode_prompts(long, Letters())
