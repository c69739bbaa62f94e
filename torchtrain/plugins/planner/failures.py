"""Expected duration of a run with failures, and the best interval of checkpoints (Daly 2006).

J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
Systems 22 (2006), https://doi.org/10.1016/j.future.2004.11.016. Its first-order form is that of J. W. Young,
Communications of the ACM 17 (1974), https://doi.org/10.1145/361147.361115. Failures are a Poisson process.
"""

import math

LLAMA3_GPU_MTBF_HOURS = 54 * 24 * 16384 / 419
"""Mean time between failures of one GPU with its share of machine and network: 419 unexpected interruptions in 54 days
on 16,384 GPUs (table 5 of https://arxiv.org/abs/2407.21783)."""


def best_interval(mtbf_seconds: float, save_seconds: float) -> float:
    """The time of training between two checkpoints, in seconds, for which the run is shortest.

    Args:
        mtbf_seconds: mean time between failures of the whole run.
        save_seconds: for how long training waits for a save.
    """
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = save_seconds / (2 * mtbf_seconds)
    return math.sqrt(2 * save_seconds * mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def expected_seconds(
    solve_seconds: float, interval_seconds: float, mtbf_seconds: float, save_seconds: float, restart_seconds: float
) -> float:
    """The expected duration of a run that takes ``solve_seconds`` without saves and failures."""
    lost = math.expm1((interval_seconds + save_seconds) / mtbf_seconds)
    return mtbf_seconds * math.exp(restart_seconds / mtbf_seconds) * lost * solve_seconds / interval_seconds


def expected_seconds_of_replicas(
    solve_seconds: float,
    interval_seconds: float,
    mtbf_seconds: float,
    save_seconds: float,
    restart_seconds: float,
    replicas: int,
    lost_seconds: float,
) -> float:
    """The expected duration of a run of ``replicas``, of which one dies at a time (plugin ``replicas``).

    After a death the others lose ``lost_seconds``, then train with a speed of (replicas - 1) / replicas until the dead
    one is back. That all are dead at once is not considered. ``interval_seconds`` is the time between checkpoints.
    """
    undisturbed = solve_seconds * (1 + save_seconds / interval_seconds)
    per_failure = lost_seconds + restart_seconds / replicas
    return undisturbed / (1 - min(per_failure / mtbf_seconds, 0.99))
