"""Tokenizers: Hugging Face's tokenizer.json, SentencePiece models and tiktoken rank files, with one interface.

The content of a file determines its type, because two types have the name ``tokenizer.model``.
"""

import base64
import hashlib
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import sentencepiece
import tiktoken
import tokenizers

from torchtrain.config.urls import local_copy
from torchtrain.errors import TokenizerError
from torchtrain.files import MISSING, parse_json, read_file
from torchtrain.logging import logger

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (
    *(
        TOKENIZER_JSON,
        "tokenizer.model",
        TOKENIZER_CONFIG,
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
    ),
    *("merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json", "config.json"),
)
"""Files of a tokenizer, and those beside it that say how it is used."""
MAX_VOCAB_SIZE = 2**24  # a list of so many sizes is made; the largest vocabularies have 2^20 tokens


class Tokenizer(ABC):
    """Interface of tokenizers. Ids are ints in ``range(vocab_size)``."""

    vocab_size: int
    used_ids: int
    """One more than the largest id that a text can be encoded to: the number of rows that the embedding needs."""
    bos_id: int | None
    """Id that begins a document; None if the tokenizer has none."""
    eos_id: int | None
    """Id that ends a document; None if the tokenizer has none."""
    content_hash: str
    """SHA-256, in hex, of everything that ids depend on: data tokenized with another tokenizer are rejected."""

    token_bytes: list[int]
    """For each id, the number of UTF-8 bytes that it stands for; 0 for special tokens. Their sum over a text may differ
    from the size of the text: a tokenizer may add a space, normalize, or have no token for a character."""
    special_ids: frozenset[int]
    """Ids that are not text, which a decoder may omit."""
    added_ids: tuple[list[int], list[int]] = ([], [])
    """Ids that the tokenizer's own files put before and after each text, as ``AutoTokenizer`` reads them."""

    @property
    def added_bos(self) -> tuple[list[int], list[int]]:
        """Ids before and after a prompt that begins as a document of the training data: BOS, if there is one."""
        return ([] if self.bos_id is None else [self.bos_id]), []

    @property
    def identity(self) -> str:
        """Its hash, as stored in checkpoints."""
        return f"SHA-256 {self.content_hash[:16]}..."

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of ``text``, with bos and eos if requested, as far as the tokenizer has them.

        If bos and eos are the same token, it is added once, before the text; it also ends the previous document. Text
        that spells a special token, except for the unknown token, is encoded as plain text, never to that token's id.
        """
        ids = self.ids_of(text)
        if bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if eos and self.eos_id is not None and not (bos and self.eos_id == self.bos_id):
            ids.append(self.eos_id)
        return ids

    def encode_prompt(self, text: str, added_ids: tuple[list[int], list[int]]) -> list[int]:
        """Ids of a prompt between ``added_ids``, as ``AutoTokenizer`` encodes it.

        A special token that it spells is that token, because the author of a prompt means it. A prompt that begins with
        the token that begins documents gets no second one.
        """
        ids = self.ids_with_special(text)
        begin = self.eos_id if self.bos_id is None else self.bos_id
        if begin is not None and ids[:1] == [begin]:
            return ids
        before, after = added_ids
        return [*before, *ids, *after]

    def ids_with_special(self, text: str) -> list[int]:
        """Ids of ``text`` without added ones, in which a special token that it spells has the id of that token.

        As ``AutoTokenizer`` encodes by default; for texts whose author means the token.
        """
        names = self._special_names
        pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        ids: list[int] = []
        for number, part in enumerate(re.split(f"({pattern})", text) if pattern else [text]):
            if part:  # every second part is a special token
                ids += [names[part]] if number % 2 else self.ids_of(part)
        return ids

    @cached_property
    def _special_names(self) -> dict[str, int]:
        return {name: token for token in self.special_ids if (name := self.name_of(token))}

    @abstractmethod
    def name_of(self, token: int) -> str:
        """How a text spells the special token with this id."""

    @abstractmethod
    def ids_of(self, text: str) -> list[int]:
        """Ids of ``text`` without bos and eos."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD, ids that the tokenizer does not have nothing."""


