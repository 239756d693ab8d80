"""Linear projection plus loss in one call, without the logits.

N rows (tokens), D hidden size, V vocabulary (classes).
"""

from __future__ import annotations

from greyhound_ops.functional.cross_entropy import (
    CrossEntropyOutput,
    chunked_linear_cross_entropy,
)
from greyhound_ops.functional.distillation import DistillationOutput, chunked_linear_distillation
from greyhound_ops.functional.log_probs import LogProbs, chunked_linear_log_probs
from greyhound_ops.functional.logits import cross_entropy, selective_log_softmax
from greyhound_ops.functional.loss import (
    autograd_loss_and_logits_grad,
    chunked_linear_loss,
    per_row,
    whole,
)
from greyhound_ops.functional.multi import (
    MultiCrossEntropyOutput,
    chunked_multi_head_cross_entropy,
    chunked_multi_token_cross_entropy,
)

__all__ = [
    "CrossEntropyOutput",
    "DistillationOutput",
    "LogProbs",
    "MultiCrossEntropyOutput",
    "autograd_loss_and_logits_grad",
    "chunked_linear_cross_entropy",
    "chunked_linear_distillation",
    "chunked_linear_log_probs",
    "chunked_linear_loss",
    "chunked_multi_head_cross_entropy",
    "chunked_multi_token_cross_entropy",
    "cross_entropy",
    "per_row",
    "selective_log_softmax",
    "whole",
]
