"""The mixtures of experts of the package in scripts/moe compute what transformers does, the same on every layout."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
import torch.nn.functional as F
import transformers
from draw_architecture import ROOT
from forked_run import ForkedRun, different_tensors, finish, logged_losses, saved_tensors, slow_steps
from gloo_pool import GlooPool
from parity import TINY, Curve, assert_same_run, config_of
from plugin_rank_functions import copy_mixture, train_mixture
from safetensors.torch import load_file
from test_hf_families import SMALL, TOKENS, assert_close_to_largest, random_of_config
from test_parallelism import layout
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from torchtrain.checkpoint.states import ModelState
from torchtrain.checkpoint.weights import load_weights
from torchtrain.config.registry import MODELS
from torchtrain.distributed.mesh import ParallelDims
from torchtrain.errors import ConfigError
from torchtrain.models.model_config import build_model_config, to_model_section
from torchtrain.models.spec import build_model, flops_per_token
from torchtrain.optimizers.options import OptimizerConfig
from torchtrain.plugins.evaluation.generation import Sampling, generate
from torchtrain.plugins.huggingface.config import config_from_hf, read_hf_config
from torchtrain.plugins.huggingface.safetensors_folder import save_hf
from torchtrain.plugins.muon.muon import Muon, MuonOptions

pytestmark = pytest.mark.usefixtures("mixtures_of_experts")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("OlmoeConfig", {"intermediate_size": 20}),
    "qwen3_moe": ("Qwen3MoeConfig", {"moe_intermediate_size": 20, "head_dim": 12}),
}
LOSSES = {"batch_balance_weight": 0.5, "sequence_balance_weight": 0.3, "z_weight": 0.2, "bias_rate": 0.01}
TWO_LAYERS: dict[str, Any] = {"changes": {"n_layers": 2, **LOSSES}}


def random_model(name: str, **changes: Any) -> Any:
    """A model of transformers in which norms differ from their initial values."""
    kind, keys = FAMILIES[name]
    return random_of_config(kind, **keys, **changes)


def tiny(name: str, **changes: Any) -> Any:
    sizes = {key: value for key, value in vars(TINY).items() if key != "head_size"}
    own = {"head_dim": 6, "n_experts": 8, "top_k": 3, "normalize_top_k": name == "qwen3_moe"}
    changes = {"norm_all_heads": name == "olmoe", **own, **changes}
    return MODELS[name].config_class(**sizes | changes | {"ffn_dim": 24, "family": name})


def ours_as_theirs(gradients: dict[str, Tensor], name_of: Any) -> dict[str, Tensor]:
    """Gradients of our parameters under transformers' names, with the experts as it has them in memory."""
    found = {}
    for key, gradient in gradients.items():
        layer, is_expert, projection = key.partition(".feed_forward.experts.")
        if not is_expert:
            found[name_of(key)] = gradient
        elif projection == "w2":
            found[f"model.{layer}.mlp.experts.down_proj"] = gradient
        elif projection == "w1":
            both = gradient, gradients[f"{layer}.feed_forward.experts.w3"]
            found[f"model.{layer}.mlp.experts.gate_up_proj"] = torch.cat(both, dim=1)
    return found


