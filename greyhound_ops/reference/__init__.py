"""Plain PyTorch truth for every op: materialises the logits, works in any dtype.

These functions are the oracle of the tests and of the benchmarks. They are written to be read, use
nothing but public torch operators, and differentiate by ordinary autograd (twice, if asked).
"""

from __future__ import annotations

from greyhound_ops.reference.cross_entropy import cross_entropy, linear_cross_entropy
from greyhound_ops.reference.distillation import linear_distillation
from greyhound_ops.reference.log_probs import linear_log_probs, selective_log_softmax
from greyhound_ops.reference.loss import linear_loss
from greyhound_ops.reference.policy import linear_grpo
from greyhound_ops.reference.preference import (
    linear_cpo,
    linear_dpo,
    linear_kto,
    linear_orpo,
    linear_simpo,
)

__all__ = [
    "cross_entropy",
    "linear_cpo",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_dpo",
    "linear_grpo",
    "linear_kto",
    "linear_log_probs",
    "linear_loss",
    "linear_orpo",
    "linear_simpo",
    "selective_log_softmax",
]
