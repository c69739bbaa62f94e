"""Our tokenizer as the files that transformers' ``AutoTokenizer`` reads from a folder."""

import base64
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from torchtrain.log import logger
from torchtrain.tokenizers import LLAMA3_PATTERN, TOKENIZER_JSON, JsonTokenizer, SentencePieceTokenizer, Tokenizer

CONFIG_FILE = "tokenizer_config.json"
_PROTO: Any = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]  # protobuf adds it when it is imported
# What may belong to a tokenizer.json, and is copied with it.
BESIDE = (
    *(CONFIG_FILE, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)


def write_hf_tokenizer(folder: Path, tokenizer: Tokenizer, file: Path) -> None:
    """Write ``tokenizer``, read from ``file``, so that it gives the same ids there, after a bos."""
    content = file.read_bytes()
    if isinstance(tokenizer, JsonTokenizer):
        (folder / TOKENIZER_JSON).write_bytes(content)
        for name in BESIDE:
            if (file.parent / name).is_file():
                shutil.copyfile(file.parent / name, folder / name)
        if (folder / CONFIG_FILE).exists():
            return
        library = Library.from_buffer(content)
    else:
        if isinstance(tokenizer, SentencePieceTokenizer):
            (folder / "tokenizer.model").write_bytes(content)
            library = _of_pieces(content)
        else:
            library = _of_ranks(tokenizer, content)
        if tokenizer.bos_id is not None:
            text = library.id_to_token(tokenizer.bos_id) or ""
            # Other readers than this library take the place's name for the token; it takes none with : or $.
            place = "bos" if set(":$") & set(text) else text
            bos = {"id": place, "ids": [tokenizer.bos_id], "tokens": [text]}
            library.post_processor = processors.TemplateProcessing([place, "$A"], [place, "$A", "$B:1"], [bos])
        (folder / TOKENIZER_JSON).write_text(library.to_str(), encoding="utf-8")
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    config: dict[str, Any] = {name: library.id_to_token(i) for name, i in ids.items() if i is not None}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


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