QUICK = (("olmoe", 16, False), ("qwen3_moe", 64, True))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("name", "experts", "normalize"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(FAMILIES, (16, 64), (False, True))
    ],
)
def test_family_computes_what_transformers_does(tmp_path: Path, name: str, experts: int, normalize: bool) -> None:
    """Logits, loss, gradients, generated tokens, and the folder that an export writes."""
    keys = {"num_experts": experts, "num_experts_per_tok": 4, "norm_topk_prob": normalize}
    theirs = random_model(name, **keys)
    theirs.save_pretrained(tmp_path / "in")
    shape: Any = read_hf_config(tmp_path / "in")
    assert (shape.n_experts, shape.top_k, shape.normalize_top_k, shape.ffn_dim) == (experts, 4, normalize, 20)
    model = build_model(shape)
    load_weights([model], tmp_path / "in", shape)
    logits, expected = model(TOKENS), theirs(TOKENS, labels=TOKENS)
    assert_close_to_largest(logits, expected.logits)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    torch.testing.assert_close(loss, expected.loss, rtol=1e-6, atol=0)
    loss.backward()
    expected.loss.backward()
    found = ours_as_theirs(
        {key: parameter.grad for key, parameter in model.named_parameters()}, MODELS[name].hf.parameter_name
    )
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    assert found.keys() == gradients.keys()
    for key, gradient in found.items():
        assert_close_to_largest(gradient, gradients[key])

    save_hf(ModelState([model]).state_dict(), tmp_path / "out", shape, "float32", "")
    assert read_hf_config(tmp_path / "out") == shape
    reloaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert type(reloaded) is type(theirs)
    for (key, ours), parameter in zip(reloaded.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours, parameter), key

    prompt = TOKENS[:1, :5]
    mask = torch.ones_like(prompt)
    generated = theirs.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    steps = generate(model, prompt.tolist(), Sampling(), max_new_tokens=8)
    assert [token for (token,) in steps] == generated[0, 5:].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_config_survives_a_round_trip_through_the_model_section(name: str) -> None:
    config = tiny(name, **LOSSES)
    section = to_model_section(config, "")
    built = build_model_config(section, None, config.max_seq_len)
    assert built == config
    assert all(getattr(built, key) == value for key, value in LOSSES.items())
    kind, keys = FAMILIES[name]
    content = getattr(transformers, kind)(**{**SMALL, **keys, "num_experts": 16}).to_dict()
    assert config_from_hf(content).n_experts == 16  # type: ignore[attr-defined]


def test_flops_are_those_of_the_experts_that_a_token_uses() -> None:
    config, seq = tiny("olmoe"), TINY.max_seq_len
    with FlopCounterMode(display=False) as counter:
        build_model(config)(torch.zeros(1, seq, dtype=torch.int64))
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    attention = 12 * config.n_layers * config.n_heads * config.head_size * seq
    assert flops_per_token(config, seq) == 3 * products // seq + attention


@pytest.mark.parametrize("sizes", [[5, 0, 8, 3], [0, 0, 0, 16], [1, 1, 1, 1]])
def test_grouped_kernel_computes_what_the_loop_does(sizes: list[int]) -> None:
    experts = importlib.import_module("torchtrain_moe.experts")
    generator = torch.Generator().manual_seed(0)
    shapes = {"rows": (sum(sizes), 8), "w1": (4, 12, 8), "w2": (4, 8, 12), "w3": (4, 12, 8)}
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes.values()]
    factor = torch.randn(shapes["rows"], generator=generator)
    results = [compute(*inputs, sizes) for compute in (experts.swiglu_by_kernel, experts.swiglu_by_expert)]
    torch.testing.assert_close(*results)
    for parameter in inputs:
        gradients = [torch.autograd.grad((out * factor).sum(), parameter, retain_graph=True)[0] for out in results]
        torch.testing.assert_close(*gradients)


def run(gloo: GlooPool, text: str, name: str, experts: int = 1, steps: int = 3, **options: Any) -> list[Curve]:
    """Train on a layout, such as "S2 T2" in ``test_parallelism``, with ``experts`` as the expert degree."""
    ranks, degrees = layout(text)
    rows = 8 // (degrees.get("data_parallel_shard_degree", 1) * degrees.get("data_parallel_replicate_degree", 1))
    training = {"local_batch_size": rows, "global_batch_size": 8, **options.pop("training", {})}
    changes = options.pop("changes", LOSSES)
    sections = options.pop("sections", {})
    config = config_of(training=training, moe={"expert_parallel_degree": experts}, **sections)
    config = replace(config, parallelism=replace(config.parallelism, **degrees, **options))
    return gloo.run(ranks, train_mixture, config, tiny(name, **changes), steps)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def reference(gloo: GlooPool) -> Callable[[], list[Curve]]:
    """Returns the run on one rank, which is trained once, after the models are registered."""
    return cache(partial(run, gloo, "S1", "olmoe", **TWO_LAYERS))


# By default, test_moe_layouts.py has a layout with shards.
@pytest.mark.parametrize("text", ["T2", "P2", *(pytest.param(text, marks=pytest.mark.slow) for text in ("S2", "C2"))])
def test_layout_matches_one_rank(gloo: GlooPool, text: str, reference: Callable[[], list[Curve]]) -> None:
    assert_same_run(run(gloo, text, "olmoe", **TWO_LAYERS), *reference())


