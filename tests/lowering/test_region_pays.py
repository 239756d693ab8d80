"""When a region is worth it: what chunks and the sums over them hold against whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from greyhound_lowering import region
from greyhound_ops import chunking
from greyhound_ops.ops import row_region
from lowering.rewriting import assert_left, check, reasons

GIB = 2**30


def head(num_rows: int, owner: int = 0, *, learns: bool = True) -> row_region.HeadSize:
    return row_region.HeadSize(
        num_rows, 128256, 4096, torch.bfloat16, torch.bfloat16, learns, learns, owner
    )


@pytest.mark.parametrize(
    ("num_rows", "accum", "at_least", "at_most"),
    [
        # Distillation of two heads of V=128256 and D=4096, both of whose logits take 0.98 GiB at
        # 4096 rows. The learning one's logits gradient is kept, then stands beside its head's.
        (4096, "fp32", 1.9, 2.0),
        # Twice 8192 rows: kept as well, 1.96 + 0.98.
        (8192, "fp32", 2.9, 3.0),
        # Beyond 2 D rows a float32 sum is less: 1.96, and a chunk or the cast of 0.98.
        (32768, "fp32", 2.9, 3.0),
        # A sum in bf16, and half a GiB of chunks, whatever the rows.
        (4096, "weight", 1.4, 1.5),
        (32768, "weight", 1.4, 1.5),
    ],
)
def test_peak_of_a_region(num_rows: int, accum: str, at_least: float, at_most: float) -> None:
    sizes = [head(num_rows), head(num_rows, 1, learns=False)]
    chunked, plain = row_region.peak_bytes(sizes, "cuda", accum, None)
    assert at_least < chunked / GIB < at_most
    logits = num_rows * 128256 * 2
    assert plain == max(2 * logits, logits + 128256 * 4096 * 2)


def test_peak_of_a_slice_of_the_rows() -> None:
    # DPO at 4096 rows: 1.96 GiB against 2.93 measured (3004 MiB).
    chunked, plain = row_region.peak_bytes([head(4096)], "cuda", "fp32", None, cut=True)
    assert [each / GIB for each in (chunked, plain)] == pytest.approx([1.96, 2.94], abs=0.02)


@pytest.mark.parametrize(
    ("num_rows", "teacher", "rows"),
    [
        # Held logits and their gradient take no room of a chunk: all of them at once.
        (4096, False, 4096),
        (8192, False, 8192),
        # A teacher's chunk may take what the gradient of the head takes afterwards, 0.98 GiB of
        # 4096 rows; but all in one chunk would have that gradient beside it.
        (2048, True, 2048),
        (4096, True, 2048),
        (8192, True, 4096),
        # A sum over chunks: what its cast takes.
        (16384, False, 4096),
    ],
)
def test_rows_of_a_chunk(num_rows: int, teacher: bool, rows: int) -> None:
    sizes = [head(num_rows), head(num_rows, 1, learns=False)][: 1 + teacher]
    assert row_region._rows_of(sizes, "cuda", "fp32", None, wants=True) == rows


@pytest.mark.parametrize(
    ("num_rows", "chunked", "plain"), [(2048, 2.94, 1.96), (4096, 2.94, 2.94), (8192, 2.94, 4.89)]
)
def test_peak_of_two_projections_of_one_head(num_rows: int, chunked: float, plain: float) -> None:
    # One float32 sum of 1.96 GiB for both, and a chunk or the cast of 0.98; whole logits are two
    # gradients of logits beside one head's.
    made = row_region.peak_bytes([head(num_rows), head(num_rows)], "cuda", "fp32", None)
    assert [each / GIB for each in made] == pytest.approx([chunked, plain], abs=0.02)


LOG_SOFTMAX = (
    "def body(logits, row_args, whole_args): "
    "v0 = torch.ops.aten._to_copy.default(logits[0], dtype=torch.float32); "
    "v1 = torch.ops.aten._log_softmax.default(v0, 1, False); return [v1]"
)
SQUARES = LOG_SOFTMAX.replace("_log_softmax.default(v0, 1, False)", "square.default(v0)")


@pytest.mark.parametrize(
    ("body", "dtype", "device", "projects_once", "share"),
    [
        (LOG_SOFTMAX, torch.bfloat16, "cuda", True, 1.0),
        (LOG_SOFTMAX, torch.bfloat16, "cuda", False, 0.8),
        (LOG_SOFTMAX, torch.bfloat16, "cpu", True, 0.8),
        (LOG_SOFTMAX, torch.float32, "cuda", True, 0.8),
        (SQUARES, torch.bfloat16, "cuda", True, 0.8),
    ],
)
def test_who_is_faster_may_hold_as_much(
    body: str, dtype: torch.dtype, device: str, projects_once: bool, share: float
) -> None:
    made = region.most_share_of_peak(body, [dtype], device, projects_once=projects_once)
    assert made == share


def squares(rows: int) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 64, bias=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.head(x * 1.0) - y).square().mean()

    def made() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        return Model(), (torch.randn(rows, 8, requires_grad=True), torch.randn(rows, 64))

    return made


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_region_that_saves_little_is_left(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # A chunk of 64 rows, 32 KiB with its gradient; the head's gradient takes 2 KiB.
    monkeypatch.setattr(chunking, "CPU_BUDGET", chunking.Budget(2**15, 2**15, 2**15))
    few, many = squares(128), squares(256)
    # Whole logits of 128 rows take 32 KiB, and stand beside 2 KiB.
    assert_left(
        check(few, min_logits_bytes=None, chunk_size=None, dynamic=dynamic),
        "too little is saved",
    )
    backend = check(many, min_logits_bytes=None, chunk_size=None, dynamic=dynamic)
    assert len(backend.region_nodes) == 1, reasons()
    # Who names a size of his own has decided it.
    backend = check(few, min_logits_bytes=0, chunk_size=None, dynamic=dynamic)
    assert len(backend.region_nodes) == 1, reasons()
