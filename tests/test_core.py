"""The core trains without the plugins, the same bits; and a package from outside adds to it as a plugin does."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
from draw_architecture import FILES, ROOT, imports_of
from forked_command import checked_command, run_command
from forked_run import CONFIG, saved_tensors
from forkserver import free_port

from torchtrain.checkpoint.resume_compatibility import (
    Kind,
    check_resume_compatibility,
    differences,
    hash_of_changes,
)
from torchtrain.checkpoint.weights import checkpoint_folders
from torchtrain.config.parse import from_text, parse, to_toml
from torchtrain.config.registry import CONFIG_SECTIONS
from torchtrain.config.section import Count, Section
from torchtrain.datasets.tokenizers import tokenizer_file
from torchtrain.errors import CheckpointError, ConfigError

PACKAGE = ROOT / "torchtrain"
PLUGINS = PACKAGE / "plugins"
SMALL = [
    *("--model.shape.dim=32", "--model.shape.n_layers=2", "--model.shape.n_heads=4", "--model.shape.n_kv_heads=2"),
    "--model.shape.ffn_dim=64",
]
TINY = [*SMALL, "--training.steps=2", "--lr_scheduler.total_steps=2"]
RESUMED = [["--training.steps=1"], []]
# By name the number of ranks, and the options of the commands that train one folder, one after the other.
LAYOUTS = {
    "resumed": (1, RESUMED),
    "tensor": (2, [["--parallelism.tensor_parallel_degree=2"]]),
    "one": (1, [[]]),
    "shards": (2, [[]]),
    "pipeline": (2, [["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=2"]]),
}
# An editable installation would find the plugins of the repository for a copy of the package that has none.
NO_EDITABLE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
"""
# Trains several times in one process: arguments are JSON, the variables of the rank and the options of each run.
TRAIN = f"""{NO_EDITABLE}
import json, os
import torch
torch.set_num_threads(1)
from torchtrain.train import main
for variables, options in json.loads(sys.argv[1]):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    code = main(options)
    if code:
        sys.exit(code)
"""


def runs_in(work: Path, text: str, names: Sequence[str]) -> list[tuple[int, list[str]]]:
    """The number of ranks and the options of each run of the layouts ``names`` with the config ``text``, with outputs
    in ``work``."""
    config = work / "config.toml"
    work.mkdir()
    config.write_text(text, encoding="utf-8")
    return [
        (LAYOUTS[name][0], [f"--job.config_file={config}", f"--job.dump_folder={work / name}", *TINY, *options])
        for name in names
        for options in LAYOUTS[name][1]
    ]


def train_without_plugins(source: Path, work: Path, names: Sequence[str]) -> None:
    """Train with the package in the folder ``source``, in a new interpreter for each rank."""
    commands: list[list[tuple[dict[str, str], list[str]]]] = [
        [] for _ in range(max(LAYOUTS[name][0] for name in names))
    ]
    for ranks, options in runs_in(work, CONFIG.replace("[report]\nenable = false\n", ""), names):
        port = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
            commands[rank].append((port | own, options))
    processes = []
    for rank, of_rank in enumerate(commands):
        log = (work / f"{rank}.log").open("w")
        command = [sys.executable, "-c", TRAIN, json.dumps(of_rank)]
        environment = {**os.environ, "PYTHONPATH": str(source)}
        processes.append(subprocess.Popen(command, cwd=work, env=environment, stdout=log, stderr=log))
        log.close()
    codes = [process.wait() for process in processes]
    assert codes == [0] * len(commands), (work / "0.log").read_text()


