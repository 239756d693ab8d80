"""Products over the rows that count, and the loop that is made of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from greyhound_ops import config
from greyhound_ops.functional import chunked_linear_cross_entropy, chunked_linear_log_probs
from greyhound_ops.kernels import products
from greyhound_ops.ops import live_loop
from greyhound_ops.reference import linear_cross_entropy as reference
from greyhound_ops.testing import assert_within_budget
from samples import SLACK, interpreter_slack

IGNORED = -100


@pytest.mark.parametrize("num_rows", [1, 16, 37, 5000])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_rows_that_count_come_first(
    num_rows: int, share: float, kernel_device: torch.device
) -> None:
    target = torch.randint(0, 9, (2 * num_rows,), device=kernel_device)[::2]
    target[torch.rand(num_rows, device=kernel_device) < share] = IGNORED
    order, labels, count = products.compact(target, IGNORED)
    kept = target != IGNORED
    expected = torch.cat([kept.nonzero()[:, 0], (~kept).nonzero()[:, 0]])
    assert torch.equal(order, expected)
    assert torch.equal(labels, target[expected])
    assert count.item() == kept.sum().item()


def make(
    device: torch.device, live: int, num_rows: int, classes: int, hidden: int
) -> tuple[products.Products, Tensor, Tensor, Tensor]:
    """Products of a weight, with input and target of which ``live`` rows count."""
    target = torch.randint(0, classes, (num_rows,), device=device)
    target[torch.randperm(num_rows, device=device)[live:]] = IGNORED
    input = torch.randn(num_rows, hidden, device=device).bfloat16()
    weight = torch.randn(classes, hidden, device=device).bfloat16()
    order, _, count = products.compact(target, IGNORED)
    bias = torch.randn(classes, device=device).bfloat16()
    return products.Products(weight, bias, order, count), input, weight, target


@pytest.mark.parametrize("live", [0, 3, 130, 200])
def test_products_end_with_the_last_row_that_counts(live: int, kernel_device: torch.device) -> None:
    num_rows, classes, hidden = 200, 300, 264
    kernels, input, weight, _ = make(kernel_device, live, num_rows, classes, hidden)
    # An ignored row may hold anything.
    input[kernels.order[live:]] = float("nan")
    rows = input.new_full((num_rows, hidden), float("nan"))
    kernels.gather(input, rows, 0)
    assert torch.equal(rows[:live], input[kernels.order[:live]])
    assert not rows[live:].any()

    logits = input.new_full((num_rows, 304), 7.0)[:, :classes]
    kernels.logits(rows, logits, 0)
    assert kernels.bias is not None
    plain = rows[:live].float() @ weight.float().t() + kernels.bias.float()
    torch.testing.assert_close(logits[:live].float(), plain, rtol=2**-7, atol=1e-2)
    end = -(-live // products.BLOCK_M) * products.BLOCK_M
    assert (logits[end:] == 7.0).all()  # tiles behind are not computed

    grad = (torch.randn(num_rows, classes, device=kernel_device) / 16).bfloat16()
    grad = torch.nn.functional.pad(grad, (0, 4))[:, :classes]
    parts = kernels.partial_sums().fill_(float("nan"))
    out = input.new_full((num_rows, hidden), 7.0)
    for start in range(0, num_rows, products.BLOCK_M):
        piece = grad[start : start + products.BLOCK_M]
        kernels.grad_input(piece, parts, start)
        kernels.finish_input(parts, out, start, piece.shape[0])
    plain = grad.float() @ weight.float()
    counting, others = kernels.order[:live], kernels.order[live:]
    torch.testing.assert_close(out[counting].float(), plain[:live], rtol=2**-7, atol=1e-2)
    assert not out[others].any()


@pytest.mark.parametrize("live", [0, 5, 64, 100, 200])
@pytest.mark.parametrize(
    ("dtype", "has_low"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)]
)
def test_grad_weight_over_chunks(
    live: int, dtype: torch.dtype, has_low: bool, kernel_device: torch.device
) -> None:
    num_rows, classes, hidden, size = 200, 150, 136, 64
    kernels, input, _, _ = make(kernel_device, live, num_rows, classes, hidden)
    high = torch.full((classes, hidden), float("nan"), dtype=dtype, device=kernel_device)
    low = torch.full_like(high, float("nan")) if has_low else None
    grad = (torch.randn(num_rows, 152, device=kernel_device) / 16).bfloat16()[:, :classes]
    grad[live:] = 0.0
    rows = input.new_empty(num_rows, hidden)
    kernels.gather(input, rows, 0)
    for start in range(0, num_rows, size):
        here = slice(start, start + size)
        kernels.grad_weight(grad[here], rows[here].contiguous(), high, low, start, num_rows)
    exact = grad.double().t() @ rows.double()
    error = (high.double() - exact).norm() / exact.norm().clamp_min(1e-30)
    rounded = (exact.to(dtype).double() - exact).norm() / exact.norm().clamp_min(1e-30)
    if live == 0:
        assert not high.any()
    elif dtype == torch.float32:
        assert error < 1e-6
    else:
        # One rounding at the end; without the second half, one a chunk that counts.
        chunks = -(-live // size)
        slack = interpreter_slack(dtype) * (1 if has_low else chunks)
        assert error <= rounded * (1.05 if has_low else chunks**0.5 * 1.2) + slack


OPTIONS = [
    {},
    {"label_smoothing": 0.1, "class_weight": True},
    {"z_loss": 0.01, "softcap": 4.0, "logit_scale": 0.5},
    {"row_weight": True, "reduction": "sum"},
]


@pytest.mark.parametrize(
    ("share", "chunk_size", "accum", "weight_dtype", "options"),
    [
        (share, size, accum, dtype, OPTIONS[index % len(OPTIONS)])
        for index, (share, size, (accum, dtype)) in enumerate(
            itertools.product(
                [0.0, 0.5, 0.95, 1.0],
                [None, 64],
                [
                    ("fp32", torch.bfloat16),
                    ("weight", torch.bfloat16),
                    ("fp32", torch.float32),
                ],
            )
        )
    ],
)
def test_loop_equals_the_reference(
    share: float,
    chunk_size: int | None,
    accum: str,
    weight_dtype: torch.dtype,
    options: dict[str, object],
    kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_loop, "LEAST_LOGITS_BYTES", 0)
    calls = counted(monkeypatch)
    num_rows, classes, hidden = 150, 133, 72
    input = torch.randn(num_rows, hidden, device=kernel_device).to(weight_dtype)
    weight = torch.randn(classes, hidden, device=kernel_device).to(weight_dtype)
    target = torch.randint(0, classes, (num_rows,), device=kernel_device)
    target[torch.rand(num_rows, device=kernel_device) < share] = IGNORED
    keywords = dict(options)
    if keywords.pop("class_weight", False):
        keywords["class_weight"] = torch.rand(classes, device=kernel_device)
    if keywords.pop("row_weight", False):
        keywords["row_weight"] = torch.rand(num_rows, device=kernel_device)

    def run(function: Callable[..., Tensor], dtype: torch.dtype, **more: object) -> list[Tensor]:
        leaves = [each.to(dtype).detach().requires_grad_() for each in (input, weight)]
        loss = function(*leaves, target, ignore_index=IGNORED, **keywords, **more)
        return [loss.detach(), *torch.autograd.grad(loss, leaves, torch.full_like(loss, 1.7))]

    autocast = torch.autocast(
        kernel_device.type, torch.bfloat16, enabled=weight_dtype != torch.bfloat16
    )
    with config.override(kernels="triton"), autocast:
        ours = run(
            chunked_linear_cross_entropy, weight_dtype, chunk_size=chunk_size,
            grad_weight_accum_dtype=accum,
        )  # fmt: skip
    assert calls == [1]
    if share == 1.0:
        assert not any(each.any() for each in ours)
        return
    with autocast:
        plain = run(reference, weight_dtype)
    # Truth starts from what the products read.
    input, weight = input.bfloat16(), weight.bfloat16()
    exact = run(reference, torch.float64)
    slack = SLACK[torch.bfloat16] + interpreter_slack(torch.bfloat16)
    names = ("loss", "grad_input", "grad_weight")
    for name, one, other, truth in zip(names, ours, plain, exact, strict=True):
        assert_within_budget(name, one, other, truth, slack=slack)
    assert not ours[1][target == IGNORED].any()


@pytest.mark.fault("B74")
@pytest.mark.parametrize("call", ["learning head", "frozen head", "loss alone", "log_probs"])
@pytest.mark.parametrize("layout", ["expanded", "strided"])
def test_a_bias_with_strides(
    call: str, layout: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernels read a bias as if it had none.
    monkeypatch.setattr(live_loop, "LEAST_LOGITS_BYTES", 0)
    rows, classes, hidden = 130, 300, 64
    input = torch.randn(rows, hidden, device=kernel_device).bfloat16().requires_grad_()
    weight = torch.randn(classes, hidden, device=kernel_device).bfloat16()
    weight.requires_grad_(call == "learning head")
    bias = {
        "expanded": torch.randn(1, device=kernel_device).bfloat16().expand(classes),
        "strided": torch.randn(classes, 2, device=kernel_device).mul(3.0).bfloat16()[:, 1],
    }[layout]
    target = torch.randint(0, classes, (rows,), device=kernel_device)
    function: Callable[..., Tensor] = chunked_linear_cross_entropy
    if call == "log_probs":
        function = chunked_linear_log_probs

    def run(bias: Tensor) -> list[Tensor]:
        with torch.set_grad_enabled(call.endswith("head")):
            loss = function(input, weight, target, bias)
        if not call.endswith("head"):
            return [loss]
        leaves = [each for each in (input, weight) if each.requires_grad]
        return [loss, *torch.autograd.grad(loss, leaves)]

    with config.override(kernels="triton"):
        ours, dense = run(bias), run(bias.contiguous())
    assert all(map(torch.equal, ours, dense))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the runs of the loop."""
    calls: list[int] = []
    original = live_loop.run

    def run(*args: Any, **options: Any) -> None:
        calls.append(1)
        original(*args, **options)

    monkeypatch.setattr(live_loop, "run", run)
    return calls


