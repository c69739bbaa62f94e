"""Files made by someone who means harm: an error that names the file, in bounded time and memory; no code is run."""

import io
import json
import os
import pickle
import re
import shutil
import struct
import time
import tracemalloc
import zipfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from data_samples import DOCUMENTS, TOKENIZER, make_loader, write_jsonl, write_tokens
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from torchtrain.checkpoint.format import (
    FileRecord,
    _load_tensor,
    _shape,
    _tile,
    parse_index,
    read_manifest,
)
from torchtrain.checkpoint.local_storage import LEASE_FILE, LocalStorage
from torchtrain.checkpoint.storage import WriterLease
from torchtrain.datasets.data_identity import from_json
from torchtrain.datasets.file_formats import documents
from torchtrain.datasets.options import DataConfig
from torchtrain.datasets.token_dataset import TokenDataset
from torchtrain.datasets.token_folder import COLUMNS, LocalFolder
from torchtrain.datasets.tokenizers import load_tokenizer
from torchtrain.errors import ConfigError, DamagedError, DataError, TokenizerError
from torchtrain.metrics.history import read_run, validation_losses
from torchtrain.metrics.writers import changes_steps, has_validation
from torchtrain.models.model_config import build_model_config
from torchtrain.models.options import ModelConfig, ModelOverrides

ROOT = Path(__file__).parent.parent
DEEP = b"[" * 200_000
LARGE = 10**12


def entry(**changes: Any) -> dict[str, Any]:
    """An index of one tensor, in the file "b", with other values."""
    tensor = {"dtype": "float32", "shape": [4], "chunks": [[[0], [4], "b", 0, 16]]}
    return {"tensors": {"a": tensor | changes}}


def test_index_of_a_tensor_is_read() -> None:
    found = parse_index(entry(), {"b": FileRecord("b", 16, pieces=[(16, "hash")])})
    assert found.state_dict_metadata["a"].size == torch.Size([4])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "content",
    [
        *(None, [], {}, {"tensors": []}, {"tensors": {"a": 7}}, {"tensors": {"a\0": entry()["tensors"]["a"]}}),
        *(entry(dtype="os"), entry(dtype=7), entry(dtype=None), entry(shape=7), entry(shape=["4"]), entry(shape=[4.0])),
        *(entry(shape=[True, 4]), entry(shape=[5]), entry(shape=[2**32, 2**32]), entry(shape=[-4]), entry(shape=None)),
        *(entry(chunks=None), entry(chunks=[]), entry(chunks=[1]), entry(chunks=[[[0], [4], "b", 0]])),
        *(entry(chunks=[[[0], [4], "other", 0, 16]]), entry(chunks=[[[0], [4], ["b"], 0, 16]])),
        *(entry(chunks=[[[0], [4], "b", -1, 16]]), entry(chunks=[[[0], [4], "b", 1, 16]])),
        *(entry(chunks=[[[0], [4], "b", 0, 15]]), entry(chunks=[[[0], [2**62], "b", 0, 16]])),
        *(entry(chunks=[[[0], [4], "b", 0, 16]] * 2), entry(chunks=[[[0], [4], "b", 0, 32]])),
        entry(shape=[2] * 5, chunks=[[[0] * 5, [1] * 5, "b", 0, 16], [[1] * 5, [1] * 5, "b", 16, 16]]),
        {"tensors": {**entry()["tensors"], "c": entry(dtype="int32")["tensors"]["a"]}},  # the same piece
        entry(shape=[0], chunks=[[[0, 0, 0], [0, 0, 0], "b", 0, 16]]),
    ],
)
def test_index_that_is_none_is_rejected(content: Any) -> None:
    with pytest.raises((ValueError, TypeError, LookupError, AttributeError)):
        parse_index(content, {"b": FileRecord("b", 32, pieces=[(16, "hash"), (16, "hash")])})


