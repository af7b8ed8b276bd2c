"""The one definition of an image: uint8 (28, 28), ink high, 0 to 255.

Everything that enters the service becomes this, everything that leaves a dataset is this, and
`SCALE` is the only step between a pixel and the first layer. It refuses to decode or resize.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

HEIGHT = 28
WIDTH = 28
PIXELS = HEIGHT * WIDTH

SCALE = 1.0 / 255.0
"""What a pixel is multiplied by before the first layer. Folded into its weights when packed."""

Images: TypeAlias = NDArray[np.uint8]
"""uint8 (n, 28, 28), C-contiguous, 0 = paper, 255 = ink."""

Probabilities: TypeAlias = NDArray[np.float32]
"""float32 (n, classes), rows sum to 1."""

Logits: TypeAlias = NDArray[np.float32]
"""float32 (n, classes), the network's output before softmax."""