def logged(folder: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["lr"]) for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package without its plugins."""
    folder = tmp_path_factory.mktemp("core")
    # With the bytecode of the sources, which an interpreter would compile again.
    shutil.copytree(PACKAGE, folder / "torchtrain", ignore=shutil.ignore_patterns("plugins"))
    return folder


@pytest.mark.parametrize(
    "names",
    [["resumed"], pytest.param(["tensor", "one", "shards", "pipeline"], marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_core_without_plugins_trains_the_same_bits(core: Path, names: list[str], tmp_path: Path) -> None:
    train_without_plugins(core, tmp_path / "without", names)
    for ranks, options in runs_in(tmp_path / "with", CONFIG, names):
        checked_command("torchtrain.train", *options, ranks=ranks)
    for name in names:
        ours, theirs = tmp_path / "without" / name, tmp_path / "with" / name
        assert len(logged(ours)) == 2
        assert logged(ours) == logged(theirs)
        tensors, expected = saved_tensors(ours, 2), saved_tensors(theirs, 2)
        assert tensors.keys() == expected.keys()
        assert [key for key in tensors if not (tensors[key] == expected[key]).all()] == []


def test_core_tokenizes_and_trains_local_data_and_names_a_missing_plugin(core: Path, tmp_path: Path) -> None:
    (tmp_path / "stages.toml").write_text('[[stages]]\nname = "a"\nsteps = 1\n')
    text, tokens, weights = tmp_path / "text.txt", tmp_path / "tokens", tmp_path / "weights"
    text.write_text("Some words to train on. " * 400)
    weights.mkdir()
    for name in ("config.json", "model.safetensors"):
        (weights / name).write_text("{}")

    training = [*SMALL, "--training.steps=1", "--training.seq_len=16", "--training.local_batch_size=1"]
    of_text, of_tokens = f"--data.path={text}", f"--data.path={tokens}"
    succeed = [
        ("prepare", [of_text, f"--prepare.output={tokens}"]),
        *(("train", [*training, path, "--checkpoint.no-enable"]) for path in (of_text, of_tokens)),
    ]
    needs, remote = "needs the plugin torchtrain.plugins.", "remote_data, which is not installed"
    reading = f"= 's3://bucket/file': its scheme = 's3' {needs}object_storage, which is not installed"
    fail = [
        ("prepare", [of_text, "--prepare.output=s3://bucket/tokens"], f"{needs}{remote}"),
        ("prepare", ["--data.path=s3://a/b", f"--prepare.output={tokens}"], f"{needs}{remote}"),
        ("train", ["--data.path=s3://bucket/text"], f"{needs}{remote}"),
        ("train", [f"--checkpoint.initial_load_path={weights}"], f"{needs}huggingface, which is not installed"),
        ("train", ["--model.tokenizer_path=s3://bucket/file"], f"model.tokenizer_path {reading}"),
        ("train", ["--job.config_file=s3://bucket/file"], f"job.config_file {reading}"),
        ("train", ["--optimizer.name=muon"], f"optimizer.name = 'muon' {needs}muon, which is not installed"),
        ("train", ["--checkpoint.folder=s3://bucket/run"], f"{needs}object_storage, which is not installed"),
        ("train", ["--diagnostics.norms_freq=2"], f"diagnostics.norms_freq {needs}diagnostics, which is not installed"),
        ("train", ["--training.global_batch_size=4, 8 at 1K"], f"{needs}stages, which is not installed"),
        ("train", [f"--job.config_file={tmp_path / 'stages.toml'}"], f"{needs}stages, which is not installed"),
        ("estimate", [], "this command is of the plugin torchtrain.plugins.planner, which is not installed"),
    ]
    calls = [(*call, 0) for call in succeed] + [(command, options, 2) for command, options, _ in fail]
    code = f"""{NO_EDITABLE}
from importlib import import_module
for command, options, code in {calls}:
    assert import_module("torchtrain." + command).main([*options, "--job.dump_folder={tmp_path / "run"}"]) == code
