"""From a Hugging Face folder to another: train on two ranks, export, load, evaluate and generate."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from forked_run import finish
from json_tokenizers import BOS, EOS, save_tokenizer
from test_evaluate import skip_slow_parts, write_tasks
from test_tokenizer_json import save_with_post_processor
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchtrain import convert, generate
from torchtrain.plugins.evaluation.trained_model import load_model

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tokenizer": "metaspace BPE", "head_dim": 12, "initializer_range": 0.6},
    "Qwen3": {"tokenizer": "byte-level BPE", "head_dim": 16, "initializer_range": 0.6},
}


PROMPTS = ["import os\n\ndef main(", "a", "", " two  spaces", "class Größe:\n", "x = [1, 2", "#", "return self._"]


def save_model(folder: Path, family: str, tokenizer: str, **keys: Any) -> None:
    """Save a random model and its tokenizer; the vocabulary size is larger than the tokenizer's."""
    if not (folder / "tokenizer.json").exists():
        save_tokenizer(folder, tokenizer)
    config = getattr(transformers, f"{family}Config")(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=640,
        max_position_embeddings=64,
        **{"bos_token_id": None, "eos_token_id": None, **keys},
    )
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)


def score(model: str, arguments: str, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The results of lm-eval's command line, with our model for ``model`` torchtrain."""
    from lm_eval.tasks import TaskManager

    from torchtrain import evaluate

    output = tasks / f"scores-{model}"
    words = ["evaluate", "--model", model, "--model_args", arguments, "--tasks", "rolling", "--device", "cpu"]
    words += ["--include_path", str(tasks), "--output_path", str(output)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(TaskManager, "__init__", TaskManager.__init__)  # restored at the end of the test
    skip_slow_parts()
    assert evaluate.main() == 0
    results: dict[str, Any] = json.loads(next(output.rglob("results_*.json")).read_text())["results"]["rolling"]
    return results


def generate_with_transformers(model: Any, tokenizer: Any, prompts: Sequence[str], **options: Any) -> list[list[int]]:
    """The new tokens of each prompt by transformers, with all settings of the folder."""
    found = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False, **options)
        out = model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)
        found.append(out[0, inputs.input_ids.shape[1] :].tolist())
    return found


def generate_with_command(source: Path, folder: Path, prompts: Sequence[str]) -> list[list[int]]:
    """The new tokens of each prompt by the generate command."""
    file, output = folder / "prompts.jsonl", folder / "generated.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    options = ["--prompts_file", str(file), "--max_new_tokens", "12", "--temperature", "0"]
    assert generate.main([str(source), *options, "--output_file", str(output)]) == 0
    return [json.loads(line)["tokens"] for line in output.read_text().splitlines()]


