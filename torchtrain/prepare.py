"""Tokenize data before training: ``python -m torchtrain.prepare --job.config_file F --prepare.output FOLDER``.

The command tokenizes the sources in ``[data]`` with the tokenizer of ``[model]``, so pass the config of the training
run. Its own options are in the section "prepare". Under torchrun, srun or as a SLURM job array, each process writes its
share of the output, on any number of machines. Without it, the first run tokenizes its text into a cache.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count, takewhile
from pathlib import Path

from torchtrain.cli import command, interrupted_by_signals, run_and_exit
from torchtrain.config.parse import parse
from torchtrain.config.prepare_options import PrepareConfig
from torchtrain.config.schema import JobConfig, section_of
from torchtrain.datasets.options import DataConfig
from torchtrain.environment import cores_of_process, process_share
from torchtrain.errors import ConfigError
from torchtrain.files import local_path, require_folder, with_retries
from torchtrain.logging import logger


@command
def main(argv: Sequence[str]) -> int:
    """Tokenize the data, or verify tokenized data; return the exit code of the process."""
    try:
        with interrupted_by_signals():
            return run(parse(argv, "torchtrain.prepare", __doc__))
    except KeyboardInterrupt:
        logger.info("run the same command again to resume")
        raise


def run(config: JobConfig) -> int:
    """Tokenize every source of ``config.data``: a single source into the output folder, several into its subfolders
    0, 1, ...

    Raises:
        ConfigError: ``prepare.output`` is empty, or inside a folder of the data.
    """
    # Imported here and below, so that --help and rejected options do not import them.
    from torchtrain.datasets.token_folder import is_token_folder, open_folder, verify

    options = section_of(config, PrepareConfig)
    if not options.output:
        raise ConfigError("prepare.output must name the folder that the tokens go to; it is empty")
    output = options.output.rstrip("/") or "/"
    several = len(config.data.sources)
    folders = [f"{output}/{number}" for number in range(several)] if several else [output]
    if options.verify:
        if not several and not is_token_folder(output, "prepare.output"):  # those of a config that is not given
            numbered = (f"{output}/{number}" for number in count())
            folders = list(takewhile(lambda folder: open_folder(folder, "prepare.output").sizes(), numbered)) or folders
        for folder in folders:
            verified = verify(open_folder(folder, "prepare.output"), folder)
            logger.info("%s: all %d shards are as they were written", folder, len(verified.shards))
        return 0
    require_output(output, options.output, config.data)
    tokenize_sources(config, folders, options.processes)
    return 0


def require_output(output: str, given: str, data: DataConfig) -> None:
    """Raise an error if ``output`` cannot be written, or is inside a folder of the data. ``given``: as it is given."""
    output_path = local_path(output)
    for path in (path for source in data.all for path in source.paths):
        if with_retries(partial(_is_inside, output, output_path, path, local_path(path)), path):
            raise ConfigError(
                f"prepare.output = {given!r} is inside the data folder {path!r}, so that its files "
                "would become part of the data; name a folder elsewhere"
            )
    if output_path is not None:
        require_folder(output_path, f"prepare.output = {given!r}")


def tokenize_sources(config: JobConfig, folders: Sequence[str], processes: int) -> None:
    """Tokenize this process's share of each source of ``config.data`` into one of ``folders``."""
    from torchtrain.config.registry import DATA_SOURCES
    from torchtrain.datasets.data_source import SourceContext
    from torchtrain.datasets.token_folder import LocalFolder, open_folder
    from torchtrain.datasets.tokenize_text import alone, log_skipped, tokenize
    from torchtrain.datasets.tokenizers import load_tokenizer

    rank, world_size = process_share()
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.hf_folder)
    # All sources are opened and checked before hours of work on the first.
    inputs = []
    for number, source in enumerate(config.data.all):
        key = f"data.sources[{number}]" if config.data.sources else "data"
        context = SourceContext(key, tokenizer, verify_bytes=config.data.verify_gib * 2**30, plugins=config.plugins)
        inputs.append(with_retries(partial(DATA_SOURCES[source.source_type].open_text, source, context), key))
    for text, folder in zip(inputs, folders, strict=True):
        opened = open_folder(folder, "prepare.output")
        with ExitStack() as stack:
            if isinstance(opened, LocalFolder):
                stack.enter_context(alone(opened.path, is_shared=world_size > 1))
            workers = processes or cores_of_process()
            manifest = tokenize(text, tokenizer, opened, workers, rank=rank, world_size=world_size)
        if manifest is None:
            logger.info(
                "%s: this process has written its share. The process that finishes last writes the manifest; if one "
                "was killed, run the same command again",
                folder,
            )
            continue
        shards = manifest.shards
        logger.setLevel(logging.INFO)  # the process that finishes last reports the result, whatever its rank
        log_skipped(manifest)
        logger.info(
            "%s: %s tokens of %s documents (%s bytes of text); to train on it: --data.path %s",
            folder,
            *(f"{sum(getattr(shard, field) for shard in shards):,}" for field in ("tokens", "documents", "bytes")),
            folder,
        )


def _is_inside(output: str, output_path: Path | None, folder: str, folder_path: Path | None) -> bool:
    """Whether ``output`` is in the data folder ``folder``. The paths are None for URLs that are not of local files."""
    if output_path is not None and folder_path is not None:
        return folder_path.is_dir() and output_path.resolve().is_relative_to(folder_path.resolve())
    return f"{output}/".startswith(f"{folder.rstrip('/')}/")


if __name__ == "__main__":
    run_and_exit(main)
