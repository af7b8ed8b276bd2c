import numpy as np
import pytest

from lenet.model import ARCHITECTURES, IDENTITY, ConvBlock, DenseBlock, Model, Pool, named
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


def gradients(layer):
    both = ["weight gradient", "input gradient"]
    return both if layer.startswith("conv") else reversed(both)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_step_is_a_batch_forward_loss_backward_and_an_update(calls_of, name):
    model = named(name)
    layers = [shape.name for shape in model.shapes()]
    forward = [(layer, part) for layer in layers for part in ("forward", "epilogue forward")]
    backward = [
        (layer, part)
        for layer in reversed(layers)
        for part in ("epilogue backward", *gradients(layer))
        # The first layer computes no gradient of its input.
        if (layer, part) != (layers[0], "input gradient")
    ]
    expected = [("batch", "step"), *forward, ("loss", "step"), *backward, ("update", "step")]
    calls = calls_of(model, precision="fp32")
    assert [(call.layer, call.part) for call in calls] == expected


def test_in_mixed_precision_one_routine_computes_the_first_block(calls_of):
    calls = [call for call in calls_of(named("lenet")) if call.layer == "conv1"]
    assert [(call.part, call.routine) for call in calls] == [
        ("forward", "our first_block kernels"),
        ("backward", "our first_block kernels"),
    ]
    convolution = of(calls_of(named("lenet"), precision="fp32"), "conv1", "forward")
    assert {call.operations for call in calls} == {convolution.operations}


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
    monkeypatch.setattr("trainer.devices.check_gpu", lambda _device: None)
    monkeypatch.setattr(commands, "measure", lambda *asked: f"measured {asked[1:]}")
    assert run(["inspect"], {}) == 0
    assert capsys.readouterr().out.splitlines()[1] == "measured (256, 'mixed')"


WIDE = 4 * 2 * 10 * 10 * 8


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (ConvBlock(8, (3, 3), pool=Pool("max")), (X + Y + Y // 4, Y + Y // 4 + 2 * X)),
        (
            ConvBlock(8, (3, 3), pool=Pool("max"), batch_norm=True),
            (2 * X + Y + Y // 4, 2 * (Y + Y // 4 + X) + X),
        ),
        (
            ConvBlock(8, (3, 3), pool=Pool("max", (17, 17), (1, 1))),
            (X + WIDE + WIDE // 2, WIDE + WIDE // 2 + 2 * X),
        ),
    ],
)
def test_an_epilogue_moves_each_array_once_and_batch_norm_its_input_twice(
    calls_of, block, expected
):
    calls = calls_of(Model("one", (block, DenseBlock(10, activation=IDENTITY))), 2, "fp32")
    parts = "epilogue forward", "epilogue backward"
    assert tuple(of(calls, "conv1", part).size_bytes for part in parts) == expected
