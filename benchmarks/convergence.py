"""Trains a small GPT with the rewrite off and on over several seeds and compares the curves.

Every run sees the same batches in the same order; a seed decides the weights alone. Curves of one
seed differ by rounding, which training amplifies; curves of different seeds show how much a curve
may move without anything being wrong.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import greyhound_lowering
from benchmarks.records import Machine, this_machine
from benchmarks.report import ASSETS
from greyhound_ops.demo import text
from greyhound_ops.demo.model import GPTConfig
from greyhound_ops.demo.train import Run, Setup, draw_batches

COLUMNS = ("seed", "step", "rewrite", "loss")
REWRITES = ("off", "on")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is trained, and for how long.

    Attributes:
        steps: Training steps of a run.
        seeds: Seeds of the weights; each is trained with the rewrite off and on.
        batch: Sequences in a step.
        seq: Tokens in a sequence.
        chunk_size: Rows that the rewritten loss takes at a time.
        max_vocab: Cap on the words of the vocabulary.
        n_layer: Number of blocks.
        n_head: Number of attention heads.
        n_embd: Hidden size.
        learning_rate: AdamW's.
        dtype: Of autocast; float32 for none.
    """

    steps: int = 500
    seeds: tuple[int, ...] = (0, 1, 2)
    batch: int = 16
    seq: int = 256
    chunk_size: int = 1024
    max_vocab: int = 16384
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 256
    learning_rate: float = 1e-3
    dtype: torch.dtype = torch.bfloat16


#: What a CPU trains in a few minutes.
CPU = Settings(
    steps=40,
    batch=4,
    seq=64,
    chunk_size=64,
    max_vocab=4096,
    n_layer=2,
    n_embd=64,
)


@dataclasses.dataclass(frozen=True)
class Point:
    """Loss of one step of one run.

    Attributes:
        seed: Seed of the weights.
        step: Number of the step, from 0.
        rewrite: ``"off"`` or ``"on"``.
        loss: Mean cross entropy of the batch, before the step.
    """

    seed: int
    step: int
    rewrite: str
    loss: float


def train(
    settings: Settings,
    device: torch.device,
    corpus: text.Corpus,
    log: Callable[[str], None] = lambda line: None,
) -> list[Point]:
    """Trains every seed with the rewrite off and on.

    Args:
        settings: What to train.
        device: Where.
        corpus: The text.
        log: Called with a line per run.

    Returns:
        A point per step of every run.

    Raises:
        RuntimeError: The rewrite did not fire where it was on, or fired where it was off.
    """
    batches = draw_batches(
        corpus.train, count=settings.steps, batch=settings.batch, seq=settings.seq, seed=0
    )
    model = GPTConfig(
        vocab_size=corpus.vocab_size,
        block_size=settings.seq,
        n_layer=settings.n_layer,
        n_head=settings.n_head,
        n_embd=settings.n_embd,
    )
    # Whatever GREYHOUND_REWRITE says: one of the two is plain.
    greyhound_lowering.disable()
    compilers: dict[str, Callable[[Any], Any]] = {
        "off": lambda model: torch.compile(model),
        "on": lambda model: torch.compile(
            model,
            backend="greyhound",
            options={"greyhound.min_logits_bytes": 0, "greyhound.chunk_size": settings.chunk_size},
        ),
    }
    points = []
    # A graph that this process has compiled before would run again without a word in the report.
    torch.compiler.reset()
    with _deterministic():
        for rewrite in REWRITES:
            greyhound_lowering.clear_report()
            for seed in settings.seeds:
                setup = Setup(
                    model=model,
                    device=device,
                    dtype=settings.dtype,
                    learning_rate=settings.learning_rate,
                    seed=seed,
                    train=batches,
                    validation=[],
                )
                run = Run(setup, compilers[rewrite])
                losses = [run.step(index) for index in range(settings.steps)]
                points += [Point(seed, step, rewrite, loss) for step, loss in enumerate(losses)]
                log(f"  seed {seed} rewrite {rewrite:3} {losses[0]:.4f} -> {losses[-1]:.4f}")
            report = greyhound_lowering.explain()
            if (report.rewritten_count > 0) != (rewrite == "on"):
                raise RuntimeError(
                    f"rewrite {rewrite}: expected it to fire only where it is on, got: {report}"
                )
            if rewrite == "on":
                log(f"{report}")
    return points


