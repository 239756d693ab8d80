"""Modules around `greyhound_ops.functional`, for code that keeps its loss in an object."""

from __future__ import annotations

from greyhound_ops.modules.cross_entropy import ChunkedLinearCrossEntropyLoss
from greyhound_ops.modules.distillation import ChunkedLinearDistillationLoss, ChunkedLinearJSDLoss
from greyhound_ops.modules.log_probs import ChunkedLinearLogProbs
from greyhound_ops.modules.logits import LogitsCrossEntropyLoss
from greyhound_ops.modules.loss import ChunkedLinearLoss
from greyhound_ops.modules.multi import (
    ChunkedMultiHeadCrossEntropyLoss,
    ChunkedMultiTokenCrossEntropyLoss,
)

__all__ = [
    "ChunkedLinearCrossEntropyLoss",
    "ChunkedLinearDistillationLoss",
    "ChunkedLinearJSDLoss",
    "ChunkedLinearLogProbs",
    "ChunkedLinearLoss",
    "ChunkedMultiHeadCrossEntropyLoss",
    "ChunkedMultiTokenCrossEntropyLoss",
    "LogitsCrossEntropyLoss",
]
