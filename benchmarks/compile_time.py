"""Time until the first step of a compiled model is done: ``python -m benchmarks compile-time``."""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from benchmarks import records
from benchmarks.losses import kd_ce_loss
from benchmarks.providers import find_own_packages, require_rewrite
from benchmarks.workers import Handler, Worker, WorkerError

#: Heads of the model, and how many projections the rewrite has to find in each.
HEADS = {"ce": 1, "kd": 2}
PROVIDERS = ("compile", "rewritten")
READY_S = 400.0
COMPILE_S = 400.0


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch; N is ``B * T``."""

    B: int
    T: int
    D: int
    V: int
    layers: int = 2
    heads: int = 8


GPU_SIZES = Sizes(4, 512, 512, 32000)
CPU_SIZES = Sizes(2, 32, 64, 512)


@dataclass
class CompileRow:
    """Compile time of one model under one provider.

    Attributes:
        head: ``ce`` (cross entropy) or ``kd`` (distillation mixed with cross entropy).
        N: Rows.
        D: Hidden size.
        V: Vocabulary size.
        layers: Transformer blocks.
        dtype: Of the parameters.
        provider: ``compile`` or ``rewritten``.
        rounds: Processes measured.
        median_s: Median time until the first step, forward and backward, is done.
        min_s: Least.
        max_s: Most.
        ratio: Median over that of ``compile``.
        error: Why there is no measurement.
    """

    head: str
    N: int
    D: int
    V: int
    layers: int
    dtype: str
    provider: str
    rounds: int = 0
    median_s: float | None = None
    min_s: float | None = None
    max_s: float | None = None
    ratio: float | None = None
    error: str = ""


class Distilled(nn.Module):
    """A student that learns from the hidden states of a teacher, whose head is frozen."""

    def __init__(self, student: nn.Module, D: int, V: int) -> None:
        super().__init__()
        self.student = student
        self.teacher_head = nn.Linear(D, V, bias=False).requires_grad_(False)

    def forward(self, idx: Tensor, targets: Tensor, teacher_hidden: Tensor) -> Tensor:
        """Loss of tokens ``[B, T]``, targets ``[B, T]`` and hidden states ``[B, T, D]``."""
        logits = self.student(idx)
        with torch.no_grad():
            teacher_logits = self.teacher_head(teacher_hidden)
        student = logits.view(-1, logits.size(-1)).float()
        teacher = teacher_logits.view(-1, teacher_logits.size(-1)).float()
        return kd_ce_loss(student, teacher, targets.view(-1))


def make_worker(head: str, provider: str, sizes: Sizes, device_type: str) -> Handler:
    """In a process of its own: model and batch, then on the second message the measurement."""
    find_own_packages()
    demo = importlib.import_module("greyhound_ops.demo.model")
    lowering = importlib.import_module("greyhound_lowering")
    device = torch.device(device_type)
    dtype = _dtype(device_type)
    torch.manual_seed(0)
    config = demo.GPTConfig(sizes.V, sizes.T, sizes.layers, sizes.heads, sizes.D)
    model = demo.GPT(config)
    if head == "kd":
        model = Distilled(model, sizes.D, sizes.V)
    model = model.to(device, dtype)
    batch = torch.randint(sizes.V, (2, sizes.B, sizes.T), device=device).unbind()
    if head == "kd":
        batch = (*batch, torch.randn(sizes.B, sizes.T, sizes.D, device=device, dtype=dtype))

    def warm_up() -> None:
        """What both providers need and neither is to blame for: libraries, Inductor's workers."""
        model(*batch).backward()
        model.zero_grad(set_to_none=True)
        x = torch.randn(1024, device=device, requires_grad=True)
        torch.compile(lambda x: F.gelu(x).sin().sum())(x).backward()
        _synchronize(device)

    def measure() -> float:
        on: AbstractContextManager[Any] = nullcontext()
        if provider == "rewritten":
            on = lowering.enabled(min_logits_bytes=0)
        lowering.clear_report()
        with on:
            start = time.perf_counter()
            torch.compile(model)(*batch).backward()
            _synchronize(device)
            seconds = time.perf_counter() - start
        if provider == "rewritten":
            require_rewrite(lowering, HEADS[head])
        elif lowering.explain().decisions:
            raise RuntimeError("the rewrite ran where torch.compile alone was to be measured")
        return seconds

    return lambda message: {"ready": warm_up, "measure": measure}[message]()


