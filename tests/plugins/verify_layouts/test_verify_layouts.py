"""torchtrain.verify_layouts reports no difference where there is none, and says what it has done."""

import io
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pages import python_blocks
from test_own_model import write_modules
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torchtrain.config.parse import parse
from torchtrain.config.registry import MODELS
from torchtrain.config.schema import JobConfig, TrainingConfig
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.errors import ConfigError
from torchtrain.models.model_config import build_model_config, flavor_config
from torchtrain.models.options import ModelConfig
from torchtrain.models.spec import build_model
from torchtrain.optimizers.options import EMAConfig
from torchtrain.parallelisms.options import ActivationCheckpointConfig, CompileConfig
from torchtrain.plugins.comparison.fingerprints import Fingerprint
from torchtrain.plugins.verify_layouts.command import split
from torchtrain.plugins.verify_layouts.float64 import Float64
from torchtrain.plugins.verify_layouts.layouts import ROWS, SCHEDULES, Layout, default_layouts, parse_layout
from torchtrain.plugins.verify_layouts.rank import RankRecord
from torchtrain.plugins.verify_layouts.ranks import RankError, RankRejection, Ranks
from torchtrain.plugins.verify_layouts.report import as_json, as_text, summary
from torchtrain.plugins.verify_layouts.small_config import small_model, verified_config
from torchtrain.plugins.verify_layouts.source_lines import source_line
from torchtrain.plugins.verify_layouts.verdict import Comparison, Difference, compare_records, meaning_of_factor
from torchtrain.plugins.verify_layouts.verification import Result
from torchtrain.verify_layouts import main

pytestmark = pytest.mark.usefixtures("example_families")
ROOT = Path(__file__).parents[3]
DEBUG = ("--job.config_file", str(ROOT / "train_configs/debug_model.toml"))
TWO_LAYERS = ("--model.shape.n_layers", "2")
FAMILIES = ("smollm3", "granite", "olmo2", "olmo3", "gemma3_text")
OF_FAMILIES = ("--job.import", "torchtrain_families")


