from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from greyhound_ops import chunking, config
from greyhound_ops.chunking import MIB, ROW_MULTIPLE, chunk_budget_bytes, chunk_rows
from greyhound_ops.ops.chunk_loop import ChunkLoop, GradientNeeds

rows_and_budgets = given(
    num_rows=st.integers(0, 100_000),
    row_bytes=st.integers(1, 600_000),
    budget_bytes=st.integers(1, 2**30),
)


def chunk_sizes(num_rows: int, rows: int) -> list[int]:
    """Rows of each chunk."""
    return [min(rows, num_rows - start) for start in range(0, num_rows, rows)]


@rows_and_budgets
def test_cap_is_respected(num_rows: int, row_bytes: int, budget_bytes: int) -> None:
    rows = chunk_rows(num_rows, row_bytes, budget_bytes)
    assert 1 <= rows <= max(num_rows, 1)
    assert rows == 1 or rows * row_bytes <= budget_bytes


@rows_and_budgets
def test_chunks_are_of_nearly_equal_size(num_rows: int, row_bytes: int, budget_bytes: int) -> None:
    rows = chunk_rows(num_rows, row_bytes, budget_bytes)
    sizes = chunk_sizes(num_rows, rows)
    if len(sizes) > 1:
        # Rounding up to a multiple takes at most that many rows from the last chunk, for each of
        # the others.
        slack = len(sizes) * (ROW_MULTIPLE if rows > ROW_MULTIPLE else 1)
        assert max(sizes) - min(sizes) <= slack


@rows_and_budgets
def test_no_more_chunks_than_the_cap_asks_for(
    num_rows: int, row_bytes: int, budget_bytes: int
) -> None:
    most = max(budget_bytes // row_bytes, 1)
    if most > ROW_MULTIPLE:
        most -= most % ROW_MULTIPLE
    rows = chunk_rows(num_rows, row_bytes, budget_bytes)
    assert len(chunk_sizes(num_rows, rows)) <= -(-num_rows // most)


@rows_and_budgets
def test_large_chunks_are_whole_tiles(num_rows: int, row_bytes: int, budget_bytes: int) -> None:
    rows = chunk_rows(num_rows, row_bytes, budget_bytes)
    assert rows <= ROW_MULTIPLE or rows == num_rows or rows % ROW_MULTIPLE == 0


@given(num_rows=st.integers(0, 500), chunk_size=st.integers(1, 600))
def test_callers_size_is_taken_as_it_is(num_rows: int, chunk_size: int) -> None:
    assert chunk_rows(num_rows, 10**9, 1, chunk_size) == max(min(chunk_size, num_rows), 1)


@given(num_rows=st.integers(0, 60), chunk_size=st.integers(1, 64) | st.none())
def test_spans_cover_every_row_once(num_rows: int, chunk_size: int | None) -> None:
    with config.override(chunk_budget_bytes=7 * 16):
        loop = ChunkLoop(
            torch.zeros(num_rows, 2),
            torch.zeros(4, 2),
            None,
            needs=GradientNeeds(False, False, False),
            compute_dtype=torch.float32,
            accum="fp32",
            chunk_size=chunk_size,
            gain=1.0,
        )
    covered = [row for start, stop in loop.spans() for row in range(start, stop)]
    assert covered == list(range(num_rows))
    assert all(0 < stop - start <= (chunk_size or 7) for start, stop in loop.spans())


def test_rows_at_the_size_of_the_benchmark() -> None:
    # 8192 rows of 128256 bf16 logits under 512 MiB: 2048 rows fit, 4 equal chunks.
    assert chunk_rows(8192, 128256 * 2, 512 * MIB) == 2048


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_budget_by_what_is_needed(device_type: str) -> None:
    budget = chunking.CUDA_BUDGET if device_type == "cuda" else chunking.CPU_BUDGET

    def ask(weight: bool, any_: bool, **options: int) -> int:
        return chunk_budget_bytes(device_type, need_grad_weight=weight, need_grads=any_, **options)

    assert ask(True, True) == budget.with_grad_weight_bytes
    assert ask(False, True) == budget.without_grad_weight_bytes
    assert ask(False, False) == budget.forward_only_bytes


def test_chunk_may_fill_the_room_of_the_final_cast() -> None:
    ask = {"need_grad_weight": True, "need_grads": True}
    assert chunk_budget_bytes("cuda", **ask, final_cast_bytes=2**40) == 2**40
    assert (
        chunk_budget_bytes("cuda", **ask, final_cast_bytes=1)
        == chunking.CUDA_BUDGET.with_grad_weight_bytes
    )
    # Without a weight gradient there is no cast.
    frozen = {"need_grad_weight": False, "need_grads": True}
    assert chunk_budget_bytes("cuda", **frozen, final_cast_bytes=2**40) < 2**40


def test_users_cap_wins() -> None:
    assert (
        chunk_budget_bytes(
            "cuda", need_grad_weight=True, need_grads=True, final_cast_bytes=2**40, override_bytes=5
        )
        == 5
    )
