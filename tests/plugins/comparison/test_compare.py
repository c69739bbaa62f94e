"""torchtrain.compare names the first tensor that differs, and reports no difference between layouts."""

import errno
import functools
import io
import itertools
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from crash_test_s3 import tensors as tensors_of
from forked_command import checked_command, run_command
from forked_run import finish
from gloo_pool import GlooPool
from parity import GLOBAL_BATCH, TINY, config_of, train
from planted import plant
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from torchtrain import files
from torchtrain.checkpoint.format import VerifiedWriter, read_manifest
from torchtrain.checkpoint.local_storage import LocalNewCheckpoint, LocalStorage
from torchtrain.checkpoint.saved_run import read_config_text
from torchtrain.checkpoint.states import save_tensors
from torchtrain.compare import main
from torchtrain.config.parse import from_text, to_toml
from torchtrain.distributed.connections import gloo_backend
from torchtrain.errors import ConfigError, StorageError, TorchtrainError
from torchtrain.optimizers.options import ParameterGroupConfig
from torchtrain.parallelisms.resolve import resolve_layout
from torchtrain.plugins.comparison import runs
from torchtrain.plugins.comparison.fingerprint_hook import FingerprintHook
from torchtrain.plugins.comparison.fingerprints import (
    FILE,
    Fingerprint,
    StepFingerprints,
    assemble,
    distance,
    first_difference,
    multiple_note,
    read,
)
from torchtrain.plugins.comparison.options import ComparisonConfig
from torchtrain.plugins.comparison.runs import Finding, RunFolder, open_run, plot_losses, summarize, verdict
from torchtrain.plugins.stages.driver import resolve_stages
from torchtrain.trainer import TrainStep

ROOT = Path(__file__).parents[3]

# Number of ranks, and changes of the reference config, in which one rank has all eight rows of a step.
LAYOUTS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "1": (1, {"training": {"local_batch_size": 8}}),
    "accumulate": (1, {"activation_checkpoint": {"mode": "full"}, "training": {"loss_chunk_tokens": 8}}),
    "S2": (2, {"activation_checkpoint": {"mode": "selective", "selective_option": "op"}}),
    "R2": (2, {"parallelism": {"data_parallel_replicate_degree": 2}, "training": {"sums": "exact"}}),
    "T2": (2, {"parallelism": {"tensor_parallel_degree": 2}}),
    "C2": (2, {"parallelism": {"context_parallel_degree": 2}}),
    "P2": (2, {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}}),
    "T2 without sequence parallel": (
        2,
        {"parallelism": {"tensor_parallel_degree": 2, "enable_sequence_parallel": False}},
    ),
    "Z2": (
        2,
        {
            "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
            "training": {"loss_chunk_tokens": 0},
        },
    ),
    "C2 T2": (4, {"parallelism": {"context_parallel_degree": 2, "tensor_parallel_degree": 2}}),
    "P2 T2 S2": (8, {"parallelism": {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}}),
}
QUICK = ("1", "C2", "P2")


def train_with_fingerprints(folder: Path, changes: dict[str, dict[str, Any]], dtype: str, steps: int) -> None:
    config = config_of(**changes)
    config = replace(
        config,
        training=replace(config.training, mixed_precision_param=dtype),
        plugins={"comparison": ComparisonConfig(fingerprint_steps=tuple(range(1, steps + 1)))},
        job=replace(config.job, dump_folder=str(folder)),
    )
    sized = replace(config, training=replace(config.training, global_batch_size=GLOBAL_BATCH))

    def attach(step: TrainStep) -> None:
        step.hooks.all.append(FingerprintHook(sized, step.model))

    train(config, TINY, steps=steps, attach=attach)


