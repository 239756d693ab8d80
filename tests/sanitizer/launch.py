"""Launches every kernel of the package on small odd shapes, for ``compute-sanitizer``.

``run.sh`` beside this file runs it under memcheck, racecheck, initcheck and synccheck. No pytest,
no torch.compile and no autograd, so that a sanitizer sees the kernels and little else.

Outputs are filled with a NaN of a bit pattern of its own beforehand and must hold none of it
afterwards: that shows both an element that was not written and, as arithmetic hands the pattern on
or turns it into another NaN, one that was read before it was. On the CPU, where kernels run in
Triton's interpreter, every tensor stands between guards that must be as they were; on CUDA every
tensor is an allocation of its own, whose end a sanitizer guards.

Which combinations of options are launched: every pair of values of any two options occurs together
at least once, and every option alone and all together.
"""

# ruff: noqa: T201 - a command-line tool prints

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

if __name__ == "__main__":
    # Else PyTorch's allocator puts many tensors into one block, in which no overrun can be seen.
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch
from torch import Tensor

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated

import greyhound_ops.kernels
from greyhound_ops.kernels import cross_entropy as cross_entropy_kernels
from greyhound_ops.kernels import distillation as distillation_kernels
from greyhound_ops.kernels import exponentials, panels, products
from greyhound_ops.kernels import log_probs as log_probs_kernels
from greyhound_ops.kernels import row_statistics as row_statistics_kernels
from greyhound_ops.kernels import scale as scale_kernels

Options = dict[str, Any]

# Quiet NaNs of a pattern that no arithmetic makes by itself.
_POISON_BITS = {
    torch.float32: (torch.int32, 0x7FC0BEEF),
    torch.bfloat16: (torch.int16, 0x7FDB),
    torch.float16: (torch.int16, 0x7EDB),
    torch.float64: (torch.int64, 0x7FF800000000BEEF),
    torch.int64: (torch.int64, -0x7EADBEEF7EADBEEF),
    torch.int32: (torch.int32, -0x7EADBEEF),
}
_GUARD_ELEMENTS = 64

IGNORED = -100
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# One block and one column; a rest; one more than the largest block of columns.
CLASSES = (1, 7, 129, 8193)


def poison_(tensor: Tensor) -> Tensor:
    """Fill a tensor with the pattern."""
    kind, bits = _POISON_BITS[tensor.dtype]
    tensor.view(kind).fill_(bits)
    return tensor


def is_poison(tensor: Tensor) -> Tensor:
    """Where a tensor still holds the pattern."""
    kind, bits = _POISON_BITS[tensor.dtype]
    return tensor.view(kind) == bits


class Buffers:
    """Tensors of one launch, and what must be true of them afterwards.

    Args:
        device: Where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(0)
        self._outputs: list[tuple[str, Tensor, bool]] = []
        self._around: list[tuple[str, Tensor, Tensor]] = []

    def make(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype,
        pitch: int | None = None,
        written: int | None = None,
    ) -> Tensor:
        """A poisoned tensor with unit column stride, guarded on all sides.

        Args:
            name: For messages.
            *shape: Its shape.
            dtype: Its dtype.
            pitch: Elements from row to row; no gap between them if None.
            written: Elements of a row, from its first, that may be written; its columns if None.
        """
        rows = 1
        for size in shape[:-1]:
            rows *= size
        pitch = shape[-1] if pitch is None else pitch
        written = shape[-1] if written is None else written
        guard = _GUARD_ELEMENTS if self.device.type == "cpu" else 0
        # The last row ends with what may be written: whatever lies behind is out of bounds.
        extent = max((rows - 1) * pitch + written, 0) if rows else 0
        whole = poison_(torch.empty(extent + 2 * guard, dtype=dtype, device=self.device))
        strides = [pitch * 1] * len(shape)
        strides[-1] = 1
        for axis in range(len(shape) - 3, -1, -1):
            strides[axis] = strides[axis + 1] * shape[axis + 1]
        tensor = whole.as_strided(shape, strides, guard)
        outside = torch.ones(whole.shape, dtype=torch.bool, device=self.device)
        outside.as_strided((*shape[:-1], written), strides, guard).fill_(False)
        if outside.any():
            self._around.append((name, whole, outside))
        return tensor

    def chunk(self, name: str, rows: int, classes: int) -> Tensor:
        """Room for bf16 logits that are stored in bulk, as `ChunkLoop.buffer` lays them out.

        The tensor memory accelerator stores 16 bytes at a time: on an H200 a tile that ends with
        column 257 of 257 leaves zeros up to column 264. So the padding of every row, the last one
        too, is part of the buffer, and what follows it must stay as it is.
        """
        padded = -(-classes // 8) * 8
        return self.make(
            name, rows, classes, dtype=torch.bfloat16, pitch=padded + 8, written=padded
        )

    def output(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype = torch.float32,
        pitch: int | None = None,
        may_be_nan: bool = False,
    ) -> Tensor:
        """A poisoned tensor that the launch has to write.

        Args:
            name: For messages.
            *shape: Its shape.
            dtype: Its dtype.
            pitch: As for `make`.
            may_be_nan: NaN of any other pattern is right in some places.
        """
        tensor = self.make(name, *shape, dtype=dtype, pitch=pitch)
        self._outputs.append((name, tensor, may_be_nan))
        return tensor

    def uniform(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype = torch.float32,
        low: float = 0.5,
        high: float = 1.5,
        pitch: int | None = None,
    ) -> Tensor:
        """An input of random numbers."""
        values = torch.rand(shape, generator=self._generator) * (high - low) + low
        return self.make(name, *shape, dtype=dtype, pitch=pitch).copy_(values)

    def target(self, rows: int, classes: int, kind: str, dtype: torch.dtype) -> Tensor:
        """Targets: all ``"valid"``, some ``"ignored"``, or some ``"outside"`` the classes too."""
        values = torch.randint(0, classes, (rows,), generator=self._generator)
        if kind != "valid":
            values[1::3] = IGNORED
        if kind == "outside":
            values[::3] = torch.tensor([classes, -1, 2**31 - 1, -(2**31)]).repeat(rows)[
                : len(values[::3])
            ]
        return self.make("target", rows, dtype=dtype).copy_(values)

    def check(self) -> None:
        """Compare everything with what must be true of it.

        Raises:
            RuntimeError: Something was not written, is NaN, or was written that must not be.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for name, tensor, may_be_nan in self._outputs:
            left = int(is_poison(tensor).sum())
            if left:
                raise RuntimeError(f"{name}: {left} of {tensor.numel()} elements not written")
            if not may_be_nan and tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise RuntimeError(f"{name}: NaN from inputs that have none")
        for name, whole, outside in self._around:
            if not bool(is_poison(whole)[outside].all()):
                raise RuntimeError(f"{name}: written beside its elements")


