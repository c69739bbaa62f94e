"""Small tokenizers of the types that Hugging Face models use, trained here, and texts that are hard to tokenize."""

import argparse
import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from torchtrain.datasets.tokenizers import LLAMA3_PATTERN

BOS, EOS, TOOL = "<|begin|>", "<|end|>", "<tool_call>"
PIECES = """\
Grüße, façade, naïve, Ærø, İstanbul ıŞ, Việt Nam
Съешь ещё этих мягких
Ξεσκεπάζω την ψυχοφθόρα
אבג דהוז
مرحبا بالعالم
नमस्ते दुनिया
สวัสดีชาวโลก
こんにちは世界、カタカナ
你好,世界。
안녕하세요 세계
የኢትዮጵያ
ᏣᎳᎩ
hello world
it's we'll I'M don't
0
12
123456789
3.14159e-10
1,000,000
٣٤٥
½ ² Ⅷ
    return {'a': x ** 2}  # !
if (a<=b && c!=d) { x+=1; }
<html><body>&amp;</body></html>
C:\\\\dir\\n
https://example.org/?q=%20&x=1#y
........
-_-_-_
""".splitlines()
PIECES += [
    *(
        "\U0001f469\u200d\U0001f469\u200d\U0001f467\U0001f3fd",
        "\U0001f642",
        "\U0001d518\U0001d52b",
        "e\u0301 \u00e9 \u212b A\u030a",
    ),
    *("\u200b\u200d\ufeff", "\x00\x01\x7f", "\u2028\u2029\x85", "\ud800", "\ufffd", "\u2581\u2581a", "a" * 32),
    *(" ", "  ", " " * 17, "\t\t", "\n\n\n", "\r\n", " \n \n", "\u00a0\u3000"),
]
SPECIAL_PIECES = [BOS, EOS, TOOL, f"{BOS}{EOS}", f"a{EOS}b", "<|begin|", "<s>", "</s>", "<unk>", "<0x0A>"]


def hard_texts(count: int = 500) -> list[str]:
    rng = random.Random(0)
    texts = ["", *PIECES, *SPECIAL_PIECES]
    while len(texts) < count:
        texts.append("".join(rng.choice(PIECES + SPECIAL_PIECES[:5]) for _ in range(rng.randrange(1, 9))))
    return texts


def byte_level() -> Tokenizer:
    """A tokenizer like Qwen's: byte-level BPE after a split by a pattern, on text in NFC."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    pattern = LLAMA3_PATTERN.replace("{1,3}", "")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))


def metaspace() -> Tokenizer:
    """A tokenizer like Llama 2's: SentencePiece BPE with byte fallback for unknown characters."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    replace = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence(
        [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = trained(
        tokenizer, trainers.BpeTrainer(vocab_size=600, special_tokens=special, max_token_length=8, show_progress=False)
    )
    # The byte tokens are ordinary pieces, as in SentencePiece's own vocabulary.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(content))


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return trained(
        tokenizer,
        trainers.UnigramTrainer(vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False),
    )


def trained(tokenizer: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    tokenizer.train_from_iterator(Path(argparse.__file__).read_text().splitlines(keepends=True)[:800], trainer)
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.add_tokens([AddedToken(TOOL, normalized=False)])
    return tokenizer


TOKENIZERS = {"byte-level BPE": byte_level, "metaspace BPE": metaspace, "unigram": unigram}


def save_tokenizer(folder: Path, kind: str = "byte-level BPE") -> Path:
    """Save a tokenizer in the format of transformers, and return ``folder``."""
    fast = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[kind](), bos_token=BOS, eos_token=EOS)
    fast.save_pretrained(folder)
    return folder
