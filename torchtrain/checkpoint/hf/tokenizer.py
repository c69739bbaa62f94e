"""Our tokenizer as the files that transformers' ``AutoTokenizer`` reads from a folder."""

import base64
import json
import re
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from torchtrain.checkpoint.hf.config import CONFIG_FILE
from torchtrain.datasets.tokenizers import (
    LLAMA3_PATTERN,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    JsonTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from torchtrain.errors import CheckpointError
from torchtrain.files import MISSING, read_file
from torchtrain.logging import logger

GENERATION_CONFIG = "generation_config.json"
_PROTO: Any = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]  # protobuf adds it when it is imported
# What may belong to a tokenizer.json, and is copied with it.
BESIDE = (
    *(TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json", GENERATION_CONFIG),
)


def write_hf_tokenizer(folder: Path, tokenizer: Tokenizer, file: Path, *, bos: bool, eos_ids: Sequence[int]) -> None:
    """Write ``tokenizer``, read from ``file``, so that it gives the same ids there.

    ``bos``: so that a prompt begins as a document of training does; else as the tokenizer's own files say.
    ``eos_ids``: what a generation config must name that is copied with it.
    """
    content = file.read_bytes()
    added = ([tokenizer.bos_id] if tokenizer.bos_id is not None else [], []) if bos else tokenizer.added_ids
    if isinstance(tokenizer, JsonTokenizer):
        for name in BESIDE:
            _copy(file.with_name(name), folder)
        library = Library.from_buffer(content)
        if added != tokenizer.added_ids:
            content = _with_post_processor(content, library, added[0])
        (folder / TOKENIZER_JSON).write_bytes(content)
    else:
        if isinstance(tokenizer, SentencePieceTokenizer):
            (folder / "tokenizer.model").write_bytes(content)
            library = _of_pieces(content)
        else:
            library = _of_ranks(tokenizer, content)
        library.post_processor = _template(library, *added)
        (folder / TOKENIZER_JSON).write_text(library.to_str(), encoding="utf-8")
    if bos or not (folder / TOKENIZER_CONFIG).exists():
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        names = {name: library.id_to_token(i) for name, i in ids.items() if i is not None}
        # The classes of some models make a post-processor of their own: this one takes that of tokenizer.json.
        fixed: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        fixed |= {"add_bos_token": bool(added[0]), "add_eos_token": bool(added[1])}
        _update_json(folder / TOKENIZER_CONFIG, {"clean_up_tokenization_spaces": False, **names}, fixed)
    if bos and eos_ids and (folder / GENERATION_CONFIG).exists():
        _update_json(folder / GENERATION_CONFIG, {}, {"eos_token_id": one_or_all(eos_ids)})


def one_or_all(ids: Sequence[int]) -> int | list[int] | None:
    """``eos_token_id`` of a config, which is an id or a list of them."""
    return list(ids) if len(ids) > 1 else next(iter(ids), None)


def find_eos_ids(tokenizer: Tokenizer, folder: Path, *, bos: bool) -> list[int]:
    """Ids at which generation ends: those that the configs in ``folder`` name, as transformers reads them.

    They are in ``generation_config.json``, or, without that file, in ``config.json``. Where they name none it is the
    tokenizer's; where documents of training end with that (``bos``), it is always among them.

    Raises:
        CheckpointError: the file is damaged.
    """
    own = [tokenizer.eos_id] if tokenizer.eos_id is not None else []
    named = _read_eos_ids(folder)
    return list(dict.fromkeys(own + named)) if bos else named or own


def _read_eos_ids(folder: Path) -> list[int]:
    for name in (GENERATION_CONFIG, CONFIG_FILE):
        try:
            content = json.loads(read_file(folder / name))
            value = content.get("eos_token_id")
        except MISSING:
            continue
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"{folder / name} is damaged: {error}") from None
        ids = value if isinstance(value, list) else [value] if value is not None else []
        if any(type(i) is not int for i in ids):
            raise CheckpointError(f"{folder / name}: eos_token_id = {value!r} must be a token's id, or a list of them")
        return list(dict.fromkeys(ids))
    return []


def _copy(path: Path, folder: Path) -> None:
    """Copy ``path`` into ``folder`` if it exists, but no link to what does not belong to its folder.

    Exports are published, and a link may lead to any file of this user. Of links only those within the folder are
    followed, and those of a snapshot in the cache of the Hugging Face hub to the files that it is made of.
    """
    target = path.resolve()
    home = path.parent.resolve()
    blobs = [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]
    try:
        is_file = stat.S_ISREG(target.stat().st_mode)
    except OSError:
        is_file = False
    if is_file and any(target.is_relative_to(allowed) for allowed in (home, *blobs)):
        shutil.copyfile(target, folder / path.name)
    elif path.is_symlink() or path.exists():
        logger.warning("%r is not exported: it is a link to outside of its folder, or no regular file", str(path))


