"""Shared by the service and the trainer: the network, its weight file and its backends."""

DISTRIBUTION = "lenet-serve"


def distribution_version() -> str:
    """The installed version, "0" if the distribution is not installed."""
    # Takes 14 ms, which a decoding process does not need.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0"


def distribution_commit() -> str:
    """The commit that an image or a wheel was built of, "" in a checkout."""
    from pathlib import Path

    file = Path(__file__).with_name("COMMIT")  # written by the build
    return file.read_text().strip() if file.is_file() else ""