def tokenizer_file(path: str = "") -> Path:
    """The file of the tokenizer ``model.tokenizer_path``, or its copy; ``""`` is the small one in the package.

    In a folder that is ``tokenizer.json`` before ``tokenizer.model``, as with transformers. Raises as ``local_copy``.
    """
    if not path:
        return Path(__file__).parent.parent / "assets" / "tokenizer.model"
    found = local_copy(path, "model.tokenizer_path", TOKENIZER_FILES)
    inside = [found / name for name in (TOKENIZER_JSON, "tokenizer.model")]
    return next((file for file in inside if file.is_file()), found)


def load_tokenizer(path: str = "") -> Tokenizer:
    """Read a tokenizer; ``""`` is the small one in the package, trained on the Python standard library.

    Logs a warning where it has no token that ends a document.

    Raises:
        TokenizerError: the file is missing, unreadable, or no tokenizer of the three kinds.
        ConfigError, StorageError: see ``local_copy``.
    """
    file = tokenizer_file(path)
    try:
        content = read_file(file, TokenizerError)
    except MISSING as error:
        reason = f"no {TOKENIZER_JSON} or tokenizer.model is in it" if file.is_dir() else error.strerror
        raise TokenizerError(
            f"cannot read model.tokenizer_path = {path!r}: {reason} (looked for {file.absolute()}). It must be a "
            f"{TOKENIZER_JSON}, a SentencePiece "
            "model or Llama 3's tiktoken rank file, or a folder with one of them"
        ) from None
    try:
        tokenizer: Tokenizer
        if content.lstrip()[:1] == b"{":
            tokenizer = JsonTokenizer(content, file.parent)
        else:
            # A rank file is lines of "<base64 of the bytes> <rank>"; a SentencePiece model is a binary protobuf.
            is_ranks = re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n", content)
            tokenizer = TiktokenTokenizer(content) if is_ranks else SentencePieceTokenizer(content)
            tokenizer.added_ids = _ids_added_by_config(tokenizer, file.parent)
    except TokenizerError as error:
        raise TokenizerError(f"model.tokenizer_path = {path!r}: {error}") from None
    if tokenizer.eos_id is None:
        _warn_of_missing(tokenizer, path, file)
    return tokenizer


def _warn_of_missing(tokenizer: Tokenizer, path: str, file: Path) -> None:
    """Warn of the effects of a missing eos on training and generation, and name the file that should define it."""
    missing = "eos_token" if tokenizer.bos_id is not None else "bos_token and eos_token"
    result = "documents are separated by bos alone" if tokenizer.bos_id is not None else "documents run into each other"
    if not isinstance(tokenizer, JsonTokenizer):
        remedy = "The file itself has none: take another tokenizer."
    elif file.with_name(TOKENIZER_CONFIG).is_file():
        remedy = f"Name {missing} in {file.with_name(TOKENIZER_CONFIG)}."
    else:
        remedy = f"{TOKENIZER_CONFIG} is missing beside {file}: add the one of this tokenizer, which names {missing}."
    logger.warning(
        "model.tokenizer_path = %r: no %s is known, so %s and generation does not stop at the end of a document. %s",
        *(path, missing, result, remedy),
    )


def _ids_added_by_config(tokenizer: Tokenizer, folder: Path) -> tuple[list[int], list[int]]:
    """``added_ids`` of a SentencePiece model or a rank file, from tokenizer_config.json."""
    config = _read_beside(folder, TOKENIZER_CONFIG)
    before, after = (
        [token] if config.get(f"add_{name}_token") and token is not None else []
        for name, token in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id))
    )
    return before, after


