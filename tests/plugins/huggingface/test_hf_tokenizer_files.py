"""Tokenizer files of exports, and the end-of-sequence ids of Hugging Face's files."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from json_tokenizers import BOS, EOS, SPECIAL_PIECES, TOKENIZERS, save_tokenizer
from parity import TINY
from test_tokenizer_json import POST_PROCESSORS, TEXTS, save_with_post_processor, utf8
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.errors import CheckpointError
from torchtrain.logging import logger
from torchtrain.plugins.huggingface.safetensors_folder import write_hf_config
from torchtrain.plugins.huggingface.tokenizer import find_eos_ids


@pytest.fixture(scope="module", params=TOKENIZERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer") / "hf", request.param)


def test_export_of_an_imported_model_has_the_original_tokenizer_files(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    write_hf_config(tmp_path, TINY, "float32", str(folder), bos=False)
    for file in folder.iterdir():
        # The class has the name that version 4 of transformers has, too.
        expected = file.read_bytes().replace(b'"TokenizersBackend"', b'"PreTrainedTokenizerFast"')
        assert (tmp_path / file.name).read_bytes().rstrip() == expected.rstrip(), file.name
    assert b'"TokenizersBackend"' in (folder / "tokenizer_config.json").read_bytes()
    assert load_tokenizer(str(tmp_path)).content_hash == load_tokenizer(str(folder)).content_hash


def test_exported_tokenizer_of_a_run_adds_bos_as_in_training(folder: Path, tmp_path: Path) -> None:
    """transformers saves these tokenizers with a post-processor that adds nothing."""
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    write_hf_config(tmp_path, TINY, "float32", str(folder))
    changed = {name for name in os.listdir(folder) if (tmp_path / name).read_bytes() != (folder / name).read_bytes()}
    assert changed == {"tokenizer.json", "tokenizer_config.json"}
    before, after = (json.loads((where / "tokenizer.json").read_text()) for where in (folder, tmp_path))
    assert {key for key in after if after[key] != before[key]} == {"post_processor"}
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    original, again = load_tokenizer(str(folder)), load_tokenizer(str(tmp_path))
    for text in ("", *map(utf8, TEXTS[::10])):
        if not any(piece in text for piece in SPECIAL_PIECES):
            assert theirs.encode(text) == original.encode(text, bos=True)
        begins = theirs.encode(text, add_special_tokens=False)[:1] == [theirs.bos_token_id]  # and gets no second one
        assert again.encode_prompt(text, again.added_ids) == theirs.encode(text, add_special_tokens=not begins)
    assert (theirs.bos_token, theirs.eos_token) == (BOS, EOS)
    assert (
        json.loads((tmp_path / "tokenizer_config.json").read_text())["add_bos_token"] is True
    )  # llama.cpp reads this key


@pytest.mark.parametrize("kind", POST_PROCESSORS)
@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": False, "add_eos_token": True},
        {"bos_token": EOS},
        {"bos_token": None},
        {"bos_token": None, "eos_token": None},
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"tokenizer_class": "GPTNeoXTokenizer", "add_bos_token": True},
        {"tokenizer_class": "LlamaTokenizer"},
    ],
    ids=str,
)
def test_exported_tokenizer_of_a_run_adds_bos_only(tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    folder = save_with_post_processor(tmp_path / "own", kind, **config)
    (tmp_path / "hf").mkdir()
    write_hf_config(tmp_path / "hf", TINY, "float32", str(folder))
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("", "a", "import os, sys", " two  spaces "):
        assert theirs.encode(text) == ours.encode(text, bos=True)
    assert theirs.bos_token_id == ours.bos_id
    content = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    assert (content["add_bos_token"], content["add_eos_token"]) == (ours.bos_id is not None, False)


def test_export_does_not_follow_links_out_of_the_tokenizer_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exports are published. Links within the folder are followed, and links of the hub's cache to its blobs."""
    monkeypatch.setattr(logger, "propagate", True)
    (tmp_path / "secret").write_text('{"bos_token": "secret"}')
    cache = tmp_path / "models--org--name"
    snapshot, blobs = cache / "snapshots/0a1b", cache / "blobs"
    save_tokenizer(snapshot)
    blobs.mkdir()
    for number, file in enumerate(snapshot.iterdir()):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    (snapshot / "inside").write_text("inside")
    (snapshot / "merges.txt").symlink_to("inside")
    (snapshot / "chat_template.jinja").symlink_to(tmp_path / "secret")
    (blobs / "further").symlink_to(tmp_path / "secret")
    (snapshot / "chat_template.json").symlink_to("../../blobs/further")
    (snapshot / "added_tokens.json").symlink_to("../../blobs/../../secret")
    (snapshot / "special_tokens_map.json").symlink_to("missing")
    os.mkfifo(snapshot / "vocab.json")
    (tmp_path / "folder").symlink_to(snapshot)
    for bos in (True, False):
        caplog.clear()
        (tmp_path / f"hf-{bos}").mkdir()
        write_hf_config(tmp_path / f"hf-{bos}", TINY, "float32", str(tmp_path / "folder"), bos)
        found = {file.name: file.read_text() for file in (tmp_path / f"hf-{bos}").iterdir()}
        assert found.keys() == {"config.json", "tokenizer.json", "tokenizer_config.json", "merges.txt"}
        assert found["merges.txt"] == "inside"
        assert [content for content in found.values() if "secret" in content] == []
        assert [file for file in (tmp_path / f"hf-{bos}").iterdir() if file.is_symlink()] == []
        for name in (
            "chat_template.jinja",
            "chat_template.json",
            "added_tokens.json",
            "special_tokens_map.json",
            "vocab",
        ):
            assert f"{name}" in caplog.text
    blobs.rename(tmp_path / "moved")
    blobs.symlink_to(tmp_path / "moved")  # a link to a folder outside of the cache
    (tmp_path / "hf").mkdir()
    write_hf_config(tmp_path / "hf", TINY, "float32", str(snapshot / "tokenizer.json"))
    content = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    assert (content["bos_token"], content["eos_token"]) == (BOS, EOS)  # written from the loaded tokenizer