def check_gradient_in_place(name: str, values: Tensor, target: Tensor | None) -> None:
    """Check that logits, all above 5, were overwritten by a gradient, which is small.

    Raises:
        RuntimeError: If not, or if an ignored row's gradient is not exactly zero.
    """
    if bool((values > 4.5).any()):
        raise RuntimeError(f"{name}: logits left where the gradient should be")
    if target is not None and bool((values[target == IGNORED] != 0).any()):
        raise RuntimeError(f"{name}: an ignored row whose gradient is not zero")


# ------------------------------------------------------------------------------- combinations


def combinations(
    choices: dict[str, tuple[Any, ...]], possible: Callable[[Options], bool] = lambda options: True
) -> list[Options]:
    """Few combinations of options in which any two values that can occur together do.

    The first value of every option is its plainest: it alone, each other value beside the plainest,
    and all last values together are always among them.

    Args:
        choices: Values of every option.
        possible: Whether a combination may be launched.
    """
    names = list(choices)
    plainest = {name: values[0] for name, values in choices.items()}
    fullest = {name: values[-1] for name, values in choices.items()}
    found = [
        each
        for each in (
            plainest,
            *({**plainest, name: value} for name in names for value in choices[name][1:]),
            fullest,
        )
        if possible(each)
    ]
    wanted = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in choices[a]
        for y in choices[b]
    }

    def pairs(options: Options) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
        return set(itertools.combinations(options.items(), 2))

    for each in found:
        wanted -= pairs(each)
    generator = torch.Generator().manual_seed(0)

    def drawn(values: tuple[Any, ...]) -> Any:
        return values[int(torch.randint(len(values), (), generator=generator))]

    while wanted:
        best: Options = {}
        gain: set[Any] = set()
        for pair in sorted(wanted, key=repr)[:4]:
            for _ in range(40):
                tried = {name: drawn(choices[name]) for name in names}
                tried.update(pair)
                new = pairs(tried) & wanted
                if len(new) > len(gain) and possible(tried):
                    best, gain = tried, new
            if not gain:
                wanted.discard(pair)  # these two exclude one another
        if gain:
            found.append(best)
            wanted -= gain
    return found


# ----------------------------------------------------------------------------------- launches