def _dtype(device_type: str) -> torch.dtype:
    return torch.bfloat16 if device_type == "cuda" else torch.float32


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_round(
    kinds: list[tuple[str, str]], sizes: Sizes, device_type: str
) -> dict[tuple[str, str], float | str]:
    """Measures each kind once, in its own process with cold caches.

    The processes get ready side by side; then one after the other compiles, alone.

    Args:
        kinds: Pairs of head and provider, in the order to measure.
        sizes: Of the model.
        device_type: ``cuda`` or ``cpu``.

    Returns:
        Seconds of each kind, or why there are none.
    """
    found: dict[tuple[str, str], float | str] = {}
    workers = {kind: Worker(make_worker, *kind, sizes, device_type, cold=True) for kind in kinds}
    try:
        for worker in workers.values():
            worker.send("ready")
        for kind, worker in workers.items():
            try:
                worker.receive(READY_S)
            except WorkerError as error:
                found[kind] = str(error)
        for kind, worker in workers.items():
            if kind in found:
                continue
            try:
                found[kind] = float(worker.ask("measure", COMPILE_S))
            except WorkerError as error:
                found[kind] = str(error)
    finally:
        for worker in workers.values():
            worker.close()
    return found


def main(options: argparse.Namespace) -> int:
    """Measures, prints and appends to the results.

    Args:
        options: ``device``, ``rounds``, ``heads`` and ``out``.
    """
    device_type = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    sizes = GPU_SIZES if device_type == "cuda" else CPU_SIZES
    heads = options.heads.split(",")
    if unknown := set(heads) - set(HEADS):
        raise ValueError(f"unknown head {', '.join(unknown)}: expected {', '.join(HEADS)}")
    if options.rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {options.rounds}")
    kinds = [(head, provider) for head in heads for provider in PROVIDERS]
    samples: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    errors: dict[tuple[str, str], str] = {}
    for turn in range(options.rounds):
        order = kinds if turn % 2 == 0 else kinds[::-1]
        for kind, value in measure_round(order, sizes, device_type).items():
            if isinstance(value, str):
                errors[kind] = value
            else:
                samples[kind].append(value)
            shown = value if isinstance(value, str) else f"{value:.2f} s"
            print(f"  round {turn + 1} {kind[0]} {kind[1]}: {shown}", flush=True)

    rows = []
    for head, provider in kinds:
        taken, base = samples[head, provider], samples[head, "compile"]
        row = CompileRow(
            head,
            sizes.B * sizes.T,
            sizes.D,
            sizes.V,
            sizes.layers,
            str(_dtype(device_type)).removeprefix("torch."),
            provider,
            len(taken),
            error=errors.get((head, provider), ""),
        )
        if taken:
            row.median_s, row.min_s, row.max_s = statistics.median(taken), min(taken), max(taken)
            if base:
                row.ratio = row.median_s / statistics.median(base)
        rows.append(row)
        if row.median_s is not None:
            ratio = "" if row.ratio is None else f", {row.ratio:.2f} of compile"
            print(f"{head:3} {provider:10} {row.median_s:.2f} s{ratio} {row.error}")
        else:
            print(f"{head:3} {provider:10} {row.error}")
    machine = records.this_machine(device_type)
    print(f"-> {records.append(rows, machine, options.out, 'compile-')}", flush=True)
    return 1 if errors else 0
