"""A whole training step with the rewrite off and on: ``python -m benchmarks end-to-end``.

Each setting runs in processes of its own: one that is timed, one whose memory is capped and in
which the largest batch that fits is looked for.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import records
from benchmarks.llama import Llama, LlamaConfig
from benchmarks.providers import find_own_packages, require_rewrite
from benchmarks.workers import Handler, Worker, WorkerError

MIB = 2**20
SETTINGS = ("off", "on")
PREPARE_S = 400.0
ANSWER_S = 200.0


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        config: Of the model.
        B: Sequences of a timed step.
        T: Tokens of a sequence.
        steps: Timed steps of a turn.
        traced_B: Sequences of the batch that the capped process compiles with. So many that the
            logits have more than 2**31 elements: code compiled for fewer would not serve more.
        largest_B: Where the search for the largest batch ends.
        cap_gb: Memory of the capped process, 10**9 bytes.
        min_logits_bytes: Of the rewrite; None for its own.
    """

    config: LlamaConfig
    B: int
    T: int
    steps: int
    traced_B: int
    largest_B: int
    cap_gb: float
    min_logits_bytes: int | None = None


FULL = Plan(LlamaConfig(), 4, 2048, 5, traced_B=12, largest_B=512, cap_gb=80.0)
TINY = Plan(
    LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, layers=2, heads=2),
    B=2,
    T=16,
    steps=2,
    traced_B=3,
    largest_B=8,
    cap_gb=80.0,
    min_logits_bytes=0,
)


@dataclass
class EndToEndRow:
    """One setting of a model's training step.

    Attributes:
        rewrite: ``off`` or ``on``.
        parameters: Of the model.
        layers: Blocks.
        D: Hidden size.
        V: Vocabulary size.
        B: Sequences of a step.
        T: Tokens of a sequence.
        dtype: Of parameters, gradients and optimizer state.
        compile_s: Wall time of the first step. The processes compile side by side: no measure of
            compile time.
        median_ms: Median time of a step: forward, backward, optimizer.
        p20_ms: 20th percentile.
        p80_ms: 80th percentile.
        peak_mib: Most that the allocator held in a step, with model and optimizer.
        loss: Of the first batch after the warm-up steps.
        cap_gb: Memory allowed in the search for the largest batch, 10**9 bytes.
        largest_tokens: Most tokens of a step, in sequences of T, that fit; empty if not looked for.
        largest_ms: Time of that step.
        recompiles: Graphs compiled during that search beyond the first.
        error: What went wrong.
    """

    rewrite: str
    parameters: int
    layers: int
    D: int
    V: int
    B: int
    T: int
    dtype: str
    compile_s: float | None = None
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    peak_mib: float | None = None
    loss: float | None = None
    cap_gb: float | None = None
    largest_tokens: int | None = None
    largest_ms: float | None = None
    recompiles: int | None = None
    error: str = ""


