"""Load tasks of EleutherAI's lm-evaluation-harness, with the harness's own random numbers."""

import io
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import numpy as np
import torch

from torchtrain.errors import ConfigError
from torchtrain.plugins.evaluation.harness import task_data_error

SEEDS = (0, 1234, 1234)  # of random, NumPy and torch: the harness's own defaults


def load_tasks(tasks: Sequence[str], folder: str) -> Any:
    """The tasks of ``evaluation.tasks`` with their data, as the harness's ``simple_evaluate`` prepares them.

    ``folder``: ``evaluation.tasks_path``.
    """
    from lm_eval.tasks import TaskManager

    try:
        # Some tasks draw random numbers when they are loaded, such as the order of answers.
        with redirect_stderr(io.StringIO()), same_random_numbers(torch.device("cpu")):
            manager = TaskManager(include_path=folder or None)
            unknown = [task for task in tasks if task not in manager.all_tasks]
            if unknown:
                raise ConfigError(
                    f"evaluation.tasks: {', '.join(unknown)} are not tasks of lm-evaluation-harness; `lm-eval ls "
                    "tasks` lists all, and evaluation.tasks_path names a folder with tasks of your own"
                )
            loaded = manager.load(list(tasks))
    except OSError as error:  # of the hub, or a file of the data
        raise task_data_error(error, "evaluation.tasks") from None
    for name, task in loaded["tasks"].items():  # otherwise the harness rejects them at the first validation
        if getattr(task, "UNSAFE_CODE", False):
            raise ConfigError(
                f"evaluation.tasks: {name} is marked as unsafe, because it runs code that the model writes; score a "
                "checkpoint with torchtrain.evaluate --confirm_run_unsafe_code"
            )
        if getattr(task, "MULTIMODAL", False):
            raise ConfigError(f"evaluation.tasks: {name} has images or sound, and the model reads only text; remove it")
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return loaded


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Seed all random numbers as the harness does, and restore their states afterwards."""
    states = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        random.seed(SEEDS[0])
        np.random.seed(SEEDS[1])
        torch.manual_seed(SEEDS[2])
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
