"""The comparison of loss curves in ``benchmarks/convergence.py``."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

import pytest
import torch

from benchmarks import convergence
from benchmarks.convergence import Point
from benchmarks.records import Machine
from greyhound_ops.demo import text

MACHINE = Machine(gpu="Some GPU", driver="1", torch="2", triton="3", commit="abc")
STEPS = 6
SETTINGS = dataclasses.replace(
    convergence.CPU,
    steps=STEPS,
    seeds=(3, 5),
    n_layer=1,
    n_embd=32,
    learning_rate=2e-2,
    dtype=torch.float32,
)


@pytest.fixture(scope="module")
def corpus() -> text.Corpus:
    words = text.tokenize(Path(text.__file__).read_text(encoding="utf-8"))
    known = sorted(set(words))
    ids = torch.tensor([known.index(word) for word in words])
    size = -(-len(known) // 64) * 64
    return text.Corpus(ids, ids, tuple(known), size, "a source file")


@pytest.fixture(scope="module")
def points(corpus: text.Corpus) -> list[Point]:
    return convergence.train(SETTINGS, torch.device("cpu"), corpus)


def test_curves_of_a_seed_agree_and_those_of_two_seeds_do_not(points: list[Point]) -> None:
    assert len(points) == 2 * 2 * STEPS
    found = convergence.compare(points)
    assert found.largest_difference < 1e-4
    assert found.seed_spread_mean > 1e-3
    # A model of words that it has seen learns at once: these are curves, not lines.
    losses = convergence.curves(points, "on")
    assert (losses[:, -1] < losses[:, 0] - 0.05).all()


def test_a_seed_gives_the_same_curve_every_time(corpus: text.Corpus, points: list[Point]) -> None:
    again = convergence.train(
        dataclasses.replace(SETTINGS, seeds=(5,)), torch.device("cpu"), corpus
    )
    assert again == [point for point in points if point.seed == 5]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_rewrite_that_does_not_fire_is_an_error(
    corpus: text.Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GREYHOUND_REWRITE", "0")
    settings = dataclasses.replace(SETTINGS, steps=1, seeds=(0,))
    with pytest.raises(RuntimeError, match=r"rewrite on: .* no projection followed by a loss"):
        convergence.train(settings, torch.device("cpu"), corpus)


def made(off: list[list[float]], on: list[list[float]]) -> list[Point]:
    return [
        Point(seed, step, rewrite, loss)
        for rewrite, runs in (("off", off), ("on", on))
        for seed, losses in enumerate(runs)
        for step, loss in enumerate(losses)
    ]


def test_comparison_of_known_curves() -> None:
    off, on = [[4.0, 3.0, 2.0], [4.5, 3.5, 2.25]], [[4.0, 3.25, 2.0], [4.5, 3.5, 3.25]]
    found = convergence.compare(made(off, on))
    assert found.identical_steps == 1
    assert (found.largest_difference, found.difference_step) == (1.0, 2)
    assert found.seed_spread_there == 0.25
    assert found.seed_spread_mean == pytest.approx((0.5 + 0.5 + 0.25) / 3)
    assert found.mean_difference == pytest.approx(1.25 / 6)
    assert found.difference_rms == pytest.approx(math.sqrt((0.25**2 + 1) / 6))
    assert found.mean_difference_largest == 0.5
    assert found.steps_inside == pytest.approx(2 / 3)  # 2.625 is above both of 2 and 2.25
    assert (found.final_off, found.final_on) == (2.125, 2.625)


@pytest.mark.parametrize(("off", "on"), [([[1.0]], [[1.0]]), ([[1.0], [1.0]], [[1.0]])])
def test_comparison_needs_two_seeds_of_both(off: list[list[float]], on: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="two or more seeds"):
        convergence.compare(made(off, on))


def test_file_and_plot(points: list[Point], tmp_path: Path) -> None:
    path = tmp_path / "convergence-some-gpu.csv"
    facts = convergence.write(points, path, MACHINE)
    read, line = convergence.load(path)
    assert line == facts
    written, read_back = ([tuple(vars(p).values())[:3] for p in each] for each in (points, read))
    assert read_back == written
    losses = [torch.tensor([point.loss for point in each]) for each in (points, read)]
    assert torch.equal(*losses)  # as float32, which is what they were
    assert "gpu Some GPU" in facts
    pytest.importorskip("matplotlib")
    options = argparse.Namespace(results=path, assets=tmp_path)
    assert convergence.main(options) == 0
    first = (tmp_path / "convergence.svg").read_bytes()
    assert convergence.main(options) == 0
    assert (tmp_path / "convergence.svg").read_bytes() == first
    path.write_text("# x\nseed,loss\n")
    with pytest.raises(ValueError, match="has columns"):
        convergence.load(path)
