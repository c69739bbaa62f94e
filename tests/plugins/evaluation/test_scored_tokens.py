"""Texts that spell special tokens are scored as by transformers."""

import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked_run import TINY
from test_tokenizers import small_rank_file
from transformers import AutoTokenizer

from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.plugins.evaluation.harness import HarnessBase
from torchtrain.plugins.huggingface.safetensors_folder import write_hf_config


@pytest.fixture
def rank_file(tmp_path, monkeypatch):
    return small_rank_file(tmp_path, monkeypatch)


def export_of(path: str, folder: Path) -> Any:
    """The tokenizer of the export of a run with the tokenizer ``path``, as transformers reads it."""
    folder.mkdir(exist_ok=True)
    size = load_tokenizer(path).vocab_size
    write_hf_config(folder, replace(TINY, vocab_size=size), "float32", path)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken", "json"])
def test_texts_that_spell_special_tokens_are_scored_as_by_the_exported_model(tmp_path, rank_file, kind):
    """In front, in the middle and at the end, for the harness's own model and for ours."""
    path = {"sentencepiece": "", "tiktoken": rank_file, "json": ""}[kind]
    if kind == "json":
        export_of("", tmp_path / "json")
        path = str(tmp_path / "json" / "tokenizer.json")
    theirs, ours = export_of(path, tmp_path / "export"), load_tokenizer(path)
    harness = types.SimpleNamespace(text_tokenizer=ours, added_ids=ours.added_bos)
    bos, eos = theirs.bos_token, theirs.eos_token
    assert ours.name_of(ours.bos_id) == bos
    for text in (
        "def f",
        f"{bos}def f",
        f"a {eos} b",
        f"a{eos}b{bos}",
        f"{eos}a{eos}",
        "",
        bos,
        f"{bos}{bos} x",
        "<un k>",
    ):
        assert ours.ids_with_special(text) == theirs.encode(text, add_special_tokens=False), text
        starts = text.startswith(bos)  # as HFLM.tok_encode
        assert HarnessBase.tok_encode(harness, text) == theirs.encode(text, add_special_tokens=not starts), text
        assert HarnessBase.tok_encode(harness, text, False) == theirs.encode(text, add_special_tokens=False), text
        prompt = ours.encode_prompt(text, ours.added_bos)  # of generate and of evaluation.prompts
        assert prompt == theirs.encode(text, add_special_tokens=not starts), text
        assert not ours.special_ids & set(ours.encode(text)) - {0}, "documents spell no special token but <unk>"