def launch_cross_entropy(device: torch.device, options: Options) -> None:
    """One chunk of logits; with ``read`` once more from its statistics."""
    buffers = Buffers(device)
    rows, classes, dtype = 7, options["classes"], options["dtype"]
    pitch = classes + options["gap"]
    has_nan = options["target"] == "outside"
    target = buffers.target(rows, classes, options["target"], options["target_dtype"])
    weight = buffers.uniform("class_weight", classes) if options["class_weight"] else None
    weight_sum = None
    if weight is not None:
        weight_sum = buffers.make("class_weight_sum", 1, dtype=torch.float32)
        weight_sum.copy_(weight.sum())
    row_scale = buffers.uniform("row_scale", rows, 2)[:, 0] if options["row_scale"] else None
    grad_scale = buffers.uniform("grad_scale", 1) if options["grad_scale"] else None
    lse_grad = buffers.uniform("lse_grad", rows, 3)[:, 1] if options["lse_grad"] else None
    loss = buffers.output("loss", rows, may_be_nan=has_nan)
    statistics = buffers.output("statistics", 2, rows, pitch=rows + options["gap"])
    arguments: Options = {
        "class_weight": weight,
        "class_weight_sum": weight_sum,
        "grad_scale": grad_scale,
        "row_scale": row_scale,
        "lse_grad": lse_grad,
        "ignore_index": IGNORED,
        "label_smoothing": 0.1 if options["smoothing"] else 0.0,
        "z_loss": 1e-3 if options["z_loss"] else 0.0,
        "logit_scale": 0.75 if options["scale"] else 1.0,
        "softcap": 9.0 if options["softcap"] else None,
        "gain": 1.0,
    }
    for read in (False, True) if options["read"] else (False,):
        write = options["write"] and (read or not options["read"])
        logits = buffers.uniform("logits", rows, classes, dtype=dtype, low=5, high=7, pitch=pitch)
        grad = None
        if write and not options["in_place"]:
            grad = buffers.output(
                "grad_logits", rows, classes, dtype=dtype, pitch=classes + 1, may_be_nan=has_nan
            )
        cross_entropy_kernels.cross_entropy(
            logits,
            target,
            loss,
            statistics,
            grad_logits=grad,
            read_statistics=read,
            write_grad=write,
            **arguments,
        )
        if write and grad is None:
            check_gradient_in_place("logits", logits, target)
    buffers.check()


def launch_log_probs(device: torch.device, options: Options) -> None:
    """One chunk of logits, forward and, with any upstream, backward."""
    buffers = Buffers(device)
    rows, classes, dtype = 7, options["classes"], options["dtype"]
    pitch = classes + options["gap"]
    has_nan = options["target"] == "outside"
    target = buffers.target(rows, classes, options["target"], options["target_dtype"])
    temperature = buffers.uniform("temperature", rows, 2)[:, 1] if options["temperature"] else None
    every_row = options["every_row"]
    logits = buffers.uniform("logits", rows, classes, dtype=dtype, low=5, high=7, pitch=pitch)
    log_probs = buffers.output("log_probs", rows, may_be_nan=has_nan)
    statistics = buffers.output(
        "statistics", 3 if options["entropy"] else 2, rows, pitch=rows + options["gap"]
    )
    argmax = buffers.output("argmax", rows, dtype=torch.int64) if options["argmax"] else None
    common: Options = {
        "temperature": temperature,
        "ignore_index": IGNORED,
        "logit_scale": 0.75 if options["scale"] else 1.0,
        "softcap": 9.0 if options["softcap"] else None,
        "inverse_temperature": 0.5 if options["inverse"] else 1.0,
    }
    log_probs_kernels.log_probs(
        logits,
        target,
        log_probs,
        statistics,
        argmax,
        largest_entropy=float(torch.tensor(float(classes)).log()),
        every_row=every_row,
        **common,
    )
    upstreams = {
        name: buffers.uniform(name, rows, 2)[:, 0] if options[name] else None
        for name in ("grad_log_probs", "grad_entropy", "grad_lse")
    }
    grad_temperature = None
    if options["grad_temperature"]:
        grad_temperature = buffers.output("grad_temperature", rows, may_be_nan=has_nan)
    if any(upstream is not None for upstream in upstreams.values()):
        grad = None
        if options["write"] == "beside":
            grad = buffers.output("grad_logits", rows, classes, dtype=dtype, may_be_nan=has_nan)
        elif options["write"] == "in_place":
            grad = logits
        log_probs_kernels.log_probs_backward(
            logits, grad, target, statistics, grad_temperature, **upstreams, **common
        )
        if options["write"] == "in_place":
            check_gradient_in_place("logits", logits, None)
    buffers.check()


def _log_probs_possible(options: Options) -> bool:
    upstreams = [options[name] for name in ("grad_log_probs", "grad_entropy", "grad_lse")]
    if not options["every_row"] and (
        options["argmax"] or options["grad_entropy"] or options["grad_lse"]
    ):
        return False  # the op asks for all rows then
    if not any(upstreams):
        return not options["grad_temperature"] and options["write"] == "no"
    if options["write"] == "no" and not options["grad_temperature"]:
        return False
    if options["grad_temperature"] and not options["temperature"]:
        return False
    return not options["grad_entropy"] or options["entropy"]


