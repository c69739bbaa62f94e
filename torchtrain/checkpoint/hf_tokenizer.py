"""Our tokenizer as the files that transformers' ``AutoTokenizer`` reads from a folder."""

import base64
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2

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
    names = {}
    if isinstance(tokenizer, JsonTokenizer):
        (folder / TOKENIZER_JSON).write_bytes(content)
        for name in BESIDE:
            if (file.parent / name).is_file():
                shutil.copyfile(file.parent / name, folder / name)
        if (folder / CONFIG_FILE).exists():
            return
    else:
        if isinstance(tokenizer, SentencePieceTokenizer):
            (folder / "tokenizer.model").write_bytes(content)
            parts = _of_pieces(content)
        else:
            parts = _of_ranks(tokenizer, content)
        names = {token["id"]: token["content"] for token in parts["added_tokens"]}
        whole = {"version": "1.0", **parts, "post_processor": _after_bos(tokenizer.bos_id, names)}
        (folder / TOKENIZER_JSON).write_text(json.dumps(whole), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, i in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        if i is not None:
            config[name] = names.get(i) or tokenizer.decode([i])
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _after_bos(bos_id: int | None, names: Mapping[int, str]) -> dict[str, Any]:
    """What puts the bos, if there is one, before a text."""
    frame = [{"Sequence": {"id": "A", "type_id": 0}}]
    special_tokens = {}
    if bos_id is not None:
        bos = names[bos_id]
        frame.insert(0, {"SpecialToken": {"id": bos, "type_id": 0}})
        special_tokens[bos] = {"id": bos, "ids": [bos_id], "tokens": [bos]}
    return {
        "type": "TemplateProcessing",
        "single": frame,
        "pair": [*frame, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special_tokens,
    }


def _added_token(number: int, name: str) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, "special": True, **plain}


def _of_pieces(content: bytes) -> dict[str, Any]:
    """A SentencePiece model as Hugging Face's tokenizers library has it.

    transformers' own LlamaTokenizer takes each for a BPE, normalizes nothing, and adds no space before a space.
    """
    proto = _PROTO.FromString(content)
    if proto.trainer_spec.model_type == proto.trainer_spec.WORD or proto.trainer_spec.treat_whitespace_as_suffix:
        logger.warning("this SentencePiece model (type WORD, or whitespace as a suffix) has other ids in transformers")
    normal, kinds = proto.normalizer_spec, _PROTO.SentencePiece
    normalizers: list[dict[str, Any]] = []
    if normal.precompiled_charsmap:
        charsmap = base64.b64encode(normal.precompiled_charsmap).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if normal.remove_extra_whitespaces:
        extra = (("\\A +| +\\z", ""), (" {2,}", " "))
        normalizers += [{"type": "Replace", "pattern": {"Regex": old}, "content": new} for old, new in extra]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if normal.add_dummy_prefix:
        normalizers.append({"type": "Prepend", "prepend": "\u2581"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"})
    names = [piece.piece for piece in proto.pieces]
    own = sorted((p.piece for p in proto.pieces if p.type == kinds.USER_DEFINED), key=len, reverse=True)
    unknown = next(number for number, piece in enumerate(proto.pieces) if piece.type == kinds.UNKNOWN)
    model: dict[str, Any] = {"byte_fallback": proto.trainer_spec.byte_fallback}
    if proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM:
        vocab = [(piece.piece, piece.score) for piece in proto.pieces]
        model |= {"type": "Unigram", "unk_id": unknown, "vocab": vocab}
    else:
        scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == kinds.NORMAL}
        merges = [
            (piece[:cut], piece[cut:])
            for piece in sorted(scores, key=lambda piece: -scores[piece])
            for cut in range(1, len(piece))
            if piece[:cut] in scores and piece[cut:] in scores
        ]
        # A symbol of the user's own is a word, and no merge leads to it.
        model |= {"type": "BPE", "unk_token": names[unknown], "fuse_unk": True, "ignore_merges": bool(own)}
        model |= {"vocab": {name: number for number, name in enumerate(names)}, "merges": merges}
    split = {"type": "Split", "pattern": {"Regex": "|".join(map(re.escape, own))}, "behavior": "Isolated"}
    special = (kinds.UNKNOWN, kinds.CONTROL)
    return {
        "added_tokens": [_added_token(n, piece.piece) for n, piece in enumerate(proto.pieces) if piece.type in special],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {**split, "invert": False} if own else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _of_ranks(tokenizer: Tokenizer, content: bytes) -> dict[str, Any]:
    """A tiktoken rank file as a byte-level BPE of that library."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, content.splitlines())}
    letters = _byte_letters()
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            pieces = _merged(token, ranks, below=rank)
            if len(pieces) == 2:  # else no merge leads to it; ignore_merges finds it as a whole word
                merges.append(["".join(letters[byte] for byte in piece) for piece in pieces])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "added_tokens": [_added_token(n, tokenizer.decode([n])) for n in range(len(ranks), tokenizer.vocab_size)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()},
            "merges": merges,
        },
    }


def _merged(token: bytes, ranks: dict[bytes, int], below: int) -> Sequence[bytes]:
    """What byte pair encoding makes of ``token`` with the tokens of rank under ``below``: the two that it joins."""
    pieces = [token[i : i + 1] for i in range(len(token))]
    while len(pieces) > 2:
        pairs = [ranks.get(pieces[i] + pieces[i + 1], below) for i in range(len(pieces) - 1)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[best] >= below:
            break
        pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
    return pieces


def _byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte, which byte-level BPE files are written in."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
