"""Generated tokens compared with transformers' generate, and the generate command."""

import itertools
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from forked_command import checked_command, run_command
from test_llama import SHAPES, reference_of
from test_validation import save_sentencepiece
from torch.utils._python_dispatch import TorchDispatchMode

import torchtrain.plugins.evaluation.generate_command as command
from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.models.llama import Transformer
from torchtrain.plugins.evaluation.generation import Sampling, choose, generate
from torchtrain.plugins.evaluation.trained_model import TrainedModel

PROMPTS = [[5, 9, 3, 250, 17, 8], [7], [100, 4, 4, 12]]


def random_model(shape: str) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(SHAPES[shape])
    for parameter in model.parameters():  # larger than the initial weights, so that the tokens differ
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.ndim > 1 else 1.0, std=0.1)
    return model


def all_steps(*args, **kwargs) -> list[list[int]]:
    """The generated tokens of each prompt."""
    columns = zip(*generate(*args, **kwargs), strict=True)
    return [[token for token in column if token is not None] for column in columns]


@pytest.mark.parametrize("shape", [pytest.param("llama2", marks=pytest.mark.slow), "llama3.1", "tied"])
def test_greedy_equals_transformers_token_for_token(shape: str) -> None:
    model = random_model(shape)
    reference = reference_of(model).eval()
    # transformers generates from each prompt separately, so that padding has no effect.
    theirs = []
    for prompt in PROMPTS:
        out = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=60,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        theirs.append(out[0, len(prompt) :].tolist())
    assert all_steps(model, PROMPTS, Sampling(), max_new_tokens=60) == theirs
    assert len({token for row in theirs for token in row}) > 10  # not one repeated token


def test_generation_disables_cudnn_attention() -> None:
    """cuDNN would build a new plan for each number of keys. The caller's setting is restored between tokens."""
    model, seen = random_model(next(iter(SHAPES))), []
    model.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    between = [torch.backends.cuda.cudnn_sdp_enabled() for _ in generate(model, PROMPTS, Sampling(), max_new_tokens=3)]
    assert (seen, between, enabled) == ([False] * 3, [True] * 3, True)


def test_generation_does_not_change_the_model() -> None:
    model = random_model("llama2")
    tokens = torch.tensor(PROMPTS[:1])
    before = model(tokens)
    steps = generate(model, PROMPTS, Sampling(), max_new_tokens=5)
    next(steps)
    steps.close()
    assert torch.equal(model(tokens), before)


def test_sampling_depends_on_the_seed_and_not_on_other_prompts() -> None:
    model = random_model("llama3.1")
    sampling = Sampling(temperature=1.0, top_k=50, top_p=0.9, seed=3)
    batched = all_steps(model, PROMPTS, sampling, max_new_tokens=20)
    assert batched == all_steps(model, PROMPTS, sampling, max_new_tokens=20)
    separate = [
        all_steps(model, [prompt], sampling, max_new_tokens=20, first_prompt=i)[0] for i, prompt in enumerate(PROMPTS)
    ]
    assert batched == separate
    assert batched != all_steps(model, PROMPTS, replace(sampling, seed=4), max_new_tokens=20)


def test_prompts_end_at_eos_independently() -> None:
    model = random_model("tied")
    free = all_steps(model, PROMPTS, Sampling(), max_new_tokens=30)
    eos = free[0][7]
    other = next(token for token in free[1][5:] if token not in (eos, *free[0]))
    ended = all_steps(model, PROMPTS, Sampling(), max_new_tokens=30, eos_ids=[eos, other])
    for with_eos, without in zip(ended, free, strict=True):
        ends = [position + 1 for position, token in enumerate(without) if token in (eos, other)]
        assert with_eos == without[: min(ends, default=30)]
    assert len({len(tokens) for tokens in ended}) > 1


def test_prompts_have_separate_limits_up_to_the_last_position() -> None:
    model = random_model("llama3.1")
    limits = [model.config.max_seq_len - len(prompt) for prompt in PROMPTS]
    limits[2] = 5
    batched = all_steps(model, PROMPTS, Sampling(), max_new_tokens=limits)
    assert [len(tokens) for tokens in batched] == limits
    for prompt, limit, tokens in zip(PROMPTS, limits, batched, strict=True):
        assert tokens == all_steps(model, [prompt], Sampling(), max_new_tokens=limit)[0]


