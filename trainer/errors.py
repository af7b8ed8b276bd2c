"""Every error that `trainer` raises on purpose.

    TrainerError
    ├── DatasetUnavailable      the digits are neither on disk nor to be had from a mirror
    ├── InvalidDataset          a file that is not what it should be: which file, what was found
    ├── DeviceUnavailable       the device is not here, or cannot do what is asked of it
    ├── TrainingDiverged        the loss is no longer a number: which step and layer, what to try
    ├── InvalidCheckpoint       a checkpoint that cannot be resumed from
    └── ExportRefused           the exported network does not compute what was trained

A message says what happened, what was found, what was expected and what to do next.
"""


class TrainerError(Exception):
    """The root of the tree; catching it catches what `trainer` foresaw and nothing else."""


class DatasetUnavailable(TrainerError):
    """The dataset is not on disk and could not be downloaded."""


class InvalidDataset(TrainerError):
    """A dataset file is refused; the message starts with its path."""


class DeviceUnavailable(TrainerError):
    """The device is not here, or cannot do what is asked of it."""


class TrainingDiverged(TrainerError):
    """The loss became NaN or infinite."""


class InvalidCheckpoint(TrainerError):
    """The checkpoint is refused; the message starts with its path."""


class ExportRefused(TrainerError):
    """What would be served differs from what was trained, so no file was written."""
