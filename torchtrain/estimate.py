"""What a run needs and how fast it goes, before a GPU is paid for: ``python -m torchtrain.estimate ...``.

Takes every option of the trainer; its own are under "estimate". Needs no GPU, no compiler, no data, and no tokenizer:
without its file the vocabulary is the flavor's.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchtrain.cli import command, run_and_exit
from torchtrain.config.parse import parse, to_toml
from torchtrain.config.schema import JobConfig
from torchtrain.errors import ConfigError
from torchtrain.files import require_file, require_picture, writing


@command
def main(argv: Sequence[str]) -> int:
    """Print the estimate; returns the exit code of the process."""
    return run(parse(argv, "torchtrain.estimate", __doc__))


def run(config: JobConfig) -> int:
    """Estimate the run of ``config``, or look for a better layout of it."""
    from torchtrain.models.model_config import resolve_model_section
    from torchtrain.planning.report import draw, table
    from torchtrain.planning.request import gpu_of, shape_of
    from torchtrain.planning.summary import estimate

    config, options = replace(config, model=resolve_model_section(config.model)), config.estimate
    if options.search:
        return find_layout(config)
    if options.picture:
        require_picture(options.picture, "estimate.picture")
    found = estimate(config, shape_of(config), gpu_of(config))
    sys.stdout.write((json.dumps(found.as_dict(), indent=1) if options.json else table(found)) + "\n")
    if options.picture:
        with writing(options.picture, "estimate.picture"):
            draw(found, options.picture)
    return 0


def find_layout(config: JobConfig) -> int:
    """Print the ten best layouts, and write the best as a TOML file; returns 0."""
    from torchtrain.planning import search

    if config.estimate.json or config.estimate.picture:
        raise ConfigError(
            "estimate.json and estimate.picture are of one layout, and estimate.search looks for one: give what it "
            "writes to another estimate"
        )
    path = config.estimate.output or str(Path(config.job.dump_folder) / "layout.toml")
    table, best = search.search(config, lambda: require_file(path, "estimate.output"))
    sys.stdout.write(table + "\n")
    with writing(path, "estimate.output"):
        Path(path).write_text(to_toml(best), encoding="utf-8")
    sys.stdout.write(f"the first of them, as a config for the trainer: {path}\n")
    return 0


if __name__ == "__main__":
    run_and_exit(main)
