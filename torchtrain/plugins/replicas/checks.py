"""Check the options of a run of replicas before any work starts."""

import socket
from contextlib import suppress
from importlib.util import find_spec

from torchtrain.config.schema import JobConfig, option_of_plugin
from torchtrain.errors import ConfigError, StorageError
from torchtrain.optional_packages import install_command
from torchtrain.plugins.replicas.options import ReplicasConfig

STREAMED = ("remote_files", "hub")


def check_config(config: JobConfig, replicas: ReplicasConfig) -> None:
    """Raise ConfigError if replicas cannot train with ``config``, or a package is missing."""
    if find_spec("torchft") is None:
        raise ConfigError(f"replicas.lighthouse needs the package torchft: {install_command('elastic')}")
    if not replicas.own_id:
        raise ConfigError(
            "replicas.id is empty, and neither SLURM_ARRAY_TASK_ID nor JOB_COMPLETION_INDEX is set: give each replica "
            "a name of its own, such as --replicas.id 0"
        )
    if not all(character.isalnum() or character in "-_." for character in replicas.own_id) or replicas.own_id[0] == ".":
        raise ConfigError(f"replicas.id = {replicas.own_id!r} names a folder: take letters, digits, '-' and '_'")
    if replicas.host:
        check_host(replicas.host)
    if config.training.sums != "exact" and not replicas.allow_fast_sums:
        raise ConfigError(
            f"training.sums = {config.training.sums!r} rounds sums in an order that depends on the living replicas: "
            "with replicas.lighthouse set training.sums = 'exact', or replicas.allow_fast_sums = true"
        )
    for is_set, option in (
        (any(source.source_type in STREAMED for source in config.data.all), "streamed data (by URL, or from the hub)"),
        (config.data.when_exhausted != "repeat", "data.when_exhausted = 'stop'"),
        (config.training.enable_cpu_offload, "training.enable_cpu_offload"),
        (option_of_plugin(config, "comparison.fingerprint_steps"), "comparison.fingerprint_steps"),
    ):
        if is_set:
            raise ConfigError(
                f"{option} cannot be combined with replicas.lighthouse: change it, or run one replica without a "
                "lighthouse (docs/replicas.md)"
            )
    if config.training.global_batch_size == -1:
        raise ConfigError(
            "training.global_batch_size = -1 depends on the number of ranks: with replicas.lighthouse give the number "
            "of rows that all replicas have together"
        )
    collective, quorum = replicas.collective_timeout_seconds, replicas.quorum_timeout_seconds
    step = config.comm.train_timeout_seconds
    if not collective < step:
        raise ConfigError(
            f"replicas.collective_timeout_seconds = {collective} must be below comm.train_timeout_seconds = {step}: a "
            "replica must notice that another one hangs before its own ranks count as hanging"
        )
    if not collective < quorum:
        raise ConfigError(
            f"replicas.quorum_timeout_seconds = {quorum} must be above replicas.collective_timeout_seconds = "
            f"{collective}: the others may have to notice first that a replica hangs"
        )


def check_host(host: str) -> None:
    """Raise ConfigError unless ``host`` is this machine: its state and its sums are served at that address.

    Raises:
        StorageError: the name server does not answer, and may later.
    """
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        kind = StorageError if error.errno == socket.EAI_AGAIN else ConfigError
        raise kind(
            f"replicas.host = {host!r} is not known on the machine {socket.gethostname()} ({error.strerror}): give the "
            "address by which other machines reach it"
        ) from error
    for family, _, _, _, address in addresses:
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as own:
            own.bind(address)
            return
    raise ConfigError(
        f"replicas.host = {host!r} is not an address of the machine {socket.gethostname()}: give each machine of a "
        "replica its own one, by which other machines reach it"
    )