"""
    environment = {**os.environ, "PYTHONPATH": str(core)}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert result.returncode == 0, result.stderr
    errors = [line for line in result.stderr.splitlines() if "error: " in line]
    assert len(errors) == len(fail)
    for error, (*_, message) in zip(errors, fail, strict=True):
        assert message in error


def plugin_of(module: str) -> str | None:
    parts = module.split(".")
    return ".".join(parts[:3]) if parts[:2] == ["torchtrain", "plugins"] and len(parts) > 2 else None


def test_readme_states_the_size_of_the_core() -> None:
    core = [path for path in FILES if PLUGINS not in path.parents]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in core)
    stated = re.search(r"core of about ([\d,]+) lines in\s+(\d+) files", (ROOT / "README.md").read_text("utf-8"))
    assert stated is not None
    assert abs(int(stated[1].replace(",", "")) - lines) < 0.01 * lines
    assert int(stated[2]) == len(core)


def test_core_imports_no_plugin_and_plugins_declare_what_they_import() -> None:
    for path in FILES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        own = plugin_of(module)
        others = {plugin for imported in imports_of(path) if (plugin := plugin_of(imported))} - {own}
        if own is None:
            assert not others, f"{module} is of the core, and imports {others}"
            continue
        declared = getattr(importlib.import_module(own), "REQUIRES", ())
        assert others <= set(declared), f"{module} imports {others}: add it to REQUIRES of {own}"


MODULE = """
import codecs
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
import torch
from torchtrain.checkpoint.local_storage import LocalStorage
from torchtrain.config import registry
from torchtrain.config.run_plan import RunPlan
from torchtrain.config.schema import section_of
from torchtrain.config.section import Count, Section
from torchtrain.config.urls import URLReader
from torchtrain.checkpoint.other_formats import WeightFormat
from torchtrain.datasets.builtin_sources import Files
from torchtrain.datasets.data_identity import Identity
from torchtrain.datasets.file_formats import FileFormat
from torchtrain.datasets.text_input import TextDocuments
from torchtrain.distributed.gradient_reducer import GradientReducer
from torchtrain.distributed.mesh import local
from torchtrain.metrics.hooks import Hook
from torchtrain.metrics.writers import MetricsWriter
from torchtrain.models.llama.families import LLAMA3
from torchtrain.models.loss import OutputLoss
from torchtrain.optimizers.base import ShardedOptimizer
from torchtrain.optimizers.lr_schedule import Decay
from torchtrain.parallelisms.linear_conversion import LinearConversion
from torchtrain.parallelisms.model_split import ModelSplit

@registry.CONFIG_SECTIONS.register("example")
@dataclass(frozen=True)
class ExampleConfig(Section, name="example"):
    '''Options of the example.'''
    answer: Count = 1
    '''The answer.'''

registry.MODELS.add("example_llama", LLAMA3)

@registry.OPTIMIZERS.register("sign")
class Sign(ShardedOptimizer):
    def init_state(self, parameter):
        return {"count": torch.zeros((), device=parameter.device)}
    def update(self, weight, gradient, state, group):
        return weight - group["lr"] * gradient.sign(), {"count": state["count"] + 1}

@registry.LR_SCHEDULES.register("powers")
class Powers(Decay):
    @dataclass(frozen=True)
    class Options:
        base: float = 0.1
    def factor(self, step):
        return self.options.base ** step

@registry.DATA_SOURCES.register("same_files")
class SameFiles(Files):
    pass

@registry.CHECKPOINT_STORAGES.register("mine")
class Mine(LocalStorage):
    def __init__(self, location):
        super().__init__(location.removeprefix("mine://"))

@registry.METRICS_WRITERS.register("lines")
class Lines(MetricsWriter):
    label = "lines"
    def __init__(self, context):
        self.file = Path(context.folder, "lines.txt").open("a")
    def write(self, line):
        self.file.write(f"{line.get('step')} {line.get('loss')}\\n")
        self.file.flush()
    def close(self):
        self.file.close()

@registry.HOOKS.register("counter")
class Counter(Hook):
    shown_metrics = {"example/steps": "{:.0f} steps"}
    def __init__(self, trainer):
        self.trainer, self.steps = trainer, 0
        self.answer = float(section_of(trainer.config, ExampleConfig).answer)
        self.file = Path(trainer.config.job.dump_folder, "steps.txt")
    def begin_interval(self):
        self.steps = 0
    def after_step(self, step, batch, loss, grad_norm):
        self.steps += 1
        self.file.write_text(str(step))
    def metrics(self):
        return {"example/steps": self.steps}
    def validate(self, step, prefix, watched):
        return {f"{prefix}_answer": self.answer}
    def misses_export(self, step):
        return True
    def export(self, step):
        states = self.trainer.checkpointer.states["model"].state_dict()
        weights = {name: local(tensor).clone() for name, tensor in states.items()}
        torch.save((self.trainer.model_config, weights), self.file.with_name("weights.pt"))