@contextmanager
def _deterministic() -> Iterator[None]:
    """Without atomics in the sums of torch: the curves of a seed then differ by the rewrite only.

    ``CUBLAS_WORKSPACE_CONFIG`` counts from the first product of a process on.
    """
    before = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=only_warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        if before is None:
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]


def write(points: list[Point], path: Path, machine: Machine) -> str:
    """Writes the points over an older file, below a comment line that tells the machine.

    Returns:
        What the comment line says.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {name: value for name, value in dataclasses.asdict(machine).items() if value}
    facts = ", ".join(f"{name} {value}" for name, value in known.items())
    with path.open("w", newline="") as file:
        file.write(f"# {facts}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        # Nine digits: a float32 as it is.
        writer.writerows([p.seed, p.step, p.rewrite, f"{p.loss:.9g}"] for p in points)
    return facts


def load(path: Path) -> tuple[list[Point], str]:
    """Reads what `write` wrote.

    Returns:
        The points, and the line that tells the machine.

    Raises:
        ValueError: The file has other columns.
    """
    with path.open(newline="") as file:
        first = file.readline()
        rows = csv.DictReader(file)
        if not first.startswith("# ") or tuple(rows.fieldnames or ()) != COLUMNS:
            raise ValueError(
                f"{path} has columns {rows.fieldnames}, expected a comment line and {list(COLUMNS)}"
            )
        points = [
            Point(int(row["seed"]), int(row["step"]), row["rewrite"], float(row["loss"]))
            for row in rows
        ]
    return points, first[2:].strip()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far the rewrite moves a curve, beside how far a seed does. All losses are in nats.

    Attributes:
        identical_steps: Steps at the beginning in which every seed's two losses are equal.
        largest_difference: Between the two losses of one seed in one step.
        difference_step: Where that is.
        difference_rms: Root mean square over steps and seeds.
        mean_difference: On minus off, averaged over seeds and steps: a bias would show here.
        seed_spread_there: Largest minus smallest loss over the seeds, rewrite off, at that step.
        seed_spread_mean: The same, averaged over steps.
        mean_difference_largest: Between the means over seeds, on and off, of one step.
        steps_inside: Share of steps in which the mean with the rewrite lies between the smallest
            and the largest loss without it.
        final_off: Mean over seeds and the last tenth of the steps, rewrite off.
        final_on: The same with the rewrite.
    """

    identical_steps: int
    largest_difference: float
    difference_step: int
    difference_rms: float
    mean_difference: float
    seed_spread_there: float
    seed_spread_mean: float
    mean_difference_largest: float
    steps_inside: float
    final_off: float
    final_on: float

    def __str__(self) -> str:
        return "\n".join(
            (
                f"on - off, same seed: largest {self.largest_difference:.2e} (step "
                f"{self.difference_step}), rms {self.difference_rms:.2e}, "
                f"mean {self.mean_difference:+.2e}",
                f"first steps with equal losses: {self.identical_steps}",
                f"spread between seeds, off: {self.seed_spread_there:.2e} at that step, "
                f"{self.seed_spread_mean:.2e} on average",
                f"means over seeds: largest difference {self.mean_difference_largest:.2e}; on "
                f"lies between the seeds of off in {self.steps_inside:.1%} of the steps",
                f"last tenth of the steps: off {self.final_off:.4f}, on {self.final_on:.4f}",
            )
        )