@pytest.mark.parametrize("text", ["C2", pytest.param("S2", marks=pytest.mark.slow)])
def test_expert_parallelism_matches_one_rank(gloo: GlooPool, text: str) -> None:
    (reference,) = run(gloo, "S1", "qwen3_moe", **TWO_LAYERS)
    assert_same_run(run(gloo, text, "qwen3_moe", experts=2, **TWO_LAYERS), reference)


SLOW_LAYOUTS = {
    "S4": (1, 2, 4),
    "R2": (1,),
    "R2 S2": (1, 2),
    "S2 T2": (1, 2),
    "S2 C2": (1, 2, 4),
    "P2 S2": (1, 2),
    "S2 T2 P2": (2,),
    "R2 S2 T2": (2,),
    "P2 Interleaved1F1B": (1,),
    "P2 S2 InterleavedZeroBubble": (1, 2),
    "P2 ZBVZeroBubble": (1,),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "experts"), [(text, degree) for text, degrees in SLOW_LAYOUTS.items() for degree in degrees]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_layout_matches_one_rank(gloo: GlooPool, name: str, text: str, experts: int) -> None:
    (reference,) = run(gloo, "S1", name)
    assert_same_run(run(gloo, text, name, experts=experts), reference)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"mode": "full"}, {"mode": "selective"}, {"selective_option": "2"}])
@pytest.mark.parametrize(("text", "experts"), [("S1", 1), ("S2", 2), ("T2", 1)])
def test_activation_checkpointing_changes_nothing(
    gloo: GlooPool, text: str, experts: int, options: dict[str, str]
) -> None:
    if experts > 1 and options == {"mode": "selective"}:
        pytest.skip("rejected: test_what_does_not_combine_is_rejected")
    (reference,) = run(gloo, "S1", "olmoe")
    sections = {"activation_checkpoint": {"mode": "selective", **options}}
    assert_same_run(run(gloo, text, "olmoe", experts=experts, sections=sections), reference)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["T2", "S2 T2"])
def test_tensor_parallelism_without_sequence_parallelism_matches_one_rank(gloo: GlooPool, text: str) -> None:
    (reference,) = run(gloo, "S1", "olmoe")
    experts = 2 if "S2" in text else 1
    assert_same_run(run(gloo, text, "olmoe", experts=experts, enable_sequence_parallel=False), reference)


@pytest.mark.parametrize(
    ("text", "experts"),
    [("S2", 2), *(pytest.param(t, n, marks=pytest.mark.slow) for t, n in (("T2", 1), ("R2 S2", 2)))],
)
def test_muon_on_a_layout_matches_one_rank(gloo: GlooPool, text: str, experts: int) -> None:
    options: Any = {"sections": {"optimizer": {"name": "muon"}}, **TWO_LAYERS}
    (reference,) = run(gloo, "S1", "olmoe", **options)
    curves = run(gloo, text, "olmoe", experts=experts, **options)
    assert_same_run(curves, reference)
    assert_close_to_largest(curves[0].last[W2], reference.last[W2])


W2 = "layers.0.feed_forward.experts.w2"


def test_muon_updates_each_expert_as_a_matrix_of_its_own() -> None:
    config = OptimizerConfig(name="muon")
    gradient = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0))

    def updated(*parameters: Tensor) -> list[Tensor]:
        named = [(f"layers.{i}.w", torch.nn.Parameter(torch.ones_like(p))) for i, p in enumerate(parameters)]
        for (_, parameter), grad in zip(named, parameters, strict=True):
            parameter.grad = grad.clone()
        group = {"params": named, "name": "hidden", "lr": 0.1, "lr_factor": 1.0, "weight_decay": 0.1}
        Muon([group], config, MuonOptions(dtype="float32"), None).step()
        return [parameter.detach() for _, parameter in named]

    (stacked,) = updated(gradient)
    torch.testing.assert_close(stacked, torch.stack(updated(*gradient)))


def test_microbatches_change_nothing(gloo: GlooPool, reference: Callable[[], list[Curve]]) -> None:
    assert_same_run(run(gloo, "S1", "olmoe", training={"local_batch_size": 2}, **TWO_LAYERS), *reference())


