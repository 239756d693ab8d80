"""One training run under ``torch.compile``, measured."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

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


def run(
    setup: Setup,
    compile_model: Callable[[GPT], Callable[[Tensor, Tensor], Tensor]],
    on_step: Callable[[float], None],
) -> Result:
    """Train a new model and measure it.

    Args:
        setup: What to train on what.
        compile_model: Makes the compiled model, ``torch.compile`` with or without a backend.
        on_step: Called with the loss after each step.

    Returns:
        Loss curve, memory and times.
    """
    torch.compiler.reset()
    gc.collect()
    device = setup.device
    torch.manual_seed(setup.seed)
    model = GPT(setup.model).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setup.learning_rate, fused=device.type == "cuda"
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / _WARM_UP_STEPS, 1.0)
    )
    with _cold_compile_cache():
        compiled = compile_model(model)

        def autocast() -> torch.autocast:
            return torch.autocast(
                device.type, dtype=torch.bfloat16, enabled=setup.dtype != torch.float32
            )

        @torch.no_grad()
        def validate() -> tuple[float, list[float]]:
            model.eval()
            losses, seconds = [], []
            for x, y in setup.validation:
                start = time.perf_counter()
                with autocast():
                    loss = compiled(x.to(device), y.to(device))
                losses.append(loss.item())
                seconds.append(time.perf_counter() - start)
            model.train()
            return statistics.fmean(losses), seconds

        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            with autocast():
                loss = compiled(x, y)
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
            optimizer.step()
            return loss.detach(), grad_norm

        validation_before, validation_s = validate()
        losses: list[float] = []
        grad_norms: list[float] = []
        steps_s: list[float] = []
        peak_bytes = 0
        for i, (x, y) in enumerate(setup.train):
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            _synchronize(device)
            start = time.perf_counter()
            if i == _MEMORY_STEP:
                with peak_memory(device) as peak:
                    loss, grad_norm = step(x, y)
                peak_bytes = peak.bytes
            else:
                loss, grad_norm = step(x, y)
                _synchronize(device)
                # Not the measured step: watching every allocation takes time on the CPU.
                steps_s.append(time.perf_counter() - start)
            scheduler.step()
            losses.append(loss.item())
            grad_norms.append(grad_norm.item())
            on_step(losses[-1])
        validation_after, more_s = validate()

    step_s = statistics.median(steps_s[1:])
    first_s = validation_s[0] - statistics.median(validation_s[1:] + more_s)
    return Result(
        losses=losses,
        grad_norms=grad_norms,
        validation_before=validation_before,
        validation_after=validation_after,
        peak_bytes=peak_bytes,
        step_ms=step_s * 1e3,
        compile_s=first_s + steps_s[0] - step_s,
    )


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
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
