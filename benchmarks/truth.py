"""Loss and gradients of a case in row chunks, in any precision: the measure of errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import Case, Inputs
from benchmarks.losses import LOSSES

# One chunk of logits in fp64; a loss by hand holds several of its size.
CHUNK_LOGITS_BYTES = 2**30


class Chunk(NamedTuple):
    """Some rows of a case.

    Attributes:
        rows: Which.
        hidden: What is projected ``[rows, D]``, connected to ``input`` where a norm is between.
        input: The leaf ``[rows, D]``.
        grad_logits: Gradient of the loss with respect to the logits ``[rows, V]``.
    """

    rows: slice
    hidden: Tensor
    input: Tensor
    grad_logits: Tensor


class Truth:
    """A case in row chunks.

    Products are made in one dtype, everything behind the logits in fp64: there the textbook's
    logarithms of a mixture lose six digits in fp32. The values of all rows come first, since the
    gradient of a row may depend on other rows (in a preference loss it does).

    Args:
        case: The case.
        inputs: Its tensors.
        dtype: Of the products.
    """

    def __init__(self, case: Case, inputs: Inputs, dtype: torch.dtype) -> None:
        self._parts = LOSSES[case.loss]
        self._dtype = dtype
        self._N = case.N
        self._chunk_rows = max(1, CHUNK_LOGITS_BYTES // (8 * case.V))
        self._input = inputs.input.detach().reshape(case.N, case.D)
        self.weight = inputs.weight.detach().to(dtype)
        self._bias = None if inputs.bias is None else inputs.bias.detach().to(dtype)
        self._norm_weight = None
        if inputs.norm_weight is not None:
            self._norm_weight = inputs.norm_weight.detach().to(dtype)
        self._teacher = None
        if inputs.teacher_input is not None and inputs.teacher_weight is not None:
            teacher_input = inputs.teacher_input.reshape(case.N, case.D)
            self._teacher = teacher_input, inputs.teacher_weight.to(dtype)
        self._target = self._parts.row_target(inputs.target)
        reward = None if inputs.reward is None else inputs.reward.double()

        with torch.no_grad():
            parts = [self._values(rows, self._logits(self._hidden(rows))) for rows in self._rows()]
        values = torch.cat(parts).requires_grad_()
        with torch.enable_grad():
            loss = self._parts.reduce(values, self._target, reward)
        (self._upstream,) = torch.autograd.grad(loss, values)
        self.loss = loss.detach()

    @property
    def counted(self) -> Tensor:
        """``[N]``: which rows the loss depends on."""
        return (self._upstream != 0).any(-1)

    def hidden(self, counted: Tensor) -> Tensor:
        """What is projected, of rows that are counted."""
        with torch.no_grad():
            return torch.cat([self._hidden(rows)[counted[rows]] for rows in self._rows()])

    def chunks(self) -> Iterator[Chunk]:
        """The rows in order, with the gradient of their logits in the dtype of the products."""
        for rows in self._rows():
            with torch.enable_grad():
                x = self._input[rows].to(self._dtype).requires_grad_(self._norm_weight is not None)
                hidden = self._normed(x)
                logits = self._logits(hidden.detach()).double().requires_grad_()
                values = self._values(rows, logits)
            (gradient,) = torch.autograd.grad(values, logits, self._upstream[rows])
            yield Chunk(rows, hidden, x, gradient.to(self._dtype))

    def _rows(self) -> Iterator[slice]:
        for start in range(0, self._N, self._chunk_rows):
            yield slice(start, min(start + self._chunk_rows, self._N))

    def _hidden(self, rows: slice) -> Tensor:
        return self._normed(self._input[rows].to(self._dtype))

    def _normed(self, x: Tensor) -> Tensor:
        if self._parts.norm is None or self._norm_weight is None:
            return x
        return self._parts.norm(x, self._norm_weight)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = hidden @ self.weight.t()
        return logits if self._bias is None else logits.add_(self._bias)

    def _values(self, rows: slice, logits: Tensor) -> Tensor:
        teacher = None
        if self._teacher is not None:
            teacher = (self._teacher[0][rows].to(self._dtype) @ self._teacher[1].t()).double()
        return self._parts.rows(logits.double(), self._target[rows], teacher)