def launch_distillation(device: torch.device, options: Options) -> None:
    """One chunk of both models' logits; with ``read`` once more from its statistics."""
    buffers = Buffers(device)
    rows, classes, dtype = 7, options["classes"], options["dtype"]
    pitch = classes + options["gap"]
    has_nan = options["target"] == "outside"
    target = None
    if options["target"] != "none":
        target = buffers.target(rows, classes, options["target"], torch.int64)
    row_scale = buffers.uniform("row_scale", rows, 2)[:, 0] if options["row_scale"] else None
    grad_scale = buffers.uniform("grad_scale", 1) if options["grad_scale"] else None
    parts = buffers.output("parts", 2, rows, pitch=rows + options["gap"], may_be_nan=has_nan)
    statistics = buffers.output("statistics", 6, rows, pitch=rows + options["gap"])
    teacher = buffers.uniform(
        "teacher", rows, classes, dtype=options["teacher_dtype"], low=5, high=7, pitch=classes + 2
    )
    for read in (False, True) if options["read"] else (False,):
        write = options["write"] and (read or not options["read"])
        student = buffers.uniform("student", rows, classes, dtype=dtype, low=5, high=7, pitch=pitch)
        distillation_kernels.distillation(
            student,
            teacher,
            target,
            parts,
            statistics,
            divergence=options["divergence"],
            beta=0.3,
            temperature=2.0 if options["tempered"] else 1.0,
            soft_weight=0.7,
            hard_weight=0.3 if options["hard"] else 0.0,
            ignore_index=IGNORED,
            grad_scale=grad_scale,
            row_scale=row_scale,
            gain=1.0,
            read_statistics=read,
            write_grad=write,
        )
        if write:
            check_gradient_in_place("student", student, target)
    buffers.check()


def launch_row_statistics(device: torch.device, options: Options) -> None:
    """Maximum and sum of one chunk of logits."""
    buffers = Buffers(device)
    rows, classes = 7, options["classes"]
    logits = buffers.uniform(
        "logits", rows, classes, dtype=options["dtype"], low=5, high=7,
        pitch=classes + options["gap"],
    )  # fmt: skip
    out = buffers.output("out", 2, rows, pitch=rows + options["gap"])
    inner = 0.75 if options["inner"] else 1.0
    row_statistics_kernels.row_statistics(logits, out, inner=inner, tanh=options["tanh"], outer=1.5)
    buffers.check()


def launch_scale(device: torch.device, options: Options) -> None:
    """A gradient times an upstream scalar."""
    buffers = Buffers(device)
    values = buffers.uniform("values", options["numel"], dtype=options["dtype"], low=5, high=7)
    before = values.clone()
    factor = buffers.make("factor", 1, dtype=torch.float32).fill_(options["factor"])
    scale_kernels.scale_(values, factor, extra=options["extra"])
    buffers.check()
    expected = (before.float() * options["factor"] * options["extra"]).to(values.dtype)
    # The interpreter cuts bf16 off where a GPU rounds.
    torch.testing.assert_close(values, expected, rtol=2.0**-7, atol=0.0)


