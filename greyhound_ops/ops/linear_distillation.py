"""``greyhound::linear_distillation``: two projections and the divergence between their softmaxes.

Student and teacher logits of some rows are alive at once, the student's overwritten by their
gradient. The teacher is never differentiated: it costs one product and no gradient.

As in `linear_cross_entropy`, scalar reductions make their gradients in the forward (four matrix
products) and the backward scales them; ``reduction="none"`` with a trained head projects both sides
once more in the backward, which is one opaque op of its own.

The file holds, in this order: schemas, implementations, fakes, autograd, flops, registration.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from greyhound_ops import validation
from greyhound_ops.chunking import MIB, Budget
from greyhound_ops.ops import gradients, live_loop
from greyhound_ops.ops.chunk_loop import (
    ChunkLoop,
    GradientNeeds,
    backward_budget,
    defers_division,
    empty,
    empty_grad_weight,
    fp16_gain,
    stored_bias_dtype,
    stored_weight_dtype,
)
from greyhound_ops.ops.gradients import use_triton
from greyhound_ops.ops.op import Op, check_flags, check_frozen, in_order, product_flops
from greyhound_ops.ops.rows import check_targets, statistics_dtype

# ------------------------------------------------------------------------------------- schemas

_OPTIONS_SCHEMA = (
    "str divergence='jsd', float beta=0.5, float temperature=1.0, float soft_weight=1.0, "
    "float hard_weight=0.0, int ignore_index=-100, "
)
_FLAGS_SCHEMA = (
    "SymInt? chunk_size=None, str grad_weight_accum_dtype='fp32', "
    "ScalarType? compute_dtype=None, bool need_grad_input=False, bool need_grad_weight=False, "
    "bool need_grad_bias=False"
)
OP = Op(
    "linear_distillation("
    "Tensor input, Tensor weight, Tensor teacher_input, Tensor teacher_weight, "
    "Tensor? target=None, Tensor? bias=None, Tensor? teacher_bias=None, "
    f"{_OPTIONS_SCHEMA}str reduction='mean', {_FLAGS_SCHEMA}, bool grads_are_private=False"
    ") -> (Tensor loss, Tensor parts, Tensor statistics, Tensor denominator, "
    "Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
)
OP_BACKWARD = Op(
    "linear_distillation_backward("
    "Tensor grad_loss, Tensor input, Tensor weight, Tensor teacher_input, Tensor teacher_weight, "
    "Tensor statistics, Tensor? target=None, Tensor? bias=None, Tensor? teacher_bias=None, "
    f"{_OPTIONS_SCHEMA}{_FLAGS_SCHEMA}"
    ") -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
)

# Numbers per row that `reduction="none"` hands to its backward; see kernels/distillation.py.
STATISTICS = 6

# Student and teacher buffer together. With "weight" accumulation at V=128256 and D=4096 the
# gradients are 1 GiB, and the buffers a quarter of that. With a frozen head 1024 rows each, which
# take 1.15 of the floor where 320 took 1.25 (docs/performance.md, "Distillation").
CUDA_BUDGET = Budget(256 * MIB, 512 * MIB, 128 * MIB)

# Teacher's logits where the student's lie in the memory of grad_weight: of the part that is read
# and of the next, together.
TEACHER_BYTES = 192 * MIB

# Buffers of a chunk's size that the PyTorch path holds beside the student's logits.
TORCH_PATH_BUFFERS = 6.0


@dataclasses.dataclass(frozen=True)
class _RowLoss:
    """The loss of one row: what the kernel needs beside the tensors."""

    divergence: str
    beta: float
    temperature: float
    soft_weight: float
    hard_weight: float
    ignore_index: int

    def resolved(self) -> _RowLoss:
        """With the ends of the Jensen-Shannon family named as what they are."""
        if self.divergence == "jsd" and self.beta in (0.0, 1.0):
            kind = "kl" if self.beta == 0.0 else "reverse_kl"
            return dataclasses.replace(self, divergence=kind)
        return self

    @property
    def gradient_scale(self) -> float:
        """How large a logits gradient may get, for the range of fp16."""
        soft = abs(self.soft_weight)
        if self.divergence != "cosine":
            soft /= self.temperature
        if self.divergence == "reverse_kl":
            soft *= 4.0  # Q log(Q / P) is not bounded by 1: four times 256 nats are safe
        return soft + abs(self.hard_weight)


def _check(
    input: Tensor,
    weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
    row_loss: _RowLoss,
    reduction: str,
    chunk_size: int | None,
    grad_weight_accum_dtype: str,
    needs: GradientNeeds,
) -> None:
    check_tensors(
        input, weight, teacher_input, teacher_weight, target, bias, teacher_bias,
        row_loss.hard_weight,
    )  # fmt: skip
    options = dataclasses.asdict(row_loss)
    validation.check_options(
        reduction=reduction,
        chunk_size=chunk_size,
        grad_weight_accum_dtype=grad_weight_accum_dtype,
        ignore_index=options.pop("ignore_index"),
    )
    validation.check_distillation_options(**options)
    if needs.bias and bias is None:
        raise ValueError("need_grad_bias: expected False, since bias is None, got True")


def check_tensors(
    input: Tensor,
    weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
    hard_weight: float,
) -> None:
    """Check the tensors of student and teacher against each other."""
    validation.check_projection(input, weight, bias)
    validation.check_projection(teacher_input, teacher_weight, teacher_bias, "teacher_")
    validation.check_same_device(input, teacher_input=teacher_input)
    if teacher_input.shape[:-1] != input.shape[:-1]:
        raise ValueError(
            f"teacher_input: expected shape {[*input.shape[:-1], 'D_t']}, the rows of input, "
            f"got {list(teacher_input.shape)}"
        )
    if teacher_weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"teacher_weight: expected V = {weight.shape[0]} classes as in weight, got shape "
            f"{list(teacher_weight.shape)}; slice off the classes that only one of them pads"
        )
    if target is not None:
        validation.check_target(input, target)
    elif hard_weight != 0.0:
        raise ValueError(f"target: expected a tensor, since hard_weight is {hard_weight}, got None")


# ----------------------------------------------------------------------------- implementations


def _teacher_dtype(
    teacher_input: Tensor, teacher_weight: Tensor, compute_dtype: torch.dtype | None
) -> torch.dtype:
    """Dtype of the teacher's product: its own, or autocast's, which leaves float64 alone."""
    if torch.float64 in (teacher_input.dtype, teacher_weight.dtype):
        compute_dtype = None
    return validation.resolve_compute_dtype(
        teacher_input, teacher_weight, compute_dtype, "teacher_"
    )


def _shift(logits: Tensor) -> Tensor:
    """Maximum of each row, 0 where all is -inf."""
    top = logits.amax(1)
    return torch.where(top == -torch.inf, 0.0, top)


def _torch_rows(
    student: Tensor,
    teacher: Tensor,
    target: Tensor | None,
    parts: Tensor,
    statistics: Tensor,
    row_loss: _RowLoss,
    *,
    grad_scale: Tensor | None,
    row_scale: Tensor | None,
    gain: float,
    read_statistics: bool,
    write_grad: bool,
) -> Tensor | None:
    """What the Triton kernel does, in PyTorch operators; the formulas are derived there.

    Writes over both buffers.

    Returns:
        The logits gradient ``[C, V]`` in the dtype of the statistics, or None.
    """
    kind, beta, temperature = row_loss.divergence, row_loss.beta, row_loss.temperature
    hard = row_loss.hard_weight != 0.0
    s, t = student.to(parts.dtype), teacher.to(parts.dtype)
    ignored = None if target is None else target == row_loss.ignore_index
    poison = torch.zeros_like(statistics[0])
    if hard:
        assert target is not None
        in_range = (target >= 0) & (target < s.shape[1])
        safe_target = target.masked_fill(~in_range, 0).unsqueeze(1)
        poison = torch.where(in_range, poison, torch.nan)

    # What a divergence has no use for is zero.
    known = statistics if read_statistics else torch.zeros_like(statistics)
    top_q, sum_q, top_p, sum_p, constant, sum_hard = known
    hard_loss = torch.zeros_like(poison)
    probabilities = None  # of the cross entropy, at temperature 1
    if hard:
        if not read_statistics:
            top_q = _shift(s)
            z_target = s.gather(1, safe_target).squeeze(1)
            probabilities = torch.exp(s - top_q.unsqueeze(1))
            sum_hard = probabilities.sum(1)
            # Not through the log-sum-exp: at logits of 1e4 its last bit is 1e-3 in float32.
            hard_loss = sum_hard.log() - (z_target - top_q) + poison
        elif write_grad:
            probabilities = torch.exp(s - top_q.unsqueeze(1))
        if probabilities is not None and write_grad:
            probabilities.div_(sum_hard.unsqueeze(1))

    if kind == "cosine":
        if not read_statistics:
            sum_q = torch.linalg.vector_norm(s, dim=1).clamp_min(1e-8)
            sum_p = torch.linalg.vector_norm(t, dim=1).clamp_min(1e-8)
            constant = (s * t).sum(1) / sum_q / sum_p
        soft_loss = 1.0 - constant
        grad = t.mul_((-1.0 / sum_q / sum_p).unsqueeze(1))
        grad.add_(s.mul_((constant / sum_q / sum_q).unsqueeze(1)))
    else:
        if not read_statistics:
            top_q, top_p = _shift(s), _shift(t)
        log_q = s.sub_(top_q.unsqueeze(1)).div_(temperature)
        log_p = t.sub_(top_p.unsqueeze(1)).div_(temperature)
        if not read_statistics:
            sum_q, sum_p = log_q.exp().sum(1), log_p.exp().sum(1)
        # What the selections below would let pass: NaN or inf anywhere in the row.
        poison = poison + 0.0 * (sum_q.log() + sum_p.log())
        log_q.sub_(sum_q.log().unsqueeze(1))
        log_p.sub_(sum_p.log().unsqueeze(1))
        if kind == "kl":
            p, q = log_p.exp(), log_q.exp()
            soft_loss = torch.where(p > 0.0, p * log_p.sub_(log_q), 0.0).sum(1)
            grad = q.sub_(p)
        elif kind == "reverse_kl":
            q, difference = log_q.exp(), log_q.sub_(log_p)
            if not read_statistics:
                constant = torch.where(q > 0.0, q * difference, 0.0).sum(1)
            soft_loss = constant
            grad = torch.where(q > 0.0, difference.sub_(constant.unsqueeze(1)).mul_(q), 0.0)
        elif kind == "tvd":
            q, p = log_q.exp_(), log_p.exp_()
            difference = q - p
            soft_loss = 0.5 * difference.abs().sum(1)
            half_sign = difference.sign_().mul_(0.5)
            if not read_statistics:
                constant = (q * half_sign).sum(1)
            grad = half_sign.sub_(constant.unsqueeze(1)).mul_(q)
        else:
            # A floor whose exponential is zero takes the place of -inf: no inf - inf.
            log_q.clamp_(min=-1e4)
            log_p.clamp_(min=-1e4)
            p, q = log_p.exp(), log_q.exp()
            difference = log_q.sub_(log_p)
            smaller_weight = torch.full_like(difference, 1.0 - beta)
            smaller_weight.masked_fill_(difference > 0.0, beta)
            mix = smaller_weight.mul_(torch.expm1(difference.abs().neg_())).log1p_()
            over_p = p.mul_(mix + difference.clamp_min(0.0)).sum(1)
            over_q = mix.sub_(difference.clamp_max_(0.0))
            mean_over_q = (q * over_q).sum(1)
            soft_loss = -(beta * over_p + (1.0 - beta) * mean_over_q)
            if not read_statistics:
                constant = -(1.0 - beta) * mean_over_q
            grad = over_q.mul_(beta - 1.0).sub_(constant.unsqueeze(1)).mul_(q)

    if not read_statistics:
        # No divergence is negative; clamp_min keeps NaN.
        rows = torch.stack([soft_loss.clamp_min(0.0) + poison, hard_loss])
        kept = torch.stack([top_q, sum_q, top_p, sum_p, constant, sum_hard])
        if ignored is not None:
            rows, kept = rows.masked_fill(ignored, 0.0), kept.masked_fill(ignored, 0.0)
        parts.copy_(rows)
        statistics.copy_(kept)
    if not write_grad:
        return None
    scale = poison + gain
    if grad_scale is not None:
        scale = scale * grad_scale
    if row_scale is not None:
        scale = scale * row_scale
    soft = scale * row_loss.soft_weight
    if kind != "cosine":
        soft = soft / temperature
    grad = grad.mul_(soft.unsqueeze(1))
    if probabilities is not None:
        by_row = (scale * row_loss.hard_weight).unsqueeze(1)
        grad.add_(probabilities.mul_(by_row)).scatter_add_(1, safe_target, -by_row)
    return grad if ignored is None else grad.masked_fill_(ignored.unsqueeze(1), 0.0)


class _Pair:
    """Student and teacher, chunk by chunk, through the kernel and into the student's gradients.

    Args:
        input: ``[N, D]`` of the student.
        weight: ``[V, D]`` of the student.
        bias: ``[V]`` or None.
        teacher_input: ``[N, D_t]``.
        teacher_weight: ``[V, D_t]``.
        teacher_bias: ``[V]`` or None.
        target: ``[N]`` int64 or None.
        row_loss: Options of the loss of a row.
        needs: Gradients to make.
        planned_for: Gradients that the plan of the chunks is for, those of a later backward too.
        compute_dtype: Dtype of the student's products.
        teacher_dtype: Dtype of the teacher's product.
        accum: ``"fp32"`` or ``"weight"``.
        chunk_size: Rows per chunk, or None for the plan.
        gain: Factor that the logits gradients carry.
        spare_fp16: As for `ChunkLoop`.
        may_live: Whether `live_loop` may serve: not where a backward makes the gradients, from
            logits that must be those of its forward to the last bit.
    """

    def __init__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        target: Tensor | None,
        row_loss: _RowLoss,
        *,
        needs: GradientNeeds,
        planned_for: GradientNeeds,
        compute_dtype: torch.dtype,
        teacher_dtype: torch.dtype,
        accum: str,
        chunk_size: int | None,
        gain: float,
        spare_fp16: bool,
        may_live: bool = False,
    ) -> None:
        # float64 stays with PyTorch on either side.
        wider = teacher_dtype if teacher_dtype == torch.float64 else compute_dtype
        self._triton = use_triton(wider, input.device.type)
        self._target, self._row_loss, self._needs = target, row_loss.resolved(), needs
        self._live: live_loop.LiveRows | None = None
        served = may_live and chunk_size is None and compute_dtype == teacher_dtype
        if (
            served
            and live_loop.serves(input, weight, needs, compute_dtype)
            and live_loop.projects(teacher_input, teacher_weight, teacher_dtype)
        ):
            self._live = live_loop.LiveRows(target, row_loss.ignore_index, input)
        beside = teacher_dtype.itemsize / compute_dtype.itemsize
        if not self._triton:
            beside = TORCH_PATH_BUFFERS
        if self._live is not None:
            beside = 0.0  # a teacher's part or two, whatever the student's chunk
        # Both in chunks of the same rows: products of one shape round alike, so that the logits of
        # identical models are identical. A teacher's chunk of a third gained nothing (H200).
        budget = CUDA_BUDGET if input.is_cuda else None
        self._student = ChunkLoop(
            input,
            weight,
            bias,
            needs=needs,
            compute_dtype=compute_dtype,
            accum=accum,
            chunk_size=chunk_size,
            gain=gain,
            spare_fp16=spare_fp16,
            beside=beside,
            may_keep_gradient=self._live is None,
            live=self._live is not None,
            budget=backward_budget(
                input.shape[0],
                input.device.type,
                weight,
                planned_for,
                compute_dtype,
                accum,
                budget,
                beside=beside,
            ),
        )
        self._teacher = ChunkLoop(
            teacher_input,
            teacher_weight,
            teacher_bias,
            needs=GradientNeeds(False, False, False),
            compute_dtype=teacher_dtype,
            accum=accum,
            chunk_size=self._student.rows,
            gain=1.0,
        )

    def run(
        self,
        parts: Tensor,
        statistics: Tensor,
        *,
        grad_scale: Tensor | None,
        row_scale: Tensor | None,
        read_statistics: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Go through all rows.

        Args:
            parts: ``[2, N]`` out: divergence and cross entropy of each row.
            statistics: ``[STATISTICS, N]``, out, or in if ``read_statistics``.
            grad_scale: Scalar on the device that multiplies all gradients, or None.
            row_scale: ``[N]`` factor of each row's gradient, or None.
            read_statistics: Take the statistics as given; ``parts`` is then left alone.

        Returns:
            grad_input, grad_weight and grad_bias, None where not wanted.
        """
        if self._live is not None:
            self._run_live(self._live, parts, statistics, grad_scale)
            self._teacher.finish()
            return self._student.finish()
        for start, stop in self._student.spans():
            logits = self._student.project(start, stop)
            grad_logits = self._rows(
                logits,
                self._teacher.project(start, stop),
                None if self._target is None else self._target[start:stop],
                parts[:, start:stop],
                statistics[:, start:stop],
                grad_scale=grad_scale,
                row_scale=None if row_scale is None else row_scale[start:stop],
                gain=self._student.gain,
                read_statistics=read_statistics,
                write_grad=bool(self._needs),
            )
            if self._needs:
                self._student.fold(start, stop, grad_logits)
            del logits, grad_logits  # or the chunk would outlive the loop, into the final cast
        self._teacher.finish()
        return self._student.finish()

    def _run_live(
        self,
        live: live_loop.LiveRows,
        parts: Tensor,
        statistics: Tensor,
        grad_scale: Tensor | None,
    ) -> None:
        """`run` where gradients are made now, without the rows that do not count."""
        made, kept = torch.empty_like(parts), torch.empty_like(statistics)

        def row_pass(start: int, stop: int, student: Any, teacher: Tensor) -> None:
            self._rows(
                student,
                teacher,
                None if live.labels is None else live.labels[start:stop],
                made[:, start:stop],
                kept[:, start:stop],
                grad_scale=grad_scale,
                row_scale=None,
                gain=self._student.gain,
                read_statistics=False,
                write_grad=True,
                live=live.count if live.may_skip else None,
                live_start=start,
            )

        input, weight, bias = self._teacher.operands
        row_bytes = 2 * weight.shape[0] * weight.element_size()
        rows = max(TEACHER_BYTES // row_bytes // live_loop.TILE_ROWS, 1) * live_loop.TILE_ROWS
        teacher = live_loop.Teacher(input, weight, bias, live, min(rows, input.shape[0]))
        live_loop.run(self._student, live, row_pass, teacher)
        parts.copy_(live.restore(made))
        statistics.copy_(live.restore(kept))

    def _rows(
        self,
        student: Any,
        teacher: Tensor,
        target: Tensor | None,
        parts: Tensor,
        statistics: Tensor,
        **kwargs: Any,
    ) -> Any:
        """Losses of a chunk and its logits gradient, by Triton (in place) or by PyTorch.

        ``student`` is a tensor or, where Triton's kernels run, panels.
        """
        if not self._triton:
            grad = _torch_rows(
                student, teacher, target, parts, statistics, self._row_loss, **kwargs
            )
            if grad is None:
                return student
            # cuBLAS accumulates the products' own dtype in fp32; elsewhere fp32 is kept.
            return student.copy_(grad) if student.is_cuda else grad
        from greyhound_ops.kernels import distillation  # Triton is not there on every platform

        options = dataclasses.asdict(self._row_loss)
        distillation.distillation(student, teacher, target, parts, statistics, **kwargs, **options)
        return student


def _forward(
    input: Tensor,
    weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    divergence: str = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
    compute_dtype: torch.dtype | None = None,
    need_grad_input: bool = False,
    need_grad_weight: bool = False,
    need_grad_bias: bool = False,
    grads_are_private: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    row_loss = _RowLoss(divergence, beta, temperature, soft_weight, hard_weight, ignore_index)
    needs = GradientNeeds(need_grad_input, need_grad_weight, need_grad_bias)
    _check(
        input, weight, teacher_input, teacher_weight, target, bias, teacher_bias, row_loss,
        reduction, chunk_size, grad_weight_accum_dtype, needs,
    )  # fmt: skip
    teacher_dtype = _teacher_dtype(teacher_input, teacher_weight, compute_dtype)
    compute_dtype = validation.resolve_compute_dtype(input, weight, compute_dtype)
    dtype = statistics_dtype(compute_dtype)
    rows, leading = input.reshape(-1, input.shape[-1]), input.shape[:-1]
    num_rows = rows.shape[0]
    labels = None if target is None else target.reshape(-1).long()
    if labels is not None and hard_weight:
        check_targets(labels, weight.shape[0], ignore_index)

    # Gradients per row need the upstream of that row before rows are summed up.
    made_now = needs
    if _recomputes(reduction, needs):
        made_now = GradientNeeds(False, False, False)
    deferred = defers_division(compute_dtype)
    divisor = torch.ones((), dtype=dtype, device=input.device)
    if reduction == "mean":
        if labels is None:
            divisor.fill_(max(num_rows, 1))
        else:
            # At least one: without a counting row the sum is zero and stays so.
            divisor = (labels != ignore_index).sum(dtype=dtype).clamp_min(1.0)
    pair = _Pair(
        rows,
        weight,
        bias,
        teacher_input.reshape(-1, teacher_input.shape[-1]),
        teacher_weight,
        teacher_bias,
        labels,
        row_loss,
        needs=made_now,
        planned_for=needs,
        compute_dtype=compute_dtype,
        teacher_dtype=teacher_dtype,
        accum=grad_weight_accum_dtype,
        chunk_size=chunk_size,
        gain=fp16_gain(row_loss.resolved().gradient_scale) if deferred and made_now else 1.0,
        spare_fp16=True,
        may_live=True,
    )
    parts = input.new_empty((2, num_rows), dtype=dtype)
    statistics = input.new_empty((STATISTICS, num_rows), dtype=dtype)
    grad_input, grad_weight, grad_bias = pair.run(
        parts,
        statistics,
        grad_scale=None if deferred or reduction != "mean" else divisor.reciprocal(),
        row_scale=None,
        read_statistics=False,
    )
    parts = parts.reshape(2, *leading) if reduction == "none" else parts.sum(1) / divisor
    loss = parts[0] * soft_weight
    if hard_weight:
        loss = loss + parts[1] * hard_weight
    return (
        loss,
        parts,
        statistics.reshape(STATISTICS, *leading),
        divisor,
        empty(input) if grad_input is None else grad_input.reshape(input.shape),
        empty(weight) if grad_weight is None else grad_weight,
        empty(input if bias is None else bias) if grad_bias is None else grad_bias,
    )


def _recomputes(reduction: str, needs: GradientNeeds) -> bool:
    """Whether gradients are made in the backward, from both projections once more."""
    return reduction == "none" and (needs.weight or needs.bias)


def _backward_by_row(
    grad_loss: Tensor,
    input: Tensor,
    weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    statistics: Tensor,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    divergence: str = "jsd",
    beta: float = 0.5,
    temperature: float = 1.0,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    grad_weight_accum_dtype: str = "fp32",
    compute_dtype: torch.dtype | None = None,
    need_grad_input: bool = False,
    need_grad_weight: bool = False,
    need_grad_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    row_loss = _RowLoss(divergence, beta, temperature, soft_weight, hard_weight, ignore_index)
    needs = GradientNeeds(need_grad_input, need_grad_weight, need_grad_bias)
    _check(
        input, weight, teacher_input, teacher_weight, target, bias, teacher_bias, row_loss,
        "none", chunk_size, grad_weight_accum_dtype, needs,
    )  # fmt: skip
    leading = input.shape[:-1]
    if statistics.shape != (STATISTICS, *leading):
        raise ValueError(
            f"statistics: expected shape {[STATISTICS, *leading]}, as the forward returned them, "
            f"got {list(statistics.shape)}"
        )
    if grad_loss.shape != leading:
        raise ValueError(
            f"grad_loss: expected shape {list(leading)}, one number per row, "
            f"got {list(grad_loss.shape)}"
        )
    teacher_dtype = _teacher_dtype(teacher_input, teacher_weight, compute_dtype)
    pair = _Pair(
        input.reshape(-1, input.shape[-1]),
        weight,
        bias,
        teacher_input.reshape(-1, teacher_input.shape[-1]),
        teacher_weight,
        teacher_bias,
        None if target is None else target.reshape(-1).long(),
        row_loss,
        needs=needs,
        planned_for=needs,
        compute_dtype=validation.resolve_compute_dtype(input, weight, compute_dtype),
        teacher_dtype=teacher_dtype,
        accum=grad_weight_accum_dtype,
        chunk_size=chunk_size,
        gain=1.0,  # the upstream gradient brings its own scale, a GradScaler's for one
        spare_fp16=False,
    )
    statistics = statistics.reshape(STATISTICS, -1)
    grad_input, grad_weight, grad_bias = pair.run(
        statistics[:2],  # nothing is written to it when the statistics are read
        statistics,
        grad_scale=None,
        row_scale=grad_loss.reshape(-1),
        read_statistics=True,
    )
    return (
        empty(input) if grad_input is None else grad_input.reshape(input.shape),
        empty(weight) if grad_weight is None else grad_weight.to(weight.dtype),
        empty(input) if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


# --------------------------------------------------------------------------------------- fakes


def _check_named(call: Any, reduction: str) -> tuple[GradientNeeds, torch.dtype]:
    needs = GradientNeeds(call.need_grad_input, call.need_grad_weight, call.need_grad_bias)
    row_loss = _RowLoss(
        call.divergence, call.beta, call.temperature, call.soft_weight, call.hard_weight,
        call.ignore_index,
    )  # fmt: skip
    _check(
        call.input, call.weight, call.teacher_input, call.teacher_weight, call.target, call.bias,
        call.teacher_bias, row_loss, reduction, call.chunk_size, call.grad_weight_accum_dtype,
        needs,
    )  # fmt: skip
    _teacher_dtype(call.teacher_input, call.teacher_weight, call.compute_dtype)
    return needs, validation.resolve_compute_dtype(call.input, call.weight, call.compute_dtype)


def _fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    call = OP.named(args, kwargs)
    needs, compute_dtype = _check_named(call, call.reduction)
    input, weight, bias = call.input, call.weight, call.bias
    leading, dtype = input.shape[:-1], statistics_dtype(compute_dtype)
    by_row = call.reduction == "none"
    made_now = not _recomputes(call.reduction, needs)
    stored = stored_weight_dtype(weight.dtype, compute_dtype, call.grad_weight_accum_dtype)
    return (
        input.new_empty(leading if by_row else (), dtype=dtype),
        input.new_empty((2, *leading) if by_row else (2,), dtype=dtype),
        input.new_empty((STATISTICS, *leading), dtype=dtype),
        input.new_empty((), dtype=dtype),
        input.new_empty(input.shape) if needs.input and made_now else empty(input),
        empty_grad_weight(weight, stored) if needs.weight and made_now else empty(weight),
        bias.new_empty(bias.shape, dtype=stored_bias_dtype(bias.dtype))
        if needs.bias and made_now
        else empty(input if bias is None else bias),
    )


def _fake_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = OP_BACKWARD.named(args, kwargs)
    needs, _ = _check_named(call, "none")
    input, weight, bias = call.input, call.weight, call.bias
    return (
        input.new_empty(input.shape) if needs.input else empty(input),
        empty_grad_weight(weight, weight.dtype) if needs.weight else empty(weight),
        bias.new_empty(bias.shape) if needs.bias else empty(input),
    )


# ------------------------------------------------------------------------------------ autograd

_OPERANDS = ("input", "weight", "bias")
_TEACHER = ("teacher_input", "teacher_weight", "teacher_bias")
_READ_AGAIN = ("input", "weight", "teacher_input", "teacher_weight")
_READ_AGAIN_IF_GIVEN = ("target", "bias", "teacher_bias")
_OPTIONS = OP_BACKWARD.arguments[9:]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = vars(OP.named(inputs, {}))
    check_flags(ctx, OP, call, _OPERANDS)
    check_frozen(ctx, OP, _TEACHER)
    _, parts, statistics, denominator, *grads = output
    ctx.mark_non_differentiable(parts, statistics, denominator, *grads)
    # Else autograd would make a zero of [V, D] for the output grad_weight that nobody uses.
    ctx.set_materialize_grads(False)
    needs = {name: call[f"need_grad_{name}"] for name in _OPERANDS}
    ctx.recompute = _recomputes(call["reduction"], GradientNeeds(**needs))
    if ctx.recompute:
        ctx.options = {name: call[name] for name in _OPTIONS}
        saved = (*_READ_AGAIN, *_READ_AGAIN_IF_GIVEN)
        ctx.save_for_backward(statistics, *(call[name] for name in saved))
        return
    dtype = validation.resolve_compute_dtype(call["input"], call["weight"], call["compute_dtype"])
    gradients.keep(
        ctx,
        OP.name,
        {name: call[name] for name in _OPERANDS},
        {name: grad if needs[name] else None for name, grad in zip(_OPERANDS, grads, strict=True)},
        denominator=denominator if defers_division(dtype) else None,
        private=call["grads_are_private"],
    )


def _autograd_backward(ctx: Any, grad_loss: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if grad_loss is None:
        return (None,) * len(OP.arguments)
    if not ctx.recompute:
        grads = gradients.give(ctx, grad_loss)
        return in_order(OP, grads)
    statistics, input, weight, teacher_input, teacher_weight, *given = ctx.saved_tensors
    made = OP_BACKWARD.packet(
        grad_loss, input, weight, teacher_input, teacher_weight, statistics, *given, **ctx.options
    )
    return in_order(
        OP,
        {
            name: grad if ctx.options[f"need_grad_{name}"] else None
            for name, grad in zip(_OPERANDS, made, strict=True)
        },
    )


# --------------------------------------------------------------------------------------- flops


def _flops(
    input_shape: Any,
    weight_shape: Any,
    teacher_input_shape: Any,
    teacher_weight_shape: Any,
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    # Which gradients were made is read off the outputs: one that was not asked for is empty.
    made = sum(1 for shape in out_shape[4:6] if len(shape) > 1)
    student = product_flops(input_shape, weight_shape) * (1 + made)
    return student + product_flops(teacher_input_shape, teacher_weight_shape)


def _flops_backward(
    grad_shape: Any,
    input_shape: Any,
    weight_shape: Any,
    teacher_input_shape: Any,
    teacher_weight_shape: Any,
    *args: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    made = sum(1 for shape in out_shape[:2] if len(shape) > 1)
    student = product_flops(input_shape, weight_shape) * (1 + made)
    return student + product_flops(teacher_input_shape, teacher_weight_shape)


# -------------------------------------------------------------------------------- registration

OP.implement(_forward, _fake)
OP.autograd(_setup_context, _autograd_backward)
OP.autocast()
OP.vmap_by_sample()
OP.flops(_flops)
OP_BACKWARD.implement(_backward_by_row, _fake_backward)
OP_BACKWARD.autograd(*gradients.refuse_twice(OP.name))
OP_BACKWARD.flops(_flops_backward)
