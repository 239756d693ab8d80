"""Settings of the rewrite: what is looked for and when it pays."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from greyhound_ops import validation
from greyhound_ops.config import env_bool, env_bytes

#: Kinds of rewrite that can be switched one by one.
KINDS = ("cross_entropy", "region")

#: What becomes of logits that are returned beside their loss.
RETURNED_LOGITS = ("keep", "nan")


@dataclasses.dataclass(frozen=True)
class RewriteSettings:
    """Settings of the rewrite; each graph is rewritten under those in force when it is compiled.

    Attributes:
        kinds: Kinds of rewrite to apply, from `KINDS`.
        min_logits_bytes: Logits smaller than this, in the dtype of the projection, are left as
            they are: there is little memory to save and the extra launches show. None for what
            fits one chunk, 512 MiB on CUDA, 32 MiB on the CPU; a region is then also left alone
            if its peak would be more than whole logits hold at the least, or more than 0.8 of
            that where the region is not the faster one.
        chunk_size: Rows per chunk, or None for the plan.
        grad_weight_accum_dtype: ``"fp32"`` or ``"weight"``, as for the op.
        returned_logits: What becomes of logits that leave the graph beside a loss. ``"keep"``: they
            have to exist, and nothing is rewritten. ``"nan"``: where that loss can be rewritten,
            NaN of their shape, dtype and device is returned in their place; one number of memory,
            no gradient. A program that reads them then computes NaN instead of something wrong.
        keep_logits: Where a loss has gradients that only the backward knows, keep its logits for
            it if they take no more memory than the backward's own sum would (N <= 2 D in bf16).
            False projects once more, and holds nothing between forward and backward.
    """

    kinds: tuple[str, ...] = KINDS
    min_logits_bytes: int | None = None
    chunk_size: int | None = None
    grad_weight_accum_dtype: str = "fp32"
    returned_logits: str = "keep"
    keep_logits: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(self.kinds))
        for kind in self.kinds:
            validation.check_choice("kinds", kind, KINDS)
        if self.min_logits_bytes is not None and self.min_logits_bytes < 0:
            raise ValueError(
                f"min_logits_bytes: expected a number >= 0, got {self.min_logits_bytes}"
            )
        validation.check_chunk_size(self.chunk_size)
        validation.check_choice(
            "grad_weight_accum_dtype", self.grad_weight_accum_dtype, validation.ACCUM_DTYPES
        )
        if not isinstance(self.keep_logits, bool):
            raise TypeError(f"keep_logits: expected a bool, got {self.keep_logits!r}")
        validation.check_choice("returned_logits", self.returned_logits, RETURNED_LOGITS)


def from_environment() -> RewriteSettings:
    """Settings as the environment gives them."""
    given: dict[str, Any] = {}
    least = env_bytes("GREYHOUND_REWRITE_MIN_BYTES")
    if least is not None:
        given["min_logits_bytes"] = least
    returned = os.environ.get("GREYHOUND_REWRITE_RETURNED_LOGITS", "").strip()
    if returned:
        try:
            validation.check_choice("returned_logits", returned, RETURNED_LOGITS)
        except ValueError as error:
            raise ValueError(
                f"environment variable GREYHOUND_REWRITE_RETURNED_LOGITS: {error}"
            ) from None
        given["returned_logits"] = returned
    given["keep_logits"] = env_bool("GREYHOUND_REWRITE_KEEP_LOGITS", True)
    return RewriteSettings(**given)


def rewrite_allowed() -> bool:
    """Whether the rewrite may run: ``GREYHOUND_REWRITE=0`` forbids it whatever the program says."""
    return env_bool("GREYHOUND_REWRITE", True)


def rewrite_requested() -> bool:
    """Whether ``GREYHOUND_REWRITE=1`` asks for `enable` when this package is imported."""
    return env_bool("GREYHOUND_REWRITE", False)
