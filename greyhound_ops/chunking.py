"""How many rows one chunk holds: sizes and a memory budget in, rows out. Pure arithmetic.

The logits of a chunk are the only large temporary of the ops, so their bytes are what the budget
caps. It is a cap and not a floor: a larger vocabulary means fewer rows, never more bytes.
"""

from __future__ import annotations

import dataclasses

MIB = 2**20

# Rows are cut to a multiple of this: the tile height of the matrix products on every GPU since
# Ampere is 64 or 128 rows, and a chunk that ends inside a tile pays for the whole of it.
ROW_MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class Budget:
    """Caps on one chunk's logits, in bytes.

    Attributes:
        with_grad_weight_bytes: When ``grad_weight`` is accumulated. Each chunk then reads and
            writes the whole ``[V, D]`` accumulator once, so few large chunks are wanted.
        without_grad_weight_bytes: When the head is frozen; only the efficiency of the two products
            depends on the rows.
        forward_only_bytes: When nothing is differentiated.
    """

    with_grad_weight_bytes: int
    without_grad_weight_bytes: int
    forward_only_bytes: int


# Measured on one H200 at V=128256 and D=4096 (docs/performance.md, "Chunk rows"). Every chunk reads
# the head twice: with a frozen one 1024 rows take 3 to 8% of a step less than 512 or 640.
CUDA_BUDGET = Budget(512 * MIB, 256 * MIB, 128 * MIB)

# On a CPU the chunk should stay near the last-level cache; larger ones gain nothing.
CPU_BUDGET = Budget(32 * MIB, 32 * MIB, 32 * MIB)


def one_chunk_bytes(device_type: str) -> int:
    """Bytes of logits that a training step's plan takes as a single chunk."""
    budget = CUDA_BUDGET if device_type == "cuda" else CPU_BUDGET
    return budget.with_grad_weight_bytes


def chunk_rows(
    num_rows: int,
    row_bytes: int,
    budget_bytes: int,
    chunk_size: int | None = None,
) -> int:
    """Rows of one chunk.

    Args:
        num_rows: N, rows in all.
        row_bytes: Bytes of one row of logits.
        budget_bytes: Cap on the bytes of one chunk's logits. A single row is the least, however
            large.
        chunk_size: Rows wished by the caller, taken as they are (but at most N).

    Returns:
        Rows of every chunk but the last, in ``[1, max(num_rows, 1)]``. Without ``chunk_size`` the
        chunks are of nearly equal size: a short last chunk would run its products at the worst
        efficiency of all.
    """
    if num_rows <= 1:
        return 1
    if chunk_size is not None:
        return min(chunk_size, num_rows)
    most = max(budget_bytes // max(row_bytes, 1), 1)
    if most >= num_rows:
        return num_rows
    if most > ROW_MULTIPLE:
        most -= most % ROW_MULTIPLE
    chunks = -(-num_rows // most)
    rows = -(-num_rows // chunks)
    if rows > ROW_MULTIPLE:
        rows = min(-(-rows // ROW_MULTIPLE) * ROW_MULTIPLE, most)
    return rows


def chunk_budget_bytes(
    device_type: str,
    *,
    need_grad_weight: bool,
    need_grads: bool,
    final_cast_bytes: int = 0,
    accumulator_bytes: int = 0,
    whole_bytes: int = 0,
    override_bytes: int | None = None,
    budget: Budget | None = None,
) -> int:
    """The cap on one chunk's logits in bytes.

    Args:
        device_type: ``"cuda"`` or any other.
        need_grad_weight: Whether ``grad_weight`` is accumulated.
        need_grads: Whether any gradient is made.
        final_cast_bytes: Bytes that are allocated after the last chunk is freed, for the cast of an
            fp32 accumulator into the dtype of the weight. The peak counts whichever of the two is
            larger, so a chunk up to this size costs nothing.
        accumulator_bytes: Bytes of an accumulator that several chunks would need and a single one
            would not: its product is the gradient.
        whole_bytes: Logits of all rows. Where they are no more than ``accumulator_bytes`` they are
            one chunk: the peak is the same or lower, and neither is a sum read and written again
            nor is there a cast at the end, 3 to 5% of a step (docs/performance.md).
        override_bytes: The user's own cap; wins over everything.
        budget: Caps of an op that needs others than the device's, or None.

    Returns:
        Bytes.
    """
    if override_bytes is not None:
        return override_bytes
    if budget is None:
        budget = CUDA_BUDGET if device_type == "cuda" else CPU_BUDGET
    if need_grad_weight:
        most = max(budget.with_grad_weight_bytes, final_cast_bytes)
        return max(most, whole_bytes) if whole_bytes <= accumulator_bytes else most
    return budget.without_grad_weight_bytes if need_grads else budget.forward_only_bytes