def verify(*arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """Run the command, and assert that it finds no difference; returns the entries of its layouts."""
    with redirect_stdout(io.StringIO()) as output:
        found = main([*arguments, "--json"])
    report = json.loads(output.getvalue())
    wrong = [entry for entry in report["layouts"] if entry["verdict"] not in ("same", "rejected")]
    assert wrong == []
    assert found == code
    assert report["same"]
    return report["layouts"]  # type: ignore[no-any-return]


def assert_close(entries: list[dict[str, Any]]) -> None:
    """Rounding is far below the tolerance of 1e-10."""
    assert max(entry["largest"] for entry in entries if entry["verdict"] == "same") < 1e-11


@pytest.mark.parametrize(
    ("options", "layouts"),
    [
        ((*DEBUG, *TWO_LAYERS), ("pipeline=2",)),  # own models are verified with others
        pytest.param(
            (*OF_FAMILIES, *TWO_LAYERS, "--model.name", "gemma3_text", "--data.document_mask"),
            ("context=2",),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (*DEBUG, *TWO_LAYERS, "--optimizer.name", "muon", "--training.max_norm", "0.1"),
            ("shard=2",),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["debug_model", "gemma3_text", "muon"],
)
def test_no_difference_is_reported_where_there_is_none(options: tuple[str, ...], layouts: tuple[str, ...]) -> None:
    entries = verify(*options, "--layouts", *layouts)
    assert [entry["verdict"] for entry in entries] == ["same"] * len(layouts)
    assert_close(entries)
    assert all(entry["steps"] == 2 and entry["tensors"] > 100 for entry in entries)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "options",
    [
        *(("--model.name", name) for name in ("llama2", "llama3", "mistral", "qwen2", "qwen3")),
        *((*OF_FAMILIES, "--model.name", name) for name in FAMILIES),
        ("--model.shape.tied_embeddings", "true"),
        ("--data.document_mask", "--activation_checkpoint.mode", "full", "--training.z_loss_weight", "1e-4"),
        ("--parallelism.fsdp_gradient_accumulation", "unsharded", "--optimizer.implementation", "foreach"),
    ],
    ids=" ".join,
)
def test_no_default_layout_differs(options: tuple[str, ...]) -> None:
    entries = verify(*options, "--timeout_seconds", "300")
    assert len(entries) == len(default_layouts(8))
    assert sum(entry["verdict"] == "same" for entry in entries) >= 14
    assert_close(entries)


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with the modules of the pages."""
    monkeypatch.syspath_prepend(tmp_path)
    return write_modules(tmp_path)


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("layer_norm", ("tensor=2",)),
        pytest.param("sandwich", (), marks=[pytest.mark.slow, pytest.mark.timeout(3000)]),
        pytest.param("parallel_block", (), marks=[pytest.mark.slow, pytest.mark.timeout(3000)]),
    ],
)
@pytest.mark.usefixtures("own_modules")
def test_own_model_is_verified(name: str, layouts: tuple[str, ...]) -> None:
    try:
        some = (*TWO_LAYERS, "--layouts", *layouts) if layouts else ()
        entries = verify("--job.import", name, "--model.name", name, *some)
        assert_close(entries)
    finally:
        sys.modules.pop(name, None)


def test_plain_model_of_the_page_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    decoder, registration = python_blocks("verify-layouts.md")
    assert len([line for line in registration.splitlines() if line]) == 8
    (tmp_path / "my_decoder.py").write_text(decoder)
    (tmp_path / "verify_mine.py").write_text(registration)
    layouts = ("shard=2,tensor=2", "context=2", "tensor=2,sequence_parallel=false")
    entries = verify("--job.import", "verify_mine", "--model.name", "mine", "--layouts", *layouts, code=1)
    assert [entry["verdict"] for entry in entries] == ["same", "rejected", "rejected"]
    assert_close(entries[:1])
    assert entries[1]["error"] == "a plain model has no context parallelism"
    for name in ("my_decoder", "verify_mine"):
        del sys.modules[name]


def test_plain_model_without_fsdp_on_one_shard_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of norms with sequence parallelism, whose gradients are then sums that are not completed."""
    monkeypatch.syspath_prepend(tmp_path)
    decoder, registration = python_blocks("verify-layouts.md")
    head, _, tail = decoder.partition("    if tensor_mesh.size() > 1:\n")
    plan = """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import PrepareModuleInput, PrepareModuleOutput, SequenceParallel

    if tensor_mesh.size() > 1:
        inputs = dict(input_layouts=Replicate(), desired_input_layouts=Shard(1))
        for block in model.blocks:
            for norm in (block.norm1, block.norm2):
                parallelize_module(norm, tensor_mesh, PrepareModuleInput(**inputs))
                parallelize_module(norm, tensor_mesh, SequenceParallel())
                outputs = dict(output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=True)
                parallelize_module(norm, tensor_mesh, PrepareModuleOutput(**outputs))
    if fsdp_mesh.size() == 1:
        return
"""
    (tmp_path / "no_fsdp_decoder.py").write_text(head + plan + "    if tensor_mesh.size() > 1:\n" + tail)
    (tmp_path / "verify_no_fsdp.py").write_text(registration.replace("my_decoder", "no_fsdp_decoder"))
    entries = verify("--job.import", "verify_no_fsdp", "--model.name", "mine", "--layouts", "tensor=2", "--steps=1")
    assert_close(entries)


def test_shared_parameters_of_a_plain_model_stay_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    decoder, registration = python_blocks("verify-layouts.md")
    tied = decoder.replace(
        "\n    def forward(self, tokens):",
        "        self.head.weight = self.embed.weight\n\n    def forward(self, tokens):",
    )
    assert tied != decoder
    (tmp_path / "tied_decoder.py").write_text(tied)
    (tmp_path / "verify_tied.py").write_text(registration.replace("my_decoder", "tied_decoder"))
    (entry,) = verify("--job.import", "verify_tied", "--model.name", "mine", "--layouts", "shard=2", "--steps=1")
    assert_close([entry])


# Layouts and configs


@pytest.mark.parametrize("layout", default_layouts(8), ids=str)
def test_text_of_a_layout_names_it(layout: Layout) -> None:
    assert parse_layout(str(layout)) == layout
    assert 1 < layout.ranks <= 8


def test_default_layouts_have_each_axis_pair_and_schedule() -> None:
    layouts = default_layouts(8)
    assert len(set(layouts)) == len(layouts) == 25
    axes = ("pipeline", "replicate", "shard", "context", "tensor")
    for i, first in enumerate(axes):
        assert parse_layout(f"{first}=2") in layouts
        for second in axes[i + 1 :]:
            assert parse_layout(f"{first}=2,{second}=2") in layouts
    assert {layout.schedule for layout in layouts if layout.degrees == {"pipeline": 2}} == set(SCHEDULES)
    assert sum(not layout.sequence_parallel for layout in layouts) == 2
    assert {layout.ranks for layout in default_layouts(2)} == {2}


@pytest.mark.parametrize(
    "text", ["tensor", "tensor=0", "tensor=two", "heads=2", "schedule=none", "", "tensor=2;shard=2"]
)
def test_wrong_layout_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--layouts .* must be one of pipeline=N, .* schedule=NAME, of 1F1B, "):
        parse_layout(text)


@pytest.mark.parametrize("layout", default_layouts(8), ids=str)
def test_layout_has_the_rows_and_microbatches_of_its_ranks(layout: Layout) -> None:
    config = layout.apply(JobConfig())
    assert config.training.global_batch_size == ROWS
    per_rank = ROWS // layout.dims.batch
    assert per_rank % config.training.local_batch_size == 0
    assert config.training.local_batch_size >= layout.dims.pipeline
    assert config.training.local_batch_size < per_rank or per_rank == layout.dims.pipeline


def test_options_of_the_command_are_those_without_a_section() -> None:
    words = ["--layouts", "tensor=2", "shard=2", *DEBUG, "--json", "--model.name=llama3", "--steps=3"]
    own, of_trainer = split(words)
    assert own == ["--layouts", "tensor=2", "shard=2", "--json", "--steps=3"]
    assert of_trainer == [*DEBUG, "--model.name=llama3"]


@pytest.mark.parametrize("name", ["llama2", "llama3", "mistral", "qwen2", "qwen3", *FAMILIES])
def test_small_model_of_each_flavor_can_be_built(name: str) -> None:
    for flavor in MODELS[name].flavors:
        config = build_model_config(ModelConfig(name=name, flavor=flavor), None, 128)
        small = small_model(config)
        with torch.device("meta"):
            model = build_model(small)
        assert sum(parameter.numel() for parameter in model.parameters()) < 400_000
        assert (small.n_layers, small.max_seq_len) == (min(4, config.n_layers), 64)
        assert small.tied_embeddings == config.tied_embeddings
        assert small.vocab_size % 16 == config.vocab_size % 16
        same = {field.name for field in fields(config) if field.init} - {
            *("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "max_seq_len", "head_dim")
        }
        assert {key: getattr(small, key) for key in same} == {key: getattr(config, key) for key in same}


def test_small_model_that_the_config_class_rejects_is_an_error() -> None:
    config = replace(flavor_config("llama3", "debugmodel"), family="small")
    spec = MODELS["llama3"]

    def check(model: Any) -> None:
        if model.dim < 256:
            raise ValueError("dim must be at least 256")

    MODELS.register("small")(replace(spec, check=check))
    with pytest.raises(ConfigError, match=r"cannot be made smaller: dim must be at least 256; .*--as-is"):
        small_model(config)


def test_config_keeps_what_a_layout_changes_and_names_what_it_replaces() -> None:
    config = JobConfig(
        training=TrainingConfig(seq_len=128, max_norm=0.5, z_loss_weight=1e-4, sums="exact", tokens="1B"),
        compile=CompileConfig(enable=True),
        ema=EMAConfig(enable=True),
        activation_checkpoint=ActivationCheckpointConfig(mode="memory_budget"),
    )
    found, model, replaced = verified_config(config, as_is=False, steps=3)
    assert replaced == [
        "compile.enable = false",
        'training.sums = "fast"',
        'activation_checkpoint.mode = "none"',
        "ema.enable = false",
    ]
    assert (found.training.steps, found.training.tokens, found.training.seq_len) == (3, "", 64)
    assert (found.training.max_norm, found.training.z_loss_weight) == (0.5, 1e-4)
    assert found.training.mixed_precision_param == "float64"
    assert found.training.loss_chunk_tokens == (64 if torch.__version__ >= "2.13" else -1)  # some layouts need 2.13
    assert model.dim == 64
    found, model, _ = verified_config(config, as_is=True, steps=3)
    assert (found.training.seq_len, model.dim, model.n_layers) == (128, 256, 6)


# Arithmetic


def test_float64_mode_widens_conversions_and_new_tensors() -> None:
    x = torch.tensor([1 + 2**-40], dtype=torch.float64)
    with Float64():
        for wide in (
            *(x.float(), x.half(), x.bfloat16(), x.to(torch.float32), x.to("cpu", torch.bfloat16)),
            *(x.type(torch.float32), x.sum(dtype=torch.float32)[None]),
        ):
            assert wide.dtype is torch.float64
            assert torch.equal(wide, x)
        assert torch.empty(1, dtype=torch.float32).dtype is torch.float64
        assert torch.zeros(1, dtype=torch.int64).dtype is torch.int64
        assert torch.arange(2).float().dtype is torch.float64
    assert x.float().dtype is torch.float32


@pytest.mark.parametrize("backward", [Tensor.backward, torch.autograd.backward, torch.autograd.grad])
def test_float64_mode_is_on_in_what_a_checkpoint_computes_again(backward: Callable[..., Any]) -> None:
    computed: list[torch.dtype] = []

    def narrow(x: Tensor) -> Tensor:
        computed.append(x.float().dtype)
        return x.sin()

    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    with Float64():
        y = checkpoint(narrow, x, use_reentrant=False)
        backward(y, x) if backward is torch.autograd.grad else backward(y)
        assert torch.ones(1).float().dtype is torch.float64
    assert computed == [torch.float64] * 2


def record(values: dict[str, Any], grad_norm: float = 1.0) -> RankRecord:
    """What a rank has recorded of tensors of one dimension: for each its values, and the first index that it has."""
    parts = {}
    for key, (numbers, first, size) in values.items():
        x = np.asarray(numbers, dtype=np.float64)
        # All elements of so small a tensor are samples, in the order of ``sample_indices``.
        from torchtrain.plugins.comparison.fingerprint_recorder import sample_indices

        (index,) = sample_indices(key.removesuffix(" gradient").removesuffix(" update"), (size,))
        here = (index.numpy() >= first) & (index.numpy() < first + len(x))
        samples = np.where(here, x[np.clip(index.numpy() - first, 0, len(x) - 1)], 0.0)
        statistics = [x.sum(), np.abs(x).sum(), np.abs(x).max()]
        part = Fingerprint("float64", [size], "", np.concatenate((statistics, samples)))
        parts[key] = ([[(first, first + len(x))]], part)
    return RankRecord([parts], [grad_norm], frozenset())


X = np.arange(1.0, 9.0)
ORDER = ["w", "w gradient", "w update"]
PARAMETERS = {"w": None}


def compare(ranks: list[RankRecord], reference: RankRecord | None = None) -> Difference | None:
    reference = reference or record({"w": (X, 0, 8), "w gradient": (X, 0, 8), "w update": (X, 0, 8)})
    return compare_records(reference, ranks, ORDER, PARAMETERS).difference


def of_rank(gradient: Any, first: int = 0, **changes: Any) -> RankRecord:
    return record({"w": (X, 0, 8), "w gradient": (gradient, first, 8), "w update": (X, 0, 8)}, **changes)


def test_shards_and_replicas_of_a_tensor_are_the_same() -> None:
    assert compare([of_rank(X[:3]), of_rank(X[3:], 3)]) is None
    assert compare([of_rank(X), of_rank(X * (1 + 1e-12))]) is None


def test_difference_names_tensor_ranks_and_factor() -> None:
    found = compare([of_rank(X[:3]), of_rank(2 * X[3:], 3)])
    assert found is not None
    assert (found.step, found.key, found.kind, found.ranks, found.factor) == (1, "w gradient", "gradient", (1,), 2.0)
    found = compare([of_rank(X / 2), of_rank(X / 2)])
    assert found is not None
    assert (found.ranks, found.factor, found.note) == ((0, 1), 0.5, "")


def test_summands_and_permutations_are_noted() -> None:
    part = X * [1, 0, 1, 0, 1, 0, 0.5, 0.25]
    found = compare([of_rank(part), of_rank(X - part)])
    assert found is not None
    assert found.note == "ranks 0 and 1 have summands of it, whose sum is right: a sum over ranks is missing"
    found = compare([of_rank(X), of_rank(X + 1)])
    assert found is not None
    assert (found.ranks, found.note) == ((1,), "ranks 0 and 1 should have the same, and differ")
    found = compare([of_rank(X[::-1])])
    assert found is not None
    assert found.note == "it has the same numbers in another order"
    found = compare([of_rank(X[:4])])
    assert found is not None
    assert found.note.startswith("50% of its elements are present")


def test_missing_gradients_and_norms_are_named() -> None:
    found = compare([record({"w": (X, 0, 8), "w update": (X, 0, 8)})])
    assert found is not None
    assert (found.key, found.note) == ("w gradient", "no rank has it")
    found = compare([of_rank(X), of_rank(X, grad_norm=1.5)])
    assert found is not None
    assert (found.key, found.ranks, found.factor) == ("gradient norm", (1,), 1.5)


def test_rounding_of_a_tensor_that_is_zero_is_no_difference() -> None:
    noise = 1e-17 * X
    reference = record({"w gradient": (X, 0, 8), "b gradient": (noise, 0, 8)})
    other = record({"w gradient": (X, 0, 8), "b gradient": (-noise, 0, 8)})
    parameters = {"w": None, "b": None}
    assert compare_records(reference, [other], ["w gradient", "b gradient"], parameters).difference is None
    other = record({"w gradient": (X, 0, 8), "b gradient": (-noise * 1e8, 0, 8)})
    found = compare_records(reference, [other], ["w gradient", "b gradient"], parameters).difference
    assert found is not None
    assert found.key == "b gradient"


def test_activation_that_is_stored_otherwise_is_no_difference() -> None:
    reference = record({"a output": (X, 0, 8), "w gradient": (X, 0, 8)})
    other = record({"a output": (2 * X, 0, 8), "w gradient": (X, 0, 8)})
    order = ["a output", "w gradient"]
    assert compare_records(reference, [other], order, PARAMETERS).difference is None
    other = record({"a output": (2 * X, 0, 8), "w gradient": (2 * X, 0, 8)})
    found = compare_records(reference, [other], order, PARAMETERS).difference
    assert found is not None
    assert found.key == "a output"  # where it begins


@pytest.mark.parametrize(
    ("factor", "kind", "meaning"),
    [
        (2.0, "gradient", "the tensor degree: summed over these ranks once too often"),
        (0.25, "gradient", "1 / the shard degree: a mean in place of a sum"),
        (8.0, "gradient", "the shard x tensor degree: summed"),
        (2**0.5, "gradient norm", "of its square the tensor degree"),
        (-1.0, "gradient", "the sign is wrong"),
        (1.0001, "activation", "almost the same: a constant"),
        (0.0, "gradient", "nothing arrives"),
        (3.0, "gradient", ""),
    ],
)
def test_factor_has_a_meaning(factor: float, kind: str, meaning: str) -> None:
    layout = Layout(ParallelDims(shard=4, tensor=2))
    found = meaning_of_factor(factor, layout, kind)
    assert found.startswith(meaning)
    assert bool(found) == bool(meaning)


# Source


@pytest.mark.parametrize(
    ("key", "name", "text"),
    [
        ("layers.1.attention.wq output", "layers.1.attention.wq", "q = self.wq(x)"),
        ("layers.1.attention_norm.weight gradient", "layers.1.attention_norm", "h = x + self.attention("),
        (
            "layers.0.attention.inner_attention input q gradient",
            "layers.0.attention.inner_attention",
            "out = self.inner",
        ),
        ("layers.0 input", "layers.0", "for block in self.layers.values():"),
        ("tok_embeddings.weight update", "tok_embeddings", "h = self.tok_embeddings(tokens)"),
        ("norm output", "norm", "h = self.norm(h) if"),
        ("output.weight gradient", "output", "return self.output(h) if"),
    ],
)
def test_line_of_the_model_is_that_of_the_call(key: str, name: str, text: str) -> None:
    with torch.device("meta"):
        model = build_model(flavor_config("llama3", "debugmodel"))
    line = source_line(model, key)
    assert line is not None
    assert line.module == name
    assert line.text.startswith(text)
    assert (ROOT / line.file).read_text().splitlines()[line.line - 1].strip() == line.text
    assert source_line(model, "gradient norm") is None
    assert source_line(model, "loss") is None


# Ranks


def add_ranks(value: int) -> int:
    total = torch.tensor(value + torch.distributed.get_rank())
    torch.distributed.all_reduce(total)
    return int(total)


def fail_on_rank_1(how: str) -> None:
    if torch.distributed.get_rank() == 1:
        if how == "raise":
            raise ValueError("a wrong number\nof many")
        if how == "reject":
            raise ConfigError("this model has no such layout")
        if how == "die":
            os._exit(7)
        time.sleep(3600)
    torch.distributed.barrier()


def process() -> int:
    return os.getpid()


def test_ranks_return_their_results() -> None:
    with Ranks((), 60) as ranks:
        assert ranks.call(3, add_ranks, 4) == [15, 15, 15]
        assert ranks.call(2, add_ranks, 1) == [3, 3]


def test_processes_are_reused_unless_modules_of_the_user_may_have_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ranks((), 60) as ranks:
        first = ranks.call(2, process)
        assert ranks.call(3, process)[:2] == first
        with pytest.raises(RankError):
            ranks.call(2, fail_on_rank_1, "raise")
        assert not {*first} & {*ranks.call(2, process)}
    (tmp_path / "module_of_user.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with Ranks(("module_of_user",), 60) as ranks:
        assert ranks.call(1, process) != ranks.call(1, process)


@pytest.mark.parametrize(
    ("how", "message", "where"),
    [
        ("raise", "rank 1: ValueError: a wrong number", 'raise ValueError("a wrong number'),
        ("die", "rank 1: the process died with exit code 7", ""),
        ("hang", "no result within 8 s: ranks wait for each other", "(fail_on_rank_1)"),
    ],
)
@pytest.mark.timeout(60, func_only=True)  # the other ranks are killed, not waited for
def test_rank_that_fails_is_named(how: str, message: str, where: str) -> None:
    with Ranks((), 8) as ranks, pytest.raises(RankError) as error:
        ranks.call(2, fail_on_rank_1, how)
    assert str(error.value).startswith(message)
    assert where in error.value.where


def test_config_error_of_a_rank_is_a_rejection() -> None:
    with Ranks((), 60) as ranks, pytest.raises(RankRejection, match="this model has no such layout"):
        ranks.call(2, fail_on_rank_1, "reject")


# The command


RESULTS = [
    Result(Layout(ParallelDims(shard=2)), "same", Comparison(None, 2, 700, 6e-14)),
    Result(
        Layout(ParallelDims(tensor=2)),
        "differs",
        Comparison(Difference(1, "norm.weight gradient", "gradient", 0.5, (0, 1), 0.5, ""), 1, 3, 0.0),
        meaning="1 / the tensor degree",
    ),
    Result(Layout(ParallelDims(context=2)), "rejected", error="no context parallelism"),
    Result(Layout(ParallelDims(context=4)), "rejected", error="no context parallelism"),
    Result(Layout(ParallelDims(tensor=4)), "fails", error="rank 1: ValueError: no", where="a.py:3: raise"),
]


def test_table_and_json_have_each_result() -> None:
    layouts = [result.layout for result in RESULTS]
    assert as_text(RESULTS[0], layouts) == "shard=2    same      2 steps, 700 tensors, at most 6.0e-14 apart"
    assert as_text(RESULTS[1], layouts).splitlines() == [
        "tensor=2   differs   step 1, norm.weight gradient on all ranks: 0.5 times that of one rank",
        "  usually: 1 / the tensor degree",
    ]
    assert as_text(RESULTS[4], layouts) == "tensor=4   fails     rank 1: ValueError: no\n  at a.py:3: raise"
    assert summary(RESULTS, with_rejected=True).splitlines() == [
        "",
        "rejected: context=2 context=4: no context parallelism",
        "1 layout same, 1 layout differs, 2 layouts rejected, 1 layout fails",
    ]
    report = as_json(RESULTS)
    assert json.loads(json.dumps(report, allow_nan=False)) == json.loads(json.dumps(report))
    assert not report["same"]
    assert report["layouts"][1]["difference"]["ranks"] == (0, 1)
    assert as_json(RESULTS[:1])["same"]


def test_nothing_compared_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DEBUG, "--layouts", "tensor=8"]) == 2
    shown = capsys.readouterr()
    assert "parallelism.tensor_parallel_degree = 8 must divide the model's n_kv_heads = 4" in shown.out
    assert "no layout was compared" in shown.err


def test_options_of_the_trainer_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"training\.stepz"):
        parse(["--training.stepz", "3"])
    assert main(["--training.stepz", "3"]) == 2
    assert main(["--layout", "tensor=2"]) == 2
