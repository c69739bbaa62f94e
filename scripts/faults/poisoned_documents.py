"""Runs with one poisoned document each, and where ``explain`` lists it: python scripts/faults/poisoned_documents.py

Each of 30 runs of a small model has a document of another kind in English text: the docstrings of the Python standard
library. The step that has most of it is explained. Prints a line for each run: the place of the document in the order
of mean losses, in that of ``explain``, and in that of ``explain --gradients``. ``--kinds German`` makes only runs whose
kind has this word, ``--half first`` only those of the kinds for which the order of ``explain`` was made, ``--half
second`` only the other ones.
"""

import argparse
import ast
import base64
import codecs
import json
import os
import random
import string
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from torchtrain.config.parse import from_text
from torchtrain.config.schema import JobConfig
from torchtrain.datasets.build import build_dataloader
from torchtrain.datasets.local_files import open_text_files
from torchtrain.datasets.options import SourceConfig
from torchtrain.datasets.token_folder import LocalFolder
from torchtrain.datasets.tokenize_text import tokenize
from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.plugins.explain.explanation import Document, by_score, explain
from torchtrain.plugins.explain.run import open_run

SEQ_LEN = 128
MIN_CHARACTERS = 200  # of a document
CONFIG = """
[model]
shape = {{ dim = 64, n_layers = 2, n_heads = 4, n_kv_heads = 2, ffn_dim = 128 }}
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 5
decay_type = "constant"
[training]
seed = {seed}
seq_len = 128
local_batch_size = {local}
global_batch_size = {rows}
steps = {steps}
mixed_precision_param = "float32"
[job]
device = "cpu"
[metrics]
log_freq = 10
enable_tensorboard = false
[report]
enable = false
[checkpoint]
interval = {interval}
interval_minutes = 0
async_mode = "disabled"
{sources}
"""
GERMAN = """Wer reitet so spät durch Nacht und Wind? Es ist der Vater mit seinem Kind; er hat den Knaben wohl in dem
Arm, er faßt ihn sicher, er hält ihn warm. Mein Sohn, was birgst du so bang dein Gesicht? Siehst, Vater, du den Erlkönig
nicht? Den Erlenkönig mit Kron und Schweif? Mein Sohn, es ist ein Nebelstreif. Du liebes Kind, komm, geh mit mir! Gar
schöne Spiele spiel ich mit dir; manch bunte Blumen sind an dem Strand, meine Mutter hat manch gülden Gewand."""
LATIN = """Gallia est omnis divisa in partes tres, quarum unam incolunt Belgae, aliam Aquitani, tertiam qui ipsorum
lingua Celtae, nostra Galli appellantur. Hi omnes lingua, institutis, legibus inter se differunt. Gallos ab Aquitanis
Garumna flumen, a Belgis Matrona et Sequana dividit. Horum omnium fortissimi sunt Belgae, propterea quod a cultu atque
humanitate provinciae longissime absunt, minimeque ad eos mercatores saepe commeant."""
CHINESE = (
    "道可道非常道名可名非常名無名天地之始有名萬物之母故常無欲以觀其妙常有欲以觀其徼此兩者同出而異名同謂之玄玄之又玄衆妙之門"
    "天下皆知美之為美斯惡已皆知善之為善斯不善已"
)


def is_prose(text: str) -> bool:
    """Whether three of four words are words: a listing, a table or an example is as unusual as what is planted."""
    found = [word.strip(".,;:()'\"`") for word in text.split()]
    return sum(word.isalpha() for word in found) >= 0.75 * len(found)


@cache
def docstrings() -> list[str]:
    """Those of the standard library that are long enough and prose, each once, in a random order."""
    texts: dict[str, None] = {}
    skipped = ("/test", "/site-packages/", "/idlelib/", "/lib2to3/")
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if any(name in f"/{path.relative_to(library)}" for name in skipped):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escape sequences
                tree = ast.parse(path.read_bytes())
        except SyntaxError:  # some modules are examples of errors
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= MIN_CHARACTERS and is_prose(text):
                    texts[text] = None
    found = list(texts)
    random.Random(0).shuffle(found)
    return found