@registry.GRADIENT_REDUCERS.register("as_fsdp")
class AsFSDP(GradientReducer):
    def begin(self, rows):
        Path("reduced.txt").write_text(str(rows))

@registry.DATA_SOURCES.register("boxed")
class Boxed(TextDocuments):
    def __init__(self, config, context):
        self.lines = Path(config.path, "box.txt").read_text().split(".")
        super().__init__(len(self.lines), context.section)
    def document(self, number):
        return self.lines[number]
    def identify(self):
        return Identity(repr(self.lines))

class Shouted(FileFormat):
    def read(self, content, column, on_malformed):
        text = b"".join(content.blocks()).decode()
        return iter([text.upper()])

registry.FILE_FORMATS.add("shout", Shouted())

@registry.COMPRESSIONS.register("rot13")
def rot13(raw):
    yield codecs.decode(raw.read().decode(), "rot13").encode()

class Counting(LinearConversion):
    changes = 0
    def check(self, config, degrees, model, tokens, capability):
        pass
    def convert(self, model, shards):
        self.changes = 0
    def after_change(self, model_parts, shards):
        self.changes += 1
        Path("changes.txt").write_text(str(self.changes))

@registry.LINEAR_CONVERSIONS.register("counting")
def counting(config):
    return Counting() if section_of(config, ExampleConfig).answer == 42 else None

class Whole(ModelSplit):
    def apply(self, model, mesh):
        Path("split.txt").write_text(str(len(model.layers)))
    def loss(self, mesh, *args, **options):
        return OutputLoss(*args, **options)

@registry.MODEL_SPLITS.register("whole")
def whole(config):
    return Whole() if section_of(config, ExampleConfig).answer == 42 else None

class Plain(WeightFormat):
    def recognizes(self, path):
        return (path / "weights.pt").exists()
    def files_of(self, names):
        return [name for name in names if name == "weights.pt"]
    def read_config(self, folder):
        return torch.load(folder / "weights.pt", weights_only=False)[0]
    def load(self, tensors, folder, model):
        for name, tensor in torch.load(folder / "weights.pt", weights_only=False)[1].items():
            local(tensors[name]).copy_(tensor)

registry.WEIGHT_FORMATS.add("plain", Plain())

class Here(URLReader):
    def names(self, url, option):
        return [path.name for path in self.fetch(url, option).iterdir()]
    def fetch(self, url, option, names=()):
        return Path(url.removeprefix("here://"))

registry.URL_READERS.add("here", Here())

@registry.RUN_PLANS.register("halves")
class Halves(RunPlan):
    has_stages = True
    @classmethod
    def divides(cls, config):
        return section_of(config, ExampleConfig).answer == 50
    @cached_property
    def stages(self):
        def half(name, steps):
            training, schedule = (replace(self.config.training, steps=steps), self.config.lr_scheduler)
            job = replace(self.config.job, stage=name)
            return replace(self.config, job=job, training=training, lr_scheduler=replace(schedule, total_steps=4))
        return [half("first", 2), half("second", 4)]
    def train(self, build):
        return max(build(half).train() for half in self.stages)
