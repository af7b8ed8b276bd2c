import sys
from contextlib import nullcontext
from types import ModuleType

import pytest

from lenet.cuda.engine_cache import PlanCache
from lenet.model import named
from trainer import __main__ as program
from trainer.__main__ import main
from trainer.calls import step_calls
from trainer.devices import unavailable
from trainer.errors import DeviceUnavailable
from trainer.inspection import measure, outline, report
from trainer.ops_cpu import CpuOps
from trainer.roofline import Rate, Timed, Times


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr("trainer.devices.devices", lambda: 1)


def times_of(calls):
    """A microsecond for the first call, two for the second, and so on."""
    timed = {call.key: Timed(float(index)) for index, call in enumerate(calls, 1)}
    timed["conv2", "forward"] = Timed(4.0, "eng7_k2=3", 4096)
    return Times("a GPU, cuDNN 9", timed, Rate(4e12, "a copy"), Rate(7e14, "a product"))


@pytest.fixture
def calls():
    return step_calls(named("lenet"), 256, "mixed")


def line_of(text, layer, part):
    (line,) = (
        line for line in text.splitlines() if line.startswith(layer) and f"  {part}  " in line
    )
    return line


def test_the_outline_tells_shape_call_operations_and_bytes(calls):
    text = outline(calls)
    assert line_of(text, "conv2", "input gradient").split() == [
        *("conv2", "input", "gradient", "256x8x8x64", "->", "256x12x12x32"),
        *("cuDNN", "convolution", "data", "gradient", "1677.7", "4.56"),
    ]
    heading, *rows = text.splitlines()
    assert len(rows) == len(calls)
    assert {len(heading), *map(len, rows)} == {len(heading)}
    assert "plan" not in heading


def test_the_report_adds_workspace_time_share_and_plan(calls):
    text = report(calls, times_of(calls), 123.4)
    share = 100 * max(1677721600 / 7e14, 4558848 / 4e12) / 4e-6
    assert line_of(text, "conv2", "forward").split()[-4:] == [
        *("4096", "4.00", f"{share:.1f}", "eng7_k2=3"),
    ]
    assert line_of(text, "conv1", "tail forward").split()[-4::3] == ["-", "-"]
    assert text.startswith("a GPU, cuDNN 9\n")


def test_below_the_table_stand_the_sum_the_whole_step_and_both_rates(calls):
    *_, sums, _, rates = report(calls, times_of(calls), 123.4).splitlines()
    total = len(calls) * (len(calls) + 1) / 2
    assert sums.startswith(f"sum of the times {total:.1f} us, the whole captured step 123.4 us")
    assert "4.00 TB/s, read and written, in a copy" in rates
    assert "700.0 TFLOP/s in a product" in rates


def test_what_cannot_be_measured_is_told_with_its_reason(no_gpu):
    assert unavailable("cpu") == "--device is cpu"
    assert unavailable("auto") == "there is no NVIDIA GPU here"
    with pytest.raises(DeviceUnavailable, match="--device is cuda: there is no NVIDIA GPU here"):
        unavailable("cuda")


def test_a_gpu_is_used_unless_the_cpu_is_asked_for(a_gpu):
    assert unavailable("auto") is None
    assert unavailable("cuda") is None
    assert unavailable("cpu") == "--device is cpu"


def test_measuring_times_the_calls_and_a_recorded_step(monkeypatch, tmp_path, calls):
    steps = []

    class Gpu(CpuOps):
        def __init__(self, precision, cache):
            super().__init__()
            steps.append(precision)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            steps.append("closed")

        def record(self, step):
            steps.append("recorded")
            return step

    def time_calls(model, precision, run, cache):
        assert len(run.digits) >= run.batch == 16
        assert run.limits.rotation > 0
        return times_of(calls)

    def replay_us(repeat):
        repeat()
        return 50.0

    ops, timing = ModuleType("ops"), ModuleType("timing")
    ops.CudaOps, timing.time_calls, timing.replay_us = Gpu, time_calls, replay_us
    monkeypatch.setitem(sys.modules, "trainer.ops_cuda.ops", ops)
    monkeypatch.setitem(sys.modules, "trainer.ops_cuda.timing", timing)
    monkeypatch.setattr("trainer.inspection.translated", nullcontext)  # it asks CuPy
    times, step_us = measure(named("mlp"), 16, "tf32", PlanCache(tmp_path / "plans.json"))
    assert times == times_of(calls)
    assert step_us == 50.0
    assert steps == ["tf32", "recorded", "closed"]


def test_inspect_prints_what_it_can_and_why_not_more(no_gpu, capsys):
    assert main(["inspect", "--model", "mlp", "--batch", "32"]) == 0
    first, *rows, last = capsys.readouterr().out.splitlines()
    assert first == "mlp, mixed, one step of 32 images"
    assert len(rows) == 1 + len(step_calls(named("mlp"), 32, "mixed"))
    assert last == "plans, workspaces and times need a GPU: there is no NVIDIA GPU here"


def test_inspect_prints_the_report_where_there_is_a_gpu(a_gpu, monkeypatch, capsys, calls):
    asked = []

    def measured(model, batch, precision, cache):
        asked.append((model.name, batch, precision))
        return times_of(calls), 99.9

    monkeypatch.setattr(program, "measure", measured)
    assert main(["inspect"]) == 0
    out = capsys.readouterr().out
    assert asked == [("lenet", 256, "mixed")]
    assert out.startswith("lenet, mixed, one step of 256 images\na GPU, cuDNN 9\n")
    assert "the whole captured step 99.9 us" in out


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (["--model", "alexnet"], "'alexnet' is unknown, expected one of lenet"),
        (["--precision", "bf16"], "--precision is 'bf16'"),
        (["--batch", "1"], "--batch is '1', expected otherwise"),
        (["--device", "cuda"], "--device is cuda: there is no NVIDIA GPU here"),
    ],
)
def test_a_wrong_flag_is_one_sentence(no_gpu, capsys, line, sentence):
    assert main(["inspect", *line]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
