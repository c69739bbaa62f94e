"""Values of torchtitan's options as values of ours, or the reason why there are none."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtrain.config.parse import command_line_type, option_types
from torchtrain.plugins.from_torchtitan.options import find_option, torchtitan_options

# Values that have another name here, by our option. A model's parallelization is no part of its name here.
VALUES: dict[str, dict[Any, Any]] = {
    "activation_checkpoint.mode": {True: "selective", False: "none"},
    "data.document_mask": {"causal": False, "block_causal": True},
    "data.when_exhausted": {True: "repeat", False: "stop"},
    "metrics.writers": {True: ["wandb"], False: []},
    "model.name": {
        "llama": "llama2",  # until 2024-04
        **dict.fromkeys(("llama3_ft", "llama3_simple_fsdp", "simple_fsdp.llama3", "compiler_toolkit.llama3"), "llama3"),
    },
    "optimizer.implementation": {True: "fused", False: "foreach"},
    "optimizer.name": {"AdamW": "adamw"},
    "parallelism.pipeline_parallel_schedule": {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B"},
}
C4 = {"name": "allenai/c4", "subset": "en"}
DATASETS: dict[str, dict[str, str]] = {
    "alpaca": {"name": "tatsu-lab/alpaca"},
    "c4": C4,
    "c4_validation": {**C4, "split": "validation"},
    "minipile": {"name": "JeanKaddour/minipile"},
    "openwebtext": {"name": "Skylion007/openwebtext"},
}
SMALL_DATASETS = ("c4_mini", "c4_test")  # files of torchtitan's repository
FLOAT8 = ("float8", "quantize.linear.float8", "quantize.dense.float8")  # converters of linear layers
FLOAT8_FLAGS = (
    *("float8.enable_float8_linear", "training.enable_float8_linear"),
    *("training.enable_fp8_linear", "training.fp8_linear"),
)
FILTERS = ("float8.filter_fqns", "quantize.linear.float8.filter_fqns", "quantize.dense.float8.filter_fqns")
RECIPES = ("float8.recipe_name", "quantize.linear.float8.recipe_name", "quantize.dense.float8.recipe_name")
# Sizes that torchtrain does not have, as overrides of a flavor. Those of Llama's debugmodel changed, see ``sizes_of``.
SIZES: dict[tuple[str, str], dict[str, Any]] = {
    ("llama2", "271M"): {"dim": 1024, "n_layers": 16, "n_heads": 8, "n_kv_heads": 8, "ffn_dim": 2816},
    ("llama2", "1B"): {"dim": 2048, "n_layers": 18, "n_heads": 16, "n_kv_heads": 16, "ffn_dim": 5632},
    ("llama2", "26B"): {"dim": 5120, "n_layers": 80, "n_heads": 40, "n_kv_heads": 40, "ffn_dim": 13824},
    ("qwen3", "debugmodel"): {
        "n_layers": 8,
        "n_heads": 16,
        "n_kv_heads": 8,
        "ffn_dim": 3072,
        "head_dim": 128,
        "tied_embeddings": True,
    },
}
MASKED = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")  # ends of the names of sizes that mask documents
DEBUGMODEL_LAYERS = (("2024-06-17", 2), ("2025-04-15", 8))  # of Llama, until these days; 6 since then
ROPE_SCALING_SINCE = "2025-10-08"  # of all sizes of Llama 3
NORM_DECAY = "optimizer.no_decay.weight_decay"
LAYERS = "parallelism.pipeline_parallel_layers_per_stage"


@dataclass(frozen=True)
class TorchtitanFile:
    """The options that a file of torchtitan sets, and the day before which its version was current."""

    values: Mapping[str, Any]
    day: str

    def get(self, *names: str) -> Any:
        """The value of the first of ``names`` that the file sets, or its default."""
        for name in names:
            if name in self.values:
                return self.values[name]
        options = [torchtitan_options()[name] for name in names]
        return next((o for o in options if o.exists_before(self.day)), options[0]).default_before(self.day)

    @property
    def has_float8(self) -> bool:
        """Whether linear layers are converted to float8; without it, torchtitan ignores the recipe."""
        return any(name in FLOAT8 for name in converters(self.get("model.converters")) or ()) or any(
            self.values.get(flag) for flag in FLOAT8_FLAGS
        )


@dataclass(frozen=True)
class LeftOut:
    """Why an option of torchtitan has no value here."""

    reason: str
    has_effect: bool = True
    """Whether it changes something in torchtitan: its value is not the default, and what it belongs to is on."""


Translated = dict[str, Any] | LeftOut
"""Values of our options by full name, or the reason why there are none."""


def translate(name: str, value: Any, file: TorchtitanFile) -> Translated:
    """Translate one option of torchtitan, which ``file`` sets to ``value``."""
    option = find_option(name)
    if option is None:
        own = name in option_types(command_line_type())
        return {name: value} if own else LeftOut("neither torchtitan nor torchtrain has this option")
    if name in FILTERS:
        return float8_filter(name, value, file)
    if not option.here:
        return LeftOut(option.note, has_effect=value not in (option.default_before(file.day), *option.same))
    if option.here == "optimizer.implementation" and value == "fused_opt_states_bf16":
        return {option.here: "fused", "optimizer.state_dtype": "bfloat16"}
    if name == "training.steps" and value == -1:  # until 2024-02
        return LeftOut("a run has a number of steps, by default 10000")
    if option.here == "optimizer.weight_decay":  # torchtitan also decays norms
        return {option.here: value, NORM_DECAY: value}
    if option.here == "job.import":  # torchtitan has one module
        return {option.here: [value] if value else []}
    if option.here in TRANSLATIONS:
        return TRANSLATIONS[option.here](name, value, file)
    if isinstance(value, str | bool):
        value = VALUES.get(option.here, {}).get(value, value)
    return {option.here: value}


def flavor(_name: str, value: Any, file: TorchtitanFile) -> Translated:
    """The size of the model. Later sizes mask documents if their names end in one of ``MASKED``."""
    if not isinstance(value, str):
        return {"model.flavor": value}
    family = str(file.values.get("model.name", "llama3"))
    family = VALUES["model.name"].get(family, family)
    ending = next((end for end in MASKED if value.endswith(end)), "")
    size = value.removesuffix(ending)
    ours = {"model.flavor": "7B" if family == "llama2" and (family, size) in SIZES else size}
    ours |= {f"model.shape.{key}": number for key, number in sizes_of(family, size, file.day).items()}
    return ours | ({"data.document_mask": True} if ending else {})


def sizes_of(family: str, size: str, day: str) -> dict[str, Any]:
    """Overrides of the flavor that make the model what it was in torchtitan before ``day``."""
    if family not in ("llama2", "llama3"):
        return SIZES.get((family, size), {})
    sizes = dict(SIZES.get((family, size), {}))
    if size == "debugmodel":
        layers = next((layers for until, layers in DEBUGMODEL_LAYERS if day <= until), 6)
        sizes |= {"n_layers": layers, "n_heads": 16, "n_kv_heads": 16}
    if family == "llama3" and day <= ROPE_SCALING_SINCE:
        sizes["rope_scaling.type"] = "none"
    return sizes


def dataset(name: str, value: Any, file: TorchtitanFile) -> Translated:
    """A dataset that torchtitan knows by a name of its own, unless the file has a path."""
    section = "validation" if name.startswith("valid") else "data"
    if file.values.get(f"{name}_path"):
        return LeftOut(f"{section}.path has the data", has_effect=False)
    known = value.lower() if isinstance(value, str) else ""
    if known in SMALL_DATASETS:
        return LeftOut("a file of torchtitan's repository", has_effect=False)
    return {f"{section}.{key}": text for key, text in DATASETS.get(known, {"name": value}).items()}


def converters(value: Any) -> list[Any] | None:
    """A list of converters, which is a text with commas in older files; None if it is neither."""
    if isinstance(value, str):
        return [name for name in value.split(",") if name]
    return value if isinstance(value, list) else None


def float8(name: str, value: Any, file: TorchtitanFile) -> Translated:
    """Float8 of linear layers, which a flag or a converter turns on, and its recipe."""
    recipe = next(filter(None, map(file.values.get, RECIPES)), "tensorwise")
    if name in RECIPES:
        off = LeftOut("no converter turns float8 on, and torchtitan ignores its recipe", has_effect=False)
        return {"float8.recipe": value} if file.has_float8 else off
    if name in FLOAT8_FLAGS:
        known = {True: recipe, False: "none", "": "none", "dynamic": recipe}
        return {"float8.recipe": known.get(value, value)}
    names = converters(value)
    others = [str(one) for one in names or [value] if one not in FLOAT8]
    if names is None or others:
        return LeftOut(f"set float8.recipe by hand: {', '.join(others)} has no counterpart in torchtrain")
    return {"float8.recipe": recipe if names else "none"}


def float8_filter(name: str, value: Any, file: TorchtitanFile) -> Translated:
    """The linear layers that stay in bfloat16: here always the output layer, and those that are slow in float8."""
    names = converters(value) or []
    if "auto_filter_small_kn" in names:
        return {"float8.filter_small_layers": True}
    return LeftOut(torchtitan_options()[name].note, has_effect=file.has_float8 and names != ["output"])


def layers_per_stage(name: str, value: Any, file: TorchtitanFile) -> Translated:
    """The number of layers of each stage, which torchtitan has as names of modules, or as one number."""
    if isinstance(value, list) and value and all(isinstance(part, list) for part in value):
        value = [sum(str(module).startswith("layers.") for module in part) for part in value]
    option = torchtitan_options()[name]
    if value == option.default_before(file.day):
        return LeftOut("an even split is torchtrain's default, too", has_effect=False)
    if name.endswith("split_points") or not (isinstance(value, list) and all(type(n) is int and n > 0 for n in value)):
        return LeftOut(f"set {LAYERS} by hand, {option.note}")
    return {LAYERS: value}


def microbatches(name: str, value: Any, file: TorchtitanFile) -> Translated:
    """The number of microbatches, which is their size in later versions of torchtitan."""
    if not name.endswith("microbatch_size"):
        return {"parallelism.pipeline_parallel_microbatches": value}
    sequences = file.get("training.local_batch_size", "training.batch_size")
    if not (type(sequences) is int and type(value) is int and value > 0 and sequences % value == 0):
        option = "parallelism.pipeline_parallel_microbatches"
        return LeftOut(f"set {option} by hand: {value!r} must divide the batch size {sequences!r}")
    return {"parallelism.pipeline_parallel_microbatches": sequences // value}


def batch_size(name: str, value: Any, file: TorchtitanFile) -> Translated:
    """The batch size in sequences, which is in tokens in torchtitan's newest versions."""
    here = torchtitan_options()[name].here
    if not name.startswith("training.num_tokens") or value == -1:
        return {here: value}
    seq_len = file.get("training.max_context_length")
    if not (type(seq_len) is int and type(value) is int and seq_len > 0 and value % seq_len == 0):
        return LeftOut(f"set {here} by hand: {value!r} tokens must be a multiple of the context of {seq_len!r}")
    return {here: value // seq_len}


def interval(name: str, value: Any, file: TorchtitanFile) -> Translated:
    """The checkpointing interval, in steps or seconds."""
    unit = file.values.get(f"{name}_type", "steps")
    is_time = unit == "seconds" and type(value) in (int, float)
    return {"checkpoint.interval_minutes": value / 60} if is_time else {"checkpoint.interval": value}


def replicas(name: str, value: Any, file: TorchtitanFile) -> Translated:
    """Options of replicas, which torchtitan ignores unless fault tolerance is on."""
    if not file.values.get("fault_tolerance.enable"):
        return LeftOut("fault_tolerance.enable is off, and torchtitan ignores its options", has_effect=False)
    here = torchtitan_options()[name].here
    if here == "replicas.collective_timeout_seconds" and type(value) is int:
        value = max(1, math.ceil(value / 1000))
    return {here: str(value) if here == "replicas.id" else value}


TRANSLATIONS: dict[str, Callable[[str, Any, TorchtitanFile], Translated]] = {
    "checkpoint.interval": interval,
    "data.name": dataset,
    "validation.name": dataset,
    "float8.recipe": float8,
    "model.flavor": flavor,
    LAYERS: layers_per_stage,
    "parallelism.pipeline_parallel_microbatches": microbatches,
    "replicas.collective_timeout_seconds": replicas,
    "replicas.id": replicas,
    "replicas.min": replicas,
    "training.global_batch_size": batch_size,
    "training.local_batch_size": batch_size,
}
