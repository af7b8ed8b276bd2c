import numpy as np
import pytest

from lenet.model import ARCHITECTURES, IDENTITY, ConvBlock, DenseBlock, Model, Pool, named
from trainer.calls import step_calls
from trainer.network import Network, initial_tensors
from trainer.ops_cpu import CpuOps
from trainer.optimizer import Sgd
from trainer.step import take_step

OPERATIONS = ["batch", "convolution", "dense", "tail", "softmax_cross_entropy", "descend"]
OPERATIONS += ["convolution_backward", "dense_backward", "tail_backward"]


class Spy(CpuOps):
    """Notes which operations a step calls, and whether a gradient of the input is asked for."""

    def __init__(self):
        super().__init__()
        self.seen = []


def _spied(name):
    operation = getattr(CpuOps, name)

    def call(self, *arguments):
        self.seen.append(name)
        if name in ("convolution_backward", "dense_backward") and arguments[-1]:
            self.seen.append("input gradient")
        return operation(self, *arguments)

    return call


for _name in OPERATIONS:
    setattr(Spy, _name, _spied(_name))


def operation_of(call):
    linear = "convolution" if call.layer.startswith("conv") else "dense"
    return {
        "forward": linear,
        "weight gradient": f"{linear}_backward",
        "input gradient": "input gradient",
        "tail forward": "tail",
        "tail backward": "tail_backward",
        "step": {"loss": "softmax_cross_entropy", "update": "descend"}.get(call.layer, "batch"),
    }[call.part]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_calls_are_those_of_a_step_in_its_order(name, digits, run_of):
    model = named(name)
    ops = Spy()
    network = Network(model, initial_tensors(model, np.random.default_rng(0)), ops)
    optimizer = Sgd(model, network.parameters, ops)
    take_step(network, optimizer, ops.start(run_of(digits(8, 0), 4, [0.01])))
    calls = step_calls(model, 4, "mixed")
    assert [operation_of(call) for call in calls] == ops.seen
    assert len({call.key for call in calls}) == len(calls)


def of(calls, layer, part):
    (call,) = (call for call in calls if call.key == (layer, part))
    return call


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_first_layer_computes_no_gradient_of_its_input(name):
    calls = step_calls(named(name), 256, "tf32")
    layers = [shape.name for shape in named(name).shapes()]
    assert {call.layer for call in calls if call.part == "input gradient"} == set(layers[1:])


def test_a_convolution_has_padded_channels_last_and_the_operations_of_those():
    calls = step_calls(named("lenet"), 256, "mixed")
    forward = of(calls, "conv2", "forward")
    assert (forward.source, forward.result) == ((256, 12, 12, 32), (256, 8, 8, 64))
    assert forward.operations == 2 * 256 * 8 * 8 * 64 * 32 * 5 * 5
    elements = 256 * 12 * 12 * 32 + 256 * 8 * 8 * 64 + 64 * 5 * 5 * 32
    assert forward.size_bytes == 2 * elements
    for part, source, result in (
        ("input gradient", (256, 8, 8, 64), (256, 12, 12, 32)),
        ("weight gradient", (256, 8, 8, 64), (64, 5, 5, 32)),
    ):
        gradient = of(calls, "conv2", part)
        assert (gradient.source, gradient.result) == (source, result)
        assert gradient.operations == forward.operations
        assert gradient.size_bytes == forward.size_bytes
    assert of(calls, "conv2", "weight gradient").convolution.direction == "filter"
    assert of(calls, "conv2", "input gradient").convolution.direction == "data"


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("tf32", 4), ("mixed", 2)])
def test_a_product_gives_the_gradient_of_its_weight_in_float32(precision, width):
    calls = step_calls(named("lenet"), 256, precision)
    activations, weight = width * 256 * (1024 + 512), 1024 * 512
    assert of(calls, "dense1", "forward").size_bytes == activations + width * weight
    assert of(calls, "dense1", "input gradient").size_bytes == activations + width * weight
    gradient = of(calls, "dense1", "weight gradient")
    assert gradient.size_bytes == activations + 4 * weight
    assert gradient.operations == 2 * 256 * 1024 * 512
    assert (gradient.source, gradient.result) == ((256, 512), (512, 1024))


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("mixed", 2)])
def test_our_kernel_makes_the_first_filters_gradient_in_float32(precision, width):
    gradient = of(step_calls(named("lenet"), 256, precision), "conv1", "weight gradient")
    assert gradient.routine == "our first_filter kernel"
    assert gradient.convolution is None
    assert gradient.size_bytes == width * 256 * (28 * 28 + 24 * 24 * 32) + 4 * 32 * 5 * 5