def test_many_pieces_of_a_tensor_are_checked_in_linear_time() -> None:
    places = [torch.Size(divmod(number, 300)) for number in range(90_000)]
    pieces = [ChunkStorageMetadata(place, torch.Size((1, 1))) for place in places]
    start = time.process_time()
    assert _tile(pieces, torch.Size((300, 300)))
    assert time.process_time() - start < 8  # it takes 0.5 s; to compare pairs of pieces would take 20 s


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_pieces_tile_a_tensor_if_each_element_is_in_one_of_them(dimensions: int) -> None:
    random = Random(dimensions)
    found = Counter[bool]()
    for _ in range(500):
        size = [random.randint(1, 3) for _ in range(dimensions)]
        pieces = [([0] * dimensions, size)]
        for _ in range(random.randint(0, 3)):  # cuts one into two
            number = random.randrange(len(pieces))
            offsets, sizes = pieces[number]
            along = random.randrange(dimensions)
            if sizes[along] > 1:
                first, second = list(sizes), list(sizes)
                first[along] = random.randint(1, sizes[along] - 1)
                second[along] -= first[along]
                start = [o + (first[along] if d == along else 0) for d, o in enumerate(offsets)]
                pieces[number : number + 1] = [(offsets, first), (start, second)]
        if random.random() < 0.5:  # moves one, perhaps out of the tensor
            number = random.randrange(len(pieces))
            offsets = [max(0, offset + random.randint(-1, 1)) for offset in pieces[number][0]]
            pieces[number] = offsets, pieces[number][1]
        covered = torch.zeros([2 * most + 1 for most in size])
        for offsets, sizes in pieces:
            covered[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
        inside = covered[tuple(slice(most) for most in size)]
        expected = bool((inside == 1).all() and covered.sum() == inside.sum())
        chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in pieces]
        assert _tile(chunks, torch.Size(size)) == expected, (pieces, size)
        found[expected] += 1
    assert min(found[True], found[False]) > 50


def test_tensor_of_an_index_has_no_more_dimensions_than_a_tensor_can_have() -> None:
    assert _shape([1] * 64) == (1,) * 64
    with pytest.raises(ValueError, match="a shape that no tensor has"):
        _shape([1] * 65)


def archive(changes: dict[str, bytes], compressed: str = "") -> torch.Tensor:
    """The file of a tensor with other entries."""
    saved = io.BytesIO()
    torch.save(torch.arange(64.0), saved)
    entries = {info.filename: zipfile.ZipFile(saved).read(info) for info in zipfile.ZipFile(saved).infolist()}
    changed = io.BytesIO()
    with zipfile.ZipFile(changed, "w") as file:
        for name, content in entries.items():
            own = name.partition("/")[2]
            kind = zipfile.ZIP_DEFLATED if own == compressed else zipfile.ZIP_STORED
            info = zipfile.ZipInfo(name)
            # A field of the header aligns the numbers, as in a file of torch.save.
            size = 4 + -(changed.tell() + 34 + len(name)) % 64
            info.extra = struct.pack("<HH", 0x4246, size - 4).ljust(size, b"\0")
            file.writestr(info, changes.get(own, content), compress_type=kind)
    return torch.frombuffer(bytearray(changed.getvalue()), dtype=torch.uint8)


BYTES_OF = b"\x8a\x06" + LARGE.to_bytes(6, "little") + b"\x85R."
PICKLES = {
    "bytearray": b"\x80\x02cbuiltins\nbytearray\n" + BYTES_OF,
    "storage": b"\x80\x02ctorch\nFloatStorage\n" + BYTES_OF,
    "memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "exit": b"cposix\n_exit\n(I7\ntR.",
    "no tensor": pickle.dumps({"a": 1}),
}
NUMBERS = torch.float32, torch.Size([64])


@pytest.mark.parametrize("kind", PICKLES)
def test_pickle_of_a_piece_is_not_read(kind: str) -> None:
    """dtype and shape come from the index."""
    piece = archive({"data.pkl": PICKLES[kind]})
    assert _load_tensor("a piece", piece, *NUMBERS).tolist() == list(range(64))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"byteorder": b"big"}, NUMBERS),
        ({"data/0": bytes(255)}, NUMBERS),
        ({}, (torch.float32, torch.Size([65]))),
        ({}, (torch.float64, torch.Size([64]))),
        ({}, (torch.float32, torch.Size([2**31, 2**31]))),
    ],
)
def test_piece_that_is_not_the_tensor_is_damaged(changes: dict[str, bytes], kind: Any) -> None:
    with pytest.raises(DamagedError, match=r"^a piece holds something else than a tensor \("):
        _load_tensor("a piece", archive(changes), *kind)


