from __future__ import annotations

import numpy as np
import pytest

from lenet.cuda.device import Limits
from lenet.cuda.layers import MAX_CLASSES, check, pack
from lenet.cuda.packing import PIXEL_SCALE, layout
from lenet.errors import BackendUnavailable
from lenet.model import IDENTITY, ConvBlock, DenseBlock, Model

TURING = Limits(75, 65_536, 40)
HOPPER = Limits(90, 232_448, 132)


def test_a_network_with_more_classes_than_a_thread_has_sums_is_rejected_by_name():
    check(Model("digits", (DenseBlock(MAX_CLASSES, activation=IDENTITY),)))
    letters = Model("letters", (DenseBlock(MAX_CLASSES + 1, activation=IDENTITY),))
    with pytest.raises(BackendUnavailable, match="model 'letters' has 65 classes, expected at"):
        check(letters)


def test_a_convolution_of_another_image_is_rejected_by_name():
    last = DenseBlock(10, activation=IDENTITY)
    check(Model("flat", (last,), (4, 7, 28)))
    check(Model("plain", (ConvBlock(8, (3, 3)), last)))
    with pytest.raises(BackendUnavailable, match=r"model 'deep' has .* image of \(4, 7, 28\)"):
        check(Model("deep", (ConvBlock(8, (3, 3)), last), (4, 7, 28)))


def test_a_first_layer_that_takes_unpacked_pixels_has_their_scale_in_its_weights(random_weights):
    file = random_weights("mlp")
    packed = pack(file, "fp32", TURING)["dense1.weight"]
    canonical = layout(file.model)["dense1.weight"].unpack(packed)
    np.testing.assert_allclose(canonical, file.tensors["dense1.weight"] * PIXEL_SCALE, rtol=1e-6)


@pytest.mark.parametrize("limits", [TURING, HOPPER], ids=["turing", "hopper"])
def test_without_our_kernels_convolutions_are_packed_as_cudnn_reads_them(random_weights, limits):
    file = random_weights("lenet")
    packed = pack(file, "fp16", limits, own=False)
    layouts = layout(file.model)
    for name, scale in (("conv1.weight", PIXEL_SCALE), ("conv2.weight", 1)):
        canonical = layouts[name].unpack(packed[name])
        np.testing.assert_allclose(canonical, file.tensors[name] * scale, rtol=1e-3, atol=1e-5)


def test_without_tensor_cores_filters_have_no_channels_of_padding(random_weights):
    file = random_weights("lenet")
    packed = pack(file, "fp32", HOPPER, own=False)
    assert packed["conv1.weight"].shape == (32, 5, 5, 1)
    assert packed["conv2.weight"].shape == (64, 5, 5, 20)
    channels_last = file.tensors["conv2.weight"].transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(packed["conv2.weight"][:50], channels_last)
    assert not packed["conv2.weight"][50:].any()