@pytest.mark.parametrize(
    ("degree", "dims", "changes", "message"),
    [
        (3, ParallelDims(shard=6), {}, "expert_parallel_degree = 3 must divide n_experts = 8; try 1 or 2"),
        (4, ParallelDims(shard=2, tensor=2), {}, "must divide data_parallel_shard_degree [*] context degree = 2; try"),
        (
            2,
            ParallelDims(shard=2),
            {"activation_checkpoint": {"mode": "selective"}},
            "blocks that repeat the operations",
        ),
        (1, ParallelDims(), {"compile": {"enable": True}}, "blocks are compiled for fixed sizes; set it to false"),
        (1, ParallelDims(shard=2), {"recheck": {"interval": 5}}, "recheck.interval = 5 has not been tried with olmoe"),
    ],
)
def test_what_does_not_combine_is_rejected(degree: int, dims: Any, changes: dict[str, Any], message: str) -> None:
    check_run = importlib.import_module("torchtrain_moe.parallel").check_run
    with pytest.raises(ConfigError, match=message):
        check_run(degree, config_of(**changes), tiny("olmoe"), dims)
    check_run(1, config_of(), TINY, dims)
    with pytest.raises(ConfigError, match="expert_parallel_degree = 2 needs a mixture of experts"):
        check_run(2, config_of(), TINY, dims)


def train_until(folder: Path, steps: int, degree: int, *options: str, ranks: int = 2) -> dict[int, float]:
    """Train a tiny mixture up to ``steps`` in ``folder``; returns the losses."""
    finish(folder, *options_of(steps, degree), *options, ranks=ranks, shape=tiny("olmoe", n_layers=2, **LOSSES))
    return logged_losses(folder)


def options_of(steps: int, degree: int) -> list[str]:
    start = ["--job.import", "torchtrain_moe", "--model.name", "olmoe", "--training.steps", str(steps)]
    return [*start, "--moe.expert_parallel_degree", str(degree)]


@pytest.mark.slow
def test_run_resumes_with_another_expert_degree(tmp_path: Path) -> None:
    """Loads and biases are in the checkpoint, as the experts that other ranks had."""
    expected = train_until(tmp_path / "whole", 6, 1)
    train_until(tmp_path / "resumed", 2, 2)
    losses = train_until(tmp_path / "resumed", 6, 1)
    assert losses == pytest.approx(expected, rel=1e-5)
    ours, theirs = (saved_tensors(tmp_path / name, 6) for name in ("resumed", "whole"))
    bias = "model.layers.1.feed_forward.router.bias"
    assert theirs[bias].abs().max() > 0.01
    torch.testing.assert_close(ours[bias], theirs[bias])


def run_exactly(gloo: GlooPool, text: str, experts: int, **training: Any) -> list[Curve]:
    """``run`` with exact sums. Two rows in each microbatch, on every layout."""
    training = {"sums": "exact", "local_batch_size": 2, **training}
    return run(gloo, text, "olmoe", experts, steps=2, training=training, **TWO_LAYERS)


EXACT_LAYOUTS = [("S2", 1), ("S2", 2), ("S4", 1), ("S4", 2), ("S4", 4), ("R2 S2", 2), ("R4", 1), ("P2 S2", 2)]


@pytest.mark.parametrize(
    ("text", "experts"),
    [of if of == ("S4", 2) else pytest.param(*of, marks=pytest.mark.slow) for of in EXACT_LAYOUTS],
)
def test_exact_sums_have_the_same_bits_on_all_data_and_expert_degrees(gloo: GlooPool, text: str, experts: int) -> None:
    # The microbatches of a pipeline have one row.
    expected, *others = run_exactly(gloo, "P2" if "P2" in text else "S1", 1)
    curves = run_exactly(gloo, text, experts)
    assert all((curve.losses, curve.grad_norms) == (expected.losses, expected.grad_norms) for curve in curves)
    for name in ("last", "moments"):
        found, theirs = (
            dict(chain.from_iterable(getattr(curve, name).items() for curve in of_ranks))
            for of_ranks in (curves, [expected, *others])
        )
        assert different_tensors(found, theirs) == []