def test_piece_has_not_much_more_bytes_than_its_numbers() -> None:
    files = {"b": FileRecord("b", 2**18, pieces=[(2**18, "hash")])}
    with pytest.raises(ValueError, match="'a' has 262144 bytes for 16 bytes of numbers"):
        parse_index(entry(chunks=[[[0], [4], "b", 0, 2**18]]), files)


@pytest.mark.parametrize("entry", ["byteorder", "data/0"])
def test_compressed_piece_is_not_expanded(entry: str) -> None:
    with pytest.raises(DamagedError, match=r"\(compressed\)"):
        _load_tensor("a piece", archive({entry: bytes(2**20)}, compressed=entry), *NUMBERS)


MANIFESTS: dict[str, dict[str, Any]] = {
    "shards": {"shards": None},
    "no shards": {"shards": []},
    "shard": {"shards": [{"tokens": None}]},
    "table": {"shards": {"a": 1}},
    "vocabulary": {"vocab_size": "x"},
    "no vocabulary": {"vocab_size": 0},
    "small vocabulary": {"vocab_size": 3},
    "large vocabulary": {"vocab_size": 5000},
    "huge vocabulary": {"vocab_size": 10**400},
    "format": {"format": "\x1b[31m"},
    "old format": {"format": 1},
    "hash": {"tokenizer_hash": 7},
    "unknown": {"other": 1},
}
SHARDS: dict[str, dict[str, Any]] = {
    "negative": {"documents": -1},
    "large": {"documents": 10**400},
    "documents without tokens": {"documents": 10**15, "tokens": 7},
    "skipped": {"skipped": 1.5},
    "name": {"name": "../secret"},
    "numbers": {"numbers": [1, -1]},
    "text as numbers": {"numbers": "many"},
    "names": {"not_utf8": 7},
    "hashes": {"tokens_hash": [1]},
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tokens, which must not be changed."""
    folder = tmp_path_factory.mktemp("tokens")
    return Path(write_tokens(folder / "data", write_jsonl(folder / "a.jsonl", DOCUMENTS)))


def use_tokens(folder: Path) -> None:
    """Open a folder, and do with it what runs and torchtrain.explain do."""
    next(make_loader(DataConfig(path=str(folder), prefetch=0, verify_gib=0), range(1), batch=1))
    source = TokenDataset(LocalFolder(folder), TOKENIZER.content_hash, 0, f"data.path = '{folder}'")
    for index, number, *_ in source.documents_in(0, len(source)):
        source.describe(index, number)
        source.text_hash(index, number)
    source.document_starts()


@pytest.mark.parametrize("kind", [*MANIFESTS, *SHARDS, "nested", "twice", "shard by number"])
def test_crafted_manifest_of_tokens_is_a_data_error(tokens: Path, tmp_path: Path, kind: str) -> None:
    shutil.copytree(tokens, tmp_path, dirs_exist_ok=True)
    use_tokens(tmp_path)
    content = json.loads((tokens / "manifest.json").read_bytes()) | MANIFESTS.get(kind, {})
    if kind in SHARDS:
        content["shards"][0] |= SHARDS[kind]
    elif kind == "twice":
        content["shards"] *= 2
    elif kind == "shard by number":
        content["shards"] = [7]
    (tmp_path / "manifest.json").write_bytes(DEEP if kind == "nested" else json.dumps(content).encode())
    with pytest.raises(DataError, match=rf"^data.path = '{tmp_path}'(:| has| was) ") as error:
        use_tokens(tmp_path)
    assert "\x1b" not in str(error.value)


def test_small_file_is_not_read_if_it_is_large(tmp_path: Path) -> None:
    """A sparse file takes no space on a disk, and more memory than any machine has."""
    for name in ("manifest.json", "tokenizer.json"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 2**42)
    large = "json has 4,398,046,511,104 bytes, more than a file of its kind may have"
    with pytest.raises(DataError, match=large):
        TokenDataset(LocalFolder(tmp_path), "", 0, "the data")
    with pytest.raises(TokenizerError, match=large):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "kind", ["short", "long", "zeros", "backward", "missing", "file", "names", "no list", "nested"]
)
def test_crafted_index_of_documents_is_a_data_error(tokens: Path, tmp_path: Path, kind: str) -> None:
    """Also one that is as long as a manifest states, and takes no space on a disk."""
    shutil.copytree(tokens, tmp_path, dirs_exist_ok=True)
    (file,) = tmp_path.glob("*.documents")
    content, documents = np.fromfile(file, "<i8"), len(DOCUMENTS)
    if kind == "long":
        os.truncate(file, 2**42)
    elif kind == "missing":
        file.unlink()
    elif kind in ("names", "no list", "nested"):
        names = {"names": b"[1]", "no list": b"7", "nested": DEEP}[kind]
        (tmp_path / "files.json").write_bytes(names)
    elif kind == "file":
        content[documents + 1 + COLUMNS.index("file") * documents] = -5
        content.tofile(file)
    else:
        {"short": content[:1], "zeros": 0 * content, "backward": content[::-1]}[kind].tofile(file)
    name = "files.json" if kind in ("names", "no list", "nested") else r"shard-\d+\.documents"
    with pytest.raises(
        DataError, match=rf"^data.path = '{tmp_path}': (its )?{name} (is damaged|is missing|has \d+ bytes, not )"
    ):
        use_tokens(tmp_path)


def test_sparse_files_of_tokens_are_not_read_as_a_whole(tokens: Path, tmp_path: Path) -> None:
    """They take no space on a disk: the manifest states as many tokens as no disk has, in one document."""
    count = 2**41
    content = json.loads((tokens / "manifest.json").read_bytes())
    content["shards"][0] |= {"tokens": count, "documents": 1, "numbers": [1]}
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    name = content["shards"][0]["name"]
    np.array([0, count, 7, 7, 0, 0, 0, 0]).tofile(tmp_path / f"{name}.documents")
    (tmp_path / f"{name}.tokens").touch()
    try:
        os.truncate(tmp_path / f"{name}.tokens", 2 * count)
    except OSError:
        pytest.skip("the file system has no files of this size")
    loader = make_loader(DataConfig(path=str(tmp_path), prefetch=0), range(1), batch=1, seq_len=1 << 16)
    tracemalloc.start()
    assert next(loader).tokens.count_nonzero() == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**28


def test_nested_files_of_a_tokenizer_are_errors_that_name_them(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(Path("torchtrain/assets/tokenizer.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes(DEEP)
    with pytest.raises(
        TokenizerError, match=r"tokenizer_config.json, beside it, is damaged: its values are nested too"
    ):
        load_tokenizer(str(tmp_path))


# These parse what the same process has made, or lines of the user's text, each of which may be malformed.
OWN_JSON = {
    "checkpoint/resume.py": 1,
    "datasets/builtin_formats.py": 2,
    "files.py": 1,
    "metrics/writers.py": 1,
    "torch_internals.py": 1,
}


def json_parsed_in(folder: Path) -> dict[str, int]:
    """Number of calls of ``json.load`` and ``json.loads`` by file."""
    counts = {
        path.relative_to(folder).as_posix(): len(re.findall(r"json\.loads?\(", path.read_text(encoding="utf-8")))
        for path in folder.rglob("*.py")
    }
    return {name: count for name, count in counts.items() if count}


def test_json_of_files_is_parsed_by_the_function_that_bounds_it() -> None:
    found = json_parsed_in(ROOT / "torchtrain")
    assert {name: count for name, count in found.items() if not name.startswith("plugins/")} == OWN_JSON


def test_nested_or_foreign_lines_of_metrics_are_passed_over(tmp_path: Path) -> None:
    good = [{"step": 0, "event": "start", "options": "a"}, {"step": 2, "loss": 2.0, "validation_loss": 1.5}]
    bad = [
        b'{"step": 2, "event": "start", "validation_loss": ' + DEEP,
        b'["event", "validation_loss"]',
        b'{"step": "2", "event": "start", "validation_loss": 1.0}',
        b'{"event": "start", "validation_loss": 1.0}',
        b'{"step": ' + b"1" * 5000 + b', "validation_loss": 1.0}',
        b'\xff"event": "start" "validation_loss"',
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"".join(line + b"\n" for line in (*(json.dumps(line).encode() for line in good), *bad)))
    warnings: list[str] = []
    run = read_run(tmp_path, warnings.append)
    assert [line["loss"] for line in run.lines] == [2.0]
    assert len(warnings) == len(bad)
    assert validation_losses(tmp_path) == {2: ("", 1.5)}
    assert has_validation(file, 2)
    assert changes_steps(file, 1, "b")
    assert not changes_steps(file, 1, "a")


def test_nested_files_of_a_checkpoint_are_damaged_and_a_nested_lease_is_none(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    (tmp_path / LEASE_FILE).write_bytes(DEEP)
    assert storage.read_lease() == WriterLease()
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "manifest.json").write_bytes(DEEP)
    with pytest.raises(DamagedError, match=r"step-2/manifest.json is damaged: its values are nested too deeply"):
        read_manifest(storage.open(2))


def test_json_tokenizer_has_no_token_id_beyond_the_largest_vocabularies(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 4_000_000_000}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    with pytest.raises(TokenizerError, match=r"it has the token id 4,000,000,000; they must be below 16,777,216"):
        load_tokenizer(str(tmp_path))


def test_sizes_of_a_config_are_bounded() -> None:
    for changes in ({"n_layers": 10**9}, {"dim": 2**40}, {"head_dim": 10**12}):
        with pytest.raises(ConfigError, match="must be an integer of at most"):
            build_model_config(ModelConfig(shape=ModelOverrides(**changes)), None, 64)
    with pytest.raises(ConfigError, match=r"n_layers = 60000 must be an integer of at most 4,096"):
        build_model_config(ModelConfig(shape=ModelOverrides(n_layers=60_000)), None, 64)


@pytest.mark.parametrize(
    "content",
    [
        [{"folder": "", "files": [], "count": float("inf")}],
        [{"folder": "", "files": [["a", 1, "", ""]] * 10_001, "count": 1}],
        [{"folder": "", "files": [["a", 1.5, "", ""]], "count": 1}],
    ],
)
def test_table_of_data_files_that_is_none_is_rejected(content: Any) -> None:
    with pytest.raises((ValueError, TypeError, LookupError, AttributeError, ArithmeticError)):
        from_json(content)


@pytest.mark.parametrize("when", ["repeat", "stop"])
@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_numbers_of_a_saved_position_that_no_run_has_are_one_error(packing: Any, when: Any, tokens: Path) -> None:
    """Or a position like any other, but neither a traceback, nor a large allocation, nor hours of reading."""
    config = DataConfig(path=str(tokens), when_exhausted=when, packing=packing, prefetch=0)
    loader = make_loader(config, range(2), batch=2)
    next(loader)
    saved, errors = loader.state_dict()["rows"], 0
    for column in range(saved.shape[1]):
        for number in (-1, 0, 10**15, 2**62, 2**63 - 1):
            rows = saved.clone()
            rows[:, column] = number
            loader = make_loader(config, range(2), batch=2)
            try:
                loader.load_state_dict({"rows": rows})
                next(loader, None)
            except (DataError, DamagedError):
                errors += 1
    assert errors > 3  # of the counts alone there are as many


def test_nested_arrays_of_text_files_are_data_errors() -> None:
    with pytest.raises(DataError, match="its values are nested too deeply"):
        list(documents(io.BytesIO(DEEP), "a.json", "text"))
