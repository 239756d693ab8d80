"""Custom ops of the namespace ``greyhound``: importing this registers them."""

from __future__ import annotations

from greyhound_ops.ops import linear_cross_entropy as linear_cross_entropy

__all__ = ["linear_cross_entropy"]
