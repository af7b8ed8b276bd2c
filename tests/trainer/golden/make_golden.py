"""One training step of each network of inputs.py in PyTorch: what ours must agree with.

Made once with torch 2.13.0 in float64; of every array the digest of inputs.py is stored:
    pip install torch==2.13.0 numpy && PYTHONPATH=. python tests/trainer/golden/make_golden.py
"""

import runpy
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lenet.model import ConvBlock

HERE = Path(__file__).parent
INPUTS = runpy.run_path(str(HERE / "inputs.py"))

_NORM = {"gamma": "weight", "beta": "bias", "mean": "running_mean", "variance": "running_var"}


def activation(block):
    """The module, or none."""
    kind, parameter = block.activation.kind, block.activation.parameter
    return {
        "identity": [],
        "relu": [nn.ReLU()],
        "clipped_relu": [nn.Hardtanh(0, parameter)],
        "elu": [nn.ELU(parameter)],
        "sigmoid": [nn.Sigmoid()],
        "tanh": [nn.Tanh()],
    }[kind]


def pool(window):
    """The module; PyTorch too counts the zeros of the padding in an average."""
    if window.kind == "global_average":
        return nn.AdaptiveAvgPool2d(1)
    module = nn.MaxPool2d if window.kind == "max" else nn.AvgPool2d
    return module(window.size, window.stride, window.padding)


def build(model):
    """The network and where each of our names lives in it: (module, attribute)."""
    layers, places = [], {}
    for block, shape in zip(model.blocks, model.shapes(), strict=True):
        bias = not block.batch_norm
        if isinstance(block, ConvBlock):
            linear = nn.Conv2d(
                shape.input[0],
                block.channels,
                block.kernel,
                block.stride,
                block.padding,
                block.dilation,
                bias=bias,
            )
            norm = nn.BatchNorm2d(block.channels)
        else:
            if not any(isinstance(layer, nn.Flatten) for layer in layers):
                layers.append(nn.Flatten())
            linear = nn.Linear(int(np.prod(shape.input)), block.units, bias=bias)
            norm = nn.BatchNorm1d(block.units)
        layers.append(linear)
        places[f"{shape.name}.weight"] = (linear, "weight")
        if block.batch_norm:
            layers.append(norm)
            places |= {f"{shape.name}.{ours}": (norm, its) for ours, its in _NORM.items()}
        else:
            places[f"{shape.name}.bias"] = (linear, "bias")
        layers += activation(block)
        if isinstance(block, ConvBlock):
            layers.append(pool(block.pool))
    return nn.Sequential(*layers).double(), places


def step(model):
    """The logits outside training, the loss, each gradient, each tensor after a step of SGD."""
    network, places = build(model)
    with torch.no_grad():
        for name, value in INPUTS["initial"](model).items():
            module, attribute = places[name]
            getattr(module, attribute).copy_(torch.from_numpy(value))
    images, labels = INPUTS["batch"]()
    x = torch.from_numpy(images).double().unsqueeze(1) / 255
    with torch.no_grad():
        logits = network.eval()(x).numpy()
    network.train()
    weights = [getattr(*place) for name, place in places.items() if name.endswith(".weight")]
    others = [p for p in network.parameters() if not any(p is weight for weight in weights)]
    optimizer = torch.optim.SGD(
        [{"params": weights, "weight_decay": INPUTS["WEIGHT_DECAY"]}, {"params": others}],
        lr=INPUTS["RATE"],
        momentum=INPUTS["MOMENTUM"],
        nesterov=True,
    )
    loss = nn.functional.cross_entropy(network(x), torch.from_numpy(labels).long())
    loss.backward()
    optimizer.step()
    found = {"logits": logits, "loss": loss.item()}
    for name, (module, attribute) in places.items():
        value = getattr(module, attribute)
        found[f"after.{name}"] = value.detach().numpy()
        if value.grad is not None:
            found[f"gradient.{name}"] = value.grad.numpy()
    stored = {}
    for name, value in found.items():
        stored[name], stored[f"sums.{name}"] = INPUTS["digest"](value)
        stored[f"norm.{name}"] = np.linalg.norm(value)
    return stored


for name, model in INPUTS["MODELS"].items():
    np.savez_compressed(HERE / f"{name}.npz", **step(model))
