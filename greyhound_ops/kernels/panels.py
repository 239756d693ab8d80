"""Logits in panels of 128 classes, which may lie in the memory of the head's gradient.

A panel holds 128 neighbouring classes of some rows, ``[rows, 128]``, and the panels follow each
other in the order of their classes. So does the gradient of the head: what the gradient's rows of
128 classes take, ``128 * D`` elements, holds those classes of ``D`` rows of logits. The product
that writes these rows of the gradient needs no other classes, so it may write where logits lay that
have been used, and the logits of the first ``D`` rows of a step take no memory at all.

While a panel's product is written its own logits are still read, by other programs. So each panel
lies ``shift`` places further on, the last ones in the places that the first ones left, from where
they are copied away before the product begins; then it goes on ``shift`` panels at a time
(`kernels.products.Products.grad_weight_in_place`).
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

WIDTH = 128
_WIDTH = tl.constexpr(WIDTH)


@triton.jit
def panel_row(column, pitch, shift, panels):
    """Row, of all rows of 128, where the panel of a column begins; outside for one behind the last.

    A descriptor reads zeros there and writes nothing.
    """
    panel = column // _WIDTH
    place = panel + shift
    place = tl.where(place >= panels, place - panels, place)
    return tl.where(panel < panels, place, panel) * pitch


@triton.jit
def places(columns, pitch, shift, panels, PANELS: tl.constexpr):
    """Where the columns of a row lie, in elements from its first; the pitch is in elements too."""
    if PANELS:
        place = columns // _WIDTH + shift
        place = tl.where(place >= panels, place - panels, place)
        return place.to(tl.int64) * pitch + columns % _WIDTH
    else:
        return columns


@dataclasses.dataclass(frozen=True)
class Panels:
    """Some rows of logits, or of their gradient.

    Attributes:
        memory: ``[panels * pitch, 128]`` bf16, contiguous.
        pitch: Rows from one panel to the next, a multiple of 8.
        num_rows: Rows that are meant.
        num_classes: V.
        shift: Places by which the panels have been moved on.
        first: First row that is meant, from the beginning of each panel.
    """

    memory: torch.Tensor
    pitch: int
    num_rows: int
    num_classes: int
    shift: int = 0
    first: int = 0

    @property
    def panels(self) -> int:
        """How many there are; the last may hold fewer than 128 classes."""
        return -(-self.num_classes // WIDTH)

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, V)``."""
        return self.num_rows, self.num_classes

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        return self.memory.dtype

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.memory.device

    def part(self, start: int, stop: int) -> Panels:
        """Some of the rows."""
        return dataclasses.replace(self, first=self.first + start, num_rows=stop - start)

    @property
    def begin(self) -> torch.Tensor:
        """The memory from the first row on."""
        return self.memory[self.first :]


def padded(rows: int) -> int:
    """Rows of a panel that hold so many and that the tiles of a product do not reach beyond."""
    return -(-rows // WIDTH) * WIDTH


def elements(rows: int, num_classes: int) -> int:
    """Elements of the panels of some rows."""
    return -(-num_classes // WIDTH) * WIDTH * padded(rows)


def rows_in_gradient(hidden_size: int, dtype: torch.dtype) -> int:
    """Rows of bf16 logits that the memory of a ``[V, D]`` gradient holds."""
    return hidden_size * dtype.itemsize // torch.bfloat16.itemsize // WIDTH * WIDTH


def in_gradient(grad_weight: torch.Tensor, num_rows: int, shift: int) -> Panels:
    """Rows of logits in the memory of the head's gradient.

    Args:
        grad_weight: ``[V, D]``, contiguous, with memory up to the next multiple of 128 rows behind
            it (`empty_gradient`).
        num_rows: At most `rows_in_gradient`.
        shift: Places by which the panels are moved on.
    """
    num_classes, hidden_size = grad_weight.shape
    rows = padded(num_classes)
    memory = grad_weight.as_strided((rows, hidden_size), (hidden_size, 1)).view(torch.bfloat16)
    pitch = memory.shape[1]
    return Panels(memory.view(-1, WIDTH), pitch, num_rows, num_classes, min(shift, rows // WIDTH))


def empty_gradient(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous ``[V, D]`` buffer in the memory of whole panels, at most 127 rows more."""
    num_classes, hidden_size = like.shape
    return like.new_empty((padded(num_classes), hidden_size), dtype=dtype)[:num_classes]


def in_chunk(memory: torch.Tensor, num_rows: int, num_classes: int, beside: torch.Tensor) -> Panels:
    """Rows of logits in other memory.

    Args:
        memory: Flat, with `WIDTH` elements more than `elements` of the rows.
        num_rows: Rows.
        num_classes: V.
        beside: Memory from which this is whole rows of 128 elements away, so that one descriptor
            can span both.
    """
    row_bytes = WIDTH * memory.element_size()
    away = (beside.data_ptr() - memory.data_ptr()) % row_bytes // memory.element_size()
    size = elements(num_rows, num_classes)
    return Panels(
        memory[away : away + size].view(-1, WIDTH), padded(num_rows), num_rows, num_classes
    )
