"""Times providers side by side on one case, and takes their peak memory and their errors."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases import Case, Inputs, make_inputs
from benchmarks.providers import FLOOR, Provider, Step
from benchmarks.records import Row
from benchmarks.truth import Truth

MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes:
        modes: Of a training step: any of ``full``, ``forward``, ``backward``.
        rounds: Turns each provider gets; their samples are pooled.
        warmup_ms: Warm-up before the samples of a turn.
        rep_ms: Time filled with samples in a turn.
        min_reps: Samples of a turn at least, however slow the provider.
        errors: Compare with a reference of higher precision.
        seed: Of the inputs.
    """

    modes: tuple[str, ...] = ("full",)
    rounds: int = 3
    warmup_ms: float = 50.0
    rep_ms: float = 150.0
    min_reps: int = 5
    errors: bool = False
    seed: int = 0


@dataclass
class _Entry:
    """A provider under measurement."""

    provider: Provider
    step: Step | None = None
    first_call_s: float | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)
    peak_mib: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class _Reference:
    loss: Tensor
    grad_input: Tensor | None
    grad_weight: Tensor | None


def measure_case(
    case: Case,
    providers: list[Provider],
    device: torch.device,
    settings: Settings,
    log: Callable[[str], None] = print,
) -> list[Row]:
    """Measures providers on one case, interleaved; the floor comes first and last.

    A provider that fails keeps its error text and leaves the others alone.

    Args:
        case: The case.
        providers: What to measure; the floor is always added.
        device: Where to run.
        settings: How much to measure.
        log: Receives one line per finished stage.

    Returns:
        One row per provider and mode.
    """
    torch._dynamo.reset()  # else a second shape would be compiled with dynamic sizes
    inputs = make_inputs(case, device, settings.seed)
    entries = [_Entry(provider) for provider in providers if provider is not FLOOR]

    for entry in entries:
        entry.error = entry.provider.available(case, device) or ""
        if not entry.error:
            _attempt(entry, device, partial(_warm_up, entry, case, inputs, device))
            log(f"  warm-up {entry.provider.name}: {entry.error or f'{entry.first_call_s:.1f} s'}")
    inputs.clear_grads()

    floors = [_measure_floor(case, inputs, device, settings)]
    modes = _timed_modes(case, settings)
    for turn in range(settings.rounds):
        for entry in entries if turn % 2 == 0 else reversed(entries):
            for mode in modes:
                _attempt(entry, device, partial(_time, entry, mode, device, settings))
            inputs.clear_grads()
    floors.append(_measure_floor(case, inputs, device, settings))

    for entry in entries:
        if device.type == "cuda":
            _attempt(entry, device, partial(_peak, entry, inputs))
    if settings.errors and not device_lost(device):
        reference = compute_reference(case, inputs)
        for entry in entries:
            _attempt(entry, device, partial(_errors, entry, inputs, reference))
            inputs.clear_grads()
    return _rows(case, entries, floors, settings)


def _attempt(entry: _Entry, device: torch.device, action: Callable[[], None]) -> None:
    """Runs one stage of one provider; a failure ends that provider's measurement."""
    if entry.error:
        return
    try:
        action()
    except Exception as exception:
        entry.error = " ".join(f"{type(exception).__name__}: {exception}".split())[:300]
        entry.step = None
    if entry.error:  # outside the handler: there the traceback still holds the tensors
        gc.collect()
        if not device_lost(device) and device.type == "cuda":
            torch.cuda.empty_cache()


def device_lost(device: torch.device) -> bool:
    """Says whether an earlier failure took the CUDA context of this process with it."""
    try:
        _synchronize(device)
    except RuntimeError:
        return True
    return False


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _warm_up(entry: _Entry, case: Case, inputs: Inputs, device: torch.device) -> None:
    """Builds the step and runs it twice: compilation and tuning happen here."""
    start = time.perf_counter()
    entry.step = entry.provider.build(case, inputs)
    entry.step.full()
    _synchronize(device)
    entry.first_call_s = time.perf_counter() - start
    entry.step.full()
    _synchronize(device)


def _timed_modes(case: Case, settings: Settings) -> tuple[str, ...]:
    """What is timed. The backward is a difference, since a graph can be used only once."""
    if case.mode == "no_grad":
        return ("no_grad",)
    timed = {"full"} if {"full", "backward"} & set(settings.modes) else set()
    if {"forward", "backward"} & set(settings.modes):
        timed.add("forward")
    return tuple(sorted(timed))


def _measure_floor(case: Case, inputs: Inputs, device: torch.device, settings: Settings) -> _Entry:
    """Times the floor; its buffers live only as long as that takes."""
    entry = _Entry(FLOOR)

    def run() -> None:
        _warm_up(entry, case, inputs, device)
        for _ in range(settings.rounds):
            for mode in _timed_modes(case, settings):
                _time(entry, mode, device, settings)

    _attempt(entry, device, run)
    entry.step = None
    return entry


def _time(entry: _Entry, mode: str, device: torch.device, settings: Settings) -> None:
    assert entry.step is not None
    function = entry.step.forward if mode == "forward" else entry.step.full
    entry.samples.setdefault(mode, []).extend(time_samples_ms(function, device, settings))


