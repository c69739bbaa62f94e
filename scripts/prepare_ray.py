"""Run torchtrain.prepare on a Ray cluster: python scripts/prepare_ray.py --tasks 64 -- OPTIONS OF TORCHTRAIN.PREPARE

Each Ray task starts torchtrain.prepare as one of ``--tasks`` processes, so that it writes its share of the shards; the
task that finishes last writes the manifest. A final task starts torchtrain.prepare as a single process: it finds the
manifest, or completes what is missing. The output must be a folder that all nodes share, or a URL. Ray restarts tasks
of nodes that fail; to resume after an error, run the same command again.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

import ray

RETRIES = 3


class PrepareError(RuntimeError):
    """A process of torchtrain.prepare has failed."""


def positive(text: str) -> int:
    """A number of at least 1, for argparse."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def run_share(rank: int, tasks: int, options: Sequence[str]) -> None:
    """Run process ``rank`` of ``tasks``."""
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(tasks), "LOG_RANK": str(rank)}
    command = [sys.executable, "-m", "torchtrain.prepare", *options]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        raise PrepareError(f"torchtrain.prepare of task {rank} ended with exit code {code}; its log has the reason")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks", type=positive, required=True, help="number of tasks; more of them divide the work finer"
    )
    parser.add_argument("--cpus", type=positive, default=1, help="cores, and worker processes, of each task")
    parser.add_argument("options", nargs="*", help="options of torchtrain.prepare, after --")
    parsed = parser.parse_args(arguments)
    options = [*parsed.options, "--prepare.processes", str(parsed.cpus)]
    ray.init(ignore_reinit_error=True)
    # A node that fails is retried by max_retries; an error of prepare itself, such as an invalid path, is not.
    task = ray.remote(num_cpus=parsed.cpus, max_retries=RETRIES)(run_share)
    ray.get([task.remote(rank, parsed.tasks, options) for rank in range(parsed.tasks)])
    ray.get(task.remote(0, 1, options))


if __name__ == "__main__":
    main()
