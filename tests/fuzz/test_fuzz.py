"""Random calls of every op family against float64, no further away than plain torch.

``GREYHOUND_FUZZ_EXAMPLES`` asks for more examples of each family, other ones in every run;
``GREYHOUND_FUZZ_FIGURES`` names a file for what was tried and how close it came.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.engine import Case, judge, judge_order, write_figures
from fuzz.families import FAMILIES

MORE = os.environ.get("GREYHOUND_FUZZ_EXAMPLES")
EXAMPLES = int(MORE or 25)

by_family = pytest.mark.parametrize("name", FAMILIES)


def examples(count: int) -> Callable[..., Any]:
    return settings(
        max_examples=count, derandomize=MORE is None, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip


def cases(name: str, **fixed: Any) -> st.SearchStrategy[Case]:
    axes = {**FAMILIES[name].axes, **{axis: (value,) for axis, value in fixed.items()}}
    choices = {axis: st.sampled_from(values) for axis, values in axes.items()}
    return st.fixed_dictionaries({**choices, "seed": st.integers(0, 2**31 - 1)})


@by_family
def test_against_float64(name: str, device: torch.device) -> None:
    @examples(EXAMPLES)
    @given(cases(name))
    def one(case: Case) -> None:
        judge(name, FAMILIES[name].problem(case, device), case)

    try:
        one()
    finally:
        write_figures()


@pytest.mark.parametrize("name", [name for name, each in FAMILIES.items() if each.permutes])
def test_order_and_chunks_of_the_rows(name: str, device: torch.device) -> None:
    fixed: dict[str, Any] = {"dtype": torch.float64, "kernels": "torch"}

    @examples(max(EXAMPLES // 4, 10))
    @given(cases(name, **fixed), st.sampled_from([1, 2, 3, 1000, None]), st.integers(0, 2**20))
    def one(case: Case, chunk_size: int | None, seed: int) -> None:
        if len(case["rows"]) != 1:
            case = {**case, "rows": (9,)}
        judge_order(FAMILIES[name].problem(case, device), chunk_size, seed)

    one()