@pytest.mark.slow  # test_hf.py trains from such weights and exports them, and test_generation.py uses an export
@pytest.mark.filterwarnings("ignore")  # warnings of the harness and its libraries
@pytest.mark.parametrize(
    ("family", "scored"),
    [("Qwen3", False), *((family, True) for family in FAMILIES)],
)
def test_hf_folder_is_trained_exported_and_used_by_every_command(
    tmp_path: Path, family: str, scored: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``scored``: by evaluate, too, as ``test_special_tokens_of_an_imported_model_are_those_of_its_files`` does."""
    pytest.importorskip("lm_eval")
    theirs, run, exported = tmp_path / "theirs", tmp_path / "run", tmp_path / "exported"
    save_model(theirs, family, **FAMILIES[family])
    start = ("--model.hf_folder", str(theirs), "--checkpoint.initial_load_path", str(theirs))
    output = finish(run, *start, "--training.steps", "20", "--training.seq_len", "64", ranks=2)
    assert f"starts from the weights in {theirs}" in output
    assert "vocabulary 640" in output
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5
    assert "complete: step 20" in finish(run, *start, "--training.steps", "20", "--training.seq_len", "64", ranks=1)

    assert convert.main([str(run), str(exported), "--dtype", "float32"]) == 0
    model, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == f"{family}ForCausalLM"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    prompt = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    generated = generate_with_transformers(model, tokenizer, PROMPTS)
    nonempty = [prompt for prompt in PROMPTS if prompt]
    without = generate_with_transformers(model, tokenizer, nonempty, add_special_tokens=False)
    assert len(set(map(str, generated))) > 4
    assert without != [tokens for prompt, tokens in zip(PROMPTS, generated, strict=True) if prompt]  # bos matters
    assert generate_with_command(run, tmp_path, PROMPTS) == generated

    # Each command accepts the run, its export, and a checkpoint converted from that, each with its own tokenizer.
    own = tmp_path / "own"
    assert convert.main([str(exported), str(own), "--to", "torchtrain", "--dtype", "float32"]) == 0
    for source in (run, exported, own):
        capsys.readouterr()
        options = ["--prompt", PROMPTS[0], "--max_new_tokens", "12", "--temperature", "0"]
        assert generate.main([str(source), *options]) == 0
        trained = load_model(source)
        logits = trained.model(prompt)
        dist.destroy_process_group()
        torch.testing.assert_close(logits, model(prompt).logits, rtol=0, atol=1e-5 * logits.abs().max().item())
        text = trained.tokenizer.decode([*prompt[0].tolist(), *generated[0]])
        assert capsys.readouterr().out.strip() == text.removeprefix(BOS).strip()
    start = ("--model.hf_folder", str(exported), "--checkpoint.initial_load_path", str(exported))
    assert f"from the weights in {exported}" in finish(tmp_path / "second", *start, "--training.steps", "1", ranks=1)

    if not scored:
        return
    write_tasks(tmp_path)
    ours = score("torchtrain", f"checkpoint={exported}", tmp_path, monkeypatch)
    reference = score("hf", f"pretrained={exported},dtype=float32", tmp_path, monkeypatch)
    assert ours["bits_per_byte,none"] == pytest.approx(reference["bits_per_byte,none"], rel=1e-5)


SOURCES: dict[str, dict[str, Any]] = {
    "no bos added": {"kind": "none"},
    "bos is eos, not added": {"kind": "nothing added", "bos_token": EOS},
    "bos added": {"kind": "bos", "add_bos_token": False},
    "bos and eos added": {"kind": "bos and eos"},
    "no bos": {"kind": "none", "bos_token": None},
}


@pytest.mark.filterwarnings("ignore")  # warnings of the harness and its libraries
@pytest.mark.parametrize(
    "source",
    [pytest.param(name, marks=() if name == "bos and eos added" else pytest.mark.slow) for name in SOURCES],
)
def test_special_tokens_of_an_imported_model_are_those_of_its_files(tmp_path: Path, source: str) -> None:
    """Texts begin as in transformers and lm-eval's own model, and end at each EOS id of the folder."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from torchtrain.plugins.evaluation.evaluate_command import HarnessModel

    folder = save_with_post_processor(tmp_path / "theirs", **SOURCES[source])
    save_model(folder, "Qwen3", "", head_dim=16, initializer_range=0.3)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompts = [prompt for prompt in PROMPTS if prompt]
    free = generate_with_transformers(model, tokenizer, prompts)
    ends = [free[0][5], free[1][3], free[4][7]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    model = AutoModelForCausalLM.from_pretrained(folder)
    theirs = generate_with_transformers(model, tokenizer, prompts)
    assert theirs != free
    own = tmp_path / "own"
    assert convert.main([str(folder), str(own), "--to", "torchtrain", "--dtype", "float32"]) == 0
    exported = tmp_path / "exported"
    assert convert.main([str(own), str(exported), "--dtype", "float32"]) == 0
    for path in (folder, own, exported):
        assert generate_with_command(path, tmp_path, prompts) == theirs

    harness, ours = HFLM(pretrained=str(folder), device="cpu"), HarnessModel(checkpoint=str(folder), device="cpu")
    pairs = [("import", " os"), ("", "def main"), ("a  ", "b"), (f"{tokenizer.bos_token or EOS}class", " main")]
    pairs.append((f"a{EOS} b{EOS}", f" c{EOS}d{EOS}"))
    rolling = [(text,) for text in (*prompts, "import os\n" * 30, f"{tokenizer.bos_token or EOS}def main(")]
    until = [(prompt, {"until": ["\n\n"], "max_gen_toks": 12}) for prompt in prompts]
    dist.destroy_process_group()
    for method, arguments in (("loglikelihood", pairs), ("loglikelihood_rolling", rolling), ("generate_until", until)):
        requests = [Instance(method, {}, args, i) for i, args in enumerate(arguments)]
        expected, found = (getattr(side, method)(requests, disable_tqdm=True) for side in (harness, ours))
        if method == "loglikelihood":
            expected, found = ([likelihood for likelihood, _ in side] for side in (expected, found))
        assert found == (expected if method == "generate_until" else pytest.approx(expected, rel=1e-4)), method
