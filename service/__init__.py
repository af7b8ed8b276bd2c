"""The server: digits in over HTTP and gRPC, batched inference, probabilities out."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "lenet-serve"


def distribution_version() -> str:
    """The installed version of this distribution, "0" where it is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0"