def test_cudnn_makes_the_first_filters_gradient_where_our_kernel_cannot():
    block = ConvBlock(8, (8, 8))
    model = Model("wide", (block, DenseBlock(10, activation=IDENTITY)))
    gradient = of(step_calls(model, 4, "tf32"), "conv1", "weight gradient")
    assert gradient.routine == "cuDNN convolution filter gradient"
    assert gradient.convolution is not None


def tail_bytes(block, precision="fp32"):
    model = Model("one", (block, DenseBlock(10, activation=IDENTITY)))
    calls = step_calls(model, 2, precision)
    return tuple(of(calls, "conv1", part).size_bytes for part in ("tail forward", "tail backward"))


def test_a_tail_moves_each_array_once_and_batch_norm_its_input_twice():
    x, y = 4 * 2 * 26 * 26 * 8, 4 * 2 * 13 * 13 * 8
    taps = y // 4
    plain = ConvBlock(8, (3, 3), pool=Pool("max"))
    assert tail_bytes(plain) == (x + y + taps, y + taps + 2 * x)
    average = ConvBlock(8, (3, 3), pool=Pool("average"))
    assert tail_bytes(average) == (x + y, y + 2 * x)
    norm = ConvBlock(8, (3, 3), pool=Pool("max"), batch_norm=True)
    assert tail_bytes(norm) == (2 * x + y + taps, 2 * (y + taps + x) + x)
    many_taps = ConvBlock(8, (3, 3), pool=Pool("max", (17, 17), (1, 1)))
    wide = 4 * 2 * 10 * 10 * 8
    assert tail_bytes(many_taps) == (x + wide + wide // 2, wide + wide // 2 + 2 * x)


def test_a_bias_alone_reads_no_more_than_the_gradient_going_back():
    x = 4 * 2 * 26 * 26 * 8
    assert tail_bytes(ConvBlock(8, (3, 3), activation=IDENTITY)) == (2 * x, x)


def test_the_update_moves_weights_velocities_gradients_and_under_mixed_precision_halves():
    def size(model, precision):
        return of(step_calls(named(model), 256, precision), "update", "step").size_bytes

    weights, vectors = 512 * 784 + 16 * 512, 512 + 16
    assert size("mlp", "fp32") == 20 * (weights + vectors)
    assert size("mlp", "mixed") == 22 * weights + 20 * vectors
    # Of the convolutions' filters only the second's gradient is half: cuDNN made it.
    first, second, dense = 32 * 25, 64 * 25 * 32, 512 * 1024 + 16 * 512
    vectors = 2 * (32 + 64 + 512) + 16
    assert size("lenet", "mixed") == 22 * (first + dense) + 20 * second + 20 * vectors


def test_the_batch_and_the_loss_move_pixels_and_logits():
    calls = step_calls(named("lenet"), 100, "mixed")
    assert of(calls, "batch", "step").size_bytes == 100 * 784 * (1 + 2)
    assert of(calls, "loss", "step").size_bytes == 2 * 2 * 100 * 16
    assert all(call.operations == 0 for call in calls if call.routine.endswith("kernels"))
