"""Linear projection plus loss in one call, without the logits.

N rows (tokens), D hidden size, V vocabulary (classes).
"""

from __future__ import annotations

from greyhound_ops.functional.cross_entropy import (
    CrossEntropyOutput,
    chunked_linear_cross_entropy,
)

__all__ = ["CrossEntropyOutput", "chunked_linear_cross_entropy"]