def launch_exponentials(device: torch.device, options: Options) -> None:
    """Rows of a frozen head, with gradient and without."""
    buffers = Buffers(device)
    rows, classes, hidden = options["rows"], options["classes"], options["hidden"]
    has_nan = options["target"] == "outside"
    spread = 40.0 if options["repair"] else 0.5
    bf16 = torch.bfloat16
    input = buffers.uniform("input", rows, hidden, dtype=bf16, low=-spread, high=spread)
    weight = buffers.uniform("weight", classes, hidden, dtype=bf16, low=-1, high=1)
    bias = buffers.uniform("bias", classes, dtype=bf16) if options["bias"] else None
    class_weight = buffers.uniform("class_weight", classes) if options["class_weight"] else None
    grad_scale = buffers.uniform("grad_scale", 1) if options["grad_scale"] else None
    target = buffers.target(rows, classes, options["target"], options["target_dtype"])
    if not exponentials.supported(input, weight, interpreted=device.type == "cpu"):
        raise RuntimeError(f"a shape that this path does not take: {options}")
    kernels, whole_grad = None, None
    if options["live"]:
        order, labels, live = products.compact(target.long(), IGNORED)
        kernels = products.Products(weight, bias, order, live)
        whole_grad = buffers.output("grad_input", rows, hidden, dtype=bf16, may_be_nan=has_nan)
        ignored, target = target == IGNORED, labels
        input[ignored] = float("nan")
    source = exponentials.Exponentials(
        input,
        weight,
        bias,
        target,
        live=kernels,
        class_weight=class_weight,
        grad_scale=lambda: grad_scale,
        ignore_index=IGNORED,
        z_loss=1e-3 if options["z_loss"] else 0.0,
        logit_scale=0.75 if options["scale"] else 1.0,
        softcap=90.0 if options["softcap"] else None,
    )
    # Two chunks, the second with few rows: a chunk's tensors begin inside those of the call.
    for start, stop in ((0, rows - 3), (rows - 3, rows)):
        count = stop - start
        loss = buffers.output("loss without gradient", count, may_be_nan=has_nan)
        source.losses(start, stop, loss, buffers.output("statistics", 2, count))

        loss = buffers.output("loss", count, may_be_nan=has_nan)
        statistics = buffers.output("statistics", 2, count)
        out = buffers.chunk("exponentials", count, classes)
        factor, hard = source.exponentials(start, stop, out, loss, statistics)
        if kernels is not None:
            parts = poison_(kernels.partial_sums())
            for at, end in kernels.pieces(count):
                part = slice(at, end)
                kernels.grad_input(out[part], parts, start + at)
                kernels.finish_input(
                    parts,
                    whole_grad,
                    start + at,
                    part.stop - at,
                    factor=factor[part],
                    hard=hard[part],
                    target=target[start + part.start : start + part.stop],
                )
            continue
        left = int(is_poison(out).sum())
        if left:
            raise RuntimeError(f"exponentials: {left} of {out.numel()} elements not written")
        product = buffers.make("product", count, hidden, dtype=torch.float32)
        product.copy_(out.float() @ weight.float())
        grad = buffers.output("grad_input", count, hidden, dtype=bf16, may_be_nan=has_nan)
        source.grad_input(slice(start, stop), product, factor, hard, grad)
        if bool((grad[target[start:stop] == IGNORED] != 0).any()):
            raise RuntimeError("grad_input: an ignored row whose gradient is not zero")
    if whole_grad is not None and bool((whole_grad[ignored] != 0).any()):
        raise RuntimeError("grad_input: an ignored row whose gradient is not zero")
    buffers.check()


def launch_products(device: torch.device, options: Options) -> None:
    """Two chunks of a learning head, from the order of its rows to its gradients."""
    buffers = Buffers(device)
    rows, classes, hidden = options["rows"], options["classes"], options["hidden"]
    bf16 = torch.bfloat16
    # Nothing that a row holds may count if the row does not: ignored rows hold NaN.
    input = buffers.uniform("input", rows, hidden, dtype=bf16, low=-1, pitch=hidden + 3)
    weight = buffers.uniform("weight", classes, hidden, dtype=bf16, low=-1)
    bias = buffers.uniform("bias", classes, dtype=bf16) if options["bias"] else None
    target = buffers.target(rows, classes, options["ignored"], torch.int64)
    if options["ignored"] == "all":
        target.fill_(IGNORED)
    ignored = target == IGNORED
    input[ignored] = float("nan")
    if not products.supported(input, weight, bf16, interpreted=device.type == "cpu"):
        raise RuntimeError(f"a shape that this path does not take: {options}")
    order, labels, live = products.compact(target, IGNORED)
    if sorted(order.tolist()) != list(range(rows)) or not torch.equal(labels, target[order]):
        raise RuntimeError("order: not the rows of the call")
    if int(live) != int((~ignored).sum()) or bool((labels[: int(live)] == IGNORED).any()):
        raise RuntimeError(f"live: {int(live)} rows")

    kernels = products.Products(weight, bias, order, live)
    grad_input = buffers.output("grad_input", rows, hidden, dtype=bf16, pitch=hidden + 5)
    high = buffers.output("grad_weight", classes, hidden, dtype=options["sum_dtype"])
    low = None
    if options["low"]:
        low = buffers.make("what the sum's dtype cannot hold", classes, hidden, dtype=bf16)
    for start in range(0, rows, options["chunk"]):
        count = min(options["chunk"], rows - start)
        here = buffers.output("rows", count, hidden, dtype=bf16)
        kernels.gather(input, here, start)
        chunk = buffers.chunk("chunk", count, classes)
        kernels.logits(here, chunk, start)
        # What a store left in the padding must not count either.
        poison_(
            chunk.as_strided(
                (count, -classes % 8), chunk.stride(), chunk.storage_offset() + classes
            )
        )
        cross_entropy_kernels.cross_entropy(
            chunk,
            labels[start : start + count],
            buffers.output("loss", count),
            buffers.output("statistics", 2, count),
            class_weight=None,
            class_weight_sum=None,
            grad_scale=None,
            row_scale=None,
            live=live,
            live_start=start,
            ignore_index=IGNORED,
            label_smoothing=0.0,
            z_loss=0.0,
            logit_scale=1.0,
            softcap=None,
            gain=1.0,
            read_statistics=False,
            write_grad=True,
        )
        factors: Options = {}
        if options["factor"]:
            factors = {
                "factor": buffers.uniform("factor", count),
                "hard": buffers.uniform("hard", count),
                "target": labels[start : start + count],
            }
        for cut, end in kernels.pieces(count):
            piece = chunk[cut:end]
            parts = poison_(kernels.partial_sums())
            kernels.grad_input(piece, parts, start + cut)
            kernels.finish_input(parts, grad_input, start + cut, piece.shape[0], **factors)
        kernels.grad_weight(chunk, here, high, low, start, rows)
    buffers.check()
    if bool((grad_input[ignored] != 0).any()):
        raise RuntimeError("grad_input: an ignored row whose gradient is not zero")
    if bool(ignored.all()) and bool((high != 0).any()):
        raise RuntimeError("grad_weight: not zero where no row counts")


