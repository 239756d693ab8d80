"""What only a GPU can show: no host sync, graph capture, bad targets, large offsets."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from greyhound_ops import config
from greyhound_ops.errors import TargetOutOfRangeError
from greyhound_ops.functional import chunked_linear_cross_entropy
from greyhound_ops.ops import live_loop
from greyhound_ops.ops.chunk_loop import GradientNeeds
from greyhound_ops.testing import peak_memory, relative_error
from samples import (
    CASES,
    REDUCTIONS,
    Sample,
    assert_equal_results,
    check_against_reference,
    dtype_id,
    make_sample,
    run,
)

pytestmark = pytest.mark.gpu
by_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
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


def train(sample: Sample, upstream: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    """Loss and gradients, with nothing but the op that could wait for the device."""
    leaves = [
        value.detach().requires_grad_()
        for value in (sample.input, sample.weight, sample.bias)
        if value is not None
    ]
    loss = chunked_linear_cross_entropy(
        leaves[0],
        leaves[1],
        sample.target,
        leaves[2] if len(leaves) > 2 else None,
        class_weight=sample.class_weight,
        **options,
    )
    return loss.detach(), *torch.autograd.grad(loss, leaves, upstream)


def upstream_for(reduction: str, rows: int) -> torch.Tensor:
    return torch.randn((rows,) if reduction == "none" else (), device="cuda")


@pytest.mark.fault("R12")
@by_half
@by_reduction
@pytest.mark.parametrize("case", CASES)
def test_no_host_sync(case: str, reduction: str, dtype: torch.dtype) -> None:
    wanted, options = CASES[case]
    sample = make_sample(64, 32, 257, dtype=dtype, device="cuda", **wanted)
    upstream = upstream_for(reduction, 64)
    options = {"reduction": reduction, "chunk_size": 20, **options}
    train(sample, upstream, **options)  # compiles the kernels
    with no_host_sync():
        train(sample, upstream, **options)


@by_reduction
def test_no_host_sync_with_a_frozen_head(reduction: str) -> None:
    sample = make_sample(256, 64, 512, dtype=torch.bfloat16, device="cuda")
    input, upstream = sample.input.requires_grad_(), upstream_for(reduction, 256)

    def step() -> None:
        loss = chunked_linear_cross_entropy(
            input, sample.weight, sample.target, reduction=reduction
        )
        torch.autograd.grad(loss, input, upstream)
        with torch.no_grad():
            chunked_linear_cross_entropy(input, sample.weight, sample.target, reduction=reduction)

    step()
    with no_host_sync():
        step()


def test_the_sync_check_works() -> None:
    with no_host_sync(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()


@by_half
@by_reduction
@pytest.mark.parametrize("frozen", [False, True], ids=["training", "frozen-head"])
def test_cuda_graph(frozen: bool, reduction: str, dtype: torch.dtype) -> None:
    rows = 256
    sample = make_sample(rows, 64, 512, dtype=dtype, device="cuda")
    static = {name: value.clone() for name, value in vars(sample).items() if value is not None}
    leaves = [static["input"].requires_grad_()]
    if not frozen:
        leaves.append(static["weight"].requires_grad_())
    upstream = upstream_for(reduction, rows)

    def step(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        loss = chunked_linear_cross_entropy(
            tensors["input"], tensors["weight"], tensors["target"],
            reduction=reduction, chunk_size=100,
        )  # fmt: skip
        wanted = [tensors["input"]] if frozen else [tensors["input"], tensors["weight"]]
        return loss.detach(), *torch.autograd.grad(loss, wanted, upstream)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static)
    for keep in (1.0, 0.5, 0.0):
        # New targets, each time with another number of rows that count: the divisor of the mean
        # must be made anew on the device.
        fresh = torch.randint(0, 512, (rows,), device="cuda")
        fresh[torch.rand(rows, device="cuda") >= keep] = -100
        with torch.no_grad():
            static["target"].copy_(fresh)
            static["input"].copy_(torch.randn_like(static["input"]))
        graph.replay()
        again = {name: value.detach().clone() for name, value in static.items()}
        again["input"].requires_grad_()
        again["weight"].requires_grad_(not frozen)
        for value, expected in zip(captured, step(again), strict=True):
            # cuBLAS may split a product otherwise while a graph is captured.
            torch.testing.assert_close(value, expected)


@pytest.mark.fault("B16", "R04")
@by_reduction
@pytest.mark.parametrize("value", [-1, 257, 2**40])
@pytest.mark.parametrize("case", ["plain", "all"])
def test_target_out_of_range_becomes_nan(case: str, value: int, reduction: str) -> None:
    wanted, options = CASES[case]
    sample = make_sample(16, 32, 257, device="cuda", ignored=0.0, **wanted)
    target = sample.target.clone()
    target[5] = value
    bad = sample.replace(target=target)
    options = {"reduction": reduction, "chunk_size": 6, **options}
    with no_host_sync():
        loss, grad_input, *_ = train(bad, torch.ones_like(upstream_for(reduction, 16)), **options)
    torch.cuda.synchronize()  # an illegal access would surface here
    assert grad_input[5].isnan().all()
    if reduction == "none":
        assert loss.isnan().nonzero().flatten().tolist() == [5]
    else:
        assert loss.isnan()
    if reduction != "mean":
        assert grad_input[torch.arange(16, device="cuda") != 5].isfinite().all()


@by_reduction
def test_target_out_of_range_is_an_error_with_checks(reduction: str) -> None:
    sample = make_sample(16, device="cuda", ignored=0.0)
    target = sample.target.clone()
    target[5] = 11
    with (
        config.override(checks=True),
        pytest.raises(TargetOutOfRangeError, match="got 11 in row 5"),
    ):
        chunked_linear_cross_entropy(sample.input, sample.weight, target, reduction=reduction)


@pytest.mark.fault("R08")
@by_half
@by_reduction
@pytest.mark.parametrize("case", ["plain", "bias", "all"])
@pytest.mark.parametrize("accum", ["fp32", "weight"])
def test_numerics(accum: str, case: str, reduction: str, dtype: torch.dtype) -> None:
    wanted, options = CASES[case]
    sample = make_sample(1024, 256, 8200, dtype=dtype, device="cuda", **wanted)
    # Logits of about unit size, as a trained head has them.
    sample = sample.replace(weight=sample.weight / 16)
    chunks = 4
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    check_against_reference(
        sample,
        reduction=reduction,
        upstream=1024.0 if dtype == torch.float16 and reduction == "mean" else 0.7,
        slack=unit * (chunks if accum == "weight" else 1),
        only_ours={"chunk_size": 1024 // chunks, "grad_weight_accum_dtype": accum},
        **options,
    )


@by_reduction
@pytest.mark.parametrize("large_losses", [False, True], ids=["usual", "large-losses"])
def test_numerics_of_a_frozen_head(large_losses: bool, reduction: str) -> None:
    sample = make_sample(1000, 256, 8200, dtype=torch.bfloat16, device="cuda")
    sample = sample.replace(weight=sample.weight / 16)
    if large_losses:
        input = sample.input.clone()
        input[::50] *= 128
        sample = sample.replace(input=input)
    check_against_reference(sample, reduction=reduction, frozen=("weight",))


@by_reduction
def test_float32_products_follow_torchs_setting(reduction: str) -> None:
    before = torch.get_float32_matmul_precision()
    sample = make_sample(256, 256, 512, device="cuda")
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            check_against_reference(sample, reduction=reduction)
    finally:
        torch.set_float32_matmul_precision(before)


def test_row_offsets_beyond_int32() -> None:
    # One chunk of more than 2^31 elements; the last row shows a wrapped offset.
    rows, classes = 40_000, 60_000
    if torch.cuda.get_device_properties(0).total_memory < 30 * 2**30:
        pytest.skip("needs 30 GiB of GPU memory")
    sample = make_sample(rows, 16, classes, dtype=torch.bfloat16, device="cuda")
    whole = run(chunked_linear_cross_entropy, sample, reduction="none", chunk_size=rows)
    parts = run(chunked_linear_cross_entropy, sample, reduction="none", chunk_size=5000)
    torch.testing.assert_close(whole.loss, parts.loss)
    # As a whole and at the end: of 640000 bf16 numbers a few are rounded the other way.
    assert relative_error(whole.input, parts.input) < 1e-3
    assert relative_error(whole.input[-1], parts.input[-1]) < 1e-2


@by_reduction
def test_default_chunks_stay_within_the_budget(reduction: str) -> None:
    # 16384 rows of 64000 bf16 logits are 2 GiB.
    sample = make_sample(16384, 64, 64000, dtype=torch.bfloat16, device="cuda")
    run(chunked_linear_cross_entropy, sample, reduction=reduction)
    with peak_memory("cuda") as peak:
        run(chunked_linear_cross_entropy, sample, reduction=reduction)
    gradients = 16384 * 64 * 2 + 64000 * 64 * (2 + 4)
    assert peak.bytes <= 512 * 2**20 + gradients + 16 * 2**20


def test_chunk_is_free_before_the_final_cast() -> None:
    # The accumulator, and beside it either the chunk or the cast, never both.
    rows, hidden, classes = 1024, 2048, 32000
    sample = make_sample(rows, hidden, classes, dtype=torch.bfloat16, device="cuda")
    options = {"frozen": ("input",), "chunk_size": rows}
    run(chunked_linear_cross_entropy, sample, **options)
    with peak_memory("cuda") as peak:
        run(chunked_linear_cross_entropy, sample, **options)
    accumulator, cast, chunk = classes * hidden * 4, classes * hidden * 2, rows * classes * 2
    assert peak.bytes <= accumulator + max(cast, chunk) + chunk // 4


@pytest.mark.parametrize("skip_ignored", [True, False])
def test_more_logits_than_any_32_bits_count(skip_ignored: bool) -> None:
    # 33 billion logits; a chunk of 16384 rows has 4 billion.
    rows, hidden, classes, chunk = 131072, 64, 256000, 16384
    sample = make_sample(rows, hidden, classes, dtype=torch.bfloat16, device="cuda", ignored=0.3)
    sample = sample.replace(input=sample.input / 8)  # so that a row has more than one likely class

    def made(part: slice) -> tuple[torch.Tensor, ...]:
        here = sample.replace(input=sample.input[part], target=sample.target[part])
        upstream = torch.tensor(1e-3, device="cuda")
        return train(here, upstream, reduction="sum", chunk_size=chunk)

    with config.override(skip_ignored=skip_ignored):
        loss, grad_input, grad_weight = made(slice(None))
        halves = [made(slice(start, start + rows // 2)) for start in (0, rows // 2)]
    torch.testing.assert_close(loss, halves[0][0] + halves[1][0], rtol=1e-5, atol=0)
    assert relative_error(grad_input, torch.cat([halves[0][1], halves[1][1]])) < 2e-3
    assert relative_error(grad_weight, halves[0][2].float() + halves[1][2].float()) < 4e-3
    for part in (slice(0, 32), slice(rows - 32, rows)):
        x = sample.input[part].float().requires_grad_()
        plain = torch.nn.functional.cross_entropy(
            x @ sample.weight.float().t(), sample.target[part], reduction="sum"
        )
        (expected,) = torch.autograd.grad(plain, x, torch.tensor(1e-3, device="cuda"))
        assert relative_error(grad_input[part], expected) < 1e-2


@by_reduction
def test_another_stream(reduction: str) -> None:
    sample = make_sample(128, 64, 257, device="cuda", bias=True)
    expected = run(chunked_linear_cross_entropy, sample, reduction=reduction)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = run(chunked_linear_cross_entropy, sample, reduction=reduction)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert_equal_results(result, expected)


def test_another_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    sample = make_sample(64, 32, 257, device="cuda:1", bias=True)
    assert torch.cuda.current_device() == 0
    check_against_reference(sample)


# ----------------------------------------------- the loop over the rows that count, on two streams


@pytest.fixture
def live_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """That loop for shapes of any size; it has to be taken."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU with tensor memory accelerators")
    monkeypatch.setattr(live_loop, "LEAST_LOGITS_BYTES", 0)
    monkeypatch.setattr(live_loop, "PART_ROWS", 128)
    assert live_loop.serves(
        torch.empty(8, 64, device="cuda", dtype=torch.bfloat16),
        torch.empty(512, 64, device="cuda", dtype=torch.bfloat16),
        GradientNeeds(True, True, False),
        torch.bfloat16,
    )


