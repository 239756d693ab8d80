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
from greyhound_ops.functional.policy import PolicyLoss, chunked_linear_grpo, grpo_loss
from greyhound_ops.functional.preference import (
    KTOLoss,
    PreferenceLoss,
    chunked_linear_cpo,
    chunked_linear_dpo,
    chunked_linear_kto,
    chunked_linear_orpo,
    chunked_linear_simpo,
    concatenate_pairs,
    cpo_loss,
    dpo_loss,
    kto_kl,
    kto_loss,
    orpo_loss,
    simpo_loss,
)

__all__ = [
    "CrossEntropyOutput",
    "DistillationOutput",
    "KTOLoss",
    "LogProbs",
    "MultiCrossEntropyOutput",
    "PolicyLoss",
    "PreferenceLoss",
    "autograd_loss_and_logits_grad",
    "chunked_linear_cpo",
    "chunked_linear_cross_entropy",
    "chunked_linear_distillation",
    "chunked_linear_dpo",
    "chunked_linear_grpo",
    "chunked_linear_kto",
    "chunked_linear_log_probs",
    "chunked_linear_loss",
    "chunked_linear_orpo",
    "chunked_linear_simpo",
    "chunked_multi_head_cross_entropy",
    "chunked_multi_token_cross_entropy",
    "concatenate_pairs",
    "cpo_loss",
    "cross_entropy",
    "dpo_loss",
    "grpo_loss",
    "kto_kl",
    "kto_loss",
    "orpo_loss",
    "per_row",
    "selective_log_softmax",
    "simpo_loss",
    "whole",
]
