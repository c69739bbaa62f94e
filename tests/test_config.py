"""The config: precedence of its sources, and an error for every invalid key and value."""

import dataclasses
import os
import re
import typing
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli

from torchtrain.config.help import toml
from torchtrain.config.parse import command_line_type, from_file, option_types, parse, to_toml
from torchtrain.config.registry import METRICS_WRITERS, OPTIMIZERS, OPTION_HINTS
from torchtrain.config.schema import TrainingConfig, section_types
from torchtrain.config.section import LOCAL, rules_of
from torchtrain.errors import ConfigError

CONFIGS = sorted((Path(__file__).parent.parent / "train_configs").glob("*.toml"))


def write(folder: Path, text: str) -> str:
    file = folder / "run.toml"
    file.write_text(text)
    return str(file)


def test_command_line_wins_over_file_wins_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "[training]\nsteps = 7\nseq_len = 64\n[optimizer]\nlr = 1\n[checkpoint]\nenable = true\n")
    config = parse(["--job.config_file", file, "--training.steps", "9", "--checkpoint.no-enable"])
    assert config.training == TrainingConfig(steps=9, seq_len=64)
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert not config.checkpoint.enable


@pytest.mark.parametrize(
    "name", ["--job.config_fil", "--job-config-file", "--job_config_file", "--config_file", "--job.file"]
)
def test_misspelled_config_file_option_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is not a known option"):
        parse([name, write(tmp_path, "[training]\nsteps = 7\n")])


def tables(section: type[Any], name: str = "") -> Iterator[tuple[str, str]]:
    """All tables that a TOML file may have, each with one of its keys."""
    for key, hint in typing.get_type_hints(section).items():
        inner = next((kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)), None)
        if inner is not None:
            path = f"{name}.{key}" if name else key
            yield f"[[{path}]]" if inner is not hint else f"[{path}]", dataclasses.fields(inner)[-1].name
            yield from tables(typing.cast(type[Any], inner), path)


@pytest.mark.parametrize(("table", "key"), list(tables(command_line_type())))
def test_misspelled_key_is_rejected_in_every_table(tmp_path: Path, table: str, key: str) -> None:
    name = table.strip("[]") + ("[0]" if table.startswith("[[") else "")
    for wrong in (f"{key}s", key.upper(), f"{key[0]}-{key[1:]}", "config-file"):
        file = write(tmp_path, f"{table}\n{wrong} = 1\n")
        with pytest.raises(ConfigError, match=re.escape(f"{name}.{wrong} is not a known key; ")):
            from_file(file)
    with pytest.raises(ConfigError, match=re.escape(f"{name}.{wrong} is not a known key; ")):
        parse(["--job.config_file", file])


