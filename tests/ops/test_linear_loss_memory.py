"""Peak memory of any loss: a chunk, what the callable holds for it, the gradients asked for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from greyhound_ops.functional import autograd_loss_and_logits_grad, chunked_linear_loss
from greyhound_ops.ops import gradients, loss_call
from greyhound_ops.testing import peak_memory
from samples import dtype_id

# [N, V] is far larger than all that is allowed, and [V, D] far larger than the slack.
ROWS, HIDDEN, CLASSES, CHUNK = 512, 64, 2000, 16
SLACK_BYTES = 48 * ROWS + 24 * CLASSES
OPERANDS = ("input", "weight", "bias")
NEEDS = [subset for size in range(4) for subset in itertools.combinations(OPERANDS, size)]
HALF = (torch.bfloat16, torch.float16)
# Every subset in float32, where the products have no copies of their own; all of them beside.
CASES = [(torch.float32, subset) for subset in NEEDS] + [
    (dtype, subset) for dtype in HALF for subset in ((), ("input",), OPERANDS)
]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as small against these tensors as 32 MiB are against those of a model."""
    monkeypatch.setattr(
        gradients,
        "blocks",
        lambda tensor: [slice(i, i + 100) for i in range(0, tensor.shape[0], 100)],
    )


def squares(logits: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient over the logits themselves, so that nothing is held beside them."""
    return logits.square().sum(), logits.mul_(2)


def operands(dtype: torch.dtype, device: torch.device, needs: tuple[str, ...]) -> list[Tensor]:
    shapes = {"input": (ROWS, HIDDEN), "weight": (CLASSES, HIDDEN), "bias": (CLASSES,)}
    return [
        torch.randn(shape, dtype=dtype, device=device).div(8).requires_grad_(name in needs)
        for name, shape in shapes.items()
    ]


def step(function: Any, tensors: list[Tensor], *args: Any, **options: Any) -> None:
    for tensor in tensors:
        tensor.grad = None
    loss = chunked_linear_loss(
        tensors[0], tensors[1], function, *args, bias=tensors[2], chunk_size=CHUNK, **options
    )
    if loss.requires_grad:
        loss.backward(torch.full_like(loss, 0.5))
    assert loss.isfinite()


def peak_bytes(function: Any, tensors: list[Tensor], *args: Any, **options: Any) -> int:
    """Run once before, so that libraries have their workspaces."""
    step(function, tensors, *args, **options)
    for tensor in tensors:
        tensor.grad = None
    with peak_memory(tensors[0].device) as peak:
        step(function, tensors, *args, **options)
    return peak.bytes


def allowed_bytes(tensors: list[Tensor], chunks: float, accum: str) -> int:
    """Gradients, the fp32 accumulator, and a number of fp32 chunks."""
    allowed = int(chunks * CHUNK * CLASSES * 4) + SLACK_BYTES
    for name, tensor in zip(OPERANDS, tensors, strict=True):
        if tensor.requires_grad:
            allowed += tensor.nbytes
            accumulated = name == "weight" and accum == "fp32" and tensor.dtype != torch.float32
            if accumulated or tensor.dtype == torch.float16:
                allowed += tensor.numel() * 4
    if tensors[1].dtype != torch.float32:
        # oneDNN packs a low-precision operand of the bare product into a copy of its own.
        allowed += tensors[1].nbytes if tensors[1].device.type == "cpu" else 0
    return allowed


@pytest.mark.parametrize(
    ("dtype", "needs"),
    CASES,
    ids=lambda value: dtype_id(value) if isinstance(value, torch.dtype) else "+".join(value),
)
def test_direct(dtype: torch.dtype, needs: tuple[str, ...], device: torch.device) -> None:
    tensors = operands(dtype, device, needs)
    # The chunk, its square, and on the CPU its gradient in fp32 and in the dtype of a product.
    chunks = 2.0 if dtype == torch.float32 or device.type == "cuda" else 3.0
    peak = peak_bytes(squares, tensors)
    allowed = allowed_bytes(tensors, chunks, "fp32")
    assert allowed < ROWS * CLASSES * dtype.itemsize, "the logits would pass unnoticed"
    assert peak <= allowed


@pytest.mark.parametrize("accum", ["fp32", "weight"])
def test_accumulation(accum: str, device: torch.device) -> None:
    tensors = operands(torch.bfloat16, device, OPERANDS)
    peak = peak_bytes(squares, tensors, grad_weight_accum_dtype=accum)
    assert peak <= allowed_bytes(tensors, 3.0, accum)


def test_adapter(device: torch.device) -> None:
    # Plain autograd over [N, V] holds the logits, their gradient and what the loss saves.
    tensors = operands(torch.float32, device, OPERANDS)
    function = autograd_loss_and_logits_grad(lambda logits: logits.square().sum())
    assert peak_bytes(function, tensors) <= allowed_bytes(tensors, 4.0, "fp32")
    logits = ROWS * CLASSES * 4
    with peak_memory(device) as peak:
        plain = torch.nn.functional.linear(*tensors).square().sum()
        plain.backward()
    assert peak.bytes > 2 * logits > 2 * allowed_bytes(tensors, 4.0, "fp32")


def test_frozen_head_costs_no_buffer_of_its_size(device: torch.device) -> None:
    weight = torch.randn(2000, 512, device=device)
    input = torch.randn(32, 512, device=device, requires_grad=True)

    def run() -> None:
        chunked_linear_loss(input, weight, squares, chunk_size=8).backward()

    run()
    input.grad = None
    with peak_memory(device) as peak:
        run()
    assert peak.bytes < weight.nbytes / 4


def test_learnable_rows_are_cut_without_a_copy(device: torch.device) -> None:
    # A teacher's logits, for one: their gradient is made in place, one chunk at a time.
    tensors = operands(torch.float32, device, ())
    teacher = torch.randn(ROWS, CLASSES, device=device, requires_grad=True)
    function = autograd_loss_and_logits_grad(lambda logits, teacher: (logits * teacher).sum())
    step(function, tensors, teacher)
    teacher.grad = None
    with peak_memory(device) as peak:
        step(function, tensors, teacher)
    assert peak.bytes <= teacher.nbytes + allowed_bytes(tensors, 4.0, "fp32")


@pytest.mark.usefixtures("fresh_compiler")
def test_one_chunk_lives_in_a_compiled_graph(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(
        loss_call, "compile_callable", lambda function: torch.compile(function, backend="aot_eager")
    )
    tensors = operands(torch.float32, device, OPERANDS)
    function = autograd_loss_and_logits_grad(lambda logits: logits.square().sum())
    compiled = torch.compile(
        lambda x, w, b: chunked_linear_loss(x, w, function, bias=b, chunk_size=CHUNK) * 2,
        backend="aot_eager",
        fullgraph=True,
    )

    def run() -> None:
        for tensor in tensors:
            tensor.grad = None
        compiled(*tensors).backward()

    run()
    for tensor in tensors:
        tensor.grad = None
    with peak_memory(device) as peak:
        run()
    # In a compiled backward that Inductor does not see a scaled gradient is one more.
    weights = 2 * tensors[1].nbytes + 2 * tensors[0].nbytes
    assert peak.bytes <= allowed_bytes(tensors, 5.0, "fp32") + weights < ROWS * CLASSES * 4
