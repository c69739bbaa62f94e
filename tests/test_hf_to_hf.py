"""What a user brings: a folder of transformers', trained on two ranks, exported, read, scored and generated from."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from forked_run import finish
from json_tokenizers import save_tokenizer
from test_evaluate import own_tasks_alone, write_tasks
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchtrain import convert, generate
from torchtrain.trained_model import load_model

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tokenizer": "metaspace BPE", "head_dim": 12},
    "Qwen3": {"tokenizer": "byte-level BPE", "head_dim": 16, "tie_word_embeddings": True},
}


def save_model(folder: Path, family: str, tokenizer: str, **keys: Any) -> None:
    """A random model and its tokenizer, with rows to spare in the vocabulary."""
    save_tokenizer(folder, tokenizer)
    config = getattr(transformers, f"{family}Config")(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=640,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        **keys,
    )
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)


def score(model: str, arguments: str, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """By lm-eval's command line, for ``model`` torchtrain ours; its results."""
    from lm_eval.tasks import TaskManager

    from torchtrain import evaluate

    output = tasks / f"scores-{model}"
    words = ["evaluate", "--model", model, "--model_args", arguments, "--tasks", "rolling", "--device", "cpu"]
    words += ["--include_path", str(tasks), "--output_path", str(output)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(TaskManager, "__init__", TaskManager.__init__)  # to be as it was again
    own_tasks_alone()
    assert evaluate.main() == 0
    results: dict[str, Any] = json.loads(next(output.rglob("results_*.json")).read_text())["results"]["rolling"]
    return results


@pytest.mark.filterwarnings("ignore")  # of the harness and its libraries
@pytest.mark.parametrize("family", FAMILIES)
def test_from_a_folder_of_transformers_to_one(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    theirs, run, exported = tmp_path / "theirs", tmp_path / "run", tmp_path / "exported"
    save_model(theirs, family, **FAMILIES[family])
    start = ("--model.hf_folder", str(theirs), "--checkpoint.initial_load_path", str(theirs))
    output = finish(run, *start, "--training.steps", "20", "--training.seq_len", "64", ranks=2)
    assert f"starts from the weights in {theirs}" in output
    assert "vocabulary 640; 2 rank(s)" in output
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
    prompt = tokenizer("import os\n\ndef main(", return_tensors="pt", add_special_tokens=False).input_ids
    prompt = torch.cat((torch.tensor([[tokenizer.bos_token_id]]), prompt), dim=1)
    seen = torch.ones_like(prompt)
    made = model.generate(
        prompt, attention_mask=seen, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )

    # Every entrance takes the run, its export, and what is made of that, each with the tokenizer that lies there.
    own = tmp_path / "own"
    assert convert.main([str(exported), str(own), "--to", "torchtrain", "--dtype", "float32"]) == 0
    for source in (run, exported, own):
        capsys.readouterr()
        options = ["--prompt", "import os\n\ndef main(", "--max_new_tokens", "12", "--temperature", "0"]
        assert generate.main([str(source), *options]) == 0
        trained = load_model(source)
        logits = trained.model(prompt)
        dist.destroy_process_group()
        torch.testing.assert_close(logits, model(prompt).logits, rtol=0, atol=1e-5 * logits.abs().max().item())
        assert capsys.readouterr().out.strip() == trained.tokenizer.decode(made[0, 1:].tolist()).strip()
    again = ("--model.hf_folder", str(exported), "--checkpoint.initial_load_path", str(exported))
    assert f"from the weights in {exported}" in finish(tmp_path / "again", *again, "--training.steps", "1", ranks=1)

    write_tasks(tmp_path)
    ours = score("torchtrain", f"checkpoint={exported}", tmp_path, monkeypatch)
    reference = score("hf", f"pretrained={exported},dtype=float32,add_bos_token=True", tmp_path, monkeypatch)
    assert ours["bits_per_byte,none"] == pytest.approx(reference["bits_per_byte,none"], rel=1e-5)
