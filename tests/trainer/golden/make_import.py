"""Makes torch-import.safetensors and torch-import.npz with PyTorch: a state dict, as
safetensors.torch.save_file writes it, and what the network answers. Run in the repository's root:

    python tests/trainer/golden/make_import.py
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn

FOLDER = Path(__file__).parent


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ELU(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(8 * 6 * 6, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 10)
        )

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def main():
    torch.manual_seed(3)
    network = Network().double()
    for name, value in network.state_dict().items():
        if name.endswith("running_var") or (value.ndim == 1 and name.endswith("weight")):
            value.copy_(1 + torch.rand_like(value))
        elif value.ndim == 1:
            value.copy_(torch.randn_like(value) / 4)
    network.classifier[3].weight.data *= 10  # so that the answers differ
    state = {name: value.float().numpy() for name, value in network.state_dict().items()}
    state = {n: v.astype(np.int64) if "num_batches" in n else v for n, v in state.items()}
    save_file(state, FOLDER / "torch-import.safetensors")
    network.load_state_dict({name: torch.from_numpy(np.array(v)) for name, v in state.items()})
    images = np.random.RandomState(4).randint(0, 256, (16, 28, 28)).astype(np.uint8)
    with torch.no_grad():
        x = torch.from_numpy(images[:, None] / 255.0)
        probabilities = network.eval()((x - 0.1307) / 0.3081).softmax(1).numpy()
    assert probabilities.max(1).max() > 0.5
    np.savez_compressed(FOLDER / "torch-import.npz", images=images, probabilities=probabilities)


if __name__ == "__main__":
    main()