def launch_panels(device: torch.device, options: Options) -> None:
    """A learning head whose first logits lie in its gradient's memory, two panels at a time."""
    buffers = Buffers(device)
    rows, classes, hidden = options["rows"], options["classes"], options["hidden"]
    bf16, sum_dtype = torch.bfloat16, options["sum_dtype"]
    input = buffers.uniform("input", rows, hidden, dtype=bf16, low=-1)
    weight = buffers.uniform("weight", classes, hidden, dtype=bf16, low=-1)
    target = buffers.target(rows, classes, options["ignored"], torch.int64)
    if options["ignored"] == "all":
        target.fill_(IGNORED)
    ignored = target == IGNORED
    input[ignored] = float("nan")
    order, labels, live = products.compact(target, IGNORED)
    kernels = products.Products(weight, None, order, live)
    grad_input = buffers.output("grad_input", rows, hidden, dtype=bf16)
    memory = buffers.make("grad_weight", panels.padded(classes), hidden, dtype=sum_dtype)
    high, low = memory[:classes], None
    if options["low"]:
        low = buffers.make("what the sum's dtype cannot hold", classes, hidden, dtype=bf16)
    own_rows = min(rows, panels.rows_in_gradient(hidden, sum_dtype))
    size = options["chunk"]
    chunk = buffers.make("chunk", panels.elements(size, classes) + panels.WIDTH, dtype=bf16)
    spare = buffers.make("spare", (2 * panels.padded(own_rows) + 1) * panels.WIDTH, dtype=bf16)
    start = 0
    while start < rows:
        own = panels.in_gradient(high, own_rows, 2) if start == 0 and own_rows else None
        stop = min(start + size + (0 if own is None else own_rows), rows)
        count = stop - start
        beside = count - (0 if own is None else own_rows)
        other = panels.in_chunk(chunk, beside, classes, memory) if beside else None
        here = buffers.output("rows", count, hidden, dtype=bf16)
        kernels.gather(input, here, start)
        at = start
        for part in (own, other):
            if part is None:
                continue
            end = at + part.num_rows
            kernels.logits(here[at - start : end - start], part, at)
            live_options = {"live": live, "live_start": at, "ignore_index": IGNORED, "gain": 1.0}
            scales = {"grad_scale": None, "row_scale": None}
            flags = {"read_statistics": False, "write_grad": True}
            if options["loss"] == "distillation":
                count = part.num_rows
                distillation_kernels.distillation(
                    part,
                    buffers.uniform("teacher", count, classes, dtype=bf16, low=-1),
                    labels[at:end],
                    buffers.output("parts", 2, count),
                    buffers.output("statistics", 6, count),
                    divergence="jsd",
                    beta=0.3,
                    temperature=2.0,
                    soft_weight=0.7,
                    hard_weight=0.3,
                    **live_options,
                    **scales,
                    **flags,
                )
            else:
                cross_entropy_kernels.cross_entropy(
                    part,
                    labels[at:end],
                    buffers.output("loss", part.num_rows),
                    buffers.output("statistics", 2, part.num_rows),
                    class_weight=None,
                    class_weight_sum=None,
                    label_smoothing=0.1 if options["loss"] == "smoothed" else 0.0,
                    z_loss=0.0,
                    logit_scale=1.0,
                    softcap=None,
                    **live_options,
                    **scales,
                    **flags,
                )
            for cut, last in kernels.pieces(part.num_rows):
                parts = poison_(kernels.partial_sums())
                kernels.grad_input(part.part(cut, last), parts, at + cut)
                kernels.finish_input(parts, grad_input, at + cut, last - cut)
            at = end
        kernels.grad_weight_in_place(own, other, spare, here, high, low, start, rows)
        start = stop
    buffers.check()
    if bool((grad_input[ignored] != 0).any()):
        raise RuntimeError("grad_input: an ignored row whose gradient is not zero")
    if bool(high.isnan().any()) or (bool(ignored.all()) and bool((high != 0).any())):
        raise RuntimeError("grad_weight: not what its rows add up to")


