"""What earlier starts of a run have saved: the config in a checkpoint."""

import contextlib
from functools import cached_property

from torchtrain.checkpoint.format import CONFIG, read_verified
from torchtrain.checkpoint.resume_compatibility import options_in
from torchtrain.checkpoint.storage import StoredCheckpoint, checkpoint_storage
from torchtrain.config.parse import from_text
from torchtrain.config.schema import JobConfig
from torchtrain.errors import CheckpointError, ConfigError, DamagedError
from torchtrain.files import printable


def read_config_text(checkpoint: StoredCheckpoint) -> str:
    """Read the config of the run that wrote ``checkpoint``, as TOML.

    Raises:
        DamagedError: the config is missing or damaged.
    """
    content = read_verified(checkpoint, CONFIG)
    try:
        text = content.decode()
        options_in(text)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DamagedError(
            f"{checkpoint.path_of(CONFIG)} is not the config of a run ({printable(str(error))})"
        ) from error
    return text


def read_config(checkpoint: StoredCheckpoint, *, only_model: bool = False) -> JobConfig:
    """As ``read_config_text``, parsed, without the sections of plugins that are not installed.

    ``only_model``: see ``from_text``. Also raises ConfigError, if this version rejects an option.
    """
    return from_text(
        read_config_text(checkpoint), checkpoint.path_of(CONFIG), only_model=only_model, only_known=not only_model
    )


class SavedRun:
    """The checkpoints of the run with ``config``, as they are when it starts, each fact read once when it is needed.

    It is read before process-group initialization, and before the writer lease is acquired: ``find_resume_point``
    selects the checkpoint to resume from, and compares the config of that one.
    """

    def __init__(self, config: JobConfig) -> None:
        self.storage = checkpoint_storage(config)
        self.checkpoint = config.checkpoint

    @cached_property
    def exists(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return self.checkpoint.enable and bool(self.storage.steps())

    @cached_property
    def config(self) -> JobConfig | None:
        """The config of the newest checkpoint, or of the one of ``checkpoint.load_step`` unless that is -1.

        A checkpoint without a valid config is skipped. None if there is none.
        """
        steps = self.storage.steps() if self.exists else ()
        for step in reversed(steps):
            if self.checkpoint.load_step in (-1, step):
                with contextlib.suppress(ConfigError, CheckpointError):
                    return read_config(self.storage.open(step))
        return None
