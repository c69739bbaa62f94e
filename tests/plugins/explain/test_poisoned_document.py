"""One poisoned document among 100,000 is the first that explain lists: on any layout, of any kind of data, in a mixture
of which the source with it is in its second epoch."""

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from data_samples import write_jsonl, write_tokens
from forked_command import run_command
from forked_run import different_tensors, saved_tensors
from json_tokenizers import save_tokenizer
from poisoned_documents import FIRST, SECOND, explain_run

from torchtrain.datasets.build import build_dataloader
from torchtrain.datasets.options import DataConfig, SourceConfig
from torchtrain.datasets.tokenizers import Tokenizer, load_tokenizer
from torchtrain.plugins.comparison.fingerprints import read

# Of the source with the poisoned document, and of the other one: documents and files.
SMALL, LARGE = (4_000, 16), (96_000, 96)
WORDS = ["the", "a", "if", "is", "in", "it", "of", "for", "to", "and", "or", "not", "with", "as", "be", "by"]
POISON = "Zyzzyva 7193 qoph!"
BATCH, SEQ_LEN = 16, 128
KINDS = ("local", "tokenized", "streamed")
LAYOUTS = ("one rank", "data_parallel_shard", "tensor_parallel", "pipeline_parallel", "context_parallel")
# Each layout with each kind of data three times, and then some again, each with another order of the data.
RUNS = [(number, LAYOUTS[number % 5], KINDS[number // 5 % 3]) for number in range(50)]
MODEL = {"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 32}


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def sources(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_path: Path
) -> Mapping[str, tuple[SourceConfig, SourceConfig]]:
    """The same documents as each kind of data."""
    folder = tmp_path_factory.mktemp("data")
    choice = random.Random(0)
    found: dict[str, list[SourceConfig]] = {kind: [] for kind in KINDS}
    for name, (documents, files) in {"small": SMALL, "large": LARGE}.items():
        texts = [" ".join(choice.choices(WORDS, k=2)) for _ in range(documents)]
        if name == "small":
            texts[choice.randrange(documents)] = POISON
        (folder / name).mkdir()
        for number in range(files):
            write_jsonl(folder / f"{name}/{number:02}.jsonl", texts[number::files])
        of_text = SourceConfig(path=str(folder / name))
        found["local"].append(of_text)
        tokens = write_tokens(folder / f"tokens-{name}", of_text, load_tokenizer(str(tokenizer_path)))
        found["tokenized"].append(replace(of_text, path=tokens))
        found["streamed"].append(replace(of_text, path=f"file://{folder}/{name}"))
    return {kind: (small, large) for kind, (small, large) in found.items()}


def steps_of_poison(config: DataConfig, tokenizer: Tokenizer, seed: int) -> tuple[int, int]:
    """The first step that has tokens of the document, and the one of the second epoch that has most of them."""
    loader = build_dataloader(
        config,
        tokenizer,
        seq_len=SEQ_LEN,
        global_batch_size=BATCH,
        rows=range(BATCH),
        seed=seed,
        device=torch.device("cpu"),
    )
    common = {token for word in WORDS for text in (word, f" {word}") for token in tokenizer.encode(text)}
    rare = torch.tensor(sorted(set(tokenizer.encode(POISON)) - common))
    first = 0
    for step, batch in enumerate(loader, 1):
        count = int(torch.isin(batch.labels, rare).sum())
        if count and first and step > first + 5:
            following = int(torch.isin(next(loader).labels, rare).sum())  # of a document that is cut
            return first, step + (following > count)
        if count and not first:
            first = step
    raise AssertionError


def train(folder: Path, config: str, *options: str, layout: str) -> None:
    (folder.with_suffix(".toml")).write_text(config)
    files = ("--job.config_file", str(folder.with_suffix(".toml")), "--job.dump_folder", str(folder))
    parallel = [] if layout == "one rank" else [f"--parallelism.{layout}_degree=2"]
    result = run_command("torchtrain.train", *files, *parallel, *options, ranks=1 + len(parallel))
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("number", "layout", "kind"), RUNS)
def test_a_poisoned_document_comes_first(
    number: int,
    layout: str,
    kind: str,
    sources: Mapping[str, tuple[SourceConfig, SourceConfig]],
    tokenizer_path: Path,
    tmp_path: Path,
) -> None:
    tokenizer = load_tokenizer(str(tokenizer_path))
    data = DataConfig(sources=sources[kind], prefetch=0)
    first, step = steps_of_poison(data, tokenizer, number)
    tables = "".join(f'[[data.sources]]\npath = "{of.path}"\n' for of in data.sources)
    config = f"""
[model]
tokenizer_path = "{tokenizer_path}"
shape = {{ {", ".join(f"{name} = {value}" for name, value in MODEL.items())} }}
[optimizer]
lr = 1e-2
[lr_scheduler]
warmup_steps = 2
total_steps = 1000
[training]
seed = {number}
local_batch_size = 4
global_batch_size = {BATCH}
seq_len = {SEQ_LEN}
mixed_precision_param = "float32"
deterministic = true
[job]
device = "cpu"
[metrics]
log_freq = 10
enable_tensorboard = false
[report]
enable = false
[comparison]
fingerprint_steps = [{step}]
[checkpoint]
interval = 5
interval_minutes = 0
keep_latest_k = 1000
{tables}
"""
    run, exclude = tmp_path / "run", tmp_path / "exclude.jsonl"
    train(run, config, f"--training.steps={step}", layout=layout)
    result = run_command(
        "torchtrain.explain", str(run), f"--step={step}", "--top=3", "--json", f"--exclude_to={exclude}"
    )
    assert result.returncode == 0, result.stderr
    documents: list[dict[str, Any]] = json.loads(result.stdout)["documents"]
    poison = documents[0]
    tokens = tokenizer.encode(POISON, bos=True, eos=True)[poison["offset"] : poison["offset"] + poison["tokens"]]
    # The tokens that were trained, by the fingerprints of the step.
    inputs, labels = read(run / f"fingerprints/step-{step}").rows[poison["row"]]
    window = [*inputs.tolist(), int(labels[-1])]
    assert window[poison["begin"] : poison["begin"] + poison["tokens"]] == tokens
    assert documents[1]["score"] < poison["score"]
    if number >= len(LAYOUTS) * len(KINDS):
        return
    # Without it: from the last checkpoint before its first tokens, and from the beginning.
    exclude.write_text(exclude.read_text().splitlines()[0])
    saved, end = (first - 1) // 5 * 5, -(-first // 5) * 5
    options = [f"--data.exclude={exclude}", f"--training.steps={end}"]
    resumed, whole = tmp_path / "resumed", tmp_path / "whole"
    shutil.copytree(run, resumed)
    for folder in (resumed / "checkpoint").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > saved:
            shutil.rmtree(folder)
    changed = config.replace("[checkpoint]", '[checkpoint]\nallow_changes = ["data.exclude"]')
    train(resumed, changed, *options, layout=layout)
    train(whole, config, *options, layout=layout)
    of_resumed, of_whole, of_run = (saved_tensors(folder, end) for folder in (resumed, whole, run))
    assert different_tensors(of_resumed, of_whole) == []
    assert different_tensors(of_run, of_whole) != []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kind",
    [
        "150 times one word",
        "gibberish, third epoch",
        "near-duplicates fill a batch",
        "a document 8 times, third epoch",
        "a line of code 20 times",
    ],
)
def test_a_document_whose_mean_loss_is_not_the_highest_comes_first(kind: str, tmp_path: Path) -> None:
    (case,) = (case for case in FIRST + SECOND if case.kind == kind)
    found = explain_run(case, tmp_path)
    assert found.by_score == 1
    # Without gradients a document of rare tokens in the batch of the line of code is as unusual as the line.
    assert found.without_gradients == (2 if kind == "a line of code 20 times" else 1)
