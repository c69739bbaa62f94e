"""torchtrain.verify_layouts --bits compares all bits with those of one rank."""

import io
import json
import math
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import with_options

from torchtrain.config.schema import JobConfig, section_of
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.errors import ConfigError
from torchtrain.plugins.exact_sums.options import GrainsConfig
from torchtrain.plugins.verify_layouts.bits import BitDifference, BitRecord, bit_difference, bits_config, compare_bits
from torchtrain.plugins.verify_layouts.layouts import Layout, default_layouts
from torchtrain.plugins.verify_layouts.report import as_text, in_float64
from torchtrain.plugins.verify_layouts.small_config import verified_config
from torchtrain.plugins.verify_layouts.verdict import Comparison
from torchtrain.plugins.verify_layouts.verification import Result
from torchtrain.verify_layouts import main

DEBUG = ("--job.config_file", "train_configs/debug_model.toml", "--bits")
TWO_LAYERS = ("--model.shape.n_layers", "2")
IN_BFLOAT16 = ("--training.mixed_precision_param", "bfloat16")


def verify(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the command; returns its exit code and the entries of its layouts."""
    with redirect_stdout(io.StringIO()) as output:
        code = main([*arguments, "--json"])
    return code, json.loads(output.getvalue())["layouts"]


@pytest.mark.parametrize(
    ("options", "layouts"),
    [
        ((*IN_BFLOAT16, *TWO_LAYERS), ("context=2,tensor=2",)),  # the slow cases have all layouts
        pytest.param(
            *(("--training.mixed_precision_param", "float32", "--optimizer.name", "muon"), ()),
            marks=[pytest.mark.slow, pytest.mark.timeout(3000)],
        ),
        pytest.param(
            *((*IN_BFLOAT16, "--model.name", "qwen3", "--data.document_mask"), ()),
            marks=[pytest.mark.slow, pytest.mark.timeout(3000)],
        ),
    ],
)
def test_layouts_have_the_bits_of_one_rank(options: tuple[str, ...], layouts: tuple[str, ...]) -> None:
    code, entries = verify(*DEBUG, *options, *(("--layouts", *layouts) if layouts else ()))
    rejected = [entry["layout"] for entry in entries if entry["verdict"] == "rejected"]
    zero_bubble = [f"pipeline=2,schedule={name}ZeroBubble" for name in ("Interleaved", "ZBV")]
    assert rejected == ([] if layouts else [*zero_bubble, "context=4"])
    found = [entry for entry in entries if entry["layout"] not in rejected]
    assert [entry for entry in found if entry["verdict"] != "same"] == []
    assert code == 0
    assert len(found) == (len(layouts) or len(default_layouts(8)) - 3)
    assert all(entry["bitwise"] and entry["steps"] == 2 and entry["tensors"] > 100 for entry in found)


def test_fault_below_the_tolerance_of_float64_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of grains in another order, on more than one rank: in mathematics they are the same."""
    tree = "    for leaf in leaves:\n        tree.add(leaf)\n    return tree.root()"
    planted = ("plugins/exact_sums/tree.py", tree, "    return sum(leaves)")
    (tmp_path / "another_order.py").write_text(
        "import os\n"
        "from planted import plant\n"
        'if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # not in this process, and not on one rank\n'
        f"    plant(*{planted!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = ("--model.shape.n_layers", "1", "--job.import", "another_order", "--steps", "1")
    code, (entry,) = verify(*DEBUG, *options, "--layouts", "tensor=2")
    del sys.modules["another_order"]
    assert code == 1
    found = entry["difference"]
    assert (entry["verdict"], found["step"], found["key"]) == ("differs", 1, "output.weight gradient")
    assert found["ranks"] == [0, 1]
    assert 0 < found["distance"] < 2e-2  # a few steps of bfloat16
    assert "elements there" in found["note"]
    assert entry["in_float64"].endswith(
        "other rounding, as of sums in another order, or what only this dtype or grains do"
    )


# The comparison


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_all_bits_are_compared(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 2.0, math.nan], [0.0, -4.0, math.inf]], dtype=dtype)
    assert bit_difference(x, x.clone()) is None
    other = x.clone()
    other[1, 0] = -0.0
    found = bit_difference(other, x)
    assert found is not None
    assert (found.count, found.elements) == (1, 6)
    y = torch.tensor([1.0, -2.0, 0.5], dtype=dtype)
    assert bit_difference(2 * y, y) == BitDifference(3, 3, 1.0, [2.0, 2.0, 2.0])
    assert bit_difference(y.half(), y) == BitDifference(3, 3, math.inf, ())


