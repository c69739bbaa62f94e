"""Our tokenizer as the files that transformers' ``AutoTokenizer`` reads from a folder."""

import base64
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from torchtrain.tokenizers import LLAMA3_PATTERN, TOKENIZER_JSON, JsonTokenizer, SentencePieceTokenizer, Tokenizer

CONFIG_FILE = "tokenizer_config.json"
# What may belong to a tokenizer.json, and is copied with it.
BESIDE = (
    *(CONFIG_FILE, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json", "generation_config.json"),
)


def write_hf_tokenizer(folder: Path, tokenizer: Tokenizer, file: Path) -> None:
    """Write ``tokenizer``, read from ``file``, so that it gives the same ids there, after a bos."""
    content = file.read_bytes()
    pieces = None
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if isinstance(tokenizer, JsonTokenizer):
        (folder / TOKENIZER_JSON).write_bytes(content)
        for name in BESIDE:
            if (file.parent / name).is_file():
                shutil.copyfile(file.parent / name, folder / name)
        if (folder / CONFIG_FILE).exists():
            return
    elif isinstance(tokenizer, SentencePieceTokenizer):
        (folder / "tokenizer.model").write_bytes(content)
        pieces = sentencepiece.SentencePieceProcessor(model_proto=content)
        config = {
            "tokenizer_class": "LlamaTokenizer",
            "legacy": False,
            "add_prefix_space": pieces.encode("a", out_type=str)[0].startswith("\u2581"),
            "add_bos_token": True,
            "add_eos_token": False,
        }
    else:
        (folder / TOKENIZER_JSON).write_text(json.dumps(_tokenizer_json(tokenizer, content)), encoding="utf-8")
    for name, i in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        if i is not None:
            config[name] = tokenizer.decode([i]) if pieces is None else pieces.id_to_piece(i)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _tokenizer_json(tokenizer: Tokenizer, content: bytes) -> dict[str, Any]:
    """A tiktoken rank file as a byte-level BPE of Hugging Face's tokenizers library."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, content.splitlines())}
    letters = _byte_letters()
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            pieces = _merged(token, ranks, below=rank)
            if len(pieces) == 2:  # else no merge leads to it; ignore_merges finds it as a whole word
                merges.append(["".join(letters[byte] for byte in piece) for piece in pieces])
    frame = [{"Sequence": {"id": "A", "type_id": 0}}]
    special_tokens = {}
    if tokenizer.bos_id is not None:
        bos = tokenizer.decode([tokenizer.bos_id])
        frame.insert(0, {"SpecialToken": {"id": bos, "type_id": 0}})
        special_tokens[bos] = {"id": bos, "ids": [tokenizer.bos_id], "tokens": [bos]}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": number,
                "content": tokenizer.decode([number]),
                "special": True,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            }
            for number in range(len(ranks), tokenizer.vocab_size)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": frame,
            "pair": [*frame, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": special_tokens,
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
