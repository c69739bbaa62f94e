"""The model that torchtrain.estimate reads from the config."""

import json
from dataclasses import replace
from pathlib import Path

from torchtrain.checkpoint.weights import resolve_model_section
from torchtrain.config.parse import parse
from torchtrain.plugins.planner.request import resolve_model_config, vocabulary_source

ROOT = Path(__file__).parents[3]


def test_estimate_needs_no_tokenizer_in_the_hf_folder(tmp_path: Path) -> None:
    content = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    content |= {"num_attention_heads": 2, "vocab_size": 512, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = parse(["--model.hf_folder", str(tmp_path)])
    assert resolve_model_config(replace(config, model=resolve_model_section(config.model))).vocab_size == 512


def test_source_of_the_vocabulary_is_named(tmp_path: Path) -> None:
    package = ROOT / "torchtrain/assets/tokenizer.model"
    for options, source, size in (
        ([], "the package's tokenizer", 4096),
        (["--model.tokenizer_path", str(tmp_path / "missing.model")], "the model flavor", 128256),
        (["--model.tokenizer_path", str(package)], "model.tokenizer_path", 4096),
        (["--model.vocab_size", "5000"], "model.vocab_size", 5000),
    ):
        config = parse(["--model.flavor", "8B", *options])
        assert (vocabulary_source(config), resolve_model_config(config).vocab_size) == (source, size)
