"""tokenizer.json: the same token ids as transformers on difficult texts, before and after an export."""

import argparse
import functools
import hashlib
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from json_tokenizers import BOS, EOS, TOKENIZERS, TOOL, hard_texts, save_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.errors import TokenizerError
from torchtrain.logging import logger

TEXTS = hard_texts()


@pytest.fixture(scope="module", params=TOKENIZERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer") / "hf", request.param)


def utf8(text: str) -> str:
    """Replace lone surrogates, which both libraries encode differently."""
    return text.encode("utf-8", "replace").decode()


def test_encode_and_decode_equal_transformers(folder: Path) -> None:
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    plain = AutoTokenizer.from_pretrained(folder, split_special_tokens=True)
    assert len(TEXTS) == 500
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (len(theirs), theirs.bos_token_id, theirs.eos_token_id)
    special = 0
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == plain.encode(utf8(text), add_special_tokens=False), text
        if any(token.content in text for token in theirs.added_tokens_decoder.values() if token.special):
            special += 1
            assert ids != theirs.encode(utf8(text), add_special_tokens=False)
            assert not {ours.bos_id, ours.eos_id} & set(ids)  # a special token in a text is encoded as text
        else:
            assert ids == theirs.encode(utf8(text), add_special_tokens=False), text
        assert ours.encode(text, bos=True, eos=True) == [ours.bos_id, *ids, ours.eos_id]
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert special > 100
    tool = theirs.convert_tokens_to_ids(TOOL)
    assert tool in ours.encode(f"a {TOOL} b")  # an added token that is not special, also in transformers
    assert ours.token_bytes[tool] == len(TOOL)
    assert ours.token_bytes[ours.bos_id or 0] == 0
    assert ours.decode([ours.vocab_size + 5]) == ""  # an id of a model whose vocabulary is larger than the tokenizer's


@pytest.mark.parametrize("kind", ["unigram", "merges ignored", "dropout", "no type"])
def test_encoding_is_deterministic_and_has_no_special_tokens(tmp_path: Path, kind: str) -> None:
    """With special tokens that are pieces of the vocabulary, as usual in training, which could be found in a text."""
    options: dict[str, Any] = {"special_tokens": ["<unk>", BOS, EOS], "show_progress": False}
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=400, unk_token="<unk>", **options)
    else:
        tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "merges ignored"))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, **options)
    tokenizer.train_from_iterator(Path(argparse.__file__).read_text().splitlines()[:800], trainer)
    if kind == "merges ignored":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True
    content = json.loads(tokenizer.to_str())
    content["model"] |= {"dropout": 0.5} if kind == "dropout" else {}
    content["model"] = {key: value for key, value in content["model"].items() if (key, kind) != ("type", "no type")}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}))
    ours = load_tokenizer(str(tmp_path))
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (1, 2, tokenizer.get_vocab_size())
    for text in (BOS, f"a {EOS} b", EOS + EOS, "the <unk> of arguments"):
        ids = ours.encode(text)
        assert not {1, 2} & set(ids)
        assert [ours.encode(text) for _ in range(9)] == [ids] * 9
        assert ours.decode(ids) == text
        if "<|" not in text:
            assert ids == plain.encode(text, add_special_tokens=False).ids
    assert ours.decode([1, 2]).split() == tokenizer.decode([1, 2], skip_special_tokens=False).split()
    del content["added_tokens"]  # optional in the file
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(str(tmp_path)).encode("arguments") == plain.encode("arguments", add_special_tokens=False).ids


def test_file_and_folder_give_the_same_tokenizer(folder: Path) -> None:
    file, whole = load_tokenizer(str(folder / "tokenizer.json")), load_tokenizer(str(folder))
    assert (file.bos_id, file.eos_id, file.content_hash) == (whole.bos_id, whole.eos_id, whole.content_hash)


def test_token_bytes_add_up_to_the_bytes_of_the_text(tmp_path: Path) -> None:
    for kind, spaces in (("byte-level BPE", 0), ("metaspace BPE", 1)):  # metaspace prepends a space
        tokenizer = load_tokenizer(str(save_tokenizer(tmp_path / kind, kind)))
        for text in map(utf8, TEXTS[1:]):
            if "\u2581" not in text and (not spaces or not (set(" \u2581") & set(text[:1]) or TOOL in text)):
                size = len((text if spaces else unicodedata.normalize("NFC", text)).encode())
                assert sum(tokenizer.token_bytes[i] for i in tokenizer.encode(text)) == size + spaces, text


def template(*pieces: str) -> dict[str, Any]:
    """Return a post-processor that adds special tokens around a text, ``$A``."""
    vocabulary = load_library().get_vocab()
    ids = [(piece, vocabulary[piece]) for piece in pieces if piece != "$A"]
    post_processor = processors.TemplateProcessing(list(pieces), special_tokens=ids)
    state: dict[str, Any] = json.loads(post_processor.__getstate__())
    return state


@functools.cache
def load_library() -> Tokenizer:
    return TOKENIZERS["byte-level BPE"]()


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
POST_PROCESSORS: dict[str, Callable[[], dict[str, Any] | None]] = {
    "none": lambda: None,
    "nothing added": lambda: template("$A"),
    "bos": lambda: template(BOS, "$A"),
    "bos and eos": lambda: template(BOS, "$A", EOS),
    "eos": lambda: template("$A", EOS),
    "Llama 3": lambda: {"type": "Sequence", "processors": [BYTE_LEVEL, template(BOS, "$A")]},
    "byte level": lambda: BYTE_LEVEL,
    "Roberta": lambda: {
        "type": "RobertaProcessing",
        "sep": [EOS, load_library().token_to_id(EOS)],
        "cls": [BOS, load_library().token_to_id(BOS)],
        "trim_offsets": True,
        "add_prefix_space": False,
    },
}


