"""Modules around `greyhound_ops.functional`, for code that keeps its loss in an object."""

from __future__ import annotations

from greyhound_ops.modules.cross_entropy import ChunkedLinearCrossEntropyLoss
from greyhound_ops.modules.log_probs import ChunkedLinearLogProbs
from greyhound_ops.modules.loss import ChunkedLinearLoss

__all__ = [
    "ChunkedLinearCrossEntropyLoss",
    "ChunkedLinearLogProbs",
    "ChunkedLinearLoss",
]