@dataclasses.dataclass(frozen=True)
class Launch:
    """One family of launches.

    Attributes:
        run: Makes inputs, launches, checks.
        choices: Options and their values, the plainest first.
        possible: Whether a combination may be launched.
        hopper: Needs compute capability 9.0 where it runs on a GPU.
    """

    run: Callable[[torch.device, Options], None]
    choices: dict[str, tuple[Any, ...]]
    possible: Callable[[Options], bool] = lambda options: True
    hopper: bool = False

    def combinations(self) -> list[Options]:
        """What is launched."""
        return combinations(self.choices, self.possible)


_FLAG = (False, True)
_TARGETS = ("valid", "ignored", "outside")
_TARGET_DTYPES = (torch.int64, torch.int32)

LAUNCHES: dict[str, Launch] = {
    "cross_entropy": Launch(
        launch_cross_entropy,
        {
            "classes": CLASSES,
            "dtype": DTYPES,
            "gap": (0, 3),
            "target": _TARGETS,
            "target_dtype": _TARGET_DTYPES,
            "class_weight": _FLAG,
            "smoothing": _FLAG,
            "z_loss": _FLAG,
            "scale": _FLAG,
            "softcap": _FLAG,
            "grad_scale": _FLAG,
            "row_scale": _FLAG,
            "lse_grad": _FLAG,
            "in_place": (True, False),
            "write": (True, False),
            "read": _FLAG,
        },
        lambda options: options["write"] or not options["read"],
    ),
    "log_probs": Launch(
        launch_log_probs,
        {
            "classes": CLASSES,
            "dtype": DTYPES,
            "gap": (0, 3),
            "target": _TARGETS,
            "target_dtype": _TARGET_DTYPES,
            "scale": _FLAG,
            "softcap": _FLAG,
            "temperature": _FLAG,
            "inverse": _FLAG,
            "entropy": _FLAG,
            "argmax": _FLAG,
            "every_row": _FLAG,
            "grad_log_probs": (True, False),
            "grad_entropy": _FLAG,
            "grad_lse": _FLAG,
            "grad_temperature": _FLAG,
            "write": ("beside", "in_place", "no"),
        },
        _log_probs_possible,
    ),
    "distillation": Launch(
        launch_distillation,
        {
            "classes": CLASSES,
            "dtype": DTYPES,
            "teacher_dtype": DTYPES,
            "gap": (0, 3),
            "divergence": ("kl", "reverse_kl", "jsd", "tvd", "cosine"),
            "target": ("none", *_TARGETS),
            "hard": _FLAG,
            "tempered": _FLAG,
            "grad_scale": _FLAG,
            "row_scale": _FLAG,
            "write": (True, False),
            "read": _FLAG,
        },
        lambda options: (
            (options["write"] or not options["read"])
            and (options["target"] != "none" or not options["hard"])
        ),
    ),
    "row_statistics": Launch(
        launch_row_statistics,
        {"classes": CLASSES, "dtype": DTYPES, "gap": (0, 3), "inner": _FLAG, "tanh": _FLAG},
        lambda options: options["tanh"] or not options["inner"],
    ),
    "scale": Launch(
        launch_scale,
        {
            "numel": (1, 8191, 8193),
            "dtype": DTYPES,
            "factor": (1.0, 0.5),
            "extra": (1.0, 2.0),
        },
    ),
    "exponentials": Launch(
        launch_exponentials,
        {
            "rows": (131, 142),
            "classes": (1, 257),
            "hidden": (8, 72),
            "target": _TARGETS,
            "target_dtype": _TARGET_DTYPES,
            "live": _FLAG,
            "repair": _FLAG,
            "bias": _FLAG,
            "scale": _FLAG,
            "softcap": _FLAG,
            "z_loss": _FLAG,
            "class_weight": _FLAG,
            "grad_scale": _FLAG,
        },
        hopper=True,
    ),
    "products": Launch(
        launch_products,
        {
            "rows": (130, 67),
            "chunk": (96, 256),
            "classes": (257, 1),
            "hidden": (8, 264),
            "ignored": ("ignored", "valid", "all"),
            "bias": _FLAG,
            "factor": _FLAG,
            "sum_dtype": (torch.bfloat16, torch.float32),
            "low": (True, False),
        },
        lambda options: options["sum_dtype"] == torch.bfloat16 or not options["low"],
        hopper=True,
    ),
    "panels": Launch(
        launch_panels,
        {
            "rows": (150, 67),
            "chunk": (96, 64),
            "classes": (600, 257),
            "hidden": (136, 264),
            "ignored": ("ignored", "valid", "all"),
            "loss": ("cross_entropy", "smoothed", "distillation"),
            "sum_dtype": (torch.bfloat16, torch.float32),
            "low": (True, False),
        },
        lambda options: options["sum_dtype"] == torch.bfloat16 or not options["low"],
        hopper=True,
    ),
}


# ------------------------------------------------------------------------- what was launched


