"""What the ops on rows of logits share."""

from __future__ import annotations

import torch
from torch import Tensor

from greyhound_ops.config import settings
from greyhound_ops.errors import TargetOutOfRangeError


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of losses and row statistics for logits of a dtype."""
    return torch.promote_types(dtype, torch.float32)


def reads_values(tensor: Tensor) -> bool:
    """Whether values may be looked at: on the CPU always, elsewhere with checks on.

    Reading back would wait for the device; there a bad row becomes NaN instead.
    """
    return tensor.device.type == "cpu" or settings().checks


def check_targets(
    target: Tensor, num_classes: int, ignore_index: int, *, name: str = "target"
) -> None:
    """Raise for a target out of range, where `reads_values` lets it be seen.

    Args:
        target: ``[N]``.
        num_classes: V.
        ignore_index: The one value outside ``[0, V)`` that is allowed.
        name: Of the argument, for the message.

    Raises:
        TargetOutOfRangeError: Naming the first such row.
    """
    if not reads_values(target):
        return
    wrong = ((target < 0) | (target >= num_classes)) & (target != ignore_index)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        raise TargetOutOfRangeError(
            f"{name}: expected a class in [0, {num_classes}) or ignore_index={ignore_index}, "
            f"got {int(target[row])} in row {row}"
        )
