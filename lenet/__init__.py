"""What the service and the trainer share: the network, its weight file and its backends."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "lenet-serve"


def distribution_version() -> str:
    """The installed version, "0" if the distribution is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0"