def time_samples_ms(
    function: Callable[[], object], device: torch.device, settings: Settings
) -> list[float]:
    """Times a function: by events with a flushed L2 on CUDA, by blocks of calls on the CPU.

    Args:
        function: What to time, warmed up.
        device: What it runs on.
        settings: Gives the durations.

    Returns:
        Milliseconds per call, one entry per sample.
    """
    if device.type == "cuda":
        import triton.testing

        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        estimate_ms = (time.perf_counter() - start) * 1e3
        samples = triton.testing.do_bench(
            function,
            warmup=settings.warmup_ms,
            rep=max(settings.rep_ms, settings.min_reps * estimate_ms * 1.05),
            return_mode="all",
        )
        return [float(sample) for sample in samples]

    from torch.utils.benchmark import Timer

    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    measurement = timer.blocked_autorange(min_run_time=settings.rep_ms / 1e3)
    return [seconds * 1e3 for seconds in measurement.times]


def _peak(entry: _Entry, inputs: Inputs) -> None:
    """Peak bytes a pass allocates beyond what is there before it, its gradients included."""
    assert entry.step is not None
    inputs.clear_grads()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    entry.step.full()
    torch.cuda.synchronize()
    entry.peak_mib = (torch.cuda.max_memory_allocated() - before) / MIB
    inputs.clear_grads()


def compute_reference(case: Case, inputs: Inputs) -> _Reference:
    """Loss and gradients in fp32 (fp64 for fp32 tensors), in row chunks, without TF32.

    Args:
        case: The case.
        inputs: Its tensors.

    Returns:
        The loss, and the gradients the case asks for.
    """
    dtype = torch.float64 if case.dtype == torch.float32 else torch.float32
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return _reference_in_chunks(case, inputs, Truth(case, inputs, dtype))
    finally:
        torch.set_float32_matmul_precision(precision)


def _reference_in_chunks(case: Case, inputs: Inputs, truth: Truth) -> _Reference:
    if case.mode == "no_grad":
        return _Reference(truth.loss, None, None)
    grad_input = torch.empty_like(inputs.input, dtype=truth.weight.dtype).view(case.N, case.D)
    grad_weight = None if case.frozen_weight else torch.zeros_like(truth.weight)
    for chunk in truth.chunks():
        grad_hidden = chunk.grad_logits @ truth.weight
        if chunk.hidden is not chunk.input:
            (grad_hidden,) = torch.autograd.grad(chunk.hidden, chunk.input, grad_hidden)
        grad_input[chunk.rows] = grad_hidden
        if grad_weight is not None:
            grad_weight.addmm_(chunk.grad_logits.t(), chunk.hidden.detach())
    return _Reference(truth.loss, grad_input.view(inputs.input.shape), grad_weight)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of the expected tensor."""
    difference = torch.linalg.vector_norm(actual.to(expected.dtype) - expected)
    return float(difference / torch.linalg.vector_norm(expected))


def _errors(entry: _Entry, inputs: Inputs, reference: _Reference) -> None:
    assert entry.step is not None
    loss = entry.step.full()
    pairs = {
        "err_loss": (loss, reference.loss),
        "err_grad_input": (inputs.input.grad, reference.grad_input),
        "err_grad_weight": (inputs.weight.grad, reference.grad_weight),
    }
    for name, (actual, expected) in pairs.items():
        if expected is None:
            continue
        if actual is None:
            raise RuntimeError(f"{name}: the provider made no gradient")
        entry.errors[name] = relative_error(actual, expected)


def _rows(case: Case, entries: list[_Entry], floors: list[_Entry], settings: Settings) -> list[Row]:
    modes = ("no_grad",) if case.mode == "no_grad" else settings.modes
    floor_ms = {
        mode: statistics.mean(statistics.median(floor.samples[mode]) for floor in floors)
        for mode in ("full", "no_grad")
        if all(floor.samples.get(mode) for floor in floors)
    }
    rows = []
    names = ["floor", "floor_end", *(entry.provider.name for entry in entries)]
    for name, entry in zip(names, [*floors, *entries], strict=True):
        for mode in modes:
            row = Row(
                case=case.name,
                N=case.N,
                D=case.D,
                V=case.V,
                dtype=case.dtype_name,
                provider=name,
                mode=mode,
                accum=entry.provider.accum_for(case),
                error=entry.error,
            )
            _fill_times(row, entry)
            if mode in ("full", "no_grad"):
                row.peak_mib = entry.peak_mib
                row.first_call_s = entry.first_call_s
                for column, value in entry.errors.items():
                    setattr(row, column, value)
                if row.median_ms is not None and mode in floor_ms:
                    row.ratio_to_floor = row.median_ms / floor_ms[mode]
            rows.append(row)
    return rows


def _fill_times(row: Row, entry: _Entry) -> None:
    """Puts in the quantiles; the backward is the difference of two medians and has none."""
    if row.mode == "backward":
        full, forward = entry.samples.get("full"), entry.samples.get("forward")
        if full and forward:
            row.median_ms = statistics.median(full) - statistics.median(forward)
        return
    if samples := entry.samples.get(row.mode):
        row.p20_ms, row.median_ms, row.p80_ms = torch.quantile(
            torch.tensor(samples, dtype=torch.float64),
            torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64),
        ).tolist()
