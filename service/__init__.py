"""The service: HTTP and gRPC in front of dynamically batched inference."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "lenet-serve"


def distribution_version() -> str:
    """The installed version, "0" if the distribution is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0"
