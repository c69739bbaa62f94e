"""What becomes of each option that torchtitan ever had: in files, on the command line, and by the conversion."""

import ast
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w

from torchtrain.config.parse import command_line_type, from_file, from_text, option_types, parse
from torchtrain.errors import ConfigError
from torchtrain.plugins.from_torchtitan.conversion import Converted, convert_config
from torchtrain.plugins.from_torchtitan.options import TOML_ENDS, find_option, torchtitan_options
from torchtrain.plugins.from_torchtitan.values import SMALL_DATASETS

HISTORY: dict[str, tuple[str, str, dict[str, str]]] = tomli.loads(
    (Path(__file__).parent / "history.toml").read_text(encoding="utf-8")
)
"""First day, last day and defaults of each option, which scripts/docs/torchtitan_options.py lists."""
DEFAULTS = convert_config("", "theirs.toml").text.splitlines()
OURS = option_types(command_line_type())

# The keys that the debug_model.toml of torchtitan 0.2 sets.
DEBUG_FILE: dict[str, dict[str, Any]] = {
    "job": {"dump_folder": "./outputs", "description": "debug", "print_args": False},
    "profiling": {"enable_profiling": False, "save_traces_folder": "profile_trace", "profile_freq": 10},
    "metrics": {"log_freq": 1, "disable_color_printing": False, "save_tb_folder": "tb", "enable_wandb": False},
    "model": {"name": "llama3", "flavor": "debugmodel", "hf_assets_path": "./tests/assets/tokenizer"},
    "optimizer": {"name": "AdamW", "lr": 8e-4, "eps": 1e-8},
    "lr_scheduler": {"warmup_steps": 2, "decay_ratio": 0.8, "decay_type": "linear", "min_lr_factor": 0.0},
    "training": {"local_batch_size": 8, "seq_len": 2048, "max_norm": 1.0, "steps": 10, "dataset": "c4_test"},
    "parallelism": {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": -1,
        "tensor_parallel_degree": 1,
        "fsdp_reshard_after_forward": "default",
        "enable_async_tensor_parallel": False,
        "pipeline_parallel_degree": 1,
        "context_parallel_degree": 1,
    },
    "checkpoint": {
        "enable_checkpoint": False,
        "folder": "checkpoint",
        "interval": 10,
        "last_save_model_only": False,
        "export_dtype": "float32",
        "async_mode": "disabled",
    },
    "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"},
    "compile": {"enable": False, "components": ["model", "loss"]},
    "quantize": {"linear": {"float8": {"precompute_float8_dynamic_scale_for_fsdp": False, "filter_fqns": ["output"]}}},
    "validation": {"enabled": False, "dataset": "c4_validation", "freq": 5, "steps": 10},
}
# Its keys that torchtrain rejects, and their names here; for the optimizer's name, the new value.
REJECTED = {
    "job.print_args": None,
    "profiling.save_traces_folder": None,
    "metrics.disable_color_printing": None,
    "metrics.save_tb_folder": None,
    "metrics.enable_wandb": "metrics.writers",
    "model.hf_assets_path": "model.tokenizer_path",
    "optimizer.name": "adamw",
    "training.dataset": "data.name",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.last_save_model_only": None,
    "checkpoint.export_dtype": "huggingface.export_dtype",
    "activation_checkpoint.selective_ac_option": "activation_checkpoint.selective_option",
    "compile.components": None,
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": None,
    "quantize.linear.float8.filter_fqns": None,
    "validation.enabled": "validation.enable",
    "validation.dataset": "validation.name",
    "validation.freq": "validation.interval",
}


def value_of(text: str) -> Any:
    """A default in Python as a value; None if it is an object of torchtitan's."""
    try:
        return ast.literal_eval(text)
    except ValueError:
        return None


def values_to_try(name: str) -> list[Any]:
    """torchtitan's defaults of an option, and values that differ from them."""
    defaults = [value for value in map(value_of, HISTORY[name][2].values()) if value not in (None, {})]
    others: list[Any] = [not value if isinstance(value, bool) else value * 2 for value in defaults if value != -1]
    return [*defaults, *others] or ["a"]


def convert_one(name: str, value: Any) -> Converted:
    table: dict[str, Any] = {}
    *sections, key = name.split(".")
    inner = table
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = value
    return convert_config(tomli_w.dumps(table), "theirs.toml")


def error_of(text: str) -> ConfigError | None:
    """Why torchtrain rejects the config ``text``; None if it is valid."""
    try:
        from_text(text, "ours.toml")
    except ConfigError as error:
        return error
    return None


def check_conversion(name: str, values: list[Any]) -> None:
    option = find_option(name)
    assert option is not None
    assert option.here or option.note, "an option without a counterpart needs a reason"
    for value in values:
        converted = convert_one(name, value)
        key = name.rpartition(".")[2]
        new = [line for line in converted.text.splitlines()[2:] if line not in DEFAULTS]
        explained = [line for line in new if line.startswith("# ") and f"{key} = " in line]
        set_here = option.here.partition(".")[2]
        assert explained or any(line.startswith(f"{set_here} = ") for line in new), (name, value, converted.text)
        if explained:
            assert explained[0].partition("  # ")[2], explained
        if explained and value not in (option.default, *option.before.values(), *option.same, *SMALL_DATASETS):
            ignored = ("float8.", "quantize.", "fault_tolerance.")  # unless these are on
            assert converted.left_out or name.startswith(ignored) or name.endswith("less_layers"), (name, value)
        error = error_of(converted.text)
        assert error is None or option.here in str(error), (name, value)