# ----------------------------------------------------------------------------- pieces of grad_input


@triton.jit
def _splits_kernel(tiles_ptr, out_ptr, programs, MOST: tl.constexpr, UNITS: tl.constexpr):
    at = tl.program_id(0)
    tl.store(out_ptr + at, products._splits(tl.load(tiles_ptr + at), programs, MOST, UNITS))


@pytest.mark.parametrize("programs", [2, 108, 132])
def test_the_host_plans_with_the_splits_of_the_kernel(
    programs: int, kernel_device: torch.device
) -> None:
    tiles = torch.arange(1, 300, dtype=torch.int32, device=kernel_device)
    found = torch.empty_like(tiles)
    _splits_kernel[(len(tiles),)](
        tiles, found, programs, MOST=products.MOST_SPLITS, UNITS=products.MOST_UNITS
    )
    assert found.tolist() == [products.splits(each, programs) for each in tiles.tolist()]


@pytest.mark.parametrize("hidden", [8, 768, 1536, 2048, 2304, 2880, 3584, 4096, 5120, 8192, 16384])
@pytest.mark.parametrize("rows", [1, 128, 640, 1024, 2048, 20001])
def test_pieces_leave_few_programs_idle(hidden: int, rows: int) -> None:
    programs, tiles_n = 132, triton.cdiv(hidden, products.BLOCK_N)
    most = min(max(programs * products.MOST_UNITS // tiles_n, 1), 16)
    tiles = triton.cdiv(rows, products.BLOCK_M)
    pieces = products.input_pieces(tiles, tiles_n, programs, most)
    assert sum(pieces) == tiles
    assert max(pieces) <= most
    waves = sum(products._waves(each * tiles_n, programs) for each in pieces)
    least = tiles * tiles_n / programs
    if least >= 0.5:  # below, no cut of the sums keeps all programs busy
        # 16 tiles at a time took 1.83 of the least at D=2304 and 1.38 at D=1536 and 2880.
        assert waves <= 1.12 * least


def test_pieces_are_all_rows_in_order(kernel_device: torch.device) -> None:
    weight = torch.empty(300, 264, dtype=torch.bfloat16, device=kernel_device)
    order = torch.arange(700, device=kernel_device)
    kernels = products.Products(weight, None, order, order.new_empty((), dtype=torch.int32))
    for rows in (1, 127, 128, 129, 700):
        pieces = kernels.pieces(rows)
        assert [row for piece in pieces for row in range(*piece)] == list(range(rows))
        assert all(stop - start <= kernels.input_rows for start, stop in pieces)


@pytest.mark.filterwarnings("error")
def test_what_can_be_read_in_bulk() -> None:
    # A fake tensor stands for one that begins where memory is allocated. Torch warns of its
    # address and gives 0.
    memory = torch.zeros(16 * 65, dtype=torch.bfloat16)
    cases = {16: True, 17: False, 24: True}
    for stride, ready in cases.items():
        assert products.tma_ready(memory.as_strided((4, 16), (stride, 1))) is ready
        with FakeTensorMode():
            fake = torch.empty_strided((4, 16), (stride, 1), dtype=torch.bfloat16, device="cuda")
        assert products.tma_ready(fake) is ready
    assert not products.tma_ready(memory[1:].as_strided((4, 16), (16, 1)))


# --------------------------------------------------------- logits where the head's gradient will be


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    ("rows", "accum", "weight_dtype", "budget"),
    [
        (100, "fp32", torch.bfloat16, None),  # all of them in the gradient's memory
        (200, "fp32", torch.bfloat16, None),  # some beside it, in the same product
        (330, "fp32", torch.bfloat16, 2**15),  # several chunks, whose sum has two halves
        (330, "weight", torch.bfloat16, 2**15),
        (330, "fp32", torch.float32, 2**15),  # a gradient of twice the bytes
    ],
)
def test_logits_in_the_gradients_memory(
    rows: int,
    accum: str,
    weight_dtype: torch.dtype,
    budget: int | None,
    share: float,
    kernel_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_loop, "LEAST_LOGITS_BYTES", 0)
    monkeypatch.setattr(live_loop, "PART_ROWS", 128)
    # Few panels at a time, so that products are written over logits that others have read.
    monkeypatch.setattr(products.Products, "spare_panels", lambda *_: 2)
    calls = counted(monkeypatch)
    classes, hidden = 500, 136
    input = torch.randn(rows, hidden, device=kernel_device).to(weight_dtype)
    weight = torch.randn(classes, hidden, device=kernel_device).to(weight_dtype)
    target = torch.randint(0, classes, (rows,), device=kernel_device)
    target[torch.rand(rows, device=kernel_device) < share] = IGNORED

    def run(function: Callable[..., Tensor], dtype: torch.dtype, **more: object) -> list[Tensor]:
        leaves = [each.to(dtype).detach().requires_grad_() for each in (input, weight)]
        loss = function(*leaves, target, ignore_index=IGNORED, **more)
        return [loss.detach(), *torch.autograd.grad(loss, leaves, torch.full_like(loss, 1.7))]

    autocast = torch.autocast(
        kernel_device.type, torch.bfloat16, enabled=weight_dtype != torch.bfloat16
    )
    with config.override(kernels="triton", chunk_budget_bytes=budget), autocast:
        ours = run(chunked_linear_cross_entropy, weight_dtype, grad_weight_accum_dtype=accum)
    assert calls == [1]
    if share == 1.0:
        assert not any(each.any() for each in ours)
        return
    with autocast:
        plain = run(reference, weight_dtype)
    input, weight = input.bfloat16(), weight.bfloat16()
    exact = run(reference, torch.float64)
    chunks = 1 if budget is None or accum == "fp32" else 5
    slack = SLACK[torch.bfloat16] * chunks**0.5 + interpreter_slack(torch.bfloat16)
    names = ("loss", "grad_input", "grad_weight")
    for name, one, other, truth in zip(names, ours, plain, exact, strict=True):
        assert_within_budget(name, one, other, truth, slack=slack)
    # Memory behind the last class is that of its panel, no more.
    assert ours[2].untyped_storage().nbytes() == 512 * hidden * weight_dtype.itemsize