def compare_all_layouts(gloo: GlooPool, folder: Path, dtype: str, layouts: tuple[str, ...], steps: int) -> int:
    """Assert that no pair of layouts is reported as different; returns the number of pairs."""
    for name in layouts:
        ranks, changes = LAYOUTS[name]
        gloo.run(ranks, train_with_fingerprints, folder / name, changes, dtype, steps)
    runs = {n: [read(folder / n / f"fingerprints/step-{step}") for step in range(1, steps + 1)] for n in layouts}
    pairs = list(itertools.combinations(layouts, 2))
    for a, b in pairs:
        before = 0.0
        for step, (ours, theirs) in enumerate(zip(runs[a], runs[b], strict=True), 1):
            assert list(ours.tensors) == list(theirs.tensors)
            assert {k: f.shape for k, f in ours.tensors.items()} == {k: f.shape for k, f in theirs.tensors.items()}
            assert len(ours.rows) == 8
            assert np.array_equal(ours.rows, theirs.rows)
            finding, before = first_difference(ours, theirs, step, before)
            assert finding is None, f"{a} and {b}: {finding}"
    return len(pairs)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_layouts_are_reported_as_identical(gloo: GlooPool, tmp_path: Path, dtype: str) -> None:
    compare_all_layouts(gloo, tmp_path, dtype, QUICK, steps=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_pairs_of_layouts_are_reported_as_identical(gloo: GlooPool, tmp_path: Path, dtype: str) -> None:
    assert compare_all_layouts(gloo, tmp_path, dtype, tuple(LAYOUTS), steps=3) >= 20


@dataclass(frozen=True)
class Fault:
    """A fault in the code of a run: ``new`` replaces ``old`` in ``file``. compare must then print ``finding``."""

    file: str
    old: str
    new: str
    finding: str
    ranks: int = 1
    options: tuple[str, ...] = ()
    reference: str = "plain"


REFERENCES = {
    "plain": (),
    "tied": ("--model.shape.tied_embeddings", "True"),
    "documents": ("--data.document_mask", "--data.path", "DOCUMENTS"),
}
COPIES_DIFFER = "B: ranks 0 and 1 have replicas that differ"
FAULTS = {
    "causal offset in context parallelism": Fault(
        "parallelisms/context_parallel.py",
        "tril(k.shape[2] - q.shape[2])",
        "tril(k.shape[2] - q.shape[2] + 1)",
        "step 1, layers.0.attention.inner_attention output: ",
        ranks=2,
        options=("--parallelism.context_parallel_degree", "2"),
    ),
    "norm left out of sequence parallelism": Fault(
        "parallelisms/tensor_parallel.py",
        "self.contributes = sharded_input or mesh.get_local_rank() == 0",
        "self.contributes = mesh.get_local_rank() == 0",
        "step 1, norm.weight gradient: differs by ",
        ranks=2,
        options=("--parallelism.tensor_parallel_degree", "2"),
    ),
    "loss divided by the local tokens": Fault(
        "trainer.py",
        "all_reduce(global_tokens, group=self.model.mesh.batch.get_group())",
        "pass",
        "step 1, output.weight gradient: in B 2 times its value in A",
        ranks=2,
    ),
    "positions of the second document": Fault(
        "models/document_mask.py",
        "return places - torch.where(begins, places, 0).cummax(dim=1).values",
        "return places.expand_as(begins)",
        "step 1, layers.0.attention.inner_attention input q: ",
        reference="documents",
    ),
    "dropped microbatch": Fault(
        "trainer.py",
        "            tokens += (",
        "            if i == 1:\n                continue\n            tokens += (",
        "step 1, tok_embeddings output: B: 75% of its elements are present: rows 1 to 1 of 4 are missing",
    ),
    "tied gradient not shared": Fault(
        "trainer.py",
        "self.model.pipeline.sync_tied_embedding_grads()",
        "pass",
        f"step 1, tok_embeddings.weight gradient: {COPIES_DIFFER}",
        ranks=2,
        options=("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", "GPipe"),
        reference="tied",
    ),
    "weight decay on norms": Fault(
        "optimizers/groups.py",
        'decay = 0.0 if group == "no_decay" else config.weight_decay',
        "decay = config.weight_decay",
        "step 1, layers.0.attention_norm.weight update: ",
    ),
    "rate off by one step": Fault(
        "trainer.py",
        "self.schedule.apply(self.optimizer, step)",
        "self.schedule.apply(self.optimizer, step + 1)",
        "step 1, tok_embeddings.weight update: in B 2 times its value in A",
    ),
    "RoPE in bfloat16": Fault(
        "models/llama/model.py",
        "    first, second = x.float()",
        "    cos, sin = cos.bfloat16(), sin.bfloat16()\n    first, second = x.bfloat16()",
        "step 1, layers.0.attention.inner_attention input q: ",
    ),
    "one rank with another seed": Fault(
        "trainer.py",
        "initialize(model_parts, config.training.seed, self.device)",
        "initialize(model_parts, config.training.seed + rank(), self.device)",
        "step 1, tok_embeddings.weight: ",
        ranks=2,
    ),
    "batch row swapped": Fault(
        "datasets/dataloader.py",
        "(torch.from_numpy(part.copy()) for part",
        "(torch.from_numpy(part[[0, 2, 1, 3]].copy()) for part",
        "step 1, row 1 of the batch, from ",
    ),
    "stale shard after resume": Fault(
        "checkpoint/states.py",
        "    saved = reader.read_metadata().state_dict_metadata\n",
        "    saved = reader.read_metadata().state_dict_metadata\n"
        "    stale = 'model.layers.1.feed_forward.w1.weight'\n"
        "    if dist.get_rank() and stale in tensors:\n"
        "        tensors = {**tensors, stale: tensors[stale].clone()}\n",
        "step 3, layers.1.feed_forward.w1.weight: ",
        ranks=2,
    ),
}
OPTIONS = [
    *("--model.shape.dim", "32", "--model.shape.n_layers", "2", "--model.shape.n_heads", "4"),
    *("--model.shape.n_kv_heads", "2", "--model.shape.ffn_dim", "64", "--training.seq_len", "32"),
    *("--training.global_batch_size", "4", "--training.local_batch_size", "1", "--training.steps", "3"),
    *("--training.mixed_precision_param", "float32", "--lr_scheduler.warmup_steps", "3"),
    *("--lr_scheduler.total_steps", "10", "--metrics.log_freq", "1", "--metrics.no-enable_tensorboard"),
    *("--comparison.fingerprint_steps", "1", "2", "3", "--checkpoint.no-enable", "--report.no-enable"),
]


def run(folder: Path, *options: str, ranks: int = 1, hook: Any = None) -> Path:
    hooked = {"hook": hook} if hook else {}
    checked_command("torchtrain.train", *OPTIONS, "--job.dump_folder", str(folder), *options, ranks=ranks, **hooked)
    return folder


def compare(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Run the command; returns its exit code and its JSON output."""
    with redirect_stdout(io.StringIO()) as output:
        code = main([*map(str, arguments), "--json"])
    assert code in (0, 1, 3)
    return code, json.loads(output.getvalue())


@pytest.mark.parametrize("name", FAULTS)
def test_fault_can_be_injected(name: str) -> None:
    fault = FAULTS[name]
    assert (ROOT / "torchtrain" / fault.file).read_text().count(fault.old) == 1


SAVING = ("--checkpoint.enable", "--checkpoint.interval", "1")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, tuple[str, ...]]]:
    """A function from a name to a run on one rank without a fault, and its options."""
    base = tmp_path_factory.mktemp("references")
    (base / "documents.jsonl").write_text("".join(json.dumps({"text": f"{i} of many"}) + "\n" for i in range(200)))

    @functools.cache
    def reference(name: str) -> tuple[Path, tuple[str, ...]]:
        options = tuple(word.replace("DOCUMENTS", str(base / "documents.jsonl")) for word in REFERENCES[name])
        saving = SAVING if name == "plain" else ()
        return run(base / name, *options, *saving), options

    return reference


@pytest.fixture(scope="module")
def saved_run(references: Any) -> Path:
    """A run on one rank with a checkpoint of each step, which must not be changed."""
    folder: Path = references("plain")[0]
    return folder


QUICK_FAULTS = ("batch row swapped", "weight decay on norms")


@pytest.mark.parametrize(
    "name", [name if name in QUICK_FAULTS else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_injected_fault_is_named(references: Any, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    reference, options = references(fault.reference)
    hook = functools.partial(plant, fault.file, fault.old, fault.new)
    options = (*options, *fault.options)
    if name == "stale shard after resume":
        saving = ("--checkpoint.enable", "--checkpoint.interval", "2")
        for end in ("2", "3"):
            run(tmp_path / "good", *options, *saving, "--training.steps", end, ranks=2)
        assert compare(reference, tmp_path / "good")[0] == 0
        run(tmp_path / "bad", *options, *saving, "--training.steps", "2", ranks=2)
        shutil.rmtree(tmp_path / "bad/fingerprints")  # those from before the fault
        options = (*options, *saving)
    bad = run(tmp_path / "bad", *options, ranks=fault.ranks, hook=hook)
    code, report = compare(reference, bad)
    lines = report["computed"]["lines"]
    assert code == 1
    assert lines[0].startswith(fault.finding), lines
    if name == "batch row swapped":
        assert "(B's is row 2 of A)" in lines[0]


def fake_run(folder: Path, losses: list[float | None], **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(config_of(**changes)))
    lines = [{"step": step, "loss": x, "grad_norm": x and 2 * x, "lr": 1e-3} for step, x in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 99, "lo')
    return folder


def test_curves_that_drift_are_distinguished_from_those_that_jump(tmp_path: Path) -> None:
    losses = [8 - 0.1 * step for step in range(20)]
    a = fake_run(tmp_path / "a", losses)
    drift = fake_run(tmp_path / "drift", [x * (1 + 1e-7 * 2**step) for step, x in enumerate(losses)])
    jump = fake_run(tmp_path / "jump", [x * (1 + (1e-7 if step < 9 else 1e-2)) for step, x in enumerate(losses)])
    same = fake_run(tmp_path / "same", [x * (1 + 1e-7) for x in losses], metrics={"log_freq": 3})

    code, report = compare(a, same)
    assert code == 0
    assert report["logged"]["lines"][0] == "loss: at most 1.0e-07 apart in 20 steps up to step 20"
    assert report["config"]["lines"] == ["changes nothing: metrics.log_freq = 10 in A, 3 in B"]
    code, report = compare(a, drift)
    assert code == 1
    assert report["logged"]["lines"][0].startswith("loss drifts: growing rounding errors. Step 11: ")
    code, report = compare(a, jump)
    assert report["logged"]["lines"][0].startswith("loss jumps: a fault. Step 10: ")
    assert report["logged"]["found"][0].items() >= {"curve": "loss", "step": 10, "how": "jumps"}.items()
    assert report["logged"]["lines"][0].endswith("9.9e-03 apart; 1.0e-07 at most in the 9 before")
    other_rate = fake_run(tmp_path / "rate", [x * 1.1 for x in losses], optimizer={"lr": 1.0})
    code, report = compare(a, other_rate)
    assert report["logged"]["lines"][0].startswith("loss jumps: the config explains it, or a fault. Step 1: ")


def add_lines(folder: Path, *lines: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(f"\n{json.dumps(line)}\n" for line in lines)


def test_line_with_only_a_validation_loss_is_not_a_step_of_the_curve(tmp_path: Path) -> None:
    a, b = fake_run(tmp_path / "a", [1.0] * 12), fake_run(tmp_path / "b", [1.0] * 9)  # as if with another log_freq
    for folder in (a, b):
        add_lines(folder, {"step": 10, "validation_loss": 2.0}, {"step": 20, "validation_loss": 2.0})
    code, report = compare(a, b)
    assert code == 3, report  # too few steps
    assert report["logged"]["lines"][0] == "loss: identical in 9 steps up to step 9"


def test_steps_before_a_restart_from_scratch_are_not_compared(tmp_path: Path) -> None:
    a, b = fake_run(tmp_path / "a", [1.0] * 8), fake_run(tmp_path / "b", [2.0] * 8)
    repeated = [{"step": step, "loss": 1.0, "grad_norm": 2.0, "lr": 1e-3} for step in range(1, 5)]
    add_lines(b, {"step": 0, "event": "start", "ranks": 1}, *repeated)
    code, report = compare(a, b)
    assert code == 3, report  # too few steps
    assert report["logged"]["lines"][0] == "loss: identical in 4 steps up to step 4"


def test_curves_are_compared_when_the_config_does_not_fit_the_last_start(tmp_path: Path) -> None:
    a, b = (fake_run(tmp_path / name, [1.0], parallelism={"data_parallel_shard_degree": 2}) for name in "ab")
    for folder, ranks in ((a, 2), (b, 4)):
        lines = (folder / "metrics.jsonl").read_text()
        (folder / "metrics.jsonl").write_text(f'{{"step": 0, "event": "start", "ranks": {ranks}}}\n{lines}')
    code, report = compare(a, b)
    assert code == 3, report  # too few steps
    assert report["logged"]["match"] is True
    assert "options are the same" in report["config"]["lines"]


def test_losses_that_are_not_finite_are_compared(tmp_path: Path) -> None:
    finite, nan, also = (
        fake_run(tmp_path / name, losses)
        for name, losses in (("a", [1.0, 1.0]), ("b", [1.0, None]), ("c", [1.0, None]))
    )
    assert compare(nan, also)[0] == 3  # no difference, in too few steps
    code, report = compare(finite, nan)
    assert code == 1
    assert report["logged"]["found"][0] == {"curve": "loss", "step": 2, "how": "jumps", "distance": None}


def test_differing_rows_are_shown_as_token_ids_without_the_tokenizer(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        folder = fake_run(tmp_path / name, [1.0], model={"tokenizer_path": str(tmp_path / "gone")})
        StepFingerprints({}, np.full((1, 2, 4), number, dtype=np.int32)).save(folder / "fingerprints/step-1")
    code, report = compare(tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "from token 0 on '[0, 0, 0, 0]' in A, '[1, 1, 1, 1]' in B" in report["computed"]["lines"][0]


def test_config_differences_are_sorted_by_what_they_change(tmp_path: Path) -> None:
    a = fake_run(tmp_path / "a", [1.0])
    b = fake_run(
        tmp_path / "b", [1.0], optimizer={"lr": 1.0}, compile={"enable": True}, comparison={"fingerprint_steps": ()}
    )
    code, report = compare(a, b)
    assert code == 1
    assert report["config"]["match"] is False
    assert report["config"]["lines"] == [
        "changes the run: optimizer.lr = 0.003 in A, 1.0 in B",
        "changes only its speed: compile.enable = False in A, True in B",
    ]
    assert report["computed"]["match"] is None


def staged(folder: Path, losses: list[float | None], stages: str) -> Path:
    text = f"[optimizer]\nlr = 1e-2\n[training]\nlocal_batch_size = 1\n{stages}"
    configs = resolve_stages(from_text(text, ""), lambda own: (resolve_layout(own, TINY, 1)[0], TINY))
    fake_run(folder, losses)
    (folder / "config.toml").write_text(to_toml(configs[-1]))
    return folder


def test_stages_are_compared_one_by_one_and_their_borders_are_marked(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one, two = '[[stages]]\nname = "main"\nsteps = 3\n', '[[stages]]\nname = "long"\nsteps = 5\n[stages.data]\n'
    a = staged(tmp_path / "a", [1.0] * 8, one + two)
    same = staged(tmp_path / "same", [1.0] * 8, one + two)
    assert compare(a, same)[1]["config"]["lines"] == ["options are the same"]
    # The config of the last stage, which is in config.toml, does not show a difference in the first.
    b = staged(tmp_path / "b", [1.0] * 2 + [1.5] + [2.0] * 5, one + "[stages.training]\nz_loss_weight = 0.1\n" + two)
    code, report = compare(a, b)
    assert code == 1
    assert report["config"]["lines"] == ["changes the run: training.z_loss_weight = 0.0 in A, 0.1 in B (stage 'main')"]
    assert report["logged"]["lines"][0].startswith("loss jumps: the config explains it, or a fault. Step 3 (stage 'mai")
    assert report["logged"]["found"][0]["stage"] == "main"
    plot_losses([open_run(a), open_run(b)], str(tmp_path / "curves.svg"))
    drawn = (tmp_path / "curves.svg").read_text()
    assert "<!--  main -->" in drawn
    assert "<!--  long -->" in drawn
    above, below = plot_losses([open_run(a), open_run(same)], str(tmp_path / "curves.png")).axes
    assert below.lines[0].get_ydata().tolist() == [0.0] * 8
    labels = {tick: label.get_text() for tick, label in zip(below.get_yticks(), below.get_yticklabels(), strict=True)}
    assert labels[0.0] == "identical"
    assert above.lines[0].get_linewidth() > 2 * above.lines[-1].get_linewidth()  # both are seen
    c = staged(tmp_path / "c", [1.0] * 9, one.replace("3", "4") + two)
    assert compare(a, c)[1]["config"]["lines"] == [
        "changes the run: lr_scheduler.total_steps = 8 in A, 9 in B; steps = 3 in A, 4 in B (stage 'main')"
    ]


def test_global_batch_size_that_depends_on_the_ranks_changes_the_run(tmp_path: Path) -> None:
    """A run's config.toml has the resolved number."""
    folders = []
    for ranks in (1, 2):
        config, _ = resolve_layout(config_of(), TINY, ranks)
        folders.append(fake_run(tmp_path / str(ranks), [1.0], training=asdict(config.training)))
    code, report = compare(*folders)
    assert code == 1
    size = config_of().training.local_batch_size
    assert report["config"]["lines"][0] == (
        f"changes the run: training.global_batch_size = {size} in A, {2 * size} in B"
    )


def test_invalid_arguments_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = [str(fake_run(tmp_path / name, [])) for name in "ab"]
    for arguments, message in (
        ([str(tmp_path), str(tmp_path / "none")], "it has no config.toml"),
        ([str(tmp_path / "none"), str(tmp_path)], "none is not the folder of a run"),
        ([str(tmp_path)], "compare needs one of RUN_B and --against"),
        ([str(tmp_path), "--against", str(tmp_path), "--picture", "x.png"], "--picture needs RUN_B"),
        ([*empty, "--picture", str(tmp_path)], "must end with .png"),
        ([*empty, "--picture", str(tmp_path / "a/config.toml/x.png")], "cannot be used: "),
        (empty, "there is nothing to compare yet"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(empty) == 2
    assert "compare runs in one process, and WORLD_SIZE = 2: start it without torchrun" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"fingerprint_steps needs compile.enable = false"):
        config_of(compile={"enable": True}, comparison={"fingerprint_steps": (1,)})


def test_checkpoints_are_compared_and_damage_is_reported(saved_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    a = saved_run
    b = run(tmp_path / "b", *SAVING, "--parallelism.tensor_parallel_degree", "2", ranks=2)
    result = run_command("torchtrain.compare", str(a), str(b), "--picture", str(tmp_path / "curves.png"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "  step 3: match, " in result.stdout
    assert re.search(r"\nmatch to within rounding: 3 logged steps and [0-9]+ tensors\n$", result.stdout), result.stdout
    assert not result.stderr
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

    other = run(tmp_path / "other", *SAVING, "--optimizer.lr", "1e-3", "--training.steps", "1")
    code, report = compare(a, other)
    assert code == 1
    assert report["saved"]["lines"][0] == "step 1: 21 tensors differ"
    assert report["saved"]["lines"][1].startswith("  tok_embeddings.weight: ")
    assert report["saved"]["found"][0]["tensors"][0] == "tok_embeddings.weight"
    assert report["computed"]["lines"][0].startswith("step 1, tok_embeddings.weight update: in B 3.333 times")

    file = next((b / "checkpoint/step-3").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    (b / "fingerprints/step-1" / FILE).write_bytes(b"damaged")
    (b / "fingerprints/step-2" / FILE).unlink()
    code, report = compare(a, b)
    assert "step 3: " in report["saved"]["lines"][0]
    assert "its manifest says" in report["saved"]["lines"][0]
    assert report["saved"]["lines"][1].startswith("step 2: match")
    first, second, third = report["computed"]["lines"]
    assert first.startswith(f"step 1: {b / 'fingerprints/step-1' / FILE} is missing or damaged (")
    assert second.startswith(f"step 2: {b / 'fingerprints/step-2' / FILE} is missing or damaged (")
    assert third.startswith("step 3: ")
    assert code == 0


def test_non_finite_values_in_both_runs_are_equal() -> None:
    def distance_of(first: list[float], second: list[float]) -> float:
        return distance(*(Fingerprint("float32", [4], "", np.array(numbers)) for numbers in (first, second)))

    nan, inf = math.nan, math.inf
    for figures in ([nan, nan, nan], [inf, inf, inf], [nan, inf, inf]):
        for last in (nan, inf, 4.0):
            assert distance_of([*figures, 1.0, 2.0, last], [*figures, 1.0 + 1e-7, 2.0, last]) < 1e-6
            assert distance_of([*figures, 1.0, 2.0, last], [*figures, 1.5, 2.0, last]) > 0.05
    assert distance_of([1.0, 1.0, 1.0, 1.0], [nan, nan, nan, 1.0]) == inf
    assert distance_of([3.0, 3.0, 2.0, 1.0, 2.0], [nan, nan, nan, 1.0, nan]) == inf


@pytest.mark.parametrize(
    ("first", "second", "note"),
    [
        ([-1.0, 9.0, 4.0, 0.0, 2.0], [-3.0, 27.0, 12.0, 0.0, 6.0], "in B 3 times its value in A"),
        ([-1.0, 9.0, 4.0, 1.0, 2.0], [0.5, 4.5, 2.0, -0.5, -1.0], "in B -0.5 times its value in A"),
        ([1.0, 9.0, 4.0, 0.0, 0.0], [2.0, 18.0, 8.0, 0.0, 0.0], "in B 2 times its value in A"),  # no sample
        ([1.0, 9.0, 4.0, 2.0, 2.0], [2.0, 14.0, 8.0, 4.0, 4.0], ""),  # other elements than the samples are not doubled
        ([1.0, 9.0, 4.0, 2.0, 2.0], [2.0, 18.0, 8.0, 4.0, 4.01], ""),
        ([1.0, 9.0, 4.0, 2.0, 2.0], [math.nan, math.nan, math.nan, math.nan, 4.0], ""),
        ([0.0, 0.0, 0.0, 0.0, 0.0], [2.0, 18.0, 8.0, 4.0, 4.0], ""),
    ],
)
def test_multiple_of_a_tensor_is_named(first: list[float], second: list[float], note: str) -> None:
    """Also of embeddings, where the batch may contain the token of one sampled row or of none."""
    assert multiple_note(*(Fingerprint("float32", [4], "", np.array(n)) for n in (first, second))) == note


@pytest.mark.parametrize("differ", [False, True])
def test_replicas_that_differ_are_named_with_their_distance(differ: bool) -> None:
    """Parts of a tensor on four ranks, of which 1 and 3 have the same rows."""
    numbers = {0: [4.0, 4.0, 3.0, 1.0, 0.0], 1: [5.0, 5.0, 4.0, 0.0, 2.0]}
    parts = {
        rank: ([[(2 * (rank % 2), 2 * (rank % 2) + 2)]], Fingerprint("float32", [4], "", np.array(numbers[rank % 2])))
        for rank in range(4)
    }
    if differ:  # a sampled value of 2 by a quarter: root mean squares of 0.5 and of 2.5
        other = parts[1][1]._replace(numbers=np.array([5.0, 5.0, 4.0, 0.0, 2.5]))
        parts[3] = parts[3][0], other
    found = assemble(parts)
    assert found.note == ("ranks 1 and 3 have replicas that differ by 2.0e-01" if differ else "")
    assert found.numbers.tolist() == [9.0, 9.0, 4.0, 1.0, 2.0]  # each row once
    for by, is_reported in ((9e-6, False), (1.1e-5, True)):
        rounded = parts[1][1]._replace(numbers=parts[1][1].numbers * (1 + by))
        assert (assemble({**parts, 3: (parts[3][0], rounded)}).note != "") is is_reported


def test_tolerance_of_two_dtypes_is_that_of_the_coarser() -> None:
    def step(dtype: str, difference: float) -> StepFingerprints:
        names = {"x output": 0.0, "y output": difference}
        tensors = {
            name: Fingerprint(dtype, [2], "", np.array([2.0, 2.0, 1.0, 1.0 + by, 1.0 + by]))
            for name, by in names.items()
        }
        return StepFingerprints(tensors, np.zeros((1, 2, 1), np.int32))

    allowed = 4 * 2**-7  # of bfloat16
    for dtypes in itertools.permutations(("float32", "bfloat16")):
        one, other = (step(dtype, by) for dtype, by in zip(dtypes, (0.0, 0.95 * allowed), strict=True))
        assert first_difference(one, other, 1)[0] is None
        one, other = (step(dtype, by) for dtype, by in zip(dtypes, (0.0, 1.1 * allowed), strict=True))
        finding, before = first_difference(one, other, 1)
        assert finding is not None
        assert (finding.key, finding.dtype, finding.allowed, before) == ("y output", "bfloat16", allowed, 0.0)
        assert str(finding).endswith("while all tensors before it agree to 0.0e+00 (bfloat16 allows 3.1e-02)")
    finding, _ = first_difference(step("float32", 0.0), step("float32", 0.95 * allowed), 1)
    assert finding is not None
    assert (finding.dtype, finding.allowed) == ("float32", 1e-5)


@pytest.mark.parametrize(
    ("answers", "text", "match"),
    [
        ({"logged": (True, 12, 0, True)}, "match bitwise: 12 logged steps", True),
        ({"logged": (True, 12, 0, False)}, "match to within rounding: 12 logged steps", True),
        (
            {"logged": (True, 3, 0, True), "saved": (True, 1, 21, True)},
            "match bitwise: 3 logged steps and 21 tensors",
            True,
        ),
        (
            {"logged": (True, 3, 0, True), "saved": (True, 1, 21, False)},
            "match to within rounding: 3 logged steps and 21 tensors",
            True,
        ),
        ({"saved": (True, 1, 21, True), "computed": (True, 2, 50, True)}, "match bitwise: 71 tensors", True),
        ({"logged": (None, 0, 0, False), "saved": (True, 1, 21, True)}, "match bitwise: 21 tensors", True),
        ({"logged": (True, 12, 0, True), "saved": (False, 1, 21, False)}, "they differ", False),
        ({"config": (False, 0, 0, False), "logged": (True, 12, 0, True)}, "they differ", False),
        (
            {"logged": (True, 9, 0, True)},
            "no difference in 9 logged steps, which proves nothing: compare saved steps, fingerprints "
            "(--comparison.fingerprint_steps 1 2), or at least 10 logged steps (--metrics.log_freq 1)",
            None,
        ),
    ],
)
def test_last_line_says_what_was_compared(
    answers: dict[str, tuple[bool | None, int, int, bool]], text: str, match: bool | None
) -> None:
    keys = ("match", "steps", "tensors", "bitwise")
    assert verdict({title: dict(zip(keys, answer, strict=True)) for title, answer in answers.items()}) == (text, match)


def test_summary_counts_what_matches() -> None:
    same = Finding("a", True, steps=3, tensors=5, is_bitwise=True)
    close = Finding("b", True, steps=7, tensors=2)
    bad = Finding("c", False, {"step": 1}, steps=100, tensors=100)
    for findings, expected in (
        ([same, close], (True, 7, 7, False)),
        ([same, Finding("c")], (True, 3, 5, True)),
        ([same, bad], (False, 3, 5, True)),
        ([Finding("c")], (None, 0, 0, False)),
    ):
        found = summarize(findings)
        assert (found["match"], found["steps"], found["tensors"], found["bitwise"]) == expected
    assert summarize([same, bad])["found"] == [{"step": 1}]


def test_saved_weights_may_differ_by_the_rounding_of_all_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the mean rate, the size of AdamW's update and the number of steps, and by the precision of the weight."""
    config = config_of(
        optimizer={"lr": 1e-2, "beta2": 0.999, "eps": 1e-3, "embedding": ParameterGroupConfig(lr_factor=3.0)},
        lr_scheduler={"warmup_steps": 2, "decay_type": "linear"},
    )
    step, name = 8, "tok_embeddings.weight"
    rates = [1e-2 * min(number / 2, (11 - number) / 8) for number in range(1, step + 1)]
    shape = (100, 32)
    mean, square = 0.02 / (1 - 0.9**step), 0.0009 / (1 - 0.999**step)
    update = sum(rates) / step * 3 * mean / (math.sqrt(square) + 1e-3)
    rounding = math.sqrt(2**-23)
    allowed = rounding * step * update + 1e-6 * 5

    class Reader:
        def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
            self.tensors = tensors

        def read_metadata(self) -> Any:
            entries = {
                key: SimpleNamespace(size=tensor.shape, properties=SimpleNamespace(dtype=tensor.dtype))
                for key, tensor in self.tensors.items()
            }
            return SimpleNamespace(state_dict_metadata=entries)

    def load(targets: dict[str, torch.Tensor], reader: Reader) -> None:
        for key, target in targets.items():
            target.copy_(reader.tensors[key])

    monkeypatch.setattr(runs, "VerifiedReader", Reader)
    monkeypatch.setattr(runs, "load_tensors", load)
    monkeypatch.setattr(runs, "parameter_shapes", lambda _: [name])

    def compared(apart: float, moments_apart: float = 0.0) -> tuple[str, str, bool]:
        """The finding about two checkpoints whose weights, or relative moments, are so far apart."""
        saved: Any = [
            {
                f"model.{name}": torch.full(shape, 5 + by * apart, dtype=torch.float64),
                f"optimizer.{name}.exp_avg": torch.full(shape, 0.02 * (1 + by * moments_apart)),
                f"optimizer.{name}.exp_avg_sq": torch.full(shape, 0.0009),
            }
            for by in (0, 1)
        ]
        [finding] = runs.saved_differences(RunFolder(Path(), config, {}, {}), saved, step)
        return finding

    for factor in (0.95, 1.05):
        apart = factor * allowed
        text = f"{apart:.1e} apart, its mean update is {update:.1e}; moments 0.0e+00 and 0.0e+00 of their size"
        assert compared(apart) == (name, text, factor < 1)
        assert compared(0.0, factor * 4 * rounding)[2] is (factor < 1)


@pytest.mark.slow
def test_weights_at_the_end_of_the_decay_are_within_rounding(tmp_path: Path) -> None:
    """The learning rate is 0 there, so that the difference is that of all earlier updates."""
    options = ("--checkpoint.enable", "--optimizer.lr", "1e-2", "--lr_scheduler.total_steps", "3")
    options += ("--lr_scheduler.warmup_steps", "1")
    a = run(tmp_path / "a", *options)
    code, report = compare(a, run(tmp_path / "b", *options, "--training.local_batch_size", "4"))
    assert code == 0, report
    assert report["saved"]["lines"] == ["step 3: match, 21 tensors to within rounding, the others bitwise"]


def test_incomplete_fingerprint_file_is_damaged(gloo: GlooPool, tmp_path: Path) -> None:
    gloo.run(1, train_with_fingerprints, tmp_path, LAYOUTS["1"][1], "float32", 1)
    folder = tmp_path / "fingerprints/step-1"
    step = read(folder)
    assert len(step.tensors) > 50
    assert first_difference(step, step, 1) == (None, 0.0)
    arrays = load_file(folder / FILE)
    with safe_open(folder / FILE, "pt") as file:
        about = json.loads(file.metadata()["about"])
    lacking = [({key: x for key, x in arrays.items() if key != name}, about) for name in ("rows", "norm output")]
    lacking += [(arrays, {**about, "norm output": ["float32"]})]
    for tensors, metadata in lacking:
        save_file(tensors, folder / FILE, {"about": json.dumps(metadata)})
        with pytest.raises(TorchtrainError, match=r"is missing or damaged \("):
            read(folder)
    save_file(arrays, folder / FILE)
    with pytest.raises(TorchtrainError, match=r"is missing or damaged \("):
        read(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text(to_toml(config_of()))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    return tmp_path


def test_invalid_lines_of_metrics_are_skipped(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": "low"}\n{"step": 3, "lr": []}\n[4]\n5\n{"step": 6, "loss": null}\n{"ste')
    run = open_run(folder)
    assert run.lines == {1: {"step": 1, "loss": 2.0}, 6: {"step": 6, "loss": None}}


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl"])
def test_unreadable_run_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    read_bytes = Path.read_bytes

    def fail(path: Path) -> bytes:
        if path.name == name:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    monkeypatch.setattr(files.time, "sleep", lambda _: None)
    with pytest.raises(StorageError, match=rf"{name} cannot be read: Input/output error, in 4 attempts"):
        open_run(folder)


def test_comparison_with_transformers_finds_differences(trained_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    checked_command("torchtrain.convert", str(trained_run), str(tmp_path / "rounded"))
    code, report = compare(trained_run, "--against", tmp_path / "rounded")
    assert code == 0, report
    checked_command("torchtrain.convert", str(trained_run), str(tmp_path / "hf"), "--dtype", "float32")
    code, report = compare(trained_run, "--against", tmp_path / "hf")
    assert code == 0, report

    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-6}))
    code, report = compare(trained_run, "--against", tmp_path / "hf")
    assert code == 1
    assert report["computed"]["lines"][1].startswith("step 1, layers.0.attention_norm output: ")

    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    weights = load_file(file)
    for name, x in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            weights[name] = x.view(heads, 2, -1, x.shape[1]).transpose(1, 2).reshape(x.shape)
    save_file(weights, file, {"format": "pt"})
    code, report = compare(trained_run, "--against", tmp_path / "hf")
    assert code == 1
    _, first, second = report["computed"]["lines"]
    assert first.startswith("step 1, layers.0.attention.wq.weight: ")
    assert second.startswith("its rows are in the order of Meta's files")

    for damage in (lambda: os.truncate(file, 1000), file.unlink):
        damage()
        found = run_command("torchtrain.compare", str(trained_run), "--against", str(tmp_path / "hf"))
        assert found.returncode == 2
        assert f"error: {tmp_path}/hf cannot be loaded by transformers: " in found.stderr
        assert "Traceback" not in found.stderr


def test_comparison_with_transformers_of_an_incomplete_batch(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "one.txt").write_text("a document alone, for one row of a batch " * 20)
    options = ("--checkpoint.enable", "--data.path", str(tmp_path / "one.txt"), "--data.when_exhausted", "stop")
    a = run(tmp_path / "a", *options, "--training.local_batch_size", "1", "--training.global_batch_size", "1")
    checked_command("torchtrain.convert", str(a), str(tmp_path / "hf"), "--dtype", "float32")
    found = run_command("torchtrain.compare", str(a), "--against", str(tmp_path / "hf"))
    assert found.returncode == 0, found.stderr
    assert re.search(r"\nmatch to within rounding: [0-9]+ tensors\n$", found.stdout), found.stdout
    assert f"{a}/checkpoint/step-3 and {tmp_path}/hf, on one batch of the data" in found.stdout


def test_bitwise_runs_and_runs_with_too_little_in_common_have_verdicts_of_their_own(
    saved_run: Path, tmp_path: Path
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        shutil.copytree(saved_run, folder)
        shutil.rmtree(folder / "fingerprints")
    result = run_command("torchtrain.compare", str(a), str(b))
    assert result.returncode == 0, result.stderr
    assert re.search(r"\nmatch bitwise: 3 logged steps and [0-9]+ tensors\n$", result.stdout), result.stdout
    shutil.rmtree(b / "checkpoint")
    result = run_command("torchtrain.compare", str(a), str(b), "--json")
    assert result.returncode == 3, result.stderr
    report = json.loads(result.stdout)
    assert report["match"] is None
    assert report["verdict"].startswith("no difference in 3 logged steps, which proves nothing: compare saved steps")


@pytest.mark.slow
def test_muon_and_averaged_weights_are_compared(tmp_path: Path) -> None:
    options = ("--checkpoint.enable", "--optimizer.name", "muon", "--ema.enable")
    a = run(tmp_path / "a", *options)
    code, report = compare(a, run(tmp_path / "b", *options, "--parallelism.tensor_parallel_degree", "2", ranks=2))
    assert code == 0, report
    code, report = compare(a, run(tmp_path / "other", *options, "--optimizer.hidden.lr_factor", "2"))
    assert code == 1
    assert "layers.0.attention.wq.weight" in report["saved"]["found"][0]["tensors"]
    code, report = compare(a, run(tmp_path / "decay", *options, "--ema.decay", "0.1"))
    assert code == 1
    assert "layers.0.attention.wq.weight" in report["saved"]["found"][0]["tensors"]


def test_states_of_any_optimizer_are_compared(saved_run: Path, tmp_path: Path) -> None:
    """Two checkpoints whose only difference is a state that neither AdamW nor Muon has."""
    storage = LocalStorage(f"{saved_run}/checkpoint")
    step = storage.steps()[-1]
    saved = storage.open(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a single process
        found = tensors_of(saved)
    key = "optimizer.layers.0.attention.wq.weight.exp_avg"
    other = key.replace("exp_avg", "trace")
    dist.init_process_group(gloo_backend(), store=dist.HashStore(), rank=0, world_size=1)
    for name, change in (("b", 0.0), ("c", 1.0)):
        shutil.copytree(saved_run, tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoint")
        own = {other if of == key else of: tensor for of, tensor in found.items()}
        own[other] = own[other] + change
        new = LocalNewCheckpoint(tmp_path / name / "checkpoint" / f"step-{step}")
        writer = VerifiedWriter(new, read_config_text(saved), manifest=replace(read_manifest(saved), files=()))
        save_tensors(own, own.__getitem__, writer, new.location)
    dist.destroy_process_group()
    assert compare(tmp_path / "b", tmp_path / "b")[0] == 0
    code, report = compare(tmp_path / "b", tmp_path / "c")
    assert code == 1
    assert report["saved"]["found"][0]["tensors"] == ["layers.0.attention.wq.weight"]


def test_checkpoints_of_a_model_without_flavor_are_compared(tmp_path: Path) -> None:
    shape = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 32}
    options = [word for key, value in shape.items() for word in (f"--model.shape.{key}", str(value))]
    finish(tmp_path, "--model.flavor", "", *options, "--training.steps", "2", ranks=1)
    compared = run_command("torchtrain.compare", str(tmp_path), str(tmp_path))
    assert compared.returncode == 0, compared.stderr
    assert "no flavor" not in compared.stdout
    assert "saved:\n  step 2" in compared.stdout