def test_command_line_corrects_inconsistent_values_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[validation]\nenable = true\n[training]\nsteps = 0\n[[data.sources]]\nweight = -1\n")
    with pytest.raises(ConfigError, match=r"weight = -1.0 of a data source must be at least 0"):
        parse(["--job.config_file", file, "--validation.path", "a.txt", "--training.steps", "3"])
    file = write(tmp_path, "[validation]\nenable = true\n[training]\nsteps = 0\n")
    for options, message in (
        ([], "steps = 0 must"),
        (["--training.steps", "3"], "validation.enable = true needs data"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(["--job.config_file", file, *options])
    config = parse(["--job.config_file", file, "--validation.path", "a.txt", "--training.steps", "3"])
    assert (config.validation.path, config.training.steps) == ("a.txt", 3)


@pytest.mark.parametrize("name", ["--job.config_file", "--job.config-file"])
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("before", [[], ["--data.path", "a", "b"]])
def test_config_file_option_is_found_in_every_spelling(
    tmp_path: Path, name: str, joined: bool, before: list[str]
) -> None:
    file = write(tmp_path, "[training]\nsteps = 7\n[optimizer]\nlr = 0.25\n")
    config = parse([*before, *([f"{name}={file}"] if joined else [name, file]), "--optimizer.beta1=0.5"])
    assert (config.training.steps, config.optimizer.lr, config.optimizer.beta1) == (7, 0.25, 0.5)


def test_dump_folder_is_named_after_the_config_file(tmp_path: Path) -> None:
    file = write(tmp_path, "")
    assert parse(["--job.config_file", file]).job.dump_folder == "outputs/run"
    assert parse([f"--job.config-file={file}", "--job.dump-folder", "x"]).job.dump_folder == "x"
    assert parse([]).job.dump_folder == "outputs/default"


def test_tilde_in_a_path_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, "[data]\npath = ['~/a', 'b~/c']\n[[validation.sources]]\npath = '~/d'\n")
    config = parse(["--job.config_file=~/run.toml", "--model.tokenizer_path=~/e", "--job.description", "~"])
    assert config.data.path == (f"{tmp_path}/a", "b~/c")
    assert config.validation.sources[0].path == f"{tmp_path}/d"
    assert config.model.tokenizer_path == f"{tmp_path}/e"
    assert config.job.description == "~"


def test_byte_order_mark_at_the_start_of_the_file_is_ignored(tmp_path: Path) -> None:
    assert from_file(write(tmp_path, "\ufeff[training]\r\nsteps = 7\r\n")).training.steps == 7


def test_resolved_config_is_read_back_unchanged(tmp_path: Path) -> None:
    config = parse(["--training.steps", "9", "--optimizer.lr", "1e-5", "--lr_scheduler.total_steps", "12"])
    assert from_file(write(tmp_path, to_toml(config))) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainning]\nsteps = 1", "trainning is not a known section; did you mean 'training'?"),
        ("[training]\nstep = 1", "training.step is not a known key; did you mean 'training.steps'?"),
        ("[training]\nlr = 1e-3", r"training.lr is not a known key; did you mean 'optimizer.lr'\?"),
        ("[training]\ntotal_steps = 1", r"training.total_steps is .*; did you mean 'lr_scheduler.total_steps'\?"),
        ("[optimizer]\nsteps = 1", r"optimizer.steps is .*; did you mean 'training.steps' or 'validation.steps'\?"),
        ("[training]\nsteps = '1'", "training.steps = '1' must be an integer"),
        ("[training]\nsteps = 1.5", "training.steps = 1.5 must be an integer"),
        ("[training]\nsteps = true", "training.steps = True must be an integer"),
        ("[optimizer]\nlr = 'fast'", "optimizer.lr = 'fast' must be a number"),
        ("[checkpoint]\nenable = 1", "checkpoint.enable = 1 must be true or false"),
        ("training = 3", r"training = 3 must be a table, \[training\]"),
        ("[model]\nname = 'llama4'", "model.name = 'llama4' must be one of 'llama2', 'llama3', .*; did you mean"),
        ("[model.shape]\ndmi = 3", "model.shape.dmi is not a known key; did you mean 'model.shape.dim'"),
        ("[model.shape.rope_scaling]\ntype = 'ntk'", "model.shape.rope_scaling.type = 'ntk' must be one of 'none'"),
        ("[training]\nsteps = 0", "training.steps = 0 must be at least 1"),
        ("[training]\nsteps = ", "is not valid TOML: Invalid value"),
        (f"[training]\nsteps = {'1' * 5000}", "is not valid TOML: Exceeds the limit"),
        ("[data]\nlongest_seq_len = 268435457", r"data.longest_seq_len = 268435457 must be at most 2\*\*28"),
        ('[data]\npath = ["a", "b\\u0000"]', r"data.path\[1\] = 'b\\x00' must be text in UTF-8 without NUL"),
    ],
)
def test_invalid_file_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_file(write(tmp_path, text))


@pytest.mark.parametrize("name", ["pyproject.tml", "project.toml", "pyproject2.toml"])
def test_suggestions_for_a_missing_file_are_train_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text('[project]\nname = "x"\n')
    Path("cut.toml").write_text("[training")
    Path("mine.toml").write_text("[training]\nsteps = 3\n")
    with pytest.raises(ConfigError, match=r"is not a file \(looked for /.*\)\. There are:\n") as error:
        from_file(name)
    own, mine = str(error.value).splitlines()[1:]  # each folder once
    assert own.startswith(f"  in {CONFIGS[0].parent}: ")
    assert " debug_english.toml, debug_model.toml, " in own
    assert mine == "  in the working folder: mine.toml"
    with pytest.raises(ConfigError, match=r"did you mean '.*train_configs/llama3_8b.toml'"):
        from_file("llama3-8b.toml")


