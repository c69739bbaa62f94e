"""What a user can get wrong, as errors that a door prints in one message and without a traceback.

TorchtrainError
├── ConfigError         a key, a value or a combination of values
├── TokenizerError      a tokenizer that is missing or not one
├── DataError           a source that is missing, empty, or not what the config says
├── CheckpointError     a checkpoint that is missing, damaged, or of another run
│   └── SupersededError     a newer incarnation of the run saves in the same folder
└── FaultError          a run that cannot go on, such as one whose loss is not finite

Every message gives the rule, the value and the way out.
"""


class TorchtrainError(Exception):
    """Base of all errors that are the user's to mend."""


class ConfigError(TorchtrainError):
    """A config key, value, or combination of values that cannot work."""


class TokenizerError(TorchtrainError):
    """A tokenizer file that is missing, unreadable, or of no known kind."""


class DataError(TorchtrainError):
    """A data source that is missing, empty, or not what the config says it is."""


class CheckpointError(TorchtrainError):
    """A checkpoint that is missing, damaged, or of another run."""


class SupersededError(CheckpointError):
    """A newer incarnation of the run saves in the same folder."""


class FaultError(TorchtrainError):
    """A run that cannot go on as it is."""
