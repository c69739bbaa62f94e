"""Write a tokenizer as the files that ``AutoTokenizer`` of transformers reads; which one belongs to a model."""

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

from torchtrain.checkpoint.format import read_manifest
from torchtrain.checkpoint.storage import StoredCheckpoint
from torchtrain.datasets.tokenizers import (
    LLAMA3_PATTERN,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    TOKENIZER_JSON,
    JsonTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from torchtrain.errors import CheckpointError, TokenizerError
from torchtrain.files import MISSING, parse_json, printable, read_file
from torchtrain.logging import logger
from torchtrain.plugins.huggingface.config import CONFIG_FILE

GENERATION_CONFIG = "generation_config.json"
_PROTO: Any = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]  # protobuf adds it at import
# Other files of a tokenizer, which are copied together with its tokenizer.json.
BESIDE = tuple(name for name in TOKENIZER_FILES if name not in (TOKENIZER_JSON, CONFIG_FILE))


def write_hf_tokenizer(folder: Path, tokenizer: Tokenizer, file: Path, *, bos: bool, eos_ids: Sequence[int]) -> None:
    """Write ``tokenizer``, which was read from ``file``, to ``folder``; it must produce the same ids in transformers.

    Args:
        bos: whether a prompt begins with a BOS token, as the documents of a run do; if not, as the tokenizer's own
            files define it.
        eos_ids: the ids at which generation ends, for a ``generation_config.json`` that is copied with it.
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
            library = _from_sentencepiece(content)
        else:
            library = _from_tiktoken(tokenizer, content)
        library.post_processor = _template(library, *added)
        (folder / TOKENIZER_JSON).write_text(library.to_str(), encoding="utf-8")
    if bos or not (folder / TOKENIZER_CONFIG).exists():
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        names = {name: library.id_to_token(i) for name, i in ids.items() if i is not None}
        # The tokenizer classes of some models replace the post-processor; this class uses that of tokenizer.json.
        fixed: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        fixed |= {"add_bos_token": bool(added[0]), "add_eos_token": bool(added[1])}
        _update_json(folder / TOKENIZER_CONFIG, {"clean_up_tokenization_spaces": False, **names}, fixed)
    else:
        _require_known_class(folder / TOKENIZER_CONFIG)
    if bos and eos_ids and (folder / GENERATION_CONFIG).exists():
        _update_json(folder / GENERATION_CONFIG, {}, {"eos_token_id": one_or_all(eos_ids)})


def _require_known_class(path: Path) -> None:
    """Write the class of a tokenizer.json by the name that all versions of transformers have.

    Version 5 calls it TokenizersBackend, and lists additional special tokens under another name than version 4 reads.
    """
    content = parse_json(path.read_bytes(), path, TokenizerError)
    if content.get("tokenizer_class") != "TokenizersBackend":
        return
    fixed: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if isinstance(content.get("extra_special_tokens"), list):  # version 4 expects an object there
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
        path.write_text(json.dumps(content), encoding="utf-8")
    _update_json(path, {}, fixed)


def one_or_all(ids: Sequence[int]) -> int | list[int] | None:
    """Value of ``eos_token_id`` in a config: an id, or a list if there are several."""
    return list(ids) if len(ids) > 1 else next(iter(ids), None)


def find_eos_ids(tokenizer: Tokenizer, folder: Path, *, bos: bool) -> list[int]:
    """Ids at which generation ends: the ``eos_token_id`` of the configs in ``folder``, as in transformers.

    They are in ``generation_config.json``, or, if that file is missing, in ``config.json``. The EOS id of the tokenizer
    is used if there are none; it is always included if the documents of the training ended with it (``bos``).

    Raises:
        CheckpointError: the file is damaged.
    """
    own = [tokenizer.eos_id] if tokenizer.eos_id is not None else []
    named = _read_eos_ids(folder)
    return list(dict.fromkeys(own + named)) if bos else named or own


def _read_eos_ids(folder: Path) -> list[int]:
    for name in (GENERATION_CONFIG, CONFIG_FILE):
        try:
            content = parse_json(read_file(folder / name), folder / name, CheckpointError)
            value = content.get("eos_token_id")
        except MISSING:
            continue
        except AttributeError as error:
            raise CheckpointError(f"{folder / name} is damaged: {error}") from None
        ids = value if isinstance(value, list) else [value] if value is not None else []
        if any(type(i) is not int for i in ids):
            raise CheckpointError(
                f"{folder / name}: eos_token_id = {value!r} must be a token id, or a list of token ids"
            )
        return list(dict.fromkeys(ids))
    return []


def _copy(path: Path, folder: Path) -> None:
    """Copy ``path`` into ``folder`` if it exists, unless it is a link to a file outside of its own folder.

    Exports are published, and a link may point to any file that this user can read. Only links within the folder are
    followed, and those of a snapshot in the cache of the Hugging Face hub to the blobs of its repository.
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
        logger.warning("%r is not exported: it is a link out of its folder, or not a regular file", str(path))