def live_sample(rows: int = 700, ignored: float = 0.4) -> Sample:
    return make_sample(rows, 64, 1000, dtype=torch.bfloat16, device="cuda", ignored=ignored)


@pytest.mark.usefixtures("live_rows")
@pytest.mark.parametrize("accum", ["fp32", "weight"])
@pytest.mark.parametrize("chunk_size", [None, 100, 256])
@pytest.mark.parametrize("ignored", [0.0, 0.5, 0.97])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_live_rows_equal_the_reference(
    softcap: float | None, ignored: float, chunk_size: int | None, accum: str
) -> None:
    check_against_reference(
        live_sample(ignored=ignored),
        softcap=softcap,
        upstream=1.7,
        only_ours={"chunk_size": chunk_size, "grad_weight_accum_dtype": accum},
    )


@pytest.mark.usefixtures("live_rows")
@pytest.mark.parametrize("chunk_size", [None, 256])
def test_live_rows_wait_for_nothing(chunk_size: int | None) -> None:
    sample, upstream = live_sample(), upstream_for("mean", 700)
    train(sample, upstream, chunk_size=chunk_size)
    with no_host_sync():
        train(sample, upstream, chunk_size=chunk_size)


@pytest.mark.usefixtures("live_rows")
@pytest.mark.parametrize("chunk_size", [None, 256])
def test_live_rows_are_the_same_every_time(chunk_size: int | None) -> None:
    sample, upstream = live_sample(), upstream_for("mean", 700)
    first = train(sample, upstream, chunk_size=chunk_size)
    for _ in range(20):
        # Other work in the way of both streams, and other memory under their buffers.
        torch.randn(2000, 2000, device="cuda").matmul(torch.randn(2000, 2000, device="cuda"))
        for one, other in zip(first, train(sample, upstream, chunk_size=chunk_size), strict=True):
            assert torch.equal(one, other)


