"""The section [prepare]."""

from dataclasses import dataclass

from torchtrain.config.section import CountOrZero, Section


@dataclass(frozen=True)
class PrepareConfig(Section, name="prepare"):
    """Tokenize data before training. Only for python -m torchtrain.prepare, which reads the sources of [data]."""

    changes_run = False

    output: str = ""
    """Folder for the tokens, by a path or a URL such as s3://bucket/folder; with several sources, its folders
    0, 1, ..."""
    processes: CountOrZero = 0
    """Number of worker processes that tokenize. 0: one per core of this process; the cores of a node are divided among
    the processes that torchrun or srun starts on it."""
    verify: bool = False
    """Only compare the hashes of all files in the output folder with those in its manifest."""
