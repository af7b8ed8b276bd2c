"""One training step of `lenet` and of `mlp` in PyTorch: what ours must agree with.

Made once with torch 2.13.0 in float64, stored in float32:
    pip install torch==2.13.0 numpy && PYTHONPATH=. python tests/trainer/golden/make_golden.py
"""

import runpy
from pathlib import Path

import numpy as np
import torch
from torch import nn

from lenet.blocks import ConvBlock
from lenet.model import named

HERE = Path(__file__).parent
INPUTS = runpy.run_path(str(HERE / "inputs.py"))

_NORM = {"gamma": "weight", "beta": "bias", "mean": "running_mean", "variance": "running_var"}


def build(model):
    """The network and where each of our names lives in it: (module, attribute)."""
    layers, places = [], {}
    for block, shape in zip(model.blocks, model.shapes(), strict=True):
        bias = not block.batch_norm
        if isinstance(block, ConvBlock):
            linear = nn.Conv2d(shape.input[0], block.channels, block.kernel, bias=bias)
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
        if block.activation.kind == "relu":
            layers.append(nn.ReLU())
        if isinstance(block, ConvBlock):
            layers.append(nn.MaxPool2d(block.pool.size, block.pool.stride))
    return nn.Sequential(*layers).double(), places


def step(model):
    """The loss, every gradient, and every tensor after one step of SGD."""
    network, places = build(model)
    with torch.no_grad():
        for name, value in INPUTS["initial"](model).items():
            module, attribute = places[name]
            getattr(module, attribute).copy_(torch.from_numpy(value))
    images, labels = INPUTS["batch"]()
    x = torch.from_numpy(images).double().unsqueeze(1) / 255
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
    found = {"loss": loss.item()}
    for name, (module, attribute) in places.items():
        value = getattr(module, attribute)
        found[f"after.{name}"] = value.detach().numpy()
        if value.grad is not None:
            found[f"gradient.{name}"] = value.grad.numpy()
    return {name: np.asarray(value, np.float32) for name, value in found.items()}


for name in ("lenet", "mlp"):
    np.savez_compressed(HERE / f"{name}.npz", **step(named(name)))