def kernels() -> dict[str, Any]:
    """Every kernel of the package that is launched, by ``module.name``."""
    import triton
    from triton.runtime.interpreter import InterpretedFunction

    found = {}
    for info in pkgutil.iter_modules(greyhound_ops.kernels.__path__):
        module = importlib.import_module(f"greyhound_ops.kernels.{info.name}")
        for name, value in vars(module).items():
            if isinstance(value, (triton.JITFunction, InterpretedFunction)):
                own = getattr(value.fn, "__module__", None) == module.__name__
                if own and name.endswith("_kernel"):
                    found[f"{info.name}.{name}"] = value
    return found


@dataclasses.dataclass
class Record:
    """What a kernel was launched with.

    Attributes:
        launches: How often.
        constants: Values of every constant (``tl.constexpr``) that was given by name.
        signatures: Of each launch that differs from those before, the type of every argument as
            Triton writes it, or its value where that is a constant, in a tuple.
    """

    launches: int = 0
    constants: dict[str, set[Any]] = dataclasses.field(default_factory=dict)
    signatures: list[dict[str, Any]] = dataclasses.field(default_factory=list)


_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "i1",
}  # fmt: skip


def _signature(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Types and constants of a launch by argument, and its options (``num_warps`` and the like)."""
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    described: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, Tensor):
            described[name] = f"*{_TYPES[value.dtype]}"
        elif hasattr(value, "block_shape"):
            described[name] = f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
        elif name.isupper() or (name.startswith("num_") and name not in kernel.arg_names):
            described[name] = (value,)
        elif value is None:
            described[name] = (None,)
        elif isinstance(value, int):
            described[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            described[name] = "fp32"
    return described


def _recording(kind: type, record: Record) -> type:
    """A subclass of a kernel's class that notes its launches."""

    def launcher(self: Any, grid: Any) -> Callable[..., Any]:
        launch = kind.__getitem__(self, grid)  # type: ignore[attr-defined]

        def noting(*args: Any, **kwargs: Any) -> Any:
            record.launches += 1
            signature = _signature(self, args, kwargs)
            if signature not in record.signatures:
                record.signatures.append(signature)
            for name, value in kwargs.items():
                if name.isupper():
                    record.constants.setdefault(name, set()).add(value)
            return launch(*args, **kwargs)

        return noting

    return type(kind.__name__, (kind,), {"__getitem__": launcher})


@contextmanager
def recorded() -> Iterator[dict[str, Record]]:
    """Note every launch of a block, by ``module.name`` of the kernel."""
    records, kinds = {}, []
    try:
        for name, kernel in kernels().items():
            records[name] = Record()
            kinds.append((kernel, type(kernel)))
            # Not an object in its place: launchers ask whether a kernel is compiled.
            kernel.__class__ = _recording(type(kernel), records[name])
        yield records
    finally:
        for kernel, kind in kinds:
            kernel.__class__ = kind


def failures(device: torch.device, name: str, combined: list[Options]) -> list[str]:
    """Launch combinations of a family; what was wrong with each that failed."""
    found = []
    for each in combined:
        try:
            LAUNCHES[name].run(device, each)
        except (RuntimeError, AssertionError) as error:
            found.append(f"{name}: {error}\n    {each}")
    return found


def lacks(device: torch.device, name: str) -> str | None:
    """What a family needs that the device has not, or None."""
    if LAUNCHES[name].hopper and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (9, 0):
            return f"needs compute capability 9.0, this is {capability[0]}.{capability[1]}"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Launch what the command line asks for.

    Returns:
        0 if every launch did what it must.
    """
    parser = argparse.ArgumentParser(description="Launch every kernel on small odd shapes.")
    parser.add_argument("--only", help=f"comma-separated, of {', '.join(LAUNCHES)}")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th combination, from the I-th")
    parser.add_argument("--list", action="store_true", help="name the kernels, launch nothing")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(sorted(kernels())))
        return 0
    names = list(LAUNCHES) if options.only is None else options.only.split(",")
    if unknown := set(names) - set(LAUNCHES):
        parser.error(f"--only: expected of {', '.join(LAUNCHES)}, got {', '.join(unknown)}")
    part, parts = map(int, options.part.split("/"))
    if not 1 <= part <= parts:
        parser.error(f"--part: expected I/N with 1 <= I <= N, got {options.part}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    with recorded() as records:
        for name in names:
            if (reason := lacks(device, name)) is not None:
                print(f"{name}: left out, {reason}")
                continue
            combined = LAUNCHES[name].combinations()[part - 1 :: parts]
            wrong = failures(device, name, combined)
            print("\n".join([*wrong, f"{name}: {len(combined)} combinations"]), flush=True)
            found += wrong
    for name, record in sorted(records.items()):
        print(f"  {name}: {record.launches} launches")
    print(f"{len(found)} failed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