class Trainer:
    """In a process of its own: a model, its optimizer and the compiled step."""

    def __init__(self, setting: str, plan: Plan, device_type: str, dynamic: bool) -> None:
        find_own_packages()
        self._lowering = importlib.import_module("greyhound_lowering")
        self._plan = plan
        self._device = torch.device(device_type)
        self._dynamic = dynamic
        on_gpu = device_type == "cuda"
        if on_gpu and dynamic:
            total_bytes = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, plan.cap_gb * 1e9 / total_bytes))
        self._lowering.disable()
        self._rewritten = setting == "on"
        if self._rewritten:
            own = plan.min_logits_bytes
            self._lowering.enable(**({} if own is None else {"min_logits_bytes": own}))
        torch.manual_seed(0)
        with self._device:
            torch.set_default_dtype(torch.bfloat16)
            model = Llama(plan.config)
            torch.set_default_dtype(torch.float32)
        self._parameters = sum(parameter.numel() for parameter in model.parameters())
        self._model = torch.compile(model, dynamic=True if dynamic else None)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu or None)

    def _batch(self, B: int) -> Tensor:
        vocab_size, T = self._plan.config.vocab_size, self._plan.T
        generator = torch.Generator(self._device).manual_seed(B)
        return torch.randint(vocab_size, (B, T), device=self._device, generator=generator)

    def _step(self, ids: Tensor) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self._model(ids, ids)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def prepare(self) -> dict[str, Any]:
        """Compiles and runs three steps."""
        ids = self._batch(self._plan.traced_B if self._dynamic else self._plan.B)
        start = time.perf_counter()
        self._step(ids)
        self._synchronize()
        seconds = time.perf_counter() - start
        if self._rewritten:
            require_rewrite(self._lowering, 1)
        elif self._lowering.explain().decisions:
            raise RuntimeError("the rewrite ran where it was off")
        self._step(ids)
        loss = float(self._step(ids))
        self._release()
        return {"compile_s": seconds, "loss": loss, "parameters": self._parameters}

    def steps(self) -> list[float]:
        """Milliseconds of some steps; one more, in front, is not counted."""
        ids = self._batch(self._plan.B)
        self._step(ids)
        self._synchronize()
        if self._device.type != "cuda":
            return [self._timed_ms(ids) for _ in range(self._plan.steps)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(self._plan.steps + 1)]
        events[0].record()
        for event in events[1:]:
            self._step(ids)
            event.record()
        self._synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]

    def _timed_ms(self, ids: Tensor) -> float:
        start = time.perf_counter()
        self._step(ids)
        self._synchronize()
        return (time.perf_counter() - start) * 1e3

    def peak(self) -> float | None:
        """Most MiB that the allocator held during a step; None on the CPU."""
        if self._device.type != "cuda":
            return None
        self._release()
        torch.cuda.reset_peak_memory_stats()
        self._step(self._batch(self._plan.B))
        self._synchronize()
        return torch.cuda.max_memory_allocated() / MIB

    def largest(self) -> dict[str, Any]:
        """The largest batch of which a step fits, how long that step takes, and recompiles."""
        stats = torch._dynamo.utils.counters["stats"]
        before = stats["unique_graphs"]
        found = largest_that_fits(self._fits, self._plan.traced_B, self._plan.largest_B)
        took_ms = None
        if found and self._fits(found, keep_cache=True):  # so that no time goes to allocation
            try:
                took_ms = self._timed_ms(self._batch(found))
            except torch.OutOfMemoryError:
                print("    no second step fits behind the first", flush=True)
        return {"B": found, "ms": took_ms, "recompiles": stats["unique_graphs"] - before}

    def _fits(self, B: int, keep_cache: bool = False) -> bool:
        """Whether a step of B sequences fits into the memory that is allowed."""
        self._release()
        fits = True
        try:
            self._step(self._batch(B))
            self._synchronize()
        except torch.OutOfMemoryError:
            fits = False  # what the traceback holds is released behind the handler
        if not keep_cache:
            self._release()
        print(f"    B={B}: {'fits' if fits else 'does not fit'}", flush=True)
        return fits

    def _release(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def largest_that_fits(fits: Callable[[int], bool], start: int, limit: int) -> int:
    """The largest number that fits, if every smaller one does too.

    Args:
        fits: Says whether a number fits.
        start: Where to look first, at least 1.
        limit: The largest number to try.

    Returns:
        A number in ``[0, limit]``; 0 if not even 1 fits.
    """
    low, high = 0, limit + 1  # low fits, high does not
    probe = min(start, limit)
    while high - low > 1:
        if fits(probe):
            low = probe
        else:
            high = probe
        probe = min(2 * low, limit) if high > limit else (low + high) // 2
    return low


def make_trainer(setting: str, plan: Plan, device_type: str, dynamic: bool) -> Handler:
    """What a worker runs: a `Trainer` that is asked for its methods by name."""
    trainer = Trainer(setting, plan, device_type, dynamic)
    return lambda name: getattr(trainer, name)()


def main(options: argparse.Namespace) -> int:
    """Measures, prints and appends to the results.

    Args:
        options: ``device``, ``tiny``, ``rounds``, ``largest`` and ``out``.
    """
    device_type = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_type == "cpu" and not options.tiny:
        raise ValueError("device: the model is too large for a CPU; expected --tiny with it")
    plan = TINY if options.tiny else FULL
    rows = {setting: _row(setting, plan) for setting in SETTINGS}
    samples: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    timed = {s: Worker(make_trainer, s, plan, device_type, False) for s in SETTINGS}
    capped = {}
    if options.largest:
        capped = {s: Worker(make_trainer, s, plan, device_type, True) for s in SETTINGS}
    workers = [*timed.items(), *capped.items()]
    try:
        for _, worker in workers:
            worker.send("prepare")
        for setting, worker in workers:
            answer = _receive(rows[setting], worker, PREPARE_S)
            if answer is not None and worker is timed[setting]:
                rows[setting].compile_s, rows[setting].loss = answer["compile_s"], answer["loss"]
                rows[setting].parameters = answer["parameters"]
            print(f"  prepared {setting}: {answer or rows[setting].error}", flush=True)
        for turn in range(options.rounds):
            for setting in SETTINGS if turn % 2 == 0 else SETTINGS[::-1]:
                taken = _ask(rows[setting], timed[setting], "steps")
                samples[setting] += taken or []
        for setting in SETTINGS:
            rows[setting].peak_mib = _ask(rows[setting], timed[setting], "peak")
            timed[setting].close()
            _fill_times(rows[setting], samples[setting])
        _print_times(rows)
        for setting, worker in capped.items():
            answer = _ask(rows[setting], worker, "largest")
            worker.close()
            if answer is None:
                continue
            rows[setting].cap_gb = plan.cap_gb if device_type == "cuda" else None
            rows[setting].largest_tokens = answer["B"] * plan.T
            rows[setting].largest_ms = answer["ms"]
            rows[setting].recompiles = answer["recompiles"]
            print(f"rewrite {setting}: at most {answer['B'] * plan.T} tokens, {answer}", flush=True)
    finally:
        for _, worker in workers:
            worker.close()
        machine = records.this_machine(device_type)
        path = records.append(list(rows.values()), machine, options.out, "end-to-end-")
        print(f"-> {path}", flush=True)
    return 1 if any(row.error for row in rows.values()) else 0


def _row(setting: str, plan: Plan) -> EndToEndRow:
    sizes = plan.config
    return EndToEndRow(
        setting,
        0,
        sizes.layers,
        sizes.hidden_size,
        sizes.vocab_size,
        plan.B,
        plan.T,
        "bfloat16",
    )


def _receive(row: EndToEndRow, worker: Worker, timeout_s: float) -> Any:
    """An answer, or None, the reason in the row, and the worker ended."""
    try:
        return worker.receive(timeout_s)
    except WorkerError as error:
        row.error = row.error or str(error)
    worker.close()
    return None


def _ask(row: EndToEndRow, worker: Worker, message: str) -> Any:
    try:
        worker.send(message)
    except WorkerError as error:
        row.error = row.error or str(error)
        return None
    return _receive(row, worker, ANSWER_S)


def _fill_times(row: EndToEndRow, samples: list[float]) -> None:
    if len(samples) > 1:
        quantiles = statistics.quantiles(samples, n=10, method="inclusive")
        row.p20_ms, row.p80_ms = quantiles[1], quantiles[7]
    if samples:
        row.median_ms = statistics.median(samples)


def _print_times(rows: dict[str, EndToEndRow]) -> None:
    for row in rows.values():
        print(
            f"rewrite {row.rewrite}: {records.cell_text(row.median_ms)} ms a step "
            f"({records.cell_text(row.p20_ms)} to {records.cell_text(row.p80_ms)}), peak "
            f"{records.cell_text(row.peak_mib)} MiB, loss {records.cell_text(row.loss)} {row.error}"
        )
    off, on = rows["off"], rows["on"]
    if off.median_ms and on.median_ms:
        print(f"step time on / off: {on.median_ms / off.median_ms:.3f}", flush=True)
    if off.peak_mib and on.peak_mib:
        print(f"peak on / off: {on.peak_mib / off.peak_mib:.3f}", flush=True)