@pytest.mark.parametrize(
    ("files", "imported", "trained"),
    [
        ({}, [601], [601]),
        ({"generation_config.json": {"eos_token_id": 5}}, [5], [601, 5]),
        ({"generation_config.json": {"eos_token_id": [32, 601, 7, 32]}}, [32, 601, 7], [601, 32, 7]),
        ({"generation_config.json": {"eos_token_id": [10**6, 7]}}, [10**6, 7], [601, 10**6, 7]),
        ({"config.json": {"eos_token_id": [32, 0]}}, [32, 0], [601, 32, 0]),
        ({"config.json": {"eos_token_id": 0}, "generation_config.json": {"eos_token_id": 5}}, [5], [601, 5]),
        ({"config.json": {"eos_token_id": 0}, "generation_config.json": {}}, [601], [601]),
        ({"generation_config.json": {"eos_token_id": None}}, [601], [601]),
        ({"generation_config.json": {"eos_token_id": []}}, [601], [601]),
    ],
)
def test_all_eos_ids_are_found_and_exported(
    tmp_path: Path, files: dict[str, Any], imported: list[int], trained: list[int]
) -> None:
    folder = save_with_post_processor(tmp_path / "own", "none")
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.eos_id == 601
    for bos, expected in ((False, imported), (True, trained)):
        assert find_eos_ids(tokenizer, folder, bos=bos) == expected
        (tmp_path / f"hf-{bos}").mkdir()
        write_hf_config(tmp_path / f"hf-{bos}", TINY, "float32", str(folder), bos)
        config = LlamaConfig.from_pretrained(tmp_path / f"hf-{bos}")
        assert config.eos_token_id == (expected if len(expected) > 1 else expected[0])
        if "generation_config.json" in files and bos:
            named = GenerationConfig.from_pretrained(tmp_path / f"hf-{bos}").eos_token_id
            assert ([named] if isinstance(named, int) else named) == expected
        again = load_tokenizer(str(tmp_path / f"hf-{bos}"))
        assert find_eos_ids(again, tmp_path / f"hf-{bos}", bos=False) == expected


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"eos_token_id": "a"}', '{"eos_token_id": [1, [2]]}', '{"eos_token_id": true}']
)
def test_damaged_generation_config_raises_a_checkpoint_error(tmp_path: Path, content: str) -> None:
    folder = save_with_post_processor(tmp_path / "own", "none")
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        find_eos_ids(load_tokenizer(str(folder)), folder, bos=False)
