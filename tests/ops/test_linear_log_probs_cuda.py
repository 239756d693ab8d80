"""What only a GPU can show of log-probabilities: no host sync, graph capture, large offsets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from greyhound_ops import reference
from greyhound_ops.functional import (
    chunked_linear_log_probs,
    cross_entropy,
    selective_log_softmax,
)
from greyhound_ops.testing import peak_memory
from log_prob_samples import CASES, EVERYTHING, OPERANDS, Sample, check, make_sample
from samples import dtype_id

pytestmark = pytest.mark.gpu
by_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Every synchronising call of torch raises inside."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train(sample: Sample, upstream: Tensor, **options: Any) -> list[Tensor]:
    """Outputs and gradients, with nothing but the op that could wait for the device."""
    leaves = [getattr(sample, name).detach().requires_grad_() for name in OPERANDS]
    outputs = chunked_linear_log_probs(
        leaves[0], leaves[1], sample.target, leaves[2], temperature=leaves[3], **options,
        **EVERYTHING,
    )  # fmt: skip
    assert not isinstance(outputs, Tensor)
    differentiable = outputs[:3]
    grads = torch.autograd.grad(differentiable, leaves, [upstream] * 3)
    return [*(each.detach() for each in outputs), *grads]


@by_half
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "logit_scale": 0.5}], ids=str)
def test_no_host_sync(options: dict[str, Any], dtype: torch.dtype) -> None:
    sample = make_sample(64, 32, 257, dtype=dtype, device="cuda")
    upstream = torch.randn(64, device="cuda")
    train(sample, upstream, chunk_size=20, **options)  # compiles the kernels
    with no_host_sync():
        train(sample, upstream, chunk_size=20, **options)


def test_no_host_sync_without_gradients() -> None:
    sample = make_sample(256, 64, 512, dtype=torch.bfloat16, device="cuda", temperature=False)

    def step() -> None:
        with torch.no_grad():
            for asked in ({}, {"return_lse": True}, EVERYTHING):
                chunked_linear_log_probs(
                    sample.input, sample.weight, sample.target, sample.bias, **asked
                )

    step()
    with no_host_sync():
        step()


def test_no_host_sync_on_existing_logits() -> None:
    logits = torch.randn(4, 9, 300, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(0, 300, (4, 8), device="cuda")

    def step() -> None:
        shifted = logits[:, :-1]
        loss = cross_entropy(shifted, target) + selective_log_softmax(shifted, target).float().sum()
        torch.autograd.grad(loss, logits)

    step()
    with no_host_sync():
        step()


@by_half
def test_cuda_graph(dtype: torch.dtype) -> None:
    static = make_sample(256, 64, 512, dtype=dtype, device="cuda")
    upstream = torch.randn(256, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train(static, upstream, chunk_size=100)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train(static, upstream, chunk_size=100)
    for _ in range(2):
        fresh = make_sample(256, 64, 512, dtype=dtype, device="cuda")
        for name, value in vars(fresh).items():
            getattr(static, name).copy_(value)
        graph.replay()
        for value, expected in zip(captured, train(fresh, upstream, chunk_size=100), strict=True):
            assert torch.equal(value, expected)


@pytest.mark.parametrize("case", CASES)
def test_a_vocabulary_of_many_blocks(case: str) -> None:
    wanted, options = CASES[case]
    sample = make_sample(300, 128, 40000, dtype=torch.bfloat16, device="cuda", **wanted)
    sample = sample.map(lambda value: value if value.dim() == 1 else value / 4)
    check(sample, only_ours={"chunk_size": 128}, **options)


def test_offsets_beyond_32_bits() -> None:
    rows, classes = 33000, 65536
    assert rows * classes > 2**31
    logits = torch.zeros(rows, classes, dtype=torch.bfloat16, device="cuda")
    logits[-2:] = torch.randn(2, classes, device="cuda")
    index = torch.randint(0, classes, (rows,), device="cuda")
    leaf = logits.requires_grad_()
    upstream = torch.randn(rows, device="cuda")
    for function, plain, options in (
        (selective_log_softmax, reference.selective_log_softmax, {"dtype": torch.float32}),
        (cross_entropy, reference.cross_entropy, {"reduction": "none"}),
    ):
        result = function(leaf, index, **options)
        (grad,) = torch.autograd.grad(result, leaf, upstream)
        last = logits.detach()[-2:].double().requires_grad_()
        kept = {name: value for name, value in options.items() if name != "dtype"}
        expected = plain(last, index[-2:], **kept)
        (truth,) = torch.autograd.grad(expected, last, upstream[-2:].double())
        torch.testing.assert_close(result[-2:].double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad[-2:].double(), truth, rtol=1e-2, atol=1e-6)
        del grad


def test_peak_at_size() -> None:
    # N, D, V = 2048, 1024, 64000 in bf16: logits of 250 MiB, a chunk of 32.
    sample = make_sample(
        2048, 1024, 64000, dtype=torch.bfloat16, device="cuda", bias=False, temperature=False
    )
    input = sample.input.requires_grad_()
    weight = sample.weight.requires_grad_()

    def step() -> None:
        out = chunked_linear_log_probs(
            input, weight, sample.target, return_entropy=True, chunk_size=256,
            grad_weight_accum_dtype="weight",
        )  # fmt: skip
        assert not isinstance(out, Tensor)
        torch.autograd.grad(out.log_probs.sum() + out.entropy.sum(), [input, weight])

    step()
    with peak_memory("cuda") as peak:
        step()
    chunk = 256 * 64000 * 2
    assert peak.bytes <= chunk + input.nbytes + weight.nbytes + 2**20