@pytest.mark.slow
@pytest.mark.parametrize(("text", "experts"), [("S2", 1), ("S2", 2), ("S4", 2), ("S4", 4)])
def test_exact_sums_in_bfloat16_have_the_same_bits(gloo: GlooPool, text: str, experts: int) -> None:
    (expected,) = run_exactly(gloo, "S1", 1, mixed_precision_param="bfloat16")
    for curve in run_exactly(gloo, text, experts, mixed_precision_param="bfloat16"):
        assert (curve.losses, curve.grad_norms) == (expected.losses, expected.grad_norms)
        assert different_tensors(curve.last, expected.last) == []


@pytest.mark.slow
def test_run_with_exact_sums_is_killed_and_resumes_with_another_expert_degree_bitwise(tmp_path: Path) -> None:
    exact = ("--training.sums", "exact")
    train_until(tmp_path / "whole", 8, 1, *exact, ranks=1)
    options = [*options_of(8, 2), *exact, "--training.local_batch_size", "1"]
    killed = ForkedRun(tmp_path / "resumed", *options, hook=slow_steps, shape=tiny("olmoe", n_layers=2, **LOSSES))
    killed.wait_for(lambda: any((tmp_path / "resumed/checkpoint").glob("step-*")))
    killed.end()
    assert 0 < max(logged_losses(tmp_path / "resumed")) < 8
    train_until(tmp_path / "resumed", 8, 1, *exact)
    assert logged_losses(tmp_path / "resumed") == logged_losses(tmp_path / "whole")
    ours, theirs = (saved_tensors(tmp_path / name, 8) for name in ("resumed", "whole"))
    assert different_tensors(ours, theirs) == []


@pytest.mark.parametrize(
    ("text", "experts"),
    [("S2", 2), ("T2", 1), *(pytest.param(text, 2, marks=pytest.mark.slow) for text in ("S2 T2", "R2 S2", "P2 S2"))],
)
def test_each_layout_reads_and_writes_the_matrices_of_experts(
    gloo: GlooPool, tmp_path: Path, text: str, experts: int
) -> None:
    random_model("qwen3_moe", num_experts=8, num_experts_per_tok=2).save_pretrained(tmp_path / "source")
    ranks, degrees = layout(text)
    config = config_of(training={"seq_len": 32}, parallelism=degrees, moe={"expert_parallel_degree": experts})
    gloo.run(ranks, copy_mixture, config, tmp_path / "source", tmp_path / "copy")
    expected, found = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("source", "copy"))
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in expected
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.slow
def test_package_that_is_installed_trains_with_its_config(tmp_path: Path) -> None:
    """The files of an installation by pip of both packages, whose metadata has the entry points of pyproject.toml."""
    for name in ("families", "moe"):
        folder = ROOT / "scripts" / name
        project = tomli.loads((folder / "pyproject.toml").read_text())["project"]
        info = tmp_path / "site" / f"torchtrain_{name}-{project['version']}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        (points,) = project["entry-points"].items()
        lines = [f"{key} = {module}\n" for key, module in points[1].items()]
        (info / "entry_points.txt").write_text(f"[{points[0]}]\n{''.join(lines)}")
        shutil.copytree(folder / f"torchtrain_{name}", tmp_path / f"site/torchtrain_{name}")
    config = (ROOT / "scripts/moe/debug_moe.toml").read_text()
    (tmp_path / "config.toml").write_text(
        config.replace("steps = 200", "steps = 2").replace("log_freq = 20", "log_freq = 1")
    )
    options = ["--job.config_file=config.toml", "--job.dump_folder=run", "--training.seq_len=32"]
    options += [
        "--model.shape.dim=32",
        "--model.shape.n_layers=2",
        "--model.shape.ffn_dim=32",
        "--checkpoint.no-enable",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torchtrain.train", *options]
    result = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "experts/load_max" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["experts/dropped_tokens"] == 0 for line in steps)
    assert all(line["experts/load_max"] >= 1 >= line["experts/load_min"] for line in steps)


def test_package_has_fewer_than_900_lines_of_code() -> None:
    count = 0
    for path in (ROOT / "scripts/moe").rglob("*.py"):
        count += sum(bool(line.strip()) for line in path.read_text().splitlines())
    assert count < 900