def _update_json(path: Path, defaults: dict[str, Any], values: dict[str, Any]) -> None:
    """Add ``defaults`` and set ``values`` in a JSON object. A file that has them is left as it is."""
    old = json.loads(path.read_bytes()) if path.exists() else {}
    new = {**defaults, **old, **values}
    if new != old:
        path.write_text(json.dumps(new, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _template(library: Library, before: Sequence[int], after: Sequence[int]) -> processors.TemplateProcessing | None:
    """A post-processor that puts these ids around a text; None for no ids."""
    places, ids = [], []
    for token in (*before, *after):
        text = library.id_to_token(token) or ""
        # Other readers than this library take the place's name for the token; it takes none with : or $.
        places.append(f"token {token}" if set(":$") & set(text) else text)
        ids.append({"id": places[-1], "ids": [token], "tokens": [text]})
    if not places:
        return None
    head, tail = places[: len(before)], places[len(before) :]
    return processors.TemplateProcessing([*head, "$A", *tail], [*head, "$A", "$B:1", *tail], ids)


def _with_post_processor(content: bytes, library: Library, before: Sequence[int]) -> bytes:
    """The tokenizer.json ``content`` with a post-processor that adds ``before`` alone. All else stays as it is."""
    about = json.loads(content)
    old = about.get("post_processor") or {"type": "Sequence", "processors": []}
    steps = old["processors"] if old["type"] == "Sequence" else [old]
    steps = [step for step in steps if step["type"] == "ByteLevel"]  # which adds no ids
    if (template := _template(library, before, [])) is not None:
        steps.append(json.loads(template.__getstate__()))
    about["post_processor"] = {"type": "Sequence", "processors": steps} if len(steps) > 1 else next(iter(steps), None)
    return json.dumps(about, ensure_ascii=False, indent=2).encode()


def _merges(pieces: Sequence[str]) -> list[tuple[str, str]]:
    """All pairs that make one of ``pieces``, in the order of what they make.

    BPE merges within a piece in the same way wherever it stands, so it ends with one of its pairs: the others change
    nothing.
    """
    known = set(pieces)
    cuts = ((piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece)))
    return [(left, right) for left, right in cuts if left in known and right in known]


def _of_pieces(content: bytes) -> Library:
    """A SentencePiece model as Hugging Face's tokenizers library has it.

    transformers' own LlamaTokenizer takes each for a BPE, normalizes nothing, and adds no space before a space.
    """
    proto = _PROTO.FromString(content)
    trained, normal, kinds = proto.trainer_spec, proto.normalizer_spec, _PROTO.SentencePiece
    if trained.model_type == trained.WORD or trained.treat_whitespace_as_suffix:
        logger.warning("this SentencePiece model (type WORD, or whitespace as a suffix) has other ids in transformers")
    names = [piece.piece for piece in proto.pieces]
    own = sorted((p.piece for p in proto.pieces if p.type == kinds.USER_DEFINED), key=len, reverse=True)
    unknown = next(number for number, piece in enumerate(proto.pieces) if piece.type == kinds.UNKNOWN)
    if trained.model_type == trained.UNIGRAM:
        scored = [(piece.piece, piece.score) for piece in proto.pieces]
        library = Library(models.Unigram(scored, unknown, trained.byte_fallback))
    else:
        scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == kinds.NORMAL}
        library = Library(
            models.BPE(
                {name: number for number, name in enumerate(names)},
                _merges(sorted(scores, key=lambda piece: -scores[piece])),
                unk_token=names[unknown],
                fuse_unk=True,
                byte_fallback=trained.byte_fallback,
                ignore_merges=bool(own),  # a symbol of the user's own is a word, and no merge leads to it
            )
        )
    steps: list[normalizers.Normalizer] = []
    if normal.precompiled_charsmap:
        steps.append(normalizers.Precompiled(normal.precompiled_charsmap))
    if normal.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex("\\A +| +\\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    back = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if normal.add_dummy_prefix:
        steps.append(normalizers.Prepend("\u2581"))
        back.append(decoders.Strip(" ", 1, 0))
    library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    if own:
        library.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, own))), "isolated")
    library.decoder = decoders.Sequence(back)
    library.add_special_tokens([p.piece for p in proto.pieces if p.type in (kinds.UNKNOWN, kinds.CONTROL)])
    return library


def _of_ranks(tokenizer: Tokenizer, content: bytes) -> Library:
    """A tiktoken rank file as a byte-level BPE of that library."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, content.splitlines())}
    # GPT-2's letter for each byte: the character of that number if it is printable, else the next from 256 on.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = iter(letter for letter in alphabet if ord(letter) > 255)
    letters = [chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)]
    in_order = sorted(ranks, key=ranks.__getitem__)
    vocabulary = {"".join(letters[byte] for byte in token): ranks[token] for token in in_order}
    library = Library(models.BPE(vocabulary, _merges(list(vocabulary)), ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([tokenizer.decode([n]) for n in range(len(ranks), tokenizer.vocab_size)])
    return library
