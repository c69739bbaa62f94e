"""Signals to the commands of plugins, as in test_signals.py."""

import random
from pathlib import Path

import pytest
from test_signals import check, write_texts

COMMANDS = {
    "generate": ["{trained}", "--prompt", "def", "--max_new_tokens", "60"],
    "perplexity": ["{trained}", "{}/texts.jsonl"],
    "convert": ["{trained}", "{}/hf"],
    "compare": ["{trained}", "{trained}"],
    "estimate": ["--job.config_file", "train_configs/debug_model.toml", "--estimate.world_size", "2"],
    "explain": ["{trained}", "--step", "4"],
    "evaluate": ["--model", "torchtrain", "--model_args", "checkpoint={trained}", "--tasks", "words"],
    "convert_config": ["{}/torchtitan.toml"],
}
COMMANDS["evaluate"] += ["--include_path", "{}"]
SECONDS = {"convert_config": 1.0}  # others: 6
TASK = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: "{}/texts.jsonl"}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("module", COMMANDS)
def test_fifty_signals_at_random_moments(module: str, tmp_path: Path, trained_run: Path) -> None:
    write_texts(tmp_path)
    generator = random.Random(module)
    for count in range(50):
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / "texts.jsonl").symlink_to(tmp_path / "texts.jsonl")
        (folder / "words.yaml").write_text(TASK.replace("{}/", f"{folder}/"))
        (folder / "torchtitan.toml").write_text('[model]\nname = "llama3"\n' + "# a comment\n" * 20_000)
        words = [word.replace("{trained}", str(trained_run)).replace("{}", str(folder)) for word in COMMANDS[module]]
        check(module, words, generator, SECONDS.get(module, 6.0))
