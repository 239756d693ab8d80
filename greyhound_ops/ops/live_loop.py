"""The chunk loop of a learning head on a GPU with tensor memory accelerators.

Two things that the loop over cuBLAS products cannot do:

- **Rows that do not count cost nothing.** They are moved behind the others, and the products of
  `greyhound_ops.kernels.products` end with the last row that counts, whose number stays on the
  device.
- **The pass over logits runs beside a product.** A chunk is projected in parts, and the loss and
  gradient of one part are taken on a second stream while the next part is projected or the part
  before is folded. It is bound by memory and the product is not: 3 to 4% of a step
  (docs/performance.md, "Beside a product").

All of a call's work is forked from the caller's stream and joined to it before the op returns, so
that it can be captured in a CUDA graph; every buffer is allocated before the fork.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from greyhound_ops.config import settings
from greyhound_ops.ops.chunk_loop import ChunkLoop, GradientNeeds, padded_classes
from greyhound_ops.ops.gradients import use_triton

# Logits below this many bytes keep cuBLAS's products: this loop takes the host 5 to 6 ms a step of
# 8192 rows, the other 3 ms, and a step of theirs would wait for it.
LEAST_LOGITS_BYTES = 512 * 2**20

# Rows projected at a time: small enough that the pass over one part hides behind the product of
# another, large enough for the product. In chunks of 2048 rows parts of 1024 were best, of 8192
# rows parts of 2048 (docs/performance.md, "Beside a product").
PART_ROWS = 1024
LARGE_PART_ROWS = 2048

# Parts begin with a tile of the products.
TILE_ROWS = 128


def worth_it(input: Tensor, weight: Tensor) -> bool:
    """Whether rows that do not count are to be left out, where that can be done.

    Args:
        input: ``[N, D]``.
        weight: ``[V, D]``.
    """
    logits_bytes = input.shape[0] * weight.shape[0] * 2
    return settings().skip_ignored and (not input.is_cuda or logits_bytes >= LEAST_LOGITS_BYTES)


def serves(input: Tensor, weight: Tensor, needs: GradientNeeds, compute_dtype: torch.dtype) -> bool:
    """Whether a call's gradients can be made by this loop.

    Args:
        input: ``[N, D]``.
        weight: ``[V, D]``.
        needs: Gradients made now.
        compute_dtype: Dtype of the products.
    """
    if not worth_it(input, weight) or not needs.weight or needs.bias:
        return False
    return projects(input, weight, compute_dtype)


def projects(input: Tensor, weight: Tensor, compute_dtype: torch.dtype) -> bool:
    """Whether the products of `kernels.products` take these operands.

    Args:
        input: ``[N, D]``.
        weight: ``[V, D]``.
        compute_dtype: Dtype of the products.
    """
    if weight.dtype not in (torch.bfloat16, torch.float32):
        return False
    if not use_triton(compute_dtype, input.device.type) or compute_dtype != torch.bfloat16:
        return False
    from greyhound_ops.kernels import products  # Triton is not there on every platform

    interpreted = settings().kernels == "triton" and not input.is_cuda
    return products.supported(input, weight, compute_dtype, interpreted=interpreted)


class LiveRows:
    """The rows of a call that count, before those that do not; each kind in its own order.

    Args:
        target: ``[N]``, or None if every row counts.
        ignore_index: Target of rows that do not count.
        like: ``[N, D]``, on the device of the call.

    Attributes:
        order: ``[N]`` int64, original row of each.
        labels: ``[N]`` int64, their targets, or None.
        count: Scalar int32 on the device: how many count.
        may_skip: Whether some may not.
    """

    def __init__(self, target: Tensor | None, ignore_index: int, like: Tensor) -> None:
        from greyhound_ops.kernels import products

        self.labels: Any
        self.may_skip = target is not None
        if target is None:
            self.order, self.labels = torch.arange(like.shape[0], device=like.device), None
            # A fill, not a copy from the host, which would wait for the device.
            self.count = torch.full((), like.shape[0], dtype=torch.int32, device=like.device)
        else:
            self.order, self.labels, self.count = products.compact(target, ignore_index)

    def take(self, values: Tensor) -> Tensor:
        """Values per row, in the order of the rows here: ``[..., N]``."""
        return values.index_select(-1, self.order) if self.may_skip else values

    def restore(self, values: Tensor) -> Tensor:
        """Values per row, back in their original order: ``[..., N]``."""
        if not self.may_skip:
            return values
        return torch.empty_like(values).index_copy_(-1, self.order, values)


class Rows:
    """Rows of an input in the order of a call, some at a time.

    Args:
        input: ``[N, D]``.
        live: The rows that count.
        most: Most rows at a time; their memory is made here, before any fork.
    """

    def __init__(self, input: Tensor, live: LiveRows, most: int) -> None:
        from greyhound_ops.kernels import products

        if input.stride(1) != 1:
            input = input.contiguous()
        self._input, self._room = input, None
        if live.may_skip or not products.tma_ready(input):
            self._room = input.new_empty((most, input.shape[1]))

    def take(self, kernels: Any, start: int, stop: int) -> Tensor:
        """Some rows ``[stop - start, D]``, which the next call writes over."""
        if self._room is None:
            return self._input[start:stop]
        room = self._room[: stop - start]
        kernels.gather(self._input, room, start)
        return room


class _Streams(threading.local):
    """Two streams per device and thread; a stream under capture must not be another thread's."""

    def __init__(self) -> None:
        self._pairs: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def pair(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if device not in self._pairs:
            # Products first: where both wait, the pass must not take the multiprocessors.
            self._pairs[device] = (
                torch.cuda.Stream(device, priority=-1),
                torch.cuda.Stream(device, priority=0),
            )
        return self._pairs[device]


_streams = _Streams()


class _Forked:
    """Work on a stream for products and one for passes, or in plain order without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._passed = False
        if self._cuda:
            self._products, self._passes = _streams.pair(device)

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Fork from the current stream, and join it again, whatever happens inside."""
        if not self._cuda:
            yield
            return
        current = torch.cuda.current_stream(self._device)
        self._products.wait_stream(current)
        try:
            with torch.cuda.stream(self._products):
                yield
        finally:
            current.wait_stream(self._products)
            if self._passed:  # else it is no part of a capture, and waiting would end that
                current.wait_stream(self._passes)

    def mark(self) -> Any:
        """The point that the products have reached."""
        return self._products.record_event() if self._cuda else None

    def run_pass(self, after: Any, work: Callable[[], None]) -> Any:
        """Run a pass after a point of the products; returns the point where it is done."""
        if not self._cuda:
            work()
            return None
        self._passes.wait_event(after)
        self._passed = True
        with torch.cuda.stream(self._passes):
            work()
        return self._passes.record_event()

    def wait(self, done: Any) -> None:
        """Let the products go on after a pass is done."""
        if self._cuda:
            self._products.wait_event(done)


# Loss and gradient of some rows: first row, row after the last and their logits ``[rows, V]``, a
# tensor or panels; the gradient is written over them. With `Teacher` its logits come last.
RowPass = Callable[..., None]


class Teacher:
    """Logits that a pass needs beside those of the loop: of one part, and room for the next.

    Args:
        input: ``[N, D_t]`` bf16.
        weight: ``[V, D_t]`` bf16.
        bias: ``[V]`` or None.
        live: The rows of the call that count.
        part_rows: Most rows of a part.
    """

    def __init__(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, live: LiveRows, part_rows: int
    ) -> None:
        from greyhound_ops.kernels import products

        self._kernels = products.Products(weight, bias, live.order, live.count)
        self._rows = Rows(input, live, part_rows)
        self._num_classes, self.part_rows = weight.shape[0], part_rows
        padded = padded_classes(weight.shape[0], weight.dtype)
        self._chunks = weight.new_empty((2, part_rows, padded))

    def project(self, step: int, start: int, stop: int) -> Tensor:
        """Logits ``[stop - start, V]`` of a part, which the next but one writes over."""
        logits = self._chunks[step % 2, : stop - start, : self._num_classes]
        self._kernels.logits(self._rows.take(self._kernels, start, stop), logits, start)
        return logits


def run(loop: ChunkLoop, live: LiveRows, row_pass: RowPass, teacher: Teacher | None = None) -> None:
    """Goes through all chunks of a loop and leaves the gradients where `ChunkLoop.finish` looks.

    Args:
        loop: The call's loop, made with ``live=True``.
        live: Its rows.
        row_pass: Called for each part; its rows are those of ``live``, not the original ones.
        teacher: What its pass needs beside, or None.

    Memory: beside the chunk, the rows of one chunk in the order of ``live`` and two tiles of
    float32 partial sums a multiprocessor (33 MiB on an H200); a copy of the input if its columns
    are not dense.
    """
    from greyhound_ops.kernels import products

    input, weight, bias = loop.operands
    kernels = products.Products(weight, bias, live.order, live.count)
    spans = loop.spans()
    most = max((stop - start for start, stop in spans), default=0)
    rows = Rows(input, live, most)
    part_rows = None if teacher is None else teacher.part_rows
    parts = None
    if loop.grad_input is not None or loop.own_rows:
        parts = kernels.partial_sums()
    high, low = loop.live_sums()
    layout: _InPlace | _InChunk = _InChunk(loop, kernels, part_rows)
    if loop.in_place:
        layout = _InPlace(loop, kernels, high, parts, part_rows)
    fork = _Forked(input.device)
    with fork.joined():
        for start, stop in spans:
            here = rows.take(kernels, start, stop)
            cuts = layout.cuts(start, stop)
            projected: list[Any] = []
            passed: list[Any] = []
            beside: list[tuple[Tensor, ...]] = []
            # A part's pass is queued behind the next part's projection, which it then runs beside:
            # queued first, it would take the multiprocessors and run alone. Its gradient product
            # comes one projection later still, and not behind all of them: where few rows count,
            # launches for the other parts are empty, and the device would wait for the host.
            for step in range(len(cuts) + 2):
                if step < len(cuts):
                    at, end, chunk = cuts[step]
                    kernels.logits(here[at:end], chunk, start + at)
                    if teacher is None:
                        beside.append(())
                    else:
                        if step >= 2:  # which reads what is written over now
                            fork.wait(passed[step - 2])
                        beside.append((teacher.project(step, start + at, start + end),))
                    projected.append(fork.mark())
                if 0 <= step - 1 < len(cuts):
                    at, end, chunk = cuts[step - 1]
                    work = functools.partial(
                        row_pass, start + at, start + end, chunk, *beside[step - 1]
                    )
                    passed.append(fork.run_pass(projected[step - 1], work))
                if step >= 2:
                    at, end, chunk = cuts[step - 2]
                    fork.wait(passed[step - 2])
                    if loop.grad_input is not None:
                        _fold_input(loop, kernels, parts, layout, chunk, start + at, end - at)
            layout.fold_head(here, high, low, start)


def _part_rows(rows: int, all_rows: int, most: int | None) -> int:
    """Rows of a part of some rows, of a chunk of all rows; parts are of nearly equal size."""
    if most is None:
        most = LARGE_PART_ROWS if all_rows > LARGE_PART_ROWS else PART_ROWS
    return -(-rows // -(-rows // most) // TILE_ROWS) * TILE_ROWS


class _InChunk:
    """Logits of a chunk in memory of its own, row by row."""

    def __init__(self, loop: ChunkLoop, kernels: Any, part_rows: int | None) -> None:
        self._loop, self._kernels, self._part_rows = loop, kernels, part_rows

    def cuts(self, start: int, stop: int) -> list[tuple[int, int, Any]]:
        """First row of every part, row after its last, and its logits."""
        self._chunk = self._loop.buffer(start, stop)
        rows = stop - start
        size = LARGE_PART_ROWS if rows > LARGE_PART_ROWS else PART_ROWS
        size = self._part_rows or size
        cuts = [(at, min(at + size, rows)) for at in range(0, rows, size)]
        return [(at, end, self._chunk[at:end]) for at, end in cuts]

    @staticmethod
    def part(logits: Tensor, start: int, stop: int) -> Tensor:
        """Some rows of logits."""
        return logits[start:stop]

    def fold_head(self, rows: Tensor, high: Tensor, low: Tensor | None, start: int) -> None:
        """Add the product of the chunk to the head's gradient."""
        self._kernels.grad_weight(self._chunk, rows, high, low, start, self._loop.num_rows)


class _InPlace:
    """Logits of the first rows where the head's gradient goes, those of others in a chunk."""

    def __init__(
        self,
        loop: ChunkLoop,
        kernels: Any,
        high: Tensor,
        spare: Tensor | None,
        part_rows: int | None,
    ) -> None:
        from greyhound_ops.kernels import panels

        self._loop, self._kernels, self._spare = loop, kernels, spare
        self._part_rows = part_rows
        self._num_classes = high.shape[0]
        self._gradient = None
        beside = high
        if loop.own_rows:
            assert spare is not None
            shift = kernels.spare_panels(loop.own_rows, spare)
            self._gradient = panels.in_gradient(high, loop.own_rows, shift)
            beside = self._gradient.memory
        rows = min(loop.rows, loop.num_rows) - loop.own_rows
        self._chunk = None
        if rows:
            self._chunk = panels.in_chunk(loop.chunk_memory, rows, self._num_classes, beside)

    def cuts(self, start: int, stop: int) -> list[tuple[int, int, Any]]:
        """First row of every part, row after its last, and its logits."""
        own = self._loop.own_rows if start == 0 else 0
        self._own = self._gradient if own else None
        self._other = None
        if stop - start > own:
            assert self._chunk is not None
            self._other = self._chunk.part(0, stop - start - own)
        cuts = []
        for memory, before in ((self._own, 0), (self._other, own)):
            if memory is None:
                continue
            rows = memory.num_rows
            size = _part_rows(rows, stop - start, self._part_rows)
            for at in range(0, rows, size):
                end = min(at + size, rows)
                cuts.append((before + at, before + end, memory.part(at, end)))
        return cuts

    @staticmethod
    def part(logits: Any, start: int, stop: int) -> Any:
        """Some rows of logits."""
        return logits.part(start, stop)

    def fold_head(self, rows: Tensor, high: Tensor, low: Tensor | None, start: int) -> None:
        """Write the head's gradient over the logits' gradient, or add the chunk's product to it."""
        self._kernels.grad_weight_in_place(
            self._own, self._other, self._spare, rows, high, low, start, self._loop.num_rows
        )


def _fold_input(
    loop: ChunkLoop,
    kernels: Any,
    parts: Tensor | None,
    layout: _InChunk | _InPlace,
    grad_logits: Any,
    start: int,
    num_rows: int,
) -> None:
    """``grad_input`` of some rows from ``start`` on."""
    assert loop.grad_input is not None
    assert parts is not None
    for first, last in kernels.pieces(num_rows):
        kernels.grad_input(layout.part(grad_logits, first, last), parts, start + first)
        kernels.finish_input(parts, loop.grad_input, start + first, last - first)


def fold_exponentials(
    loop: ChunkLoop,
    source: Any,
    parts: Tensor,
    start: int,
    stop: int,
    loss: Tensor,
    statistics: Tensor,
    row_weight: Tensor | None,
) -> None:
    """`ChunkLoop.fold_exponentials` for the rows that count.

    Args:
        loop: The call's loop.
        source: Its `kernels.exponentials.Exponentials`, made with products over live rows.
        parts: Their partial sums.
        start: First row.
        stop: Row after the last.
        loss: ``[stop - start]`` float32, out.
        statistics: ``[2, stop - start]`` float32, out.
        row_weight: ``[stop - start]``, in the order of the rows here, or None.
    """
    assert loop.grad_input is not None
    chunk = loop.buffer(start, stop)
    factor, hard = source.exponentials(start, stop, chunk, loss, statistics)
    if row_weight is not None:
        factor *= row_weight
        hard *= row_weight
    kernels = source.live
    for at, end in kernels.pieces(stop - start):
        kernels.grad_input(chunk[at:end], parts, start + at)
        kernels.finish_input(
            parts,
            loop.grad_input,
            start + at,
            end - at,
            factor=factor[at:end],
            hard=hard[at:end],
            target=source.target[start + at : start + end],
        )