TAKE_URLS = (
    *("data.path", "validation.path", "prepare.output", "checkpoint.folder", "checkpoint.initial_load_path"),
    *("job.config_file", "model.hf_folder", "model.tokenizer_path"),
)


def test_every_other_path_option_rejects_urls() -> None:
    """Path options are recognized by their names: a new one that is a plain string fails here."""

    def options(section: object, prefix: str) -> Iterator[tuple[str, dataclasses.Field[Any]]]:
        for field in dataclasses.fields(section):  # type: ignore[arg-type]
            value = getattr(section, field.name)
            yield from options(value, f"{prefix}{field.name}.") if dataclasses.is_dataclass(value) else ()
            yield f"{prefix}{field.name}", field

    for name, field in options(command_line_type()(), ""):
        # job.dump_folder has a message of its own.
        if name in (*TAKE_URLS, "job.dump_folder"):
            continue
        if re.search(r"path|folder|file$|output|picture", name.rpartition(".")[2]):
            assert LOCAL in rules_of(field.type), name


def test_missing_file_error_suggests_the_closest_name() -> None:
    with pytest.raises(ConfigError, match=r"is not a file \(looked for /.*\); did you mean '.*debug_model.toml'"):
        from_file(str(CONFIGS[0].parent / "debugmodel.toml"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--training.step 3", "--training.step is not a known option; did you mean '--training.steps'?"),
        ("--trainng.steps 3", "--trainng.steps is not a known option; did you mean '--training.steps'?"),
        ("--training.steps many", "training.steps = 'many' must be an integer"),
        ("--training.steps 1.5", "training.steps = '1.5' must be an integer"),
        ("--optimizer.lr fast", "optimizer.lr = 'fast' must be a number"),
        ("--job.device cdua", "job.device = 'cdua' must be one of 'auto', 'cpu', 'cuda'; did you mean 'cuda'?"),
        ("--training.steps", "--training.steps needs one value, and has none"),
        ("--training.steps 1 2", "--training.steps needs one value, and has '1' '2'"),
        ("--data.path", "--data.path needs one value, and has none"),
        ("7", "'7' is not an option: options are named --SECTION.OPTION"),
        ("--sed 7", "--sed is not a known option: options are named --SECTION.OPTION; did you mean '--training.seed'?"),
        ("--training.zzz", "--training.zzz is not a known option; python -m torchtrain.train --help training lists "),
        ("--stages.length 7", "--stages.length: stages are tables of a config file, [[stages]] (docs/stages.md)"),
        ("--model.options.window 7", "--model.options.window: set it in the config file, in the table model.options; "),
        ("--data.sources.0.path a", "--data.sources.0.path: set it in the config file, in the table data.sources; "),
    ],
)
def test_invalid_command_line_is_rejected(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        parse(arguments.split())


def test_one_message_lists_all_problems_of_the_command_line() -> None:
    with pytest.raises(ConfigError) as error:
        parse(["--training.step", "3", "--training.seed", "--jbo.device=cpu"])
    assert str(error.value).splitlines() == [
        "the command line:",
        "  --training.step is not a known option; did you mean '--training.steps'?",
        "  --training.seed needs one value, and has none",
        "  --jbo.device is not a known option; did you mean '--job.device'?",
    ]


def test_values_of_the_command_line_have_the_types_of_the_options(tmp_path: Path) -> None:
    OPTIMIZERS.add("mine", "module:Mine")
    for name in ("one", "two"):
        METRICS_WRITERS.add(name, f"module:{name}")
    file = write(tmp_path, "[optimizer]\nname = 'mine'\n[optimizer.options.mine]\nmomentum = 0.9\nns_steps = 5\n")
    words = ["--optimizer.lr", "1", "--data.path", "a", "b", "--checkpoint.load_step", "-1", "--metrics.writers"]
    words += [
        "one",
        "two",
        "--lr_scheduler.total-steps=8",
        "--optimizer.options.mine.momentum",
        "0.5",
        "--job.description=--x y",
    ]
    config = parse(["--job.config_file", file, *words])
    assert repr(config.optimizer.lr) == "1.0"
    assert (config.data.path, config.metrics.writers) == (("a", "b"), ("one", "two"))
    assert (config.checkpoint.load_step, config.lr_scheduler.total_steps) == (-1, 8)
    assert config.optimizer.options == {"mine": {"momentum": 0.5, "ns_steps": 5}}
    assert config.job.description == "--x y"
    assert parse(["--data.path", "a", "--metrics.writers"]).data.path == "a"
    assert parse(["--training.seed", "3", "--training.seed", "4"]).training.seed == 4
    file = write(tmp_path, "[lr_scheduler]\ntotal_steps = 8\n")
    assert parse(["--job.config_file", file, "--lr_scheduler.total_steps", "None"]).lr_scheduler.total_steps is None


def test_hints_of_plugins_are_the_same_in_files_and_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hints:
        def about_option(self, name: str) -> str:
            return "it is old" if name == "training.old" else ""

        def about_file(self, names: Collection[str]) -> str:
            return f"a file of {len(names)}"

    monkeypatch.setattr(OPTION_HINTS, "_entries", {"test": Hints()})
    with pytest.raises(ConfigError, match=r"^--training.old is not a known option: it is old$"):
        parse(["--training.old", "1", "--training.steps", "3"])
    file = write(tmp_path, "[training]\nold = 1\nsteps = 3\n")
    with pytest.raises(ConfigError, match=rf"^{file}:\n  training.old is not a known key: it is old\n  a file of 2$"):
        parse(["--job.config_file", file])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer.lr=-1"], "optimizer.lr = -1.0 must be at least 0"),
        (["--comm.init_timeout_seconds", "9999999999"], "init_timeout_seconds = 9999999999 must be at most 1000000000"),
        (["--optimizer.eps", "0"], "optimizer.eps = 0.0 must be above 0"),
        (["--optimizer.beta2", "1"], "optimizer.beta2 = 1.0 must be at least 0 and under 1"),
        (["--training.max_norm", "nan"], "training.max_norm = nan must be above 0"),
        (["--training.global_batch_size", "0"], "training.global_batch_size = 0 must be -1 or at least 1"),
        (["--lr_scheduler.decay_ratio", "2"], "lr_scheduler.decay_ratio = 2.0 must be between 0 and 1"),
        (["--activation_checkpoint.selective_option", "0"], "selective_option = '0' must be 'op' or an integer"),
        (["--data.path", "a", "--data.name", "b"], "exclude each other"),
        (
            ["--model.name", "llama4"],
            "model.name = 'llama4' must be one of 'llama2', 'llama3', .*did you mean 'llama3'",
        ),
        (["--job.description", os.fsdecode(b"\xff")], r"job.description = '\\udcff' must be text in UTF-8"),
    ],
)
def test_invalid_values_are_rejected(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(arguments)


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        parse([*words])
    assert exit_.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 120])