def compare(points: list[Point]) -> Comparison:
    """Compares the curves with the rewrite to those without.

    Args:
        points: What `train` returns; at least two seeds.

    Raises:
        ValueError: Fewer than two seeds, or runs of different lengths.
    """
    off, on = (curves(points, rewrite) for rewrite in REWRITES)
    if off.shape != on.shape or off.shape[0] < 2:
        raise ValueError(
            f"points: expected the same two or more seeds and steps off and on, got "
            f"{list(off.shape)} and {list(on.shape)}"
        )
    difference = on - off
    largest = difference.abs().amax(0)
    step = int(largest.argmax())
    low, high = off.amin(0), off.amax(0)
    mean_on = on.mean(0)
    last = max(off.shape[1] // 10, 1)
    differ = (largest > 0).nonzero()
    return Comparison(
        identical_steps=int(differ[0]) if len(differ) else off.shape[1],
        largest_difference=float(largest[step]),
        difference_step=step,
        difference_rms=float(difference.square().mean().sqrt()),
        mean_difference=float(difference.mean()),
        seed_spread_there=float((high - low)[step]),
        seed_spread_mean=float((high - low).mean()),
        mean_difference_largest=float((mean_on - off.mean(0)).abs().max()),
        steps_inside=float(((mean_on >= low) & (mean_on <= high)).double().mean()),
        final_off=float(off[:, -last:].mean()),
        final_on=float(on[:, -last:].mean()),
    )


def curves(points: list[Point], rewrite: str) -> torch.Tensor:
    """Losses ``[seeds, steps]``, float64, of the runs with the rewrite on or off."""
    chosen = sorted((p.seed, p.step, p.loss) for p in points if p.rewrite == rewrite)
    seeds = len({seed for seed, _, _ in chosen})
    losses = torch.tensor([loss for _, _, loss in chosen], dtype=torch.float64)
    return losses.view(seeds, -1) if seeds else losses.view(0, 0)


def plot(points: list[Point], path: Path, title: str) -> Path:
    """Draws mean and spread of both, and what lies between them on a scale of its own.

    Returns:
        The path.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "greyhound"  # the same plot gives the same file
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    off, on = (curves(points, rewrite) for rewrite in REWRITES)
    steps = list(range(off.shape[1]))
    figure, (losses, gaps) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, runs, color, style in (("off", off, "C0", "-"), ("on", on, "C1", "--")):
        low, high = runs.amin(0).tolist(), runs.amax(0).tolist()
        losses.fill_between(steps, low, high, color=color, alpha=0.25, linewidth=0)
        mean = runs.mean(0).tolist()
        losses.plot(steps, mean, style, color=color, label=f"rewrite {name}", linewidth=1)
    losses.set_xlabel("step")
    losses.set_ylabel(f"loss: mean and range of {off.shape[0]} seeds")
    losses.legend()
    spread = (off.amax(0) - off.amin(0)).tolist()
    gaps.plot(steps, spread, color="C0", label="between seeds, off", linewidth=1)
    difference = (on - off).abs().amax(0).tolist()
    gaps.plot(steps, difference, color="C1", label="on against off, same seed", linewidth=1)
    gaps.set_yscale("log")
    gaps.set_xlabel("step")
    gaps.set_ylabel("largest difference of losses")
    gaps.legend()
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return path


def main(options: argparse.Namespace) -> int:
    """Trains, writes the CSV, prints the comparison and draws it where matplotlib is installed.

    Raises:
        ValueError: An option out of range.
    """
    if options.results is not None:
        points, facts = load(options.results)
    else:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        settings = Settings() if device.type == "cuda" else CPU
        if options.steps is not None:
            settings = dataclasses.replace(settings, steps=options.steps)
        seeds = tuple(dict.fromkeys(int(seed) for seed in options.seeds.split(",")))
        settings = dataclasses.replace(settings, seeds=seeds)
        if settings.steps < 1 or len(settings.seeds) < 2:
            raise ValueError(
                f"--steps, --seeds: expected at least one step and two seeds, got "
                f"{settings.steps} and {options.seeds}"
            )
        machine = this_machine(device.type)
        corpus = text.load(settings.max_vocab)
        rows = settings.batch * settings.seq
        print(
            f"{corpus.origin}: V={corpus.vocab_size}, {rows} rows a step in chunks of "
            f"{settings.chunk_size}, D={settings.n_embd}, {settings.n_layer} layers, "
            f"{settings.dtype}, {settings.steps} steps on {machine.gpu}",
            flush=True,
        )
        # A run measures the memory of a step; on a CPU by torch's profiler, which would say so.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        start = time.perf_counter()
        points = train(settings, device, corpus, log=lambda line: print(line, flush=True))
        print(f"{time.perf_counter() - start:.1f} s")
        path = options.out / f"convergence-{machine.slug}.csv"
        facts = write(points, path, machine)
        print(f"-> {path}")
    print(compare(points))
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed; --results draws the CSV where it is")
    else:
        print(f"-> {plot(points, (options.assets or ASSETS) / 'convergence.svg', facts)}")
    return 0