def save_with_post_processor(folder: Path, kind: str, **config: Any) -> Path:
    content = json.loads(load_library().to_str()) | {"post_processor": POST_PROCESSORS[kind]()}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", POST_PROCESSORS)
@pytest.mark.parametrize(
    "config", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}], ids=str
)
def test_prompt_has_the_special_tokens_of_transformers(tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    """With a tokenizer.json, only its post-processor determines which special tokens are added."""
    folder = save_with_post_processor(tmp_path / "hf", kind, **config)
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    for text in ("", "a", "import os", " two  spaces "):
        assert ours.encode_prompt(text, ours.added_ids) == theirs.encode(text)


def test_bos_equal_to_eos_is_added_once_between_documents(tmp_path: Path) -> None:
    folder = save_with_post_processor(tmp_path / "hf", "none", bos_token=EOS)
    tokenizer = load_tokenizer(str(folder))
    eos, ids = tokenizer.eos_id, tokenizer.encode("some text")
    assert tokenizer.bos_id == eos is not None
    assert tokenizer.encode("some text", bos=True, eos=True) == [eos, *ids]
    assert tokenizer.encode("some text", eos=True) == [*ids, eos]
    before = (folder / "tokenizer.json").read_bytes() + f" {eos} {eos}".encode()
    # Data prepared by an earlier version have it twice, so the hash must differ from that of this version.
    assert tokenizer.content_hash != hashlib.sha256(before).hexdigest()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {},
            "no bos_token and eos_token is known, so documents run into each other .* tokenizer_config.json is missing",
        ),
        (
            {"tokenizer_config.json": {"bos_token": BOS}},
            "no eos_token is known, so documents are separated by bos alone",
        ),
        ({"tokenizer_config.json": {}}, "Name bos_token and eos_token in .*tokenizer_config.json"),
        ({"tokenizer_config.json": {"eos_token": EOS}}, ""),
        ({"generation_config.json": {"eos_token_id": 4}}, ""),
    ],
)
def test_missing_bos_or_eos_is_a_warning(
    tmp_path: Path,
    files: dict[str, Any],
    message: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logger, "propagate", True)
    load_library().save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    load_tokenizer(str(tmp_path))
    assert re.search(message, caplog.text) if message else not caplog.text


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (None, None)),
        ({"tokenizer_config.json": {"bos_token": None, "eos_token": {"content": EOS}}}, (None, EOS)),
        ({"generation_config.json": {"bos_token_id": 3, "eos_token_id": [5, 3]}}, (3, 5)),
        (
            {
                "tokenizer_config.json": {"bos_token": None, "eos_token": EOS},
                "generation_config.json": {"bos_token_id": 3, "eos_token_id": 4},
            },
            (None, EOS),
        ),
        ({"tokenizer_config.json": {"bos_token": BOS}, "generation_config.json": {"eos_token_id": 4}}, (BOS, 4)),
        (  # has priority, but is read only without added_tokens_decoder
            {
                "tokenizer_config.json": {"bos_token": BOS, "eos_token": BOS},
                "special_tokens_map.json": {"eos_token": EOS},
            },
            (BOS, EOS),
        ),
        (
            {
                "tokenizer_config.json": {"bos_token": BOS, "eos_token": BOS, "added_tokens_decoder": {}},
                "special_tokens_map.json": {"eos_token": EOS},
            },
            (BOS, BOS),
        ),
        (  # saved by an older version of transformers
            {"tokenizer_config.json": {}, "special_tokens_map.json": {"bos_token": BOS, "eos_token": {"content": EOS}}},
            (BOS, EOS),
        ),
    ],
)
def test_special_ids_are_read_from_files_of_the_same_folder(
    tmp_path: Path, files: dict[str, Any], expected: tuple[Any, Any]
) -> None:
    save_tokenizer(tmp_path / "whole")
    file = tmp_path / "tokenizer.json"
    file.write_bytes((tmp_path / "whole/tokenizer.json").read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(tmp_path))
    vocabulary = AutoTokenizer.from_pretrained(tmp_path / "whole").get_vocab()
    assert (tokenizer.bos_id, tokenizer.eos_id) == tuple(vocabulary.get(token, token) for token in expected)
    whole = load_tokenizer(str(tmp_path / "whole"))
    same = (tokenizer.bos_id, tokenizer.eos_id) == (whole.bos_id, whole.eos_id)
    assert (tokenizer.content_hash == whole.content_hash) == same


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", '{"bos_token": "<missing>"}', "bos_token = '<missing>' is not one of its tokens"),
        ("generation_config.json", '{"eos_token_id": 99999}', "eos_token_id = 99999 is not one of its tokens"),
        ("tokenizer_config.json", "{", "tokenizer_config.json, beside .* is damaged"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json, beside .* is damaged"),
    ],
)
def test_special_tokens_that_are_not_in_the_vocabulary_raise_a_tokenizer_error(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(str(tmp_path))


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    """A tokenizer that was used with a fixed length is saved with truncation and padding."""
    whole = load_tokenizer(str(save_tokenizer(tmp_path)))
    file = tmp_path / "tokenizer.json"
    library = Tokenizer.from_file(str(file))
    library.enable_truncation(8)
    library.enable_padding(length=64)
    library.save(str(file))
    ours = load_tokenizer(str(tmp_path))
    for text in ("a", "import os and much more than eight tokens of text"):
        assert ours.encode(text) == whole.encode(text)
