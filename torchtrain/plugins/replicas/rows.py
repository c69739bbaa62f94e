"""The rows of the global batch that each rank of each replica computes."""

from torchtrain.errors import ConfigError


def rows_of(
    replica: int, replicas: int, rank: int, ranks: int, *, global_batch_size: int, local_batch_size: int
) -> range:
    """The rows of one rank: whole microbatches, divided as evenly as possible among replicas.

    Args:
        replica, replicas: the number of the replica among the living ones, from 0, and how many there are.
        rank, ranks: the data-parallel rank in its replica, and the data-parallel degree there.
        global_batch_size: a multiple of ``local_batch_size * ranks``.

    Raises:
        ConfigError: there are more replicas than microbatches of a replica, and this is one too many.
    """
    per_round = local_batch_size * ranks  # rows that a replica computes at once
    rounds = global_batch_size // per_round
    if replica >= rounds:
        raise ConfigError(
            f"training.global_batch_size = {global_batch_size} has rows for at most {rounds} replicas of {ranks} x "
            f"{local_batch_size} rows (training.local_batch_size), and {replicas} replicas are there: start fewer, or "
            "lower training.local_batch_size"
        )
    replicas = min(replicas, rounds)
    first, last = rounds * replica // replicas, rounds * (replica + 1) // replicas
    per_rank = (last - first) * local_batch_size
    start = first * per_round + rank * per_rank
    return range(start, start + per_rank)
