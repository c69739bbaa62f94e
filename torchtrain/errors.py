"""User-fixable errors, each of which ends a command with one message, an exit code, and no traceback.

TorchtrainError             exit code
├── ConfigError         2   an invalid key, value or combination of values in the config
├── TokenizerError      2   a tokenizer that is missing or invalid
├── DataError           2   a data source that is missing, empty, or not what the config says
├── CheckpointError     2   a checkpoint that is missing, damaged, or of another run
│   ├── DamagedError    2       its files are not as they were written; a resuming run takes an older checkpoint
│   └── SupersededError 2       a newer start of the run saves checkpoints in the same folder
├── FaultError          2   a run that cannot continue, such as one whose loss is not finite
├── HardwareError      70   a rank that computes wrong
├── StorageError       74   a file system or a network that does not answer; the same command may succeed later
│   └── HangError      74       another rank that does not answer
└── StoppedError       75   a request to stop, and an operation that exceeded the grace period

Each message states the rule, the value that violates it, and how to fix it.
"""

import os


class TorchtrainError(Exception):
    """Base class of errors whose cause is outside of the program."""

    exit_code = 2
    """Exit code of the command, as documented in docs/faults.md."""
    of_machine = False
    """Whether other machines may not have the error, even while the config is read, which is the same on all."""


class ConfigError(TorchtrainError):
    """An invalid key, value, or combination of values in the config."""


class TokenizerError(TorchtrainError):
    """A tokenizer file that is missing, unreadable, or of an unknown format."""


class DataError(TorchtrainError):
    """A data source that is missing, empty, or does not contain what the config says."""


class CheckpointError(TorchtrainError):
    """A checkpoint that is missing, damaged, or of another run."""


class DamagedError(CheckpointError):
    """A checkpoint whose files are missing, have changed since they were written, or have an invalid format."""


class SupersededError(CheckpointError):
    """A newer start of the run saves checkpoints in the same folder."""


class FaultError(TorchtrainError):
    """A run that cannot continue, for example after too many bad steps (``faults.max_bad_steps``)."""


class HardwareError(TorchtrainError):
    """A rank that computes wrong. The message names its host and device; the run must not continue there."""

    exit_code = 70  # sysexits.h: EX_SOFTWARE, an internal error


class StorageError(TorchtrainError):
    """A file system or a network that does not answer, or returns wrong data. Nothing was changed."""

    exit_code = 74  # sysexits.h: EX_IOERR


class HangError(StorageError):
    """A rank that hangs, so that a collective of the others has timed out. On all ranks but one without a message."""


class StoppedError(TorchtrainError):
    """The run was asked to stop, and an operation that it waits for exceeds the grace period."""

    exit_code = 75  # sysexits.h: EX_TEMPFAIL

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        restarts, most = (int(os.environ.get(f"TORCHELASTIC_{key}", "0")) for key in ("RESTART_COUNT", "MAX_RESTARTS"))
        if restarts < most:
            self.exit_code = 0  # torchrun would treat any other code as a crash, and restart the run immediately
