"""Training runs under ``torch.compile``, measured step by step in turn."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from greyhound_ops import torch_private
from greyhound_ops.demo.model import GPT, GPTConfig
from greyhound_ops.testing import peak_memory

Batch = tuple[Tensor, Tensor]

MIN_STEPS = 4
_MEMORY_STEP = 2  # not the step that compiles and makes the optimizer's state, nor the one after
_VALIDATION_BATCHES = 4
# Besides helping training this keeps the two runs comparable: AdamW's first updates have full size
# however small a gradient is, so the order of an atomic sum can flip them. At the full rate from
# the start, two runs of the very same graph were 1e-5 apart after 40 steps, with this 1e-7.
_WARM_UP_STEPS = 10
_MAX_GRAD_NORM = 1.0


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the runs to be compared have in common.

    Attributes:
        model: Sizes of the model.
        device: Where it runs.
        dtype: ``torch.float32``, or the dtype of autocast.
        learning_rate: AdamW's, after a linear warm-up.
        seed: Seed of the weights.
        train: One batch a step, on the CPU.
        validation: Batches of held-out text, on the CPU.
    """

    model: GPTConfig
    device: torch.device
    dtype: torch.dtype
    learning_rate: float
    seed: int
    train: list[Batch]
    validation: list[Batch]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run gave.

    Attributes:
        losses: Training loss of each step.
        grad_norms: Norm of all gradients of each step, before clipping.
        validation_before: Mean validation loss before the first step.
        validation_after: Mean validation loss after the last step.
        peak_bytes: Peak memory of one training step, above what was there before it.
        step_ms: Median time of a training step, without the one that compiles.
        compile_s: What the first validation batch and the first training step took longer than
            the ones after them.
    """

    losses: list[float]
    grad_norms: list[float]
    validation_before: float
    validation_after: float
    peak_bytes: int
    step_ms: float
    compile_s: float


def draw_batches(tokens: Tensor, *, count: int, batch: int, seq: int, seed: int) -> list[Batch]:
    """Draw random windows of a text, the same ones for the same seed.

    Args:
        tokens: Token ids ``[tokens]``.
        count: Number of batches.
        batch: Windows in a batch.
        seq: Tokens in a window.
        seed: Seed of the draw.

    Returns:
        Pairs of inputs and targets, ``[batch, seq]`` each.

    Raises:
        ValueError: If the text is shorter than a window.
    """
    if len(tokens) <= seq:
        raise ValueError(f"seq: expected fewer than the text's {len(tokens)} tokens, got {seq}")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - seq, (count, batch, 1), generator=generator)
    windows = tokens[starts + torch.arange(seq + 1)]
    return [(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in windows]


def draw_validation(tokens: Tensor, *, batch: int, seq: int) -> list[Batch]:
    """Draw the validation batches, the same ones whatever the seed of the run."""
    return draw_batches(tokens, count=_VALIDATION_BATCHES, batch=batch, seq=seq, seed=0)


class Run:
    """A new model in training, and what was measured of it.

    Args:
        setup: What to train on what.
        compile_model: Makes the compiled model, ``torch.compile`` with or without a backend.
    """

    def __init__(
        self, setup: Setup, compile_model: Callable[[GPT], Callable[[Tensor, Tensor], Tensor]]
    ) -> None:
        self.setup = setup
        self._device = setup.device
        torch.manual_seed(setup.seed)
        self._model = GPT(setup.model).to(self._device)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=setup.learning_rate, fused=self._device.type == "cuda"
        )
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda i: min((i + 1) / _WARM_UP_STEPS, 1.0)
        )
        self._compiled = compile_model(self._model)
        self._losses: list[float] = []
        self._grad_norms: list[float] = []
        self._steps_s: list[float] = []
        self._validations: list[float] = []
        self._validations_s: list[float] = []
        self._peak_bytes = 0

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self._device.type, dtype=torch.bfloat16, enabled=self.setup.dtype != torch.float32
        )

    @torch.no_grad()
    def validate(self) -> None:
        """Measure the loss on held-out text; the first time compiles the graph for it."""
        self._model.eval()
        losses = []
        for x, y in self.setup.validation:
            start = time.perf_counter()
            with self._autocast():
                loss = self._compiled(x.to(self._device), y.to(self._device))
            losses.append(loss.item())
            self._validations_s.append(time.perf_counter() - start)
        self._model.train()
        self._validations.append(statistics.fmean(losses))

    def _update(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with self._autocast():
            loss = self._compiled(x, y)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), _MAX_GRAD_NORM)
        self._optimizer.step()
        return loss.detach(), grad_norm

    def step(self, index: int) -> float:
        """Train on one batch.

        Args:
            index: Which; 0 compiles the training graph.

        Returns:
            The loss.
        """
        x, y = (tensor.to(self._device) for tensor in self.setup.train[index])
        self._optimizer.zero_grad()
        _synchronize(self._device)
        start = time.perf_counter()
        if index == _MEMORY_STEP:
            with peak_memory(self._device) as peak:
                loss, grad_norm = self._update(x, y)
            self._peak_bytes = peak.bytes
        else:
            loss, grad_norm = self._update(x, y)
            _synchronize(self._device)
            # Not the measured step: watching every allocation takes time on the CPU.
            self._steps_s.append(time.perf_counter() - start)
        self._scheduler.step()
        self._losses.append(loss.item())
        self._grad_norms.append(grad_norm.item())
        return self._losses[-1]

    def result(self) -> Result:
        """What the run gave, after at least `MIN_STEPS` steps and two validations."""
        step_s = statistics.median(self._steps_s[1:])
        first_s = self._validations_s[0] - statistics.median(self._validations_s[1:])
        return Result(
            losses=self._losses,
            grad_norms=self._grad_norms,
            validation_before=self._validations[0],
            validation_after=self._validations[-1],
            peak_bytes=self._peak_bytes,
            step_ms=step_s * 1e3,
            compile_s=first_s + self._steps_s[0] - step_s,
        )


def run_in_turn(runs: list[Run], on_step: Callable[[list[float]], None]) -> list[Result]:
    """Train several models step by step in turn.

    One after the other would let whatever else the machine does fall on one of them alone: beside
    a busy core the same step took 0.25 s or 1.7 s.

    Args:
        runs: Runs of the same setup.
        on_step: Called with the losses after each step of all.

    Returns:
        A result per run.
    """
    first = []
    for each in runs:
        with _cold_compile_cache():  # its own: the second would find the first one's kernels
            each.validate()
            first.append(each.step(0))
    on_step(first)
    for index in range(1, len(runs[0].setup.train)):
        on_step([each.step(index) for each in runs])
    for each in runs:
        each.validate()
    return [each.result() for each in runs]


def warm_up_compiler(device: torch.device) -> None:
    """Compile something tiny, so that the first run does not pay what a process pays once.

    Inductor imports itself, probes the compiler and builds its headers at the first compile.
    """
    with _cold_compile_cache():
        x = torch.ones(8, 8, device=device, requires_grad=True)
        torch.compile(lambda x: torch.nn.functional.gelu(x @ x).sum())(x).backward()


@contextmanager
def _cold_compile_cache() -> Iterator[None]:
    # A graph taken from the cache of an earlier run costs no compile time and runs no pass, so
    # neither could be reported.
    with torch_private.fresh_compile_cache():
        yield


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