def _update_json(path: Path, defaults: dict[str, Any], values: dict[str, Any]) -> None:
    """Set ``values`` in a JSON file, and ``defaults`` where a key is missing. Without a change it is not rewritten."""
    old = parse_json(path.read_bytes(), path, TokenizerError) if path.exists() else {}
    new = {**defaults, **old, **values}
    if new != old:
        path.write_text(json.dumps(new, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _template(library: Library, before: Sequence[int], after: Sequence[int]) -> processors.TemplateProcessing | None:
    """A post-processor that adds these ids before and after a text; None if there are none."""
    names, ids = [], []
    for token in (*before, *after):
        text = library.id_to_token(token) or ""
        # Other libraries read the name in the template as the token itself. This one does not accept : or $ in it.
        names.append(f"token {token}" if set(":$") & set(text) else text)
        ids.append({"id": names[-1], "ids": [token], "tokens": [text]})
    if not names:
        return None
    head, tail = names[: len(before)], names[len(before) :]
    return processors.TemplateProcessing([*head, "$A", *tail], [*head, "$A", "$B:1", *tail], ids)


def _with_post_processor(content: bytes, library: Library, before: Sequence[int]) -> bytes:
    """The tokenizer.json ``content`` with a post-processor that adds only ``before``; the rest is not changed."""
    about = parse_json(content, TOKENIZER_JSON, TokenizerError)
    old = about.get("post_processor") or {"type": "Sequence", "processors": []}
    steps = old["processors"] if old["type"] == "Sequence" else [old]
    steps = [step for step in steps if step["type"] == "ByteLevel"]  # which adds no ids
    if (template := _template(library, before, [])) is not None:
        steps.append(json.loads(template.__getstate__()))
    about["post_processor"] = {"type": "Sequence", "processors": steps} if len(steps) > 1 else next(iter(steps), None)
    return json.dumps(about, ensure_ascii=False, indent=2).encode()


def _merges(pieces: Sequence[str]) -> list[tuple[str, str]]:
    """All pairs of pieces whose concatenation is one of ``pieces``, in the order of these results.

    BPE merges the characters of a piece in the same way in every text, so that it ends with one of these pairs; the
    other pairs have no effect.
    """
    known = set(pieces)
    cuts = ((piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece)))
    return [(left, right) for left, right in cuts if left in known and right in known]


def _from_sentencepiece(content: bytes) -> Library:
    """Convert a SentencePiece model to Hugging Face's tokenizers library.

    LlamaTokenizer of transformers is not used, because it reads every model as a BPE model, without normalization, and
    does not add a space before a space.
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
                ignore_merges=bool(own),  # a user-defined symbol is a single piece, which no merges produce
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


def _from_tiktoken(tokenizer: Tokenizer, content: bytes) -> Library:
    """Convert a tiktoken rank file to a byte-level BPE model of the tokenizers library."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, content.splitlines())}
    # GPT-2's character for each byte: that with the same code point if it is printable, else the next one from 256.
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


def begins_with_bos(folder: StoredCheckpoint | Path, tokenizer: Tokenizer) -> bool:
    """Whether the model in ``folder``, as ``find_weights`` gave it, knows texts that begin with bos.

    A run's documents do, and so do those of Meta's models. Another model of Hugging Face's is used as its tokenizer's
    own files say, also where ``convert`` has made a checkpoint of it.
    """
    if isinstance(folder, Path):
        return False
    return read_manifest(folder).run is not None or not isinstance(tokenizer, JsonTokenizer)


def check_tokenizer(checkpoint: StoredCheckpoint, tokenizer: Tokenizer, path: str) -> None:
    """Raise CheckpointError where ``tokenizer``, which is in ``path`` now, is not that of the run that made
    ``checkpoint``."""
    saved = read_manifest(checkpoint).data.get("model.tokenizer_path", tokenizer.identity)
    if saved != tokenizer.identity:
        raise CheckpointError(
            f"{checkpoint} is of a run whose tokenizer in model.tokenizer_path = {path!r} was another one "
            f"({printable(saved)}, now {tokenizer.identity}): put it back, or name the one to use by tokenizer_path"
        )
