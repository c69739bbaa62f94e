"""Files of Hugging Face made by someone who means harm: an error that names the file, in bounded time and memory."""

import json
import os
import re
from pathlib import Path

import pytest
from test_hostile_files import DEEP, json_parsed_in

from torchtrain.config import registry
from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.errors import CheckpointError
from torchtrain.plugins.huggingface.config import read_hf_config
from torchtrain.plugins.huggingface.safetensors_folder import _files as weight_files
from torchtrain.plugins.huggingface.tokenizer import find_eos_ids

SMALL = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    "content",
    [
        DEEP,
        b'{"model_type": "llama", "a": ' + DEEP,
        b"[]",
        json.dumps(SMALL | {"vocab_size": 10**18}).encode(),
        json.dumps(SMALL | {"num_hidden_layers": 10**30}).encode(),
        json.dumps(SMALL | {"num_hidden_layers": 1e30}).encode(),
        json.dumps(SMALL | {"num_hidden_layers": 60_000}).encode(),
        json.dumps(SMALL | {"head_dim": 10**15}).encode(),
        json.dumps(SMALL | {"max_position_embeddings": 10**15}).encode(),
    ],
)
def test_crafted_config_of_a_model_is_a_checkpoint_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "config.json"))):
        read_hf_config(tmp_path)


def test_small_file_is_not_read_if_it_is_large(tmp_path: Path) -> None:
    """A sparse file takes no space on a disk, and more memory than any machine has."""
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 2**42)
    with pytest.raises(CheckpointError, match=r"json has 4,398,046,511,104 bytes, more than a file of its kind may"):
        read_hf_config(tmp_path)


def test_nested_files_are_errors_that_name_them(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(DEEP)
    with pytest.raises(CheckpointError, match=r"generation_config\.json is damaged: its values are nested too deeply"):
        find_eos_ids(load_tokenizer(), tmp_path, bos=True)
    (tmp_path / "model.safetensors.index.json").write_bytes(DEEP)
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json is damaged: .* nested too deeply"):
        weight_files(tmp_path)


# These parse what the same process has made.
OWN_JSON = {"huggingface/tokenizer.py": 1, "huggingface/safetensors_folder.py": 2, "comparison/command.py": 1}


def test_json_of_files_of_plugins_is_parsed_by_the_function_that_bounds_it() -> None:
    assert json_parsed_in(registry.PLUGINS) == OWN_JSON
