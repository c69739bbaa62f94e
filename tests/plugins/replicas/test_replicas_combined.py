"""Replicas that die, with the options and plugins that a run may have beside them."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from data_samples import DOCUMENTS, write_jsonl
from forked_run import different_tensors, read_metrics
from replica_run import CONFIG, Kill, differences, events, kill_and_restart

pytest.importorskip("torchft")

ALL_DONE = {name: [0] for name in "012"}
NUMBERS = ("norm_", "rms_", "max_logits", "source_", "loss_mean", "validation")


def write_config(folder: Path, changes: str) -> Path:
    """The config with other tables after it, or with another batch in it."""
    file = folder / "own.toml"
    file.write_text(
        CONFIG.replace("global_batch_size = 12", changes) if changes.startswith("global") else CONFIG + changes
    )
    return file


def other_numbers(folder: Path) -> dict[tuple[int, str], float]:
    """The numbers of plugins and validations in the metrics, by step and name."""
    return {
        (line["step"], name): value
        for line in read_metrics(folder)
        if "event" not in line
        for name, value in line.items()
        if name.startswith(NUMBERS) and not name.endswith("seconds")
    }


PARTS = {
    "ramp": 'global_batch_size = "6, 12 at 0.5K"',  # the second batch begins with step 7
    "stages": '[[stages]]\nname = "short"\nsteps = 6\n[[stages]]\nname = "long"\ntraining.seq_len = 32\n'
    "training.global_batch_size = 6\n",
}
# The last step before the border, and the first one after it; replica 0 saves.
BORDERS = [(step, place) for place in ("all-reduce", "after the vote") for step in (6, 7)] + [(6, "in a save")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "step", "place"),
    [(parts, *border) for parts in PARTS for border in BORDERS],
)
def test_a_death_at_the_border_of_two_parts(
    parts: str, step: int, place: str, references: Any, started: Any, tmp_path: Path
) -> None:
    config = write_config(tmp_path, PARTS[parts])
    members = 2 if parts == "stages" else 3
    reference, replicas = references(config=config), started(members=members)
    (replicas.folder / "own.toml").write_text(config.read_text())
    codes = kill_and_restart(replicas, ["0" if place == "in a save" else "1"], Kill(step, place))
    assert codes == {name: [0] for name in "012"[:members]}, replicas.output()
    assert differences(replicas.folder, reference) == []


SPIKES = ["--faults.spike_threshold=50", "--faults.spike_window=4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--parallelism.context_parallel_degree=2", *SPIKES],
        [
            "--parallelism.pipeline_parallel_degree=2",
            "--training.local_batch_size=2",
            "--model.shape.tied_embeddings=True",
            *SPIKES,
        ],
    ],
    ids=["context", "pipeline with tied embeddings"],
)
def test_a_death_on_other_layouts(options: list[str], references: Any, started: Any) -> None:
    reference = references(*options, ranks=2)
    replicas = started(*options, ranks=2)
    codes = kill_and_restart(replicas, ["0"], Kill(5, "all-reduce", rank=1))
    assert codes == {name: [0, 0] for name in "012"}, replicas.output()
    assert differences(replicas.folder, reference) == []


@dataclass
class BadBatch(Kill):
    """Makes the gradient of the batch with this number NaN, the first time that it is computed or in a repetition."""

    batch: int = 8

    def install(self) -> None:
        super().install()
        spoil_batch(self.batch)


def spoil_batch(number: int) -> None:
    """Patch this process: the gradient of this batch of the run, counted from 1, is NaN."""
    from torchtrain.config.registry import HOOKS
    from torchtrain.distributed.mesh import local
    from torchtrain.metrics.hooks import Hook

    @HOOKS.register("spoil")
    def spoil(trainer: Any) -> Hook:
        class Spoil(Hook):
            def after_gradients(self) -> None:
                if trainer.dataloader.state_dict()["rows"][0, 0] == number:
                    local(next(trainer.model.model_parts[0].parameters()).grad).fill_(math.nan)

        return Spoil()


def bad_batch() -> None:
    spoil_batch(8)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_death_in_the_rollback(victim: str, references: Any, started: Any) -> None:
    """After step 8 all go back to that of step 5; one dies in the bad step, or after it."""
    options = ["--faults.on_nonfinite=rollback", "--faults.max_bad_steps=3", "--checkpoint.async_mode=disabled"]
    reference = references(*options, hook=bad_batch)
    assert [line["step"] for line in read_metrics(reference.folder) if line.get("event") == "rolled_back"] == [5]
    for place in ("all-reduce", "after the update"):
        replicas = started(*options)
        for name in "012":
            replicas.start(name, BadBatch(8, place) if name == victim else BadBatch())
        replicas.wait_for_death(victim)
        replicas.start(victim, BadBatch())
        assert replicas.wait() == ALL_DONE, replicas.output()
        found = differences(replicas.folder, reference)
        assert not [line for line in found if "in the run's metrics" not in line], found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_numbers_of_plugins_are_those_of_the_whole_batch(
    ranks: int, references: Any, started: Any, tmp_path: Path
) -> None:
    texts = [write_jsonl(tmp_path / f"{number}.jsonl", DOCUMENTS[number::2]) for number in (0, 1)]
    sources = "".join(f'[[data.sources]]\npath = "{path}"\nname = "n{i}"\n' for i, path in enumerate(texts))
    config = write_config(tmp_path, sources.replace("name = ", "label = "))
    options = ["--diagnostics.enable_loss_by_source", "--diagnostics.norms_freq=2", "--checkpoint.keep_best_k=1"]
    options += ["--checkpoint.keep_latest_k=2", "--checkpoint.interval=3", "--validation.enable"]
    options += ["--validation.type=standard_library_docs", "--validation.interval=3", "--validation.steps=1"]
    reference = references(*options, ranks=ranks, config=config)
    replicas = started(*options, ranks=ranks)
    (replicas.folder / "own.toml").write_text(config.read_text())
    codes = kill_and_restart(replicas, ["1"], Kill(6, "after the vote"))
    assert codes == {name: [0] * ranks for name in "012"}, replicas.output()
    assert differences(replicas.folder, reference) == []
    expected, found = other_numbers(reference.folder), other_numbers(replicas.folder)
    assert found.keys() == expected.keys() != set()
    assert found == pytest.approx(expected, rel=1e-5)  # attention logits are added in another order
    exact = [key for key in expected if key[1].startswith(("norm_", "source_", "loss_mean", "validation_loss"))]
    assert [key for key in exact if found[key] != expected[key]] == []
    kept = [{path.name for path in (of.folder / "checkpoint").glob("step-*")} for of in (replicas, reference)]
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_a_death_in_the_export(references: Any, started: Any) -> None:
    from safetensors.torch import load_file

    options = ["--huggingface.export"]
    reference = references(*options)
    replicas = started(*options)
    replicas.start("0", KillInExport(1, "in an export"))
    replicas.start("1")
    replicas.start("2")
    replicas.wait_for_death("0")
    replicas.start("0")
    assert replicas.wait() == ALL_DONE, replicas.output()
    assert differences(replicas.folder, reference) == []
    exported = [sorted((of.folder / "hf").glob("*.safetensors")) for of in (replicas, reference)]
    assert [path.name for path in exported[0]] == [path.name for path in exported[1]] != []
    for ours, theirs in zip(*exported, strict=True):
        assert different_tensors(load_file(ours), load_file(theirs)) == []


@dataclass
class KillInExport(Kill):
    """Dies when it begins to write the export."""

    def install(self) -> None:
        super().install()
        import torchtrain.plugins.huggingface.export as export

        def dying(*_: Any, **__: Any) -> None:
            self.now("in an export", self.step)

        export.save_hf = dying  # type: ignore[assignment]


@pytest.mark.slow
def test_fast_sums_if_they_are_allowed(references: Any, started: Any) -> None:
    options = ["--training.sums=fast"]
    reference = references(*options)
    replicas = started(*options, "--replicas.allow_fast_sums", "--recheck.interval=1")
    assert kill_and_restart(replicas, ["1"], Kill(6, "all-reduce")) == ALL_DONE, replicas.output()
    assert "the bits of the run depend on which replicas live" in replicas.output()
    assert "wrong_replica" not in events(replicas.folder)  # all have the same bits
    curve = {line["step"]: line["loss"] for line in read_metrics(replicas.folder) if "loss" in line}
    expected = {line["step"]: line["loss"] for line in read_metrics(reference.folder) if "loss" in line}
    assert curve == pytest.approx(expected, rel=1e-4)


@dataclass
class Flip(Kill):
    """Flips a bit in step 5, in a weight or in the gradient that rank 1 computes."""

    of: str = "weight"

    def install(self) -> None:
        super().install()
        from recheck_faults import flip

        from torchtrain.config.registry import HOOKS
        from torchtrain.distributed.mesh import local
        from torchtrain.metrics.hooks import Hook

        def flip_weight(trainer: Any) -> Hook:
            class FlipWeight(Hook):
                def after_update(self) -> None:
                    if trainer.step == 4:  # completing step 5
                        flip(local(next(trainer.model.model_parts[0].parameters())), 3, 20)

            return FlipWeight()

        def flip_gradient(trainer: Any) -> Hook:
            def flipped(_: Any, __: Any, output: Any) -> None:
                if trainer.step == 4 and os.environ["RANK"] == "1":
                    flip(output.data, 3, 20)

            trainer.model.model_parts[0].layers["1"].feed_forward.w2.register_forward_hook(flipped)
            return Hook()

        HOOKS.add("flip", flip_weight if self.of == "weight" else flip_gradient)


@pytest.mark.slow
@pytest.mark.parametrize(("of", "ranks"), [("weight", 1), ("weight", 2), ("gradient", 3)])
def test_a_replica_that_computes_wrong_leaves(of: str, ranks: int, references: Any, started: Any) -> None:
    """It is named, the step is repeated without it, and the run has the right bits."""
    reference = references("--training.global_batch_size=12", ranks=ranks)
    replicas = started("--recheck.interval=1", "--recheck.on_wrong_rank=stop", ranks=ranks)
    for name in "012":
        replicas.start(name, Flip(of=of) if name == "1" else None)
    replicas.wait_for_death("1")
    assert set(replicas.codes("1")) == {70}, replicas.output()
    message = replicas.log("1").read_text()
    assert ("1 has another state than most replicas" if of == "weight" else "rank 1 on ") in message
    replicas.start("1")
    assert replicas.wait() == {name: [0] * ranks for name in "012"}, replicas.output()
    assert differences(replicas.folder, reference) == []


@dataclass
class KillInValidation(Kill):
    def install(self) -> None:
        super().install()
        from torchtrain.trainer import Trainer

        run_validation = Trainer.run_validation

        def dying(trainer: Trainer, last: bool) -> None:
            self.now("in a validation", trainer.step)
            run_validation(trainer, last)

        Trainer.run_validation = dying  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "1"])
@pytest.mark.parametrize("step", [6, 12])
def test_a_death_in_a_validation(step: int, victim: str, references: Any, started: Any) -> None:
    """Also in the last one: the replica that leads records it."""
    options = ["--validation.enable", "--validation.type=standard_library_docs", "--validation.interval=3"]
    options += ["--validation.steps=1"]
    reference = references(*options)
    replicas = started(*options)
    codes = kill_and_restart(replicas, [victim], KillInValidation(step, "in a validation"))
    assert codes == ALL_DONE, replicas.output()
    assert differences(replicas.folder, reference) == []
    assert other_numbers(replicas.folder) == other_numbers(reference.folder)


@dataclass
class OtherView(Kill):
    """Takes the rows of another replica in step 5, as if it saw other members."""

    def install(self) -> None:
        super().install()
        from torchtrain.plugins.replicas.group import ReplicaGroup

        begin = ReplicaGroup.begin
        has_erred = False

        def beginning(group: ReplicaGroup, *arguments: Any) -> bool:
            nonlocal has_erred
            is_complete = begin(group, *arguments)
            if group.step == 4 and not has_erred:
                group.number, has_erred = (group.number + 1) % group.size, True
            return is_complete

        ReplicaGroup.begin = beginning  # type: ignore[method-assign]


@pytest.mark.slow
def test_two_views_of_the_members_never_make_a_wrong_sum(references: Any, started: Any) -> None:
    reference, replicas = references(), started()
    for name in "012":
        replicas.start(name, OtherView() if name == "1" else None)
    assert replicas.wait() == ALL_DONE, replicas.output()
    assert replicas.output().count("a row of the global batch is computed by no replica, or by several") == 3
    assert differences(replicas.folder, reference) == []
