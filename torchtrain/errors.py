"""Errors that end a command with one message and without a traceback.

TorchtrainError             exit code
├── ConfigError         2   a key, a value or a combination of values
├── TokenizerError      2   a tokenizer that is missing or not one
├── DataError           2   a source that is missing, empty, or not what the config says
├── CheckpointError     2   a checkpoint that is missing, damaged, or of another run
│   ├── DamagedError    2       its files are not as they were written: an older one is taken
│   └── SupersededError 2       a newer incarnation of the run saves in the same folder
├── FaultError          2   a run that cannot go on, such as one whose loss is not finite
├── StorageError       74   a file system or a network that does not answer: later, the same command may work
└── StoppedError       75   asked to stop, and what there was to wait for did not end in time

Every message gives the rule, the value and the way out.
"""

import os


class TorchtrainError(Exception):
    """Base of all errors whose cause is outside of the program."""

    exit_code = 2
    """The exit code of the command; docs/faults.md has the table."""


class ConfigError(TorchtrainError):
    """A config key, value, or combination of values that cannot work."""


class TokenizerError(TorchtrainError):
    """A tokenizer file that is missing, unreadable, or of no known kind."""


class DataError(TorchtrainError):
    """A data source that is missing, empty, or not what the config says it is."""


class CheckpointError(TorchtrainError):
    """A checkpoint that is missing, damaged, or of another run."""


class DamagedError(CheckpointError):
    """A checkpoint whose files are missing, changed since they were written, or not of its format."""


class SupersededError(CheckpointError):
    """A newer incarnation of the run saves in the same folder."""


class FaultError(TorchtrainError):
    """A run that must not go on, as after bad numbers."""


class StorageError(TorchtrainError):
    """A file system or a network that does not answer, or not with what lies there. Nothing was changed."""

    exit_code = 74  # sysexits.h: EX_IOERR


class StoppedError(TorchtrainError):
    """The run was asked to stop, and what it waits for takes longer than it may."""

    exit_code = 75  # sysexits.h: EX_TEMPFAIL

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        restarts, most = (int(os.environ.get(f"TORCHELASTIC_{key}", "0")) for key in ("RESTART_COUNT", "MAX_RESTARTS"))
        if restarts < most:
            self.exit_code = 0  # torchrun would take any other code for a crash, and start the run again at once