@pytest.mark.parametrize(
    "sampling", [Sampling(0.7), Sampling(1.3, top_k=5), Sampling(1.0, top_p=0.6), Sampling(0.5, 8, 0.8)]
)
def test_sampled_distribution_is_that_of_transformers(sampling: Sampling) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 40)
    expected = logits
    if sampling.temperature != 1.0:
        expected = transformers.TemperatureLogitsWarper(sampling.temperature)(None, expected)
    if sampling.top_k:
        expected = transformers.TopKLogitsWarper(sampling.top_k)(None, expected)
    if sampling.top_p < 1.0:
        expected = transformers.TopPLogitsWarper(sampling.top_p)(None, expected)
    # Evenly spaced numbers instead of random ones: the counts are then exact to one.
    n = 100_000
    chosen = choose(logits.expand(n, -1), sampling, (torch.arange(n) + 0.5) / n)
    counts = torch.bincount(chosen, minlength=40) / n
    torch.testing.assert_close(counts, expected.softmax(-1)[0], atol=3 / n, rtol=0)


class RejectFloatCumsum(TorchDispatchMode):
    """Rejects cumulative sums of floats, whose order on CUDA is not defined."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.cumsum.default or not args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def test_sampling_does_not_depend_on_the_order_of_float_sums() -> None:
    with RejectFloatCumsum():
        choose(torch.randn(2, 40), Sampling(1.0, top_k=8, top_p=0.9), torch.tensor([0.3, 0.9]))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_smallest_and_largest_random_numbers_choose_allowed_tokens(uniform: float) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    token = choose(logits, Sampling(1.0, top_k=2), torch.tensor([uniform])).item()
    assert token == (1 if uniform == 0 else 3)


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_p=1e-16), Sampling(1e-38), Sampling(1e-37), Sampling(1e-46)])
def test_smallest_shares_and_temperatures_choose_the_most_likely_token(sampling: Sampling) -> None:
    logits = torch.tensor([[0.0, 300.0, -100.0, 299.0]])
    assert choose(logits, sampling, torch.tensor([0.99])).item() == 1


def test_rounding_does_not_exchange_tokens_that_are_almost_equally_likely() -> None:
    torch.manual_seed(0)
    logits = 1e-3 * torch.randn(1, 2048)
    rounded = logits + 1e-7 * torch.randn(1, 2048)
    assert not torch.equal(logits.argsort(), rounded.argsort())
    n = 2_000
    uniform = (torch.arange(n) + 0.5) / n
    first, second = (choose(of.expand(n, -1), Sampling(1.0), uniform) for of in (logits, rounded))
    assert torch.equal(first, second)


def run_generate(*arguments: str, ranks: int = 1) -> "subprocess.CompletedProcess[str]":
    return run_command("torchtrain.generate", *arguments, ranks=ranks)


def test_generate_writes_the_same_text_for_any_batch_size_and_on_two_ranks(trained_run: Path, tmp_path: Path) -> None:
    prompts = ["import os", "def __init__(self", "class Größe:"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    options = ["--max_new_tokens", "12", "--temperature", "0.9", "--top_k", "40", "--seed", "5"]

    def write(ranks: int, batch_size: int) -> list[dict[str, Any]]:
        output = tmp_path / f"{ranks}-{batch_size}.jsonl"
        result = run_generate(
            *(str(trained_run), "--prompts_file", str(tmp_path / "prompts.jsonl"), *options),
            *("--batch_size", str(batch_size), "--output_file", str(output)),
            ranks=ranks,
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout == ""
        assert "3 of 3 prompts" in result.stderr
        return [json.loads(line) for line in output.read_text().splitlines()]

    separate, batched = write(1, 1), write(2, 8)
    assert [line["prompt"] for line in batched] == prompts
    assert batched == separate
    streamed = run_generate(str(trained_run), "--prompt", prompts[0], *options)
    assert streamed.stdout == prompts[0] + batched[0]["text"] + "\n"


def test_missing_or_damaged_checkpoint_is_a_user_error(trained_run: Path, tmp_path: Path) -> None:
    missing = run_generate(str(tmp_path / "nowhere"), "--prompt", "x")
    assert missing.returncode == 2
    assert "nowhere does not exist; give a run's folder" in missing.stderr
    damaged = tmp_path / "step-8"
    shutil.copytree(trained_run / "checkpoint" / "step-8", damaged)
    weights = next(damaged.glob("*.distcp"))
    content = bytearray(weights.read_bytes())
    for i in range(0, len(content), 4096):  # all blocks, because optimizer states are not loaded or verified
        content[i] ^= 1
    weights.write_bytes(content)
    result = run_generate(str(damaged), "--prompt", "x")
    assert result.returncode == 2
    assert "was damaged after it was written; give another step-N folder" in result.stderr
    assert "Traceback" not in missing.stderr + result.stderr


@pytest.mark.slow  # test_hf_to_hf.py compares texts of checkpoints and exports with those of transformers
def test_greedy_text_equals_that_of_the_exported_model_in_transformers(trained_run: Path, tmp_path: Path) -> None:
    export = tmp_path / "hf"
    checked_command("torchtrain.convert", str(trained_run), str(export), "--dtype", "float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(export)
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    prompt = "import os\n\ndef main("
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=30, do_sample=False)[0, inputs["input_ids"].shape[1] :].tolist()
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")

    def write(source: Path) -> list[int]:
        output = tmp_path / f"{source.name}.jsonl"
        result = run_generate(
            *(str(source), "--prompts_file", str(tmp_path / "prompts.jsonl"), "--temperature", "0"),
            *("--max_new_tokens", "30", "--output_file", str(output)),
        )
        assert result.returncode == 0, result.stderr
        tokens: list[int] = json.loads(output.read_text())["tokens"]
        return tokens

    assert [write(trained_run), write(export)] == [out, out]


def test_text_without_max_new_tokens_ends_at_the_context_length(trained_run: Path, tmp_path: Path) -> None:
    """The model was trained on 64 tokens, so that the default of 128 new tokens does not fit."""
    tokenizer = load_tokenizer()
    prompts = ["import os", "def __init__(self, name):\n    self.name = name\n" * 3]
    lengths = [len(tokenizer.encode(prompt, bos=True)) for prompt in prompts]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    output = tmp_path / "out.jsonl"
    options = ["--temperature", "0", "--output_file", str(output)]
    result = run_generate(str(trained_run), "--prompts_file", str(tmp_path / "prompts.jsonl"), *options)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    for line, length in zip(lines, lengths, strict=True):
        assert line["ended_by"] == "eos" or len(line["tokens"]) == 64 - length
    assert "length" in [line["ended_by"] for line in lines]
    assert run_generate(str(trained_run), "--prompt", prompts[1], "--temperature", "0").returncode == 0
    full = run_generate(str(trained_run), "--prompt", "x = 1\n" * 40)
    assert full.returncode == 2
    assert "must fit into the 64 positions that the model was trained on" in full.stderr
    assert "shorten the prompt" in full.stderr


def test_output_file_must_differ_from_the_prompts_file(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n")
    output = f"{tmp_path}/../{tmp_path.name}/prompts.txt"
    found = run_generate("nowhere", "--prompts_file", str(prompts), "--output_file", output)
    assert found.returncode == 2
    assert "is the file of the prompts; name another one" in found.stderr
    assert prompts.read_text() == "one\n"


class StopCommand(Exception):
    pass


def test_generate_passes_on_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def load(*arguments: Any) -> Any:
        calls.append(arguments)
        model: Any = SimpleNamespace(config=SimpleNamespace(max_seq_len=100))
        return TrainedModel(model, load_tokenizer(""), torch.device("cpu"), bos=True, eos_ids=frozenset({2}))

    def complete(*arguments: Any) -> Any:
        calls.append(arguments[3:5])
        raise StopCommand

    monkeypatch.setattr("torchtrain.plugins.evaluation.trained_model.load_model", load)
    monkeypatch.setattr(command, "complete", complete)
    options = "--temperature 0.7 --top_k 3 --top_p 0.6 --seed 9 --max_new_tokens 5 --weights ema --tokenizer_path t"
    with pytest.raises(StopCommand):
        command.main(["run", "--prompt", "a", "--device", "cpu", "--dtype", "bfloat16", *options.split()])
    assert calls == [("run", "cpu", "bfloat16", "t", "ema"), (Sampling(0.7, 3, 0.6, 9), [5])]


@pytest.mark.parametrize("text", ["Größe: 日本語 😀!", " naïve\n\tx = 'é'", "ends in 😀"])
@pytest.mark.parametrize("cut", [False, True])
def test_text_is_shown_in_pieces_of_whole_characters(monkeypatch: pytest.MonkeyPatch, text: str, cut: bool) -> None:
    """Each as soon as all of its bytes are there; ``cut``: the last one lacks some."""
    tokenizer = load_tokenizer("")
    before, tokens = tokenizer.encode("def ", bos=True), tokenizer.encode(text)
    tokens = tokens[: len(tokens) - cut]
    after_each = [
        tokenizer.decode(before + tokens[: i + 1])[len(tokenizer.decode(before)) :] for i in range(len(tokens))
    ]
    assert [shown for shown in after_each if shown.endswith("\ufffd")] != []  # characters of several tokens

    steps = ([token, None] if i else [token, 5] for i, token in enumerate(tokens))
    monkeypatch.setattr("torchtrain.plugins.evaluation.generation.generate", lambda *_, **__: steps)
    model: Any = None
    trained = TrainedModel(model, tokenizer, torch.device("cpu"), bos=True, eos_ids=frozenset({2}))
    pieces: list[str] = []
    found = command.complete(trained, ["def ", "x"], [before] * 2, Sampling(), [99] * 2, 0, pieces.append)
    whole = [shown for shown in after_each if not shown.endswith("\ufffd")]
    assert "".join(pieces) == f"{after_each[-1]}\n" == f"{found[0]['text']}\n"
    assert list(itertools.accumulate(pieces))[:-1] == whole
    if not cut:
        assert found[0]["text"] == text


def test_text_continues_the_prompt_with_its_space(tmp_path: Path) -> None:
    """A tokenizer that removes a space before the first word decodes the new tokens alone without it."""
    path = save_sentencepiece(tmp_path / "tokenizer", add_dummy_prefix=True, byte_fallback=True)
    tokenizer = load_tokenizer(str(path))
    before = tokenizer.encode("def main", bos=True)
    tokens = tokenizer.encode("def main of two", bos=True)[len(before) :]
    assert tokenizer.decode(tokens) == "of two"
    model: Any = None
    trained = TrainedModel(model, tokenizer, torch.device("cpu"), bos=True, eos_ids=frozenset({2}))
    assert command.text_of(trained, before, tokens) == command.text_of(trained, before, [*tokens, 2]) == " of two"


def test_results_state_why_a_text_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, calls = load_tokenizer(""), []
    before, eos = tokenizer.encode("ab", bos=True), 77  # one of several EOS ids
    token = before[-1]

    def steps(*_: Any, eos_ids: Any, **__: Any) -> Any:
        calls.append(eos_ids)
        return iter([[token, token], [eos, token]])

    monkeypatch.setattr("torchtrain.plugins.evaluation.generation.generate", steps)
    model: Any = None
    trained = TrainedModel(model, tokenizer, torch.device("cpu"), bos=True, eos_ids=frozenset({2, eos}))
    found = command.complete(trained, ["ab"] * 2, [before] * 2, Sampling(), [2, 2], 0, None)
    assert [(line["ended_by"], line["tokens"]) for line in found] == [("eos", [token, eos]), ("length", [token] * 2)]
    assert [line["text"] for line in found] == [tokenizer.decode([token]), tokenizer.decode([token] * 2)]
    assert calls == [{2, eos}]