def _read_beside(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in another file of the tokenizer's folder; empty if there is no such file."""
    try:
        content = parse_json(read_file(folder / name, TokenizerError), f"{name}, beside it,", TokenizerError)
    except MISSING:
        return {}
    if not isinstance(content, dict):
        raise TokenizerError(f"{name}, beside it, is damaged: it must hold a JSON object, not {str(content)[:40]!r}")
    return content


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model (Llama 2's tokenizer.model, or the package's own)."""

    def __init__(self, content: bytes) -> None:
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
        except RuntimeError:
            raise TokenizerError(f"it is not a {TOKENIZER_JSON}, SentencePiece model or tiktoken rank file") from None
        self.vocab_size = self.used_ids = self._processor.vocab_size()
        self.bos_id, self.eos_id = (i if i >= 0 else None for i in (self._processor.bos_id(), self._processor.eos_id()))
        self.content_hash = hashlib.sha256(content).hexdigest()
        ids = range(self.vocab_size)
        self.special_ids = frozenset(i for i in ids if self._processor.IsControl(i) or self._processor.IsUnknown(i))
        self.token_bytes = [self._bytes_of(token) for token in ids]

    def _bytes_of(self, token: int) -> int:
        processor = self._processor
        if token in self.special_ids or processor.IsUnused(token):
            return 0
        # "\u2581" stands for a space.
        return 1 if processor.IsByte(token) else len(processor.IdToPiece(token).replace("\u2581", " ").encode())

    def ids_of(self, text: str) -> list[int]:
        # A lone surrogate, which JSON can contain, has no UTF-8 encoding.
        ids: list[int] = self._processor.encode(text.encode("utf-8", "replace").decode())
        return ids

    def name_of(self, token: int) -> str:
        name: str = self._processor.IdToPiece(token)
        return name

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._processor.decode([i for i in ids if i < self.vocab_size])
        return text


class JsonTokenizer(Tokenizer):
    """A Hugging Face ``tokenizer.json``, with the files beside it that name its special tokens."""

    def __init__(self, content: bytes, folder: Path) -> None:
        try:
            about = parse_json(content, TOKENIZER_JSON, TokenizerError)
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library has no more specific exception type
            raise TokenizerError(f"it is not a {TOKENIZER_JSON}: {error}") from None
        model = self._tokenizer.model
        kind = type(model).__name__  # old files have no "type"
        if kind not in ("BPE", "Unigram"):
            raise TokenizerError(f"it is a {kind} model; there are BPE and Unigram")
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise TokenizerError("its vocabulary is empty")
        self.vocab_size: int = max(vocabulary.values()) + 1
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise TokenizerError(f"it has the token id {self.vocab_size - 1:,}; they must be below {MAX_VOCAB_SIZE:,}")
        self.bos_id, self.eos_id = (special_id(name, vocabulary, folder) for name in ("bos", "eos"))
        separators = f" {self.bos_id} {self.eos_id}"
        if self.bos_id is not None and self.bos_id == self.eos_id:
            separators += " once"  # earlier versions added it before and after a document, so the hash must differ
        self.content_hash = hashlib.sha256(content + separators.encode()).hexdigest()
        added = {token["id"]: token for token in about.get("added_tokens", ())}
        unknown = about["model"].get("unk_id"), vocabulary.get(about["model"].get("unk_token"))
        special = {t["content"] for t in added.values() if t["special"] and t["id"] not in unknown}
        in_vocabulary = {piece for piece in special if model.token_to_id(piece) is not None}
        self._encoder = self._make_encoder(
            about, in_vocabulary if kind == "Unigram" or about["model"].get("ignore_merges") else set()
        )
        steps = json.dumps([about.get("pre_tokenizer"), about.get("decoder")])
        is_byte_level = '"ByteLevel"' in steps  # each character of a piece stands for a byte
        ends = {token for token in (self.bos_id, self.eos_id) if token is not None}
        never = {number for piece, number in vocabulary.items() if piece in special} - ends
        # Without special tokens that never occur: some tokenizers have a <pad> beyond the embedding.
        self.used_ids = max(set(vocabulary.values()) - never, default=-1) + 1
        self.special_ids = frozenset({number for number, token in added.items() if token["special"]} | ends)
        encoded = self._encoder.encode("a")  # any text
        text = [index for index, is_added in enumerate(encoded.special_tokens_mask) if not is_added]
        text = text or [len(encoded.ids)]  # the tokenizer may have no token for that letter
        self.added_ids = encoded.ids[: text[0]], encoded.ids[text[-1] + 1 :]
        self.token_bytes = [0] * self.vocab_size
        for piece, number in vocabulary.items():
            if number in added or number in unknown:
                plain = number in added and not added[number]["special"]
                self.token_bytes[number] = len(piece.encode()) if plain else 0
            elif is_byte_level or re.fullmatch("<0x[0-9A-F]{2}>", piece):
                self.token_bytes[number] = len(piece) if is_byte_level else 1
            else:
                self.token_bytes[number] = len(piece.replace("\u2581", " ").encode())

    def _make_encoder(self, about: dict[str, Any], hidden: Collection[str]) -> tokenizers.Tokenizer:
        """A deterministic variant of the tokenizer ``about``, which never encodes text to the id of a special token.

        Args:
            about: the content of its file.
            hidden: special tokens that the model itself would find in a text; their pieces get names that no text
                contains.
        """
        encoder, model = self._tokenizer, about["model"]
        chance = {"dropout", "alpha", "nbest_size"} & {key for key, value in model.items() if value}
        if hidden or chance:
            about["added_tokens"] = [t for t in about.get("added_tokens", ()) if t["content"] not in hidden]
            about["model"] = model = {key: value for key, value in model.items() if key not in chance}
            names = {piece: f"{self.content_hash} {number}" for number, piece in enumerate(sorted(hidden))}
            if isinstance(model["vocab"], dict):
                model["vocab"] = {names.get(piece, piece): number for piece, number in model["vocab"].items()}
            else:
                model["vocab"] = [(names.get(piece, piece), score) for piece, score in model["vocab"]]
            encoder = tokenizers.Tokenizer.from_str(json.dumps(about))
        encoder.no_padding()
        encoder.no_truncation()
        encoder.encode_special_tokens = True  # as plain text
        return encoder

    def ids_of(self, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # replaces lone surrogates
        return self._encoder.encode(text, add_special_tokens=False).ids

    def ids_with_special(self, text: str) -> list[int]:
        # By the library itself: its special tokens may take in spaces, and its normalizer may only change a beginning.
        text = text.encode("utf-8", "replace").decode()
        return self._library_with_special.encode(text, add_special_tokens=False).ids

    @cached_property
    def _library_with_special(self) -> tokenizers.Tokenizer:
        library = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        library.no_padding()
        library.no_truncation()
        library.encode_special_tokens = False
        return library

    def name_of(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def special_id(name: str, vocabulary: Mapping[str, int], folder: Path) -> int | None:
    """Id of the token ``name`` (bos or eos) according to the files in ``folder``; None if they define none."""
    config = _read_beside(folder, TOKENIZER_CONFIG)
    files = [(TOKENIZER_CONFIG, f"{name}_token"), ("generation_config.json", f"{name}_token_id")]
    if "added_tokens_decoder" not in config:  # transformers reads this file only without that key, and then prefers it
        files.insert(0, ("special_tokens_map.json", f"{name}_token"))
    for file, key in files:
        content = config if file == TOKENIZER_CONFIG else _read_beside(folder, file)
        if key not in content:
            continue
        value = content[key]
        value = value[0] if isinstance(value, list) and value else value
        value = value.get("content", "") if isinstance(value, dict) else value
        found = vocabulary.get(value) if isinstance(value, str) else value
        if value is not None and found not in vocabulary.values():
            raise TokenizerError(f"{file}, beside it: {key} = {value!r} is not one of its tokens")
        return found
    return None


# Llama 3's pre-tokenizer, and the names that Llama 3.1 gives to some of its 256 special tokens, by index. The others
# are reserved and numbered; Llama 3.0 also reserved those that 3.1 names: https://github.com/meta-llama/llama-models.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_LLAMA3_SPECIALS = {
    0: "begin_of_text",
    1: "end_of_text",
    4: "finetune_right_pad_id",
    6: "start_header_id",
    7: "end_header_id",
    8: "eom_id",
    9: "eot_id",
    10: "python_tag",
}
LLAMA3_RANKS = 128_000

# Limits of the reference implementation: tiktoken fails on longer texts, and its regular expression overflows the
# stack on longer runs of only spaces or only non-spaces.
_LONGEST_TEXT = 400_000
_LONGEST_RUN = 25_000
_RUNS = re.compile(rf"\s{{1,{_LONGEST_RUN}}}|\S{{1,{_LONGEST_RUN}}}")


class TiktokenTokenizer(Tokenizer):
    """A tiktoken rank file (Llama 3's tokenizer.model) with Llama 3's split pattern and 256 special tokens."""

    def __init__(self, content: bytes) -> None:
        ranks: dict[bytes, int] = {}
        for number, line in enumerate(content.splitlines(), 1):
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError:
                raise TokenizerError(
                    f"line {number} is not '<base64> <rank>' as in the rest of the file; it is damaged: fetch it again"
                ) from None
        single = {bytes((byte,)) for byte in range(256)}
        if sorted(ranks.values()) != list(range(LLAMA3_RANKS)) or not single <= ranks.keys():
            raise TokenizerError(
                f"it has {len(ranks):,} ranks, and Llama 3's file has {LLAMA3_RANKS:,}, "
                "the 256 bytes among them: it is cut short or damaged, or of another model (Llama 4's has 200,000), "
                f"which splits text by another pattern; fetch it again, or give that model's {TOKENIZER_JSON}"
            )
        reserved = itertools.count()
        names = [_LLAMA3_SPECIALS.get(n) or f"reserved_special_token_{next(reserved)}" for n in range(256)]
        specials = {f"<|{name}|>": len(ranks) + n for n, name in enumerate(names)}
        self._encoding = tiktoken.Encoding(
            "llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=specials
        )
        self.vocab_size = self.used_ids = len(ranks) + len(specials)
        self.bos_id: int | None = specials["<|begin_of_text|>"]
        self.eos_id: int | None = specials["<|end_of_text|>"]
        self.content_hash = hashlib.sha256(content).hexdigest()
        self.special_ids = frozenset(specials.values())
        self.token_bytes = [0] * self.vocab_size
        for piece, number in ranks.items():
            self.token_bytes[number] = len(piece)

    def ids_of(self, text: str) -> list[int]:
        return [token for part in _short_parts(text) for token in self._encoding.encode_ordinary(part)]

    def name_of(self, token: int) -> str:
        return self._encoding.decode([token])

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([i for i in ids if i < self.vocab_size])


def _short_parts(text: str) -> Iterator[str]:
    """Split ``text`` into parts that tiktoken can encode; almost all texts are a single part."""
    for start in range(0, len(text), _LONGEST_TEXT):
        part = text[start : start + _LONGEST_TEXT]
        begin = length = 0
        for run in _RUNS.finditer(part) if _has_long_run(part) else ():
            # A run of full length may continue in the next match; the text is split between the two.
            if length == _LONGEST_RUN and part[run.start() - 1].isspace() == part[run.start()].isspace():
                yield part[begin : run.start()]
                begin = run.start()
            length = run.end() - run.start()
        yield part[begin:]


def _has_long_run(text: str) -> bool:
    """Whether ``text`` may have a run of full length; iterating over all runs would take as long as encoding it."""
    # A run of full length contains one of the intervals between multiples of half of that length.
    half = _LONGEST_RUN // 2
    return any(run.end() - start >= half for start in range(0, len(text), half) if (run := _RUNS.match(text, start)))
