"""Train the small SentencePiece model of the package: BPE with byte fallback on the Python standard library.

    python scripts/train_tokenizer.py [--output torchtrain/assets/tokenizer.model] [--vocab_size 4096]

The model depends only on the text; the committed one was trained with Python 3.11.7. Text is not normalized, so that
decoding returns the encoded text with every space and line end.
"""

import argparse
import io
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

from torchtrain.datasets.standard_library import standard_library


def lines() -> Iterator[str]:
    for text in standard_library().texts():
        yield from (line for line in text.split("\n") if line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).parent.parent / "torchtrain" / "assets" / "tokenizer.model"
    parser.add_argument("--output", type=Path, default=default)
    parser.add_argument("--vocab_size", type=int, default=4096)
    options = parser.parse_args()
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines(),
        model_writer=model,
        vocab_size=options.vocab_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        # Lines come without their ends, so this piece would never be learned.
        user_defined_symbols=["\n"],
        max_sentence_length=1 << 16,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=1,
    )
    options.output.write_bytes(model.getvalue())
    print(f"{options.output}: {options.vocab_size} pieces, {len(model.getvalue())} bytes")


if __name__ == "__main__":
    main()