@pytest.mark.parametrize("section", dict.fromkeys(name.partition(".")[0] for name in HISTORY))
def test_each_option_of_the_history_is_converted_or_explained_or_an_error(section: str) -> None:
    """With one value that is not its default, if it has any."""
    for name in HISTORY:
        if name.partition(".")[0] == section:
            check_conversion(name, values_to_try(name)[-1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", HISTORY)
def test_other_values_of_each_option_are_converted_or_explained_or_an_error(name: str) -> None:
    check_conversion(name, values_to_try(name)[:-1])


def test_each_option_that_torchtrain_lacks_is_explained_on_the_command_line() -> None:
    for name in HISTORY.keys() & OURS.keys():
        option = find_option(name)
        assert option is not None
        assert option.here in (name, ""), "otherwise the option would be accepted with another meaning"
    lacking = [name for name in HISTORY if name not in OURS]
    with pytest.raises(ConfigError) as error:
        parse([f"--{name}=1" for name in lacking])
    for name, line in zip(lacking, str(error.value).splitlines()[1:], strict=True):
        option = find_option(name)
        assert option is not None
        which = f"it is named {option.here} in torchtrain" if option.here else "it has no counterpart in torchtrain"
        assert line.startswith(f"  --{name} is not a known option: {which}")


def test_names_days_and_defaults_are_those_of_the_history() -> None:
    """A wrong default, such as that of the batch size, would change converted runs."""
    options = torchtitan_options()
    for name, (first, last, defaults) in HISTORY.items():
        if name not in options:
            continue  # of a section that is explained as a whole
        option = options[name]
        assert (option.since, option.until) == (first, last), name
        newest = value_of([*defaults.values()][-1]) if defaults else None
        assert option.default == (None if newest == {} else newest), name
        if option.here and first < TOML_ENDS:
            for day, text in defaults.items():
                ends = [other for other in defaults if other > day]
                if value_of(text) is not None and day < TOML_ENDS:
                    assert option.default_before(min(ends, default=TOML_ENDS)) == value_of(text), (name, day)
    assert [option for option in options.values() if option.here and option.here not in OURS] == []


def test_one_message_lists_all_keys_of_a_file_and_names_the_command(tmp_path: Path) -> None:
    file = tmp_path / "debug_model.toml"
    file.write_text(tomli_w.dumps(DEBUG_FILE))
    with pytest.raises(ConfigError) as error:
        from_file(str(file))
    head, *lines, last = str(error.value).splitlines()
    assert head == f"{file}:"
    assert last.startswith(
        "  to convert a config file of torchtitan: python -m torchtrain.convert_config FILE --output"
    )
    assert [line.split()[0] for line in lines] == list(REJECTED)
    for line, here in zip(lines, REJECTED.values(), strict=True):
        if here == "adamw":
            assert line.endswith(
                "must be one of 'adamw', 'muon', or one that a plugin or a module in job.import registers; did you "
                "mean 'adamw'?"
            )
        else:
            assert (f"it is named {here} in torchtrain" if here else "it has no counterpart in torchtrain") in line


def test_message_with_torchtitan_keys_misspellings_and_wrong_types(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "[float8]\nenable_float8_linear = true\n[trainnig]\nstesp = 1\n[training]\nsteps = 'x'\nstesp = 2\n"
        "[fault_tolerance]\nreplica_id = 1\nother = 2\n"
    )
    with pytest.raises(ConfigError) as error:
        from_file(str(file))
    assert str(error.value).splitlines() == [
        f"{file}:",
        "  float8.enable_float8_linear is not a known key: it is named float8.recipe in torchtrain "
        '(true corresponds to recipe = "tensorwise")',
        "  trainnig is not a known section; did you mean 'training'?",
        "  training.steps = 'x' must be an integer",
        "  training.stesp is not a known key; did you mean 'training.steps'?",
        "  fault_tolerance.replica_id is not a known key: it is named replicas.id in torchtrain (a text)",
        "  fault_tolerance.other is not a known key",
        "  to convert a config file of torchtitan: python -m torchtrain.convert_config FILE --output my_config.toml "
        "(docs/from-torchtitan.md)",
    ]
    file.write_text("[training]\nstesp = 2\n[lr_scheduler]\ndecay_ratio = 0.5\n")
    with pytest.raises(
        ConfigError, match=r"run.toml: training.stesp is not a known key; did you mean 'training.steps'\?$"
    ):
        from_file(str(file))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--training.batch_size 4", "--training.batch_size is not a known option: it is named training.local_batch_"),
        ("--training.compile", "--training.compile is not a known option: it is named compile.enable in torchtrain"),
        ("--training.dataset=c4", "--training.dataset is not a known option: it is named data.name in torchtrain"),
        ("--module llama3", "--module is not a known option: it is named model.name in torchtrain"),
        ("--hf-assets-path x", "--hf_assets_path is not a known option: it is named model.tokenizer_path in torch"),
    ],
)
def test_hints_on_the_command_line(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(arguments.split())
    assert str(error.value).startswith(message)


def test_differing_defaults_are_on_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs/from-torchtitan.md").read_text()
    for row in (
        '| `lr_scheduler.decay_type` |  | **`"linear"`** | **`"cosine"`** |',
        "| `optimizer.lr` |  | **`0.0008`** | **`0.0003`** |",
        '| `checkpoint.async_mode` |  | **`"disabled"`** | **`"async"`** |',
        '| `activation_checkpoint.mode` |  | **`"selective"`** | **`"none"`** |',
        "| `checkpoint.keep_latest_k` |  | **`10`** | **`5`** | 0 until 2025-03-04 |",
        "| `training.batch_size` | `training.local_batch_size` |  |",
    ):
        assert row in page