@cache
def source_code() -> list[str]:
    """Functions of the standard library without docstrings."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for name in ("argparse", "ast", "bdb", "calendar", "cgi", "cmd", "configparser", "csv", "difflib", "doctest"):
        text = (library / f"{name}.py").read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and not ast.get_docstring(node):
                code = ast.get_source_segment(text, node) or ""
                if MIN_CHARACTERS <= len(code) <= 2000:
                    found.append(code)
    random.Random(0).shuffle(found)
    return found


def english(choice: random.Random, characters: int) -> str:
    """A document of the corpus, or several, cut."""
    text = ""
    while len(text) < characters:
        text += f"{choice.choice(docstrings())} "
    return text[:characters]


def words(choice: random.Random, count: int) -> list[str]:
    return english(choice, count * 12).split()[:count]


def gibberish(choice: random.Random) -> str:
    return "".join(chr(choice.randrange(0x400, 0x3000)) for _ in range(60))


def random_words(choice: random.Random) -> str:
    letters = string.ascii_lowercase
    return " ".join("".join(choice.choices(letters, k=choice.randint(3, 9))) for _ in range(60))


def swapped_bytes(choice: random.Random) -> str:
    data = bytearray(english(choice, 500).encode("ascii", "replace"))
    data[::2], data[1::2] = data[1::2], data[::2]
    return data.decode()


def shuffled_words(choice: random.Random) -> str:
    found = [word for _ in range(40) for word in words(choice, 4)]
    choice.shuffle(found)
    return " ".join(found)


def table(choice: random.Random) -> str:
    rows = [[f"{choice.uniform(0, 1000):8.3f}" for _ in range(5)] for _ in range(12)]
    return "\n".join(" ".join(row) for row in rows)


def binary(choice: random.Random) -> str:
    return choice.randbytes(160).decode("latin-1")


def boilerplate(choice: random.Random) -> str:
    links = "".join(
        f'<li class="nav-item"><a href="/{word}.html" class="nav-link">{word.title()}</a></li>\n'
        for word in words(choice, 8)
    )
    return f'<div class="navbar"><ul id="menu">\n{links}</ul></div><div class="footer">&copy; 2024&nbsp;</div>'


def log_lines(choice: random.Random) -> str:
    return "\n".join(
        f"2024-03-{choice.randint(10, 28)}T{choice.randint(10, 23)}:{choice.randint(10, 59)}:07Z GET "
        f"https://cdn{choice.randint(1, 9)}.example.com/{choice.randbytes(4).hex()}.png 200 {choice.randint(99, 9999)}"
        for _ in range(8)
    )


Make = Callable[[random.Random], str]


@dataclass(frozen=True)
class Case:
    """A run with a poisoned document."""

    kind: str
    make: Make
    rows: int = 8
    """Of the global batch."""
    data: str = "local"
    """Or tokenized, or streamed."""
    ranks: int = 1
    copies: int = 1
    """How many times the document is in the data."""
    vary: bool = False
    """Whether the copies differ by some words."""
    tiny: bool = False
    """Whether the data have many documents of a few words, too."""
    epoch: int = 1
    """The step that is explained is in this epoch."""
    sources: int = 1
    """With 2, the document is in the smaller one of two; the other one has source code."""


FIRST = (
    Case("gibberish", gibberish),
    Case("German", lambda _: GERMAN, rows=64),
    Case("German, tiny pieces beside", lambda _: GERMAN, rows=64, tiny=True),
    Case("150 times one word", lambda _: "the " * 150),
    Case("300 times one word", lambda _: "value " * 300, rows=64, data="tokenized"),
    Case("a passage 8 times", lambda choice: english(choice, 120) * 8, data="streamed"),
    Case("base64", lambda choice: base64.b64encode(choice.randbytes(240)).decode(), rows=64, data="tokenized"),
    Case("gibberish, third epoch", gibberish, epoch=3),
    Case("shuffled words", shuffled_words),
    Case("near-duplicates fill a batch", lambda choice: english(choice, 500), copies=30, vary=True, data="streamed"),
    Case("a table of numbers", table, rows=64, data="streamed"),
    Case("one character 3,000 times", lambda _: "x" * 3000, data="tokenized"),
    Case("German, two ranks", lambda _: GERMAN, rows=64, ranks=2),
    Case("swapped bytes", swapped_bytes),
    Case("random letters, two sources", random_words, rows=64, sources=2),
)
SECOND = (
    Case("hex", lambda choice: choice.randbytes(160).hex()),
    Case("binary data as Latin-1", binary, rows=64, data="streamed"),
    Case("Latin", lambda _: LATIN, data="tokenized"),
    Case("HTML boilerplate", boilerplate, rows=64),
    Case("a document 8 times, third epoch", lambda choice: english(choice, 500), copies=8, epoch=3),
    Case("a line of code 20 times", lambda choice: f"{choice.choice(source_code())[:60]}\n" * 20, rows=64),
    Case("reversed text", lambda choice: english(choice, 500)[::-1], data="streamed"),
    Case(
        "words cut to two letters",
        lambda choice: " ".join(word[:2] for word in words(choice, 150)),
        rows=64,
        data="tokenized",
    ),
    Case("ROT13", lambda choice: codecs.encode(english(choice, 500), "rot13")),
    Case("DNA", lambda choice: "".join(choice.choices("ACGT", k=400)), rows=64),
    Case("capital letters", lambda choice: english(choice, 500).upper(), data="tokenized"),
    Case("lines of a log", log_lines, rows=64, data="streamed"),
    Case("dots, two ranks", lambda _: ". . . . . " * 60, ranks=2),
    Case("Chinese, tiny pieces beside", lambda _: CHINESE, rows=64, data="streamed", tiny=True),
    Case("code in text, two ranks", lambda choice: choice.choice(source_code())[:500], rows=64, ranks=2),
)


def varied(text: str, choice: random.Random) -> str:
    """``text`` with another word in place of one of twenty."""
    return " ".join(choice.choice(words(choice, 3)) if choice.random() < 0.05 else word for word in text.split())


def documents(case: Case, choice: random.Random) -> tuple[list[str], set[str]]:
    """Those of the source, in order, and the poisoned ones."""
    tokens = 12_000 if case.epoch > 1 else case.rows * SEQ_LEN * (40 if case.rows > 8 else 120)
    clean, size = [], 0
    pool = iter(docstrings())
    while size < tokens * 3.6 and (text := next(pool, None)):  # characters of a token
        clean.append(text)
        size += len(text)
    if case.tiny:
        clean += [" ".join(words(choice, choice.randint(1, 6))) for _ in range(len(clean))]
    text = case.make(choice)
    poison = [varied(text, choice) if case.vary else text for _ in range(case.copies)]
    if case.vary:  # one after the other
        place = choice.randrange(len(clean) // 2, len(clean) * 3 // 4)  # which the stream reaches in a late step
        return clean[:place] + poison + clean[place:], set(poison)
    texts = clean + poison
    choice.shuffle(texts)
    return texts, set(poison)


def write(folder: Path, name: str, case: Case, texts: Sequence[str]) -> SourceConfig:
    """Write ``texts`` as a source of the data of ``case``."""
    path = folder / name
    path.mkdir()
    lines = "".join(f"{json.dumps({'text': text})}\n" for text in texts)
    (path / "texts.jsonl").write_text(lines)
    if case.data == "tokenized":
        output = LocalFolder(folder / f"tokens-{name}")
        output.path.mkdir()
        tokenize(open_text_files([str(path)]), load_tokenizer(), output, processes=1)
        return SourceConfig(path=str(output.path))
    return SourceConfig(path=f"file://{path}" if case.data == "streamed" else str(path))


def config_of(case: Case, sources: Sequence[SourceConfig], seed: int, steps: int) -> str:
    tables = "".join(
        f'[[data.sources]]\npath = "{source.path}"\nweight = {weight}\n'
        for source, weight in zip(sources, (0.75, 0.25), strict=False)
    )
    if case.vary:
        tables = f'[data]\npath = "{sources[0].path}"\n[remote_data]\nstreams = 1\n'
    local = min(8, case.rows // case.ranks)
    return CONFIG.format(
        seed=seed, rows=case.rows, local=local, steps=steps, interval=max(1, steps - 1), sources=tables
    )


def find_step(config: JobConfig, case: Case, is_poisoned: Callable[[list[int], int], bool]) -> tuple[int, int]:
    """The step of ``case.epoch`` that has most tokens of the poisoned documents, and their number."""
    tokenizer, training = load_tokenizer(""), config.training
    loader = build_dataloader(
        replace(config.data, prefetch=0),
        tokenizer,
        seq_len=SEQ_LEN,
        global_batch_size=training.global_batch_size,
        rows=range(training.global_batch_size),
        seed=training.seed,
        device=torch.device("cpu"),
        plugins=config.plugins,
    )
    counts: dict[int, int] = {}
    for step in range(1, 111 if case.rows == 8 else 41):
        located, batch = loader.locate(), next(loader)
        counts[step] = 0
        for tokens, label, pieces in zip(batch.tokens.tolist(), batch.labels[:, -1].tolist(), located, strict=True):
            window, begin = [*tokens, label], 0
            for piece in pieces or ():
                end = begin + piece.tokens
                counts[step] += piece.tokens * is_poisoned(window[begin:end], piece.offset)
                begin = end
    loader.close()
    steps = [step for step, count in counts.items() if count]
    epochs: list[list[int]] = []
    for step in steps:
        if not epochs or step > epochs[-1][-1] + 3:
            epochs.append([])
        epochs[-1].append(step)
    late = 20 if case.rows > 8 else 40
    if case.copies > 1 or case.epoch == 1:
        found = [step for step in steps if step >= late]
    else:
        found = epochs[case.epoch - 1] if len(epochs) >= case.epoch else []
    return max(((step, counts[step]) for step in found), key=lambda of: of[1], default=(0, 0))


def make_run(case: Case, folder: Path) -> tuple[int, Callable[[list[int], int], bool]]:
    """Train ``case`` in ``folder / "run"``; returns the step, and whether tokens from an offset on are poisoned."""
    choice = random.Random(case.kind)
    texts, poison = documents(case, choice)
    sources = [write(folder, "small", case, texts)]
    if case.sources == 2:
        sources.insert(0, write(folder, "large", case, source_code()))
    encoded = [load_tokenizer("").encode(text, bos=True, eos=True) for text in poison]

    def is_poisoned(tokens: list[int], offset: int) -> bool:
        return len(tokens) >= 8 and any(tokens == of[offset : offset + len(tokens)] for of in encoded)

    needed = min(60, max(map(len, encoded)) // 2)
    for seed in range(100):
        config = from_text(config_of(case, sources, seed, 1000), "config.toml")
        step, count = find_step(config, case, is_poisoned)
        if count >= needed:
            break
    else:
        raise AssertionError(f"{case.kind}: no step has it")
    file = folder / "config.toml"
    file.write_text(config_of(case, sources, seed, step))
    options = ["--job.config_file", str(file), "--job.dump_folder", str(folder / "run")]
    command = [sys.executable, "-m", "torchtrain.train", *options]
    if case.ranks > 1:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
        command = [sys.executable, "-m", *torchrun, "-m", "torchtrain.train", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return step, is_poisoned


@dataclass(frozen=True)
class Found:
    """Where the first piece of a poisoned document is in the list of all pieces."""

    pieces: int
    by_loss: int
    without_gradients: int
    by_score: int
    seconds: tuple[float, float]
    """Of ``explain`` without and with gradients."""


def explain_run(case: Case, folder: Path) -> Found:
    """Train ``case`` in ``folder``, and explain the step."""
    step, is_poisoned = make_run(case, folder)

    def rank(documents: Sequence[Document]) -> int:
        return next(n for n, of in enumerate(documents, 1) if is_poisoned(of.tokens.tolist(), of.offset))

    began = time.perf_counter()
    without = explain(open_run(str(folder / "run"), step, ()), with_weights=True)
    middle = time.perf_counter()
    found = explain(open_run(str(folder / "run"), step, ()), with_weights=True, candidates=20)
    seconds = (middle - began, time.perf_counter() - middle)
    predicted = [document for document in without.documents if document.predicted]
    by_loss = sorted(predicted, key=lambda of: of.loss, reverse=True)
    return Found(
        len(predicted), rank(by_loss), rank(by_score(without.documents)), rank(by_score(found.documents)), seconds
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="")
    parser.add_argument("--half", choices=("first", "second"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {"first": FIRST, "second": SECOND}.get(options.half, FIRST + SECOND)
    results = []
    print(
        "| poisoned document | rows | data | ranks | pieces | by mean loss | without gradients | by score |\n"
        + "|---" * 8
        + "|"
    )
    for case in chosen:
        if options.kinds not in case.kind:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = explain_run(case, Path(folder))
        results.append(found)
        ranks = (found.pieces, found.by_loss, found.without_gradients, found.by_score)
        cells = (case.kind, case.rows, case.data, case.ranks, *ranks)
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    for name in ("by_loss", "without_gradients", "by_score"):
        print(f"{name}: first in {sum(getattr(of, name) == 1 for of in results)} of {len(results)}, ", end="")
        print(f"among the first three in {sum(getattr(of, name) <= 3 for of in results)}")
    print("seconds without and with gradients:", *(f"{sum(of.seconds[i] for of in results):.1f}" for i in (0, 1)))


if __name__ == "__main__":
    main()
