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
from greyhound_ops.modules.policy import ChunkedLinearGRPOLoss
from greyhound_ops.modules.preference import (
    ChunkedLinearCPOLoss,
    ChunkedLinearDPOLoss,
    ChunkedLinearKTOLoss,
    ChunkedLinearORPOLoss,
    ChunkedLinearSimPOLoss,
)

__all__ = [
    "ChunkedLinearCPOLoss",
    "ChunkedLinearCrossEntropyLoss",
    "ChunkedLinearDPOLoss",
    "ChunkedLinearDistillationLoss",
    "ChunkedLinearGRPOLoss",
    "ChunkedLinearJSDLoss",
    "ChunkedLinearKTOLoss",
    "ChunkedLinearLogProbs",
    "ChunkedLinearLoss",
    "ChunkedLinearORPOLoss",
    "ChunkedLinearSimPOLoss",
    "ChunkedMultiHeadCrossEntropyLoss",
    "ChunkedMultiTokenCrossEntropyLoss",
    "LogitsCrossEntropyLoss",
]
