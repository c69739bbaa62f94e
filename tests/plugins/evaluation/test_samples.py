"""Logits and samples of a model under training: those of the model itself on every layout."""

import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from data_samples import DOCUMENTS, write_jsonl
from forked_run import finish, read_metrics
from gloo_pool import GlooPool
from parity import TINY, build, config_of, full_weights, with_options
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.errors import ConfigError
from torchtrain.models.llama import Transformer
from torchtrain.plugins.evaluation.generation import Sampling, generate
from torchtrain.plugins.evaluation.options import EvaluationConfig
from torchtrain.plugins.evaluation.samples import Samples
from torchtrain.plugins.evaluation.training_logits import TrainingLogits, right_padded

PROMPTS = ("a", "bcd", "ef")
NEW_TOKENS = 9
EOS = 39  # ends some of the texts, in their middle
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
    special_ids = frozenset[int]()

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        return [self.bos_id] * bos + [ord(character) % TINY.vocab_size for character in text]

    @property
    def added_bos(self) -> tuple[list[int], list[int]]:
        return [self.bos_id], []

    def encode_prompt(self, text: str, added_ids: tuple[list[int], list[int]]) -> list[int]:
        return [*added_ids[0], *self.encode(text), *added_ids[1]]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def config_with_prompts(parallelism: dict[str, Any], temperature: float, *, compile: bool = False) -> JobConfig:
    config = config_of(parallelism=parallelism, training={"local_batch_size": 2}, compile={"enable": compile})
    samples = {"prompts": PROMPTS, "prompt_max_new_tokens": NEW_TOKENS, "prompt_temperature": temperature}
    return with_options(config, validation={"enable": True, "path": "text.jsonl"}, evaluation=samples)


def sampled(parallelism: dict[str, Any], temperature: float, *, compile: bool = False) -> list[str]:
    """The samples of two steps with the initial weights; the state of torch's random numbers must not change."""
    config, tokenizer = config_with_prompts(parallelism, temperature, compile=compile), Letters()
    model = build(config)
    before = torch.get_rng_state()
    samples = Samples(config, tokenizer, model)
    found = (samples.validate(step, "validation", nullcontext) for step in (5, 6))
    texts = [text for of_step in found for text in of_step["validation_samples"]]
    assert [text["prompt"] for text in texts] == 2 * [*PROMPTS]
    assert torch.equal(torch.get_rng_state(), before)
    return [text["text"] for text in texts]


def sampled_by_compiled_blocks() -> list[str]:
    """With the graphs that Inductor would get, run uncompiled."""
    torch._dynamo.reset()
    with (
        warnings.catch_warnings(),
        patch.object(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition")),
    ):
        warnings.simplefilter("ignore")  # the compiler's about its own operation
        return sampled({}, 1.0, compile=True)


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
    assert len({len(text.split()) for text in drawn}) > 2  # some have ended
    for temperature, expected in references.items():
        assert gloo.run(1, sampled, {}, temperature) == [expected]


SLOW = ("FSDP", "FSDP, more ranks than prompts", "TP without SP", "ZBV", "PP, TP")  # "PP, FSDP" has shards


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow) if name in (*SLOW, "CP") else name for name in LAYOUTS]
)
def test_samples_are_the_same_on_layouts(gloo: GlooPool, references: dict[float, list[str]], layout: str) -> None:
    ranks, parallelism = LAYOUTS[layout]
    assert gloo.run(ranks, sampled, parallelism, 1.0) == [references[1.0]] * ranks


def test_samples_are_the_same_if_compiled(gloo: GlooPool, references: dict[float, list[str]]) -> None:
    assert gloo.run(1, sampled_by_compiled_blocks) == [references[1.0]]


ROWS = [[5, 9, 3, 50, 17, 8, 1, 2, 3, 4, 5], [7, 8, 9], [99, 4, 4, 12, 1]]


