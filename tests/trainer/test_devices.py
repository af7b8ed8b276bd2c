import pytest

from trainer.devices import open_ops
from trainer.errors import DeviceUnavailable


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_the_cpu_is_there_and_auto_takes_it_where_there_is_no_gpu(device):
    with open_ops(device, "fp32") as ops:
        assert ops.name == "cpu"


@pytest.mark.parametrize(
    ("device", "precision", "gpus", "message"),
    [
        ("cuda", "fp32", 1, "--device is cuda, which is not available here"),
        ("cpu", "tf32", 1, "--precision is tf32, expected fp32"),
        ("auto", "mixed", 1, "--precision is mixed, expected fp32"),
        ("cpu", "fp32", 2, "--gpus is 2, expected 1"),
    ],
)
def test_what_a_device_cannot_do_is_refused(device, precision, gpus, message):
    with pytest.raises(DeviceUnavailable, match=message), open_ops(device, precision, gpus):
        pass
