"""Train a network on MNIST and write the weight file that the service loads.

`python -m trainer` is the door; nothing here is imported by the service.
"""

import runpy


def command() -> None:
    """Run `python -m trainer`: the console script `lenet-train`."""
    # Not by importing trainer.__main__, which must set variables before NumPy is loaded.
    runpy.run_module("trainer", run_name="__main__", alter_sys=True)