@pytest.mark.usefixtures("live_rows")
@pytest.mark.parametrize("chunk_size", [None, 256])
def test_live_rows_in_a_graph_with_new_targets(chunk_size: int | None) -> None:
    sample, upstream = live_sample(), upstream_for("mean", 700)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            train(sample, upstream, chunk_size=chunk_size)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train(sample, upstream, chunk_size=chunk_size)
    for keep in (1.0, 0.3, 0.01, 0.0):
        target = torch.randint(0, 1000, (700,), device="cuda")
        target[torch.rand(700, device="cuda") >= keep] = -100
        sample.target.copy_(target)
        graph.replay()
        for one, other in zip(
            captured, train(sample, upstream, chunk_size=chunk_size), strict=True
        ):
            assert torch.equal(one, other)


@pytest.mark.usefixtures("live_rows")
def test_live_rows_from_several_threads_and_streams() -> None:
    samples = [live_sample(rows) for rows in (130, 700, 411, 256)]
    upstream = upstream_for("mean", 0)
    expected = [train(sample, upstream, chunk_size=256) for sample in samples]

    def work(index: int) -> list[tuple[torch.Tensor, ...]]:
        with torch.cuda.stream(torch.cuda.Stream()):
            made = [train(samples[index], upstream, chunk_size=256) for _ in range(10)]
            torch.cuda.current_stream().synchronize()
        return made

    torch.cuda.synchronize()
    with ThreadPoolExecutor(len(samples)) as pool:
        for wanted, made in zip(expected, pool.map(work, range(len(samples))), strict=True):
            for each in made:
                assert all(torch.equal(*pair) for pair in zip(wanted, each, strict=True))


@pytest.mark.usefixtures("live_rows")
def test_live_rows_hold_a_chunk_and_the_gradients() -> None:
    # grad_weight and the chunk take whole segments of 2 MiB, of which the allocator leaves no rest.
    rows, hidden, classes, chunk = 4096, 256, 32768, 512
    sample = make_sample(rows, hidden, classes, dtype=torch.bfloat16, device="cuda", ignored=0.5)
    upstream = upstream_for("mean", rows)
    options = {"chunk_size": chunk, "grad_weight_accum_dtype": "weight"}
    train(sample, upstream, **options)
    with peak_memory("cuda") as peak:
        train(sample, upstream, **options)
    gradients = rows * hidden * 2 + classes * hidden * 2
    units = 2 * torch.cuda.get_device_properties(0).multi_processor_count
    partial_sums = -(-units * 128 * 256 * 4 // 2**21) * 2**21
    allowed = gradients + chunk * (classes + hidden) * 2 + partial_sums + rows * 64
    assert peak.bytes <= allowed + 2**20
