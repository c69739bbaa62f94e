"""Tokenizer files: the embedded tokenizer, tiktoken rank files and SentencePiece models."""

import base64
import io
import json
import random
import shutil

import pytest
import sentencepiece
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from transformers import AutoTokenizer

from torchtrain.datasets.tokenizers import load_tokenizer, tokenizer_file
from torchtrain.errors import TokenizerError

WORD_LEVEL = Library(WordLevel({"a": 0}, unk_token="a")).to_str().encode()
TEXT = 'def f(x):\n    return {"é": x ** 2}  # \t tabs,  spaces, 中文, 🙂\n\n\nclass A: ...\r\n'


def write_ranks(path, tokens):
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)))
    return str(path)


BYTES = [bytes([byte]) for byte in range(256)]


def small_rank_file(tmp_path, monkeypatch):
    """A tiktoken rank file like Llama 3's, with the 256 bytes and a few merges."""
    tokens = [*BYTES, b"he", b"ll", b"hell", b"hello", b" w", b"12", b"123"]
    monkeypatch.setattr("torchtrain.datasets.tokenizers.LLAMA3_RANKS", len(tokens))
    return write_ranks(tmp_path / "tokenizer.model", tokens)


@pytest.fixture
def rank_file(tmp_path, monkeypatch):
    return small_rank_file(tmp_path, monkeypatch)


def test_rank_file_must_have_as_many_ranks_as_llama_3(tmp_path):
    others = [b"\xff" + n.to_bytes(3, "big") for n in range(200_000)]
    llama3 = load_tokenizer(write_ranks(tmp_path / "llama3", [*BYTES, *others[: 128_000 - 256]]))
    assert (llama3.vocab_size, llama3.bos_id) == (128_256, 128_000)
    for ranks in (200_000, 127_999, 128_001):
        with pytest.raises(TokenizerError, match=rf"has {ranks:,} ranks, .* 128,000, .*Llama 4's has 200,000"):
            load_tokenizer(write_ranks(tmp_path / "other", [*BYTES, *others[: ranks - 256]]))


def test_embedded_tokenizer_round_trip():
    tokenizer = load_tokenizer()
    ids = tokenizer.encode(TEXT)
    assert tokenizer.vocab_size == 4096
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT) / 1.5
    assert tokenizer.encode(TEXT, bos=True, eos=True) == [tokenizer.bos_id, *ids, tokenizer.eos_id]


def test_special_tokens_in_text_are_encoded_as_text(rank_file):
    for path, text in (("", "<s> </s>"), (rank_file, "<|begin_of_text|><|end_of_text|>")):
        tokenizer = load_tokenizer(path)
        ids = tokenizer.encode(text)
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
        assert tokenizer.decode(ids) == text


def test_rank_file_is_recognized_by_its_content(rank_file):
    tokenizer = load_tokenizer(rank_file)
    assert tokenizer.vocab_size == 263 + 256
    assert (tokenizer.bos_id, tokenizer.eos_id) == (263, 264)
    # "hello" is merged, the split pattern separates " w" from it, and numbers are split into groups of three digits.
    assert tokenizer.encode("hello w1234", bos=True, eos=True) == [263, 259, 260, 262, ord("4"), 264]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_ids_of_llama3_special_tokens(rank_file):
    base = 263
    tokenizer = load_tokenizer(rank_file)
    names = {0: "<|begin_of_text|>", 5: "<|reserved_special_token_2|>", 9: "<|eot_id|>", 10: "<|python_tag|>"}
    names |= {11: "<|reserved_special_token_3|>", 255: "<|reserved_special_token_247|>"}
    assert {n: tokenizer.decode([base + n]) for n in names} == names


def test_texts_too_long_for_tiktoken_are_split(rank_file):
    tokenizer = load_tokenizer(rank_file)
    for text in ("hello" * 50_000, " " * 60_000 + "x" * 60_000, "hello w " * 120_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # Text with many short runs of spaces is not split: it is encoded as by tiktoken.
    text = " ".join("hello" * random.Random(0).randrange(1, 9) for _ in range(10_000))
    assert tokenizer.encode(text) == tokenizer._encoding.encode_ordinary(text)


def test_lone_surrogates_are_encoded(rank_file):
    for path in ("", rank_file):
        tokenizer = load_tokenizer(path)
        assert "a" in tokenizer.decode(tokenizer.encode("a\ud800b"))


def test_tokenizer_without_bos(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c d e f"] * 9), model_writer=model, vocab_size=9, bos_id=-1, minloglevel=2
    )
    path = tmp_path / "no_bos.model"
    path.write_bytes(model.getvalue())
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.bos_id is None
    assert tokenizer.encode("a", bos=True, eos=True) == [*tokenizer.encode("a"), tokenizer.eos_id]


@pytest.mark.parametrize("added", [None, {}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}])
def test_prompt_of_a_sentencepiece_model_has_the_special_tokens_of_transformers(tmp_path, added):
    """Without a tokenizer.json, tokenizer_config.json determines which special tokens are added."""
    shutil.copyfile(tokenizer_file(), tmp_path / "tokenizer.model")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if added is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(added))
    ours, theirs = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode_prompt("def main(", ours.added_ids) == theirs.encode("def main(")
    assert ours.encode_prompt("", ours.added_ids)[:1] == ([ours.bos_id] if added else [])


def test_content_hash_identifies_the_tokenizer(rank_file):
    assert load_tokenizer().content_hash == load_tokenizer("").content_hash != load_tokenizer(rank_file).content_hash


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"just some text\n", "is not a tokenizer.json, SentencePiece model or tiktoken rank file"),
        (b"", "is not a tokenizer.json, SentencePiece model or tiktoken rank file"),
        (b'{"version": "1.0"}', "is not a tokenizer.json: Model missing"),
        (b'{"version": ', "is not a tokenizer.json: "),
        (b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "its vocabulary is empty"),
        (WORD_LEVEL, "is a WordLevel model; there are BPE and Unigram"),
        (b"YQ== 0\nYg== one\n", "line 2 is not"),
        (b"YQ== 0\nYg== 7\n", "has 2 ranks, and Llama 3's file has 128,000"),
    ],
)
def test_invalid_tokenizer_files_raise_a_tokenizer_error(tmp_path, content, message):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(str(path))


def test_missing_tokenizer_raises_a_tokenizer_error(tmp_path):
    with pytest.raises(TokenizerError, match="No such file"):
        load_tokenizer(str(tmp_path / "missing.model"))
    with pytest.raises(TokenizerError, match=r"no tokenizer.json or tokenizer.model is in it"):
        load_tokenizer(str(tmp_path))
