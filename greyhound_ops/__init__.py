"""Linear projection plus loss without the logits: chunked ops for PyTorch.

``greyhound_ops.functional`` and ``greyhound_ops.modules`` hold what people call;
``torch.ops.greyhound`` the ops under them; the package ``greyhound_lowering`` the rewrite that puts
them into unchanged models under ``torch.compile``.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from greyhound_ops import torch_private as _torch_private  # noqa: F401 - refuses an old torch

# isort: split
from greyhound_ops import config, errors, functional, modules
from greyhound_ops.functional import (
    autograd_loss_and_logits_grad,
    chunked_linear_cpo,
    chunked_linear_cross_entropy,
    chunked_linear_distillation,
    chunked_linear_dpo,
    chunked_linear_grpo,
    chunked_linear_kto,
    chunked_linear_log_probs,
    chunked_linear_loss,
    chunked_linear_orpo,
    chunked_linear_simpo,
    cross_entropy,
    selective_log_softmax,
)
from greyhound_ops.modules import (
    ChunkedLinearCPOLoss,
    ChunkedLinearCrossEntropyLoss,
    ChunkedLinearDistillationLoss,
    ChunkedLinearDPOLoss,
    ChunkedLinearGRPOLoss,
    ChunkedLinearJSDLoss,
    ChunkedLinearKTOLoss,
    ChunkedLinearLogProbs,
    ChunkedLinearLoss,
    ChunkedLinearORPOLoss,
    ChunkedLinearSimPOLoss,
    LogitsCrossEntropyLoss,
)

try:
    __version__ = version("greyhound-ops")
except PackageNotFoundError:  # a source tree on PYTHONPATH
    __version__ = "0.1.0"

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
    "LogitsCrossEntropyLoss",
    "__version__",
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
    "config",
    "cross_entropy",
    "errors",
    "functional",
    "modules",
    "selective_log_softmax",
]
