"""Estimate the memory and speed of a training run without a GPU: ``python -m torchtrain.estimate``.

The command accepts every option of the trainer; its own options are in the section "estimate". It needs no GPU,
compiler, data or tokenizer file. Without a tokenizer file, the vocabulary size is that of the model flavor.
"""

import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchtrain.cli import command
from torchtrain.config.parse import parse, to_toml
from torchtrain.config.run_plan import plan_of
from torchtrain.config.schema import JobConfig, option_of_plugin, section_of
from torchtrain.errors import ConfigError
from torchtrain.files import require_file, require_picture, writing
from torchtrain.logging import wrapped
from torchtrain.plugins.planner.options import EstimateConfig

if TYPE_CHECKING:  # imports PyTorch
    from torchtrain.models.spec import DecoderConfig

SLOW_SECONDS = 60.0
"""CPU time of an estimate after which no others are made for advice: a deep pipeline can take minutes."""


@command
def main(argv: Sequence[str]) -> int:
    """Print the estimate, and return the exit code of the process."""
    return run(parse(argv, "torchtrain.estimate", __doc__))


def run(config: JobConfig) -> int:
    """Estimate the run of ``config``, or search for its fastest layout; return the exit code."""
    from torchtrain.checkpoint.weights import resolve_model_section
    from torchtrain.plugins.planner.advice import advice
    from torchtrain.plugins.planner.report import draw_memory, format_estimate, format_failures, format_recheck
    from torchtrain.plugins.planner.request import resolve_gpu, resolve_model_config, resolve_world_size
    from torchtrain.plugins.planner.summary import estimate

    if config.model.hf_folder:
        config = replace(config, model=resolve_model_section(config.model))
    options = section_of(config, EstimateConfig)
    if options.replicas and not (options.mtbf_hours or options.node_mtbf_hours):
        raise ConfigError("estimate.replicas compares runs with failures: set estimate.mtbf_hours, such as 50700")
    if options.replicas and resolve_world_size(config) % options.replicas:
        raise ConfigError(
            f"estimate.replicas = {options.replicas} must divide the number of GPUs, estimate.world_size = "
            f"{resolve_world_size(config)}"
        )
    if plan_of(config).has_stages:
        return estimate_stages(config)
    if options.search:
        return run_search(config)
    if options.picture:
        require_picture(options.picture, "estimate.picture")
    model_config, gpu = resolve_model_config(config), resolve_gpu(config)
    started = time.process_time()
    result = estimate(config, model_config, gpu)
    is_quick = time.process_time() - started < SLOW_SECONDS
    sys.stdout.write((json.dumps(result.as_dict(), indent=1) if options.json else format_estimate(result)) + "\n")
    sys.stdout.flush()
    line = advice(config, result, model_config, gpu) if is_quick and not options.json else ""
    if line:
        print_wrapped(f"\n{line}")
    if (options.mtbf_hours or options.node_mtbf_hours) and not options.json:
        print_wrapped(format_failures(result.days, result.step_seconds, result.world_size, options))
    interval = option_of_plugin(config, "recheck.interval")
    if interval and result.degrees.batch > 1 and not options.json:
        rows = result.global_tokens // config.training.seq_len // result.degrees.batch
        print_wrapped(format_recheck(interval, rows // config.training.local_batch_size))
    if options.picture:
        with writing(options.picture, "estimate.picture"):
            draw_memory(result, options.picture)
    return 0


def print_wrapped(text: str) -> None:
    """Print ``text``; lines that are longer than the terminal break between words."""
    width = shutil.get_terminal_size().columns
    sys.stdout.write("".join(f"{wrapped(line, width)}\n" for line in text.split("\n")))


def estimate_stages(config: JobConfig) -> int:
    """Print an estimate of each stage of a run, and of the whole run, and return 0.

    Raises:
        ConfigError: stages are invalid, or an option describes only a run without stages.
    """
    from torchtrain.parallelisms.resolve import resolve_layout
    from torchtrain.plugins.planner.report import format_failures, format_stages, total_days
    from torchtrain.plugins.planner.request import resolve_gpu, resolve_model_config, resolve_world_size
    from torchtrain.plugins.planner.summary import estimate

    options = section_of(config, EstimateConfig)
    if options.search or options.picture:
        raise ConfigError(
            "estimate.search and estimate.picture describe one layout, so they do not go with stages; estimate "
            "a stage by a config without [[stages]] that has its options"
        )

    def resolve_one(own: JobConfig) -> "tuple[JobConfig, DecoderConfig]":
        model_config = resolve_model_config(own)
        return resolve_layout(own, model_config, resolve_world_size(own))[0], model_config

    results, before = [], 0
    for own in plan_of(config).resolve(resolve_one):
        length = replace(own, training=replace(own.training, steps=own.training.steps - before))
        results.append((own, estimate(length, resolve_model_config(own), resolve_gpu(own))))
        before = own.training.steps
    if options.json:
        entries = [{"stage": own.job.stage, **result.as_dict()} for own, result in results]
        sys.stdout.write(json.dumps({"stages": entries, "days": total_days(results)}, indent=1) + "\n")
        return 0
    sys.stdout.write(format_stages(results) + "\n")
    if options.mtbf_hours or options.node_mtbf_hours:
        _, main = max(results, key=lambda result: result[1].days)
        print_wrapped(format_failures(total_days(results), main.step_seconds, main.world_size, options))
    return 0


def run_search(config: JobConfig) -> int:
    """Print the ten fastest layouts that fit, write the fastest to a TOML file, and return 0; after Ctrl-C, 130.

    Raises:
        ConfigError: an option does not go with a search, or no layout fits.
    """
    from torchtrain.plugins.planner import search

    if section_of(config, EstimateConfig).json or section_of(config, EstimateConfig).picture:
        raise ConfigError(
            "estimate.json and estimate.picture describe one layout, so they cannot be combined with estimate.search; "
            "run the search first, then estimate the layout that it writes"
        )
    path = section_of(config, EstimateConfig).output or str(Path(config.job.dump_folder) / "layout.toml")
    found = search.search(config, lambda: require_file(path, "estimate.output"))
    print_wrapped(found.table)
    with writing(path, "estimate.output"):
        Path(path).write_text(to_toml(found.best), encoding="utf-8")
    sys.stdout.write(f"wrote the first layout as a config for the trainer: {path}\n")
    return 0 if found.is_complete else 128 + signal.SIGINT
