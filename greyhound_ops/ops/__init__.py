"""Custom ops of the namespace ``greyhound``: importing this registers them."""

from __future__ import annotations

from greyhound_ops.ops import linear_cross_entropy as linear_cross_entropy
from greyhound_ops.ops import linear_cross_entropy_terms as linear_cross_entropy_terms
from greyhound_ops.ops import linear_distillation as linear_distillation
from greyhound_ops.ops import linear_log_probs as linear_log_probs
from greyhound_ops.ops import linear_loss as linear_loss
from greyhound_ops.ops import logits as logits
from greyhound_ops.ops import row_region as row_region

__all__ = [
    "linear_cross_entropy",
    "linear_cross_entropy_terms",
    "linear_distillation",
    "linear_log_probs",
    "linear_loss",
    "logits",
    "row_region",
]