"""


def make_wheel(folder: Path) -> Path:
    """A wheel of the package torchtrain-example, which declares a plugin by its entry point."""
    wheel, info = folder / "torchtrain_example-1.0-py3-none-any.whl", "torchtrain_example-1.0.dist-info"
    files = {
        "torchtrain_example.py": MODULE,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: torchtrain-example\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[torchtrain.plugins]\nexample = torchtrain_example\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]))
    return wheel


# Calls the train command several times in one process: arguments are JSON, and the output of call N is in log-N.
TRAIN_SEVERAL = """
import json, os, sys
from contextlib import suppress
from torchtrain.train import main
for number, options in enumerate(json.loads(sys.argv[1])):
    log = os.open(f"log-{number}", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    with suppress(SystemExit):
        main(options)
    sys.stdout.flush()
    sys.stderr.flush()
"""


def test_installed_package_adds_components(tmp_path: Path) -> None:
    site, text = tmp_path / "site", tmp_path / "text.shout.rot13"
    zipfile.ZipFile(make_wheel(tmp_path)).extractall(site)  # all that pip does with such a wheel
    text.write_text("Fbzr grkg gb inyvqngr jvgu. " * 40, encoding="utf-8")
    (tmp_path / "boxed").mkdir()
    (tmp_path / "boxed/box.txt").write_text("Some text to validate with. " * 40, encoding="utf-8")
    config = tmp_path / "config.toml"
    text_of_config = CONFIG.replace('decay_type = "constant"', 'decay_type = "powers"')
    config.write_text(f"{text_of_config}[lr_scheduler.options]\nbase = 0.5\n[example]\nanswer = 41\n", encoding="utf-8")
    options = ["--example.answer=42", f"--job.config_file={config}", f"--job.dump_folder={tmp_path / 'run'}", *SMALL]
    options += ["--training.steps=4"]
    options += ["--optimizer.name=sign", f"--checkpoint.folder=mine://{tmp_path / 'saved'}", "--metrics.writers=lines"]
    options += [f"--data.path={text}", "--data.type=same_files"]
    options += ["--validation.enable", f"--validation.path={tmp_path / 'boxed'}", "--validation.interval=4"]
    options += ["--validation.type=boxed"]
    (tmp_path / "tokenizer").mkdir()
    shutil.copy(tokenizer_file(), tmp_path / "tokenizer")
    options += [f"--model.tokenizer_path=here://{tmp_path / 'tokenizer'}"]
    options += ["--training.sums=as_fsdp", "--model.name=example_llama", "--model.flavor=debugmodel"]
    second = [f"--job.dump_folder={tmp_path / 'second'}", f"--checkpoint.folder=mine://{tmp_path / 'saved_second'}"]
    second += [f"--checkpoint.initial_load_path=here://{tmp_path / 'run'}", "--optimizer.lr=1e-30"]
    halves = [f"--job.dump_folder={tmp_path / 'halves'}", f"--checkpoint.folder=mine://{tmp_path / 'saved_halves'}"]
    changes = [[], ["--help", "example"], ["--example.answer=-1"], second, [*halves, "--example.answer=50"]]
    changes += [["--example.answer=43", "--training.steps=5"]]
    several = [sys.executable, "-c", TRAIN_SEVERAL, json.dumps([[*options, *changed] for changed in changes])]
    environment = {**os.environ, "PYTHONPATH": f"{site}:{ROOT}", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(several, cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert result.returncode == 0, result.stderr
    log, shown, invalid, log_of_second, log_of_halves, rejected = (
        (tmp_path / f"log-{number}").read_text() for number in range(6)
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["lr"] for line in lines if "lr" in line][2:] == [0.01 * 0.5**3, 0.01 * 0.5**4]
    assert [line["validation_answer"] for line in lines if "validation_answer" in line] == [42.0]
    # The number of a hook is on the line of the loss, in the log, too.
    assert [line["example/steps"] for line in lines if "loss" in line] == [1, 1, 1, 1]
    assert "1 steps" in log
    assert (tmp_path / "run" / "steps.txt").read_text() == "4"
    assert "4 " in (tmp_path / "run" / "lines.txt").read_text()
    assert sorted(path.name for path in (tmp_path / "saved").glob("step-*")) == ["step-2", "step-4"]
    assert tomli.loads((tmp_path / "run" / "config.toml").read_text())["example"] == {"answer": 42}

    assert (tmp_path / "reduced.txt").read_text() == "4"
    assert int((tmp_path / "changes.txt").read_text()) >= 4
    assert (tmp_path / "split.txt").read_text() == "2"

    assert "  --example.answer INTEGER  (default: 1; config file: 41)\n      The answer." in shown
    assert "example.answer = -1 must be at least 1" in invalid
    # Weights in a format of the plugin, by a URL of the plugin: the export of a run, and the start of another, which
    # does not change them.
    assert "done: step 4" in log_of_second
    exported = [torch.load(tmp_path / name / "weights.pt", weights_only=False)[1] for name in ("run", "second")]
    assert [name for name in exported[0] if not torch.equal(exported[0][name], exported[1][name])] == []
    # A run that a plugin divides into two parts has the same steps.
    assert "second (2 of 2): steps 3 to 4" in log_of_halves
    assert "the run in 4 steps" in log_of_halves
    divided = [json.loads(line) for line in (tmp_path / "halves" / "metrics.jsonl").read_text().splitlines()]
    found = [{line["step"]: line["loss"] for line in of if "loss" in line} for of in (lines, divided)]
    assert found[0] == found[1]
    assert [line["stage"] for line in divided if "loss" in line] == ["first"] * 2 + ["second"] * 2
    # Options of a plugin change the run, unless its section says otherwise.
    assert "example.answer = 43 (checkpoint: 42)" in rejected
    without = run_command("torchtrain.train", *options).stderr
    assert "example is not a known section; there are job, " in without
    assert "; or it is of a plugin that is not installed" in without
    message = r"beginnings is not a known section.*; or it is of a plugin that is not installed"
    with pytest.raises(ConfigError, match=message):
        from_text("[beginnings]\nanswer = 42\n", "test.toml")


def test_plugin_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    info = tmp_path / "torchtrain_broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtrain-broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchtrain.plugins]\nbroken = no_such_module_of_mine\n")
    code = "from torchtrain.train import main; import sys; sys.exit(main(['--training.steps=1']))"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert result.returncode == 2, result.stderr
    assert "the plugin 'broken' of the package 'torchtrain-broken' cannot be imported: " in result.stderr
    assert (
        "ModuleNotFoundError: No module named 'no_such_module_of_mine'; install what it needs, or uninstall it"
        in result.stderr
    )


@dataclass(frozen=True)
class DataConfig(Section, name="example"):
    """Options of an example, in a class that is named as one of the core."""

    size: Count = 1
    """The size."""


def test_section_of_a_plugin_has_a_name_of_its_own() -> None:
    for name in ("training", "stages", "plugins", "not-a-name"):
        CONFIG_SECTIONS.add(name, DataConfig)
        with pytest.raises(ConfigError, match=rf"DataConfig cannot be the section '{name}': take another name"):
            parse([])
        del CONFIG_SECTIONS._entries[name]
    CONFIG_SECTIONS.add("other", DataConfig)
    with pytest.raises(ConfigError, match="it must be a Section with name='other'"):
        parse([])


def test_help_of_a_class_that_is_named_as_one_of_the_core(capsys: pytest.CaptureFixture[str]) -> None:
    CONFIG_SECTIONS.add("example", DataConfig)
    for section, text in (("example", "The size."), ("data", "Training data.")):
        with pytest.raises(SystemExit, match=r"^0$"):
            parse(["--help", section])
        assert text in capsys.readouterr().out


def test_option_of_a_section_that_does_not_exist_may_be_of_a_plugin() -> None:
    message = r"--beginnings.interval: there is no section 'beginnings', or it is of a plugin that is not"
    with pytest.raises(ConfigError, match=message):
        parse(["--beginnings.interval", "4"])


def test_run_of_a_plugin_resumes_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    current = to_toml(parse([]))
    saved = f"{current}\n[example]\nsize = 5\n[estimate]\nmtbf_hours = 5.0\n"
    with pytest.raises(CheckpointError, match=r"example.size = None \(checkpoint: 5\)") as error:
        check_resume_compatibility(saved, current, ())
    assert "checkpoint.allow_changes = ['example.size']" in str(error.value)
    assert "[example] is of a plugin that is not installed here: install it" in str(error.value)
    allowed = parse(["--checkpoint.allow_changes", "example.size"]).checkpoint.allow_changes
    assert check_resume_compatibility(saved, current, allowed)
    # Options of a command that is not installed do not change a run.
    monkeypatch.delitem(CONFIG_SECTIONS._entries, "estimate", raising=False)
    assert {d.key: d.kind for d in differences(saved, current)}["estimate.mtbf_hours"] is Kind.HARMLESS
    # The hash of a run is the same, whatever is installed.
    before = hash_of_changes(current)
    CONFIG_SECTIONS.add("example", DataConfig)
    assert hash_of_changes(current) == before
    (tmp_path / "config.toml").write_text('[unknown]\nx = 1\n[checkpoint]\nfolder = "mine"\n')
    assert checkpoint_folders(tmp_path)[0] == str(tmp_path / "mine")
