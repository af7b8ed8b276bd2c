import numpy as np
import pytest

from lenet.model import ARCHITECTURES, named
from trainer import commands
from trainer.commands import run
from trainer.inspect import Measured, Roofline, outline, record_step, report
from trainer.ops_cpu import CpuOps


@pytest.fixture
def calls_of(run_of, digits):
    """`calls_of(model, batch, precision)`: recorded in a step of four images on the CPU."""

    def record(model, batch=256, precision="mixed"):
        steps = run_of(digits(8, 0), 4, np.full(2, 0.01))
        return record_step(model, CpuOps(), steps, batch, precision)

    return record


def of(calls, layer, part):
    (call,) = (call for call in calls if (call.layer, call.part) == (layer, part))
    return call


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_step_is_a_batch_forward_loss_backward_and_an_update(calls_of, name):
    layers = [shape.name for shape in named(name).shapes()]
    forward = [(layer, part) for layer in layers for part in ("forward", "epilogue forward")]
    backward = [
        (layer, part)
        for layer in reversed(layers)
        for part in ("epilogue backward", "weight gradient", "input gradient")
    ]
    # The first layer computes no gradient of its input.
    expected = [("batch", "step"), *forward, ("loss", "step"), *backward[:-1], ("update", "step")]
    assert [(call.layer, call.part) for call in calls_of(named(name))] == expected


X, Y = 4 * 2 * 26 * 26 * 8, 4 * 2 * 13 * 13 * 8


def line_of(text, layer, part):
    (line,) = (
        line for line in text.splitlines() if line.startswith(layer) and f"  {part}  " in line
    )
    return line


def test_the_report_adds_workspace_time_roofline_and_engine_and_the_sums(calls_of):
    calls = calls_of(named("lenet"))
    measured = [Measured(2.0)] * len(calls)
    measured[calls.index(of(calls, "conv2", "forward"))] = Measured(4.0, "eng7_k2=3", 4096)
    text = report("a GPU", calls, measured, Roofline(4e12, 7e14), 123.4)
    # The product takes longer than the copy.
    share = 100 * (1677721600 / 7e14) / 4e-6
    assert line_of(text, "conv2", "forward").split()[-4:] == [
        *("4096", "4.00", f"{share:.1f}", "eng7_k2=3"),
    ]
    # The copy takes longer; the L2 cache may exceed it.
    share = 100 * (of(calls, "update", "step").size_bytes / 4e12) / 2e-6
    assert line_of(text, "update", "step").split()[-4:] == ["-", "2.00", f"{share:.1f}", "-"]
    sums, _, rates = text.splitlines()[-3:]
    assert sums.startswith(
        f"sum of the times {2 * len(calls) + 2:.1f} us, the whole captured step 123.4 us"
    )
    assert "4.00 TB/s, read and written" in rates
    assert "700.0 TFLOP/s" in rates


def test_the_command_prints_the_outline_without_a_gpu_and_the_report_with_one(
    no_gpu, monkeypatch, capsys
):
    assert run(["inspect", "--model", "mlp", "--batch", "32"], {}) == 0
    first, *rows, last = capsys.readouterr().out.splitlines()
    assert first == "mlp, mixed, one step of 32 images"
    assert "\n".join(rows) == outline(named("mlp"), 32, "mixed")
    assert last.startswith("engines, workspaces and times need a GPU: no usable GPU was found")
    monkeypatch.setattr("trainer.devices.devices", lambda: 1)
    monkeypatch.setattr(commands, "measure", lambda *asked: f"measured {asked[1:]}")
    assert run(["inspect"], {}) == 0
    assert capsys.readouterr().out.splitlines()[1] == "measured (256, 'mixed')"
