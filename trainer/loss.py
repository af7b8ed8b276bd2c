"""What training makes small: the mean cross-entropy of the softmax, forward then backward.

Softmax and cross-entropy are one operation, because together their gradient is simply
(softmax - onehot) / n and neither can overflow.
"""

from __future__ import annotations

from trainer.ops import Array, Progress, Saved, TrainingOps


class SoftmaxCrossEntropy:
    """The loss of logits against labels; holds what one forward keeps for its backward."""

    def __init__(self, ops: TrainingOps) -> None:
        self._ops = ops
        self._saved: Saved = None

    def forward(self, logits: Array, labels: Array, progress: Progress) -> None:
        """Note the step's mean loss, in nats, NaN if a logit is NaN or +inf, and its hits."""
        self._saved = self._ops.softmax_cross_entropy(logits, labels, progress)

    def backward(self) -> Array:
        """The gradient of the logits of the latest forward."""
        dlogits = self._ops.softmax_cross_entropy_backward(self._saved)
        self._saved = None
        return dlogits