def test_help_is_one_screen_of_sections(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = help_of(capsys, "--help").splitlines()
    assert len(lines) <= 33
    assert max(map(len, lines)) <= columns
    heading = lines.index("sections of plugins (docs/plugins.md):")
    listed = [line.split()[0] for line in lines[:heading] if re.match("  [a-z]", line)]
    of_plugins = " ".join(lines[heading + 1 : lines.index("", heading)]).split()
    assert [*listed, *(name.rstrip(",") for name in of_plugins)] == [*section_types()]


def test_every_option_is_documented(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--help SECTION shows each option once, with a text that is wrapped once, and the command line has all of them."""
    monkeypatch.setenv("COLUMNS", "80")
    texts = {name: help_of(capsys, "--help", name) for name in section_types()}
    assert max(len(line) for text in texts.values() for line in text.splitlines() if line.startswith("   ")) <= 80
    shown = re.findall(r"^  --(\S+) (\S+)", "\n".join(texts.values()), re.MULTILINE)
    tables = re.findall(r"^  \[+(\S+?)\]+  in the config file", "\n".join(texts.values()), re.MULTILINE)
    assert sorted([*(name for name, _ in shown), *tables]) == sorted(option_types(command_line_type()))


def test_help_of_an_option_shows_its_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[checkpoint]\ninterval = 7\n")
    assert help_of(capsys, "--help", "training.sums").splitlines()[0] == '  --training.sums TEXT  (default: "fast")'
    assert "Values: fast" in help_of(capsys, "-h", "training.sums")
    shown = help_of(capsys, "--job.config_file", str(file), "--help=checkpoint.interval")
    assert shown.startswith("  --checkpoint.interval INTEGER  (default: 500; config file: 7)\n      Checkpointing")
    assert "--model.shape.rope_scaling.factor NUMBER" in help_of(capsys, "--help", "model.shape")
    with pytest.raises(ConfigError, match="--help trainng: there is no such section or option; the sections are job,"):
        parse(["--help", "trainng"])


def test_tables_of_sources_are_parsed(tmp_path: Path) -> None:
    file = tmp_path / "mix.toml"
    file.write_text('[[data.sources]]\npath = "a.jsonl"\nweight = 3\n[[data.sources]]\ntype = "standard_library"\n')
    config = parse(["--job.config_file", str(file)])
    assert [(source.path, source.source_type, source.weight) for source in config.data.all] == [
        ("a.jsonl", "files", 3.0),
        ("", "standard_library", 1.0),
    ]
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    assert parse(["--job.config_file", str(tmp_path / "resolved.toml")]).data == config.data


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[data.sources]]\npath = "a"\nwieght = 1', r"data.sources\[0\].wieght is not a known key; did you mean"),
        ('[[data.sources]]\npath = "a"\nweight = -1', r"weight = -1.0 of a data source must be at least 0"),
        ('[[data.sources]]\npath = "a"\nweight = 0', r"at least one data source must have a weight above 0"),
        ("[[data.sources]]\nweight = 1", r"number 1 has neither path nor name"),
        ('[data]\npath = "x"\n[[data.sources]]\npath = "a"', r"exclude each other"),
        ('[data]\npath = ["a", ""]', "of a data source has an empty name in it"),
    ],
)
def test_invalid_tables_of_sources_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mix.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse(["--job.config_file", str(file)])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--compile.enable"], True),
        (["--compile.enable", "true"], True),
        (["--compile.enable=True"], True),
        (["--compile.enable", "--compile.enable", "false"], False),
        (["--compile.enable=false"], False),
        (["--compile.no-enable"], False),
    ],
)
def test_booleans_are_flags_or_true_and_false(words: list[str], expected: bool) -> None:
    config = parse([*words, "--checkpoint.enable", "false", "--training.steps", "3"])
    assert (config.compile.enable, config.checkpoint.enable, config.training.steps) == (expected, False, 3)


def test_other_values_of_booleans_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"compile.enable = 'on' must be true or false"):
        parse(["--compile.enable=on"])


def test_help_of_a_word_finds_options_of_all_sections(capsys: pytest.CaptureFixture[str]) -> None:
    named = help_of(capsys, "--help", "lr")
    names = re.findall(r"^  --([\w.]+) ", named, re.MULTILINE)
    assert {"optimizer.lr", "optimizer.hidden.lr_factor", "lr_scheduler.min_lr_factor"} <= set(names)
    assert "Peak learning rate." in named
    assert "options whose description" not in named  # that of checkpoint.allow_changes names optimizer.lr
    _, _, described = help_of(capsys, "--help", "rate").partition("options whose description has 'rate':")
    assert "optimizer.lr" in re.findall(r"^  --([\w.]+) ", described, re.MULTILINE)
    assert "--activation_checkpoint.memory_budget" in help_of(capsys, "--help", "memory").partition("description")[0]


def test_values_in_the_help_are_valid_toml() -> None:
    for value in (True, 3, 0.5, 'a "b" \\d', ("x", 'y"'), []):
        assert tomli.loads(f"value = {toml(value)}")["value"] == (list(value) if isinstance(value, tuple) else value)
