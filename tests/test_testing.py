"""The judges must be able to say no."""

from __future__ import annotations

import pytest
import torch

from greyhound_ops.testing import assert_within_budget, peak_memory, relative_error


def test_relative_error() -> None:
    truth = torch.tensor([3.0, 4.0])
    assert relative_error(truth, truth) == 0.0
    assert relative_error(truth + torch.tensor([0.0, 0.5]), truth) == pytest.approx(0.1)
    assert relative_error(torch.tensor([0.25]), torch.tensor([0.0])) == 0.25


@pytest.mark.parametrize(
    ("value", "accepted"),
    [(1.0, True), (1.01, True), (1.0109, True), (1.0121, False), (float("nan"), False)],
)
def test_budget(value: float, accepted: bool) -> None:
    arguments = (torch.tensor(value), torch.tensor(1.01), torch.tensor(1.0))
    if accepted:
        assert_within_budget("x", *arguments, slack=1e-3)
        return
    with pytest.raises(AssertionError, match=r"^x: relative error"):
        assert_within_budget("x", *arguments, slack=1e-3)


def test_budget_compares_shapes() -> None:
    one = torch.ones(2)
    with pytest.raises(AssertionError, match="shape"):
        assert_within_budget("x", torch.ones(2, 1), one, one, slack=1.0)


def test_peak_memory_counts_what_lives_at_once(device: torch.device) -> None:
    unit = 2**20
    torch.ones(8, device=device) @ torch.ones(8, device=device)  # workspaces of the libraries
    with peak_memory(device) as peak:
        first = torch.empty(2 * unit, dtype=torch.uint8, device=device)
        del first
        second = torch.empty(unit, dtype=torch.uint8, device=device)
        third = second.float()  # 4 units beside 1
        del third
        kept = torch.empty(unit, dtype=torch.uint8, device=device)
    assert kept.numel() == second.numel()
    assert 5 * unit <= peak.bytes <= 5.1 * unit


def test_peak_memory_counts_temporaries_inside_an_operator() -> None:
    value = torch.ones(2**18, 4)
    with peak_memory("cpu") as peak:
        torch.nn.functional.cross_entropy(value, torch.zeros(2**18, dtype=torch.int64))
    assert peak.bytes >= value.nbytes