def scored_positions(parallelism: dict[str, Any]) -> list[tuple[float, int]]:
    """Log-likelihoods and most likely tokens at some positions of rows of different lengths, by data-parallel rank."""
    config = config_of(parallelism=parallelism, training={"local_batch_size": len(ROWS)})
    model = build(config)
    logits = TrainingLogits(model, config)
    model.loss.max_logits_bytes = 0
    own = logits.share(len(ROWS))
    tokens = right_padded([ROWS[i] for i in own], logits.batch_shape(len(own), 11), model.device)
    places = torch.tensor([(row, position) for row, i in enumerate(own) for position in range(2, len(ROWS[i]))])

    def likeliest(logits: torch.Tensor, part: slice) -> torch.Tensor:
        found = logits.log_softmax(dim=-1).max(dim=-1)
        assert len(found.values) == len(places[part])
        return torch.stack((found.values.double(), found.indices.double()), dim=1)

    with patch("torchtrain.plugins.evaluation.training_logits.MIN_CHUNK_TOKENS", 4):  # several chunks
        scores = logits(tokens, *places.unbind(dim=1), likeliest, width=2)
    sums = torch.zeros(len(own), 2, dtype=torch.float64).index_add_(0, places[:, 0], scores)
    return [(likelihood, round(ids)) for likelihood, ids in logits.gather(sums, len(ROWS)).tolist()]


def scored_by_the_model() -> list[tuple[float, int]]:
    model = Transformer(TINY)
    model.load_state_dict(full_weights(build(config_of()).model_parts))
    results = []
    for row in ROWS:
        found = model(torch.tensor([row]))[0, 2:].log_softmax(dim=-1).max(dim=-1)
        results.append((found.values.sum().item(), int(found.indices.sum())))
    return results


@pytest.fixture(scope="module")
def expected(gloo: GlooPool) -> list[tuple[float, int]]:
    return gloo.run(1, scored_by_the_model)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in (*SLOW, "TP", "one rank") else name
        for name in ("one rank", *LAYOUTS)
    ],
)
def test_logits_are_those_of_the_model_on_layouts(
    gloo: GlooPool, expected: list[tuple[float, int]], layout: str
) -> None:
    ranks, parallelism = LAYOUTS.get(layout, (1, {}))
    for found in gloo.run(ranks, scored_positions, parallelism):
        assert [likelihood for likelihood, _ in found] == pytest.approx([own for own, _ in expected], rel=1e-5)
        assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]


def test_run_reports_samples(tmp_path: Path) -> None:
    """In the log, TensorBoard and report.md; test_tasks.py compares such a run with one without samples."""
    write_jsonl(tmp_path / "held_out.jsonl", DOCUMENTS[:2])
    options = ("--validation.enable", "--validation.path", str(tmp_path / "held_out.jsonl"), "--ema.enable")
    options = (*options, "--training.steps", "2", "--validation.interval", "1", "--validation.weights", "both")
    options = (*options, "--evaluation.prompts", "def main(", "a\nb", "--evaluation.prompt_max_new_tokens", "5")
    log = finish(tmp_path, *options, "--report.enable", "--metrics.enable_tensorboard", ranks=1)
    by_step = {line["step"]: line for line in read_metrics(tmp_path) if "validation_samples" in line}
    assert list(by_step) == [1, 2]
    texts = by_step[2]["validation_samples"]
    assert [sample["prompt"] for sample in texts] == ["def main(", "a\nb"]
    assert by_step[1]["validation_samples"] != texts
    assert by_step[2]["validation_ema_samples"] != texts
    for name in ("samples", "ema samples"):
        assert f"{name} after step 2:" in log
    assert '  "a\\nb"' in log
    report = (tmp_path / "report.md").read_text()
    assert "## Samples after step 2\n\nPrompt:\n\n    def main(\n\nText:\n\n    " in report
    assert "Prompt:\n\n    a\n    b\n\nText:" in report
    assert "## Samples after step 2 with the averaged weights\n" in report
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    texts_of = events.Tensors("validation/samples/text_summary")
    assert [event.step for event in texts_of] == [1, 2]
    assert b"Prompt:\n\n    def main(\n" in texts_of[-1].tensor_proto.string_val[0]


def test_prompts_that_cannot_be_continued_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"evaluation.prompts needs validations: .* validation.enable = true"):
        JobConfig(plugins={"evaluation": EvaluationConfig(prompts=("a",))})
    config = config_with_prompts({}, 1.0)
    long = with_options(config, evaluation={"prompts": ("abc", "a" * 9)})
    message = r"evaluation.prompts\[1\] has 10 tokens, which with evaluation.prompt_max_new_tokens = 9 .*seq_len = 16"
    with pytest.raises(ConfigError, match=message):
        section_of(long, EvaluationConfig).encode_prompts(Letters(), long.training.seq_len)
