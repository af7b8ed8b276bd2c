"""Every error that `trainer` raises on purpose.

    TrainerError
    ├── DatasetUnavailable      the digits are not on disk and cannot be downloaded
    ├── InvalidDataset          a dataset file is broken: which file, what was found
    ├── DeviceUnavailable       the device does not exist, or does not support the settings
    ├── UnwritableFolder        the result cannot be written where it should be
    ├── TrainingDiverged        the loss is NaN, infinite or huge: at which step, what to try
    ├── InvalidCheckpoint       a checkpoint that cannot be resumed from
    ├── InvalidImport           weights of another library do not fit: which tensor, which shape
    ├── InvalidRun              a folder that holds no run that ended with a result
    └── ExportRefused           the exported network does not compute what was trained

A message says what happened, what was found, what was expected and what to do next.
"""


class TrainerError(Exception):
    """The root of the tree."""


class DatasetUnavailable(TrainerError):
    """The dataset is not on disk and could not be downloaded."""


class InvalidDataset(TrainerError):
    """A dataset file is invalid; the message starts with its path."""


class DeviceUnavailable(TrainerError):
    """The device does not exist, or does not support the settings."""


class UnwritableFolder(TrainerError):
    """The result cannot be written where it should be."""


class TrainingDiverged(TrainerError):
    """The loss is NaN, infinite or huge."""


class InvalidCheckpoint(TrainerError):
    """The checkpoint cannot be resumed from; the message starts with its path."""


class InvalidImport(TrainerError):
    """Weights made elsewhere cannot be read or do not fit; the message names the tensor."""


class InvalidRun(TrainerError):
    """A folder is not that of a run with a result; the message starts with its path."""


class ExportRefused(TrainerError):
    """The served network would differ from the trained one, so no file was written."""