ORDER = ["w", "loss", "w gradient", "w update"]


def record(*steps: dict[str, BitDifference | None]) -> BitRecord:
    return BitRecord(list(steps))


def test_first_difference_is_named_with_its_ranks() -> None:
    same: dict[str, BitDifference | None] = dict.fromkeys([*ORDER, "gradient norm"])
    twice = BitDifference(3, 4, 1.0, [2.0, 2.0])
    comparison = compare_bits([record(same, same), record(same, same)], ORDER, {"w": None})
    assert comparison == Comparison(None, 2, 10, 0.0, is_bitwise=True)
    layout = Layout()
    assert as_text(Result(layout, "same", comparison), [layout]) == "one rank  same      2 steps, 10 tensors, all bits"
    wrong = {**same, "w gradient": twice, "w update": twice, "gradient norm": BitDifference(1, 1, 0.5, [1.5])}
    comparison = compare_bits([record(same, same), record(same, wrong)], ORDER, {"w": None})
    found = comparison.difference
    assert found is not None
    assert (found.step, found.key, found.kind, found.ranks, found.factor) == (2, "w gradient", "gradient", (1,), 2.0)
    assert found.note == "3 of 4 elements there"
    only_norm = {**same, "w update": twice, "gradient norm": BitDifference(1, 1, 0.5, [1.5])}
    found = compare_bits([record(only_norm)], ORDER, {"w": None}).difference
    assert found is not None
    assert (found.key, found.kind, found.factor, found.note) == ("gradient norm", "gradient norm", 1.5, "")
    two = Layout(ParallelDims(shard=2))
    assert in_float64(replace(comparison, is_bitwise=False), two).startswith("step 2, w gradient on rank 1: 2 times")


# The config


def config_with_bits(change: Callable[[Any], Any] = lambda model: model, **sections: Any) -> tuple[JobConfig, str]:
    of_user = with_options(JobConfig(), **sections)
    config, model, _ = verified_config(of_user, as_is=False, steps=2)
    return bits_config(config, of_user, change(model))


def test_grains_allow_as_many_layouts_as_the_model_does() -> None:
    config, replaced = config_with_bits()
    assert replaced == 'training.sums = "exact"; grains.tensor = 4; grains.context = 4'
    assert section_of(config, GrainsConfig) == GrainsConfig(4, 4)
    assert config.training.mixed_precision_param == "bfloat16"
    assert (
        config_with_bits(training={"mixed_precision_param": "float32"})[0].training.mixed_precision_param == "float32"
    )
    config, _ = config_with_bits(lambda model: replace(model, n_kv_heads=2))
    assert section_of(config, GrainsConfig) == GrainsConfig(2, 4)
    config, _ = config_with_bits(lambda model: replace(model, vocab_size=129))
    assert section_of(config, GrainsConfig) == GrainsConfig(1, 4)
    config, _ = config_with_bits(training={"sums": "exact"}, grains={"tensor": 2, "context": 8})
    assert section_of(config, GrainsConfig) == GrainsConfig(2, 8)


def test_model_without_grains_is_rejected() -> None:
    def odd(model: Any) -> Any:
        return replace(model, vocab_size=129, ffn_dim=63)

    with pytest.raises(ConfigError, match=r"--bits needs grains, which this model does not support: grains.tensor = 4"):
        config_with_bits(odd)


def test_all_layouts_have_microbatches_of_two_rows() -> None:
    for layout in default_layouts(8):
        config = layout.apply(JobConfig(), microbatch_rows=2)
        count = config.parallelism.pipeline_parallel_microbatches if layout.dims.pipeline > 1 else 1
        assert config.training.local_batch_size == 2 * count
        assert count >= layout.dims.pipeline
